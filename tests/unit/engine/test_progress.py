from sessionkv.engine.progress import ProgressDesk
from sessionkv.engine.scheduler.sequence import Sequence, SequenceState
from sessionkv.types import Match, Tier
from tests.builders.schedules import make_sequence


def notes(desk: ProgressDesk, now: float) -> list[tuple[int, ...]]:
    return [
        (n.turn_id, n.device_tokens, n.host_tokens, n.disk_tokens, n.done_tokens)
        for n in desk.due(now)
    ]


def admitted(seq_id: int, match: Match, now: float) -> Sequence:
    sequence = make_sequence(seq_id, range(100))
    admit(sequence, match, now)
    return sequence


def admit(sequence: Sequence, match: Match, now: float) -> None:
    sequence.state = SequenceState.RUNNING
    sequence.num_computed = match.device_tokens
    sequence.accounting.admitted(now, match)


def test_nothing_is_said_before_admission_and_one_note_then() -> None:
    desk = ProgressDesk(4)
    sequence = make_sequence(1, range(100))
    desk.watch(sequence)
    assert notes(desk, 1.0) == []
    admit(sequence, Match(8, 12, 16), 2.0)
    assert notes(desk, 2.0) == [(1, 8, 12, 16, 8)]
    assert notes(desk, 9.0) == []  # nothing was done since


def test_further_notes_come_at_most_every_half_second() -> None:
    desk = ProgressDesk(4)
    sequence = admitted(1, Match(8, 0, 0), 0.0)
    desk.watch(sequence)
    said = []
    for tenth in range(20):
        said += [(tenth, note[-1]) for note in notes(desk, tenth / 10)]
        sequence.num_computed += 4
    assert said == [(0, 8), (5, 28), (10, 48), (15, 68)]


def test_what_was_loaded_behind_the_front_is_done_once() -> None:
    desk = ProgressDesk(4)
    sequence = admitted(1, Match(8, 40, 0), 0.0)
    desk.watch(sequence)
    assert notes(desk, 0.0) == [(1, 8, 40, 0, 8)]
    sequence.num_arrived = 5
    assert notes(desk, 1.0) == [(1, 8, 40, 0, 28)]
    sequence.num_computed = 48  # 20 of them computed, then the loaded ones joined
    sequence.accounting.took(Tier.DEVICE, 8)
    sequence.accounting.was_computed(28, None)
    sequence.accounting.took(Tier.HOST, 48)
    assert notes(desk, 2.0) == [(1, 8, 40, 0, 48)]


def test_the_first_token_and_the_end_are_the_last_of_it() -> None:
    desk = ProgressDesk(4)
    first, second = admitted(1, Match(0, 0, 0), 0.0), admitted(2, Match(0, 0, 0), 0.0)
    desk.watch(first)
    desk.watch(second)
    assert notes(desk, 0.0) == [(1, 0, 0, 0, 0), (2, 0, 0, 0, 0)]
    first.num_computed = second.num_computed = 50
    first.accounting.first_token_at = 0.5
    second.state = SequenceState.FINISHED
    assert notes(desk, 1.0) == []


def test_an_admission_that_came_to_nothing_is_followed_by_another_note() -> None:
    desk = ProgressDesk(4)
    sequence = admitted(1, Match(40, 0, 0), 0.0)
    desk.watch(sequence)
    assert notes(desk, 0.0) == [(1, 40, 0, 0, 40)]
    sequence.accounting.undo_admission()
    sequence.num_computed = 0
    assert notes(desk, 0.1) == []
    admit(sequence, Match(8, 0, 0), 0.2)
    assert notes(desk, 0.2) == [(1, 8, 0, 0, 40)]  # what is done never falls


def test_a_resumed_sequence_keeps_the_figures_of_its_first_admission() -> None:
    desk = ProgressDesk(4)
    sequence = admitted(1, Match(8, 0, 0), 0.0)
    desk.watch(sequence)
    assert notes(desk, 0.0) == [(1, 8, 0, 0, 8)]
    sequence.num_computed = 0
    admit(sequence, Match(40, 0, 0), 1.0)
    assert notes(desk, 1.0) == [(1, 8, 0, 0, 40)]
