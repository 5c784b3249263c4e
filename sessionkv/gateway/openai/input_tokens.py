"""How many input tokens a request for a response has: exactly what it reports when it is run."""

from __future__ import annotations

from pydantic import Field, field_validator

from sessionkv.client.options import TurnOptions
from sessionkv.errors import PromptTooLong, TurnFailed
from sessionkv.gateway.openai.conversation_store import ConversationStore
from sessionkv.gateway.openai.response_body import echo_of
from sessionkv.gateway.openai.response_ids import new_response_id
from sessionkv.gateway.openai.response_plan import plan_of
from sessionkv.gateway.openai.response_schema import ResponseRequest
from sessionkv.gateway.openai.response_store import ResponseStore
from sessionkv.gateway.openai.schema import Text
from sessionkv.gateway.services import ServedModel
from sessionkv.types import SamplingParams


class CountRequest(ResponseRequest):
    """Body of the question how many input tokens a request for a response has."""

    model: Text = Field("", description="Name of the served model, which is meant without one.")

    @field_validator("model", mode="before")
    @classmethod
    def _null_is_absent(cls, given: object) -> object:
        return "" if given is None else given


async def input_tokens(
    body: CountRequest,
    store: ResponseStore,
    conversations: ConversationStore,
    served: ServedModel,
) -> int:
    """Input tokens of a request.

    One that leaves no response is counted as its turn would find its conversation. Else the very
    turn is asked for, with so many tokens to generate as fit beside no prompt at all. The
    engine refuses it with the prompt's length before anything of it is queued or computed, and what
    was made for it is deleted.

    Args:
        body: The request, checked.
        store: The caller's responses.
        conversations: The caller's.
        served: The model.

    Raises:
        SessionKVError: As for the response itself, but for one whose prompt is too long.
    """
    standing = None
    if body.conversation_id is not None:
        standing = await conversations.standing(body.conversation_id)
    echo = echo_of(body, new_response_id(), model=served.id, tier="default")
    plan = await plan_of(store, body, echo, standing)
    if not plan.messages:
        return 0
    if plan.is_passing:
        return await store.passing.count(plan)
    options = TurnOptions(sampling=SamplingParams(max_tokens=served.max_model_len))
    try:
        await store.whole(plan, options)
    except PromptTooLong as refusal:
        return int(refusal.details["n_prompt"])
    raise TurnFailed("the engine took a turn that fills more than its window")
