"""A model's chat template: compiling and rendering it, sandboxed.

Gives templates what they are written against: the Jinja settings, filters and functions that
Hugging Face's ``apply_chat_template`` documents. A template is somebody else's program; whatever
goes wrong in it becomes :class:`~sessionkv.errors.TemplateRefused` with its own words. Knows
nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sessionkv.errors import ModelBroken, TemplateRefused

_NOT_ASCII = re.compile("[\x80-\U000fffff]+")  # marks of spelled control tokens lie above these
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it only shows it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, in the order given: the very words the client sent."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _clock(now_s: float) -> Callable[[str], str]:
    """``strftime_now`` standing still at ``now_s`` (UTC, so that it is the same everywhere)."""
    moment = datetime.fromtimestamp(now_s, UTC)
    return lambda form: moment.strftime(form)


class ChatTemplate:
    """A compiled template. Immutable; safe to use from several threads."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        """Compile it.

        Raises:
            ModelBroken: It is not a Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelBroken(f"the chat template cannot be read: {error}") from None
        self._words = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        now_s: float,
        generation: bool,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: Maps as templates expect them.
            tools: In the client's order; None where there are none.
            now_s: Wall-clock seconds at which ``strftime_now`` stands still.
            generation: End with the opening of the assistant's next message.

        Raises:
            TemplateRefused: The template raised or failed; the message is its own.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation,
                strftime_now=_clock(now_s),
                **self._words,
            )
        except _FAILURES as error:
            raise TemplateRefused(f"the chat template refuses this: {error}") from None
