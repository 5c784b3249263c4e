"""Load or compute, or both at once: where the two cursors of a found prefix should meet.

Computing goes through the prefix from its front, loads take it from its back, and with measured
rates the planner foresees where they meet: there computing what lies before takes as long as
loading what lies behind. At each step it lets computing go on towards that point, and claims of the
other side what keeps the loads busy until the next step. The rest stays open, so that a load that
fails, lags or hurries moves the point. What has not been measured is loaded, a little at first.

Knows no blocks, no bytes and no clock.
"""

from __future__ import annotations

from bisect import bisect_left

from sessionkv.engine.rates import MeasuredRates
from sessionkv.engine.scheduler.policy import Claims, Lane, Workload
from sessionkv.types import Meeting, Tier

PROBE_BLOCKS = 8
"""Loaded of a tier that has not been measured, before anything else is decided."""
AHEAD_S = 0.1
"""Loads are claimed for so long ahead at least, and later than that they lag. A waiting engine
looks again about as often."""
SLACK = 1.5
"""Loads are claimed for a step that takes this times what is foreseen: they should not run dry."""
MEETING_GAIN = 0.125
"""Computing beside loads must be foreseen to take so much less than loading alone. Less than that
is what a step costs besides: a device and a host that load and compute at once do each of them
slower, and what arrives meanwhile waits for the step's end."""
PATIENCE = 0.25
"""The disk's answer is waited for up to this share of what computing all takes: a disk that hangs
makes a turn so much slower, and one that is merely slow does not have it computed again."""
UNMEASURED_TOKEN_S, UNMEASURED_PATIENCE_S = 0.001, 1.0
"""A token, and at most, before a prefill was measured: after a start, all is on disk."""
_IDLE = Lane()


class LoadPlanner:
    """Answers ``LoadPolicy`` of the scheduler. Core thread only.

    Attributes:
        rates: What it decides by; the step loop feeds it.
    """

    def __init__(self, *, block_size: int) -> None:
        """Nothing is measured yet.

        Args:
            block_size: Tokens a block.
        """
        self._block_size = block_size
        self.rates = MeasuredRates()

    def patience_s(self, start: int, end: int, *, step_tokens: int) -> float:
        """How long to wait for what the disk says of these positions of a prompt. O(1)."""
        if not self.rates.knows_computing:
            return min(UNMEASURED_TOKEN_S * (end - start), UNMEASURED_PATIENCE_S)
        return PATIENCE * self.rates.compute_s(start, end, step_tokens=step_tokens)

    def meet(self, meeting: Meeting, work: Workload) -> Claims:
        """Share what is unclaimed between the cursors. O(log blocks)."""
        outlook = _Outlook(self.rates, meeting, work, block_size=self._block_size)
        point = outlook.best_point()
        if outlook.is_everything(point):
            return Claims(None)
        step_s = SLACK * max(outlook.next_step_s(point), self.rates.last_step_s)
        loads = {tier: outlook.to_claim(tier, point, step_s) for tier in meeting.unclaimed}
        compute_tokens = max(point * self._block_size, meeting.front_tokens)
        return Claims(compute_tokens, {tier: count for tier, count in loads.items() if count})


