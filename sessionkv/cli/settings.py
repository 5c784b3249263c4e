"""From parsed arguments to the engine's configuration, through the one door in ``config``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sessionkv.cli.usage import WrongUsage
from sessionkv.config import EngineConfig, config_sources, load_config, user_data_dir
from sessionkv.errors import ConfigError

_FLAGS = {
    "model": "model",
    "store": "store",
    "keys": "keys",
    "device": "device",
    "dtype": "dtype",
    "device_bytes": "cache.device_bytes",
    "host_bytes": "cache.host_bytes",
    "disk_bytes": "cache.disk_bytes",
    "max_model_len": "max_model_len",
    "threads": "threads",
    "log_level": "log_level",
}
ENGINE_FLAGS = (
    "config",
    "set",
    *(name for name in _FLAGS if name not in ("model", "keys")),
    "offline",
)
"""What an engine that is started would take of the command line, beside its model."""


def overrides_from(args: argparse.Namespace) -> dict[str, Any]:
    """Nested map of what the command line sets; flags win over ``--set``.

    Raises:
        ConfigError: A ``--set`` without ``=``.
    """
    values: dict[str, Any] = {}
    for item in args.set:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError("--set", item, "KEY=VALUE, as in cache.host_bytes=1GiB")
        _put(values, name.strip(), value.strip())
    for flag, name in _FLAGS.items():
        value = getattr(args, flag, None)
        if value is not None:
            _put(values, name, value)
    if args.offline:
        values["offline"] = True
    return values


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *tables, last = name.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError("--set", name, "a table and its field, as in cache.host_bytes")
    values[last] = value


def config_from(args: argparse.Namespace) -> EngineConfig:
    """The effective configuration.

    Engines started from the command line keep their conversations: where no store is named it is
    the user's data directory, not a temporary one.

    Raises:
        ConfigError: Naming the field, its value and what is allowed.
        WrongUsage: The file with the configuration is not there.
    """
    overrides = overrides_from(args)
    config = load_config(overrides, path=_path(args))
    if config.store is None:
        config = load_config({**overrides, "store": user_data_dir()}, path=_path(args))
    return config


def sources_from(args: argparse.Namespace) -> dict[str, str]:
    """Where each value that is not a default came from, by dotted name."""
    return config_sources(overrides_from(args), path=_path(args))


def _path(args: argparse.Namespace) -> Path | None:
    if not args.config:
        return None
    path = Path(args.config).expanduser()
    if not path.exists():
        raise WrongUsage(f"{args.config}: no such file")
    return path
