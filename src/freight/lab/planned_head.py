"""What drafts besides the text of requests, as `freight plan` counts it: opened as an engine opens it
(`engine/heads.py`), without weights. Imports no torch, but for the files of an EAGLE-3 head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freight.base.fields import JsonObject
from freight.cache.spec import KVCacheSpec, measured, with_layers
from freight.checkpoint.config_only import gguf_model, local_path, read_config_only
from freight.checkpoint.layouts import read_scheme
from freight.errors import ConfigError, shown
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import LinearScheme, Scheme
from freight.model.config.model import ModelConfig
from freight.model.config.predicting import published_predicting
from freight.model.mixers.spec import Mixer
from freight.model.sizes import (
    Layout,
    LinearOf,
    eagle_bytes,
    int4_online,
    loaded_bytes,
    online,
    predicting_bytes,
)
from freight.parallel.shards import require_head_divisible
from freight.settings.engine import KVCacheConfig, LayerKVFormat
from freight.settings.speculation import (
    HeadKind,
    HeadSource,
    Speculation,
    obstacle_to_drafts,
    require_drafts_of,
)

_FLAG = "--speculative-config"
_PLAIN = frozenset({"F32", "F16", "BF16"})  # dtypes of tensors that are not quantized
# a config.json -> the model, also of one that runs through transformers' modules
ReadModel = Callable[[JsonObject], ModelConfig]


@dataclass(frozen=True)
class Matrices:
    """The weights of a setting: the format of those in 8 bits, the scheme of each module's, and the
    --quantization that gives them; None: they are the checkpoint's.
    """

    format: Format
    linear_of: LinearOf
    quantization: str | None


@dataclass(frozen=True)
class PlannedHead:
    """What drafts.

    source     as it is asked for, or found
    mixers     of its layers, whole also where ranks divide them
    kinds      gives the stored format of each of its layers, beside such a cache
    num_bytes  counts its weights and tables on each rank, beside such weights; None where an engine
               refuses it
    """

    source: HeadSource
    mixers: tuple[Mixer, ...]
    kinds: Callable[[KVCacheConfig], tuple[LayerKVFormat, ...]]
    num_bytes: Callable[[Matrices], int | None]

    def beside(
        self, spec: KVCacheSpec, kv: KVCacheConfig, compute: Format, ranks: int = 1
    ) -> KVCacheSpec:
        """Return the cache of the model, which is `spec`, and of the head; that of each of several
        `ranks`, as `spec`.
        """
        return with_layers(spec, self.mixers, self.kinds(kv), compute, ranks)

    def as_json(self) -> JsonObject:
        """Return its object in the JSON of a plan."""
        return {
            "method": str(self.source.kind),
            "model": self.source.folder,
            "layers": len(self.mixers),
        }

    def describe(self) -> str:
        """'the EAGLE-3 head FOLDER', 'the second model FOLDER'."""
        if self.source.kind is HeadKind.MTP:
            return "the first of the model's layers that predict further tokens"
        if self.source.kind is HeadKind.EAGLE3:
            return f"the EAGLE-3 head {self.source.folder}"
        return f"the second model {self.source.folder}"


@dataclass(frozen=True)
class Beside:
    """The model that a head is planned for.

    name      as the user named it
    model     its description
    compute   what it computes in
    device    'cpu' or 'cuda'
    layout    how kernels hold matrices
    context   tokens of the longest request
    ranks     processes that compute it together, and the head
    read      reads a config.json
    tensors   dtype of each of its tensors, as their file names it; None: they are not known
    """

    name: str
    model: ModelConfig
    compute: Format
    device: str
    layout: Layout
    context: int
    ranks: int
    read: ReadModel
    tensors: Mapping[str, str] | None


def planned_head(drafts: Speculation, of: Beside, spec: KVCacheSpec) -> PlannedHead | None:
    """Return the head that an engine with these options has; None for none. spec: of the model's cache.

    Raises ConfigError and CheckpointError, with the engine's words.
    """
    if drafts.most == 0 or not (drafts.head or drafts.finds_head):
        return None
    obstacle = obstacle_to_drafts(of.model.foreign is not None, of.device != "cpu")
    if obstacle and drafts.head is not None:
        raise ConfigError(f"{_FLAG}: there are no drafts here: {obstacle}; omit it")
    if obstacle:
        return None
    source = drafts.head or HeadSource(HeadKind.MTP)
    keeps_all = any(group.keeps_all and group.has_slots for group in spec.groups)
    if not keeps_all and drafts.head is not None:
        raise ConfigError(
            f"{_FLAG}: method {str(source.kind)!r} keeps its own keys in the blocks of layers that keep every token, "
            f"and this model ({of.model.model_type}) has none; omit it"
        )
    if not keeps_all:
        return None
    if source.kind is HeadKind.MTP:
        return _predicting(of, source, drafts.head is not None)
    assert source.folder is not None
    if source.kind is HeadKind.EAGLE3:
        return _eagle(of, source, source.folder)
    return _second(of, source, source.folder)


def _predicting(of: Beside, source: HeadSource, is_named: bool) -> PlannedHead | None:
    predicting = published_predicting(of.model, of.tensors)
    if predicting is None and is_named:
        raise ConfigError(
            f"{of.name} has no layers that predict further tokens, or none that are read (model_type "
            f"{of.model.model_type}); draft with ngram or suffix"
        )
    if predicting is None:
        return None
    plain = frozenset[str]()
    if of.tensors is not None:
        names = (name for name, dtype in of.tensors.items() if dtype in _PLAIN)
        plain = frozenset(name.removesuffix(".weight") for name in names)

    def num_bytes(matrices: Matrices) -> int:
        def linear_of(module: str) -> LinearScheme | None:
            # tools leave these layers in 16 bits, whatever config.json declares
            if module in plain and matrices.quantization is None:
                return None
            return matrices.linear_of(module)

        return predicting_bytes(
            of.model,
            predicting,
            of.compute,
            matrices.format,
            linear_of,
            of.layout,
            of.context,
            of.ranks,
        )

    last = max(of.model.paged)
    return PlannedHead(
        source=source,
        mixers=(predicting.layer.mixer,),
        kinds=lambda kv: (measured(kv.of_layer(last)),),
        num_bytes=num_bytes,
    )


def _eagle(of: Beside, source: HeadSource, folder: str) -> PlannedHead:
    if not local_path(folder).is_dir():
        raise ConfigError(
            f"{_FLAG}: {shown(folder)} is no folder here, and a plan downloads no head; fetch it first"
        )
    from freight.model.eagle import open_eagle  # takes seconds, and torch

    eagle = open_eagle(folder, of.model)
    require_head_divisible(eagle.config.model, of.ranks, shown(folder))
    size = eagle_bytes(eagle.config, eagle.shapes, of.compute, of.layout, of.context, of.ranks)
    last = max(of.model.paged)
    return PlannedHead(
        source=source,
        mixers=(eagle.mixer,),
        kinds=lambda kv: (measured(kv.of_layer(last)),),
        num_bytes=lambda matrices: size,
    )


def _second(of: Beside, source: HeadSource, folder: str) -> PlannedHead:
    gguf = gguf_model(folder)
    if gguf is not None:
        config, scheme = gguf.described.config, gguf.scheme
    else:
        config, modelopt = read_config_only(folder)
        scheme = read_scheme(config, modelopt)
    second = of.read(config)
    require_drafts_of(second, shown(folder))
    require_head_divisible(second, of.ranks, shown(folder))
    length = min(of.context, second.max_position_embeddings)

    def num_bytes(matrices: Matrices) -> int | None:
        own = _own_matrices(of, second, scheme, matrices.quantization)
        if own is None:
            return None
        formats = of.compute, own.format, own.linear_of
        return loaded_bytes(second, *formats, of.layout, length, of.ranks).total

    def kinds(kv: KVCacheConfig) -> tuple[LayerKVFormat, ...]:
        granularity = Granularity.TOKEN if kv.format.is_quantized else None
        return (LayerKVFormat(kv.format, granularity),) * second.num_layers

    mixers = tuple(layer.mixer for layer in second.layers)
    return PlannedHead(source, mixers, kinds, num_bytes)


def _own_matrices(
    of: Beside, second: ModelConfig, scheme: Scheme, quantization: str | None
) -> Matrices | None:
    """Return the weights of a second model where the first one is loaded with this --quantization;
    None where that is refused, because they are quantized already.
    """
    stored = scheme.weight_format
    if stored is not None:
        kind = "int8" if stored is Format.INT8 else "fp8"
        if quantization not in (None, kind) or (quantization and scheme.four_bits):
            return None
        return Matrices(stored, scheme.linear, None)
    if quantization == "int4":
        return Matrices(Format.E4M3FN, int4_online, quantization)
    if quantization == "int8":
        return Matrices(Format.INT8, online(second), quantization)
    if quantization == "fp8":
        return Matrices(Format.E4M3FN, online(second), quantization)
    return Matrices(of.compute, scheme.linear, None)
