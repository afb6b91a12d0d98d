"""Exports of AMMO (later ModelOpt) for TensorRT-LLM: one tensor file per rank, and a JSON file.

    rankN.safetensors   `transformer.layers.N.attention.kv_cache_scaling_factor`, float32 [1], in
                        each of them
    llama_tp2.json      AMMO's own keys: `layers`, `tensor_parallel`, `pipeline_parallel`
    config.json         or TensorRT-LLM's: `architecture`, `mapping`, `quantization`

Weights are merged and split for that engine, so Freight takes the KV scales and nothing else. The
producer measures one factor for K and V of a layer and writes the same into every rank; where ranks
differ, each factor is the scale of that rank's KV heads. Nothing here reads a weight.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from freight.base.fields import MOST_PARTS, JsonObject, is_integer
from freight.checkpoint.headers import TensorEntry, read_header
from freight.checkpoint.kv_scales import join_ranks, require_positive
from freight.checkpoint.reader import read_json, read_tensor
from freight.errors import CheckpointError, shown
from freight.fp8.formats import Format
from freight.fp8.scheme import KVScales

_RANK_FILE = re.compile(r"(?:^|[^a-z])rank(\d+)\.safetensors$")
_SCALE = re.compile(r"(?:^|\.)layers\.(\d+)\.attention\.kv_cache_scaling_factor$")
# decoder_type, or architecture, of the export -> model_types that are exported under that name
_DECODERS = {
    "llama": ("llama", "mistral"),
    "LlamaForCausalLM": ("llama", "mistral"),
    "MistralForCausalLM": ("mistral",),
    "qwen": ("qwen2", "qwen3"),
    "QWenForCausalLM": ("qwen2", "qwen3"),
    "Qwen2ForCausalLM": ("qwen2",),
    "Qwen3ForCausalLM": ("qwen3",),
    "gemma": ("gemma", "gemma2"),
    "gemma2": ("gemma2",),
    "GemmaForCausalLM": ("gemma",),
    "Gemma2ForCausalLM": ("gemma2",),
    "BaichuanForCausalLM": ("baichuan",),
    "Phi3ForCausalLM": ("phi3",),
}


@dataclass(frozen=True)
class _Declared:
    """The declaration of the JSON file, in either of its two layouts.

    config_file   the JSON file
    producer      'ammo' or 'modelopt', with the version if the JSON file has it
    decoder       its name of the architecture
    num_kv_heads  of the full model; None if the JSON file does not say, like `head_dim` and
                  `max_position_embeddings`
    weights       its name of the weights' scheme, 'fp8'; 'none' if they are not quantized
    """

    config_file: Path
    producer: str
    decoder: str
    num_layers: int
    num_kv_heads: int | None
    head_dim: int | None
    max_position_embeddings: int | None
    num_ranks: int
    num_stages: int
    weights: str
    kv_cache: str | None


@dataclass(frozen=True)
class RankExport(_Declared):
    """An export whose headers and KV scales have been read and checked. `entries`: header entries
    of each rank, in order.
    """

    path: Path
    entries: tuple[Mapping[str, TensorEntry], ...]
    scales: KVScales

    @property
    def model_types(self) -> tuple[str, ...]:
        """Freight's model types that `decoder` stands for."""
        return _DECODERS.get(self.decoder, (self.decoder,))

    @property
    def description(self) -> str:
        """One line about the export: producer, weights, ranks, KV cache."""
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        kv = "16 bits" if self.scales.empty else f"{self.scales.format}, static scales"
        return f"{self.producer}: weights {self.weights} in {ranks}, laid out for TensorRT-LLM; KV cache {kv}"


def is_rank_export(path: Path) -> bool:
    """Return whether `path` is such a folder: it has rankN.safetensors, or the .npz files of older
    versions, and no model.
    """
    if (path / "model.safetensors").exists() or (path / "model.safetensors.index.json").exists():
        return False
    for file in path.glob("*rank*.safetensors"):
        if _RANK_FILE.search(file.name):
            return True
    return any(path.glob("*_tp*_rank*.npz"))


def refuse_to_run(path: Path, name: str) -> None:
    """Raise CheckpointError, with the way out, if `path` is an export: its weights are not for
    Freight.
    """
    if is_rank_export(path):
        raise CheckpointError(
            f"{name} is an export of AMMO or ModelOpt for TensorRT-LLM: its weights are laid out for that engine; put "
            f"its KV scales into the 16-bit model that it was made from: freight scales extract {name} BASE OUT"
        )


