"""Any workload on any tiny engine gives the cold answers and an exact ledger."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessionkv.types import BlockMove, MoveOutcome, SamplingParams, Transfer
from tests.builders.checksum import cold_oracle
from tests.builders.mini_engine import DictDisk, MiniEngine

# Few different tokens, so that prefixes are shared by chance.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
REQUESTS = st.tuples(
    PROMPTS,
    st.integers(1, 8),  # max_tokens
    st.sampled_from((0.0, 1.0)),  # temperature
    st.integers(0, 2),  # priority
    st.integers(-1, 6),  # follow up on this earlier request, if there is one
    st.integers(0, 3),  # steps before the next one
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), REQUESTS),
        st.tuples(st.just("cancel"), st.integers(0, 12)),
        st.tuples(st.just("stop"), st.integers(0, 12)),
        st.tuples(st.just("hold"), st.booleans()),
    ),
    max_size=14,
)
ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(7, 12),
        "host_blocks": st.sampled_from((0, 3, 12)),
        "disk": st.sampled_from((None, 6, 100)),
        "step_tokens": st.sampled_from((3, 8, 32)),
        "shared_tokens": st.sampled_from((None, 2)),
        "prefix_cache": st.sampled_from((True, True, True, False)),
        "plans_ahead": st.booleans(),
        "most_blocks": st.sampled_from((1, 2, 1024)),
    }
)
OUTCOMES = st.sampled_from((None, None, None, MoveOutcome.CORRUPT, MoveOutcome.NO_ROOM))


class Run:
    """One engine under one list of actions."""

    def __init__(self, engine: MiniEngine) -> None:
        self.engine = engine
        self.requests: dict[int, tuple[list[int], SamplingParams]] = {}
        self.cancelled: set[int] = set()
        self.cut: dict[int, int] = {}

    def act(self, name: str, value: object) -> None:
        engine = self.engine
        if name == "hold":
            engine.hold_transfers = value
        elif name == "submit":
            self.submit(*value)
        elif value in self.requests and value not in engine.ends:
            if name == "cancel":
                engine.cancel(value)
                self.cancelled.add(value)
            elif value not in self.cancelled:
                self.stop(value)
        engine.step()
        engine.kv.check()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        priority: int,
        follow: int,
        steps: int,
    ) -> None:
        engine = self.engine
        if follow in self.requests:
            prompt = [*self.requests[follow][0], *engine.outputs[follow], *prompt][:19]
        sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=max_tokens)
        seq_id = engine.submit(prompt, sampling=sampling, priority=priority)
        self.requests[seq_id] = prompt, sampling
        for _ in range(steps):
            engine.step()

    def stop(self, seq_id: int) -> None:
        self.cut[seq_id] = len(self.engine.outputs[seq_id])
        event = self.engine.scheduler.cancel_at(seq_id, self.cut[seq_id])
        assert event is not None
        self.engine.ends[seq_id] = event
        self.engine.finish(event)

    def verify(self) -> None:
        engine = self.engine
        engine.hold_transfers = False
        engine.run()
        for seq_id, (prompt, sampling) in self.requests.items():
            got = engine.outputs[seq_id]
            want = cold_oracle(prompt, sampling.max_tokens or 0, sampling)
            if seq_id in self.cancelled:
                assert got == want[: len(got)]
                continue
            assert got == want[: self.cut.get(seq_id, len(want))]
            report = engine.reports[seq_id]
            assert report.cached_tokens + report.computed_tokens == len(prompt)
        engine.assert_idle()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ENGINES, ACTIONS, st.lists(OUTCOMES, max_size=8))
def test_every_output_is_the_cold_one(
    shape: dict, actions: list, outcomes: list[MoveOutcome | None]
) -> None:
    left = list(outcomes)

    def fault(transfer: Transfer, move: BlockMove) -> MoveOutcome | None:
        return left.pop() if left else None

    capacity = shape.pop("disk")
    engine = MiniEngine(**shape, disk=DictDisk(capacity) if capacity else None, fault=fault)
    shape["disk"] = capacity
    run = Run(engine)
    for name, value in actions:
        run.act(name, value)
    run.verify()
