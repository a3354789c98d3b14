"""Who reads the news of a request: a task that waits, or a callback, one after the other, and nothing is missed."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Delta, GenerateRequest, Sampling
from gateway import errors
from gateway.calls import Call, Flight
from gateway.errors import ApiError

WHOSE = ContextVar("WHOSE", default="nobody's")


def a_call(flight: Flight) -> Call:
    """A call without an engine."""
    return Call(GenerateRequest(request_id="r", prompt=(1,), sampling=Sampling(), tokens_max=100), flight)


def run(body: Callable[[], Awaitable[None]]) -> None:
    """In an event loop that must not hang."""

    async def bounded() -> None:
        async with asyncio.timeout(5):
            await body()

    asyncio.run(bounded())


@given(st.lists(st.sampled_from(["token", "turn", "listen", "wait"]), max_size=30))
def test_every_token_is_read_whoever_reads(steps: list[str]) -> None:
    async def body() -> None:
        flight = Flight()
        call = a_call(flight)
        read: list[int] = []

        def reader() -> None:
            read.extend(token for token, _ in call.unread())

        sent = 0
        for step in steps:
            if step == "token":
                sent += 1
                call.take(Delta("r", (sent,)), 1)
            elif step == "turn":
                await asyncio.sleep(0)
            elif step == "listen":
                with flight.told(reader):
                    sent += 1
                    call.take(Delta("r", (sent,)), 1)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    assert read == list(range(1, sent + 1))
            else:
                if len(read) == sent:
                    sent += 1
                    asyncio.get_running_loop().call_soon(call.take, Delta("r", (sent,)), 1)
                await flight.wait()
                while len(read) < sent:
                    reader()
                    await asyncio.sleep(0)
                assert read == list(range(1, sent + 1))
        reader()
        assert read == list(range(1, sent + 1))

    run(body)


def test_what_comes_in_one_turn_is_told_once_and_in_the_context_of_the_reader() -> None:
    async def body() -> None:
        flight = Flight()
        call = a_call(flight)
        told: list[str] = []
        token = WHOSE.set("the reader's")
        with flight.told(lambda: told.append(WHOSE.get())):
            WHOSE.reset(token)
            call.take(Delta("r", (1,)), 1)
            call.take(Delta("r", (2,)), 1)
            await asyncio.sleep(0)
            assert told == ["the reader's"]
            call.take(Delta("r", (3,)), 1)
            await asyncio.sleep(0)
            assert told == ["the reader's"] * 2
            call.take(Delta("r", (4,)), 1)
        await asyncio.sleep(0)
        assert told == ["the reader's"] * 2, "who does not listen any more is not called"
        await flight.wait()  # but what was not told is still there for the next reader

    run(body)


def test_an_interruption_is_news_for_both() -> None:
    async def body() -> None:
        flight = Flight()
        a_call(flight)
        told: list[ApiError | None] = []
        with flight.told(lambda: told.append(flight.error)):
            flight.interrupt(errors.client_gone())
            await asyncio.sleep(0)
        assert [error.status for error in told if error] == [499]
        with pytest.raises(ApiError):
            await flight.wait()

    run(body)
