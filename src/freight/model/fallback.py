"""Models without a row in Freight: transformers' modules over Freight's cache and FP8 weights.

transformers' modules compute everything except attention and the matrices in FP8. An attention
function that is registered with transformers stores each layer's keys, rotated already, and values,
and attends over the pages. Before the model is used, its logits of a few tokens are compared with
those of transformers' eager attention on the same modules.

Not guaranteed here: that a row has the same bits in every batch. torch's matrix products choose
their order of summation by the number of rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from freight.base.fields import JsonObject
from freight.cache.pool import LayerCache, PagedKV
from freight.checkpoint.linears import find_linears
from freight.checkpoint.reader import Checkpoint
from freight.errors import CheckpointError, ConfigError
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.scheme import Scheme
from freight.fp8.weights import fit_rows
from freight.kernels.interface import KernelSet
from freight.model.config.model import ModelConfig
from freight.model.fallback_check import self_check
from freight.model.fallback_probe import (
    attention,
    body_of,
    causal_class,
    hf_config,
    plain_linears,
    run_body,
)
from freight.model.fallback_words import refused
from freight.model.held_tensors import held_tensors
from freight.model.layers.linear import Linear
from freight.operands.attention import AttentionCall
from freight.operands.batch import ForwardBatch
from freight.operands.packed import as_tensor
from freight.operands.rotary import Rotary
from freight.operands.weight import Activations, Weight
from freight.parallel.stages import Stage

ATTENTION = "freight"


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: attention over the cache needs none."""


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


@dataclass
class _Step:
    """One forward pass, as each layer's attention sees it. `calls` counts the layers that attended."""

    model: TransformersModel
    batch: ForwardBatch
    kv_cache: Sequence[LayerCache]
    calls: int = field(default=0)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        given: JsonObject,
    ) -> tuple[Tensor, None]:
        """Store and attend. q, k, v: [1, heads, num_tokens, dim], rotated; returns [1, num_tokens,
        num_heads, v_dim].
        """
        index = self.model.layer_of[id(module)]
        kv = self.kv_cache[index]
        assert isinstance(kv, PagedKV)
        qkv = torch.cat([x[0].transpose(0, 1).flatten(1).to(v.dtype) for x in (q, k, v)], 1)
        stored = kv.store(qkv, self.model.rotaries[index], self.batch)
        self.calls += 1
        attended = kv.attend(stored, self.batch, self.model.attention_calls[index])
        return as_tensor(attended)[None], None


class _States(MoeModelOutputWithPast):
    """The output of a body with the final states alone: any other field that a model's head reads
    is None.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):
    """A stand-in for the body where only the head is computed: it returns its input as final
    states.
    """

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _States:
        return _States(last_hidden_state=inputs_embeds)


class FreightLinear(nn.Module):
    """A torch module that computes with Freight's `Linear`, in the dtype of its input."""

    def __init__(self, linear: Linear, weight: Weight) -> None:
        super().__init__()
        self.linear = linear
        self.out_features, self.in_features = weight.data.shape

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., inputs] times the matrix, [..., outputs]."""
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class FreightHead(nn.Module):
    """A head whose logits are float32, as those of `LogitsHead`: what transformers computes of them
    is then in float32, too. `weight` has the shape and dtype that other modules may read, and no
    values.
    """

    def __init__(self, head: nn.Linear, kernels: KernelSet) -> None:
        super().__init__()
        self.packed = kernels.pack(Weight(head.weight.detach()))
        self.bias = head.bias
        self.kernels = kernels
        self.weight = head.weight.detach().to("meta")

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., hidden_size] times the matrix, float32 [..., vocab_size]."""
        rows = x.reshape(-1, x.shape[-1])
        logits = self.kernels.linear(rows, self.packed, self.bias, float32=True)
        return logits.view(*x.shape[:-1], -1)


@dataclass(frozen=True)
class TransformersModel:
    """A causal LM of transformers, with what the engine needs of `Decoder`."""

    config: ModelConfig
    causal: PreTrainedModel
    kernels: KernelSet
    rotaries: tuple[Rotary, ...]
    pooler: None = None
    stages: tuple[Stage, ...] = ()

    @cached_property
    def layer_of(self) -> dict[int, int]:
        """The layer of each attention module, by the module's id()."""
        assert self.config.foreign is not None
        return {
            id(self.causal.get_submodule(name)): i
            for i, name in enumerate(self.config.foreign.attention)
        }

    @cached_property
    def attention_calls(self) -> dict[int, AttentionCall]:
        """The parameters of attention, by layer."""
        return {
            index: AttentionCall(mixer.softmax_scale, mixer.window, mixer.soft_cap)
            for index, mixer in self.config.attention.items()
        }

    @cached_property
    def _head(self) -> nn.Module:
        """A copy of the model that shares its modules, with the body replaced."""
        head = copy.copy(self.causal)
        head._modules = {**self.causal._modules, body_of(self.causal)[0]: _Given()}
        return head

    def forward(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        """Run one step and return its logits, as `Decoder.forward` does."""
        return self.logits(self.hidden(batch, kv_cache))

    def hidden(self, batch: ForwardBatch, kv_cache: Sequence[LayerCache]) -> Tensor:
        """Run one step and return its final states, as `Decoder.hidden` does."""
        step = _Step(self, batch, kv_cache)
        states = run_body(body_of(self.causal)[1], batch.token_ids, batch.positions, step)
        if step.calls != self.config.num_layers:
            raise CheckpointError(
                f"{step.calls} of {self.config.num_layers} layers attended over the cache"
            )
        if len(batch.logit_rows) < len(states):
            return states[batch.logit_rows]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of final states, as `Decoder.logits` does. A head of a class of its own
        is transformers' and may round them.
        """
        logits: Tensor = cast(Any, self._head)(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def eager_logits(self, token_ids: Tensor) -> Tensor:
        """Return the logits of transformers' eager attention for one sequence: float32 [num_tokens,
        vocab_size].
        """
        self.causal.set_attn_implementation("eager")
        try:
            logits: Tensor = self.causal(input_ids=token_ids[None], use_cache=False).logits
        finally:
            self.causal.set_attn_implementation(ATTENTION)
        return logits[0].float()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of (everything else, embedding and head), each tensor counted once."""
        head = self.causal.get_output_embeddings()
        outer = {
            p.data_ptr(): p.nbytes
            for m in (self.causal.get_input_embeddings(), head)
            for p in m.parameters()
        }
        inner = sum(p.nbytes for p in self.causal.parameters() if p.data_ptr() not in outer)
        if isinstance(head, FreightHead):
            outer |= held_tensors(head.packed)
        packed = tuple(
            module.linear for module in self.causal.modules() if isinstance(module, FreightLinear)
        )
        return inner + sum(held_tensors(packed).values()), sum(outer.values())


