"""The grammar of keys: ``sessionkv keys``, ``sessionkv public``, and whom a client acts for."""

from __future__ import annotations

import argparse

from sessionkv.cli.values import whole_number

_Commands = argparse._SubParsersAction  # what add_subparsers returns has no public name


def add_keys(commands: _Commands[argparse.ArgumentParser]) -> None:
    """``sessionkv keys add | ls | rm``."""
    parser = commands.add_parser(
        "keys",
        help="who may use an engine: keys, their tenants and quotas",
        description="Change the file of keys that `serve --keys FILE` reads. A key is shown once "
        "and kept as its SHA-256. Sessions of an engine without keys are those of the tenant "
        "`local`: a key with --tenant local goes on with them.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = _action(actions, "keys", "add", "make a key and print it, this once")
    add.add_argument("name", help="name of the key, for people")
    add.add_argument("--tenant", metavar="NAME", help="whose sessions it opens (the key's name)")
    add.add_argument(
        "--operator", action="store_true", help="may act for every tenant and see all figures"
    )
    for tier in ("device", "host", "disk"):
        add.add_argument(
            f"--{tier}-bytes",
            metavar="SIZE",
            help=f"quota of the tenant's KV in the {tier} tier: 8GiB (none)",
        )
    add.add_argument(
        "--turns", type=whole_number, metavar="N", help="most that run or wait at once (any)"
    )
    listing = _action(actions, "keys", "ls", "list keys, tenants and quotas")
    listing.add_argument("--json", action="store_true", help="print JSON")
    remove = _action(actions, "keys", "rm", "remove a key")
    remove.add_argument("name", help="name of the key")


def add_public(commands: _Commands[argparse.ArgumentParser]) -> None:
    """``sessionkv public add | ls``."""
    parser = commands.add_parser(
        "public",
        help="system prompts whose KV all tenants may share",
        description="KV is never shared between tenants, except that of system prompts which are "
        "declared public here. Whether such a prompt was used lately can be seen by all of them.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = _action(actions, "public", "add", "declare the text of a file public")
    add.add_argument("file", help="text file with the system prompt")
    listing = _action(actions, "public", "ls", "list what is public")
    listing.add_argument("--json", action="store_true", help="print JSON")


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """For commands that talk to a running engine."""
    parser.add_argument(
        "--key-file", metavar="FILE", help="file with the key, where the engine asks for one"
    )
    parser.add_argument("--tenant", metavar="NAME", help="whom to act for (an operator's key)")


def _action(
    actions: _Commands[argparse.ArgumentParser], command: str, name: str, help_text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(module="keys", action=f"{command} {name}")
    parser.add_argument(
        "--keys", metavar="FILE", help="file of keys (~/.config/sessionkv/keys.toml)"
    )
    return parser
