"""Tokens are shared out between tenants, whatever each of them asks for (virtual clock)."""

from collections import Counter

import pytest

from tests.builders.fake_kv import FakeKV
from tests.builders.schedules import ComputeAll, Loop, make_scheduler, make_sequence


def jain(served: list[float]) -> float:
    """Jain's index: 1 where all have the same, 1/n where one has all."""
    return sum(served) ** 2 / (len(served) * sum(value**2 for value in served))


@pytest.mark.parametrize(
    "floods",
    [
        {"a": (40, 4), "b": (40, 4), "c": (40, 4)},
        {"a": (400, 4), "b": (12, 4), "c": (12, 4)},  # a asks for 33 times as much
        {"a": (60, 30), "b": (60, 4), "c": (60, 12)},  # long prompts against short ones
    ],
)
def test_backlogged_tenants_are_served_alike(floods: dict[str, tuple[int, int]]) -> None:
    kv = FakeKV(40)
    scheduler = make_scheduler(
        kv, step_tokens=16, max_running=4, max_queue=1000, policy=ComputeAll()
    )
    owner: dict[int, str] = {}
    for tenant, (count, prompt) in floods.items():
        for i in range(count):
            seq_id = len(owner) + 1
            owner[seq_id] = tenant
            group = (tenant, f"{tenant}{i % 3}")
            sequence = make_sequence(seq_id, range(prompt), max_tokens=4, group=group)
            scheduler.add(sequence, 0.0)
    loop, served, waiting = Loop(scheduler), Counter(), Counter(owner.values())
    finished: set[int] = set()
    while min(waiting[tenant] for tenant in floods) > 2:  # while everybody still wants more
        plan = loop.step()
        assert plan is not None
        for step in plan.steps:
            served[owner[step.seq_id]] += len(step.token_ids)
        for event in loop.events:
            if event.finish is not None and event.seq_id not in finished:
                finished.add(event.seq_id)
                waiting[owner[event.seq_id]] -= 1
                served[owner[event.seq_id]] += event.num_output_tokens
        loop.release_finished()
    assert jain([served[tenant] for tenant in floods]) >= 0.95


def test_the_index_tells_fair_from_unfair() -> None:
    assert jain([5, 5, 5]) == 1.0
    assert jain([9, 1, 1]) < 0.6
