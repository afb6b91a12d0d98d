"""What guesses tokens for a model: a further model of the same vocabulary, or layers that take the
model's own states.

A row stands for a known token. A further model takes that token. A head that takes states, `features`
of a row, takes the token behind it as well: layers for multi-token prediction (DeepSeek-V3, section 2.2,
arXiv:2412.19437) and EAGLE-3 (arXiv:2503.01840). Either gives logits of the next token that is not known,
and the states from which the row behind it can be computed in its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from freight.cache.pool import LayerCache
from freight.model.mixers.spec import Mixer
from freight.operands.batch import ForwardBatch
from freight.operands.rotary import Rotary


class DraftHead(Protocol):
    """Layers with a cache of their own, over the block tables of the model that they guess for."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """What each of its layers keeps (`cache.spec.layer_spec`)."""
        ...

    @property
    def rotaries(self) -> tuple[Rotary | None, ...]:
        """As `LanguageModel.rotaries`."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...] | None:
        """Layers of the model whose output it takes, one after another in a row of features: the residual
        stream behind layer i. (): the final states, normed. None: it takes no features.
        """
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [tokens]: the id of each token that it gives a logit, rising; None: all of the model's, in
        their order.
        """
        ...

    @property
    def read(self) -> object:
        """The parts whose weights a pass reads."""
        ...

    def hidden(
        self,
        batch: ForwardBatch,
        features: Tensor | None,
        kv_cache: Sequence[LayerCache],
        depth: int = 0,
    ) -> Tensor:
        """Return states [num_logit_rows, hidden_size] of the rows with logits.

        batch       tokens that are embedded: those of the rows, or where it takes features those behind
                    them. Positions and slots are of the rows in either case
        features    [num_tokens, size] in the compute dtype: of the model's layers, or what this method
                    returned for these rows, one after another
        kv_cache    what each of its layers stores
        depth       0 where the features are the model's, else one more than where they were returned. A
                    head may have a layer for each depth, which stores what it takes at that depth alone
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens of `vocabulary`] of states [rows, hidden_size]."""
        ...
