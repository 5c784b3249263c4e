"""Bodies of the requests under ``/sessionkv/v1/``. Null is absent, unknown fields are ignored."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from sessionkv.types import SamplingParams


class Named(BaseModel):
    """A session."""

    session: str


class OpenBody(Named):
    """Create a session, or resume one."""

    system: str | None = None
    history: Literal["keep", "follow"] | None = None
    budget_bytes: int | None = None


class TurnSampling(BaseModel):
    """How tokens are chosen; what is absent has the engine's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None

    def params(self) -> SamplingParams:
        """For the engine.

        Raises:
            InvalidRequest: A value is not allowed.
        """
        return SamplingParams(**self.model_dump(exclude_none=True))


class TurnBody(Named):
    """One user message."""

    text: str
    sampling: TurnSampling = Field(default_factory=TurnSampling)
    when_busy: Literal["error", "queue"] = "error"
    turn: str | None = Field(None, max_length=256, description="A name to stop it by.")


class ForkBody(Named):
    """A new session that goes on from here, or from one of its turns."""

    name: str
    node: str | None = None


class RewindBody(Named):
    """Take turns back."""

    turns: int = 1


class PinBody(Named):
    """Keep it in a tier longer than others."""

    tier: Literal["device", "host", "disk"] = "host"
    ttl_s: float | None = None
    priority: int = 50


class CloseBody(Named):
    """End what runs of it; without ``keep`` the session is deleted."""

    keep: bool = True


class StopBody(BaseModel):
    """End a turn that runs; with ``keep`` what was said so far is its reply."""

    turn: str
    keep: bool = True
