"""Errors as HTTP answers: one table of statuses, and the body that each API's clients expect.

A client's fault is 4xx, always; the engine's numbers go with it. Nothing of the program (paths,
class names, what was raised where) reaches a body.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sessionkv.errors import ConnectionLost, InvalidRequest, Overloaded, SessionKVError

_log = logging.getLogger(__name__)

ANTHROPIC_PREFIX = "/v1/messages"
_STATUS: Mapping[str, int] = {
    "invalid_request": 400,
    "prompt_too_long": 400,
    "never_fits": 400,
    "turn_kind": 400,
    "rewind_beyond_root": 400,
    "pin_refused": 400,
    "template_refused": 400,
    "protocol_violation": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "session_not_found": 404,
    "node_not_found": 404,
    "model_not_found": 404,
    "previous_response_not_found": 400,
    "response_not_found": 404,
    "conversation_not_found": 404,
    "item_not_found": 404,
    "session_exists": 409,
    "session_differs": 409,
    "session_busy": 409,
    "idempotency_conflict": 409,
    "duplicate_request": 409,
    "turn_cancelled": 409,
    "slow_reader": 408,
    "overloaded": 429,
    "deadline_exceeded": 504,
    "connection_lost": 503,
    "engine_closed": 503,
    "store_unavailable": 503,
}
_TEXT = {"type": "string"}
DOCUMENTED: dict[str, Any] = {
    "description": "The request is at fault: in the shape of its API, with figures",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "code", "param"],
                        "properties": {
                            "message": _TEXT,
                            "type": _TEXT,
                            "code": _TEXT,
                            "param": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
"""For the document of every route."""
_CODES = {"prompt_too_long": "context_length_exceeded"}
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
    504: "timeout_error",
}
_RETRY_S = {503: 1.0, 409: 1.0}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error before it has a body.

    Attributes:
        status: HTTP status.
        code: Stable name.
        message: For people.
        param: The field at fault, where there is one.
        details: Figures.
        retry_after_s: When to come back, None where that helps nobody.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None

    def openai(self) -> dict[str, Any]:
        """``{"error": {...}}`` with the figures beside the API's own fields."""
        kind = _OPENAI_TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        own = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**self.details, **own}}

    def anthropic(self) -> dict[str, Any]:
        """``{"type": "error", "error": {...}}`` with the figures beside the API's own fields."""
        kind = _ANTHROPIC_TYPES.get(self._anthropic_status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "api_error"
        own = {"type": kind, "message": self.message, "code": self.code, "param": self.param}
        return {"type": "error", "error": {**self.details, **own}}

    @property
    def _anthropic_status(self) -> int:
        """Of an engine that is full: 429 there means that this caller asks too much."""
        return 529 if self.code == Overloaded.code else self.status

    def body(self, path: str) -> dict[str, Any]:
        """In the shape of the API that a path belongs to."""
        return self.anthropic() if path.startswith(ANTHROPIC_PREFIX) else self.openai()

    def response(self, path: str) -> Response:
        """The whole answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return Response(
            json.dumps(self.body(path)),  # ASCII: whatever was sent, the answer can be written
            self._anthropic_status if path.startswith(ANTHROPIC_PREFIX) else self.status,
            headers,
            media_type="application/json",
        )


def problem_of(error: Exception) -> Problem:
    """What an exception means to a caller; one that is not expected is logged and says little."""
    if not isinstance(error, SessionKVError):
        _log.error("a request could not be handled", exc_info=error)
        return Problem(500, "internal_error", "the gateway could not handle the request")
    if error.code == NO_KEY.code:
        return NO_KEY
    status = _STATUS.get(error.code, 500)
    details = {name: value for name, value in error.details.items() if name not in _INTERNAL}
    if "frame_bytes" in details:
        return Problem(413, "request_too_large", _TOO_LARGE, details=details)
    if error.code == "prompt_too_long":
        details["n_prompt_tokens"] = details.get("n_prompt")
    retry = error.details.get("retry_after_s") if error.retryable else None
    if retry is None and error.retryable:
        retry = _RETRY_S.get(status, 1.0)
    param = error.details.get("field" if isinstance(error, InvalidRequest) else "param")
    message, param = _renamed(_public(error), param)
    code = _CODES.get(error.code, error.code)
    return Problem(status, code, message, param, details, retry)


_INTERNAL = frozenset({"endpoint", "directory", "damage", "field", "param"})
_TOO_LARGE = "the request, with what it continues, is larger than this engine takes"
NO_KEY = Problem(
    401,
    "unauthorized",
    "give an API key that is known here: Authorization: Bearer KEY, or x-api-key: KEY",
)
"""Without a key and with an unknown one alike."""


def _public(error: SessionKVError) -> str:
    """What an error says, without the places on this machine that it says it of."""
    if error.code == ConnectionLost.code:
        return "the connection to the engine was lost: try again"
    directory = error.details.get("directory")
    return error.message.replace(directory, "the store") if directory else error.message


def _renamed(message: str, param: str | None) -> tuple[str, str | None]:
    """The wire's ``sampling.x`` is the API's ``x``, and its ``tokens`` are a ``prompt``."""
    if param is None or not param.startswith(("sampling.", "tokens")):
        return message, param
    name = param.removeprefix("sampling.").replace("tokens[", "prompt[")
    return message.replace(param, name, 1), name


def refused(param: str, value: object, why: str) -> InvalidRequest:
    """A parameter that the API has and this server does not honour; says so by its name."""
    return InvalidRequest(param, value, why, message=f"{param} is not supported: {why}")


def invalid_body(problems: Sequence[Mapping[str, Any]]) -> Problem:
    """From what pydantic found: the first of them, named as a client would."""
    first = _deepest(problems)
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return Problem(400, "invalid_json", "the body is not JSON that can be read")
    param = _dotted(first["loc"])
    said = str(first["msg"]).encode("ascii", "backslashreplace").decode()
    return Problem(
        400, "invalid_request", f"{param or 'the body'}: {said}", param if where else None
    )


def _deepest(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first problem; of the ways in which a value fits no kind of a union, the nearest miss."""
    parent = tuple(problems[0]["loc"][:-1])
    same = [item for item in problems if tuple(item["loc"][: len(parent)]) == parent]
    return max(same, key=lambda item: len(item["loc"]))


def _dotted(loc: Sequence[Any]) -> str:
    """``messages[2].content`` from pydantic's location; names of its unions are left out."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("body", "query", "path") and part.isidentifier() and part not in _UNIONS:
            name += f".{part}" if name else part
    return name


_UNIONS = frozenset({"str", "int", "float", "bool", "list", "dict"})


def problem_response(request: Request, error: Exception) -> Response:
    """The answer to a request that failed before its first byte."""
    return problem_of(error).response(request.url.path)
