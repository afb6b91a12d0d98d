"""Prefixes: which replica has had which beginnings of prompts, and which replica a request goes to.

A replica's cache is not asked: what it was sent is what it has, until it is full. So the memory is
bounded like a cache, and forgets what was used least recently.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence


class Prefixes:
    """The memory of one router. It belongs to one event loop."""

    def __init__(self, slack: int = 4, capacity: int = 200_000, seed: int | None = None) -> None:
        """slack     running requests that the replica with the prefix may have more than the least
                  busy one
        capacity  keys that are remembered
        """
        self._slack = slack
        self._capacity = capacity
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()  # replicas, by key
        self._replicas: set[str] = set()
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, keys: Sequence[bytes], running: Mapping[str, int]) -> str:
        """Return the replica for a request: of those that are not busier than the least busy by more
        than the slack, the one with the longest prefix; without a prefix, the least busy.

        keys     of the prompt's chunks, from its beginning
        running  number of requests of each replica; at least one replica
        """
        least = min(running.values())
        able = {name for name, count in running.items() if count - least <= self._slack}
        for key in reversed(keys):
            having = able & self._holders.get(key, set())
            if having:
                return self._least_busy(having, running)
        return self._least_busy(able, running)

    def routed(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember that a replica has a prompt."""
        for key in reversed(keys):  # the beginning is shared most often, and forgotten last
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def keep(self, replicas: set[str]) -> None:
        """Forget what all other replicas have."""
        if replicas == self._replicas:
            return
        self._replicas = set(replicas)
        for key, holders in list(self._holders.items()):
            holders &= replicas
            if not holders:
                del self._holders[key]

    def _least_busy(self, names: set[str], running: Mapping[str, int]) -> str:
        least = min(running[name] for name in names)
        # one of several at random, or all new prompts of an idle minute go to one replica
        return self._random.choice(sorted(name for name in names if running[name] == least))
