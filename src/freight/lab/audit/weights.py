"""The quantized weights of a checkpoint: what they are, what was checked of them, and what no figure
of an audit says about them.

The checks are those of loading (`models.stored`): every tensor has its place, its dtype and its
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
    others       matrices of layers that are not quantized, by dtype; routers do not count
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
    others: Mapping[str, int]
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
        others = "".join(f"; {count} more in {dtype}" for dtype, count in self.others.items())
        checked = ["every tensor has its place, dtype and shape"]
        if self.scales is not None:
            checked.append(str(self.scales))
        if self.zero_points:
            checked.append(f"{self.zero_points:,} zero points")
        found = [
            f"Weights ({self.method}): {kinds}; {self.bits:.2f} bits a weight, scales included{others}; {outside}",
            f"checked: {'; '.join(checked)}",
        ]
        if self.reordered:
            found.append(
                f"{self.reordered} matrices have groups in an order of their own, into which inputs are put before "
                "each product"
            )
        if self.on_cpus:
            found.append("Freight computes with these weights on CPUs; on GPUs it refuses them")
        found.append(self.kv)
        found.append(
            "what rounding the weights cost is in no figure here, as all have these weights: compare the perplexity "
            "with that of the model they were made from (freight evaluate caches)"
        )
        return found

    def as_json(self) -> JsonObject:
        """Return the object of `freight audit --json`; docs/audit.md lists its keys."""
        scales = self.scales
        return {
            "method": self.method,
            "kinds": dict(self.kinds),
            "bits_per_weight": self.bits,
            "not_quantized": dict(self.others),
            "embedding": self.embedding,
            "head": self.head,
            "scales": None
            if scales is None
            else {
                "count": scales.count,
                "min": scales.least,
                "max": scales.largest,
                "zero": scales.zero,
                "negative": scales.negative,
            },
            "zero_points": self.zero_points,
            "reordered": self.reordered,
            "kv": self.kv,
            "cpus_only": self.on_cpus,
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
    found = find_stored(checkpoint, model, scheme)
    if not (found.linears or found.four or found.packed):
        return None
    kinds = Counter(_kinds(checkpoint, scheme, found))
    names = tensor_names(model)
    groups = [one for one in found.four.values() if isinstance(one, StoredGroups)]
    return WeightFacts(
        kinds=dict(kinds.most_common()),
        method=str(scheme.method),
        bits=_bits(checkpoint, found),
        others=_others(checkpoint, model, found),
        embedding=_form(checkpoint, found, names.embedding),
        head=None if model.tie_word_embeddings else _form(checkpoint, found, names.head),
        scales=_scale_facts(_scales(checkpoint, scheme, found, groups)),
        zero_points=sum(_zero_points(one) for one in groups if one.four.zeros),
        reordered=sum(one.is_reordered(checkpoint) for one in groups),
        kv=_kv(scheme, opened.kv_scales),
        on_cpus=bool(groups) or any(one.format is Format.INT8 for one in found.linears.values()),
    )


def _kinds(checkpoint: Checkpoint, scheme: Scheme, found: StoredMatrices) -> Iterator[str]:
    """Yield what each matrix is in, and how its inputs are treated."""
    for linear in found.linears.values():
        declared = scheme.linear(checkpoint.declared_module(linear.weight))
        yield f"{linear.format}, {declared}"
    for stored in found.four.values():
        declared = scheme.linear(checkpoint.declared_module(next(iter(stored.tensors))))
        yield str(declared)
    yield from ("MXFP4, experts of a layer together" for _ in found.packed)


def _bits(checkpoint: Checkpoint, found: StoredMatrices) -> float:
    """Return the stored bits of a quantized weight, with all that is stored beside it but biases."""
    modules = {one.weight.rpartition(".")[0] for one in found.linears.values()}
    modules |= {one.module for one in found.four.values()}
    experts = {name for one in found.packed.values() for name in one.tensors}
    size = sum(
        checkpoint.entry(name).size
        for name in checkpoint.names
        if name in experts or (name.rpartition(".")[0] in modules and not name.endswith(".bias"))
    )
    matrices = [*found.linears.values(), *found.four.values(), *found.packed.values()]
    return 8 * size / sum(math.prod(one.shape) for one in matrices)


def _others(checkpoint: Checkpoint, model: ModelConfig, found: StoredMatrices) -> dict[str, int]:
    """Count the matrices of layers that are not quantized, by dtype."""
    kept = kept_in_16_bits(model)
    others = Counter[str]()
    for name, shape in tensor_shapes(model).items():
        quantized = name in found.linears or name in found.four or name in kept
        if name.endswith(".weight") and len(shape) == 2 and not quantized:
            others[checkpoint.entry(name).dtype_name] += 1
    return dict(others.most_common())


def _form(checkpoint: Checkpoint, found: StoredMatrices, name: str) -> str:
    """Return what the embedding or the head is in."""
    if name in found.four:
        return found.four[name].codes
    if name in found.linears:
        return str(found.linears[name].format)
    return checkpoint.entry(name).dtype_name


def _scales(
    checkpoint: Checkpoint,
    scheme: Scheme,
    found: StoredMatrices,
    groups: Sequence[StoredGroups],
) -> Iterator[Tensor]:
    """Yield the scales of each matrix as they are stored, but for blocks, which are 128 x 128."""
    for linear in found.linears.values():
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
    declared = "an FP8 cache is declared" if scheme.kv_format else "no FP8 cache is declared"
    if scales.empty:
        measured = ": with --kv-cache-dtype fp8 Freight measures one per token"
        return f"{declared}, and no KV scales are stored{'' if scheme.kv_format else measured}"
    if scales.faults:
        return f"{declared}, and the stored KV scales cannot be used: {scales.faults[0].what}"
    if scales.mixed:
        return "the checkpoint chooses the cache of each layer: --kv-cache-dtype auto uses that"
    count = len(scales.layers) - len(scales.unneeded) - len(scales.missing)
    missing = f", and missing for {len(scales.missing)}" if scales.missing else ""
    used = "" if scheme.kv_format else ": --kv-cache-dtype fp8 uses them"
    if missing:
        used = ": --kv-scales dynamic measures all as they are stored, and --fix writes what is missing"
    return f"{declared}; KV scales are stored for {count} layer{'s' * (count > 1)}{missing}{used}"
