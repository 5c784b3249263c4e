"""The command line's grammar. Standard library only, so that ``--help`` is immediate."""

from __future__ import annotations

import argparse

from sessionkv import __version__
from sessionkv.cli.parser_access import add_client_flags, add_keys, add_public
from sessionkv.cli.values import number, seconds, whole_number
from sessionkv.config import DEFAULT_MODEL

_EPILOG = """\
exit codes: 0 done, 1 an error (said on stderr), 2 wrong usage, 130 interrupted,
143 terminated (serve, before it is ready)

Every field of the configuration can be set by a flag or --set, by the environment
(SESSIONKV_CACHE__HOST_BYTES=1GiB) or in the file given with --config, in this order of precedence;
an unknown field is an error wherever it stands, so is a SESSIONKV_ variable that names none;
`sessionkv config show` prints the outcome and where each value came from."""


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar. Each command sets ``module``, and ``action`` where it has several."""
    parser = argparse.ArgumentParser(
        prog="sessionkv",
        description="Conversations that keep their KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sessionkv {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_chat(commands)
    _add_sessions(commands)
    _add_store(commands)
    _add_stats(commands)
    _add_top(commands)
    _add_explain(commands)
    add_keys(commands)
    add_public(commands)
    _add_doctor(commands)
    _add_config(commands)
    return parser


_Commands = argparse._SubParsersAction  # what add_subparsers returns has no public name


def _add_serve(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="start the engine on a local socket",
        description="Start the engine on a local socket and serve until SIGTERM or Ctrl-C; then "
        "running turns end or are cancelled, dirty blocks are written, and the exit code is 0. A "
        'second signal ends that soon. A signal that comes before "ready" was printed ends the '
        "start; the exit code is then 130 (Ctrl-C) or 143 (SIGTERM).",
    )
    parser.set_defaults(module="serve")
    parser.add_argument(
        "model", nargs="?", help=f"known name, folder, .gguf file or hub id ({DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="serve the OpenAI and Anthropic APIs too; without HOST on 127.0.0.1",
    )
    parser.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="let pages of this origin call the APIs (none)",
    )
    parser.add_argument(
        "--steady-prompts",
        action="store_true",
        help="put dates and reminders that agents move around where they cost no cache (off)",
    )
    _add_endpoint(parser)
    parser.add_argument(
        "--keys", metavar="FILE", help="ask for one of this file's keys (`sessionkv keys add`)"
    )
    _add_engine_flags(parser)


def _add_chat(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to the running engine; where none runs, or --model is given, to a "
        "private one that ends with the chat. The engine's flags are for the private one. Reads "
        "lines from standard input when that is not a terminal; the exit code is then 1 when one "
        "of them failed.",
    )
    parser.set_defaults(module="chat")
    parser.add_argument("--session", default="chat", help="session to open or resume (chat)")
    parser.add_argument("--system", help="system prompt of a new session")
    parser.add_argument("--temperature", type=number, default=0.7, help="0 is greedy (0.7)")
    parser.add_argument(
        "--max-tokens", type=whole_number, default=1024, help="most tokens a reply (1024)"
    )
    parser.add_argument("--seed", type=whole_number, help="same seed, same replies")
    parser.add_argument("--model", help="start a private engine with this model")
    parser.add_argument(
        "--no-history", action="store_true", help="keep no file of the lines that are typed"
    )
    _add_endpoint(parser)
    add_client_flags(parser)
    _add_engine_flags(parser)


def _add_sessions(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sessions", help="list, inspect, fork, rewind, pin, remove, export, import"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, help_text: str, *, session: bool = True) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=help_text, description=help_text)
        sub.set_defaults(module="sessions", action=name)
        if session:
            sub.add_argument("session", help="name of the session")
        _add_endpoint(sub)
        add_client_flags(sub)
        _add_json(sub)
        return sub

    listing = action("ls", "list sessions; '~' lists those that HTTP made", session=False)
    listing.add_argument("prefix", nargs="?", default="", help="only names that start so")
    tree = action("tree", "which sessions are forks of which", session=False)
    tree.add_argument("prefix", nargs="?", default="", help="only names that start so")
    action("show", "one session: turns, tokens, bytes in each tier, pin")
    action("fork", "a new session on the last completed turn").add_argument(
        "name", help="name of the new session"
    )
    action("rewind", "take the last turns back").add_argument(
        "turns", nargs="?", type=whole_number, default=1, help="how many (1)"
    )
    pin = action("pin", "keep a session's blocks in a tier as long as possible")
    pin.add_argument("--tier", choices=("device", "host", "disk"), default="host", help="(host)")
    pin.add_argument(
        "--ttl", type=seconds, metavar="TIME", help="how long: 30m, 1h, 2d, or seconds (no end)"
    )
    pin.add_argument(
        "--priority", type=whole_number, default=50, help="0 to 100; higher leaves later (50)"
    )
    action("unpin", "take the pin off")
    action("rm", "remove sessions and what only they hold", session=False).add_argument(
        "session", nargs="+", help="names of the sessions"
    )
    _add_transfer(actions)


def _add_transfer(actions: _Commands[argparse.ArgumentParser]) -> None:
    export = actions.add_parser(
        "export",
        help="write sessions to one file: turns, messages, token ids, and KV if asked",
        description="Write sessions to one portable, checksummed file: turns with their messages, "
        "token ids and sampling. From the running engine; with --store or --kv from the store of a "
        "stopped one. Pins and idempotency keys stay behind, and with --all the conversations "
        "without a name of their own, as HTTP makes them: one is exported by its name (`sessions "
        "ls '~'`) and imported under another with --as.",
    )
    export.set_defaults(module="transfer", action="export")
    export.add_argument("session", nargs="?", help="name of the session")
    export.add_argument(
        "--all", action="store_true", help="every session that has a name of its own"
    )
    export.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="file to write (0600); - is stdout"
    )
    export.add_argument("--kv", action="store_true", help="with the KV that is on disk")
    taken = actions.add_parser(
        "import",
        help="take sessions out of a file that export wrote",
        description="Take in the sessions of a file that export wrote, after checking all of it: a "
        "damaged file, or a name that is taken, imports nothing. Into the running engine; with "
        "--store or --kv into the store of a stopped one. What another tokenizer wrote is encoded "
        "anew at its next turn.",
    )
    taken.set_defaults(module="transfer", action="import")
    taken.add_argument("file", help="file to read; - is stdin")
    taken.add_argument(
        "--as", dest="new_name", metavar="NAME", help="name of the one session in it"
    )
    taken.add_argument(
        "--kv", action="store_true", help="with its KV, where it fits the store's model"
    )
    for parser in (export, taken):
        parser.add_argument(
            "--store", metavar="DIR", help="store of a stopped engine (with --kv: the user's own)"
        )
        _add_endpoint(parser)
        add_client_flags(parser)
        _add_json(parser)


def _add_store(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "store", help="check, measure and empty the store of a stopped engine"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, help_text: str, description: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=help_text, description=description)
        sub.set_defaults(module="store", action=name)
        sub.add_argument("--store", metavar="DIR", help="directory of the store (the user's own)")
        _add_json(sub)
        return sub

    verify = action(
        "verify",
        "read everything and say what is damaged",
        "Read the journal and every KV block, and check headers, checksums, identities, lengths, "
        "index rows and permissions. Changes nothing without --repair. The exit code is 1 when "
        "something is wrong.",
    )
    verify.add_argument(
        "--repair",
        action="store_true",
        help="remove damaged KV: single records, or a block store whose index cannot be read",
    )
    action(
        "stats",
        "what is in it and what it takes",
        "Sessions, turns, keys and KV blocks, bytes of each file as allocated on disk, and times "
        "of last use.",
    )
    purge = action(
        "purge",
        "delete KV, and sessions only if told to",
        "Delete KV: all of it, of one identity, or of those that were not used for a while. The "
        "conversations stay, and are computed again when they go on. Only --sessions deletes "
        "conversations. Asks first.",
    )
    purge.add_argument("--identity", metavar="HEX", help="only this one (its first digits do)")
    purge.add_argument(
        "--older-than", metavar="AGE", help="only what was last used so long ago: 12h, 30d"
    )
    purge.add_argument(
        "--sessions", action="store_true", help="delete the sessions too, with all their turns"
    )
    purge.add_argument("--yes", action="store_true", help="do not ask")


def _add_stats(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("stats", help="metrics of the running engine")
    parser.set_defaults(module="stats")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=number,
        nargs="?",
        const=2.0,
        help="show them anew so often (2), until q or Ctrl-C",
    )
    _add_endpoint(parser)
    add_client_flags(parser)
    _add_json(parser)


def _add_top(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "top", help="sessions, tiers, hit rates and latencies of the running engine, live"
    )
    parser.set_defaults(module="top")
    parser.add_argument("--interval", type=number, default=1.0, metavar="SECONDS", help="(1)")
    parser.add_argument(
        "--sessions", type=whole_number, default=15, metavar="N", help="most shown (15)"
    )
    _add_endpoint(parser)
    add_client_flags(parser)


def _add_explain(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="why a turn computed what was computed before, and what helps",
        description="Say of a session's last turns, or of one, what of its prompt was found, what "
        "was computed again, from where on and why, and what helps.",
    )
    parser.set_defaults(module="explain")
    parser.add_argument("target", metavar="SESSION|NODE", help="name of a session, or n-NUMBER")
    parser.add_argument("--turn", type=whole_number, metavar="N", help="the session's Nth turn")
    parser.add_argument(
        "--last", type=whole_number, default=3, metavar="N", help="the last N turns (3)"
    )
    _add_endpoint(parser)
    add_client_flags(parser)
    _add_json(parser)


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what hardware, what would fit, what is wrong",
        description="Look at this machine, the model, the store and the socket, and say what is "
        "wrong and what to do. Changes nothing. The exit code is 1 when something is wrong.",
    )
    parser.set_defaults(module="doctor")
    parser.add_argument("model", nargs="?", help=f"model to size up ({DEFAULT_MODEL})")
    _add_endpoint(parser)
    _add_engine_flags(parser)
    _add_json(parser)


def _add_config(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("config", help="the effective configuration")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="every value and where it came from")
    show.set_defaults(module="config_show", action="show", model=None)
    _add_engine_flags(show)
    _add_json(show)


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", help="socket, as ipc:///path (the user's default)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--config", metavar="FILE", help="TOML file with the configuration")
    group.add_argument("--set", metavar="KEY=VALUE", action="append", default=[],
        help="any field of the configuration: cache.block_size=32",
    )  # fmt: skip
    group.add_argument("--store", metavar="DIR", 
        help="directory of journal and blocks ($XDG_DATA_HOME/sessionkv, else "
        "~/.local/share/sessionkv)",
    )  # fmt: skip
    group.add_argument(
        "--device", metavar="NAME", help="auto (a GPU where there is one), cpu, cuda or cuda:N"
    )
    group.add_argument(
        "--dtype", metavar="NAME", help="of weights and KV on a GPU: bfloat16, float16, float32"
    )
    group.add_argument("--device-bytes", metavar="SIZE", help="KV memory on the device: 512MiB")
    group.add_argument("--host-bytes", metavar="SIZE", help="cap of the host tier; 0 is off")
    group.add_argument("--disk-bytes", metavar="SIZE", help="cap of the disk tier; 0 is off")
    group.add_argument("--max-model-len", metavar="N", help="most positions of one sequence")
    group.add_argument("--threads", metavar="N", help="compute threads on the CPU")
    group.add_argument("--offline", action="store_true", help="never touch the network")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="how much is logged"
    )
