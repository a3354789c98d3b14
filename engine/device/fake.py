"""
A device without a model: tokens are hashes of all tokens before them.

It keeps one number per slot, exactly where the KV cache would keep keys and values, and each number depends on its
predecessor as read THROUGH THE BLOCK TABLE.  A wrong table, a block handed out too early or a prefix that was never
computed gives wrong tokens, so `next_token` over the plain token list is an oracle for the scheduler.

What a request may see of its sampling here: `banned` is honoured, `temperature` 0 ignores the uniform number, any other
temperature mixes it in, `logprobs` are made up but well-formed.  Penalties, bias and filters do not change a hash.
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Iterable

from engine.api import TokenLogprobs
from engine.device import DeviceFacts
from engine.device.verify import accept, row_specs
from engine.plan import SampleSpec, Slice, SliceResult, StepPlan, StepResult

_MASK = (1 << 64) - 1
_EMPTY = 0  # what an unwritten slot holds; the chance that a chain has this value is nil

FaultOf = Callable[[StepPlan, Slice], str]


def _no_fault(plan: StepPlan, piece: Slice) -> str:
    del plan, piece
    return ""


class FakeRunner:
    """Implements `engine.device.Device`."""

    def __init__(
        self,
        *,
        vocab_size: int = 49152,
        context_max: int = 8192,
        blocks_max: int = 1024,
        block_slots: int = 16,
        eos_ids: tuple[int, ...] = (2,),
        step_delay_s: float = 0.0,
        token_delay_s: float = 0.0,
        fault_of: FaultOf = _no_fault,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            step_delay_s, token_delay_s: a step sleeps the one and, per row, the other.
            fault_of: called for each slice; the text that it returns becomes the slice's fault, an exception that it
                raises is the whole step's.
        """
        self.facts = DeviceFacts(
            vocab_size=vocab_size,
            context_max=context_max,
            block_slots=block_slots,
            blocks_max=blocks_max,
            eos_ids=eos_ids,
            fingerprint=f"fake-{vocab_size}",
            reproducible=True,
            details={"dtype": "none", "kernels": "fake", "threads": "1"},
        )
        self.step_delay_s = step_delay_s
        self.token_delay_s = token_delay_s
        self.fault_of = fault_of
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        """Forget all KV."""
        self._slots = [array("Q", [_EMPTY]) * self.facts.block_slots for _ in range(self.facts.blocks_max)]

    def run(self, plan: StepPlan) -> StepResult:
        """Hash one step."""
        self._check(plan)
        delay_s = self.step_delay_s + self.token_delay_s * plan.tokens
        if delay_s > 0:
            self._sleep(delay_s)
        return StepResult(step_id=plan.step_id, slices=tuple(self._run_slice(plan, piece) for piece in plan.slices))

    def _run_slice(self, plan: StepPlan, piece: Slice) -> SliceResult:
        self._write(piece)
        fault = self.fault_of(plan, piece)
        if fault or piece.sample is None:
            return SliceResult(fault=fault)
        links = self._read(piece)
        end = len(links) // 8 - piece.drafts
        return accept(piece, [self._row(links[: 8 * (end + row)], spec) for row, spec in enumerate(row_specs(piece))])

    def _row(self, links: bytes, spec: SampleSpec) -> SliceResult:
        token = _token(links, spec, self.facts.vocab_size)
        return SliceResult(emitted=(token,), logprobs=_logprobs(token, spec, self.facts.vocab_size))

    def _write(self, piece: Slice) -> None:
        slots = self.facts.block_slots
        before = piece.start - 1
        link = self._slots[piece.blocks[before // slots]][before % slots] if before >= 0 else _EMPTY
        for position, token in enumerate(piece.tokens, piece.start):
            link = _link(link, token)
            self._slots[piece.blocks[position // slots]][position % slots] = link

    def _read(self, piece: Slice) -> bytes:
        """All links of the sequence, as its block table shows them."""
        count = piece.start + len(piece.tokens)
        used = -(-count // self.facts.block_slots)
        return b"".join(self._slots[block].tobytes() for block in piece.blocks[:used])[: 8 * count]

    def _check(self, plan: StepPlan) -> None:
        """The promises that a plan makes; the torch runner asserts the same ones."""
        slots = self.facts.block_slots
        written: set[int] = set()
        for piece in plan.slices:
            end = piece.start + len(piece.tokens)
            assert piece.tokens and piece.start >= 0, f"step {plan.step_id}: an empty slice"
            assert end <= self.facts.context_max, f"step {plan.step_id}: a slice beyond the context"
            assert len(piece.blocks) * slots >= end, f"step {plan.step_id}: a block table that is too short"
            assert all(0 <= token < self.facts.vocab_size for token in piece.tokens), "a token beyond the vocabulary"
            assert all(0 <= block < self.facts.blocks_max for block in piece.blocks), "a block beyond the pool"
            assert 0 <= piece.drafts < len(piece.tokens) and (piece.sample or not piece.drafts), "drafts beside a slice"
            writes = piece.blocks[piece.start // slots : -(-end // slots)]
            assert written.isdisjoint(writes) and len(set(writes)) == len(writes), "a block written twice"
            written.update(writes)
        sequences = [piece.sequence for piece in plan.slices]
        assert len(set(sequences)) == len(sequences), f"step {plan.step_id}: a sequence appears twice"


def next_token(tokens: Iterable[int], sample: SampleSpec, *, vocab_size: int) -> int:
    """What a `FakeRunner` must answer after `tokens` (prompt and output so far): the oracle."""
    links, link = array("Q"), _EMPTY
    for token in tokens:
        link = _link(link, token)
        links.append(link)
    return _token(links.tobytes(), sample, vocab_size)


def _link(before: int, token: int) -> int:
    """A 64-bit mix (splitmix64's finalizer) of the link before and this token."""
    mixed = (before * 0x9E3779B97F4A7C15 + token + 0x632BE59BD9B4E019) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def _token(links: bytes, sample: SampleSpec, vocab_size: int) -> int:
    digest = hashlib.blake2b(links, digest_size=8)
    if sample.sampling.temperature > 0:
        digest.update(sample.uniforms[0].hex().encode())
    token = int.from_bytes(digest.digest(), "little") % vocab_size
    for _ in range(len(sample.banned) + 1):
        if token not in sample.banned:
            return token
        token = (token + 1) % vocab_size
    return token  # Every id is banned: nothing better to say.


def _logprobs(token: int, sample: SampleSpec, vocab_size: int) -> tuple[TokenLogprobs, ...]:
    if sample.sampling.logprobs is None:
        return ()
    count = min(sample.sampling.logprobs, vocab_size)
    top = tuple(((token + rank) % vocab_size, -0.5 - rank) for rank in range(count))
    return (TokenLogprobs(-0.5, top),)
