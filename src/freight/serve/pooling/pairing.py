"""Pairs of texts as work: inputs of their own for a model that embeds, one for a model that scores
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freight.pooling import PoolingParams, PoolingTask
from freight.sampling import SamplingParams
from freight.serve.call import Pair, Served, Work
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import refuse
from freight.serve.openai.prompts import check_text
from freight.serve.pooling.fields import PooledFields, params_of, prompted
from freight.serve.pooling.rerank_reply import Pairs
from freight.serve.pooling.tasks import require_scores


@dataclass(frozen=True)
class Side:
    """One side of pairs: texts, and the field that has them. one: it is a single text, no list"""

    field: str
    texts: Sequence[str]
    one: bool = False

    def path(self, index: int) -> str:
        return self.field if self.one else f"{self.field}[{index}]"


@dataclass(frozen=True)
class PairOptions:
    """use_activation: as PoolingParams; instruction, document_tokens: as Pair"""

    use_activation: bool | None = None
    instruction: str | None = None
    document_tokens: int | None = None


def paired(
    queries: Side,
    documents: Side,
    body: PooledFields,
    options: PairOptions,
    served: Served,
    limits: ServingLimits,
) -> tuple[tuple[Work, ...], Pairs]:
    """Return the work for pairs of texts, and how their scores come of it: each query with the
    document at its place, or one query with all documents. Raises ApiError, 400.
    """
    pooling = require_scores(served)
    _check_sides(queries, documents, limits)
    if pooling.task is PoolingTask.EMBED:
        return _embedded(queries, documents, body, options, served, limits)
    asked = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=options.use_activation)
    params = params_of(body, asked, limits)
    works = []
    for index, document in enumerate(documents.texts):
        query = queries.texts[index if len(queries.texts) > 1 else 0]
        pair = Pair(query, document, options.instruction, options.document_tokens)
        works.append(Work(pair, params, prompt_from=documents.path(index)))
    return tuple(works), Pairs(None)


def _check_sides(queries: Side, documents: Side, limits: ServingLimits) -> None:
    for side in (queries, documents):
        count = len(side.texts)
        if not 1 <= count <= limits.inputs:
            raise refuse(
                side.field, f"{side.field} has {count} texts; 1 to {limits.inputs} are allowed"
            )
    if len(queries.texts) not in (1, len(documents.texts)):
        raise refuse(
            documents.field,
            f"{documents.field} has {len(documents.texts)} texts and {queries.field} {len(queries.texts)}; "
            "give one to be compared with all, or as many of both",
        )


def _embedded(
    queries: Side,
    documents: Side,
    body: PooledFields,
    options: PairOptions,
    served: Served,
    limits: ServingLimits,
) -> tuple[tuple[Work, ...], Pairs]:
    """Return each text as an input of its own: the score is the cosine of two embeddings."""
    for name in ("instruction", "use_activation"):
        if getattr(options, name) is not None:
            raise refuse(name, f"{name} is for models that score pairs; this one embeds texts")
    embedding = PoolingParams(normalize=True)
    params = params_of(body, embedding, limits)
    works = _texts(queries, params, served)
    kept = options.document_tokens
    if kept is not None:
        most = body.truncate_prompt_tokens
        kept = kept if most in (None, -1) else min(kept, most)
        params = params_of(body, embedding, limits, kept)
    works += _texts(documents, params, served)
    first = len(queries.texts)
    alone = first == 1
    return tuple(works), Pairs(
        [(0 if alone else index, first + index) for index in range(len(documents.texts))]
    )


def _texts(side: Side, params: SamplingParams, served: Served) -> list[Work]:
    pooling = served.pooling
    assert pooling is not None
    works = []
    for index, text in enumerate(prompted(side.texts, pooling, None)):
        path = side.path(index)
        if isinstance(text, str):
            check_text(path, text, True, served)
        works.append(Work(text, params, prompt_from=path))
    return works
