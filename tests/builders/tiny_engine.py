"""Whole engines over tiny random models, for what only real attention and sampling show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from sessionkv import EngineConfig
from sessionkv.engine.build import BuiltEngine, build_engine
from sessionkv.engine.runner import LaunchedStep
from sessionkv.types import StepPlan
from tests.builders.engine import Building, CheckedEngine, engine_config
from tests.builders.tiny_models import hugging_face_model, save_model


def save_speaking_model(
    folder: Path, variant: str = "llama", *, seed: int = 7, **shape: object
) -> None:
    """Save a model with a tokenizer that an engine can decode with."""
    save_model(hugging_face_model(variant, seed=seed, **shape), folder)
    words = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(words))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(words))


class Gated:
    """A runner with a gate before each step."""

    def __init__(self, runner: Any, gate: Callable[[StepPlan], None]) -> None:
        self._runner = runner
        self._gate = gate

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._gate(plan)
        step: LaunchedStep = self._runner.launch(plan)
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class _TinyBuilding(Building):
    """Builds with the model's own runner; everything that is found is loaded."""

    def __init__(self, gate: Callable[[StepPlan], None] | None) -> None:
        super().__init__()
        self._gate = gate

    def __call__(self, config: EngineConfig, **arguments: Any) -> BuiltEngine:
        gate = self._gate
        wrap = None if gate is None else lambda runner: Gated(runner, gate)
        self.built = build_engine(config, wrap_runner=wrap, **arguments)
        self.built.parts.planner.rates.observe_prefill = lambda *args, **fields: None
        return self.built


@contextmanager
def tiny_engine(
    folder: Path,
    *,
    variant: str = "llama",
    seed: int = 7,
    gate: Callable[[StepPlan], None] | None = None,
    **config: Any,
) -> Iterator[CheckedEngine]:
    """An engine over the model that is saved (again) below ``folder``, with its store there too."""
    save_speaking_model(folder / "model", variant, seed=seed)
    whole = replace(
        engine_config(folder / "store", **config),
        model=str(folder / "model"),
        model_cache=folder / "cache",
        device="cpu",
        offline=True,
    )
    engine = CheckedEngine(whole, _TinyBuilding(gate))
    try:
        yield engine
    finally:
        engine.close()
