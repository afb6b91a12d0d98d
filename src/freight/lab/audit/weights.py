"""The quantized weights of a checkpoint: what they are, what was checked of them, and what no figure
of an audit says about them.

The checks are those of loading (`model.stored`): every tensor has its place, its dtype and its
shape, and scales, zero points and orders of inputs are valid. No code is read but in MXFP4, where a
scale alone does not say whether values are finite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from freight.base.fields import JsonObject
from freight.checkpoint.four_bits import StoredGroups
from freight.checkpoint.reader import Checkpoint
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales, Scheme, WeightScales
from freight.lab.columns import as_object
from freight.model.architectures import tensor_names
from freight.model.config.model import ModelConfig
from freight.model.open import OpenCheckpoint
from freight.model.shapes import kept_in_16_bits, tensor_shapes
from freight.model.stored import StoredMatrices, find_stored

_SCALES = ("weight_scale", "scales")  # of groups, but for powers of two in bytes


@dataclass(frozen=True)
class ScaleFacts:
    """The scales of all matrices, magnitudes of those that are not 0."""

    count: int
    least: float
    largest: float
    zero: int
    negative: int

    def __str__(self) -> str:
        parts = [f"{self.count:,} scales are finite, {self.least:.3g} to {self.largest:.3g}"]
        if self.negative:
            parts.append(f"{self.negative:,} of them negative")
        if self.zero:
            parts.append(f"{self.zero:,} of them 0")
        return ", ".join(parts)


@dataclass(frozen=True)
class WeightFacts:
    """The quantized matrices of a checkpoint that loads.

    kinds        how many there are, by what is declared of them
    method       the producer's name
    bits         stored bits of a weight, with its scales and zero points
    unquantized  matrices of layers that are not quantized, by dtype; routers do not count
    embedding    dtype or form of the embedding
    head         that of the head; None where it is the embedding
    scales       None for powers of two in bytes, whose check is that they are finite
    zero_points  how many there are
    reordered    matrices whose groups have an order of their own
    kv           what is stored and declared of the KV cache
    on_cpus      whether GPUs refuse the weights
    """

    kinds: Mapping[str, int]
    method: str
    bits: float
    unquantized: Mapping[str, int]
    embedding: str
    head: str | None
    scales: ScaleFacts | None
    zero_points: int
    reordered: int
    kv: str
    on_cpus: bool

    def lines(self) -> list[str]:
        """Return what `freight audit` prints, the first line first."""
        kinds = "; ".join(f"{count} in {kind}" for kind, count in self.kinds.items())
        outside = f"embedding in {self.embedding}, head in {self.head}"
        if self.head in (None, self.embedding):
            outside = f"embedding and head in {self.embedding}"
        plain = "".join(f"; {count} more in {dtype}" for dtype, count in self.unquantized.items())
        checked = ["every tensor has its place, dtype and shape"]
        if self.scales is not None:
            checked.append(str(self.scales))
        if self.zero_points:
            checked.append(f"{self.zero_points:,} zero points")
        lines = [
            f"Weights ({self.method}): {kinds}; {self.bits:.2f} bits a weight, scales included{plain}; {outside}",
            f"checked: {'; '.join(checked)}",
        ]
        if self.reordered:
            lines.append(
                f"{self.reordered} matrices have groups in an order of their own, into which inputs are put before "
                "each product"
            )
        if self.on_cpus:
            lines.append("Freight computes with these weights on CPUs; on GPUs it refuses them")
        lines.append(self.kv)
        lines.append(
            "what rounding the weights cost is in no figure here, as all have these weights: compare the perplexity "
            "with that of the model they were made from (freight evaluate caches)"
        )
        return lines

    def as_json(self) -> JsonObject:
        """Return the object of `freight audit --json`; docs/audit.md lists its keys."""
        scales = self.scales and as_object(self.scales, _SCALE)
        return {**as_object(self, _JSON), "scales": scales}


_JSON = {
    "method": "method",
    "kinds": "kinds",
    "bits_per_weight": "bits",
    "not_quantized": "unquantized",
    "embedding": "embedding",
    "head": "head",
    "scales": "scales",
    "zero_points": "zero_points",
    "reordered": "reordered",
    "kv": "kv",
    "cpus_only": "on_cpus",
}
_SCALE = {
    "count": "count",
    "min": "least",
    "max": "largest",
    "zero": "zero",
    "negative": "negative",
}


def read_weights(opened: OpenCheckpoint) -> WeightFacts | None:
    """Check the quantized matrices of a model that runs natively; None if it has none.

    Accounts for every tensor. Raises CheckpointError as loading does.
    """
    checkpoint = opened.checkpoint
    model = opened.model
    scheme = opened.scheme
    if model.foreign is not None:  # modules of transformers: `freight inspect` describes them
        return None
    matrices = find_stored(checkpoint, model, scheme)
    if not (matrices.linears or matrices.four or matrices.packed):
        return None
    kinds = Counter(_kinds(checkpoint, scheme, matrices))
    names = tensor_names(model)
    groups = [stored for stored in matrices.four.values() if isinstance(stored, StoredGroups)]
    formats = {linear.format for linear in matrices.linears.values()}
    return WeightFacts(
        kinds=dict(kinds.most_common()),
        method=str(scheme.method),
        bits=_bits(checkpoint, matrices),
        unquantized=_others(checkpoint, model, matrices),
        embedding=_form(checkpoint, matrices, names.embedding),
        head=None if model.tie_word_embeddings else _form(checkpoint, matrices, names.head),
        scales=_scale_facts(_scales(checkpoint, scheme, matrices, groups)),
        zero_points=sum(_zero_points(stored) for stored in groups if stored.four.zeros),
        reordered=sum(stored.is_reordered(checkpoint) for stored in groups),
        kv=_kv(scheme, opened.kv_scales),
        on_cpus=bool(groups) or Format.INT8 in formats,
    )


def _kinds(checkpoint: Checkpoint, scheme: Scheme, matrices: StoredMatrices) -> Iterator[str]:
    """Yield what each matrix is in, and how its inputs are treated."""
    for linear in matrices.linears.values():
        declared = scheme.linear(checkpoint.declared_module(linear.weight))
        yield str(declared) if linear.mxfp8 else f"{linear.format}, {declared}"
    for stored in matrices.four.values():
        declared = scheme.linear(checkpoint.declared_module(next(iter(stored.tensors))))
        yield str(declared)
    yield from ("MXFP4, experts of a layer together" for _ in matrices.packed)


def _bits(checkpoint: Checkpoint, matrices: StoredMatrices) -> float:
    """Return the stored bits of a quantized weight, with all that is stored beside it but biases."""
    modules = {linear.weight.rpartition(".")[0] for linear in matrices.linears.values()}
    modules |= {stored.module for stored in matrices.four.values()}
    experts: set[str] = set()
    for packed in matrices.packed.values():
        experts.update(packed.tensors)
    size = 0
    for name in checkpoint.names:
        of_module = name.rpartition(".")[0] in modules and not name.endswith(".bias")
        if of_module or name in experts:
            size += checkpoint.entry(name).size
    count = 0
    for part in (matrices.linears, matrices.four, matrices.packed):
        count += sum(math.prod(stored.shape) for stored in part.values())
    return 8 * size / count


def _others(checkpoint: Checkpoint, model: ModelConfig, matrices: StoredMatrices) -> dict[str, int]:
    """Count the matrices of layers that are not quantized, by dtype."""
    in_16_bits = kept_in_16_bits(model)
    counts = Counter[str]()
    for name, shape in tensor_shapes(model).items():
        quantized = name in matrices.linears or name in matrices.four or name in in_16_bits
        if name.endswith(".weight") and len(shape) == 2 and not quantized:
            counts[checkpoint.entry(name).dtype_name] += 1
    return dict(counts.most_common())


def _form(checkpoint: Checkpoint, matrices: StoredMatrices, name: str) -> str:
    """Return what the embedding or the head is in."""
    if name in matrices.four:
        return matrices.four[name].codes
    if name in matrices.linears:
        linear = matrices.linears[name]
        return "MXFP8" if linear.mxfp8 else str(linear.format)
    return checkpoint.entry(name).dtype_name


def _scales(
    checkpoint: Checkpoint,
    scheme: Scheme,
    matrices: StoredMatrices,
    groups: Sequence[StoredGroups],
) -> Iterator[Tensor]:
    """Yield the scales of each matrix as they are stored, but for blocks, which are 128 x 128."""
    for linear in matrices.linears.values():
        declared = scheme.linear(checkpoint.declared_module(linear.weight))
        assert declared is not None
        # that of a tensor is repeated for every row
        yield linear.scale[:1] if declared.scales is WeightScales.TENSOR else linear.scale
    for stored in groups:
        for name in stored.tensors:
            if name.endswith(_SCALES):
                yield checkpoint.copy(name)


def _scale_facts(scales: Iterator[Tensor]) -> ScaleFacts | None:
    count = zero = negative = 0
    least = math.inf
    largest = 0.0
    for stored in scales:
        values = stored.float()
        magnitudes = values[values != 0].abs()
        count += values.numel()
        zero += values.numel() - magnitudes.numel()
        negative += int((values < 0).sum())
        if magnitudes.numel():
            least = min(least, magnitudes.min().item())
            largest = max(largest, magnitudes.max().item())
    return ScaleFacts(count, least, largest, zero, negative) if count > zero else None


def _zero_points(stored: StoredGroups) -> int:
    """Count them: one for each group of each row."""
    rows, columns = stored.shape
    return rows * (columns // stored.four.group if stored.four.group else 1)


def _kv(scheme: Scheme, scales: KVScales) -> str:
    """Say what is declared and stored of the KV cache."""
    declared = "no FP8 cache is declared"
    measured = ": with --kv-cache-dtype fp8 Freight measures one per token"
    use = ": --kv-cache-dtype fp8 uses them"
    if scheme.kv_format:
        declared = "an FP8 cache is declared"
        measured = ""
        use = ""
    if scales.empty:
        return f"{declared}, and no KV scales are stored{measured}"
    if scales.faults:
        return f"{declared}, and the stored KV scales cannot be used: {scales.faults[0].what}"
    if scales.mixed:
        return "the checkpoint chooses the cache of each layer: --kv-cache-dtype auto uses that"
    count = len(scales.layers) - len(scales.unneeded) - len(scales.missing)
    stored = f"KV scales are stored for {count} layer{'s' * (count > 1)}"
    if scales.missing:
        stored += f", and missing for {len(scales.missing)}"
        use = ": --kv-scales dynamic measures all as they are stored, and --fix writes what is missing"
    return f"{declared}; {stored}{use}"
