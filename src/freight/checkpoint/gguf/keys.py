"""The metadata of a GGUF file about its model, read with types checked. Imports no torch.

A key that is read is remembered, so that the others can be refused or listed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from freight.base.fields import MOST_PARTS, is_integer, is_number, shortened
from freight.errors import CheckpointError
from freight.model.config.family import words

# shape of a tensor, outermost dimension first
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
# the values of a small float32 tensor, by its name
ReadValues: TypeAlias = Callable[[str], Sequence[float]]

# Keys of `ARCH.*` that llama.cpp's models read (src/llama-arch.cpp). One of these that is neither
# read nor switched off is refused, and so is an unknown key of attention, ropes, states or experts.
# Every other key is listed as not read.
COMPUTING = words(
    """
    vocab_size context_length embedding_length embedding_length_out embedding_length_per_layer_input features_length
    block_count leading_dense_block_count attn_res.block_size activation.situ_beta activation.situ_linear_beta
    feed_forward_length expert_feed_forward_length expert_shared_feed_forward_length expert_chunk_feed_forward_length
    swiglu_clamp_exp swiglu_clamp_shexp use_parallel_residual expert_count expert_used_count expert_shared_count
    expert_group_count expert_group_used_count expert_weights_scale expert_weights_norm expert_latent_length
    expert_gating_func expert_group_scale experts_per_group moe_every_n_layers moe_latent_size nextn_predict_layers
    n_deepstack_layers deepstack_mapping hidden_activation pooling_type logit_scale decoder_start_token_id
    decoder_block_count attn_logit_softcapping router_logit_softcapping final_logit_softcapping swin_norm
    rescale_every_n_layers time_mix_extra_dim time_decay_extra_dim residual_scale embedding_scale adapters.count
    token_shift_count interleave_moe_layer_step full_attention_interval num_loops skip_loop_final_norm
    attention.head_count attention.head_count_kv attention.max_alibi_bias attention.clamp_kqv attention.key_length
    attention.value_length attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.group_norm_epsilon
    attention.group_norm_groups attention.q_lora_rank attention.kv_lora_rank attention.decay_lora_rank
    attention.iclr_lora_rank attention.value_residual_mix_lora_rank attention.gate_lora_rank
    attention.relative_buckets_count attention.sliding_window attention.sliding_window_pattern attention.rope_pattern
    attention.scale attention.output_scale attention.value_scale attention.temperature_length
    attention.temperature_scale attention.key_length_mla attention.value_length_mla attention.key_length_swa
    attention.value_length_swa attention.key_length_mla_swa attention.value_length_mla_swa
    attention.kv_lora_rank_swa attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k
    attention.indexer.block_size attention.indexer.local_blocks attention.indexer.types attention.indexer.kpool
    attention.indexer.kpool_select_tail attention.output_group_count attention.output_lora_rank
    attention.compress_rope_freq_base attention.compress_ratios attention.shared_kv_layers
    attention.recurrent_layers hyper_connection.count ple.layers ple.ngram_size hash_layer_count
    rope.dimension_count rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa
    rope.scale_linear rope.scaling.type rope.scaling.factor rope.scaling.alpha rope.scaling.attn_factor
    rope.scaling.original_context_length rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow ssm.conv_kernel
    ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms kda.head_dim kda.safe_gate
    kda.gate_lower_bound wkv.head_size classifier.output_labels classifier.pooling_type shortconv.l_cache
    target_layers target_hidden_size norm_before_residual norm_before_fc block_size
    """
)
_PARTS = ("attention.", "rope.", "ssm.", "expert")
_HARMLESS = frozenset({"rope.scaling.finetuned"})  # whether the length was raised by training


class Keys:
    """The metadata of one file. `get` and the methods after it take names without `ARCH.`.

    shapes   shape of each tensor
    values   reads the values of a small tensor, for the divisors of rope frequencies
    """

    def __init__(
        self, architecture: str, metadata: Mapping[str, Any], shapes: Shapes, values: ReadValues
    ) -> None:
        self.architecture = architecture
        self.metadata = metadata
        self.shapes = shapes
        self.values = values
        self._read: set[str] = set()

    def full(self, name: str) -> str:
        """Return the name of a key as it is in the file."""
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Any:
        """Return the value of a key; None if it is absent."""
        self._read.add(self.full(name))
        return self.metadata.get(self.full(name))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer >= 0. Raises CheckpointError if the key is absent without a default."""
        value = self._required(name, default)
        if not is_integer(value) or value < 0:
            self.refuse(name, "an integer >= 0 is")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number. Raises CheckpointError if the key is absent without a default."""
        value = self._required(name, default)
        if not is_number(value) or not math.isfinite(value):
            self.refuse(name, "a finite number is")
        return shortest(value) if isinstance(value, float) else value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false is")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self._required(name, default)
        if not isinstance(value, str):
            self.refuse(name, "a string is")
        return value

    def by_layer(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """Return the integers >= 0 of all layers: those of a list, or one for all."""
        value = self._required(name, default)
        numbers = list(value) if isinstance(value, list) else [value] * layers
        if len(numbers) < layers or not all(
            isinstance(number, int) and number >= 0 for number in numbers
        ):
            self.refuse(name, f"an integer >= 0, or a list of one for each of {layers} layers, is")
        return [int(number) for number in numbers[:layers]]

    def same(self, name: str, layers: int, default: int | None = None) -> int:
        """Return the integer of all layers. Raises CheckpointError if they differ."""
        numbers = set(self.by_layer(name, layers, default))
        if len(numbers) > 1:
            self.refuse(name, "one number for all layers is")
        return numbers.pop()

    def flags(self, name: str, layers: int) -> list[bool] | None:
        """Return the flags of all layers; None if the key is absent or no list."""
        value = self.get(name)
        if not isinstance(value, list):
            return None
        return [bool(flag) for flag in self.by_layer(name, layers)]

    def require(self, name: str, allowed: Sequence[object], default: object) -> None:
        """Raise CheckpointError for a value that is not in `allowed`."""
        value = self.get(name)
        if (default if value is None else value) not in allowed:
            self.refuse(name, f"only {' or '.join(map(repr, allowed))} is")

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor."""
        return tensor in self.shapes

    def rows(self, tensor: str) -> int:
        """Return the rows of a matrix. Raises CheckpointError if there is none of that name."""
        shape = self.shapes.get(tensor, ())
        if len(shape) != 2:
            raise CheckpointError(f"GGUF: {tensor} of shape {list(shape)} is not a matrix")
        return shape[0]

    def layers_with(self, tensor: str, layers: int) -> list[bool]:
        """Return for each layer whether it has the tensor `blk.N.TENSOR`."""
        return [f"blk.{index}.{tensor}" in self.shapes for index in range(layers)]

    def unread(self) -> tuple[str, ...]:
        """Return the keys of the model that were not read. Raises CheckpointError for one that
        computes, and is not switched off.
        """
        prefix = f"{self.architecture}."
        others = [key for key in self.metadata if key.startswith(prefix) and key not in self._read]
        for key in others:
            value = self.metadata[key]
            if _computes(key.removeprefix(prefix)) and not _off(value):
                raise CheckpointError(
                    f"GGUF metadata: {key} = {shortened(value, 80)} decides what a model computes, and Freight does "
                    f"not implement it for {self.architecture}"
                )
        return tuple(others)

    def refuse(self, name: str, only: str) -> NoReturn:
        """Raise CheckpointError for the value of a key; `only` says what is implemented."""
        value = shortened(self.metadata.get(self.full(name)), 80)
        raise CheckpointError(
            f"GGUF metadata: {self.full(name)} = {value} is not implemented; {only}"
        )

    def _required(self, name: str, default: object) -> Any:
        value = self.get(name)
        if value is None and default is None:
            raise CheckpointError(f"GGUF metadata lacks {self.full(name)}")
        return default if value is None else value


def _computes(name: str) -> bool:
    """Return whether a key, without `ARCH.`, decides what a model computes."""
    return name in COMPUTING or (name.startswith(_PARTS) and name not in _HARMLESS)


def _off(value: object) -> bool:
    """Return whether a value switches its feature off."""
    if isinstance(value, list):
        return not any(value) or all(item == -1 for item in value)
    return not value


def shortest(value: float) -> float:
    """Return the number with the fewest digits that rounds to the same float32.

    Metadata has float32 numbers. The file that they come from had short decimals, such as 1e-05.
    Numbers that are no float32 stay as they are.
    """
    if not math.isfinite(value) or _float32(value) != value:
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if _float32(short) == value:
            return short
    return value


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def layer_count(keys: Keys) -> tuple[int, int]:
    """Return (layers of the decoder, layers after them that predict further tokens).

    Raises CheckpointError for more than MOST_PARTS.
    """
    blocks = keys.integer("block_count")
    predicting = keys.integer("nextn_predict_layers", 0)
    if not predicting < blocks <= MOST_PARTS:
        keys.refuse(
            "block_count", f"1 to {MOST_PARTS} are, more than nextn_predict_layers = {predicting}"
        )
    return blocks - predicting, predicting
