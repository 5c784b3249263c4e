"""What bytes token ids stand for: asked of the engine, each id once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sessionkv.client import AsyncClient
from sessionkv.client.results import Logprobs


class Pieces:
    """A vocabulary as far as it was asked for; at most as large as the model's."""

    def __init__(self) -> None:
        """Know nothing."""
        self._known: dict[int, bytes] = {}

    async def of(self, client: AsyncClient, token_ids: Iterable[int]) -> Mapping[int, bytes]:
        """Bytes of all these ids; valid as long as this object.

        Raises:
            SessionKVError: The engine cannot say.
        """
        missing = sorted(set(token_ids) - self._known.keys())
        if missing:
            self._known |= zip(missing, await client.pieces(missing), strict=True)
        return self._known

    async def of_logprobs(self, client: AsyncClient, entries: Logprobs) -> Mapping[int, bytes]:
        """Bytes of all ids in some log-probabilities."""
        return await self.of(client, {entry.token_id for token in entries for entry in token})
