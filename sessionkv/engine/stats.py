"""All figures of an engine as one nested map of plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sessionkv.cache.ledger import CacheUsage, Contents, TierLedger
from sessionkv.engine.metrics import Gauges, TierGauge
from sessionkv.engine.parts import CoreParts
from sessionkv.store.block_stats import BlockStoreStats
from sessionkv.types import Tier


def engine_stats(parts: CoreParts, now: float) -> dict[str, Any]:
    """Metrics, rates, ledger and store. O(blocks in memory)."""
    usage = parts.kv.usage()
    blocks = parts.store.stats()
    journal = parts.store.journal_figures()
    values = parts.metrics.snapshot(now, _gauges(parts, usage, blocks))
    values["ledger"] = {
        "device": asdict(usage.ledger.device),
        "host": asdict(usage.ledger.host),
        "sequences": usage.ledger.sequences,
        "transfers_in_flight": usage.ledger.transfers_in_flight,
        "queued_blocks": usage.queued_blocks,
        "indexed_blocks": usage.indexed_blocks,
        "corrupt_blocks": usage.counters.corrupt,
        "lost_blocks": usage.counters.lost,
        "duplicate_blocks": usage.counters.duplicates,
    }
    values["retention"] = {
        "retained_blocks": parts.tree.retention.num_keys,
        "pinned_bytes": {t.value: parts.tree.retention.pinned_bytes(t) for t in Tier},
        "expected_sessions": len(parts.returns),
        "expected_blocks": parts.returns.num_blocks,
    }
    values["larger_cache"] = {
        tier.value: {
            "wanted_blocks": ghosts.num_wanted,
            "by_more_bytes": {
                str(blocks * parts.runner.geometry.block_bytes): hits
                for blocks, hits in ghosts.by_size()
            },
        }
        for tier, ghosts in parts.kv.wanted_from_larger().items()
    }
    values["rates"] = parts.planner.rates.report()
    values["store"] = {
        "journal_bytes": parts.store.journal_bytes(),
        "nodes": journal.num_nodes,
        "damaged_records": journal.damaged_records,
        "set_aside_journals": {
            str(moved.path): moved.moved_at for moved in parts.store.journals_set_aside()
        },
        "compactions": journal.compactions,
        "loaded_sessions": parts.tree.num_loaded,
        "loaded_bytes": parts.tree.num_bytes,
        "blocks": None if blocks is None else asdict(blocks),
        "disk_off": parts.disk_off,
        "unanswered": sorted(unanswered(parts)),
    }
    values["weights_bytes"] = parts.runner.weights_bytes
    return values


def unanswered(parts: CoreParts) -> frozenset[str]:
    """Kinds of transfers that nobody waits for any longer, as none is answered, in words."""
    found = {f"writes to {tier.value}" for tier in parts.kv.silent_tiers}
    return frozenset(found | {"reads from disk"} if parts.scheduler.disk_is_late else found)


def _gauges(parts: CoreParts, usage: CacheUsage, disk: BlockStoreStats | None) -> Gauges:
    geometry, counters = parts.runner.geometry, usage.counters
    size = geometry.block_bytes

    def tier(ledger: TierLedger, tier_name: Tier, held: Contents, wasted_slots: int) -> TierGauge:
        return TierGauge(
            used_bytes=(ledger.total - ledger.free) * size,
            cap_bytes=ledger.total * size,
            leased_blocks=ledger.leased + ledger.filling,
            wasted_bytes=wasted_slots * geometry.token_bytes,
            evictions=counters.evicted.get(tier_name, 0),
            evictions_waited=counters.waited.get(tier_name, 0),
            clean_blocks=held.clean_blocks,
            dirty_blocks=held.dirty_blocks,
        )

    device = tier(usage.ledger.device, Tier.DEVICE, usage.device, usage.wasted_device_slots)
    host = tier(usage.ledger.host, Tier.HOST, usage.host, usage.host.unused_slots)
    on_disk = TierGauge(
        used_bytes=0 if disk is None else disk.used_bytes,
        cap_bytes=parts.disk_bytes,
        leased_blocks=0 if disk is None else disk.leased_slots,
        wasted_bytes=0,
        evictions=0 if disk is None else disk.evicted_blocks,
        clean_blocks=0 if disk is None else disk.blocks,
    )
    longest = -(-parts.runner.max_model_len // geometry.block_size) * size
    return Gauges(
        requests_running=parts.scheduler.num_running,
        requests_waiting=parts.scheduler.num_waiting,
        sessions=parts.tree.num_sessions,
        preemptions=parts.scheduler.num_preemptions,
        looked_up_blocks=counters.looked_up,
        hit_blocks=counters.hit,
        running_bytes=(usage.ledger.device.leased + usage.ledger.device.filling) * size,
        preallocated_bytes=usage.ledger.sequences * longest,
        tiers={Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: on_disk},
    )
