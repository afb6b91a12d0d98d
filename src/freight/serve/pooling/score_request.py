"""`POST /score`, of vLLM: a PooledCall. Each of its pairs of names means the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from freight.base.fields import JsonObject
from freight.serve.bodies import MOST, field_row, says
from freight.serve.call import Served
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import refuse
from freight.serve.pooling.call import PooledCall
from freight.serve.pooling.fields import PooledFields, read_asked
from freight.serve.pooling.pairing import PairOptions, Side, paired
from freight.serve.pooling.rerank_reply import Scores
from freight.serve.pooling.tasks import require_scores
from freight.serve.pooling.unread import ACTIVATIONS, UNREAD

Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=MOST.inputs)],
    says(f"must be a string, or a list of 1 to {MOST.inputs} strings"),
]


class _ScoreFields(PooledFields):
    """The fields beside the texts."""

    unread = {**UNREAD, **ACTIVATIONS}  # noqa: RUF012

    use_activation: bool | None = None
    instruction: str | None = field_row(note="(of a model that reads one)")


class ScoreRequest(_ScoreFields):
    """The body with vLLM's first names."""

    text_1: Texts
    text_2: Texts


class ScoreDataRequest(_ScoreFields):
    """With other names."""

    data_1: Texts
    data_2: Texts


class ScoreDocumentsRequest(_ScoreFields):
    """With the names of a search."""

    queries: Texts
    documents: Texts


class ScoreItemsRequest(_ScoreFields):
    """With the names of a recommendation."""

    queries: Texts
    items: Texts


ScoreBody = ScoreRequest | ScoreDataRequest | ScoreDocumentsRequest | ScoreItemsRequest
_KINDS: Mapping[tuple[str, str], type[ScoreBody]] = {
    ("text_1", "text_2"): ScoreRequest,
    ("data_1", "data_2"): ScoreDataRequest,
    ("queries", "documents"): ScoreDocumentsRequest,
    ("queries", "items"): ScoreItemsRequest,
}


def parse_score(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call. Raises ApiError, 400 or 404."""
    require_scores(served)
    names = _names(body)
    asked = read_asked(body, _KINDS[names], served, limits)
    request = asked.body
    queries, documents = (_side(name, getattr(request, name)) for name in names)
    options = PairOptions(request.use_activation, request.instruction)
    work, pairs = paired(queries, documents, request, options, served, limits)
    return PooledCall(
        asked.model,
        work,
        asked.ignored,
        Scores(pairs),
        request_id=request.request_id,
    )


def _names(body: JsonObject) -> tuple[str, str]:
    """Return the names of the texts."""
    for names in _KINDS:
        if all(body.get(name) is not None for name in names):
            return names
    for names in _KINDS:
        given = [name for name in names if body.get(name) is not None]
        if given:
            return names
    raise refuse("text_1", "text_1 is missing; give text_1 and text_2, or queries and documents")


def _side(field: str, texts: str | list[str]) -> Side:
    if isinstance(texts, str):
        return Side(field, [texts], one=True)
    return Side(field, texts)
