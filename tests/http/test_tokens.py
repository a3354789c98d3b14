"""
The model's own tokenizer and template give what transformers gives.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.template import ChatTemplate, TemplateError
from gateway.tokens import ModelText, load
from gateway.vocabulary import VocabularyError
from gateway.wire import ChatMessage, TextPart
from tests.http.model_files import TEMPLATE

NASTY = [
    "Hello world",
    "It's what they'll've done; don't  you\tthink?",
    "\r\n\r\n  indented\n\n\n",
    "x\u2028y\u00a0z\u3000w",
    " " * 20 + "a" + " " * 7,
    "é\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 日本語 العربية",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|im_start|> <|im_end|>x<|endoftext|>",
    "a\x00b\x7f\x1b[0m",
    "\ufeff\ufffd\U0010ffff",
    "snake_case camelCase kebab-case ALLCAPS",
    "",
]
WITH_NUMBERS = ["a1b2  99", "  12 34  5\t6\n 7", "½ ٣٤ Ⅷ 1e-5", "2024-01-01T00:00:00Z", "x1  2y   3"]


@pytest.fixture(scope="module")
def smollm(default_model: Path) -> Iterator[ModelText]:
    text = load(default_model)
    yield text
    text.close()


@pytest.fixture(scope="module")
def transformers_tokenizer(default_model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(default_model.parent, gguf_file=default_model.name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestDefaultModel:
    @pytest.mark.parametrize("text", NASTY)
    def test_ids_equal_transformers(self, smollm: ModelText, transformers_tokenizer: Any, text: str) -> None:
        assert smollm._encode(text, True) == transformers_tokenizer(text).input_ids
        assert smollm.decode(smollm._encode(text, True)) == text

    @pytest.mark.parametrize("text", WITH_NUMBERS)
    def test_digits_are_cut_as_the_model_was_trained(
        self, smollm: ModelText, transformers_tokenizer: Any, text: str
    ) -> None:
        """transformers loses the digit rule when it converts GGUF; with the original's rule it agrees."""
        library = Tokenizer.from_str(transformers_tokenizer.backend_tokenizer.to_str())
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        assert smollm._encode(text, True) == library.encode(text).ids

    @pytest.mark.parametrize("generate", [True, False])
    def test_the_chat_template_equals_transformers(
        self, smollm: ModelText, transformers_tokenizer: Any, generate: bool
    ) -> None:
        for turns in (
            [("user", "hi")],
            [("system", "be brief"), ("user", "hi\n"), ("assistant", "yes?"), ("user", " {{ x }} <|im_end|>")],
        ):
            expected = transformers_tokenizer.apply_chat_template(
                [{"role": role, "content": text} for role, text in turns],
                tokenize=False,
                add_generation_prompt=generate,
            )
            messages = [_message(role, text) for role, text in turns]
            assert asyncio.run(smollm.render(messages, add_generation_prompt=generate)) == expected

    def test_ends(self, smollm: ModelText) -> None:
        assert smollm.eos_ids == (2,)
        assert smollm.turn_ids == (2,)
        assert smollm.vocab_size == 49152

    def test_a_long_text_does_not_hold_up_the_event_loop(self, smollm: ModelText) -> None:
        async def longest_gap() -> tuple[float, float]:
            encoding = asyncio.create_task(
                smollm.encode("hello there, how are you? " * 20_000, add_special_tokens=False)
            )
            began = last = time.monotonic()
            gap = 0.0
            while not encoding.done():
                await asyncio.sleep(0)
                now = time.monotonic()
                gap, last = max(gap, now - last), now
            return gap, time.monotonic() - began

        gap_s, whole_s = asyncio.run(longest_gap())
        assert gap_s < whole_s / 2, f"the loop stood still for {gap_s:.3f} of {whole_s:.3f} s"


def _message(role: Any, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


class TestTemplate:
    def render(self, source: str, **extra: object) -> str:
        return ChatTemplate(source, {"bos_token": "<s>"}).render([_message("user", "hi")], extra=extra)

    def test_what_transformers_offers(self) -> None:
        assert self.render("{{ bos_token }}{{ messages[0].content }}") == "<s>hi"
        assert self.render("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
        assert self.render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
        assert self.render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
        assert self.render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
        assert self.render("{{ strftime_now('%Y') | length }}") == "4"
        assert self.render("{{ enable_thinking }}", enable_thinking=False) == "False"

    def test_what_a_template_raises_is_for_the_client(self) -> None:
        with pytest.raises(TemplateError, match="no users"):
            self.render("{{ raise_exception('no users') }}")

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages[7].content.x.y }}",
            "{{ 1 / 0 }}",
            "{{ 'a' + 1 }}",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{% for i in range(10**9) %}x{% endfor %}",
            "{% for i in range(99999) %}{{ 'y' * 9999 }}{% endfor %}",
            "{{ messages | sort(attribute='a.b') | join(3) }}",
        ],
    )
    def test_a_template_that_fails_is_an_error_for_the_client(self, source: str) -> None:
        with pytest.raises(TemplateError):
            self.render(source)

    def test_developers_parts_and_calls(self) -> None:
        template = ChatTemplate("{% for m in messages %}{{ m | tojson(sort_keys=true) }}\n{% endfor %}", {})
        messages = [
            ChatMessage(role="developer", content=[TextPart("text", "a"), TextPart("text", "b")]),
            ChatMessage(role="user", content="x", name="ada"),
        ]
        assert template.render(messages).splitlines() == [
            '{"content": "a\\nb", "role": "system"}',
            '{"content": "x", "name": "ada", "role": "user"}',
        ]


class TestDirectory:
    def test_the_template_file_wins(self, model_dir: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(model_dir, tmp_path / "m"))
        (copy / "chat_template.jinja").write_text("file")
        model = load(copy)
        assert model.template is not None
        assert model.template.source == "file"

    def test_named_templates_and_token_objects(self, model_dir: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(model_dir, tmp_path / "m"))
        config = {
            "eos_token": {"content": "<|im_end|>", "special": True},
            "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}],
        }
        (copy / "tokenizer_config.json").write_text(json.dumps(config))
        model = load(copy)
        assert model.template is not None
        assert model.template.source == TEMPLATE
        assert (model.eos_ids, model.turn_ids) == ((2,), (2,))

    def test_truncation_in_the_file_is_switched_off(self, model_dir: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(model_dir, tmp_path / "m"))
        tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=9)
        tokenizer.save(str(copy / "tokenizer.json"))
        text = "the quick brown fox and the lazy dog"
        assert load(copy)._encode(text, True) == load(model_dir)._encode(text, True)

    @pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
    def test_a_missing_or_broken_tokenizer_is_one_line(self, tmp_path: Path, content: bytes | None) -> None:
        if content is not None:
            (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(VocabularyError) as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)

    def test_other_decoders_are_refused_by_name(self, model_dir: Path, tmp_path: Path) -> None:
        tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(VocabularyError, match="WordPiece"):
            load(tmp_path)

    def test_a_broken_template_is_an_error_at_the_start(self, model_dir: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(model_dir, tmp_path / "m"))
        (copy / "chat_template.jinja").write_text("{% for %}")
        text = load(copy)
        with pytest.raises(VocabularyError, match="template"):
            asyncio.run(text.check())
        text.close()
