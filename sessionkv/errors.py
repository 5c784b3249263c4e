"""Every error a caller can meet. Each has a stable ``code`` and says whether a retry can help.

SessionKVError
├── RequestError                  the request is at fault; nothing was changed
│   ├── InvalidRequest            invalid_request: a field, its value, what is allowed
│   ├── PromptTooLong             prompt_too_long: n_prompt, max_tokens, n_ctx
│   ├── NeverFits                 never_fits: blocks needed and available
│   ├── SessionNotFound           session_not_found
│   ├── SessionExists             session_exists
│   ├── SessionDiffers            session_differs: resumed with another system prompt or tools
│   ├── SessionBusy               session_busy (retryable)
│   ├── TurnKind                  turn_kind: chat and raw turns mixed
│   ├── NodeNotFound              node_not_found
│   ├── RewindBeyondRoot          rewind_beyond_root
│   ├── PinRefused                pin_refused: bytes needed and allowed
│   ├── IdempotencyConflict       idempotency_conflict: same key, other body
│   ├── DuplicateRequest          duplicate_request: request id in use on this connection
│   ├── TemplateRefused           template_refused: with the template's own words
│   ├── ProtocolViolation         protocol_violation: frame, version or type
│   ├── Unauthorized              unauthorized: no key, or one that the engine does not know
│   ├── Forbidden                 forbidden: for an operator's key only
│   ├── ResponseNotFound          response_not_found: of the Responses API, as the next three
│   ├── PreviousResponseNotFound  previous_response_not_found: what a request goes on from
│   ├── ConversationNotFound      conversation_not_found
│   └── ItemNotFound              item_not_found: no such item, or not there
├── Overloaded                    overloaded (retryable): queue or limit full, retry_after_s
├── TurnError                     the turn ended without being committed
│   ├── TurnFailed                turn_failed
│   ├── TurnCancelled             turn_cancelled
│   ├── DeadlineExceeded          deadline_exceeded
│   └── SlowReader                slow_reader: events were not read in time
├── ConnectionLost                connection_lost (retryable): engine gone or not answering
├── EngineStartFailed             engine_start_failed
├── EngineRunning                 engine_running: endpoint in use, with its pid
├── EngineClosed                  engine_closed: used after close, or draining
├── StoreError
│   ├── StoreInUse                store_in_use: directory and pid
│   ├── StoreUnavailable          store_unavailable (retryable where the disk is full)
│   ├── SessionDamaged            session_damaged: a turn of it cannot be read
│   └── ExportDamaged             export_damaged: not a whole export file; offset
├── ModelError
│   ├── ModelNotFound             model_not_found
│   ├── ModelUnsupported          model_unsupported
│   └── ModelBroken               model_broken
└── ConfigError                   config: field, value, range
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

_MAX_VALUE_CHARS = 120


def _shown(value: object) -> str:
    """``repr`` cut to a length fit for a message, with lone surrogates escaped."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


class SessionKVError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: Stable name, the same on the wire and in every client.
        retryable: Whether the same request may succeed later.
        details: Figures for programs, plain values only.
    """

    code: ClassVar[str] = "error"
    retryable: bool = False

    def __init__(self, message: str, **details: Any) -> None:
        """Keep the message and the details."""
        super().__init__(message)
        self.message = message
        self.details = details

    def to_wire(self) -> dict[str, Any]:
        """Plain map for the wire; :func:`error_from_wire` is the way back."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "details": self.details,
        }

    def copy(self) -> SessionKVError:
        """An equal error for another caller to raise: each raised one has its own traceback."""
        return error_from_wire(self.to_wire())


