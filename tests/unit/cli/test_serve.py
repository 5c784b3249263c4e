import pytest

from sessionkv.cli.serve import ending
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
