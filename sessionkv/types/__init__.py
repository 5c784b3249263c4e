"""Plain data shared by every layer: blocks, transfers, sampling, reports and journal records.

Standard library only; nothing here has behaviour beyond validation, packing and small derived
values. What a value means is said where it is declared; who owns it is said by whoever hands it
out.
"""

from sessionkv.types.blocks import BlockHash, BlockRecord, KVGeometry, Tier
from sessionkv.types.cache import Admission, DiskQuery, Fetched, Match, Meeting
from sessionkv.types.plan import (
    PENDING,
    BlockCopy,
    SampledToken,
    SequenceStart,
    SequenceStep,
    StepOutput,
    StepPlan,
    TokenLogprob,
)
from sessionkv.types.records import (
    DeleteHead,
    DeleteKey,
    DeleteNode,
    DropSession,
    ForgetKeys,
    HeadRecord,
    JournalOp,
    JournalState,
    JournalSummary,
    KeepIds,
    KeyRecord,
    NodeRecord,
    PutHead,
    PutKey,
    PutNode,
    SessionRow,
    StoredNode,
    StoredSession,
    TenantSessions,
)
from sessionkv.types.reports import CacheReport, FinishReason, MissReason, MissReport, Usage
from sessionkv.types.sampling import SamplingParams
from sessionkv.types.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens
from sessionkv.types.transfers import (
    BlockMove,
    DiskBlock,
    DiskReceipt,
    MoveOutcome,
    Transfer,
    TransferResult,
)
from sessionkv.types.utf8 import utf8_bytes

__all__ = [
    "PENDING",
    "TOKEN_BYTES",
    "Admission",
    "BlockCopy",
    "BlockHash",
    "BlockMove",
    "BlockRecord",
    "CacheReport",
    "DeleteHead",
    "DeleteKey",
    "DeleteNode",
    "DiskBlock",
    "DiskQuery",
    "DiskReceipt",
    "DropSession",
    "Fetched",
    "FinishReason",
    "ForgetKeys",
    "HeadRecord",
    "JournalOp",
    "JournalState",
    "JournalSummary",
    "KVGeometry",
    "KeepIds",
    "KeyRecord",
    "Match",
    "Meeting",
    "MissReason",
    "MissReport",
    "MoveOutcome",
    "NodeRecord",
    "PutHead",
    "PutKey",
    "PutNode",
    "SampledToken",
    "SamplingParams",
    "SequenceStart",
    "SequenceStep",
    "SessionRow",
    "StepOutput",
    "StepPlan",
    "StoredNode",
    "StoredSession",
    "TenantSessions",
    "Tier",
    "TokenLogprob",
    "Transfer",
    "TransferResult",
    "Usage",
    "pack_tokens",
    "unpack_tokens",
    "utf8_bytes",
]