class RequestError(SessionKVError):
    """The request is at fault; nothing was changed.

    Attributes:
        request_id: Id of the wire request at fault, -1 where it is not known.
    """

    code = "request"
    request_id: int = -1


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""

    code = "invalid_request"

    def __init__(
        self,
        field: str,
        value: object,
        allowed: str,
        *,
        message: str | None = None,
        **details: Any,
    ) -> None:
        """Name the field, the value and what is allowed; ``message`` where that reads badly."""
        shown = _shown(value)
        super().__init__(
            message or f"{field} is {shown}; allowed: {allowed}",
            field=field,
            value=shown,
            allowed=allowed,
            **details,
        )


class PromptTooLong(RequestError):
    """Prompt and max_tokens do not fit the window."""

    code = "prompt_too_long"

    def __init__(self, n_prompt: int, max_tokens: int | None, n_ctx: int) -> None:
        """Give the three numbers."""
        asked = 1 if max_tokens is None else max_tokens
        super().__init__(
            f"the prompt has {n_prompt} tokens and max_tokens is {max_tokens}: "
            f"{n_prompt + asked} > {n_ctx}, the window of this engine",
            n_prompt=n_prompt,
            max_tokens=max_tokens,
            n_ctx=n_ctx,
        )


class NeverFits(RequestError):
    """The request needs more blocks than the device has."""

    code = "never_fits"

    def __init__(self, needed_blocks: int, available_blocks: int) -> None:
        """Give needed and available."""
        super().__init__(
            f"the request needs {needed_blocks} KV blocks; the device has {available_blocks}",
            needed_blocks=needed_blocks,
            available_blocks=available_blocks,
        )


class SessionNotFound(RequestError):
    """No session of that name."""

    code = "session_not_found"


class SessionExists(RequestError):
    """The name is taken."""

    code = "session_exists"


class SessionDiffers(RequestError):
    """An existing session was opened with another system prompt, tools or policy."""

    code = "session_differs"


class SessionBusy(RequestError):
    """A turn of the session is running."""

    code = "session_busy"
    retryable = True


class TurnKind(RequestError):
    """Chat and raw turns were mixed in one session."""

    code = "turn_kind"


class NodeNotFound(RequestError):
    """No such turn."""

    code = "node_not_found"


class RewindBeyondRoot(RequestError):
    """More turns were to be taken back than there are."""

    code = "rewind_beyond_root"


class PinRefused(RequestError):
    """The pin would promise more than the tier can hold."""

    code = "pin_refused"


class IdempotencyConflict(RequestError):
    """The idempotency key was used for another request."""

    code = "idempotency_conflict"


class DuplicateRequest(RequestError):
    """The request id is in use on this connection."""

    code = "duplicate_request"


class TemplateRefused(RequestError):
    """The chat template refuses these messages."""

    code = "template_refused"


class ProtocolViolation(RequestError):
    """A frame, version or message type that is not understood."""

    code = "protocol_violation"


class Unauthorized(RequestError):
    """The engine asks for a key, and got none or one that it does not know."""

    code = "unauthorized"


class Forbidden(RequestError):
    """The key is known and does not allow this."""

    code = "forbidden"


class ResponseNotFound(RequestError):
    """There is no such response: it never was, was deleted, or was not stored."""

    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        """Name the response."""
        super().__init__(f"Response with id '{response_id}' not found.")


class PreviousResponseNotFound(RequestError):
    """A request goes on from a response that is not there."""

    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        """Name the response."""
        message = f"Previous response with id '{response_id}' not found."
        super().__init__(message, param="previous_response_id")


class ConversationNotFound(RequestError):
    """There is no such conversation of the Conversations API."""

    code = "conversation_not_found"

    def __init__(self, conversation_id: str) -> None:
        """Name the conversation."""
        message = f"Conversation with id '{conversation_id}' not found."
        super().__init__(message, param="conversation")


class ItemNotFound(RequestError):
    """There is no such item of a response or conversation, or not there."""

    code = "item_not_found"

    def __init__(self, item_id: str, param: str | None = None) -> None:
        """Name the item, and the field that names it."""
        super().__init__(f"Item with id '{item_id}' not found.", param=param)


