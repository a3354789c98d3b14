"""
The chat template of a model: messages in, prompt text out, in Jinja's sandbox.

The environment offers what transformers offers to templates (trim_blocks, lstrip_blocks, loop controls, `tojson`,
`raise_exception`, `strftime_now`), so that a template renders here as it does there.  Templates come with models and
are not trusted: no attribute that could leave the sandbox, no change of our objects, and a bound on the output.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Never

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.wire import ChatMessage, Json

PROMPT_CHARS_MAX = 32 * 1024 * 1024


class TemplateError(Exception):
    """The template cannot make a prompt of these messages; the text is fit for the client."""


class ChatTemplate:
    """A compiled template.  Raises jinja2.TemplateError when it is no template at all."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = _environment().from_string(source)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt.  Raises TemplateError."""
        variables: dict[str, object] = {**self._special_tokens, **(extra or {})}
        variables |= {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        variables["messages"] = [template_message(message) for message in messages]
        pieces: list[str] = []
        chars = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                chars += len(piece)
                if chars > PROMPT_CHARS_MAX:
                    raise TemplateError(f"The prompt is longer than {PROMPT_CHARS_MAX} characters.")
        except jinja2.TemplateError as error:
            raise TemplateError(f"The chat template refused the messages: {str(error)[:500]}") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            # Whatever plain Python does when a template meets messages that it was not written for.
            raise TemplateError("The chat template of this model cannot render these messages.") from None
        return "".join(pieces)


def template_message(message: ChatMessage) -> dict[str, object]:
    """A message as templates expect it: text content, `developer` as `system`, absent fields left out."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    shown: dict[str, object] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["content"] = content or ""
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return shown


def _arguments(text: str) -> Json:
    """Templates expect an object where OpenAI sends its JSON text; other text stays text."""
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
