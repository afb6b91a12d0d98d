"""PrefixRouter: how Ray Serve's handle chooses a replica, by `Prefixes`.

It runs beside each front, in the event loop of its handle. Ray counts the requests of each replica, and
tells the router of those that other fronts have sent at every answer to a probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from freight.adapters.ray.passing import Request
from freight.adapters.ray.prefixes import Prefixes

if TYPE_CHECKING:
    from ray.serve.request_router import ReplicaID, ReplicaResult


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Ray is not typed
    """The replica with the longest prefix, unless it is busier than the least busy by the slack."""

    def initialize_state(self, slack: int = 4, **_: object) -> None:
        self._prefixes = Prefixes(slack)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas: Ray goes on to the second one where those of the first have no
        room.
        """
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if not candidate_replicas:
            return []
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        counted = self.replica_queue_len_cache
        running = {name: counted.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        chosen = by_name.pop(self._prefixes.choose(_keys(pending_request), running))
        return [[chosen], list(by_name.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        self._prefixes.routed(_keys(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._prefixes.keep({replica.replica_id.unique_id for replica in replicas})


def _keys(pending: PendingRequest | None) -> list[bytes]:
    args = () if pending is None else pending.args
    return args[0].keys if args and isinstance(args[0], Request) else []