class Overloaded(SessionKVError):
    """A bound is reached; try again after ``retry_after_s``."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        """Say what is full and when to come back."""
        super().__init__(message, retry_after_s=retry_after_s, **details)


class TurnError(SessionKVError):
    """The turn ended without being committed; the session is as before it."""

    code = "turn"


class TurnFailed(TurnError):
    """The engine could not compute the turn."""

    code = "turn_failed"


class TurnCancelled(TurnError):
    """The turn was cancelled and nothing of it kept."""

    code = "turn_cancelled"


class DeadlineExceeded(TurnError):
    """The turn's deadline passed."""

    code = "deadline_exceeded"


class SlowReader(TurnError):
    """The client did not read its events in time."""

    code = "slow_reader"


class ConnectionLost(SessionKVError):
    """The engine is gone or does not answer."""

    code = "connection_lost"
    retryable = True


class EngineStartFailed(SessionKVError):
    """The engine process did not become ready."""

    code = "engine_start_failed"


class EngineRunning(SessionKVError):
    """Another engine serves this endpoint."""

    code = "engine_running"


class EngineClosed(SessionKVError):
    """The engine or client is closed or draining."""

    code = "engine_closed"


class StoreError(SessionKVError):
    """The store cannot be used."""

    code = "store"


class StoreInUse(StoreError):
    """Another engine has the store directory."""

    code = "store_in_use"


class StoreUnavailable(StoreError):
    """The store cannot be read or written."""

    code = "store_unavailable"

    def __init__(self, message: str, *, retryable: bool = False, **details: Any) -> None:
        """Keep the message and the details.

        Args:
            message: What is wrong, where, and what to do.
            retryable: The store goes on by itself once there is room again.
            details: Figures for programs, plain values only.
        """
        super().__init__(message, **details)
        self.retryable = retryable


class SessionDamaged(StoreError):
    """A turn of the session is damaged on disk, or what it holds is no text that can be read.

    In the first case the session can only be deleted; in the second, only what needs the text
    fails.
    """

    code = "session_damaged"


class ExportDamaged(StoreError):
    """A file of exported sessions is damaged, cut short, or something else."""

    code = "export_damaged"

    def __init__(self, what: str, offset: int) -> None:
        """Say what is wrong at which byte."""
        super().__init__(f"at byte {offset} of the export: {what}", offset=offset)


class ModelError(SessionKVError):
    """The model cannot be used."""

    code = "model"


class ModelNotFound(ModelError):
    """No model under that name or path."""

    code = "model_not_found"


class ModelUnsupported(ModelError):
    """The architecture or one of its settings is not supported."""

    code = "model_unsupported"


class ModelBroken(ModelError):
    """Files are missing, truncated or contradict each other."""

    code = "model_broken"


class ConfigError(SessionKVError):
    """A configuration value is not allowed."""

    code = "config"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        """Name the field, the value and the range."""
        shown = _shown(value)
        super().__init__(
            f"{field} is {shown}; allowed: {allowed}", field=field, value=shown, allowed=allowed
        )


def _all_subclasses(cls: type[SessionKVError]) -> list[type[SessionKVError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        found += _all_subclasses(sub)
    return found


_BY_CODE = {cls.code: cls for cls in _all_subclasses(SessionKVError)}


def error_from_wire(value: Mapping[str, Any]) -> SessionKVError:
    """Rebuild an error from :meth:`SessionKVError.to_wire`; unknown codes give the base class.

    Details that are not named by strings are dropped.
    """
    cls = _BY_CODE.get(str(value.get("code")), SessionKVError)
    error = cls.__new__(cls)
    # Not by the class's own signature: message and details are made already.
    SessionKVError.__init__(error, str(value.get("message", "")))
    if value.get("retryable") is True:  # of some classes it is so by the case
        error.retryable = True
    details = value.get("details")
    if isinstance(details, Mapping):
        error.details = {name: item for name, item in details.items() if isinstance(name, str)}
    return error
