"""
Drafts against what the model says: a slice with drafts is sampled row by row, each as if it were alone.

Row r stands behind the first r drafts.  What is sampled there is what would have been sampled had these drafts been
known, so the run of drafts that equal what was sampled before them, and the token after it, are the output without
speculation, whatever the sampling: nothing is approximated, and nothing has to be proved but this.
"""

from collections.abc import Iterator, Sequence

import msgspec

from engine.plan import SampleSpec, Slice, SliceResult


def row_specs(piece: Slice) -> list[SampleSpec]:
    """One spec for each sampling row of a slice that samples."""
    spec = piece.sample
    assert spec is not None and len(spec.uniforms) == piece.drafts + 1 <= len(piece.tokens)
    if not piece.drafts:
        return [spec]
    drafts = piece.tokens[len(piece.tokens) - piece.drafts :]
    remembers = spec.sampling.repetition_penalty != 1 or spec.sampling.presence_penalty != 0
    remembers = remembers or spec.sampling.frequency_penalty != 0
    return [
        msgspec.structs.replace(
            spec,
            uniforms=(uniform,),
            banned=spec.banned if row <= piece.drafts - spec.unbanned_rows else (),
            unbanned_rows=0,
            outputs=spec.outputs + drafts[:row] if remembers else (),
        )
        for row, uniform in enumerate(spec.uniforms)
    ]


def undrafted(piece: Slice) -> Slice:
    """The slice without its drafts."""
    assert piece.drafts
    return msgspec.structs.replace(piece, tokens=piece.tokens[: -piece.drafts], sample=row_specs(piece)[0], drafts=0)


def accept(piece: Slice, rows: Sequence[SliceResult]) -> SliceResult:
    """
    What came of a slice, given what each of its sampling rows would say alone.

    A fault behind a draft that was wrong is nobody's; one behind drafts that were right only ends the run here, and
    comes back in the next step, which then has no draft before it.
    """
    if not piece.drafts:
        return rows[0]
    assert len(rows) == piece.drafts + 1
    if rows[0].fault:
        return rows[0]
    drafts = piece.tokens[len(piece.tokens) - piece.drafts :]
    emitted, logprobs = rows[0].emitted, rows[0].logprobs
    for draft, row in zip(drafts, rows[1:], strict=True):
        if draft != emitted[-1] or row.fault:
            break
        emitted += row.emitted
        logprobs += row.logprobs
    return SliceResult(emitted, logprobs)


def accepted(pieces: Sequence[Slice], rows: Sequence[SliceResult]) -> list[SliceResult]:
    """One result for each slice; `rows` are those of all sampling rows, slice by slice."""
    answers: Iterator[SliceResult] = iter(rows)
    return [
        SliceResult() if piece.sample is None else accept(piece, [next(answers) for _ in range(piece.drafts + 1)])
        for piece in pieces
    ]
