"""A compiler of grammars that a test holds."""

import threading
from typing import Any

from sessionkv.engine.grammar import GrammarCompiler, TokenGrammar
from sessionkv.text.builtin import BYTE_VOCAB_SIZE, byte_text
from sessionkv.types import SamplingParams


class Held(GrammarCompiler):
    """Compiles nothing before it may, and remembers in which order it was asked."""

    def __init__(self) -> None:
        super().__init__(byte_text(), BYTE_VOCAB_SIZE)
        self.asked: list[str] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def start(self, sampling: SamplingParams, stop_token_ids: Any) -> TokenGrammar:
        self.begun.set()
        assert self.may_go_on.wait(30)
        assert sampling.grammar is not None
        self.asked.append(sampling.grammar["regex"])
        return super().start(sampling, stop_token_ids)
