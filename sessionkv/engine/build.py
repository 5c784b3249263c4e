"""Puts a core together: model or checksum runner, tiers, store, tree, scheduler.

Device and model are looked at first, so that a start which cannot succeed makes no store. The store
directory is locked before the model is loaded, so that a second engine on it fails before that.
Whatever fails later gives back what was opened before it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sessionkv.cache.expected import ExpectedReturns
from sessionkv.cache.identity import KVIdentity
from sessionkv.cache.manager import KVCacheManager
from sessionkv.cache.retention import Retention
from sessionkv.cache.tree import TurnTree
from sessionkv.config import CacheConfig, EngineConfig, user_cache_dir
from sessionkv.engine.checksum_runner import ChecksumRunner, checksum_geometry
from sessionkv.engine.grammar_desk import GrammarDesk
from sessionkv.engine.inbox import Inbox
from sessionkv.engine.metrics import Metrics
from sessionkv.engine.movers import HostArena, Mover
from sessionkv.engine.parts import CoreParts
from sessionkv.engine.planner import LoadPlanner
from sessionkv.engine.runner import Runner
from sessionkv.engine.scheduler.admission import MOST_BLOCKS
from sessionkv.engine.scheduler.batch import StepBudget
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.sizing import (
    MachineMemory,
    MemoryPlan,
    check_memory,
    measure,
    memory_for,
    plan_memory,
    step_budget,
)
from sessionkv.engine.staging import STAGING_BYTES
from sessionkv.engine.tenant_figures import TenantFigures
from sessionkv.errors import ConfigError, StoreUnavailable
from sessionkv.store.block_store import BlockStore
from sessionkv.store.directory import StoreDirectory
from sessionkv.store.gates import OPEN_GATES, Gates
from sessionkv.store.journal import Journal
from sessionkv.store.worker import StoreWorker
from sessionkv.text.builtin import BYTE_VOCAB_SIZE, byte_text
from sessionkv.text.folder import TextFiles, read_text_facts
from sessionkv.types import Tier

if TYPE_CHECKING:
    from sessionkv.model.prepare import PreparedModel

_log = logging.getLogger(__name__)

CHECKSUM_MODEL = "checksum"
CHECKSUM_MAX_LEN = 131_072
CHECKSUM_BLOCKS = 16_384

ProgressSink = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A core's parts with what stands under them.

    Attributes:
        text: The model's text folder, or what it would hold, for the front.
        store_path: The store directory.
        memory: The memory split, as measured and decided.
        resources: Closes everything, last opened first.
    """

    parts: CoreParts
    inbox: Inbox[object]
    text: Path | TextFiles
    store_path: Path
    memory: MemoryPlan
    resources: ExitStack


@dataclass(frozen=True, slots=True)
class _ChosenChecksum:
    memory: MemoryPlan


@dataclass(frozen=True, slots=True)
class _ChosenCpu:
    prepared: PreparedModel
    memory: MemoryPlan


@dataclass(frozen=True, slots=True)
class _ChosenGpu:
    prepared: PreparedModel
    device: Any  # torch's
    machine: MachineMemory


_Chosen = _ChosenChecksum | _ChosenCpu | _ChosenGpu
"""What is to be loaded, once it is known to be there."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model ready to run."""

    text: Path | TextFiles
    memory: MemoryPlan
    budget: StepBudget
    runner: Runner


def build_engine(
    config: EngineConfig,
    *,
    progress: ProgressSink | None = None,
    wrap_runner: Callable[[Runner], Runner] | None = None,
    gates: Gates = OPEN_GATES,
) -> BuiltEngine:
    """Find the model, open the store, load the model, open the journal.

    Args:
        config: What to build.
        progress: Told of downloads, conversion and loading.
        wrap_runner: Puts something in front of the runner, such as gates and faults of tests.
        gates: Points where tests hold the store's and the movers' threads.

    Raises:
        StoreInUse, StoreUnavailable: The store directory or its journal cannot be had.
        ModelError: The model cannot be had.
        ConfigError: The configuration does not fit this machine.
    """
    with ExitStack() as stack:
        store, progress = _store_path(config, stack), progress or _silent
        chosen = _choose(config, store, progress)
        directory = stack.enter_context(StoreDirectory.open(store))
        loaded = _load_runner(config, chosen, progress)
        if wrap_runner is not None:
            loaded = replace(loaded, runner=wrap_runner(loaded.runner))
        stack.callback(loaded.runner.close)
        inbox: Inbox[object] = Inbox()
        stack.callback(inbox.close)
        parts = _build_parts(config, loaded, directory, inbox, gates, stack)
        return BuiltEngine(
            parts=parts,
            inbox=inbox,
            text=loaded.text,
            store_path=directory.path,
            memory=loaded.memory,
            resources=stack.pop_all(),
        )


