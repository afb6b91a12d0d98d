"""What the served model gives, and the error that names the way to it for a request of another kind."""

from __future__ import annotations

from freight.base.fields import JsonDict
from freight.model.config.pooling import PoolingConfig
from freight.pooling import PoolingTask
from freight.serve.call import Served
from freight.serve.transport.errors import ApiError

UNSUPPORTED = "unsupported_task"  # code of the error
_PAIR_SCORES = "scores of two texts"


def tasks_of(served: Served) -> list[str]:
    """Return what may be asked of the model: generate, embed, classify, score."""
    tasks = ["generate"] if served.generates else []
    if served.pooling is not None:
        tasks.append(str(served.pooling.task))
        if served.pooling.task is PoolingTask.EMBED or served.pooling.pairs:
            tasks.append("score")
    return tasks


def require_generating(served: Served) -> None:
    """Raise ApiError, 400, unless the model writes text."""
    if not served.generates:
        raise _unsupported(served, "text")


def require_pooling(served: Served, task: PoolingTask | None = None) -> PoolingConfig:
    """Return how the model pools. Raises ApiError, 400, unless it does what is asked; None: any
    pooling.
    """
    pooling = served.pooling
    if pooling is None or task not in (None, pooling.task):
        raise _unsupported(served, _RESULTS[task])
    return pooling


def require_scores(served: Served) -> PoolingConfig:
    """Return how the model pools, if scores of two texts can be made of it: of their embeddings, or
    of the pair. Raises ApiError, 400.
    """
    pooling = served.pooling
    if pooling is None or not (pooling.task is PoolingTask.EMBED or pooling.pairs):
        raise _unsupported(served, _PAIR_SCORES)
    return pooling


def info_of(pooling: PoolingConfig | None) -> JsonDict | None:
    """Return what `/info` says of pooling."""
    if pooling is None:
        return None
    return {
        "task": str(pooling.task),
        "kind": str(pooling.kind),
        "size": pooling.size,
        "dimensions": list(pooling.dimensions),
        "normalize": pooling.normalize,
        "prompts": list(pooling.prompts),
        "default_prompt": pooling.default_prompt,
        "labels": list(pooling.labels),
        "pairs": pooling.pairs,
    }


_RESULTS = {
    PoolingTask.EMBED: "embeddings",
    PoolingTask.CLASSIFY: "classes",
    None: "embeddings or classes",
}


def _unsupported(served: Served, asked: str) -> ApiError:
    gives, endpoints = _offer(served)
    return ApiError(
        400,
        f"the model {served.names[0]!r:.100} gives {gives}, and no {asked}; use {endpoints}",
        code=UNSUPPORTED,
    )


def _offer(served: Served) -> tuple[str, str]:
    """Return what the model gives, and the endpoints for it."""
    pooling = served.pooling
    if pooling is None:
        return (
            "text",
            "/v1/chat/completions or /v1/completions, or start the server with a model that pools, "
            "or with --pooling",
        )
    if pooling.task is PoolingTask.EMBED:
        offer = "embeddings", "/v1/embeddings, /score or /rerank"
    elif pooling.pairs:
        offer = _PAIR_SCORES, "/rerank, /score or /classify"
    else:
        offer = "scores of classes", "/classify"
    if served.generates:
        return f"text and {offer[0]}", f"/v1/chat/completions, /v1/completions, {offer[1]}"
    return offer
