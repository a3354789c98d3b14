"""
Guesses at what comes next, without a model: what came next the last times that it looked like this.

    OwnText      the sequence's own prompt and output: editing, extraction, code that is quoted
    Outputs      what the same tenant's requests were answered lately: the same question again, templates

Both follow the longest suffix of the sequence that they find, and from there the most frequent continuation, token by
token (SuffixDecoding: Oliaro et al. 2024).  A tenant's outputs are seen by this tenant alone, as its prefix cache is:
the speed of an answer must not tell what somebody else was told.
"""

from collections import OrderedDict, deque

import msgspec

from engine.suffixes import ROOT, SuffixAutomaton

MATCH_MIN = 2  # one token alone says too little of what follows
LOOK_BACK_TOKENS = 32  # how much of a sequence is searched for in what others were answered
OUTPUT_TOKENS_MAX = 2048  # of one output, its beginning
GENERATION_TOKENS = 4096  # outputs are kept for one to two generations
PENDING_TOKENS_MAX = 4096  # outputs that nobody has looked at yet
TENANTS_MAX = 16
END = -1  # between two outputs; no token


class Draft(msgspec.Struct, frozen=True):
    """A guess at the next tokens.  `shares[i]` is how often token i came, of all times that those before it came."""

    tokens: list[int]
    shares: list[float]
    matched: int  # tokens at the end of the sequence that were found elsewhere


NO_DRAFT = Draft([], [], 0)


class OwnText:
    """The sequence's own tokens."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()

    def read(self, tokens: list[int], tokens_max: int) -> int:
        """All of them, in order."""
        automaton, start = self._automaton, self._automaton.size
        end = min(len(tokens), start + tokens_max)
        for position in range(start, end):
            automaton.extend(tokens[position])
        return end - start

    def draft(self, count: int) -> Draft:
        """What followed the last time."""
        automaton = self._automaton
        state = automaton.recurring
        matched = automaton.length[state]
        if matched < MATCH_MIN:
            return NO_DRAFT
        return Draft(*automaton.follow(state, count), matched)


class Outputs:
    """Recent outputs of one tenant in two generations: when the newer one is full, the older one is forgotten."""

    def __init__(self) -> None:
        self.epoch = 0  # how often a generation has begun
        self.generations = (SuffixAutomaton(), SuffixAutomaton())  # older, newer
        self._pending: deque[tuple[int, ...]] = deque()
        self._pending_tokens = 0

    def add(self, tokens: tuple[int, ...]) -> None:
        """An output; it costs nothing until somebody looks."""
        tokens = tokens[:OUTPUT_TOKENS_MAX]
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        while self._pending_tokens > PENDING_TOKENS_MAX:
            self._pending_tokens -= len(self._pending.popleft())

    def read(self, tokens_max: int) -> int:
        """Take pending outputs in until `tokens_max` are exceeded; returns how many tokens that were."""
        taken = 0
        while self._pending and taken < tokens_max:
            tokens = self._pending.popleft()
            self._pending_tokens -= len(tokens)
            taken += len(tokens) + 1
            newer = self.generations[1]
            for token in tokens:
                newer.extend(token)
            newer.extend(END)
            if newer.size >= GENERATION_TOKENS:
                self.generations = (newer, SuffixAutomaton())
                self.epoch += 1
        return taken

    @property
    def tokens(self) -> int:
        """How many are kept."""
        return self._pending_tokens + sum(automaton.size for automaton in self.generations)


class OthersText:
    """The outputs of the sequence's tenant."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._epoch = outputs.epoch
        self._matches = [(ROOT, 0), (ROOT, 0)]  # in each generation: state and length
        self._position = 0  # tokens read

    def read(self, tokens: list[int], tokens_max: int) -> int:
        """Each token, or after a long pause the last few: what is longer ago hardly matters."""
        self._follow_epoch()
        start = self._position
        if len(tokens) - start > min(LOOK_BACK_TOKENS, tokens_max):
            start = max(0, len(tokens) - min(LOOK_BACK_TOKENS, tokens_max))
            self._matches = [(ROOT, 0), (ROOT, 0)]
        for side, automaton in enumerate(self._outputs.generations):
            if automaton.size:
                state, length = self._matches[side]
                for position in range(start, len(tokens)):
                    state, length = automaton.step(state, length, tokens[position])
                self._matches[side] = (state, length)
        self._position = len(tokens)
        return len(tokens) - start

    def draft(self, count: int) -> Draft:
        """What followed in the generation that knows more of the sequence's end."""
        self._follow_epoch()
        (older, old_length), (newer, new_length) = self._matches
        side, state, length = (1, newer, new_length) if new_length >= old_length else (0, older, old_length)
        if length < MATCH_MIN:
            return NO_DRAFT
        automaton = self._outputs.generations[side]
        tokens, shares = automaton.follow(automaton.settle(state, length), count)
        if END in tokens:
            end = tokens.index(END)
            tokens, shares = tokens[:end], shares[:end]
        return Draft(tokens, shares, length)

    def _follow_epoch(self) -> None:
        """The generations may have moved on."""
        moved, self._epoch = self._outputs.epoch - self._epoch, self._outputs.epoch
        if moved:
            self._matches = [self._matches[1] if moved == 1 else (ROOT, 0), (ROOT, 0)]


class Library:
    """The outputs of all tenants, each for itself; who has not been here for the longest time is forgotten."""

    def __init__(self) -> None:
        self._shelves: OrderedDict[str, Outputs] = OrderedDict()

    def of(self, tenant: str) -> Outputs:
        """A tenant's outputs."""
        outputs = self._shelves.get(tenant)
        if outputs is None:
            outputs = self._shelves[tenant] = Outputs()
            if len(self._shelves) > TENANTS_MAX:
                self._shelves.popitem(last=False)
        self._shelves.move_to_end(tenant)
        return outputs

    @property
    def tokens(self) -> int:
        """How many are kept."""
        return sum(outputs.tokens for outputs in self._shelves.values())
