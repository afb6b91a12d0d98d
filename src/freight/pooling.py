"""PoolingParams: what one request asks of a model that pools. Imports no torch.

A model pools if one vector comes of a prompt, and no text: an embedding, or scores of classes. Names
and defaults are those that vLLM's users know. A value that exists is valid; what the model must
have for it is checked by `engine/intake.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from freight.errors import RequestError, choices


class PoolingTask(StrEnum):
    """What comes of a prompt."""

    EMBED = "embed"  # a vector, for similarity
    CLASSIFY = "classify"  # a number for each class; with one class, the score of a pair


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Options of pooling. By keyword only.

    task            what the model is asked for: one that gives another is refused
    dimensions      embed: leading numbers of the vector that are kept, before it is normalized
                    (Matryoshka; Kusupati et al. 2022); None: all
    normalize       embed: whether the vector is divided by its length; None: as the model declares
    use_activation  classify: whether the model's activation is applied, sigmoid or softmax; None:
                    as the model declares; False: logits
    first_segment   tokens of the first text of a pair, with the special tokens around it: those
                    behind them have the second token type (BERT). None: the prompt is one text

    Raises RequestError for a value of the wrong type or outside its range.
    """

    task: PoolingTask = PoolingTask.EMBED
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    first_segment: int | None = None

    def __post_init__(self) -> None:
        if self.task not in set(PoolingTask):
            raise RequestError(f"task {self.task!r}: choose {choices(map(str, PoolingTask))}")
        object.__setattr__(self, "task", PoolingTask(self.task))
        for name in ("dimensions", "first_segment"):
            count = getattr(self, name)
            if count is None:
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise RequestError(f"{name} is {count!r}; give an integer, 1 or more")
        if self.dimensions is not None and self.task is not PoolingTask.EMBED:
            raise RequestError("dimensions is for embeddings; leave it out")
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}; give True or False, or leave it out")
