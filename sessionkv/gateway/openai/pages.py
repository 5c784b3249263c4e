"""Lists that are given page by page, as OpenAI's APIs do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sessionkv.errors import ItemNotFound


def page_of(
    items: Sequence[Mapping[str, Any]], *, limit: int, order: str, after: str | None
) -> dict[str, Any]:
    """One page.

    Args:
        items: All of them, the oldest first.
        limit: Most items of a page.
        order: ``asc`` is the oldest first, ``desc`` the newest.
        after: Id of the last item of the page before.

    Raises:
        ItemNotFound: No item has the id ``after``.
    """
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise ItemNotFound(after, "after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }
