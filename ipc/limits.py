"""Bounds of the wire that are fixed, beside those of :class:`~sessionkv.config.LimitsConfig`.

They keep a frame's decoded size near its size on the wire, whatever it holds.
"""

from __future__ import annotations

from typing import Any

from sessionkv.config import LimitsConfig

MAX_ID = 2**63 - 1
"""Highest request id."""
MAX_TOKEN = 2**32 - 1
"""Highest token id that can be written; the vocabulary's own bound is the engine's to check."""
MAX_ARRAY = 2**17
"""Entries of one array; a longer token list is sent as binary."""
MAX_MAP = 2**12
"""Entries of one map."""
MAX_ITEMS = 2**20
"""Values in one frame, containers and their entries counted."""
MAX_KEY_BYTES = 256
"""Length of a field's name where a frame that cannot be read whole is searched for its id."""
MAX_TOOLS = 1024
"""Tools of a session or a request."""
MAX_ROLE_BYTES = 64
"""Length of a message's role."""
MAX_CLIENT_BYTES = 256
"""Length of the name that a client gives itself."""
MAX_IDEMPOTENCY_KEY_BYTES = 256
"""Length of an idempotency key."""
MAX_API_KEY_BYTES = 4096
"""Length of the key in ``hello``."""
MAX_TENANT_BYTES = 256
"""Length of a tenant's name."""
MAX_NODE_BYTES = 64
"""Length of a node id."""
MAX_METADATA_BYTES = 2**16
"""Metadata of one turn or of a session's root, as JSON."""
MAX_PRIORITY = 100
"""Priorities of turns go from minus this to this, those of pins from 0 to this."""
MAX_DEADLINE_S = 7 * 24 * 3600.0
"""Longest deadline of a turn."""
MAX_TTL_S = 10 * 365 * 24 * 3600.0
"""Longest life of a pin."""
MAX_PAGE = 10_000
"""Sessions in one answer to ``list``."""
MAX_NODES = 4096
"""Turns, sessions or numbers of turns in one ``export`` or ``import``."""
LINGER_MS = 1000
"""How long an engine's last replies may take to leave after it has closed its socket."""
TRANSPORT_FACTOR = 8
"""A frame over the limit is answered with an error; over this multiple the connection is cut."""


def limits_to_map(limits: LimitsConfig) -> dict[str, Any]:
    """What ``welcome`` tells a client of the engine's limits."""
    return {
        "frame_bytes": limits.frame_bytes,
        "depth": limits.depth,
        "messages": limits.messages,
        "session_name_bytes": limits.session_name_bytes,
        "queued_turns_per_session": limits.queued_turns_per_session,
        "unread_events": limits.unread_events,
        "unread_timeout_s": limits.unread_timeout_s,
        "heartbeat_s": limits.heartbeat_s,
        "missed_heartbeats": limits.missed_heartbeats,
        "idempotency_ttl_s": limits.idempotency_ttl_s,
    }
