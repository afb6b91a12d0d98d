"""What requests get from the store below the cache, and what they leave to it: a scheduler's side of
`StoredPrefixes`. Without a store nothing comes, and nothing is kept. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from freight.cache.manager import SequenceBlocks
from freight.cache.stored import PrefixQuery, StoredPrefixes
from freight.engine.request import Request


class PrefixFetch:
    """The fetches of waiting requests, each asked for once while it waits."""

    def __init__(self, store: StoredPrefixes | None, caching: bool) -> None:
        """`caching`: whether full blocks are indexed, so that there is something to keep."""
        self.store = store
        self._caching = caching

    def is_under_way(self, request: Request) -> bool:
        """Return whether blocks of this request come. Where they have come, they are indexed."""
        if self.store is None or request.asked_store:
            return False
        name = request.request_id
        if self.store.is_coming(name):
            return True
        if self.store.has_fetch(name):
            self.store.finish(name)
            request.asked_store = True
        return False

    def may_begin(self, request: Request) -> bool:
        """Return whether there is a store that was not asked for all that it has of this request."""
        return self.store is not None and not request.asked_store

    def begin(self, request: Request, hit_keys: Sequence[bytes], reserve: int) -> bool:
        """Ask for the blocks of `hit_keys`; return whether they come, or will. Leaves `reserve`
        blocks free.
        """
        assert self.store is not None
        adapter = None if request.adapter is None else request.adapter.name
        salt = request.params.cache_salt
        query = PrefixQuery(hit_keys, request.tokens, request.num_tokens, salt, adapter)
        return self.store.begin(request.request_id, query, _is_salted(request), reserve)

    def has(self, request: Request) -> bool:
        """Return whether blocks come for this request, and not only wait for their turn."""
        return self.store is not None and self.store.has_fetch(request.request_id)

    def drop_latest(self) -> bool:
        """Give up blocks that come; False if none do."""
        return self.store is not None and self.store.drop_latest()

    def offer(
        self, request: Request, held: SequenceBlocks, ends: Sequence[int] | None = None
    ) -> None:
        """Let the store have the full blocks that a request gave back: those of `held` up to
        `ends`, None: all.
        """
        if self.store is None or not self._caching:
            return
        query = PrefixQuery(request.block_keys, request.tokens, request.num_computed_tokens)
        self.store.offer(
            held,
            ends or list(map(len, held.block_ids)),
            query,
            request.num_cached_tokens,
            _is_salted(request),
        )

    def end(self, request: Request) -> None:
        """Give up what comes for a request that has ended."""
        if self.store is not None:
            self.store.drop(request.request_id)

    def forget(self, request: Request) -> None:
        """Have nobody take up the blocks that a request computed."""
        if self.store is not None:
            self.store.forget(request.block_keys)

    def reset(self) -> None:
        """Start over: nothing comes, and nothing is held for the store."""
        if self.store is not None:
            self.store.reset()


def _is_salted(request: Request) -> bool:
    return request.params.cache_salt is not None
