"""
Logs: one shape for all, and nothing secret in any of them.
"""

import io
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import Unavailable
from telemetry import logs
from telemetry.hub import Hub
from telemetry.records import RequestRecord
from telemetry.redact import MASK, SECRET_NAMES, clean_exception, clean_text, redact

CANARY = "canary-4711"
KEY = "sk-proj-Canary4711abcdef"
Lines = Callable[[], list[dict[str, object]]]


class Prompt(msgspec.Struct):
    """An object whose repr says what it holds, as the gateway's requests are."""

    content: str


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    yield io.StringIO()
    logs.reset()


@pytest.fixture
def lines(out: io.StringIO) -> Lines:
    """Configure JSON logs; the call gives all lines so far."""
    logs.configure("debug", "json", stream=out)

    def written() -> list[dict[str, object]]:
        assert logs.flush()
        return [json.loads(line) for line in out.getvalue().splitlines()]

    return written


def everything_that_could_leak() -> None:
    """Log a canary in every way that has ever leaked somewhere."""
    log = logs.get_logger("pellucid.test")
    secret = f"{CANARY} {'long ' * 20}"
    log.info("by name", prompt=secret, messages=[{"content": secret}], content=secret, api_key=CANARY)
    log.info("by header", headers={"Authorization": CANARY}, x_api_key=CANARY, cookie=CANARY)
    log.info("nested", request={"body": secret, "options": [{"messages": secret, "X-API-Key": CANARY}]})
    log.info("by looks", note=f"Bearer {CANARY}", url=f"http://user:{CANARY}@host/?api_key={CANARY}&n=1")
    log.info("key in text %s", KEY)
    log.info("by kind", request=Prompt(secret), raw=secret.encode(), deep=[[[[[[[[Prompt(secret)]]]]]]]])
    log.info(f"authorization: {CANARY}")
    log.error("an exception as a value", error=ValueError(f"bad {secret!r}"))
    local = Prompt(secret)
    try:
        raise RuntimeError(f"cannot read {local.content!r}")
    except RuntimeError:
        log.exception("with a traceback")
        logging.getLogger("litestar").exception("from the framework, with %s", f"Bearer {CANARY}")
    logging.getLogger("uvicorn.error").info("key %s", KEY)
    logging.getLogger("uvicorn.access").info("GET /?prompt=%s", CANARY)
    logging.getLogger("anything").warning("password=%s", CANARY, extra={"prompt": secret})


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_canary_has_no_hits(format: str, out: io.StringIO) -> None:
    logs.configure("debug", format, stream=out)
    everything_that_could_leak()
    assert logs.flush()
    text = out.getvalue()
    assert CANARY not in text
    assert "Canary4711" not in text
    assert text.count(MASK) >= 12
    for said in ("by name", "nested", "with a traceback", "RuntimeError", "from the framework", "key"):
        assert said in text, "what is not secret is still said"


_errors = st.recursive(
    st.sampled_from([KeyError, RuntimeError, UnicodeError, AssertionError, StopIteration, KeyboardInterrupt]),
    lambda inner: st.tuples(st.sampled_from(["from", "during", "group", "note"]), inner),
    max_leaves=4,
)


def make(shape: object) -> BaseException:
    """An exception that has the canary wherever one can have words."""
    if isinstance(shape, type):
        error = shape(CANARY)
        assert isinstance(error, BaseException)
        return error
    assert isinstance(shape, tuple)
    how, inner = shape
    error = make(inner)
    match how:
        case "note":
            error.add_note(f"it was {CANARY}")
            return error
        case "group":
            return BaseExceptionGroup(CANARY, [error, KeyError(CANARY)])
    outer = LookupError(f"{CANARY} was not found")
    outer.__cause__, outer.__context__ = (error, None) if how == "from" else (None, error)
    return outer


@given(shape=_errors, format=st.sampled_from(["json", "console"]))
def test_where_texts_are_handled_exceptions_are_told_without_their_words(shape: object, format: str) -> None:
    out = io.StringIO()
    logs.configure("debug", format, stream=out, withheld=True)
    log = logs.get_logger("pellucid.test")
    try:
        raise make(shape)
    except BaseException as error:
        log.exception("ours", error=error)
        logging.getLogger("litestar").error("theirs", exc_info=error)
        logging.getLogger("asyncio").error("a task failed\nfuture: <Task exception=%r>", error, exc_info=True)
        logging.getLogger("uvicorn.error").error("%s", traceback.format_exc())
        logging.getLogger("other").error("by hand", exc_info=(type(error), error, error.__traceback__))
    assert logs.flush()
    text = out.getvalue()
    assert CANARY not in text
    assert text.count("raise make(shape)") >= 4, "the place is told"
    assert text.count("test_logs.py") >= 5
    assert all(said in text for said in ("ours", "theirs", "a task failed", "by hand", "[withheld]"))


def test_words_that_are_known_to_be_harmless_are_told(out: io.StringIO) -> None:
    logs.configure("info", "json", stream=out, withheld=True)
    log = logs.get_logger("pellucid.test")
    log.error("the system's", error=ConnectionRefusedError(111, "Connection refused", "/a/b"))
    log.error("our own", error=Unavailable("no answer within 50 ms"))
    log.error("neither", error=OSError(CANARY))
    assert logs.flush()
    text = out.getvalue()
    assert "ConnectionRefusedError: Connection refused" in text and "no answer within 50 ms" in text
    assert CANARY not in text and "OSError" in text


