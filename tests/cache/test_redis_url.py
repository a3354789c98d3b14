"""What `--redis-url` takes, and that what it refuses is not repeated."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.errors import Misconfigured
from cache.redis_url import RedisUrl, parse_redis_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:///run/v.sock", RedisUrl(kind="unix", path="/run/v.sock")),
        ("unix:///run/a%20b.sock?db=1&password=p", RedisUrl(kind="unix", path="/run/a b.sock", db=1, password="p")),
        ("unix:///a%40b", RedisUrl(kind="unix", path="/a@b")),
        ("redis://h", RedisUrl(kind="single", hosts=(("h", 6379),))),
        ("redis://u:p%40@h:1/2", RedisUrl(kind="single", hosts=(("h", 1),), db=2, username="u", password="p@")),
        ("redis://:a@b@h", RedisUrl(kind="single", hosts=(("h", 6379),), password="a@b")),
        ("redis://[::1]:7", RedisUrl(kind="single", hosts=(("::1", 7),))),
        ("redis://[::1]/3", RedisUrl(kind="single", hosts=(("::1", 6379),), db=3)),
        (
            "rediss://h?ssl_cert_reqs=none",
            RedisUrl(kind="single", tls=True, hosts=(("h", 6379),), ssl=(("ssl_cert_reqs", "none"),)),
        ),
        ("redis+cluster://a:1,b", RedisUrl(kind="cluster", hosts=(("a", 1), ("b", 6379)))),
        (
            "rediss+sentinel://:p@a,b:5/main/4?sentinel_password=q",
            RedisUrl(
                kind="sentinel",
                tls=True,
                hosts=(("a", 26379), ("b", 5)),
                service="main",
                db=4,
                password="p",
                sentinel_password="q",
            ),
        ),
    ],
)
def test_it_is_understood(text: str, expected: RedisUrl) -> None:
    assert parse_redis_url(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "h:6379", "http://h", "redis://", "redis://h:0", "redis://h:65536", "redis://h:x", "redis://h:1:2",
        "redis://h/x", "redis://h/0/1", "redis://h/99999", "redis://h?db=x", "redis://h?socket_timeout=1",
        "redis://h?ssl_cert_reqs=none", "rediss://h?ssl_cert_reqs=maybe", "unix://relative", "unix://", "unix://h/p", "unix://u:@/p@h",
        "redis+cluster://a,,b", "redis+cluster://a/1", "redis+sentinel://a", "redis://[::1", "redis://[::1]x",
        "redis://h:" + "9" * 5000, "redis+cluster://" + ",".join(["h"] * 65), "redis://h/-1", "redis://h/\u0663",
    ],
)  # fmt: skip
def test_it_is_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"^--redis-url: "):
        parse_redis_url(text)


SCHEMES = ("redis", "rediss", "redis+cluster", "redis+sentinel", "unix")


@settings(max_examples=1000)
@given(st.text(st.sampled_from("/?#@:%,[]&=x")), st.sampled_from(SCHEMES))
@example("@/", "unix")
def test_no_password_is_ever_shown(noise: str, scheme: str) -> None:
    for password in (f"canary{noise}", f"{noise}canary", f"{noise}canary{noise}canary"):
        try:
            shown = repr(parse_redis_url(f"{scheme}://user:{password}@host:6379/0"))
        except Misconfigured as error:
            shown = str(error)
        assert "canary" not in shown
