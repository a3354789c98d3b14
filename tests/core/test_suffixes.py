"""
The automaton against a search that looks everywhere, and the drafters that stand on it.
"""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafters import (
    END,
    GENERATION_TOKENS,
    MATCH_MIN,
    OUTPUT_TOKENS_MAX,
    PENDING_TOKENS_MAX,
    TENANTS_MAX,
    Library,
    OthersText,
    Outputs,
    OwnText,
)
from engine.suffixes import ROOT, SuffixAutomaton

WHOLE = 10_000
texts = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=60))


def built(tokens: list[int], contexts_max: int = WHOLE) -> SuffixAutomaton:
    automaton = SuffixAutomaton(contexts_max)
    for token in tokens:
        automaton.extend(token)
    return automaton


def places(text: list[int], piece: list[int]) -> list[int]:
    """Where `piece` ends in `text`: the index behind it."""
    return [end for end in range(len(piece), len(text) + 1) if text[end - len(piece) : end] == piece]


def longest_before(text: list[int]) -> int:
    """The length of the longest suffix that ends earlier, too."""
    return next((n for n in range(len(text) - 1, 0, -1) if len(places(text, text[-n:])) > 1), 0)


def longest_in(text: list[int], query: list[int]) -> int:
    """The length of the longest suffix of `query` that is in `text`."""
    return next((n for n in range(min(len(query), len(text)), 0, -1) if places(text, query[-n:])), 0)


def followers(text: list[int], piece: list[int]) -> Counter[int]:
    return Counter(text[end] for end in places(text, piece) if end < len(text))


@settings(max_examples=150, deadline=None)
@given(tokens=texts)
def test_it_finds_the_longest_suffix_that_was_there_before_and_what_followed(tokens: list[int]) -> None:
    automaton = SuffixAutomaton(WHOLE)
    for count, token in enumerate(tokens, 1):
        automaton.extend(token)
        known, state = tokens[:count], automaton.recurring
        length = automaton.length[state]
        assert length == longest_before(known)
        if length:
            piece = known[-length:]
            assert automaton.counts[state] == len(places(known, piece))
            assert automaton.continuations(state) == followers(known, piece)


@settings(max_examples=150, deadline=None)
@given(tokens=texts)
def test_it_follows_the_most_frequent_continuation_with_its_true_share(tokens: list[int]) -> None:
    automaton = built(tokens)
    state = automaton.recurring
    context = tokens[len(tokens) - automaton.length[state] :]
    guesses, shares = automaton.follow(state, 12)
    if state != ROOT:
        assert guesses  # It was there before, so something followed.
    for guess, share in zip(guesses, shares, strict=True) if state != ROOT else ():
        came = followers(tokens, context)
        assert came[guess] == max(came.values())
        whole = sum(came.values()) if not share_of_the_end(tokens, context) else len(places(tokens, context))
        assert share == min(1.0, came[guess] / whole)
        context.append(guess)


def share_of_the_end(text: list[int], piece: list[int]) -> bool:
    """Whether the text ends with `piece`, where this is not the longest such: then its last place counts as well."""
    return text[len(text) - len(piece) :] == piece and len(piece) != longest_before(text)


@settings(max_examples=100, deadline=None)
@given(tokens=texts, contexts_max=st.integers(0, 4))
def test_bounded_counts_are_never_too_high(tokens: list[int], contexts_max: int) -> None:
    bounded, exact = built(tokens, contexts_max), built(tokens)
    assert bounded.length == exact.length and bounded.link == exact.link
    assert all(few <= many for few, many in zip(bounded.counts, exact.counts, strict=True))
    assert len(exact.length) <= 2 * len(tokens) + 1


@settings(max_examples=150, deadline=None)
@given(text=texts, query=texts, growth=texts)
def test_a_match_goes_on_while_the_text_grows(text: list[int], query: list[int], growth: list[int]) -> None:
    automaton = built(text)
    state, length = ROOT, 0
    for count, token in enumerate(query, 1):
        state, length = automaton.step(state, length, token)
        assert length == longest_in(text, query[:count])
    for token in growth:
        automaton.extend(token)
    if length:
        settled = automaton.settle(state, length)
        assert automaton.length[automaton.link[settled]] < length <= automaton.length[settled]
        whole = text + growth
        assert automaton.continuations(settled) == followers(whole, query[len(query) - length :])


def test_the_own_text_is_quoted() -> None:
    source = list(range(100, 140))
    own = OwnText()
    tokens = [*source, 7, *source[10:14]]
    assert own.read(tokens, 30) == 30
    assert own.read(tokens, 1000) == len(tokens) - 30
    draft = own.draft(5)
    assert (draft.tokens, draft.matched) == (source[14:19], 4)
    assert draft.shares == [1.0] * 5


def test_one_token_alone_is_no_match() -> None:
    own = OwnText()
    own.read([1, 2, 3, 1], 100)
    assert own.draft(5).tokens == [] and MATCH_MIN == 2


def test_what_others_were_answered_is_found_up_to_its_end() -> None:
    outputs = Outputs()
    outputs.add((1, 2, 3, 4, 5, 6))
    outputs.add((50, 51, 52))
    assert outputs.read(100) == 11
    others = OthersText(outputs)
    others.read([90, 91, 2, 3, 4], 512)
    draft = others.draft(10)
    assert (draft.tokens, draft.matched) == ([5, 6], 3)
    others.read([90, 91, 2, 3, 4, 5], 512)
    assert others.draft(10).tokens == [6]
    others.read([90, 91, 2, 3, 4, 5, 77], 512)
    assert others.draft(10).tokens == []


def test_generations_pass_and_a_match_moves_with_its_own() -> None:
    outputs = Outputs()
    first = tuple(range(OUTPUT_TOKENS_MAX))
    outputs.add(first)
    outputs.read(10_000)
    others = OthersText(outputs)
    tokens = list(first[5:25])
    others.read(tokens, 512)
    filler = GENERATION_TOKENS // OUTPUT_TOKENS_MAX
    for epoch in (1, 2):
        for _ in range(filler):
            outputs.add(tuple(range(10_000, 10_000 + OUTPUT_TOKENS_MAX)))
            outputs.read(10_000)
        assert outputs.epoch == epoch
        tokens.append(first[24 + epoch])
        others.read(tokens, 512)
        expected = [] if epoch == 2 else list(first[26:29])
        assert others.draft(3).tokens == expected


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 3000), max_size=30), read=st.booleans())
def test_memory_is_bounded_whatever_comes(lengths: list[int], read: bool) -> None:
    outputs = Outputs()
    for number, length in enumerate(lengths):
        outputs.add(tuple((number * 31 + i) % 997 for i in range(length)))
        if read:
            outputs.read(500)
        assert outputs.tokens <= PENDING_TOKENS_MAX + 2 * (GENERATION_TOKENS + OUTPUT_TOKENS_MAX + 1)


def test_tenants_are_kept_apart_and_only_so_many() -> None:
    library = Library()
    library.of("a").add((1, 2, 3, 4))
    assert library.of("a") is not library.of("b")
    library.of("a").read(100)
    stranger = OthersText(library.of("b"))
    stranger.read([1, 2, 3], 512)
    assert stranger.draft(3).tokens == []
    for number in range(TENANTS_MAX):
        library.of(f"t{number}").add((1, 2))
    assert library.tokens == 2 * TENANTS_MAX and library.of("a").tokens == 0
    assert END < 0