def load_foreign(
    checkpoint: Checkpoint,
    config: ModelConfig,
    kernels: KernelSet,
    compute_format: Format,
    weight_format: Format,
    max_len: int,
    device: str,
    scheme: Scheme,
) -> TransformersModel:
    """Load a model as `load_model` does, through transformers' loading. Routers and experts that
    are not Linear modules stay in 16 or 32 bits.

    Raises CheckpointError where tensors and modules do not fit, and where the model does not pass
    its check; ConfigError where FP8 is asked for and no matrix can be rounded to it.
    """
    assert config.foreign is not None
    free = frozenset((config.foreign.embedding, config.foreign.head))
    stored = find_linears(checkpoint, scheme, dict(config.foreign.tensors), free)
    _refuse_other_fp8(checkpoint, frozenset(linear.weight for linear in stored.values()))
    causal = _load_modules(checkpoint, compute_format, device)
    _keep_logits_in_float32(causal, kernels)
    empty = torch.empty(max_len, 0, dtype=torch.float32, device=device)
    model = TransformersModel(config, causal, kernels, (Rotary(empty, empty),) * config.num_layers)
    if not stored:
        self_check(model, compute_format, fp8=False, device=device)
    linears = {
        f"{name}.weight": cast(nn.Linear, causal.get_submodule(name))
        for name in plain_linears(causal)
    }
    unmatched = sorted(set(stored) - set(linears))
    if unmatched:
        raise refused(
            config.model_type, f"{unmatched[0]} is stored in FP8, and its module is no Linear"
        )
    rounds = weight_format.is_fp8 and scheme.weight_format is None
    rounded = config.foreign.rounded if rounds else ()
    if rounds and not rounded:
        raise ConfigError(
            f"quantization = 'fp8' rounds Linear modules, and {type(causal).__name__} of transformers has none that "
            "can be rounded; omit it"
        )
    for name, module in linears.items():
        if name in stored:
            weight = stored[name].read(checkpoint, compute_format, weight_format, device)
            _replace(causal, name, weight, kernels)
        elif name in rounded:
            data, scale = fit_rows(module.weight, weight_format)
            _replace(causal, name, Weight(data, scale, Activations.DYNAMIC), kernels)
    if stored or rounds:
        self_check(model, compute_format, fp8=True, device=device)
    return model


def _keep_logits_in_float32(causal: PreTrainedModel, kernels: KernelSet) -> None:
    """Put a `FreightHead` in the place of the head, unless that is of a class of its own, which
    computes something else.
    """
    head = causal.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    names = {id(module): name for name, module in causal.named_modules()}
    causal.set_submodule(names[id(head)], FreightHead(head, kernels))


def _replace(causal: PreTrainedModel, name: str, weight: Weight, kernels: KernelSet) -> None:
    """Put a Freight Linear in the place of the torch one called `name`."""
    path = name.removesuffix(".weight")
    bias = cast(nn.Linear, causal.get_submodule(path)).bias
    linear = Linear(kernels.pack(weight), bias, kernels, weight.input_limit)
    causal.set_submodule(path, FreightLinear(linear, weight))


def _refuse_other_fp8(checkpoint: Checkpoint, known: frozenset[str]) -> None:
    """Raise CheckpointError for an FP8 tensor that is not the weight of a Linear in `known`."""
    for name in sorted(checkpoint.names - known):
        if checkpoint.entry(name).dtype.startswith("F8_E") and not checkpoint.entry(
            name
        ).dtype.endswith("M0"):
            raise checkpoint.fault(
                f"{name} is stored in FP8, and no Linear of transformers' modules has that name; "
                "use the model in 16 bits"
            )


def _load_modules(checkpoint: Checkpoint, compute_format: Format, device: str) -> PreTrainedModel:
    """Load transformers' modules. Raises CheckpointError for what it cannot load, and for tensors
    that do not fit.
    """
    hf = hf_config(checkpoint.config)
    cls = causal_class(hf)
    try:
        causal, info = cast(Any, cls).from_pretrained(
            checkpoint.path,
            config=hf,
            dtype=torch_dtype(compute_format),
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers' loading raises what it likes
        raise refused(hf.model_type, f"its loading fails: {str(error).splitlines()[0]}") from error
    faults = [*info["missing_keys"], *info["mismatched_keys"]]
    if faults:
        raise checkpoint.fault(
            f"{len(faults)} tensors are missing or misshapen: {sorted(map(str, faults))[0]}"
        )
    checkpoint.finish(pending=checkpoint.names - frozenset(info["unexpected_keys"]))
    model: PreTrainedModel = causal.eval().requires_grad_(False).to(device)
    return model
