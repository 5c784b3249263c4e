"""What steps and loads take, as measured while the engine runs.

Knows no blocks, no bytes and no clock: it is fed what each step and each load took. Core thread
only; everything is O(1) in time and memory.
"""

from __future__ import annotations

from sessionkv.types import StepPlan, Tier

MEMORY = 0.9
"""What an observation weighs after the next one: the last ten or so count."""
HALF_LIFE_PREFILLS = 1024
"""Prefills for which a load estimate holds; then it halves each time nothing renews it for as long
again, so that a tier which was slow once is tried again: one that is not used is not measured."""
FIXED_DRIFT = 0.02
"""How far the fixed cost of a step rises towards each step that took longer."""


class _Fit:
    """``seconds = a * x + b * y`` with ``a, b >= 0``, by least squares that forget.

    Least squares weigh an observation by its size, as wanted here: long prefills and large loads
    are the ones worth deciding about.
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

    def coefficients(self) -> tuple[float, float]:
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


class MeasuredRates:
    """Costs of computing and loading.

    A step takes ``fixed + a * tokens + b * attended`` seconds, where *attended* counts pairs of a
    token and a position it attends to: projections cost the same at every position, attention more
    at later ones, and at long contexts, where the decision matters most, attention is the larger
    part. A load takes ``a * blocks + b``: a rate, and a fixed part such as a seek.

    Attributes:
        last_step_s: Seconds of the last step, whatever it computed.
    """

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self.last_step_s = 0.0
        self._fixed_s: float | None = None
        self._prefill = _Fit()
        self._loads = {Tier.HOST: _Fit(), Tier.DISK: _Fit()}
        self._ages = {Tier.HOST: 0, Tier.DISK: 0}
        self._smoothed: dict[str, float] = {}

    # -- measuring

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed. One that mixes prefill and decode tells neither's cost."""
        self.last_step_s = seconds
        tokens = plan.num_tokens
        if tokens == len(plan.steps):
            self._observe_fixed(seconds)
        elif all(len(step.token_ids) > 1 for step in plan.steps):
            attended = sum(
                len(step.token_ids) * (step.start + len(step.token_ids) / 2) for step in plan.steps
            )
            self.observe_prefill(tokens, seconds, context=attended / tokens)

    def _observe_fixed(self, seconds: float) -> None:
        """A step of one token each: the shortest of late is about what any step takes."""
        fixed = self._fixed_s
        if fixed is None or seconds < fixed:
            self._fixed_s = seconds
        else:
            self._fixed_s = fixed + (seconds - fixed) * FIXED_DRIFT

    def observe_prefill(self, tokens: int, seconds: float, *, context: float = 0.0) -> None:
        """A step computed prompt tokens.

        Args:
            tokens: How many.
            seconds: How long the step took.
            context: Mean position of these tokens in their sequences.
        """
        if tokens <= 0 or seconds <= 0.0:
            return
        beyond_fixed = max(seconds - (self._fixed_s or 0.0), 0.0)
        self._prefill.observe(tokens, tokens * context, beyond_fixed)
        self._smooth("prefill_tokens_per_s", tokens / seconds)
        for tier in self._ages:
            self._ages[tier] += 1

    def observe_load(self, tier: Tier, blocks: int, num_bytes: int, seconds: float) -> None:
        """A load from ``tier`` to the device was answered; failed blocks do not count."""
        if blocks <= 0 or seconds <= 0.0:
            return
        # The blocks come first: what one observation alone shows is taken for the rate.
        self._loads[tier].observe(blocks, 1.0, seconds)
        self._smooth(f"{tier.value}_bytes_per_s", num_bytes / seconds)
        self._ages[tier] = 0

    def _smooth(self, name: str, rate: float) -> None:
        before = self._smoothed.get(name)
        self._smoothed[name] = rate if before is None else before + (rate - before) * (1 - MEMORY)

    # -- questions

    def report(self) -> dict[str, float]:
        """Smoothed rates as measured: prefill, and loading by tier."""
        return dict(self._smoothed)

    @property
    def knows_computing(self) -> bool:
        """Whether any prefill was measured."""
        return self._prefill.known

    def knows_loading(self, tier: Tier) -> bool:
        """Whether a load from the tier was measured."""
        return self._loads[tier].known

    def compute_s(self, start: int, end: int, *, step_tokens: int) -> float:
        """Seconds to compute positions ``start`` to ``end`` in steps of ``step_tokens``."""
        tokens = end - start
        if tokens <= 0:
            return 0.0
        token_s, attended_s = self._prefill.coefficients()
        fixed = -(-tokens // max(step_tokens, 1)) * (self._fixed_s or 0.0)
        return fixed + tokens * (token_s + attended_s * (start + end) / 2)

    def added_s(self, num_tokens: int) -> float:
        """Seconds that so many tokens add to a step, without what they attend to; 0 is unknown."""
        return num_tokens * self._prefill.coefficients()[0]

    def load_costs(self, tier: Tier) -> tuple[float, float]:
        """Seconds a block, and seconds a load besides, of loading from a tier; 0 where unknown."""
        faded: float = 0.5 ** max(self._ages[tier] / HALF_LIFE_PREFILLS - 1.0, 0.0)
        block_s, load_s = self._loads[tier].coefficients()
        return block_s * faded, load_s * faded
