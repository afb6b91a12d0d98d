"""The tensors of a GGUF file under the names of the Hugging Face form. Imports no torch.

llama.cpp's converter renames tensors, and it changes some: it permutes rows, adds 1 to norms,
stacks experts, and divides or joins matrices. `tensor_names` says for each Hugging Face tensor
where it comes from, and what undoes the change. Rows are reordered whole, so a quantized row is
moved as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import chain

from freight.base.fields import MOST_PARTS, JsonObject, integer
from freight.checkpoint.gguf.architectures import ROWS
from freight.checkpoint.gguf.config import GGUFConfig
from freight.checkpoint.gguf.keys import Shapes
from freight.checkpoint.gguf.ropes import ROPE_TENSORS
from freight.errors import CheckpointError

SENSES = "of the models of pictures or sound: Freight runs the text model alone"
PREDICTS = "of layers that predict further tokens: Freight does not run them"
COPIES = "a copy of the model's embedding or head, which layers that predict further tokens share"


class Change(StrEnum):
    """What is done to the values of a tensor, after `Placed.rows`."""

    NONE = "none"
    MINUS_ONE = "minus one"  # x - 1
    NEGATIVE_LOG = "negative log"  # log(-x)
    # The sources are k [heads, latent, nope] and v [heads, values, latent]: for each head, k with
    # its last two dimensions exchanged, then v
    JOIN_LATENTS = "join latents"


@dataclass(frozen=True)
class Placed:
    """Where a Hugging Face tensor comes from.

    The sources are indexed by `expert`, then joined along their first dimension, then reordered by
    `rows` and `columns`, then changed, then given the shape.

    sources   tensors of the GGUF file
    expert    index in the first dimension of each source; None: the whole tensor
    rows      row `rows[i]` of the joined sources is row i here; None: all of them, in their order
    columns   the same of columns, which are inputs of a matrix. They cut through blocks of quantized
              values unless both are multiples of the block
    change    what is done to the values
    shape     shape here if it differs from that of the source in dimensions of size 1
    """

    sources: tuple[str, ...]
    expert: int | None = None
    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None
    change: Change = Change.NONE
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TensorPlaces:
    """The tensors of a GGUF file.

    placed    Hugging Face name -> its place
    skipped   tensor of the file that is not read -> the reason
    """

    placed: Mapping[str, Placed]
    skipped: Mapping[str, str]


@dataclass(frozen=True)
class _Predicting:
    """Names of the layers that predict further tokens. In a file they are the last blocks, counted in
    `block_count`, whose tensors `nextn.NAME` stand beside those of an ordinary block (llama.cpp's
    `gguf-py/gguf/constants.py`, MODEL_TENSOR.NEXTN_*, and `src/models/glm4-moe.cpp`).

    layer     prefix of each; `{}` counts on from the model's layers if `follows`, else from 0
    outside   prefix of `modules`; None: that of the layer
    modules   module of the file, behind `nextn.` -> that of the Hugging Face form
    """

    layer: str
    modules: Mapping[str, str]
    follows: bool = False
    outside: str | None = None

    def prefix(self, index: int, layers: int) -> str:
        """Return the prefix of the layer `index`, of a model with so many layers."""
        return self.layer.format(index + self.follows * layers)


@dataclass(frozen=True)
class _Row:
    """Names and changes of one architecture; names are those within a layer.

    modules    module or tensor of the file -> that of the Hugging Face form
    experts    the names of `ffn_gate_exps`, `ffn_up_exps` and `ffn_down_exps`; `{}` is the expert
    permuted   whether rows of q and k are permuted: pairs of channels that rotate alternate
    norms      whether norms have 1 added
    gated      whether q has as many rows again, of the gate of attention's result
    outer      tensors outside of layers
    predicting  names of layers that predict further tokens; None: they are not read
    special    places of tensors that are not renamed alone: `_special`
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )
    permuted: bool = False
    norms: bool = False
    gated: bool = False
    outer: Mapping[str, str] = field(default_factory=dict)
    predicting: _Predicting | None = None
    special: Callable[[_File], None] | None = None


