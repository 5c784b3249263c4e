"""What is not there to be found, under the codes that clients of the Responses API know."""

from __future__ import annotations

from sessionkv.errors import RequestError


class ResponseNotFound(RequestError):
    """There is no such response: it never was, was deleted, or was not stored."""

    code = "response_not_found"

    @classmethod
    def of(cls, response_id: str) -> ResponseNotFound:
        """The error for an id."""
        return cls(f"Response with id '{response_id}' not found.")


class PreviousResponseNotFound(RequestError):
    """A request goes on from a response that is not there."""

    code = "previous_response_not_found"

    @classmethod
    def of(cls, response_id: str) -> PreviousResponseNotFound:
        """The error for an id."""
        message = f"Previous response with id '{response_id}' not found."
        return cls(message, param="previous_response_id")


class ConversationNotFound(RequestError):
    """There is no such conversation."""

    code = "conversation_not_found"

    @classmethod
    def of(cls, conversation_id: str) -> ConversationNotFound:
        """The error for an id."""
        return cls(f"Conversation with id '{conversation_id}' not found.", param="conversation")


class ItemNotFound(RequestError):
    """There is no such item, or not there."""

    code = "item_not_found"

    @classmethod
    def of(cls, item_id: str, param: str | None = None) -> ItemNotFound:
        """The error for an id."""
        return cls(f"Item with id '{item_id}' not found.", param=param)
