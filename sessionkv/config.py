"""The one configuration tree and the one door that TOML, environment and CLI come through.

Frozen and validated when made; unknown keys are errors. What is measured at start (free memory,
rates, block counts) lives in separate objects, never here. No environment variable is read
elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sessionkv.errors import ConfigError
from sessionkv.types.words import number

MIB = 1024**2
GIB = 1024**3
_RANGES = {
    "frame_bytes": (16 * 1024, 2**40),  # the longest names and keys fit, and a short turn's text
    "depth": (8, 512),  # room for the parameters of a tool; checks go down by calls
    "heartbeat_s": (0.01, 2**40),  # sooner, a busy machine makes everybody look gone
    "verdict_timeout_s": (0.01, 2**40),
}
DEFAULT_MODEL = "smollm2-135m"
ENV_PREFIX = "SESSIONKV_"


def _range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ConfigError(name, value, f"from {number(low)} to {number(high)}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV blocks and tiers. None for a size means: measured default.

    Attributes:
        block_size: Tokens a block; a power of two from 4 to 256 (8 and up outside tests).
        device_bytes: KV memory on the device (default: 90% of what a GPU has free once the model
            is loaded; on the CPU 25% of available RAM, at most 4 GiB).
        device_blocks: Overrides device_bytes by a count.
        host_bytes: Cap of the host tier; 0 turns it off (default: 25% of available RAM, at most
            64 GiB beside a GPU and 2 GiB on the CPU).
        disk_bytes: Cap of the disk tier, metadata included; 0 turns it off (default: 10% of free
            space, at most 50 GiB).
        prefix_cache: Reuse KV across requests; off means every prompt is computed whole.
        durability: When a session's blocks are written to disk: ``"turn"`` before a turn's terminal
            event, ``"idle"`` from the turn's end on, ``"evict"`` before they leave memory (at the
            engine's end too), ``"off"`` only on ``flush``. The journal has the turn in any case.
    """

    block_size: int = 16
    device_bytes: int | None = None
    device_blocks: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    prefix_cache: bool = True
    durability: str = "idle"

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.block_size not in (4, 8, 16, 32, 64, 128, 256):
            raise ConfigError("cache.block_size", self.block_size, "a power of two from 4 to 256")
        if self.durability not in ("turn", "idle", "evict", "off"):
            raise ConfigError("cache.durability", self.durability, "turn, idle, evict or off")
        _range("cache.device_bytes", self.device_bytes, 1, 2**50)
        _range("cache.device_blocks", self.device_blocks, 1, 2**31)
        _range("cache.host_bytes", self.host_bytes, 0, 2**50)
        _range("cache.disk_bytes", self.disk_bytes, 0, 2**50)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Batching.

    Attributes:
        step_tokens: Most tokens of one step. None is the default: on a GPU 8192, or 2048 while some
            sequence decodes and would be held up; on the CPU 512 and 256.
        max_running: Most sequences in the batch.
        max_queue: Most turns that wait to be admitted; past it ``Overloaded``.
        ageing_s: Waiting so long counts as one step of priority.
        min_lookup_wait_ms: How long a turn waits at least for the answer what of it is on disk. Up
            to a quarter of the time that computing it takes, where that is longer.
    """

    step_tokens: int | None = None
    max_running: int = 256
    max_queue: int = 1024
    ageing_s: float = 10.0
    min_lookup_wait_ms: float = 50.0

    def __post_init__(self) -> None:
        """Check ranges."""
        _range("scheduler.step_tokens", self.step_tokens, 1, 2**20)
        _range("scheduler.max_running", self.max_running, 1, 4096)
        _range("scheduler.max_queue", self.max_queue, 1, 2**20)
        _range("scheduler.ageing_s", self.ageing_s, 0.001, 1e6)
        _range("scheduler.min_lookup_wait_ms", self.min_lookup_wait_ms, 0, 60_000)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Bounds on what clients may ask for and hold.

    Attributes:
        frame_bytes: Largest frame.
        depth: Nesting of a frame and of what tools and tool arguments hold.
        messages: Most messages of one request.
        session_name_bytes: Longest session name in UTF-8.
        sessions: Most sessions of the store, shared by its tenants.
        queued_turns_per_session: Most turns in line behind a session's running one.
        unread_events: Deltas that a connection may have unread before they are merged.
        unread_timeout_s: After so long without any reading a merged stream ends (``SlowReader``).
        heartbeat_s: How often a client pings.
        missed_heartbeats: After a silence of so many heartbeats a client counts as gone, and after
            four times as many an engine.
        idempotency_keys: Most keys kept; the oldest go first, of the tenant that has most.
        idempotency_ttl_s: How long a key is kept.
        verdict_timeout_s: How long core waits for the front to judge a finished turn.
        drain_s: How long turns may go on, and blocks be written, after the engine was told to end.
    """

    frame_bytes: int = 16 * MIB
    depth: int = 32
    messages: int = 4096
    session_name_bytes: int = 4096
    sessions: int = 100_000
    queued_turns_per_session: int = 8
    unread_events: int = 1024
    unread_timeout_s: float = 30.0
    heartbeat_s: float = 1.0
    missed_heartbeats: int = 3
    idempotency_keys: int = 100_000
    idempotency_ttl_s: float = 24 * 3600.0
    verdict_timeout_s: float = 5.0
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        """Check ranges."""
        for item in fields(self):
            low, high = _RANGES.get(item.name, (0.001, 2**40))
            _range(f"limits.{item.name}", getattr(self, item.name), low, high)


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Where an engine's HTTP APIs are served.

    Attributes:
        host: Name or address to listen on; an IPv6 address without brackets.
        port: 0 takes a free one.
        cors_origins: Origins whose pages may call, as ``https://example.org``.
        steady_prompts: Dates and reminders that agents move around in their prompts are put where
            they cost no cache.
    """

    host: str
    port: int
    cors_origins: tuple[str, ...] = ()
    steady_prompts: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        import ipaddress  # only where HTTP is served

        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self, *, has_keys: bool) -> None:
        """See that others than this machine's users need a key.

        Raises:
            ConfigError: They could come in without.
        """
        if not (self.is_loopback or has_keys):
            raise ConfigError(
                "--http",
                self.host,
                "without keys only 127.0.0.1, ::1 or localhost; for other addresses make a key "
                "with `sessionkv keys add NAME`, then serve with --keys FILE",
            )

    @classmethod
    def parse(cls, address: str) -> HttpConfig:
        """From ``HOST:PORT``, ``[::1]:PORT``, ``:PORT`` or ``PORT``; without a host it is loopback.

        Raises:
            ConfigError: It is none of these.
        """
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
        if not (port.isascii() and port.isdigit() and int(port) < 2**16):
            raise ConfigError("--http", address, "HOST:PORT, such as 127.0.0.1:8000")
        return cls(host, int(port))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told.

    Attributes:
        model: A known name (``smollm2-135m``), a local folder, a ``.gguf`` file, or a hub id;
            ``checksum`` is the model-free runner for tests.
        store: Directory of journal and blocks; None is a temporary one, removed at exit.
        model_cache: Folder for prepared models (default: the user's cache directory).
        keys: File with API keys, their tenants and quotas, of an engine that is served; None serves
            whoever reaches the socket. An engine in this process has no door, and no keys.
        max_model_len: Most positions of one sequence; None is the model's own.
        device: ``auto`` (a CUDA GPU where torch can use one, else the CPU), ``cpu``, ``cuda`` or
            ``cuda:N``.
        dtype: Of weights and KV: ``auto`` (``float32`` on the CPU, ``bfloat16`` on a GPU),
            ``bfloat16``, ``float16`` or ``float32``; the CPU computes in ``float32`` only.
        threads: Compute threads on CPU; None leaves torch's choice.
        offline: Never touch the network.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
    """

    model: str = DEFAULT_MODEL
    store: Path | None = None
    model_cache: Path | None = None
    keys: Path | None = None
    max_model_len: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    offline: bool = False
    log_level: str = "info"
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        """Check ranges; accept strings for paths."""
        for name in ("store", "model_cache", "keys"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Path(value).expanduser())
        if not self.model:
            raise ConfigError("model", self.model, "a name, folder, file or hub id")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError("log_level", self.log_level, "debug, info, warning or error")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError("device", self.device, "auto, cpu, cuda or cuda:N")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ConfigError("dtype", self.dtype, "auto, bfloat16, float16 or float32")
        _range("max_model_len", self.max_model_len, 2, 2**31)
        _range("threads", self.threads, 1, 1024)