_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ROUTED = {"ffn_gate_inp": "mlp.gate"}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_DEEPSEEK_EXPERTS = {
    **_ROUTED,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMED_AFTER = {"post_attention_norm": "post_attention_layernorm"}


def tensor_names(gguf: GGUFConfig, shapes: Shapes) -> TensorPlaces:
    """Return the places of all Hugging Face tensors.

    gguf     from `config_of`
    shapes   shape of each tensor of the file, outermost dimension first

    Raises CheckpointError for a tensor that has no place, or another shape than the keys ask for.
    """
    row = _ROWS[gguf.architecture]
    file = _File(gguf, shapes, row.predicting)
    if row.predicting is not None:
        _require_counted(file)
    if row.special is not None:
        row.special(file)
    _divide_joined(file, row)
    for name in shapes:
        if name not in file.used:
            _place(file, row, name)
    _share_norm(file, row)
    return TensorPlaces(file.placed, file.skipped)


class _File:
    """The tensors of a file while they get their places.

    used      those that have one
    layers    the model's layers
    prefixes  prefix in the Hugging Face form of each block that is read: those layers, and then those
              that predict further tokens
    """

    def __init__(self, gguf: GGUFConfig, shapes: Shapes, predicting: _Predicting | None) -> None:
        self.gguf = gguf
        self.config: JsonObject = gguf.config
        self.shapes = shapes
        self.placed: dict[str, Placed] = {}
        self.skipped: dict[str, str] = {}
        self.used: set[str] = set()
        self.layers = integer(gguf.config, "num_hidden_layers")
        self.prefixes = [f"model.layers.{index}." for index in range(self.layers)]
        key = ROWS[gguf.architecture].predicting
        if predicting is not None and key is not None:
            for index in range(integer(gguf.config, key, 0, least=0)):
                self.prefixes.append(predicting.prefix(index, self.layers))

    def put(self, name: str, place: Placed) -> None:
        """Give the Hugging Face tensor `name` its place."""
        if name in self.placed:
            raise CheckpointError(
                f"GGUF: {place.sources[0]} and {self.placed[name].sources[0]} are both {name}"
            )
        self.placed[name] = place
        self.used.update(place.sources)

    def layers_with(self, tensor: str) -> list[tuple[str, str]]:
        """Return (prefix here, prefix of the Hugging Face form) of the layers that have a tensor."""
        prefixes = ((f"blk.{index}.", prefix) for index, prefix in enumerate(self.prefixes))
        return [both for both in prefixes if both[0] + tensor in self.shapes]

    def sizes(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CheckpointError for another number of dimensions."""
        shape = self.shapes[name]
        if len(shape) != dimensions:
            raise CheckpointError(
                f"GGUF: {name} has shape {list(shape)}; {dimensions} dimensions are expected"
            )
        return shape

    def require_rows(self, name: str, rows: int) -> None:
        """Raise CheckpointError unless the tensor `name` has that many rows."""
        shape = self.shapes[name]
        if not shape or shape[0] != rows:
            raise CheckpointError(
                f"GGUF: {name} has shape {list(shape)}; the metadata asks for {rows} rows"
            )


_NEXTN = "nextn."
_PROJECTION = "eh_proj"
_LAST_NORM = "shared_head_norm"
_OUTPUT_NORM = "output_norm.weight"
_COPIED = ("embed_tokens", "shared_head_head")
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)", re.ASCII)
_SENSES = ("v.", "a.", "mm.")  # files that have all models in one
_STACKED = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2}


def _require_counted(file: _File) -> None:
    """Raise CheckpointError where the metadata counts a block as one of the model's, and its tensors as one
    that predicts further tokens, or the other way round: the model would have another number of layers.
    """
    blocks: dict[int, bool] = {}
    for name in file.shapes:
        match = _LAYER.fullmatch(name)
        if match is not None:
            block = int(match[1])
            blocks[block] = blocks.get(block, False) or match[2].startswith(_NEXTN)
    architecture = file.gguf.architecture
    for block, predicts in sorted(blocks.items()):
        if predicts == (block >= file.layers):
            continue
        has = "a tensor" if predicts else "no tensor"
        raise CheckpointError(
            f"GGUF: blk.{block} has {has} {_NEXTN}* of layers that predict further tokens, and the metadata, "
            f"{architecture}.block_count less {architecture}.nextn_predict_layers, counts {file.layers} layers before "
            "these; convert the model again"
        )


def _place(file: _File, row: _Row, name: str) -> None:
    """Give a tensor its place by its name, or skip it."""
    outer = {**_OUTER, **row.outer}
    if name in ROPE_TENSORS:
        file.skipped[name] = "its values are parameters of the rope in config.json"
        return
    if name.startswith(_SENSES):
        file.skipped[name] = SENSES
        return
    if name in outer:
        file.put(outer[name], _changed(row, outer[name], Placed((name,))))
        return
    match = _LAYER.fullmatch(name)
    if match is not None and int(match[1]) >= len(file.prefixes):
        file.skipped[name] = PREDICTS
        return
    if match is not None and int(match[1]) >= file.layers and match[2].startswith(_NEXTN):
        _place_beside(file, row, name, int(match[1]))
        return
    if match is None or not _place_in_layer(file, row, name, match):
        raise CheckpointError(
            f"GGUF: tensor {name} has no place in {file.gguf.architecture} as Freight knows it"
        )


def _place_in_layer(file: _File, row: _Row, name: str, match: re.Match[str]) -> bool:
    """Give a tensor of a layer its place. Returns whether it has one."""
    prefix = file.prefixes[int(match[1])]
    tensor = match[2]
    module, dot, kind = tensor.rpartition(".")
    if module in _STACKED and kind in ("weight", "bias"):
        pattern = f"{prefix}{row.experts[_STACKED[module]]}.{kind}"
        for expert in range(_experts(file, name)):
            file.put(pattern.format(expert), Placed((name,), expert=expert))
        return True
    modules = {**_MODULES, **row.modules}
    if tensor in modules:
        target = prefix + modules[tensor]
    elif module in modules and kind in ("weight", "bias"):
        target = f"{prefix}{modules[module]}{dot}{kind}"
    else:
        return False
    place = Placed((name,))
    if row.permuted and module in ("attn_q", "attn_k"):
        place = replace(place, rows=_unpermuted(file, name, module))
    file.put(target, _changed(row, target, place))
    return True


def _place_beside(file: _File, row: _Row, name: str, block: int) -> None:
    """Give a tensor `nextn.…` of a block its place. Raises CheckpointError for an unknown one."""
    form = row.predicting
    assert form is not None
    module, _, kind = name.split(_NEXTN)[1].rpartition(".")
    if module in _COPIED:
        file.skipped[name] = COPIES
        return
    if module not in form.modules or kind != "weight":
        raise CheckpointError(
            f"GGUF: tensor {name} has no place in {file.gguf.architecture} as Freight knows it"
        )
    place = Placed((name,))
    if row.norms and module != _PROJECTION:
        place = replace(place, change=Change.MINUS_ONE)
    prefix = form.outside or file.prefixes[block]
    file.put(f"{prefix}{form.modules[module]}.weight", place)


def _share_norm(file: _File, row: _Row) -> None:
    """Give layers that predict further tokens the model's last norm where a file has none for them: so
    llama.cpp reads it (`src/models/qwen35.cpp`, where `nextn.shared_head_norm` may be missing).
    """
    form = row.predicting
    for block in range(file.layers, len(file.prefixes)):
        assert form is not None
        beside = f"blk.{block}.{_NEXTN}"
        has_layer = f"{beside}{_PROJECTION}.weight" in file.shapes
        has_norm = f"{beside}{_LAST_NORM}.weight" in file.shapes
        if has_layer and not has_norm and _OUTPUT_NORM in file.shapes:
            target = f"{form.outside or file.prefixes[block]}{form.modules[_LAST_NORM]}.weight"
            file.put(target, _changed(row, target, Placed((_OUTPUT_NORM,))))


def _changed(row: _Row, target: str, place: Placed) -> Placed:
    is_norm = target.endswith("norm.weight") and not target.endswith("linear_attn.norm.weight")
    return replace(place, change=Change.MINUS_ONE) if row.norms and is_norm else place


def _experts(file: _File, name: str) -> int:
    """Return the experts of a stacked tensor. Raises CheckpointError for another number."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    count = integer(file.config, next((key for key in keys if key in file.config), keys[0]))
    if count > MOST_PARTS:
        raise CheckpointError(
            f"GGUF metadata: {count} experts are too many; {MOST_PARTS} can be read"
        )
    file.require_rows(name, count)
    return count


def _unpermuted(file: _File, name: str, module: str) -> tuple[int, ...]:
    """Return the order of rows of q or k before the converter permuted them."""
    key = "num_attention_heads" if module == "attn_q" else "num_key_value_heads"
    heads = integer(file.config, key)
    head_dim = integer(file.config, "head_dim")
    file.require_rows(name, heads * head_dim)
    return exchanged(heads, head_dim // 2, 2, 1)


@cache
def exchanged(groups: int, outer: int, inner: int, size: int, first: int = 0) -> tuple[int, ...]:
    """Return the rows that undo an order: in the file each of `groups` groups is [outer, inner,
    size], and here it is [inner, outer, size]. The `first` rows before the groups stay.
    """
    rows = list(range(first))
    for group in range(groups):
        start = first + group * outer * inner * size
        for inside in range(inner):
            for outside in range(outer):
                row = start + (outside * inner + inside) * size
                rows.extend(range(row, row + size))
    return tuple(rows)


def _divide_joined(file: _File, row: _Row) -> None:
    """Divide the joined tensors that a converter's options make: q, k and v of all layers, and gate
    and up of experts.
    """
    modules = {**_MODULES, **row.modules}
    for kind in ("weight", "bias") if "attn_qkv" not in modules else ():
        for prefix, target in file.layers_with(f"attn_qkv.{kind}"):
            if f"{prefix}attn_qkv.{kind}" not in file.used:
                _divide_qkv(file, row, f"{prefix}attn_qkv.{kind}", target, kind)
    for prefix, target in file.layers_with("ffn_gate_up_exps.weight"):
        name = f"{prefix}ffn_gate_up_exps.weight"
        half = file.sizes(name, 3)[1] // 2
        for expert in range(_experts(file, name)):
            for part, pattern in enumerate(row.experts[:2]):
                rows = range(part * half, (part + 1) * half)
                file.put(
                    f"{target}{pattern.format(expert)}.weight",
                    Placed((name,), expert=expert, rows=rows),
                )


def _divide_qkv(file: _File, row: _Row, name: str, target: str, kind: str) -> None:
    head_dim, kv_heads = _heads_of_layer(file.config, int(name.split(".")[1]))
    heads = [integer(file.config, "num_attention_heads") * (1 + row.gated), kv_heads, kv_heads]
    file.require_rows(name, sum(heads) * head_dim)
    start = 0
    for module, count in zip(("attn_q", "attn_k", "attn_v"), heads, strict=True):
        rows: Sequence[int] = range(start, start + count * head_dim)
        if row.permuted and module != "attn_v":
            order = exchanged(count, head_dim // 2, 2, 1)
            rows = tuple(start + index for index in order)
        file.put(f"{target}{_MODULES[module]}.{kind}", Placed((name,), rows=rows))
        start += count * head_dim


def _heads_of_layer(config: JsonObject, index: int) -> tuple[int, int]:
    """Return (channels of a head, KV heads). They differ by kind of layer in Gemma 4."""
    own = dict(config)
    if "global_head_dim" in config and config["layer_types"][index] == "full_attention":
        own["head_dim"] = config["global_head_dim"]
        own |= config.get("per_layer_config", {}).get(str(index), {})
    return integer(own, "head_dim"), integer(own, "num_key_value_heads")


def _latents(file: _File) -> None:
    """Join the two parts of `kv_b_proj`, which later files store by themselves."""
    heads = integer(file.config, "num_attention_heads")
    latent = integer(file.config, "kv_lora_rank")
    sizes = (
        (heads, latent, integer(file.config, "qk_nope_head_dim")),
        (heads, integer(file.config, "v_head_dim"), latent),
    )
    for prefix, target in file.layers_with("attn_k_b.weight"):
        sources = (f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight")
        for name, shape in zip(sources, sizes, strict=True):
            if file.shapes.get(name) != shape:
                raise CheckpointError(
                    f"GGUF: {name} has shape {file.shapes.get(name)}; the metadata asks for {shape}"
                )
        file.put(f"{target}self_attn.kv_b_proj.weight", Placed(sources, change=Change.JOIN_LATENTS))


def _convolutions(file: _File) -> None:
    """Give short convolutions the dimension of size 1 back."""
    for prefix, target in file.layers_with("shortconv.conv.weight"):
        name = f"{prefix}shortconv.conv.weight"
        channels, width = file.sizes(name, 2)
        file.put(f"{target}conv.conv.weight", Placed((name,), shape=(channels, 1, width)))


def _shared_gate(file: _File) -> None:
    """Give the gate of shared experts, which is one row, the dimension of size 1 back."""
    for prefix, target in file.layers_with("ffn_gate_inp_shexp.weight"):
        name = f"{prefix}ffn_gate_inp_shexp.weight"
        columns = integer(file.config, "hidden_size")
        file.put(f"{target}mlp.shared_expert_gate.weight", Placed((name,), shape=(1, columns)))


_CONVOLUTION = "ssm_conv1d.weight"  # of the delta nets


@dataclass(frozen=True)
class _Heads:
    """Heads of a delta net: `key` heads of `key_dim` channels, `value` heads of `value_dim`."""

    key: int
    value: int
    key_dim: int
    value_dim: int

    @property
    def each(self) -> int:
        """Value heads of a key head."""
        return self.value // self.key


def _heads(file: _File) -> _Heads:
    """Return the heads. Raises CheckpointError for sizes that the convolutions contradict."""
    names = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    )
    heads = _Heads(*(integer(file.config, name) for name in names))
    if heads.value % heads.key:
        raise CheckpointError(
            f"GGUF metadata: {heads.value} value heads are no multiple of {heads.key} key heads"
        )
    channels = 2 * heads.key * heads.key_dim + heads.value * heads.value_dim
    for prefix, _ in file.layers_with(_CONVOLUTION):
        file.require_rows(prefix + _CONVOLUTION, channels)
    return heads


def _delta_nets(file: _File) -> None:
    """Undo the changes of Qwen3.5: the file has the value heads of all key heads in turn, and here
    those of a key head follow each other.
    """
    _shared_gate(file)
    if not file.layers_with(_CONVOLUTION):
        return
    heads = _heads(file)
    before = 2 * heads.key * heads.key_dim  # rows of q and k

    def order(size: int, first: int = 0) -> tuple[int, ...] | None:
        if heads.each == 1:
            return None
        return exchanged(1, heads.each, heads.key, size, first)

    values = heads.value * heads.value_dim
    rows = {
        "attn_qkv.weight": ("in_proj_qkv.weight", before + values, order(heads.value_dim, before)),
        "attn_gate.weight": ("in_proj_z.weight", values, order(heads.value_dim)),
        "ssm_beta.weight": ("in_proj_b.weight", heads.value, order(1)),
        "ssm_alpha.weight": ("in_proj_a.weight", heads.value, order(1)),
        "ssm_dt.bias": ("dt_bias", heads.value, order(1)),
    }
    for prefix, target in file.layers_with(_CONVOLUTION):
        for tensor, (name, count, permutation) in rows.items():
            if prefix + tensor in file.shapes:
                file.require_rows(prefix + tensor, count)
                file.put(
                    f"{target}linear_attn.{name}", Placed((prefix + tensor,), rows=permutation)
                )
        _state(file, prefix, target, order(1))
        _convolution(file, prefix, target, order(heads.value_dim, before))
        if f"{prefix}ssm_out.weight" in file.shapes:
            out = Placed((f"{prefix}ssm_out.weight",), columns=order(heads.value_dim))
            file.put(f"{target}linear_attn.out_proj.weight", out)


def _state(file: _File, prefix: str, target: str, rows: tuple[int, ...] | None) -> None:
    if f"{prefix}ssm_a" in file.shapes:
        place = Placed((f"{prefix}ssm_a",), rows=rows, change=Change.NEGATIVE_LOG)
        file.put(f"{target}linear_attn.A_log", place)


def _convolution(file: _File, prefix: str, target: str, rows: tuple[int, ...] | None) -> None:
    name = prefix + _CONVOLUTION
    channels, width = file.sizes(name, 2)
    place = Placed((name,), rows=rows, shape=(channels, 1, width))
    file.put(f"{target}linear_attn.conv1d.weight", place)


def _grouped_delta_nets(file: _File) -> None:
    """Undo the changes of Qwen3-Next: here q, k, v and z of a key head follow each other."""
    _shared_gate(file)
    if not file.layers_with(_CONVOLUTION):
        return
    heads = _heads(file)
    rows = by_key_head(heads.key, heads.key_dim, heads.each * heads.value_dim)
    for prefix, target in file.layers_with(_CONVOLUTION):
        _state(file, prefix, target, None)
        _convolution(file, prefix, target, None)
        sources = (f"{prefix}attn_qkv.weight", f"{prefix}attn_gate.weight")
        if all(name in file.shapes for name in sources):
            file.require_rows(sources[0], len(rows) - heads.value * heads.value_dim)
            file.require_rows(sources[1], heads.value * heads.value_dim)
            file.put(f"{target}linear_attn.in_proj_qkvz.weight", Placed(sources, rows=rows))


@cache
def by_key_head(heads: int, key_dim: int, values: int) -> tuple[int, ...]:
    """Return the rows of q, k, v and z by key head, from tensors that have q of all heads first.

    values: rows of v, and of z, of a key head
    """
    sizes = (key_dim, key_dim, values, values)
    starts = [heads * sum(sizes[:part]) for part in range(len(sizes))]
    parts = (
        range(start + head * size, start + (head + 1) * size)
        for head in range(heads)
        for start, size in zip(starts, sizes, strict=True)
    )
    return tuple(chain.from_iterable(parts))


_DELTA_NET = {
    **_QK_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_norm": "linear_attn.norm",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_out": "linear_attn.out_proj",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_LFM2 = _Row(
    {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.expert_bias",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    experts=(
        "feed_forward.experts.{}.w1",
        "feed_forward.experts.{}.w3",
        "feed_forward.experts.{}.w2",
    ),
    outer={
        "token_embd_norm.weight": "model.embedding_norm.weight",
        "output_norm.weight": "model.embedding_norm.weight",
    },
    special=_convolutions,
)
# conversion/glm.py (Glm4MoeModel, and Glm4MoeLiteModel of GLM-4.7-Flash as deepseek2): by the names of
# the folder. The converter leaves these layers of DeepSeek-V3 itself out (conversion/deepseek.py, skip_mtp)
_AFTER = _Predicting(
    "model.layers.{}.",
    {
        _PROJECTION: "eh_proj",
        "enorm": "enorm",
        "hnorm": "hnorm",
        _LAST_NORM: "shared_head.norm",
    },
    follows=True,
)
# conversion/qwen.py, _Qwen35MtpMixin: the names of NextN in place of mtp.*, and so 1 is added to all norms
_OUTSIDE = _Predicting(
    "mtp.layers.{}.",
    {
        _PROJECTION: "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        _LAST_NORM: "norm",
    },
    outside="mtp.",
)
_MIXTRAL = (
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)

_ROWS: Mapping[str, _Row] = {
    "llama": _Row({"ffn_gate_inp": "block_sparse_moe.gate"}, experts=_MIXTRAL, permuted=True),
    "mistral3": _Row(permuted=True),
    "qwen2": _Row(),
    "qwen3": _Row(_QK_NORMS),
    "qwen2moe": _Row({**_ROUTED, **_SHARED_EXPERT}, special=_shared_gate),
    "qwen3moe": _Row({**_ROUTED, **_QK_NORMS}),
    "gemma2": _Row(_SANDWICH, norms=True),
    "gemma3": _Row({**_SANDWICH, **_QK_NORMS}, norms=True),
    "gemma4": _Row(
        {
            **_SANDWICH,
            **_QK_NORMS,
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        experts=(
            "experts.{}.gate_proj",
            "experts.{}.up_proj",
            "experts.{}.down_proj",
        ),
        outer={
            "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
            "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
            "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
        },
    ),
    "phi3": _Row({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "smollm3": _Row(permuted=True),
    "olmo2": _Row({**_NORMED_AFTER, **_QK_NORMS, "post_ffw_norm": "post_feedforward_layernorm"}),
    "granite": _Row(permuted=True),
    "granitemoe": _Row(
        {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        experts=(
            "block_sparse_moe.experts.{}.gate_proj",
            "block_sparse_moe.experts.{}.up_proj",
            "block_sparse_moe.experts.{}.down_proj",
        ),
        permuted=True,
    ),
    "gpt-oss": _Row(
        {
            **_NORMED_AFTER,
            "ffn_gate_inp": "mlp.router",
            "attn_sinks.weight": "self_attn.sinks",
        }
    ),
    "glm4": _Row(
        {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    ),
    "glm4moe": _Row({**_NORMED_AFTER, **_QK_NORMS, **_DEEPSEEK_EXPERTS}, predicting=_AFTER),
    "deepseek2": _Row(
        {
            **_DEEPSEEK_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        predicting=_AFTER,
        special=_latents,
    ),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "qwen35": _Row(_DELTA_NET, norms=True, gated=True, predicting=_OUTSIDE, special=_delta_nets),
    "qwen35moe": _Row(
        {**_DELTA_NET, **_ROUTED, **_SHARED_EXPERT},
        norms=True,
        gated=True,
        predicting=_OUTSIDE,
        special=_delta_nets,
    ),
    # ssm_in: in older files, before the converter divided it
    "qwen3next": _Row(
        {
            **_DELTA_NET,
            **_ROUTED,
            **_SHARED_EXPERT,
            "ssm_in": "linear_attn.in_proj_qkvz",
        },
        norms=True,
        gated=True,
        special=_grouped_delta_nets,
    ),
}
