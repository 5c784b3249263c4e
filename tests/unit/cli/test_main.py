import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import sessionkv
from sessionkv.cli.hints import hint_for
from sessionkv.cli.main import main
from sessionkv.errors import ConfigError, ConnectionLost, SessionNotFound, StoreInUse


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module that ``sessionkv stats`` runs; give it a ``run``."""
    module = types.ModuleType("sessionkv.cli.stats")
    monkeypatch.setitem(sys.modules, "sessionkv.cli.stats", module)
    return module


def raising(error: BaseException):
    def run(_args: object) -> int:
        raise error

    return run


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"sessionkv {sessionkv.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["bogus"], ["sessions"], ["sessions", "show"], ["pin"]])
def test_wrong_usage_exits_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


NUMBER, WHOLE = "a number, such as 0.5", "a whole number, such as 3"
TIME = "seconds, or a number and one of s, m, h, d, w, as in 30m or 2d"


@pytest.mark.parametrize(
    ("argv", "flag", "value", "allowed"),
    [
        (["chat"], "--temperature", "warm", NUMBER),
        (["chat"], "--temperature", "nan", NUMBER),
        (["chat"], "--max-tokens", "1.5", WHOLE),
        (["chat"], "--seed", "x", WHOLE),
        (["stats"], "--watch", "often", NUMBER),
        (["top"], "--interval", "inf", NUMBER),
        (["top"], "--sessions", "all", WHOLE),
        (["explain", "trip"], "--turn", "n-1", WHOLE),
        (["explain", "trip"], "--last", "", WHOLE),
        (["keys", "add", "a"], "--turns", "few", WHOLE),
        (["sessions", "pin", "trip"], "--priority", "high", WHOLE),
        (["sessions", "pin", "trip"], "--ttl", "1y", TIME),
        (["sessions", "pin", "trip"], "--ttl", "", TIME),
        (["sessions", "pin", "trip"], "--ttl", "9" * 400, TIME),
    ],
)
def test_what_is_no_number_is_said_in_words(
    argv: list[str], flag: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv, flag, value])
    assert ended.value.code == 2
    shown = value if len(value) <= 40 else f"{value[:40]}..."
    last = capsys.readouterr().err.splitlines()[-1]
    words = f"argument {flag}: {shown!r} is not allowed; allowed: {allowed}"
    assert last.endswith(f" error: {words}")


def test_result_is_exit_code(command: types.ModuleType) -> None:
    command.run = lambda _args: 1
    assert main(["stats"]) == 1


def test_error_is_one_line_and_advice(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = raising(StoreInUse("the store /x is in use\nby pid 12"))
    assert main(["stats"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "sessionkv: the store /x is in use by pid 12",
        f"  {hint_for(StoreInUse(''))}",
    ]


def test_a_store_that_is_in_use_is_stopped_first(capsys: pytest.CaptureFixture[str]) -> None:
    error = StoreInUse("in use", pid=12)
    assert hint_for(error) == hint_for(error, module="serve")
    for module in ("store", "transfer"):
        assert str(hint_for(error, module=module)).endswith("stop it (kill 12) first.")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sessions", "export", "-o", "x.skv"], "name a session, or give --all"),
        (
            ["sessions", "export", "trip", "--all", "-o", "x.skv"],
            "SESSION and --all exclude each other",
        ),
        (["chat", "--session", ""], "the name of the session is empty"),
    ],
)
def test_wrong_usage_says_what_to_type(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"sessionkv: {words}\n"


def test_debug_shows_the_traceback(command: types.ModuleType) -> None:
    command.run = raising(SessionNotFound("no session"))
    with pytest.raises(SessionNotFound):
        main(["--debug", "stats"])


def test_bad_configuration_is_wrong_usage(command: types.ModuleType) -> None:
    command.run = raising(ConfigError("threads", 0, "from 1"))
    assert main(["stats"]) == 2


def test_interrupt_exits_130(command: types.ModuleType) -> None:
    command.run = raising(KeyboardInterrupt())
    assert main(["stats"]) == 130


@pytest.mark.parametrize("module", ["argparse", "sessionkv.cli.parser", "sessionkv.cli.doctor"])
@pytest.mark.parametrize(
    "entry",
    [
        "import runpy; runpy.run_module('sessionkv', run_name='__main__')",
        "from sessionkv.cli.main import main; sys.exit(main())",  # as the installed script does
    ],
)
def test_interrupt_while_modules_are_imported_exits_130_without_a_traceback(
    entry: str, module: str
) -> None:
    script = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        f"sys.argv = ['sessionkv', 'doctor']\n{entry}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "write", ["sys.stdout.write('x' * 100 + chr(10))", "output.stdout().print('x' * 100)"]
)
def test_reader_that_left_is_no_error(write: str) -> None:
    script = (
        "import sys, types\n"
        "from sessionkv.cli import main as cli, output\n"
        "module = types.ModuleType('stats')\n"
        "def run(args):\n"
        f"    for _ in range(10_000): {write}\n"
        "    return 0\n"
        "module.run = run\n"
        "sys.modules['sessionkv.cli.stats'] = module\n"
        "sys.exit(cli.main(['stats']))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (0, b"")


def test_every_hint_belongs_to_an_error() -> None:
    from sessionkv.cli import hints
    from sessionkv.errors import error_from_wire

    for code in hints._HINTS:
        assert error_from_wire({"code": code}).code == code
    assert hint_for(ConnectionLost("gone")) is not None


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from sessionkv.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'rich', 'torch', 'transformers', 'zmq', 'lmdb', 'numpy', 'sessionkv.client'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_config_show_says_where_values_came_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SESSIONKV_THREADS", "3")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    path = tmp_path / "engine.toml"
    path.write_text("threads = 1\nmax_model_len = 512\n[cache]\nhost_bytes = 1\ndisk_bytes = 2\n")
    argv = ["config", "show", "--json", "--config", str(path), "--host-bytes", "4MiB"]
    argv += ["--device", "cuda:1", "--dtype", "float16"]
    assert main([*argv, "--set", "scheduler.max_queue=7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["threads"] == {"value": 3, "source": "environment SESSIONKV_THREADS"}
    assert shown["device"] == {"value": "cuda:1", "source": "command line"}
    assert shown["dtype"] == {"value": "float16", "source": "command line"}
    assert shown["max_model_len"] == {"value": 512, "source": f"file {path}"}
    assert shown["cache.disk_bytes"] == {"value": 2, "source": f"file {path}"}
    assert shown["cache.host_bytes"] == {"value": 4 * 2**20, "source": "command line"}
    assert shown["scheduler.max_queue"] == {"value": 7, "source": "command line"}
    assert shown["cache.block_size"] == {"value": 16, "source": "default"}
    assert shown["store"] == {"value": "/data/sessionkv", "source": "default"}


def test_config_show_has_units(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--host-bytes", "4MiB", "--set", "limits.drain_s=2.5"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " 4.0 MiB " in rows["cache.host_bytes"]
    assert " auto " in rows["cache.disk_bytes"]
    assert " 100,000 " in rows["limits.sessions"]
    assert " 2.5 s " in rows["limits.drain_s"]
    assert " 50 ms " in rows["scheduler.min_lookup_wait_ms"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--set", "nonsense"], "--set is 'nonsense'; allowed: KEY=VALUE"),
        (
            ["--set", "cache.bogus=1"],
            "name of a field is 'cache.bogus'; allowed: one of cache.block_size, ",
        ),
        (["--set", "model=x", "--set", "model.y=1"], "--set is 'model.y'; allowed: a table"),
        (["--host-bytes", "lots"], "cache.host_bytes is 'lots'; allowed: a whole number of bytes"),
        (["--config", "/nonexistent.toml"], "sessionkv: /nonexistent.toml: no such file\n"),
        (["--config", "/"], "config is '/'; allowed: a readable"),
    ],
)
def test_config_errors_name_the_field(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("field", ["cache.host_bytes", "threads", "limits.drain_s"])
@pytest.mark.parametrize(
    "value", ["inf", "-inf", "nan", "infGiB", "nanGiB", "1e400GiB", "-1GiB", "-1", "9" * 5000]
)
def test_numbers_that_are_none_are_refused_by_name(
    field: str, value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config", "show", "--set", f"{field}={value}"]) == 2
    assert f"{field} is " in capsys.readouterr().err
    if value.lstrip("-") in ("inf", "nan", "1"):
        section, _, name = field.rpartition(".")
        table = f"[{section}]\n" if section else ""
        (tmp_path / "engine.toml").write_text(f"{table}{name} = {value}\n")
        assert main(["config", "show", "--config", str(tmp_path / "engine.toml")]) == 2
        assert f"{field} is " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["threads = " + "9" * 5000, "threads = " + "[" * 100_000])
def test_a_file_that_no_parser_reads_is_refused(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "engine.toml").write_text(text)
    assert main(["config", "show", "--config", str(tmp_path / "engine.toml")]) == 2
    assert "a readable TOML file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "lowest"),
    [
        ("limits.frame_bytes=1", 16384),
        ("limits.depth=1", 8),
        ("limits.heartbeat_s=0.001", 0.01),
        ("limits.verdict_timeout_s=0.001", 0.01),
    ],
)
def test_a_limit_that_nothing_can_work_with_is_refused(
    setting: str, lowest: float, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = setting.partition("=")
    assert main(["config", "show", "--set", setting]) == 2
    assert f"{name} is {value}; allowed: from {lowest:,} to " in capsys.readouterr().err
    assert main(["config", "show", "--set", f"{name}={lowest}"]) == 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (["CACHE", "CACHE__HOST_BYTES"], "SESSIONKV_CACHE is '1'; allowed: one of its fields: SES"),
        (["CACHE__HOST_BYTES", "CACHE"], "SESSIONKV_CACHE is '1'; allowed: one of its fields: SES"),
        (["CAHCE__HOST_BYTES"], "the nearest is SESSIONKV_CACHE__HOST_BYTES"),
        (["THREDS"], "the nearest is SESSIONKV_THREADS"),
        (["THREADS__X"], "SESSIONKV_THREADS__X is '1'; allowed: only variables that there are"),
        (["ZORK"], "SESSIONKV_ZORK is '1'; allowed: only variables that there are; the nearest is"),
        ([""], "SESSIONKV_ is '1'; allowed: only variables that there are"),
    ],
)
def test_a_mistyped_variable_is_named_with_the_nearest(
    variables: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in variables:
        monkeypatch.setenv(f"SESSIONKV_{name}", "1")
    assert main(["config", "show"]) == 2
    assert message in capsys.readouterr().err


def test_every_field_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESSIONKV_CACHE__HOST_BYTES", "1GiB")
    monkeypatch.setenv("SESSIONKV_MODEL_CACHE", "/models")
    assert main(["config", "show"]) == 0