def _convert(name: str, hint: Any, value: Any) -> Any:
    """Turn a TOML, environment or CLI value into the field's type, or say what is allowed."""
    allowed = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    optional = type(None) in get_args(hint)
    if value is None or (optional and value in ("", "none")):
        if optional:
            return None
        raise ConfigError(name, value, allowed[0].__name__)
    kind = allowed[0]
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(name, value, "a table of fields")
        return _build(kind, value, f"{name}.")
    if kind is bool:
        words = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise ConfigError(name, value, "true or false")
    if kind in (int, float):
        if isinstance(value, str):
            return _parse_number(name, kind, value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(name, value, _number_words(name, kind))
        return _number(name, kind, value)
    if not isinstance(value, str | Path):
        raise ConfigError(name, value, "a string")
    return Path(value).expanduser() if kind is Path else str(value)


def _parse_number(name: str, kind: type, text: str) -> Any:
    """Parse ``"12"``, ``"1.5"`` and, for ``*_bytes``, ``"4GiB"`` or ``"512MiB"``."""
    units = {"kib": 1024, "mib": MIB, "gib": GIB, "tib": 1024 * GIB}
    raw = text.strip().lower().replace("_", "")
    scale = 1
    if name.endswith("_bytes") and raw[-3:] in units:
        scale = units[raw[-3:]]
        raw = raw[:-3].strip()
    try:
        return kind(float(raw) * scale) if scale != 1 else kind(raw)
    except (ValueError, OverflowError):  # "x", "nanGiB"; "infGiB"
        raise ConfigError(name, text, _number_words(name, kind)) from None


def parse_bytes(name: str, text: str) -> int:
    """``"8GiB"`` in bytes, for a field whose name ends with ``_bytes``.

    Raises:
        ConfigError: It is not a size.
    """
    size: int = _parse_number(name, int, text)
    return size


def _number(name: str, kind: type, value: float) -> Any:
    try:
        if kind(value) == value:
            return kind(value)
    except (ValueError, OverflowError):  # nan; an infinite integer, or one past every float
        pass
    raise ConfigError(name, value, _number_words(name, kind))


def _number_words(name: str, kind: type) -> str:
    words = "a whole number" if kind is int else "a number"
    if name.endswith("_bytes"):
        words += " of bytes, or with a unit: KiB, MiB, GiB or TiB"
    return words


def _build(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    hints = get_type_hints(cls)
    known = {item.name for item in fields(cls)}
    for key in values:
        if key not in known:
            names = ", ".join(f"{prefix}{name}" for name in sorted(known))
            raise ConfigError("name of a field", f"{prefix}{key}", f"one of {names}")
    return cls(**{k: _convert(f"{prefix}{k}", hints[k], v) for k, v in values.items()})


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """``SESSIONKV_CACHE__HOST_BYTES=1GiB`` sets ``cache.host_bytes``.

    Raises:
        ConfigError: A variable that begins like these and is none: a typing error, most likely.
    """
    found: dict[str, Any] = {}
    known = {_variable(name) for name in flatten(EngineConfig())}
    for key, value in environ.items():
        if not key.startswith(ENV_PREFIX):
            continue
        if key.upper() not in known:
            raise ConfigError(key, value, _variable_words(key.upper(), known))
        *sections, name = key[len(ENV_PREFIX) :].lower().split("__")
        table = found
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return found


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper().replace('.', '__')}"


def _variable_words(key: str, known: set[str]) -> str:
    """What may be said in place of an unknown variable."""
    import difflib  # only for somebody who has mistyped

    within = sorted(name for name in known if name.startswith(f"{key}__"))
    if within:
        return f"one of its fields: {', '.join(within)}"
    nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0)
    return f"only variables that there are; the nearest is {nearest[0]}"


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    import tomllib  # clients read no file and should not pay for the parser

    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("config", str(path), f"a readable TOML file ({error})") from None