def read_rank_export(path: Path) -> RankExport:
    """Read headers and KV scales of the export in `path`.

    Raises CheckpointError, naming the file: for a rank, a layer or the JSON file that is missing,
    ranks that differ in a KV head they share, pipeline parallelism, a KV cache other than FP8, and
    a scale that is not one positive finite number.
    """
    files = _rank_files(path)
    declared = _described(path)
    if declared.num_stages != 1:
        raise CheckpointError(
            f"{declared.config_file}: it is split into {declared.num_stages} stages of a pipeline, which is not "
            "implemented; export with one (--pp_size 1)"
        )
    missing = [f"rank{rank}.safetensors" for rank in range(declared.num_ranks) if rank not in files]
    beyond = [file.name for rank, file in files.items() if rank >= declared.num_ranks]
    if missing or beyond:
        fault = f"{', '.join(beyond)} is beyond them"
        if missing:
            fault = f"{', '.join(missing)} is missing"
        raise CheckpointError(
            f"{path}: {declared.config_file.name} describes {declared.num_ranks} ranks, but {fault}; copy "
            "the whole export"
        )
    headers = {file: read_header(file) for _, file in sorted(files.items())}
    ranks = {file.name: _read_scales(file, header) for file, header in headers.items()}
    scales = _joined(declared, path, ranks)
    entries = tuple(headers.values())
    return RankExport(**vars(declared), path=path, entries=entries, scales=scales)