def test_a_line_says_when_who_and_what(lines: Lines) -> None:
    structlog.contextvars.bind_contextvars(request_id="r1", trace_id="t1")
    try:
        logs.get_logger("pellucid.test").info("happened", count=3, path=Path("/a/b"))
        logging.getLogger("uvicorn.error").warning("from %s", "outside")
    finally:
        structlog.contextvars.unbind_contextvars("request_id", "trace_id")
    logs.get_logger("pellucid.test").info("later")
    ours, theirs, later = lines()
    assert (
        ours
        | {
            "event": "happened",
            "level": "info",
            "logger": "pellucid.test",
            "request_id": "r1",
            "trace_id": "t1",
            "count": 3,
            "path": "/a/b",
        }
        == ours
    )
    assert str(ours["timestamp"]).endswith("Z")
    assert (theirs["event"], theirs["logger"]) == ("from outside", "uvicorn.error")
    assert (theirs["level"], theirs["request_id"]) == ("warning", "r1")
    assert "request_id" not in later


def test_the_level_holds_for_everybody(out: io.StringIO) -> None:
    logs.configure("warning", "json", stream=out)
    logs.get_logger("pellucid.test").info("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    logs.get_logger("pellucid.test").warning("heard")
    assert logs.flush()
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["heard"]


def test_the_last_configuration_holds_and_no_line_comes_twice(out: io.StringIO) -> None:
    earlier = io.StringIO()
    logs.configure("info", "json", stream=earlier)
    log = logs.get_logger("pellucid.test")
    log.info("first")
    logs.configure("info", "json", stream=out)
    log.info("second")
    assert logs.flush()
    assert [json.loads(line)["event"] for line in earlier.getvalue().splitlines()] == ["first"]
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["second"]


@pytest.mark.parametrize(("level", "format"), [("loud", "json"), ("info", "xml")])
def test_what_does_not_exist_is_refused_by_name(level: str, format: str) -> None:
    with pytest.raises(ValueError, match=r"loud|xml"):
        logs.configure(level, format)


def test_a_reader_who_stops_reading_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.entered = threading.Event()
            self.released = threading.Event()

        def write(self, text: str) -> int:
            self.entered.set()
            assert self.released.wait(30)
            return super().write(text)

    monkeypatch.setattr(logs, "LINES_MAX", 50)
    stuck = Stuck()
    logs.configure("info", "json", stream=stuck)
    try:
        log = logs.get_logger("pellucid.test")
        log.info("the first")
        assert stuck.entered.wait(10)
        for number in range(80):
            log.info("more", number=number)
        assert logs.dropped_lines() == 30
        assert not logs.flush(0.01)
        stuck.released.set()
        assert logs.flush(10)
        assert len(stuck.getvalue().splitlines()) == 51
    finally:
        stuck.released.set()
        logs.reset()


def test_a_closed_stream_is_counted_and_hurts_nobody(out: io.StringIO) -> None:
    logs.configure("info", "json", stream=out)
    out.close()
    logs.get_logger("pellucid.test").info("to nobody")
    assert logs.flush()
    assert logs.dropped_lines() == 1


def test_each_ended_request_is_one_line(lines: Lines) -> None:
    hub = Hub(model="tiny")
    for request_id, route, status in [
        ("a", "/v1/completions", 200),
        ("b", "/health", 200),
        ("c", "/ready", 503),
        ("d", "/v1/completions", 503),
    ]:
        hub.request(
            RequestRecord(
                request_id=request_id,
                outcome="stop",
                accepted_ns=0,
                finished_ns=1_500_000,
                states={"decode": 1_500_000},
                route=route,
                status=status,
            )
        )
    hub.metrics_text()
    written = [line for line in lines() if line["event"] == "request" and line["request_id"] in ("a", "b", "c", "d")]
    assert [(line["request_id"], line["level"]) for line in written] == [
        ("a", "info"),
        ("b", "debug"),
        ("c", "debug"),
        ("d", "error"),
    ]
    assert (written[0]["duration_ms"], written[0]["status"]) == (1.5, 200)


@given(name=st.sampled_from(sorted(SECRET_NAMES)), upper=st.booleans(), value=st.text(min_size=1))
def test_a_secret_name_hides_its_value_however_it_is_written(name: str, upper: bool, value: str) -> None:
    written = name.upper().replace("_", "-") if upper else name
    assert redact(None, "info", {written: value})[written] == MASK
    assert redact(None, "info", {"outer": [{written: value}]})["outer"] == [{written: MASK}]


@given(text=st.text(max_size=200))
def test_redaction_never_raises_and_is_done_once(text: str) -> None:
    once = clean_text(text)
    assert clean_text(once) == once
    clean_exception(text)


def test_ordinary_text_stays_as_it_is() -> None:
    text = "risk-averse tasks of the desk-bound: 3 tokens at http://host:8000/path, basic things"
    assert clean_text(text) == text
