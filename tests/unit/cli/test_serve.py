import socket

import pytest

from sessionkv.actor.gateway_process import GatewayProcess
from sessionkv.cli.hints import hint_for
from sessionkv.cli.serve import ending, waiting
from sessionkv.config import HttpConfig
from sessionkv.engine.messages import DrainReport
from sessionkv.errors import ConfigError, EngineStartFailed


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


def test_a_taken_port_is_another_matter_than_an_address_of_another_machine() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(EngineStartFailed) as is_taken,
    ):
        GatewayProcess(HttpConfig("127.0.0.1", taken.getsockname()[1]))
    with pytest.raises(EngineStartFailed) as is_elsewhere:
        GatewayProcess(HttpConfig("192.0.2.1", 8000))  # an address for documents, nobody's
    assert [hint_for(is_taken.value), hint_for(is_elsewhere.value)] == [
        "Choose another port, or 0 for a free one: --http HOST:PORT.",
        "Name an address of this machine, such as 127.0.0.1: --http HOST:PORT.",
    ]
    assert str(hint_for(EngineStartFailed("no model"))).startswith("`sessionkv doctor`")


def test_without_keys_the_hosts_that_are_allowed_and_what_makes_others_so_are_named() -> None:
    HttpConfig.parse("0.0.0.0:8000").check(has_keys=True)
    for host in ("127.0.0.1", "[::1]", "localhost"):
        HttpConfig.parse(f"{host}:8000").check(has_keys=False)
    with pytest.raises(ConfigError) as refused:
        HttpConfig.parse("0.0.0.0:8000").check(has_keys=False)
    assert refused.value.message == (
        "--http is '0.0.0.0'; allowed: without keys only 127.0.0.1, ::1 or localhost; for other "
        "addresses make a key with `sessionkv keys add NAME`, then serve with --keys FILE"
    )
