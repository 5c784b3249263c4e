import io
import json

import pytest
from rich.console import Console

from sessionkv.cli import output


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB"),
        (4 * 1024**3, "4.0 GiB"), (5000 * 1024**4, "5,000.0 TiB"),
    ],
)  # fmt: skip
def test_size(value: float | None, text: str) -> None:
    assert output.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_duration(value: float | None, text: str) -> None:
    assert output.duration(value) == text


def test_count_has_a_singular() -> None:
    assert [output.count(n, "turn") for n in (0, 1, 2000)] == ["0 turns", "1 turn", "2,000 turns"]


def test_nothing_is_folded_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    name = "n" * 300
    output.stdout().print(output.table(("session", ">turns"), [(name, 1)]))
    assert capsys.readouterr().out.splitlines()[1].split() == [name, "1"]


def test_one_line_cannot_steer_the_terminal() -> None:
    assert output.one_line("a\x1b[31mb\nc") == "a\\x1b[31mb\\nc"
    assert output.one_line("Zürich 東京") == "Zürich 東京"


def test_table_shows_cells_as_they_are() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=60)
    console.print(output.table(("name", ">n"), [("[bold]x[/bold]", 5), ("a\x1bb", 12)]))
    assert stream.getvalue().split("\n")[1:3] == ["[bold]x[/bold]   5", "a\\x1bb          12"]


def test_print_json_keeps_unicode_and_turns_the_rest_to_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pathlib import Path

    output.print_json({"path": Path("/x"), "name": "東京"})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"path": "/x", "name": "東京"}
    assert "東京" in printed
