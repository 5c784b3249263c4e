"""``/v1/conversations``: conversations by name, to which responses and items are added."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from sessionkv.gateway.openai.pages import page_of
from sessionkv.gateway.openai.response_schema import (
    ConversationCreate,
    ConversationUpdate,
    ItemsCreate,
)
from sessionkv.gateway.openai.stores import Stores

_ONE = "/v1/conversations/{conversation_id}"


def router(stores: Stores) -> APIRouter:
    """Routes of Conversations."""
    routes = APIRouter(tags=["conversations"])

    @routes.post("/v1/conversations", response_model=None)
    async def create(request: Request, body: ConversationCreate | None = None) -> dict[str, Any]:
        """Begin a conversation."""
        store = await stores.conversations(request)
        given = body or ConversationCreate()
        return await store.create(given.metadata, given.items or [])

    @routes.get(_ONE, response_model=None)
    async def retrieve(conversation_id: str, request: Request) -> dict[str, Any]:
        """Give a conversation's metadata."""
        return await (await stores.conversations(request)).body(conversation_id)

    @routes.post(_ONE, response_model=None)
    async def update(
        conversation_id: str, body: ConversationUpdate, request: Request
    ) -> dict[str, Any]:
        """Give it other metadata."""
        store = await stores.conversations(request)
        return await store.update(conversation_id, body.metadata)

    @routes.delete(_ONE, response_model=None)
    async def delete(conversation_id: str, request: Request) -> dict[str, Any]:
        """Forget it; responses that were made in it stay."""
        await (await stores.conversations(request)).delete(conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @routes.get(_ONE + "/items", response_model=None)
    async def items(
        conversation_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """List its items."""
        store = await stores.conversations(request)
        found = await store.all_items(conversation_id)
        return page_of(found, limit=limit, order=order, after=after)

    @routes.post(_ONE + "/items", response_model=None)
    async def add(conversation_id: str, body: ItemsCreate, request: Request) -> dict[str, Any]:
        """Add items by hand."""
        store = await stores.conversations(request)
        added = await store.add_items(conversation_id, body.items)
        return page_of(added, limit=len(added), order="asc", after=None)

    @routes.get(_ONE + "/items/{item_id}", response_model=None)
    async def item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
        """Give one item."""
        return await (await stores.conversations(request)).item(conversation_id, item_id)

    @routes.delete(_ONE + "/items/{item_id}", response_model=None)
    async def drop(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
        """Take one item out."""
        store = await stores.conversations(request)
        return await store.delete_item(conversation_id, item_id)

    return routes
