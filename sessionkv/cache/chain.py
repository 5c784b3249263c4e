"""The tokens of one sequence with the hash of each full block, every block hashed once.

``hash_i = sha256(tag || parent_i || count || tokens as u32 little-endian)``. The parent is the hash
of the block before (the identity's root for block 0), except at the first block past the public
prefix: there it is ``sha256(tag || hash before || framed tenant)``. The tenant enters through the
parent, which every record names: blocks of two tenants share no parent from there on, so neither a
full nor a partial match can cross, in memory or on disk.

An unfilled tail is keyed alike under a tag of its own. Pure: no memory, no tiers, no tokenizer.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Container, Iterable, Sequence

from sessionkv.cache.identity import frame
from sessionkv.types import BlockHash, BlockRecord

_TAG_FULL = b"sessionkv/block/full"
_TAG_PARTIAL = b"sessionkv/block/partial"
_TAG_TENANT = b"sessionkv/block/tenant"


def full_key(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Chain hash of a full block."""
    return _key(_TAG_FULL, parent, token_ids)


def partial_key(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Key of an unfilled tail; never equal to a chain hash."""
    return _key(_TAG_PARTIAL, parent, token_ids)


def tenant_parent(before: BlockHash, tenant: str) -> BlockHash:
    """Parent of the first block past the public prefix."""
    return BlockHash(hashlib.sha256(_TAG_TENANT + before + frame(tenant.encode())).digest())


def public_hashes(root: BlockHash, block_size: int, token_ids: Sequence[int]) -> list[BlockHash]:
    """Hashes of the full blocks of a prompt that all tenants may share."""
    found, before = [], root
    for end in range(block_size, len(token_ids) + 1, block_size):
        before = full_key(before, token_ids[end - block_size : end])
        found.append(before)
    return found


def _key(tag: bytes, parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    count = len(token_ids)
    return BlockHash(
        hashlib.sha256(tag + parent + struct.pack(f"<I{count}I", count, *token_ids)).digest()
    )


class TokenChain:
    """Tokens and block hashes of one sequence. Grows at the end; owned by one sequence.

    Args:
        root: :meth:`KVIdentity.root_hash`.
        block_size: Tokens a block.
        tenant: Whose blocks these are, past those that are public.
        public: From :func:`public_hashes`, of all declared prompts. May only grow while chains
            that were made with it go on.
        token_ids: Tokens so far, each below 2**32.
        hashes: Hashes of the first blocks of ``token_ids`` where they are known already; only the
            rest is hashed. Made with ``public`` as it was then.

    Raises:
        ValueError: ``hashes`` covers more than ``token_ids``.
    """

    __slots__ = (
        "_block_tokens",
        "_hashes",
        "_public",
        "_tenant_block",
        "_tenant_parent",
        "_token_ids",
        "block_size",
        "root",
        "tenant",
    )

    def __init__(
        self,
        root: BlockHash,
        block_size: int,
        *,
        tenant: str,
        public: Container[BlockHash] = frozenset(),
        token_ids: Iterable[int] = (),
        hashes: Iterable[BlockHash] = (),
    ) -> None:
        self.root = root
        self.block_size = block_size
        self.tenant = tenant
        self._public = public
        self._tenant_parent: BlockHash | None = None
        self._token_ids = list(token_ids)
        self._hashes = list(hashes)
        self._tenant_block = next(
            (i for i, key in enumerate(self._hashes) if key not in public), len(self._hashes)
        )
        self._block_tokens: list[tuple[int, ...]] = []
        if len(self._hashes) * block_size > len(self._token_ids):
            raise ValueError(
                f"{len(self._hashes)} hashes of {block_size} tokens for {len(self)} tokens"
            )
        self._hash_new_blocks()

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All tokens; grown through :meth:`append` and :meth:`extend` only."""
        return self._token_ids

    @property
    def hashes(self) -> list[BlockHash]:
        """Hash of each full block; a view, not to be changed."""
        return self._hashes

    def append(self, token_id: int) -> None:
        """Add one token; hashes a block when it completes it."""
        tokens = self._token_ids
        tokens.append(token_id)
        if len(tokens) % self.block_size == 0:
            self._hash_new_blocks()

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens. O(tokens added)."""
        self._token_ids.extend(token_ids)
        self._hash_new_blocks()

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens."""
        if not 0 <= num_tokens <= len(self._token_ids):
            raise ValueError(f"cannot cut a chain of {len(self)} tokens to {num_tokens}")
        num_blocks = num_tokens // self.block_size
        del self._token_ids[num_tokens:]
        del self._hashes[num_blocks:]
        del self._block_tokens[num_blocks:]
        if num_blocks < self._tenant_block:
            self._tenant_block, self._tenant_parent = num_blocks, None

    def parent(self, block: int) -> BlockHash:
        """Parent of block number ``block``, which may be the first one not full."""
        before = self._hashes[block - 1] if block else self.root
        if block != self._tenant_block:
            return before
        if self._tenant_parent is None:
            self._tenant_parent = tenant_parent(before, self.tenant)
        return self._tenant_parent

    def parents(self, num_blocks: int) -> list[BlockHash]:
        """Parent of each of the first ``num_blocks`` blocks; all but the last of them full."""
        if num_blocks == 0:
            return []
        found = [self.root, *self._hashes[: num_blocks - 1]]
        if self._tenant_block < num_blocks:
            found[self._tenant_block] = self.parent(self._tenant_block)
        return found

    def starts_domain(self, block: int) -> bool:
        """Whether the parent of ``block`` is no block's hash but the root or a tenant's start."""
        return block == 0 or block == self._tenant_block

    def block_tokens(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Tokens of each full block, at least the first ``num_blocks``; made once, a view."""
        made = self._block_tokens
        size = self.block_size
        missing = iter(self._token_ids[len(made) * size : num_blocks * size])
        made.extend(zip(*[missing] * size, strict=True))  # each step takes a block from it
        return made

    def block_record(self, block: int) -> BlockRecord:
        """Record of full block number ``block``."""
        tokens = self.block_tokens(block + 1)[block]
        return BlockRecord(self._hashes[block], self.parent(block), tokens)

    def tail_record(self, num_tokens: int) -> BlockRecord | None:
        """Record of the unfilled block at the end of the first ``num_tokens`` tokens, if any."""
        block, fill = divmod(num_tokens, self.block_size)
        if fill == 0:
            return None
        parent = self.parent(block)
        tokens = tuple(self._token_ids[num_tokens - fill : num_tokens])
        return BlockRecord(partial_key(parent, tokens), parent, tokens)

    def _hash_new_blocks(self) -> None:
        size, hashes = self.block_size, self._hashes
        for block in range(len(hashes), len(self._token_ids) // size):
            tokens = self._token_ids[block * size : (block + 1) * size]
            if block == self._tenant_block:  # all before are public; is it?
                shared = full_key(hashes[-1] if hashes else self.root, tokens)
                if shared in self._public:
                    hashes.append(shared)
                    self._tenant_block, self._tenant_parent = block + 1, None
                    continue
            hashes.append(full_key(self.parent(block), tokens))
