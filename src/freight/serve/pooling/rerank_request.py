"""`POST /rerank`, of Cohere, Jina and vLLM, and of TEI, which has the same path: a PooledCall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import ConfigDict, Field

from freight.base.fields import JsonObject
from freight.sampling import LARGEST_WHOLE
from freight.serve.bodies import MOST, Part, field_row, says
from freight.serve.call import Served
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import refuse
from freight.serve.pooling.call import PooledCall
from freight.serve.pooling.fields import PooledFields, read_asked
from freight.serve.pooling.pairing import PairOptions, Side, paired
from freight.serve.pooling.rerank_reply import Ranking
from freight.serve.pooling.tasks import require_scores
from freight.serve.pooling.tei_request import TeiRerankBody, parse_tei_rerank
from freight.serve.pooling.unread import ACTIVATIONS, RANKING, UNREAD


class Document(Part):
    """A document that is an object."""

    model_config = ConfigDict(extra="forbid")

    text: str


_Document = Annotated[str | Document, says("must be a string, or an object with text alone")]
Documents = Annotated[list[_Document], Field(min_length=1, max_length=MOST.inputs)]
_Count = Annotated[int, Field(ge=0, le=LARGEST_WHOLE)]


class RerankRequest(PooledFields):
    """The body of Cohere, Jina and vLLM."""

    unread = {**UNREAD, **ACTIVATIONS, **RANKING}  # noqa: RUF012

    query: str
    documents: Documents
    top_n: _Count | None = field_row(note="(0: all)")
    return_documents: bool | None = None
    max_tokens_per_doc: _Count | None = field_row(note="(0: all)")
    use_activation: bool | None = None
    instruction: str | None = field_row(note="(of a model that reads one)")


RerankBody = RerankRequest | TeiRerankBody


def parse_rerank(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call. Raises ApiError, 400 or 404."""
    require_scores(served)
    asked = read_asked(body, RerankRequest, served, limits)
    request = asked.body
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    options = PairOptions(
        request.use_activation, request.instruction, request.max_tokens_per_doc or None
    )
    work, pairs = paired(
        Side("query", [request.query], one=True),
        Side("documents", documents),
        request,
        options,
        served,
        limits,
    )
    returned: Sequence[str] | None = documents
    if request.return_documents is False:
        returned = None
    ranking = Ranking(pairs, returned, request.top_n or None)
    return PooledCall(asked.model, work, asked.ignored, ranking, request_id=request.request_id)


def parse_any_rerank(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call of a body of either form: TEI's has `texts`. Raises ApiError, 400 or 404."""
    if body.get("texts") is None:
        return parse_rerank(body, served, limits)
    if body.get("documents") is not None:
        raise refuse("texts", "texts are TEI's and documents Cohere's; give one of them")
    return parse_tei_rerank(body, served, limits)