def load_config(
    overrides: Mapping[str, Any] | None = None,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Build the configuration: defaults, then the TOML file, then the environment, then overrides.

    Args:
        overrides: Nested map, as from the command line.
        path: TOML file; must exist when given.
        environ: Environment to read ``SESSIONKV_*`` from; None is the process's own.

    Raises:
        ConfigError: Naming the field, its value and what is allowed.
    """
    values: dict[str, Any] = {}
    _merge(values, _from_file(path))
    _merge(values, _from_environment(os.environ if environ is None else environ))
    _merge(values, overrides or {})
    config: EngineConfig = _build(EngineConfig, values)
    return config


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """``{"cache.host_bytes": ...}`` from a nested map or a configuration; fields in their order."""
    items = (
        {item.name: getattr(values, item.name) for item in fields(values)}
        if is_dataclass(values)
        else dict(values)
    )
    flat: dict[str, Any] = {}
    for key, value in items.items():
        if isinstance(value, Mapping) or is_dataclass(value):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def config_sources(
    overrides: Mapping[str, Any] | None = None,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where :func:`load_config` takes each field that is not a default from, by dotted name."""
    found = _from_environment(os.environ if environ is None else environ)
    sources = dict.fromkeys(flatten(_from_file(path)), f"file {path}")
    for name in flatten(found):
        sources[name] = f"environment {_variable(name)}"
    return sources | dict.fromkeys(flatten(overrides or {}), "command line")


def torch_threads_wait_asleep() -> bool:
    """Whether torch's threads, loaded in this environment, leave the cores while they wait."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def user_cache_dir() -> Path:
    """Where prepared models are kept: ``$XDG_CACHE_HOME/sessionkv`` or ``~/.cache/sessionkv``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sessionkv"


def user_config_dir() -> Path:
    """Where keys are kept: ``$XDG_CONFIG_HOME/sessionkv`` or ``~/.config/sessionkv``."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "sessionkv"


def user_data_dir() -> Path:
    """Where ``serve`` keeps its store: ``$XDG_DATA_HOME/sessionkv`` or ``~/.local/share/...``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "sessionkv"


def user_runtime_dir() -> Path:
    """Where sockets live: ``$XDG_RUNTIME_DIR/sessionkv``, else a private folder under /tmp."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "sessionkv" if base else Path(f"/tmp/sessionkv-{os.getuid()}")
