"""
Text made token by token is the text of all tokens at once: every split, every stop string.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from engine.api import TokenLogprobs
from gateway.text import Piece, TextStream
from gateway.tokens import ModelText, load
from gateway.vocabulary import Vocabulary
from tests.http.model_files import write_model


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ModelText:
    return load(model_dir)


@pytest.fixture(scope="module")
def library(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def feed_all(stream: TextStream, tokens: list[int]) -> list[Piece]:
    pieces = []
    for token in tokens:
        pieces.append(stream.feed(token))
        if stream.stopped:
            return pieces
    pieces.append(stream.finish())
    return pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


_tokens = st.lists(st.integers(0, 420), max_size=40)  # some are beyond the vocabulary, many are half characters


@given(tokens=_tokens)
@settings(max_examples=300)
def test_joined_text_equals_the_library(model: ModelText, library: Tokenizer, tokens: list[int]) -> None:
    expected = library.decode(tokens, skip_special_tokens=True)
    assert text_of(feed_all(TextStream(model), tokens)) == expected


@given(tokens=_tokens, stops=st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_without_entries_the_text_is_the_same(model: ModelText, tokens: list[int], stops: list[str]) -> None:
    with_entries, without = (
        [piece.text for piece in feed_all(TextStream(model, stops=stops, entries=entries), tokens)]
        for entries in (True, False)
    )
    assert with_entries == without


@given(text=st.text(max_size=60))
def test_unicode_survives_the_round_trip(model: ModelText, text: str) -> None:
    tokens = model._encode(text, False)
    pieces = feed_all(TextStream(model), tokens)
    assert text_of(pieces) == text or "<|" in text  # special tokens in the text are markup, not text
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize(
    "text", ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "naïve café", "日本語", "\U0001f600" * 3]
)
def test_only_whole_characters_are_released(model: ModelText, text: str) -> None:
    stream = TextStream(model)
    released = ""
    for token in model._encode(text, False):
        released += stream.feed(token).text
        assert text.startswith(released)
    assert released == text
    assert stream.finish().text == ""


def test_half_a_character_at_the_end_is_one_replacement(model: ModelText, library: Tokenizer) -> None:
    tokens = model._encode("a\U0001f600", False)[:-1]
    pieces = feed_all(TextStream(model), tokens)
    assert text_of(pieces) == library.decode(tokens) == "a\ufffd"
    assert [entry.token for piece in pieces for entry in piece.entries] == tokens


def cut_by_reference(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:end].endswith(stop)]
        if ends:
            return text[: end - len(max(ends, key=len))]
    return text


_letters = st.text(alphabet="ab é\U0001f600", max_size=24)
_stops = st.lists(st.text(alphabet="ab é\U0001f600", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=_letters, stops=_stops)
@settings(max_examples=300)
def test_stop_strings_cut_exactly(model: ModelText, text: str, stops: list[str]) -> None:
    tokens = model._encode(text, False)
    stream = TextStream(model, stops=stops)
    pieces = feed_all(stream, tokens)
    expected = cut_by_reference(text, stops)
    assert text_of(pieces) == expected
    assert stream.stopped == (expected != text or any(text.endswith(stop) for stop in stops))
    # No character of a stop string leaked on the way: what was released is always a beginning of the result.
    released = ""
    for piece in pieces:
        released += piece.text
        assert expected.startswith(released)


@given(text=_letters, stops=_stops)
def test_tokens_beside_the_text_are_those_that_made_it(model: ModelText, text: str, stops: list[str]) -> None:
    tokens = model._encode(text, False)
    stream = TextStream(model, stops=stops)
    pieces = feed_all(stream, tokens)
    entries = [entry for piece in pieces for entry in piece.entries]
    assert [entry.token for entry in entries] == tokens[: len(entries)]
    assert stream.tokens <= len(tokens)
    expected = text_of(pieces).encode()
    made = b"".join(model.piece(entry.token) for entry in entries)
    assert made.startswith(expected)
    if entries:  # The last one is needed: without it the text would be shorter.
        assert len(made) - len(model.piece(entries[-1].token)) < len(expected)
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets)
    assert all(offset < len(text_of(pieces)) for offset in offsets)


def test_a_stop_string_inside_one_token_and_across_tokens(model: ModelText) -> None:
    hello = model._encode("Hello world", False)
    assert any(b"wor" in model.piece(token) or b"he" in model.piece(token) for token in hello) or len(hello) > 3
    for stop, left in (("lo", "Hel"), ("o w", "Hell"), ("world", "Hello "), ("H", ""), ("d", "Hello worl")):
        stream = TextStream(model, stops=[stop])
        assert text_of(feed_all(stream, hello)) == left
        assert stream.stopped


def test_stop_strings_wait_for_min_tokens(model: ModelText) -> None:
    tokens = model._encode("a b a b a b", False)
    stream = TextStream(model, stops=["b"], tokens_min=len(tokens) - 2)
    assert text_of(feed_all(stream, tokens)).count("b") >= 1
    assert stream.stopped


def test_special_tokens_have_no_text_but_a_place(model: ModelText) -> None:
    stream = TextStream(model)
    assert stream.feed(1).text == ""
    piece = stream.feed(model._encode("a", False)[0], TokenLogprobs(-0.25))
    assert piece.text == "a"
    assert piece.entries[-1].logprobs == TokenLogprobs(-0.25)


def _sentencepiece_like() -> Tokenizer:
    """A vocabulary in the manner of Llama 2: spaces as U+2581, unknown characters as bytes."""
    letters = ["\u2581", "a", "b", "\u2581a", "ab", "é"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocab |= {letter: 259 + index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


@given(text=st.text(alphabet="ab é\U0001f600日", max_size=20))
def test_sentencepiece_like_vocabularies(text: str) -> None:
    library = _sentencepiece_like()
    model = ModelText(Vocabulary(library, None, {"eos_token": "</s>"}))
    tokens = model._encode(text, False)
    assert text_of(feed_all(TextStream(model), tokens)) == library.decode(tokens)


def test_the_model_of_these_tests_is_small(tmp_path: Path) -> None:
    assert load(write_model(tmp_path)).vocab_size == 400
