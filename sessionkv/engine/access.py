"""What core does with keys and public prompts: quotas, figures of tenants, hashes that all share.

Core never sees a key: who a tenant is was found out at the door.
"""

from __future__ import annotations

from sessionkv.cache.chain import public_hashes
from sessionkv.engine.messages import PublicPrefixes
from sessionkv.engine.parts import CoreParts
from sessionkv.types.access import Access


def apply_access(parts: CoreParts, access: Access) -> None:
    """Quotas and tenants from now on. Core thread, or before it runs."""
    parts.tree.retention.set_limits(access.quotas, has_tenants=bool(access.keys))
    parts.tenants.set_tenants(access.tenants)


def declare_public(parts: CoreParts, message: PublicPrefixes) -> None:
    """Chains that are made from now on share the full blocks of these prefixes. O(tokens).

    What was declared once stays so until the engine ends: chains that go on were made with it.
    """
    public = parts.tree.retention.quotas.public
    for token_ids in message.prefixes:
        public.update(public_hashes(parts.root, parts.kv.block_size, token_ids))
