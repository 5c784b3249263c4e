import io
import json

import pytest
from rich.console import Console

from sessionkv.cli import output
from sessionkv.types import CacheReport, MissReason, MissReport


def report(**changes: object) -> CacheReport:
    values = {
        "prompt_tokens": 2045, "device_tokens": 1984, "host_tokens": 16, "disk_tokens": 0,
        "computed_tokens": 45, "ttft_ms": 310.4, "decode_tokens_per_s": 42.123,
    } | changes  # fmt: skip
    return CacheReport(**values)


def test_cache_line_names_every_source_and_the_sum() -> None:
    assert output.cache_line(report()) == (
        "prompt 2,045 = 1,984 device + 16 host + 0 disk + 45 computed"
        " · first token 310 ms · 42.1 tok/s · no miss"
    )


def test_cache_line_counts_work_done_again_apart() -> None:
    line = output.cache_line(report(recomputed_tokens=64, decode_tokens_per_s=0.0))
    assert line.endswith("first token 310 ms · 64 recomputed · no miss")


@pytest.mark.parametrize(
    ("miss", "text"),
    [
        (MissReport(), "no miss"),
        (MissReport(MissReason.FIRST_TURN, token=0), "miss: first_turn"),
        (MissReport(MissReason.EVICTED, token=1200), "miss: evicted from token 1,200"),
        (
            MissReport(MissReason.HISTORY_EDITED, token=7, turn=2, expected="red", found="blue"),
            "miss: history_edited from token 7 (turn 2), 'red' became 'blue'",
        ),
    ],
)
def test_miss_text_says_reason_place_and_difference(miss: MissReport, text: str) -> None:
    assert output.miss_text(report(miss=miss)) == text


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
