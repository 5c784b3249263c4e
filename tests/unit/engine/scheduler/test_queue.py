"""The order in which waiting sequences come up, while those before them are charged."""

import random

import pytest

from sessionkv.engine.scheduler.fairness import FairShares
from sessionkv.engine.scheduler.queue import WaitingQueue
from sessionkv.engine.scheduler.sequence import Sequence
from tests.builders.schedules import make_sequence

AGEING_S = 10.0


def waiting(count: int, chance: random.Random) -> list[Sequence]:
    """Sequences of some tenants and sessions, of all classes, some of which ran before."""
    shares = FairShares()
    made = []
    for number in range(count):
        sequence = make_sequence(number, [1], priority=chance.choice([0, 0, 1]))
        sequence.arrival = number
        sequence.resumed = chance.random() < 0.2
        sequence.accounting.added_at = -chance.choice([0.0, AGEING_S])
        sequence.share = shares.join((chance.choice("ab"), chance.choice("xyz")))
        sequence.share.charge(chance.randrange(30))
        made.append(sequence)
    return made


def key(sequence: Sequence) -> tuple[object, ...]:
    lifted = sequence.priority + (sequence.accounting.added_at < 0)
    tenant = sequence.share.parent
    assert tenant is not None
    served = tenant.served, sequence.share.served
    return -lifted, not sequence.resumed, *served, sequence.arrival


@pytest.mark.parametrize("seed", range(20))
def test_each_that_comes_up_is_the_best_as_things_are_then(seed: int) -> None:
    chance = random.Random(seed)
    left = waiting(40, chance)
    came = 0
    for sequence in WaitingQueue(ageing_s=AGEING_S).in_turn(left[:], 0.0):
        assert sequence is min(left, key=key)
        left.remove(sequence)
        came += 1
        sequence.share.charge(chance.choice([0, 1, 50]))
    assert came == 40
