"""
Engines are killed, or stop, at every point of a request's life: no token is lost, none comes twice.
"""

import os
import signal
import time

from tests.chaos.conftest import Fleet, Stream

STREAMS = 4


def undisturbed(fleet: Fleet, bodies: list[dict[str, object]]) -> list[str]:
    """What these requests say when nothing happens."""
    texts = []
    for body in bodies:
        stream = fleet.stream(body).end()
        assert stream.error == ""
        texts.append(stream.text)
    return texts


def check(fleet: Fleet, streams: list[Stream], texts: list[str], what: str) -> None:
    """Each client saw the same text as undisturbed, to the end, once; say how long it had to wait."""
    for stream, text in zip(streams, texts, strict=True):
        stream.end()
        assert (stream.error, stream.finish_reason) == ("", "length")
        assert stream.text == text
        assert stream.usage["completion_tokens"] == stream._body["max_tokens"]
    rows = [fleet.ledger(stream.request_id) for stream in streams]
    resumed = [row for row in rows if row["resumes"]]
    pauses = sorted(stream.pause_s for stream in streams)
    print(f"{what}: {len(resumed)} of {len(streams)} streams resumed, longest pause {pauses[-1]:.2f} s")


def test_idle(fleet: Fleet) -> None:
    os.kill(fleet.engine(0), signal.SIGKILL)
    answers = [fleet.post(max_tokens=4).status_code for _ in range(10)]
    print(
        f"kill -9, idle: {answers.count(200)} of 10 requests answered at once, whole after {fleet.until_whole():.1f} s"
    )
    assert answers == [200] * 10


def test_decode(fleet: Fleet) -> None:
    bodies = [fleet.body(number) for number in range(STREAMS)]
    texts = undisturbed(fleet, bodies)
    streams = [fleet.stream(body) for body in bodies]
    for stream in streams:
        stream.has_begun()
    fleet.kill_busy()
    check(fleet, streams, texts, "kill -9, decode")
    assert any(fleet.ledger(stream.request_id)["resumes"] for stream in streams)


def test_prefill(fleet: Fleet) -> None:
    prompt = " ".join(f"Line {number} of a long text that nobody has sent before." for number in range(110))
    body = fleet.body(50, prompt=prompt, max_tokens=12)
    stream = fleet.stream(body)
    fleet.kill_busy()
    stream.end()
    assert fleet.ledger(stream.request_id)["resumes"] == 1
    check(fleet, [stream], undisturbed(fleet, [body]), "kill -9, prefill")


def test_again_while_it_is_resumed(fleet: Fleet) -> None:
    body = fleet.body(60, max_tokens=150)
    texts = undisturbed(fleet, [body])
    stream = fleet.stream(body)
    stream.has_begun()
    killed = fleet.kill_busy()
    assert fleet.kill_busy() != killed
    check(fleet, [stream], texts, "kill -9, and again while it is resumed")
    assert fleet.ledger(stream.request_id)["resumes"] == 2


def test_both_at_once(fleet: Fleet) -> None:
    bodies = [fleet.body(70 + number) for number in range(STREAMS)]
    texts = undisturbed(fleet, bodies)
    streams = [fleet.stream(body) for body in bodies]
    for stream in streams:
        stream.has_begun()
    for replica in (0, 1):
        os.kill(fleet.engine(replica), signal.SIGKILL)
    check(fleet, streams, texts, "kill -9 of all engines, decode")


def test_a_stopped_process_holds_its_connection_open(fleet: Fleet) -> None:
    bodies = [fleet.body(80 + number, max_tokens=150) for number in range(STREAMS)]
    texts = undisturbed(fleet, bodies)
    streams = [fleet.stream(body) for body in bodies]
    for stream in streams:
        stream.has_begun()
    pid = fleet.kill_busy(signal.SIGSTOP)
    try:
        check(fleet, streams, texts, "SIGSTOP, decode")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert any(fleet.ledger(stream.request_id)["resumes"] for stream in streams)


def test_a_stopped_idle_engine_is_found_out(fleet: Fleet) -> None:
    pid = fleet.engine(0)
    os.kill(pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    try:
        fleet.until(lambda: fleet.all_see(1), "it is taken for gone", 30)
        print(f"SIGSTOP, idle: found out after {time.monotonic() - begun_s:.1f} s")
        assert [fleet.post(max_tokens=2).status_code for _ in range(4)] == [200] * 4
    finally:
        os.kill(pid, signal.SIGCONT)


def test_terminated_it_hands_its_streams_on(fleet: Fleet) -> None:
    body = fleet.body(90)
    texts = undisturbed(fleet, [body])
    stream = fleet.stream(body)
    stream.has_begun()
    fleet.kill_busy(signal.SIGTERM)
    check(fleet, [stream], texts, "SIGTERM of an engine, decode")
