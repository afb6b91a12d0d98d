"""The API of Hugging Face's text-embeddings-inference (TEI): bodies become PooledCalls."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from freight.base.fields import JsonObject
from freight.errors import RequestError
from freight.pooling import PoolingParams, PoolingTask
from freight.sampling import SamplingParams
from freight.serve.bodies import MOST, Closed, Unread, field_row, says
from freight.serve.call import Pair, Served, Work
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import from_request_error, part, read_fields, refuse
from freight.serve.openai.prompts import check_text, read_prompts
from freight.serve.pooling.call import PooledCall
from freight.serve.pooling.fields import PooledFields, input_rules, params_of, prompted, works_of
from freight.serve.pooling.inputs import Inputs
from freight.serve.pooling.pairing import PairOptions, Side, paired
from freight.serve.pooling.rerank_reply import Ranking
from freight.serve.pooling.tasks import require_pooling, require_scores
from freight.serve.pooling.tei_reply import TeiClasses, TeiEmbeddings, TeiRanking
from freight.serve.tgi.reply import error_body

_DIRECTION = Unread(("Right", "right"), "the beginning of a text is kept; cut it yourself")


class TeiFields(Closed):
    """The fields that every body has."""

    unread = {"truncation_direction": _DIRECTION}  # noqa: RUF012

    truncate: bool | None = None


class EmbedBody(TeiFields):
    """The body of /embed."""

    inputs: Inputs
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: int | None = field_row(minimum=1)


class TeiRerankBody(TeiFields):
    """The body of /rerank."""

    query: str
    texts: Annotated[list[str], Field(min_length=1, max_length=MOST.inputs)]
    raw_scores: bool | None = None
    return_text: bool | None = None


class PredictBody(TeiFields):
    """The body of /predict: a text, a pair of them, or a list with lists of one or of two texts."""

    inputs: Annotated[
        str | list[str] | list[list[str]],
        says("must be a string, two of them, or a list with lists of one or two strings"),
    ]
    raw_scores: bool | None = None


def parse_embed(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call. Embeddings are normalized unless the body says otherwise. Raises ApiError."""
    pooling = require_pooling(served, PoolingTask.EMBED)
    fields = read_fields(body, EmbedBody, served, limits)
    asked = part(EmbedBody, "", fields.values)
    try:
        wanted = PoolingParams(dimensions=asked.dimensions, normalize=asked.normalize is not False)
    except RequestError as error:
        raise from_request_error(error) from None
    params = _params(asked, wanted, limits)
    rules = input_rules("inputs", served, limits.inputs, True, params.truncate_prompt_tokens)
    inputs = prompted(read_prompts(asked.inputs, rules, served), pooling, asked.prompt_name)
    work = works_of(inputs, "inputs", params)
    return PooledCall(served.names[0], work, fields.ignored, TeiEmbeddings(), error_body)


def parse_tei_rerank(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call; errors have the shape of the path, which is not TEI's alone. Raises ApiError."""
    require_scores(served)
    fields = read_fields(body, TeiRerankBody, served, limits)
    asked = part(TeiRerankBody, "", fields.values)
    work, pairs = paired(
        Side("query", [asked.query], one=True),
        Side("texts", asked.texts),
        _cut(asked),
        PairOptions(use_activation=False if asked.raw_scores else None),
        served,
        limits,
    )
    ranking = Ranking(pairs, asked.texts if asked.return_text else None)
    return PooledCall(served.names[0], work, fields.ignored, TeiRanking(ranking))


def parse_predict(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call. Raises ApiError."""
    pooling = require_pooling(served, PoolingTask.CLASSIFY)
    fields = read_fields(body, PredictBody, served, limits)
    asked = part(PredictBody, "", fields.values)
    wanted = PoolingParams(
        task=PoolingTask.CLASSIFY, use_activation=False if asked.raw_scores else None
    )
    params = _params(asked, wanted, limits)
    inputs = asked.inputs
    is_batch = not isinstance(inputs, str) and not all(isinstance(one, str) for one in inputs)
    entries: list[Any] = list(inputs) if is_batch else [inputs]
    if not 1 <= len(entries) <= limits.inputs:
        raise refuse(
            "inputs", f"inputs has {len(entries)} entries; 1 to {limits.inputs} are allowed"
        )
    work = tuple(
        _predicted(entry, f"inputs[{index}]" if is_batch else "inputs", params, served)
        for index, entry in enumerate(entries)
    )
    shape = TeiClasses(pooling.labels, is_batch)
    return PooledCall(served.names[0], work, fields.ignored, shape, error_body)


def parse_root(body: JsonObject, served: Served, limits: ServingLimits) -> PooledCall:
    """Build the call of TEI's `POST /`, which does what the model does. Raises ApiError."""
    if body.get("texts") is not None:
        return parse_tei_rerank(body, served, limits)
    if require_pooling(served).task is PoolingTask.EMBED:
        return parse_embed(body, served, limits)
    return parse_predict(body, served, limits)


def _predicted(entry: str | list[str], where: str, params: SamplingParams, served: Served) -> Work:
    texts = [entry] if isinstance(entry, str) else entry
    if len(texts) == 1:
        return Work(check_text(where, texts[0], True, served), params, prompt_from=where)
    pooling = served.pooling
    assert pooling is not None
    if len(texts) != 2 or not pooling.pairs:
        pair = ", or two: this model scores pairs" if pooling.pairs else ""
        raise refuse(where, f"{where} has {len(texts)} texts; give one{pair}")
    query, document = texts
    return Work(Pair(query, document), params, prompt_from=where)


def _params(asked: TeiFields, wanted: PoolingParams, limits: ServingLimits) -> SamplingParams:
    return params_of(_cut(asked), wanted, limits)


def _cut(asked: TeiFields) -> PooledFields:
    """Return the fields that other APIs have: whether inputs are cut."""
    return PooledFields(truncate_prompt_tokens=-1 if asked.truncate else None)
