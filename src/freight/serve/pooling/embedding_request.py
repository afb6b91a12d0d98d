"""`POST /v1/embeddings`, of OpenAI and vLLM: a PooledCall."""

from __future__ import annotations

from typing import Literal

from freight.base.fields import JsonObject
from freight.errors import RequestError
from freight.pooling import PoolingParams, PoolingTask
from freight.serve.bodies import field_row
from freight.serve.call import Served
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import from_request_error
from freight.serve.pooling.call import PooledCall, Shape
from freight.serve.pooling.embedding_reply import Embeddings
from freight.serve.pooling.fields import activation_of
from freight.serve.pooling.inputs import (
    ConversationFields,
    InputFields,
    RequestFields,
    parse_inputs,
)
from freight.serve.pooling.tasks import require_pooling
from freight.serve.pooling.unread import CHAT, UNREAD, VECTORS


class VectorFields(RequestFields):
    """Fields that say what an embedding is like."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = field_row(minimum=1)
    normalize: bool | None = None
    use_activation: bool | None = field_row(note="(vLLM's newer name of `normalize`)")

    @property
    def is_base64(self) -> bool:
        return self.encoding_format == "base64"

    def pooling(self) -> PoolingParams:
        try:
            return PoolingParams(
                dimensions=self.dimensions,
                normalize=activation_of(self.normalize, self.use_activation),
            )
        except RequestError as error:
            raise from_request_error(error) from None

    def shape(self, served: Served) -> Shape:
        return Embeddings(self.is_base64)


class EmbeddingRequest(VectorFields, InputFields):
    """The body with inputs."""

    unread = {**UNREAD, **VECTORS}  # noqa: RUF012, a ClassVar annotation is on the base class


class EmbeddingChatRequest(VectorFields, ConversationFields):
    """The body with a conversation."""

    unread = {**UNREAD, **VECTORS, **CHAT}  # noqa: RUF012


EmbeddingBody = EmbeddingRequest | EmbeddingChatRequest


def parse_embeddings(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call. Raises ApiError, 400 or 404."""
    require_pooling(served, PoolingTask.EMBED)
    return parse_inputs(body, EmbeddingRequest, EmbeddingChatRequest, served, limits)
