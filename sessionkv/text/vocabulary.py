"""What bytes each token stands for, read from a tokenizer's own decoder.

Decoding is concatenation: the text of a sequence is the UTF-8 reading of its tokens' bytes, with
U+FFFD for what is not UTF-8. So decoding one more token never looks at the ones before it, and
``decode(a) + decode(b)`` equals ``decode(a + b)`` wherever ``a`` ends on a whole character. Covers
byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM), byte-fallback ones with a word mark
(Llama 2, Mistral, Gemma) and Metaspace; others are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from sessionkv.errors import ModelUnsupported

_CALL_MARKS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
_REASONING_MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]")
REPLY_MARKS = frozenset((*_CALL_MARKS, *_REASONING_MARKS))
"""Control tokens that are shown all the same: they say which parts of a reply are a tool call or
reasoning. In many vocabularies they are no control tokens anyway."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character -> byte value in byte-level vocabularies (GPT-2's reversible mapping).

    Printable bytes stand for themselves; the others take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Vocabulary:
    """Token ids, their bytes, and which of them are control tokens. One thread.

    Attributes:
        control: Spelling -> id of the control tokens: added tokens marked special.
        spellings: The same the other way round.
        visible: id -> bytes as a reader sees them; control tokens but :data:`REPLY_MARKS` are
            empty.
        shown: id -> bytes with control tokens spelled out.
        max_token_bytes: No token stands for more bytes of text.
        strips_space: The tokenizer puts a space before text; decoding from the start drops it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the decoder's rules.

        Raises:
            ModelUnsupported: The decoder is of a kind that is not known here.
        """
        added = tokenizer.get_added_tokens_decoder()
        self.control: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self.spellings: Mapping[int, str] = {i: text for text, i in self.control.items()}
        rules = _DecoderRules(tokenizer)
        contents = {token_id: token.content.encode() for token_id, token in added.items()}
        hidden = [i for i, text in self.spellings.items() if text not in REPLY_MARKS]
        self.strips_space = rules.strips_space
        self.max_token_bytes = max(
            (len(token.encode()) for token in tokenizer.get_vocab()), default=1
        )
        self.shown: Mapping[int, bytes] = _TokenBytes(tokenizer, rules, contents)
        self.visible: Mapping[int, bytes] = _TokenBytes(
            tokenizer, rules, contents | dict.fromkeys(hidden, b"")
        )


class _TokenBytes(dict[int, bytes]):
    """id -> bytes, worked out on first use; ids the tokenizer does not have are empty."""

    def __init__(
        self, tokenizer: Tokenizer, rules: _DecoderRules, known: Mapping[int, bytes]
    ) -> None:
        super().__init__(known)
        self._tokenizer = tokenizer
        self._rules = rules

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        value = b"" if token is None else self._rules.token_bytes(token)
        self[token_id] = value
        return value


class _DecoderRules:
    """The parts of a decoder that matter for bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.strips_space = False
        self._alphabet: dict[str, int] | None = None
        self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        decoder = tokenizer.decoder
        if decoder is None:
            raise ModelUnsupported("the tokenizer has no decoder")
        self._read(json.loads(decoder.__getstate__()))

    def _read(self, decoder: Mapping[str, Any]) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": parts}:
                for part in parts:
                    self._read(part)
            case {"type": "ByteLevel"}:
                self._alphabet = byte_alphabet()
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replace.append((old, new))
            case {"type": "Metaspace", "replacement": mark}:
                self._replace.append((mark, " "))
                self.strips_space = decoder.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                self.strips_space = start > 0
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelUnsupported(f"tokenizer decoder {decoder.get('type')} is not supported")

    def token_bytes(self, token: str) -> bytes:
        """Bytes of a token that is not an added one."""
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()
