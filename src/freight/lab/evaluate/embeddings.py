"""What weights in fewer bits change in embeddings: cosines to those of 16 bits, and nearest neighbours.

Every text of a file is embedded once with the model's own weights, and once in each format. Of a
text i with the embedding x_i, and y_i in a format:

    cosine    of x_i and y_i: mean, 5th percentile and least over the texts
    overlap   of its k nearest other texts by cosine (k = 10, or all others) the share that both have
    spearman  Spearman's rank correlation (1904) of its cosines to all other texts, equal ones with
              their mean rank
    top 1     the share of texts whose nearest other text is the same

The last three are means over the texts. The settings run one after the other, so that one model is
in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freight.base.terminal import OnProgress, unseen
from freight.errors import ConfigError, choices
from freight.lab.columns import Columns, text_rows
from freight.llm import LLM
from freight.model.open import open_model
from freight.pooling import PoolingParams
from freight.settings.engine import EngineArgs

FORMATS = ("fp8", "int8", "int4")
_NEAREST = 10
_ROWS = 256  # of the similarities that are held at a time
COLUMNS: Columns = {
    "weights": "{0.weights}",
    "cosine": "{0.cosine:.5f}",
    "5th percentile": "{0.cosine_p5:.5f}",
    "least": "{0.cosine_min:.5f}",
    "overlap": "{0.overlap:.4f}",
    "Spearman": "{0.spearman:.4f}",
    "same top 1": "{0.same_top:.4f}",
}


@dataclass(frozen=True)
class EmbeddingScore:
    """One format against 16 bits. weights: its name, or the folder of a checkpoint; nearest: the k of
    `overlap`.
    """

    weights: str
    texts: int
    nearest: int
    cosine: float
    cosine_p5: float
    cosine_min: float
    overlap: float
    spearman: float
    same_top: float


def compare_embeddings(
    args: EngineArgs,
    texts: Sequence[str],
    weights: Sequence[str],
    prompt_name: str | None = None,
    dimensions: int | None = None,
    on_progress: OnProgress = unseen,
) -> list[EmbeddingScore]:
    """Compare the embeddings of `texts` in each of `weights`, FORMATS or folders of checkpoints of the
    same model (with a `/`), with those of the model itself.

    `on_progress(done, total)` counts the models. Raises ConfigError for fewer than three texts,
    for an unknown format, and for a model that is given with one; RequestError for one that gives no
    embeddings.
    """
    if len(texts) < 3:
        raise ConfigError(
            f"there are {len(texts)} texts, and neighbours are compared among 3 or more; give a longer --data FILE"
        )
    settings = [(name, _setting(args, name)) for name in weights]
    for _, setting in settings:  # before the first model is run
        open_model(setting)
    params = PoolingParams(dimensions=dimensions)
    on_progress(0, len(settings) + 1)
    reference = _embeddings(args, texts, params, prompt_name)
    scores = []
    for index, (name, setting) in enumerate(settings):
        on_progress(index + 1, len(settings) + 1)
        other = _embeddings(setting, texts, params, prompt_name)
        if other.shape != reference.shape:
            raise ConfigError(
                f"--weights {name}: its embeddings have {other.shape[1]} numbers, and those of the model "
                f"{reference.shape[1]}; name a checkpoint of the same model"
            )
        scores.append(compare(name, reference, other))
    on_progress(len(settings) + 1, len(settings) + 1)
    return scores


def _setting(args: EngineArgs, name: str) -> EngineArgs:
    if args.quantization is not None:
        raise ConfigError(
            f"--quantization {args.quantization}: embeddings are compared with those of the stored weights; omit it"
        )
    if "/" in name:
        return replace(args, model=name)
    if name not in FORMATS:
        raise ConfigError(
            f"--weights {name}: choose {choices(FORMATS)}, or a checkpoint's folder with a /"
        )
    return replace(args, quantization=name)


def _embeddings(
    args: EngineArgs, texts: Sequence[str], params: PoolingParams, prompt_name: str | None
) -> Tensor:
    """Return the embeddings, divided by their lengths: float32 [texts, size]."""
    llm = LLM(**vars(args))
    outputs = llm.embed(list(texts), pooling_params=params, prompt_name=prompt_name)
    rows = torch.tensor(
        [output.outputs.embedding for output in outputs], dtype=torch.float32, device="cpu"
    )
    return torch.nn.functional.normalize(rows, dim=-1)


def compare(name: str, reference: Tensor, other: Tensor) -> EmbeddingScore:
    """Compare two embeddings of each text. reference, other: [texts, size], of length 1."""
    count = len(reference)
    nearest = min(_NEAREST, count - 1)
    cosines = (reference.double() * other.double()).sum(-1)
    shared, ranks, same = [], [], []
    for begin in range(0, count, _ROWS):
        left = _others(reference, begin)
        right = _others(other, begin)
        first = left.topk(nearest, -1).indices
        second = right.topk(nearest, -1).indices
        shared.append((first[:, :, None] == second[:, None, :]).any(-1).double().mean(-1))
        same.append((first[:, 0] == second[:, 0]).double())
        ranks.append(_correlation(_ranks(left), _ranks(right)))
    return EmbeddingScore(
        weights=name,
        texts=count,
        nearest=nearest,
        cosine=float(cosines.mean()),
        cosine_p5=float(cosines.quantile(0.05)),
        cosine_min=float(cosines.min()),
        overlap=float(torch.cat(shared).mean()),
        spearman=float(torch.cat(ranks).mean()),
        same_top=float(torch.cat(same).mean()),
    )


def _others(rows: Tensor, begin: int) -> Tensor:
    """Return the cosines of texts from `begin` on, _ROWS at most, to all other texts: [rows, texts -
    1].
    """
    part = rows[begin : begin + _ROWS]
    cosines = part @ rows.T
    count = len(rows)
    numbers = torch.arange(count, dtype=torch.int64, device="cpu")
    is_other = numbers[None, :] != numbers[begin : begin + len(part), None]
    return cosines[is_other].view(len(part), count - 1)


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each value in its row, from 0; equal ones have their mean rank."""
    ordered = values.sort(-1).values.contiguous()
    below = torch.searchsorted(ordered, values.contiguous())
    upto = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (below + upto - 1).double() / 2


def _correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return the correlation of each row; 1 where neither row varies, 0 where one does not."""
    left = left - left.mean(-1, keepdim=True)
    right = right - right.mean(-1, keepdim=True)
    product = left.norm(dim=-1) * right.norm(dim=-1)
    same = (left == right).all(-1).double()
    return torch.where(product > 0, (left * right).sum(-1) / product.clamp_min(1e-300), same)


def as_rows(scores: Sequence[EmbeddingScore]) -> list[list[str]]:
    """Return rows for a table; the first has the headings."""
    return text_rows(COLUMNS, scores)