def _rank_files(path: Path) -> dict[int, Path]:
    files: dict[int, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        match = _RANK_FILE.search(file.name)
        if match is None:
            raise CheckpointError(
                f"{path}: {file.name} has no rank in its name, unlike rank0.safetensors; remove it"
            )
        if int(match[1]) in files:
            raise CheckpointError(
                f"{path}: {files[int(match[1])].name} and {file.name} are both of rank {match[1]}"
            )
        files[int(match[1])] = file
    if not files:
        raise CheckpointError(
            f"{path} has .npz files only; export again as safetensors, which AMMO 0.7 writes"
        )
    return files


def _described(path: Path) -> _Declared:
    """Read the one JSON file that describes the export. Raises CheckpointError for none or two."""
    exports: list[_Declared] = []
    for file in sorted(path.glob("*.json")):
        content = read_json(file) or {}
        if isinstance(content.get("layers"), list) and "tensor_parallel" in content:
            exports.append(_from_ammo(file, content))
        elif isinstance(content.get("mapping"), dict) and "architecture" in content:
            exports.append(_from_tensorrt_llm(file, content))
    if not exports:
        raise CheckpointError(
            f"{path} has files of ranks, but no JSON file that describes them, such as llama_tp1.json or config.json; "
            "copy the whole export"
        )
    if len(exports) > 1:
        raise CheckpointError(
            f"{path}: {exports[0].config_file.name} and {exports[1].config_file.name} both describe an export"
        )
    return exports[0]


def _from_ammo(file: Path, content: JsonObject) -> _Declared:
    layers = content["layers"]
    first = _part({"layer": layers[0]}, "layer") if layers else {}
    return _Declared(
        config_file=file,
        producer="ammo",
        decoder=_text(file, "layers[0].decoder_type", first.get("decoder_type")),
        num_layers=len(layers),
        num_kv_heads=_count(file, "layers[0].num_kv_heads", first.get("num_kv_heads") or None),
        head_dim=_count(file, "layers[0].attention_head_size", first.get("attention_head_size")),
        max_position_embeddings=_count(
            file, "layers[0].max_position_embeddings", first.get("max_position_embeddings") or None
        ),
        num_ranks=_parts(file, "tensor_parallel", content["tensor_parallel"]) or 1,
        num_stages=_parts(file, "pipeline_parallel", content.get("pipeline_parallel")) or 1,
        weights=str(content.get("quantization") or "none").lower(),
        kv_cache=_part(first, "attention").get("kv_cache_dtype"),
    )


def _from_tensorrt_llm(file: Path, content: JsonObject) -> _Declared:
    mapping = content["mapping"]
    quantization = _part(content, "quantization")
    producer = _part(content, "producer")
    producer_names = filter(None, (producer.get("name"), producer.get("version")))
    heads = content.get("num_key_value_heads") or content.get("num_attention_heads")
    return _Declared(
        config_file=file,
        producer=" ".join(map(str, producer_names)) or "tensorrt_llm",
        decoder=_text(file, "architecture", content["architecture"]),
        num_layers=_parts(file, "num_hidden_layers", content.get("num_hidden_layers") or 0) or 0,
        num_kv_heads=_count(file, "num_key_value_heads", heads),
        head_dim=_count(file, "head_size", content.get("head_size")),
        max_position_embeddings=_count(
            file, "max_position_embeddings", content.get("max_position_embeddings")
        ),
        num_ranks=_parts(file, "mapping.tp_size", mapping.get("tp_size", mapping.get("world_size")))
        or 1,
        num_stages=_parts(file, "mapping.pp_size", mapping.get("pp_size")) or 1,
        weights=str(quantization.get("quant_algo") or "none").lower(),
        kv_cache=quantization.get("kv_cache_quant_algo"),
    )


def _part(content: JsonObject, key: str) -> JsonObject:
    """Return the object under `key`; empty if there is none."""
    part = content.get(key)
    return part if isinstance(part, dict) else {}


def _text(file: Path, key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise CheckpointError(
            f"{file}: {key} is {value!r}, not the name of a decoder such as 'llama'"
        )
    return value


def _count(file: Path, key: str, value: object) -> int | None:
    if value is None:
        return None
    if not is_integer(value) or value < 1:
        raise CheckpointError(f"{file}: {key} is {shown(value)}, not a whole number of at least 1")
    return value


def _parts(file: Path, key: str, value: object) -> int | None:
    """Return a count of parts, for each of which something is read or kept."""
    count = _count(file, key, value)
    if count is not None and count > MOST_PARTS:
        raise CheckpointError(f"{file}: {key} = {shown(count)} must be at most {MOST_PARTS}")
    return count


def _read_scales(file: Path, header: Mapping[str, TensorEntry]) -> dict[int, tuple[str, float]]:
    """Read a rank's KV scales: (tensor name, value) by layer."""
    scales: dict[int, tuple[str, float]] = {}
    for name in sorted(header):
        match = _SCALE.search(name)
        if match is None:
            continue
        if math.prod(header[name].shape) != 1:
            raise CheckpointError(
                f"{file}: {name} has shape {list(header[name].shape)}; a scale has one number"
            )
        value = float(read_tensor(file, name).float().item())
        require_positive(f"{file}: {name}", value)
        scales[int(match[1])] = (name, value)
    return scales


def _joined(
    declared: _Declared, path: Path, ranks: Mapping[str, Mapping[int, tuple[str, float]]]
) -> KVScales:
    """Return the scales of all ranks together. `ranks`: those of each, by the name of its file.
    Raises CheckpointError, naming layer and file, where some are missing or contradict each other.
    """
    if not any(ranks.values()):
        return KVScales((None,) * declared.num_layers)
    algorithm = declared.kv_cache or declared.weights
    if str(algorithm).lower() != "fp8":
        raise CheckpointError(
            f"{declared.config_file}: the KV cache is {json.dumps(algorithm)}; only the scales of an FP8 cache "
            "can be used"
        )
    for layer in range(declared.num_layers):
        for file, scales in ranks.items():
            if layer not in scales:
                raise CheckpointError(
                    f"{path}: {file} has no kv_cache_scaling_factor of layer {layer}"
                )
    for number in chain.from_iterable(ranks.values()):
        if number >= declared.num_layers:
            raise CheckpointError(
                f"{path}: there is a KV scale of layer {number}, but {declared.num_layers} layers"
            )
    factors: dict[int, list[tuple[str, float]]] = {}
    for layer in range(declared.num_layers):
        factors[layer] = [scales[layer] for scales in ranks.values()]
    heads = declared.num_kv_heads
    if heads is None:
        for layer, scales_of_layer in factors.items():
            if len({scale for _, scale in scales_of_layer}) > 1:
                raise CheckpointError(
                    f"{declared.config_file}: the ranks differ in the KV scale of layer {layer}, but the number of KV "
                    "heads that they share is not there; copy the whole export"
                )
        heads = len(ranks)
    layers = join_ranks(path, factors, dict.fromkeys(factors, heads))
    return KVScales(tuple(layers.values()), Format.E4M3FN)


def sizes(export: RankExport) -> dict[str, int]:
    """Count the bytes by dtype over all ranks, largest first."""
    counted = Counter[str]()
    for header in export.entries:
        for entry in header.values():
            counted[entry.dtype_name] += entry.size
    return dict(counted.most_common())