class _Outlook:
    """What one meeting costs for each point at which the cursors may meet.

    ::

        | held | lost | open to both cursors | loading, there | rest of the prompt |
               ^ front                       ^ limit
                      ^ first ... points ... ^

    Points are positions in the table: what lies before one is computed, what lies behind is loaded.
    Computing holds up everything else that is to be computed and loading does not, so its cost
    counts once more for each prompt of this one's size among the others.
    """

    def __init__(
        self, rates: MeasuredRates, meeting: Meeting, work: Workload, *, block_size: int
    ) -> None:
        self._rates, self._meeting, self._work = rates, meeting, work
        self._size = block_size
        bounded = meeting.limit_tokens
        self._limit = -(-(meeting.end_tokens if bounded is None else bounded) // block_size)
        front = -(-meeting.front_tokens // block_size)
        starts = [
            positions[at]
            for positions in meeting.unclaimed.values()
            if (at := bisect_left(positions, front)) < len(positions)
        ]
        self._first = min([*starts, self._limit])
        self._weight = max(work.other_tokens, 0) / max(work.num_tokens, 1)
        self._lanes = {tier: work.lanes.get(tier, _IDLE) for tier in meeting.unclaimed}
        self._costs = {tier: self._load_costs(tier, lane) for tier, lane in self._lanes.items()}

    def best_point(self) -> int:
        """Nothing computed, everything, or where both cursors end at once: whatever is soonest.

        Both at once where that gains enough on loading alone. Of equal ones the one that loads
        most: loading leaves the device to others.
        """
        if not self._rates.knows_computing:
            return self._first
        low, high = self._first, self._limit
        while low < high:  # the first point where computing takes as long as loading
            middle = (low + high) // 2
            if self._computing_s(middle) >= self._loading_s(middle):
                high = middle
            else:
                low = middle + 1
        costs = {
            point: self._cost(point)
            for point in (self._first, max(low - 1, self._first), low, self._limit)
        }
        best = min(costs, key=lambda point: (costs[point], point))
        is_beside = not self.is_everything(best)  # what is claimed goes on loading
        if is_beside and costs[best] > (1.0 - MEETING_GAIN) * costs[self._first]:
            return self._first
        return best

    def is_everything(self, point: int) -> bool:
        """Whether the rest of the prompt would be computed right on, with nothing loaded."""
        return point >= self._limit and self._meeting.limit_tokens is None

    def next_step_s(self, point: int) -> float:
        """Seconds of the next step towards a point."""
        front, step_tokens = self._meeting.front_tokens, self._work.step_tokens
        end = min(point * self._size, front + step_tokens)
        return self._rates.compute_s(front, end, step_tokens=step_tokens)

    def to_claim(self, tier: Tier, point: int, step_s: float) -> int:
        """How many blocks of a tier to load from now on, to keep its loads busy for a step."""
        available = self._num_unclaimed(tier, point)
        under_way = self._lanes[tier].num_blocks
        if not self._rates.knows_computing:
            return available
        if not self._rates.knows_loading(tier):
            return 0 if under_way else min(available, PROBE_BLOCKS)
        block_s, _ = self._costs[tier]
        # A load is answered as a whole: counted so, the tier could run dry in the next step.
        to_come = self._num_to_come(tier)
        under_way = to_come if to_come * block_s < step_s else under_way
        # One is being loaded and one waits, however slow they are.
        wanted = 2 + int((AHEAD_S + step_s) / block_s) if block_s > 0.0 else available
        return min(available, max(wanted - under_way, 0))

    def _load_costs(self, tier: Tier, lane: Lane) -> tuple[float, float]:
        """Seconds a block and seconds a load besides.

        One that is under way for too long makes its tier that much slower; a hiccup does not.
        """
        block_s, load_s = self._rates.load_costs(tier)
        lag_s = max(lane.head_s - AHEAD_S, 0.0) / max(lane.head_blocks, 1)
        return max(block_s, lag_s), load_s

    def _num_unclaimed(self, tier: Tier, point: int) -> int:
        positions = self._meeting.unclaimed[tier]
        return len(positions) - bisect_left(positions, point)

    def _num_to_come(self, tier: Tier) -> int:
        """Blocks under way that are still to come, of the first load as many as are foreseen.

        Where one lags, all of them.
        """
        lane, (block_s, _) = self._lanes[tier], self._costs[tier]
        lags = block_s > self._rates.load_costs(tier)[0]
        if lags or not lane.head_blocks or block_s <= 0.0:
            return lane.num_blocks
        return lane.num_blocks - min(int(lane.head_s / block_s), lane.head_blocks - 1)

    def _computing_s(self, point: int) -> float:
        end = min(point * self._size, self._meeting.end_tokens)
        step_tokens = self._work.step_tokens
        return self._rates.compute_s(self._meeting.front_tokens, end, step_tokens=step_tokens)

    def _loading_s(self, point: int) -> float:
        """Until all from a point on is loaded, after what is under way; tiers load side by side."""
        longest_s = 0.0
        for tier, (block_s, load_s) in self._costs.items():
            unclaimed = self._num_unclaimed(tier, point)
            if unclaimed or self._meeting.loading.get(tier):
                blocks = unclaimed + self._num_to_come(tier)
                longest_s = max(longest_s, blocks * block_s + (load_s if unclaimed else 0.0))
        return longest_s

    def _cost(self, point: int) -> float:
        """Seconds until the whole prompt is computed, and what that costs others."""
        whole, step_tokens = self._work.num_tokens, self._work.step_tokens
        if self.is_everything(point):
            front = self._meeting.front_tokens
            alone_s = self._rates.compute_s(front, whole, step_tokens=step_tokens)
            return (1.0 + self._weight) * alone_s
        rest_s = self._rates.compute_s(self._meeting.end_tokens, whole, step_tokens=step_tokens)
        computing_s = self._computing_s(point)
        fetched_s = max(computing_s, self._loading_s(point))
        return fetched_s + rest_s + self._weight * (computing_s + rest_s)
