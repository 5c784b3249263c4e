"""What makes the KV of one token the same bytes: the root of every block hash.

Only what changes KV bytes is in the identity. Tenant, tokenizer, number of ranks and place of
storage are not, and must not be: blocks of two identities never match.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sessionkv.types import BlockHash, KVGeometry

_TAG = b"sessionkv/kv-identity"
FORMAT_VERSION = 1
"""Version of the hash chain and of the layout of a block's extent."""


def frame(value: bytes) -> bytes:
    """``value`` behind its length as u32 little-endian, so that fields cannot run together."""
    return len(value).to_bytes(4, "little") + value


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Everything that changes the bytes of a KV block.

    Attributes:
        weights_fingerprint: Digest of all weights.
        geometry: Shape of a block, its dtype and its size in tokens.
        rope: Positional encoding as configured, as canonical text.
        numerics: Version of the arithmetic (kernels, accumulation order) that writes KV.
        kv_scheme: Quantisation of the KV, ``"none"`` where it is stored in ``geometry.dtype``.
        adapter: Digest of an adapter merged into the forward pass, ``""`` for none.
        format_version: See :data:`FORMAT_VERSION`.
    """

    weights_fingerprint: str
    geometry: KVGeometry
    rope: str
    numerics: str
    kv_scheme: str = "none"
    adapter: str = ""
    format_version: int = FORMAT_VERSION

    def root_hash(self) -> BlockHash:
        """The parent of every first block: sha256 over tagged, length-framed fields."""
        shape = self.geometry
        fields: dict[str, object] = {
            "format": self.format_version,
            "weights": self.weights_fingerprint,
            "layers": shape.num_layers,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "block_size": shape.block_size,
            "dtype": shape.dtype,
            "element_bytes": shape.element_bytes,
            "rope": self.rope,
            "kv_scheme": self.kv_scheme,
            "numerics": self.numerics,
            "adapter": self.adapter,
        }
        digest = hashlib.sha256(frame(_TAG))
        for name, value in fields.items():
            digest.update(frame(name.encode()) + frame(str(value).encode()))
        return BlockHash(digest.digest())
