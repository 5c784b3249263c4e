"""Grammars of structured output, as masks of tokens; the only module that knows llguidance.

A grammar is compiled for one model's vocabulary and then followed by one turn, token by token: at
each place it says which tokens may come next. It starts with the first token that is generated,
whatever came before it, and what is cached of the prompt plays no part. A mask is packed: bit
``i % 8`` of byte ``i // 8`` is token ``i``, in whole words of 32 bits.

What compiling and each token may cost is bounded by the library, and by the limits below.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Set
from pathlib import Path
from typing import Any, NoReturn, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from sessionkv.errors import InvalidRequest
from sessionkv.text.control import ControlMarks
from sessionkv.text.encoder import Encoder
from sessionkv.text.folder import TextFiles, read_text
from sessionkv.text.vocabulary import Vocabulary
from sessionkv.types import SamplingParams
from sessionkv.types.grammars import Grammar

_MAX_CACHED = 64
"""Compiled grammars that are kept: applications send the same few again and again."""
_MAX_LEXER_STATES = 20_000
"""Of one turn. A schema of 150 properties takes some 2,000, most others hundreds. Each is about 320
bytes: 6 MB a turn at worst, and 1.6 GB where all of 256 that run are made for it."""
_MAX_REASON_CHARS = 300
_JSON_WHITESPACE = r"( |\n {0,40})"
"""A space, or a new line with its indentation. Without a bound some models write nothing else."""
_FIELD = "sampling.grammar"


class TokenGrammar:
    """One turn on its way through a grammar. The core thread, once it is made.

    Attributes:
        mask: Tokens that may come next; at least one. End tokens are among them where the reply
            may end here; before ``min_tokens`` only where nothing else may come.
    """

    def __init__(
        self, matcher: LLMatcher, *, min_tokens: int, stop_token_ids: Set[int], vocab_size: int
    ) -> None:
        """At the first token.

        Args:
            matcher: At its start; the grammar's own from here on.
            min_tokens: See :class:`~sessionkv.types.SamplingParams`.
            stop_token_ids: Ids that end the turn.
            vocab_size: Of the model's logits.

        Raises:
            InvalidRequest: Nothing satisfies the grammar.
        """
        self._matcher = matcher
        self._num_bytes = -(-vocab_size // 32) * 4
        self._num_to_come = min_tokens
        self._stops = sum(1 << i for i in stop_token_ids if i < vocab_size) if min_tokens else 0
        self._no_padding = (1 << vocab_size) - 1
        self.mask = b""
        reason = self._look()
        if reason is not None:
            _refuse(reason)

    def advance(self, token_id: int) -> str | None:
        """A token was sampled, and the turn goes on behind it.

        Returns:
            Why it cannot go on, None where :attr:`mask` says how.
        """
        self._num_to_come -= self._num_to_come > 0
        try:
            self._matcher.consume_token(token_id)
        except BaseException as failure:  # noqa: BLE001 - as below
            return f"its grammar: {type(failure).__name__}"
        return self._look()

    def _look(self) -> str | None:
        try:
            mask = self._matcher.compute_bitmask()[: self._num_bytes]
        except BaseException as failure:  # noqa: BLE001 - the library's panics are no Exceptions
            return f"its grammar: {type(failure).__name__}"
        if self._matcher.is_error():
            return f"its grammar: {_first_line(self._matcher.get_error())}"
        allowed = int.from_bytes(mask, "little") & self._no_padding
        if self._num_to_come and allowed & ~self._stops:
            allowed &= ~self._stops
        if not allowed:
            return "its grammar: no token of the model may come next"
        self.mask = allowed.to_bytes(self._num_bytes, "little")
        return None


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. One thread."""

    def __init__(self, text: Path | TextFiles, vocab_size: int) -> None:
        """Nothing is read before the first grammar comes.

        Args:
            text: The model's text folder, or what one would hold.
            vocab_size: Of the model's logits.
        """
        self._text, self._vocab_size = text, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._compiled: OrderedDict[tuple[str, Any], LLMatcher] = OrderedDict()

    def start(self, sampling: SamplingParams, stop_token_ids: Set[int]) -> TokenGrammar:
        """A turn's grammar, at its first token. Up to some 100 ms; what was compiled before, none.

        Raises:
            InvalidRequest: It is no grammar, or not one that can be had; with the reason.
        """
        if sampling.grammar is None:
            raise ValueError("the turn has no grammar")
        ((kind, content),) = sampling.grammar.items()
        matcher = self._compiled.get((kind, content))
        if matcher is None:
            matcher = self._compile(sampling.grammar)
            self._compiled[kind, content] = matcher
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end((kind, content))
        return TokenGrammar(
            matcher.deep_copy(),
            min_tokens=sampling.min_tokens,
            stop_token_ids=stop_token_ids,
            vocab_size=self._vocab_size,
        )

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            view = _VocabularyView(self._text, self._vocab_size)
            # The library looks at its attributes alone, and reads vocabularies of few kinds itself.
            self._tokenizer = LLTokenizer(cast(TokenizerWrapper, view), eos_token=view.ends)
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            _refuse(matcher.get_error())
        return matcher


class _VocabularyView:
    """A model's vocabulary as the library asks for it.

    Called with what has to come next, it says in which tokens: those that the engine makes of the
    same text, in which a control token is never real.

    Attributes:
        tokens: Bytes of each token; control tokens as they are spelled.
        special_token_ids: The control tokens. They match no text, as they are spelled or otherwise.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, text: Path | TextFiles, vocab_size: int) -> None:
        facts, tokenizer, _ = read_text(text)
        vocabulary = Vocabulary(tokenizer)
        self._encoder = Encoder(tokenizer, vocabulary, ControlMarks(vocabulary.control))
        self._turn = threading.Lock()  # one grammar is compiled while others go on
        self.tokens = [vocabulary.shown[token_id] for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in vocabulary.spellings if i < vocab_size)
        self.ends = [token_id for token_id in facts.eos_token_ids if token_id < vocab_size]
        if not self.ends:
            _refuse("the model has no token that ends a reply")
        self.eos_token_id = self.ends[0]

    def __call__(self, text: str) -> list[int]:
        with self._turn:
            return list(self._encoder.encode_text_inside(text))


def _source(grammar: Grammar) -> str:
    """A grammar in the library's words."""
    ((kind, content),) = grammar.items()
    if kind == "regex":
        return LLMatcher.grammar_from_regex(content)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(content)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, content))}")
    schema = '{"type": "object"}' if kind == "json_object" else content
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        _refuse(f"the schema is not JSON: {error}")
    if not isinstance(parsed, dict):
        _refuse("the schema is not a JSON object")
    defaults: Any = {"whitespace_pattern": _JSON_WHITESPACE}  # its type has no name at run time
    return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)


def _refuse(reason: str) -> NoReturn:
    reason = _first_line(reason)
    message = f"{_FIELD} cannot be used: {reason}"
    raise InvalidRequest(_FIELD, reason, "a grammar that can be compiled", message=message)


def _first_line(text: str) -> str:
    """What the library says at length begins with what is wrong."""
    return text.strip().split("\n", 1)[0][:_MAX_REASON_CHARS]
