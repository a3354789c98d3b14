"""
Templates that loop for ever, or make 10 GB: they fail alone, in time, and the next conversation is served.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.renderer import Renderer, RendererBusy
from gateway.template import TemplateError
from gateway.tokens import load
from gateway.vocabulary import VocabularyError
from gateway.wire import ChatMessage
from tests.http.asking import CHAT_URL, chat
from tests.http.conftest import Custom

CPU_S = 0.3
ROUNDS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ECHO = "{{ messages[0].content }}"
WICKED = "{% if messages[0].content == 'loop' %}" + ROUNDS + "{% else %}" + ECHO + "{% endif %}"


async def render(renderer: Renderer, content: str = "hi", **extra: object) -> str:
    message = ChatMessage(role="user", content=content)
    return await renderer.render([message], add_generation_prompt=True, extra=extra)


@pytest.fixture
async def wicked() -> AsyncIterator[Renderer]:
    """A template that loops for ever when it is asked to, and repeats what it is told when not."""
    renderer = Renderer(WICKED, {}, cpu_s=CPU_S)
    yield renderer
    renderer.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ROUNDS, "more than 0.3 s"),
        (
            "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{% for a in range(9999) %}{{ m() }}{% endfor %}",
            "chat template",
        ),
        ("{{ (10 ** n) ** 1000000 }}", "more than 0.3 s"),
        ("{{ 'x' * 10 ** n }}", "too much memory"),
        ("{{ ([0] * 10 ** n) | length }}", "too much memory"),
        ("{{ 'x'.ljust(10 ** n) }}", "too much memory"),
        ("{{ ('%' ~ 10 ** n ~ 'd') % 1 }}", "template"),
        ("{{ [1] | tojson(indent=10 ** n) }}", "too much memory"),
        (
            "{% set s = namespace(x='x') %}{% for a in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
            "chat template",
        ),
        ("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "longer than"),
        ("{{ messages[0].content.__class__.__mro__ }}", "template"),
    ],
)
async def test_what_a_template_must_not_do_ends_it(source: str, words: str) -> None:
    renderer = Renderer(source, {}, cpu_s=CPU_S)
    try:
        with pytest.raises(TemplateError, match=words):
            await render(renderer, n=10)
    finally:
        renderer.close()


@pytest.mark.parametrize("source", ["{{ 10 ** (10 ** 10) }}", "{% for %}", "{{ 1 | nonsense }}"])
async def test_a_template_that_is_none_is_found_at_the_start(source: str, model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text(source)
    text = load(copy)
    with pytest.raises(VocabularyError, match="chat template"):
        await text.check()
    text.close()


async def test_the_next_conversation_is_served(wicked: Renderer) -> None:
    for number in range(2):
        assert await render(wicked, f"good {number}") == f"good {number}"
        with pytest.raises(TemplateError):
            await render(wicked, "loop")
    assert await render(wicked, "last") == "last"


async def test_no_conversation_gets_another_one_s_prompt(wicked: Renderer) -> None:
    """Many at the same time, of which some are left in the middle."""

    async def ask(number: int) -> None:
        asking = asyncio.create_task(render(wicked, f"number {number}"))
        if number % 3 == 0:
            for _ in range(number % 7):
                await asyncio.sleep(0)
            asking.cancel()
        (found,) = await asyncio.gather(asking, return_exceptions=True)
        assert found == f"number {number}" or (number % 3 == 0 and isinstance(found, asyncio.CancelledError))

    await asyncio.gather(*(ask(number) for number in range(60)))
    assert await render(wicked, "last") == "last"


async def test_who_waits_too_long_for_a_process_is_told_so() -> None:
    renderer = Renderer(WICKED, {}, cpu_s=30.0, render_s=1.0)
    loops = [asyncio.create_task(render(renderer, "loop")) for _ in range(3)]
    assert [type(one) for one in await asyncio.gather(*loops, return_exceptions=True)] == [RendererBusy] * 3
    renderer.close()


async def test_the_process_knows_no_secrets_and_goes_when_nobody_is_there(
    wicked: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PELLUCID_PEPPER", "canary-pepper-4711")
    await wicked.check()
    (process,) = wicked._idle
    environ = Path(f"/proc/{process._popen.pid}/environ").read_bytes()
    assert b"PYTHONPATH" in environ and b"canary" not in environ
    process._link.close()
    assert await asyncio.to_thread(process._popen.wait, 10) == 0
    wicked._idle.clear()


def test_over_http_it_is_one_request_s_trouble(custom: Custom, model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text(WICKED)
    gateway, _ = custom(model=str(copy))
    assert gateway.text.template is not None
    gateway.text.template._cpu_s = CPU_S
    began_s = time.monotonic()
    with httpx.Client(base_url=gateway.url, timeout=30) as other:
        answer = gateway.client.post(CHAT_URL, json=chat(messages=[{"role": "user", "content": "loop"}]))
        assert other.get("/health").status_code == 200
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "invalid_value")
    assert "more than 0.3 s" in error["message"] and time.monotonic() - began_s < 20
    assert gateway.client.post(CHAT_URL, json=chat()).status_code == 200
