"""What to do about an error, by its code. The message says what is wrong; this says what helps."""

from __future__ import annotations

from sessionkv.errors import SessionKVError

_HINTS = {
    "connection_lost": "Another socket is named with --endpoint; `sessionkv doctor` shows what is "
    "there.",
    "engine_running": "Use it as it is, stop it first, or give this one another --endpoint.",
    "engine_closed": "The engine is shutting down; start it again with `sessionkv serve`.",
    "engine_start_failed": "`sessionkv doctor` shows what is missing; `--log-level debug` says "
    "more.",
    "store_in_use": "Talk to that engine instead (`chat` does without --model), or name another "
    "store with --store.",
    "export_damaged": "Copy the file again, or export anew; nothing of it was imported.",
    "store_unavailable": "Check that the directory exists, is yours and has room, or name another "
    "with --store.",
    "model_broken": "Fetch the files again.",
    "session_not_found": "`sessionkv sessions ls` lists the sessions there are.",
    "session_damaged": "`sessionkv sessions rm` removes it; other sessions are not affected.",
    "session_exists": "Choose another name (for import: --as), or remove that session first.",
    "unauthorized": "Give a key that the engine knows: --key-file FILE; `sessionkv keys add` makes "
    "one.",
    "forbidden": "Ask with an operator's key.",
    "session_busy": "A turn of this session is running; try again when it has ended.",
    "session_differs": "Resume it without --system, or choose another name.",
    "pin_refused": "Pin to a lower tier, unpin another session, or enlarge the tier.",
    "prompt_too_long": "Rewind the session, or serve with a larger --max-model-len.",
    "never_fits": "Serve with more --device-bytes.",
    "overloaded": "Try again in a moment.",
}

_OF_STOPPED_ENGINES = frozenset({"store", "transfer"})


def hint_for(error: SessionKVError, *, module: str = "") -> str | None:
    """One line of advice, or None where the message says it all.

    Args:
        error: To be helped with.
        module: Of the command that was given.
    """
    if error.code == "store_unavailable" and (error.retryable or "damage" in error.details):
        return None
    if error.code == "store_in_use" and module in _OF_STOPPED_ENGINES:
        pid = error.details.get("pid")
        how = "" if pid is None else f" (kill {pid})"
        return f"This is for the store of a stopped engine: stop it{how} first."
    if error.details.get("in_turn"):
        return (
            "Start it again with `sessionkv serve`; the conversation goes on from its last "
            "completed turn."
        )
    if error.code == "engine_start_failed" and "port" in error.details:
        if error.details.get("errno") in ("EADDRINUSE", "EACCES"):
            return "Choose another port, or 0 for a free one: --http HOST:PORT."
        return "Name an address of this machine, such as 127.0.0.1: --http HOST:PORT."
    if "starting_pid" in error.details:
        return "Try again when it is ready; loading a model takes a while."
    return _HINTS.get(error.code)