def _build_parts(
    config: EngineConfig,
    loaded: _Loaded,
    directory: StoreDirectory,
    inbox: Inbox[object],
    gates: Gates,
    stack: ExitStack,
) -> CoreParts:
    """Tiers, journal, tree and scheduler around a loaded runner."""
    runner, memory = loaded.runner, loaded.memory
    geometry, block_size = runner.geometry, runner.geometry.block_size
    root = KVIdentity(
        weights_fingerprint=runner.fingerprint, geometry=geometry, rope="", numerics=""
    ).root_hash()
    # Without prefix cache nothing is ever looked for in a lower tier.
    has_cache = config.cache.prefix_cache
    num_host_blocks = memory.num_host_blocks if has_cache else 0
    disk_bytes = memory.disk_bytes if has_cache else 0
    caps = {
        Tier.DEVICE: runner.num_blocks * geometry.block_bytes,
        Tier.HOST: memory.num_host_blocks * geometry.block_bytes,
        Tier.DISK: memory.disk_bytes,
    }
    retention = Retention(block_bytes=geometry.block_bytes, caps=caps)
    journal = Journal(directory)
    summary = journal.summary()
    tree = TurnTree(config.limits, retention, block_size=block_size, journal=summary)
    blocks, disk_off = None, ""
    if disk_bytes:
        try:
            blocks = BlockStore(
                directory, root, geometry, cap_bytes=disk_bytes, rank_of=retention.rank_on_disk,
                gates=gates,
            )  # fmt: skip
        except StoreUnavailable as error:
            # The conversations are in the journal: without their KV they are slower, no more.
            _log.warning("the disk tier is off until the next start: %s", error)
            disk_bytes, disk_off = 0, str(error)
    store = StoreWorker(journal, blocks, inbox, gates=gates)
    stack.callback(store.close, config.limits.drain_s)
    with memory_for("cache.host_bytes", num_host_blocks * geometry.block_bytes):
        arena = HostArena(num_host_blocks, geometry.block_bytes)
    staging_bytes = min(STAGING_BYTES, disk_bytes, runner.num_blocks * geometry.block_bytes)
    mover = Mover(runner.memory, arena, store, inbox, staging_bytes=staging_bytes, gates=gates)
    stack.callback(mover.close, config.limits.drain_s)
    kv = KVCacheManager(
        root,
        block_size=block_size,
        num_device_blocks=runner.num_blocks,
        num_host_blocks=num_host_blocks,
        disk=blocks is not None,
        spill_to_disk=config.cache.durability != "off",
        prefix_cache=has_cache,
        retention=retention,
    )
    planner = LoadPlanner(block_size=block_size)
    scheduler = Scheduler(
        kv,
        planner,
        config=config.scheduler,
        budget=loaded.budget,
        max_model_len=runner.max_model_len,
        # Beside steps that core computes itself nothing is gained by parts.
        most_blocks=MOST_BLOCKS if runner.plans_ahead else kv.num_blocks,
    )
    facts = read_text_facts(loaded.text)
    grammars = GrammarDesk(
        loaded.text, runner.vocab_size, inbox, max_waiting=config.scheduler.max_queue
    )
    stack.callback(grammars.close)
    return CoreParts(
        config=config,
        root=root,
        tokenizer_digest=facts.tokenizer_digest,
        template_digest=facts.template_digest,
        tree=tree,
        returns=ExpectedReturns(retention, max_blocks=max(runner.num_blocks, num_host_blocks) // 2),
        pinned=summary.pinned,
        kv=kv,
        scheduler=scheduler,
        planner=planner,
        runner=runner,
        store=store,
        mover=mover,
        grammars=grammars,
        metrics=Metrics(),
        tenants=TenantFigures(),
        host_bytes=num_host_blocks * geometry.block_bytes,
        disk_bytes=disk_bytes,
        disk_off=disk_off,
    )


def _choose(config: EngineConfig, store: Path, progress: ProgressSink) -> _Chosen:
    """Device, model and memory split; fetches and converts the model, and makes nothing else."""
    machine = measure(store)
    if config.model == CHECKSUM_MODEL:
        memory = plan_memory(
            _small(config.cache),
            checksum_geometry(config.cache.block_size),
            model_max_len=CHECKSUM_MAX_LEN,
            asked_max_len=config.max_model_len,
            machine=machine,
        )
        return _ChosenChecksum(memory)
    # Loaded only here: an engine without a model must not need its libraries.
    from sessionkv.engine.gpu.devices import count_gpus, pick_device
    from sessionkv.model.prepare import prepare_model

    # Asked before a download, which may take long.
    check_memory(config.cache, machine)
    device = pick_device(config.device, 0 if config.device == "cpu" else count_gpus())
    if device.type == "cpu" and config.dtype not in ("auto", "float32"):
        raise ConfigError("dtype", config.dtype, "auto or float32 on the CPU")
    prepared = prepare_model(
        config.model,
        cache_dir=config.model_cache or user_cache_dir(),
        offline=config.offline,
        progress=lambda event: progress(asdict(event)),
    )
    if device.type == "cuda":  # what is left for KV is known when its weights are loaded
        return _ChosenGpu(prepared, device, machine)
    memory = plan_memory(
        config.cache,
        prepared.spec.kv_geometry(config.cache.block_size),
        model_max_len=prepared.spec.max_model_len,
        asked_max_len=config.max_model_len,
        machine=machine,
    )
    return _ChosenCpu(prepared, memory)


def _load_runner(config: EngineConfig, chosen: _Chosen, progress: ProgressSink) -> _Loaded:
    """Text folder, memory split and runner of the chosen model."""
    asked_tokens = config.scheduler.step_tokens
    if isinstance(chosen, _ChosenChecksum):
        memory = chosen.memory
        checksum = ChecksumRunner(
            memory.num_device_blocks,
            config.cache.block_size,
            vocab_size=BYTE_VOCAB_SIZE,
            max_model_len=memory.max_model_len,
            full_read=False,
        )
        text = byte_text(max_model_len=CHECKSUM_MAX_LEN)
        return _Loaded(text, memory, step_budget(asked_tokens, on_gpu=False), checksum)
    prepared = chosen.prepared
    if isinstance(chosen, _ChosenGpu):
        from sessionkv.engine.gpu.build import load_gpu_runner

        memory, gpu_runner = load_gpu_runner(
            config,
            prepared,
            device=chosen.device,
            machine=chosen.machine,
            progress=lambda stage, done, total: progress(
                {"stage": stage, "done": done, "total": total, "unit": "steps"}
            ),
        )
        budget = step_budget(asked_tokens, on_gpu=True)
        budget = replace(budget, small=gpu_runner.small_step_tokens)
        return _Loaded(prepared.text_dir, memory, budget, gpu_runner)
    from sessionkv.engine.model_runner import ModelRunner

    memory = chosen.memory
    progress({"stage": "load", "done": 0, "total": 1, "unit": "steps"})
    runner = ModelRunner(
        prepared,
        block_size=config.cache.block_size,
        num_blocks=memory.num_device_blocks,
        max_model_len=memory.max_model_len,
        threads=config.threads,
        mirror_bytes=memory.mirror_bytes,
    )
    progress({"stage": "load", "done": 1, "total": 1, "unit": "steps"})
    return _Loaded(prepared.text_dir, memory, step_budget(asked_tokens, on_gpu=False), runner)


def _small(cache: CacheConfig) -> CacheConfig:
    """Cells are tiny: shares of this machine's memory would be millions of blocks."""
    block_bytes = checksum_geometry(cache.block_size).block_bytes
    device, host = cache.device_blocks, cache.host_bytes
    if device is None and cache.device_bytes is None:
        device = CHECKSUM_BLOCKS
    if host is None:
        host = CHECKSUM_BLOCKS * block_bytes
    return replace(cache, device_blocks=device, host_bytes=host)


def _store_path(config: EngineConfig, stack: ExitStack) -> Path:
    if config.store is not None:
        return Path(config.store)  # whoever writes a string means it
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sessionkv-store-")))


def _silent(event: dict[str, Any]) -> None:
    del event
