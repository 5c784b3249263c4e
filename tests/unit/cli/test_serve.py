import pytest

from sessionkv.cli.serve import ending, waiting
from sessionkv.engine.messages import DrainReport


@pytest.mark.parametrize(
    ("left", "line"),
    [
        (DrainReport(0, 0, 0, 10.0), "stopped"),
        (
            DrainReport(0, 1200, 1200 * 737_280, 10.0),
            "stopped after 10 s: 1,200 blocks (843.8 MiB) of sessions are not on disk; the journal "
            "has their turns",
        ),
        (
            DrainReport(1, 1, 4096, 0.5),
            "stopped after 0.5 s: 1 turn did not end and 1 block (4.0 KiB) of sessions is not on "
            "disk; the journal has their turns",
        ),
        (DrainReport(2, 0, 0, 10.0), "stopped after 10 s: 2 turns did not end"),
    ],
)
def test_the_last_line_says_what_was_left_undone(left: DrainReport, line: str) -> None:
    assert ending(left) == line


@pytest.mark.parametrize(
    ("turns", "line"),
    [
        (1, "stopping: 1 turn has up to 10 s; Ctrl-C again ends it now"),
        (2, "stopping: 2 turns have up to 10 s; Ctrl-C again ends them now"),
        (0, "stopping: KV is written for up to 10 s; Ctrl-C again ends it now"),
    ],
)
def test_the_first_line_of_a_drain_says_what_is_waited_for(turns: int, line: str) -> None:
    assert waiting(turns, 10.0, again="Ctrl-C again") == line
    assert "; a second signal ends " in waiting(turns, 10.0, again="a second signal")
