"""What a core is made of; put together by ``engine.build``, owned by the core thread."""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.cache.expected import ExpectedReturns
from sessionkv.cache.manager import KVCacheManager
from sessionkv.cache.tree import TurnTree
from sessionkv.cache.turns import HeadId
from sessionkv.config import EngineConfig
from sessionkv.engine.grammar_desk import GrammarDesk
from sessionkv.engine.metrics import Metrics
from sessionkv.engine.movers import Mover
from sessionkv.engine.planner import LoadPlanner
from sessionkv.engine.runner import Runner
from sessionkv.engine.scheduler.scheduler import Scheduler
from sessionkv.engine.tenant_figures import TenantFigures
from sessionkv.store.worker import StoreWorker
from sessionkv.types import BlockHash


@dataclass(frozen=True, slots=True)
class CoreParts:
    """Everything below the step loop.

    Attributes:
        root: Root of the hash chain: the KV identity.
        tokenizer_digest: Of the tokenizer that new turns are written with.
        template_digest: Of the chat template.
        pinned: Sessions that were pinned when the store was opened.
        host_bytes: Cap of the host tier, 0 when it is off.
        disk_bytes: Cap of the disk tier, 0 when it is off.
        disk_off: Why it is, where it was asked for and could not be had.
    """

    config: EngineConfig
    root: BlockHash
    tokenizer_digest: str
    template_digest: str
    tree: TurnTree
    returns: ExpectedReturns
    pinned: tuple[HeadId, ...]
    kv: KVCacheManager
    scheduler: Scheduler
    planner: LoadPlanner
    runner: Runner
    store: StoreWorker
    mover: Mover
    grammars: GrammarDesk
    metrics: Metrics
    tenants: TenantFigures
    host_bytes: int
    disk_bytes: int
    disk_off: str = ""
