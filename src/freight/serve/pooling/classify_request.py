"""`POST /classify` and `POST /pooling`, of vLLM: PooledCalls."""

from __future__ import annotations

from freight.base.fields import JsonObject
from freight.pooling import PoolingParams, PoolingTask
from freight.serve.bodies import field_row
from freight.serve.call import Served
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import refuse
from freight.serve.pooling.call import PooledCall, Shape
from freight.serve.pooling.classify_reply import Classes, Vectors
from freight.serve.pooling.embedding_request import VectorFields
from freight.serve.pooling.inputs import (
    ConversationFields,
    InputFields,
    RequestFields,
    parse_inputs,
)
from freight.serve.pooling.tasks import require_pooling
from freight.serve.pooling.unread import ACTIVATIONS, CHAT, UNREAD, VECTORS

_TASKS = tuple(map(str, PoolingTask))


class ClassFields(RequestFields):
    """Fields that say what the numbers of classes are like."""

    use_activation: bool | None = None

    def pooling(self) -> PoolingParams:
        return PoolingParams(task=PoolingTask.CLASSIFY, use_activation=self.use_activation)

    def shape(self, served: Served) -> Shape:
        assert served.pooling is not None
        return Classes(served.pooling.labels)


class ClassifyRequest(ClassFields, InputFields):
    """The body of /classify with inputs."""

    unread = {**UNREAD, **ACTIVATIONS}  # noqa: RUF012, a ClassVar annotation is on the base class


class ClassifyChatRequest(ClassFields, ConversationFields):
    """The body of /classify with a conversation."""

    unread = {**UNREAD, **ACTIVATIONS, **CHAT}  # noqa: RUF012


class PoolingFields(VectorFields):
    """Fields of /pooling. `task` is filled in by the parser where the body has none."""

    task: str | None = field_row(enum=[*_TASKS, None])

    def pooling(self) -> PoolingParams:
        if self.task == PoolingTask.EMBED:
            return super().pooling()
        for name in ("dimensions", "normalize"):
            if getattr(self, name) is not None:
                raise refuse(name, f"{name} is for embeddings, and this model gives classes")
        return PoolingParams(task=PoolingTask.CLASSIFY, use_activation=self.use_activation)

    def shape(self, served: Served) -> Shape:
        return Vectors(self.is_base64)


class PoolingRequest(PoolingFields, InputFields):
    """The body of /pooling with inputs."""

    unread = {**UNREAD, **VECTORS, **ACTIVATIONS}  # noqa: RUF012


class PoolingChatRequest(PoolingFields, ConversationFields):
    """The body of /pooling with a conversation."""

    unread = {**UNREAD, **VECTORS, **ACTIVATIONS, **CHAT}  # noqa: RUF012


ClassifyBody = ClassifyRequest | ClassifyChatRequest
PoolingBody = PoolingRequest | PoolingChatRequest


def parse_classify(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call. Raises ApiError, 400 or 404."""
    require_pooling(served, PoolingTask.CLASSIFY)
    return parse_inputs(body, ClassifyRequest, ClassifyChatRequest, served, limits)


def parse_pooling(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call. Raises ApiError, 400 or 404."""
    pooling = require_pooling(served)
    task = body.get("task")
    if task not in (None, *_TASKS):
        raise refuse(
            "task",
            f"task is {task!r:.60}; it must be embed or classify: one vector comes of a prompt, and "
            "none of each token",
        )
    if task not in (None, str(pooling.task)):
        raise refuse(
            "task", f"task is {task!r}, and this model does {str(pooling.task)!r}; leave it out"
        )
    task = str(pooling.task)
    return parse_inputs({**body, "task": task}, PoolingRequest, PoolingChatRequest, served, limits)
