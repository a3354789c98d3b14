"""
Frames: what goes in comes out, however the bytes are cut; deltas merge without loss.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import (
    FRAME_BYTES_MAX,
    Abort,
    Delta,
    Fault,
    Finish,
    FrameError,
    FrameReader,
    GenerateRequest,
    Sampling,
    StepFrame,
    TokenLogprobs,
    Usage,
    decode_frame,
    decode_message,
    encode,
)
from telemetry.records import KvBook, RequestRecord, StepRecord

REQUEST = GenerateRequest(
    request_id="a",
    prompt=(1, 2, 3),
    sampling=Sampling(logit_bias={5: -1.5}, seed=-(2**63), logprobs=2),
    tokens_max=9,
    stop_ids=(2,),
)
RECORD = RequestRecord(request_id="a", accepted_ns=5, finished_ns=9, states={"decode": 4})
FRAME = StepFrame(
    deltas=(
        Delta("a", (1, 2), (TokenLogprobs(-0.5, ((1, -0.5),)), TokenLogprobs(-1.0))),
        Delta("b", finish=Finish("failed", Usage(1, 0, 2), fault=Fault("internal_error", "why", "prompt"))),
    ),
    step=StepRecord(
        step_id=1, ended_ns=9, step_ns=4, parts={"idle": 4}, kv=KvBook(total=4, free=4), finished=(RECORD,)
    ),
)


@given(st.lists(st.integers(1, 60), max_size=40))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    stream = encode(REQUEST) + encode(Abort("a")) + encode(FRAME)
    reader, start = FrameReader(), 0
    bodies: list[bytes] = []
    for cut in [*cuts, len(stream)]:
        bodies += reader.feed(stream[start : start + cut])
        start += cut
    assert [decode_message(bodies[0]), decode_message(bodies[1])] == [REQUEST, Abort("a")]
    assert decode_frame(bodies[2]) == FRAME


def test_an_impossible_length_and_a_foreign_body_are_frame_errors() -> None:
    with pytest.raises(FrameError, match="limit"):
        list(FrameReader().feed((FRAME_BYTES_MAX + 1).to_bytes(4, "little")))
    for decode in (decode_message, decode_frame):
        for body in (b"", b"\xc1", b"\x80", encode(FRAME)[4:-1]):
            with pytest.raises(FrameError):
                decode(body)


def test_deltas_merge_into_what_they_say_together() -> None:
    first = Delta("a", (1,), (TokenLogprobs(-1.0),))
    second = Delta("a", (2, 3), (TokenLogprobs(-2.0), TokenLogprobs(-3.0)), Finish("stop", Usage(1, 0, 3)))
    both = first.merge(second)
    assert both.tokens == (1, 2, 3)
    assert [one.logprob for one in both.logprobs] == [-1.0, -2.0, -3.0]
    assert both.finish == second.finish
    with pytest.raises(AssertionError, match="after the finish"):
        both.merge(first)
