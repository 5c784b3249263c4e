"""What becomes of an exchange of the Messages API: the same for its answer and for its count."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from sessionkv.gateway.anthropic.cache_control import TTL_S, longest_ttl
from sessionkv.gateway.anthropic.schema import CountTokensRequest
from sessionkv.gateway.helpers import is_helper
from sessionkv.gateway.keeping import Keeping, named, says_steady, session_in
from sessionkv.gateway.transcript import Transcript


def keeping_of(
    body: CountTokensRequest, transcript: Transcript, headers: Mapping[str, str]
) -> Keeping:
    """From a request's parameters and headers.

    A count that does not say how much may be answered is taken for one of an answer that may be
    long: who counts has a conversation, not a title, in mind.

    Raises:
        InvalidRequest: Breakpoints stand where none may be; it names the parameter.
    """
    metadata = body.metadata
    helper = is_helper(
        transcript,
        headers=headers,
        metadata=None if metadata is None else metadata.model_extra,
        max_tokens=sys.maxsize if body.max_tokens is None else body.max_tokens,
    )
    keeping = Keeping(
        is_helper=helper,
        label=named(headers) or session_in(None if metadata is None else metadata.user_id),
        is_steady=says_steady(headers),
    )
    ttl = longest_ttl(body)
    if helper or ttl is None:
        return keeping
    return replace(keeping, tier="host", ttl_s=TTL_S[ttl])
