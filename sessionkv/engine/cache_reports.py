"""Cache reports of turns since the start, so that a miss can be explained later.

In bounded number; past it the oldest go of the tenant that has most, so that nobody's are pushed
out by what others do. Tenants are told apart by the rows of their turns' ids. Core thread only.
"""

from __future__ import annotations

from sessionkv.types import CacheReport
from sessionkv.types.holdings import Holdings
from sessionkv.types.node_ids import row_of

MAX_REPORTS = 10_000


class CacheReports:
    """Reports by node."""

    def __init__(self, *, most: int = MAX_REPORTS) -> None:
        """None yet, and never more than ``most``."""
        self._most = most
        self._rows: dict[str, dict[int, CacheReport]] = {}
        self._held = Holdings()

    def put(self, node_id: int, report: CacheReport) -> None:
        """Keep the report of a new turn. O(tenants) once there are as many as may be."""
        row = str(row_of(node_id))
        self._rows.setdefault(row, {})[node_id] = report
        self._held.add(row, 1)
        largest = self._held.largest() if self._held.total > self._most else None
        if largest is not None:
            self.pop(next(iter(self._rows[largest])))

    def get(self, node_id: int) -> CacheReport | None:
        """The turn's report, None where it is not known."""
        return self._rows.get(str(row_of(node_id)), {}).get(node_id)

    def pop(self, node_id: int) -> None:
        """Forget it, if it is known."""
        row = str(row_of(node_id))
        reports = self._rows.get(row, {})
        if reports.pop(node_id, None) is not None:
            self._held.add(row, -1)
            if not reports:
                del self._rows[row]
