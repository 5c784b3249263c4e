"""What a front needs to know of a built engine, as plain data, and the front made of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from sessionkv.actor.front import EngineInfo, Front
from sessionkv.actor.writer import Writer
from sessionkv.config import LimitsConfig
from sessionkv.ipc.limits import limits_to_map
from sessionkv.text.folder import TextFiles
from sessionkv.text.model import TextModel
from sessionkv.types.access import Access


@dataclass(frozen=True, slots=True)
class FrontSetup:
    """An engine as its front sees it.

    Attributes:
        text: What the model's text folder holds.
        model: Its name, for clients.
        pid: Of the process that core runs in, for clients.
        max_model_len: Most positions of one sequence.
        access: Who may come in.
    """

    text: TextFiles
    model: str
    pid: int
    max_model_len: int
    limits: LimitsConfig
    access: Access = field(default_factory=Access)


def build_front(setup: FrontSetup) -> Front:
    """Load tokenizer and template.

    Raises:
        ModelError: The text cannot be used.
    """
    text = TextModel.load(setup.text)
    limits = limits_to_map(setup.limits) | {
        "max_model_len": setup.max_model_len,
        "vocab_size": text.vocab_size,
    }
    info = EngineInfo(
        engine=f"{setup.pid}-{secrets.token_hex(4)}",
        pid=setup.pid,
        model=setup.model,
        limits=limits,
        reply_style=text.reply_style.to_map(),
    )
    writer = Writer(text, setup.limits, setup.max_model_len)
    return Front(writer, setup.limits, info, access=setup.access)
