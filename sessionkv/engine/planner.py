"""Fetch or compute, whichever is sooner: one decision a turn for each tier, by measured rates.

All that was found of a tier's part of the prefix is fetched, or none of it. Knows no blocks, no
bytes and no clock: it is fed what prefills and loads took and answers from that. Until both have
been measured it loads, which also is how it gets its first measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from sessionkv.types import Match, MissReason, Tier

MEMORY = 0.9
"""What an observation weighs after the next one: the last ten or so count."""
HALF_LIFE_PREFILLS = 256
"""Prefills after which a load estimate that nothing renewed counts half, so that a tier which was
slow once is tried again: a tier that is not used is not measured."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """Which tiers below the device to fetch from.

    Attributes:
        reason: None where everything found is used, else why not, for the cache report.
    """

    use_host: bool
    use_disk: bool
    reason: MissReason | None


class _Fit:
    """``seconds = a * x + b * y`` with ``a, b >= 0``, by least squares that forget.

    Least squares weigh an observation by its size, as wanted here: long prefills and large loads
    are the ones worth deciding about. O(1) in time and memory.
    """

    def __init__(self) -> None:
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0
        self.known = False

    def observe(self, x: float, y: float, seconds: float) -> None:
        self._xx = self._xx * MEMORY + x * x
        self._xy = self._xy * MEMORY + x * y
        self._yy = self._yy * MEMORY + y * y
        self._xs = self._xs * MEMORY + x * seconds
        self._ys = self._ys * MEMORY + y * seconds
        self.known = True

    def seconds(self, x: float, y: float) -> float:
        a, b = self._coefficients()
        return a * x + b * y

    def _coefficients(self) -> tuple[float, float]:
        determinant = self._xx * self._yy - self._xy * self._xy
        # Observations that are all alike in proportion (or one alone) do not tell x from y.
        if determinant > 1e-9 * self._xx * self._yy:
            a = (self._xs * self._yy - self._ys * self._xy) / determinant
            b = (self._ys * self._xx - self._xs * self._xy) / determinant
            if a >= 0.0 and b >= 0.0:
                return a, b
            if a < 0.0:
                return 0.0, self._ys / self._yy
        return (self._xs / self._xx if self._xx else 0.0), 0.0


class LoadPlanner:
    """Answers ``LoadPolicy`` of the scheduler. Core thread only; everything is O(1).

    Prefill takes ``a * tokens + b * attended`` seconds, where *attended* counts pairs of a token
    and a position it attends to: projections cost the same at every position, attention more at
    later ones, and at long contexts, where the decision matters most, attention is the larger part.
    Loading takes ``a + b * blocks``: a fixed part, such as a seek, and a rate.
    """

    def __init__(self, *, block_size: int) -> None:
        """Nothing is measured yet: everything is loaded.

        Args:
            block_size: Tokens a block.
        """
        self._block_size = block_size
        self._prefill = _Fit()
        self._loads = {Tier.HOST: _Fit(), Tier.DISK: _Fit()}
        self._ages = {Tier.HOST: 0, Tier.DISK: 0}
        self._rates: dict[str, float] = {}

    def observe_prefill(self, tokens: int, seconds: float, *, context: float = 0.0) -> None:
        """A step computed prompt tokens.

        Args:
            tokens: How many.
            seconds: How long the step took.
            context: Mean position of these tokens in their sequences.
        """
        if tokens <= 0 or seconds <= 0.0:
            return
        self._prefill.observe(tokens, tokens * context, seconds)
        self._note_rate("prefill_tokens_per_s", tokens / seconds)
        for tier in self._ages:
            self._ages[tier] += 1

    def observe_load(self, tier: Tier, blocks: int, num_bytes: int, seconds: float) -> None:
        """A fetch from ``tier`` to the device was answered; failed blocks do not count."""
        if blocks <= 0 or seconds <= 0.0:
            return
        # The blocks come first: what one observation alone shows is taken for the rate.
        self._loads[tier].observe(blocks, 1.0, seconds)
        self._note_rate(f"{tier.value}_bytes_per_s", num_bytes / seconds)
        self._ages[tier] = 0

    def decide(self, match: Match, num_prompt_tokens: int, queued_tokens: int) -> LoadChoice:
        """Choose between computing, fetching the host's part, and fetching the disk's as well.

        A prefix has no holes, so the disk's part, which lies behind the host's, is of use only
        with it. Computing holds up everything queued and loading does not, so computing counts once
        more for each prompt of this one's size that waits.
        """
        host, disk = match.host_tokens, match.disk_tokens
        if not self._prefill.known:
            return LoadChoice(use_host=True, use_disk=True, reason=None)
        weight = 1.0 + max(queued_tokens, 0) / max(num_prompt_tokens, 1)
        # Time until the prompt is computed: (computed from here on, after loading this much).
        options = [
            (match.device_tokens, 0, 0),
            (match.device_tokens + host, host, 0),
            (match.device_tokens + host + disk, host, disk),
        ]
        costs = [
            weight * self._compute_s(start, num_prompt_tokens)
            + self._load_s(Tier.HOST, from_host)
            + self._load_s(Tier.DISK, from_disk)
            for start, from_host, from_disk in options
        ]
        # Of equal ones the one that loads most: loading leaves the device to others.
        best = min(range(3), key=lambda i: (costs[i], -i))
        _, from_host, from_disk = options[best]
        complete = from_host == host and from_disk == disk
        return LoadChoice(
            use_host=best >= 1,
            use_disk=best == 2,
            reason=None if complete else MissReason.RECOMPUTE_WAS_SOONER,
        )

    def rates(self) -> dict[str, float]:
        """Smoothed rates as measured, for reports: prefill, and loading by tier."""
        return dict(self._rates)

    def _compute_s(self, start: int, end: int) -> float:
        tokens = max(end - start, 0)
        return self._prefill.seconds(tokens, tokens * (start + end) / 2)

    def _load_s(self, tier: Tier, tokens: int) -> float:
        fit = self._loads[tier]
        if not tokens or not fit.known:
            return 0.0
        blocks = -(-tokens // self._block_size)
        faded: float = 0.5 ** (self._ages[tier] / HALF_LIFE_PREFILLS)
        return fit.seconds(blocks, 1.0) * faded

    def _note_rate(self, name: str, rate: float) -> None:
        before = self._rates.get(name)
        self._rates[name] = rate if before is None else before + (rate - before) * (1 - MEMORY)
