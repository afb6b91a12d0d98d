"""Pooler: from the pooled state of a prompt to the numbers that are returned.

All of it is computed in float32, on the CPU, one prompt at a time: a prompt's numbers have the same
bits whatever was computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.model.config.pooling import PoolingActivation, PoolingConfig
from freight.pooling import PoolingParams, PoolingTask

_FUNCTIONS: Mapping[PoolingActivation, Callable[[Tensor], Tensor]] = {
    PoolingActivation.IDENTITY: lambda x: x,
    PoolingActivation.TANH: torch.tanh,
    PoolingActivation.GELU: torch.nn.functional.gelu,
    PoolingActivation.RELU: torch.relu,
    PoolingActivation.SIGMOID: torch.sigmoid,
    PoolingActivation.SOFTMAX: lambda x: torch.softmax(x, -1),
}


@dataclass(frozen=True)
class LoadedLayer:
    """A `PoolingLayer` with its tensors: weight [outputs, inputs], bias [outputs], float32; and the
    weight of the norm [outputs].
    """

    weight: Tensor
    bias: Tensor | None
    activation: PoolingActivation
    norm: Tensor | None
    norm_eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [inputs] float32; returns [outputs]."""
        # a sum over a row's products: a matrix product of torch depends on its threads
        y = (self.weight * x).sum(-1)
        if self.bias is not None:
            y = y + self.bias
        y = _FUNCTIONS[self.activation](y)
        if self.norm is not None:
            y = torch.nn.functional.layer_norm(y, y.shape, self.norm, None, self.norm_eps)
        return y


@dataclass(frozen=True)
class Pooler:
    """What a model does with a pooled state."""

    config: PoolingConfig
    layers: tuple[LoadedLayer, ...] = ()

    def finish(self, state: Tensor, params: PoolingParams) -> Tensor:
        """Return the numbers of a prompt, float32 on the CPU.

        state: [hidden_size], the pooled state; or with `PoolingConfig.token_ids` the logits of these
        tokens.
        """
        x = state.to("cpu", torch.float32)
        for layer in self.layers:
            x = layer(x)
        if self.config.task is PoolingTask.EMBED:
            return self._embedding(x, params)
        if len(self.config.token_ids) == 2:
            x = x[:1] - x[1:]
        if params.use_activation is False:
            return x
        return _FUNCTIONS[self.config.activation](x)

    def _embedding(self, x: Tensor, params: PoolingParams) -> Tensor:
        x = x[: params.dimensions]
        normalize = params.normalize
        if normalize is None:
            normalize = self.config.normalize
        if not normalize:
            return x
        # as torch.nn.functional.normalize, which sentence-transformers calls
        length: Tensor = torch.linalg.vector_norm(x)
        return x / length.clamp_min(1e-12)
