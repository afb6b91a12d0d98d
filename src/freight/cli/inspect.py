"""freight inspect MODEL: what a checkpoint is, from its headers and its KV scales; no weight is
read.

Also works on checkpoints that Freight cannot load, exports for TensorRT-LLM among them, and on a
config.json alone: it says whether the model runs natively, through transformers, or which key
stands in the way.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freight.base import terminal
from freight.base.fields import JsonObject
from freight.cli.picture import check_picture, write_picture
from freight.errors import CheckpointError, ConfigError, legible, listed
from freight.model.config.model import UnreadKeys

if TYPE_CHECKING:
    from freight.checkpoint.reader import Checkpoint
    from freight.fp8.formats import Format
    from freight.fp8.scheme import KVScales, LayerScales, Scheme
    from freight.model.config.model import ModelConfig

_NOT_PARAMETERS = (
    "scale",
    "scale_inv",
    "scale_ub",
    "zero_point",
    "inv_freq",
    "qscale_act",
    "qscale_weight",
    "_scales",
    "scales",  # GPTQ's and AWQ's
    "scale_2",
    "global_scale",
    "qzeros",
    "g_idx",
    "weight_shape",
)


_NO_MATRICES: JsonObject = {"fp8_weights": {}, "four_bit_weights": {}}


def inspect(
    model: str,
    as_json: bool,
    picture: Path | None = None,
    revision: str | None = None,
    ignore_keys: Collection[str] = (),
) -> None:
    """Print what `model` is, as a table or as one JSON object; draw its KV scales into `picture`.

    Raises CheckpointError, and ConfigError for a picture that cannot be made.
    """
    check_picture(picture)
    facts = describe(model, revision, ignore_keys)
    svg = None if picture is None else _drawn(facts, picture)
    if as_json:
        print(json.dumps(facts, indent=2), flush=True)
    else:
        _print_table(facts)
    if picture is not None and svg is not None:
        write_picture(picture, svg)


def _drawn(facts: JsonObject, picture: Path) -> str:
    """Return the SVG of the KV scales. Raises ConfigError where there are none."""
    from freight.lab.evaluate.scale_picture import scale_picture

    scales = facts["kv_cache"]["scales"]
    if not any(entry["k"] for entry in scales):
        raise ConfigError(f"--picture {picture}: {facts['model']} has no KV scales to draw")
    return scale_picture(facts["model"], facts["kv_cache"]["scales_format"], scales)


def describe(
    model: str, revision: str | None = None, ignore_keys: Collection[str] = ()
) -> JsonObject:
    """Return the JSON object of `freight inspect --json`. `revision` is a hub model's branch, tag
    or commit; `ignore_keys` of config.json are read over.

    model, path, architecture, model_type, num_layers, num_parameters, max_position_embeddings;
    dtype, of the weights that are not quantized, and dtype_source: where it was found
    (`DtypeSource`); runs: 'natively', 'through transformers' (docs/add-a-model.md), or null for
    what Freight cannot run; obstacle: why it cannot, or null; pooling: what is made of
    the states of a prompt, or null where nothing is declared or there are no weights; predicting: {layers,
    bytes, drafts} of the layers that predict further tokens, where they are known and stored, and whether
    they can draft for this model; unread_keys:
    {unknown, harmless, ignored}, lists of keys of config.json that decide nothing; bytes: {dtype: count}; skipped:
    {reason: number of tensors that the text model does not need}; scheme: {method, weight_format,
    kv_format, kv_static, description, fp8_weights, four_bit_weights}, where fp8_weights has the
    number of matrices stored in FP8 or INT8 by what is declared of them, {"scales per tensor,
    activations static": 14}, and four_bit_weights that of matrices in 4 bits, but for gpt-oss's
    experts;
    kv_cache: {scales_format, scales_format_assumed, scales, faults}. scales_format_assumed says that
    nothing declares the format; faults are sentences about stored scales that cannot be used; scales
    has an entry per layer, {layer, k, v}, and is empty when
    there are none. k and v are null, or {granularity, min, max, value, centered, names}; an entry
    of a layer without keys and values, which needs no scale, has `stores_keys`, false; where a
    checkpoint chooses by layer (`freight quantize --kv-budget`), an entry also has `dtype`
    (scales_format or '16 bits') and `granularity`; `value` is there for granularity 'tensor', and
    `centered`, whether a mean was subtracted, for k. An export of AMMO or ModelOpt for TensorRT-LLM
    has the same keys; num_parameters is null there, because ranks share some of them. So has a
    config.json, or a folder with nothing else, where num_parameters is null and bytes is
    empty; and a model that cannot be run, where what config.json does not say is null and KV scales
    are not read.
    """
    from freight.checkpoint.config_only import gguf_model, read_config_only, tensors_dtype
    from freight.checkpoint.gguf.reader import GGUFCheckpoint
    from freight.checkpoint.kv_scales import read_kv_scales
    from freight.checkpoint.linears import dense_scheme
    from freight.checkpoint.open import open_files, scheme_of
    from freight.checkpoint.rank_export import is_rank_export
    from freight.checkpoint.reader import resolve_model
    from freight.model.architectures import skipped_parts
    from freight.model.stored import with_stored_head

    path = Path(model).expanduser()
    checkpoint: Checkpoint | None = None
    tensors: Collection[str] = ()
    if _is_config_alone(path):
        config, hf_quant_config = read_config_only(model, revision)
        stored = tensors_dtype(model, config, revision)
    elif _is_gguf_on_hub(model):
        header = gguf_model(model, revision)
        assert header is not None
        path = Path(model)
        checkpoint = GGUFCheckpoint(path, header)
    else:
        path = resolve_model(model, revision)
        if is_rank_export(path):
            return _describe_rank_export(model, path)
        checkpoint = open_files(path)
    if checkpoint is not None:
        config = checkpoint.config
        hf_quant_config = checkpoint.hf_quant_config
        tensors = checkpoint.names
        stored = checkpoint.stored_format
    architecture, native, scheme = _read(config, hf_quant_config, tensors, stored, ignore_keys)
    if checkpoint is not None and native is not None:
        scheme = scheme_of(checkpoint)
    kv_cache = _kv_cache(None)
    sizes: JsonObject = {"num_parameters": None, "bytes": {}}
    skipped: JsonObject = {}
    matrices = _NO_MATRICES
    if checkpoint is not None:
        if native is not None:
            native = with_stored_head(checkpoint, native)
            scheme = dense_scheme(checkpoint, scheme)
            scales = read_kv_scales(checkpoint, native, scheme)
            kv_cache = _kv_cache(scales, native.without_pages)
            architecture, pooled = _pooling(checkpoint, native, architecture)
            architecture = {**architecture, "predicting": _predicting(checkpoint, native)}
            skipped = skipped_parts(native, checkpoint.names - pooled)
        sizes = _sizes(checkpoint)
        matrices = _matrices(checkpoint, scheme)
    return {
        "model": model,
        "path": str(path),
        **architecture,
        **sizes,
        "skipped": skipped,
        "scheme": {**_scheme(scheme), **matrices},
        **kv_cache,
    }


def _pooling(
    checkpoint: Checkpoint, model: ModelConfig, architecture: JsonObject
) -> tuple[JsonObject, frozenset[str]]:
    """Return `architecture` with what the folder declares about pooling, which may stand in the way,
    and the tensors of the layers after it.
    """
    from freight.model.open import describe_pooling, with_pooling
    from freight.model.shapes import pooling_shapes

    try:
        pooling = with_pooling(checkpoint, model, "auto").pooling
    except (CheckpointError, ConfigError) as error:
        obstacle = " ".join(str(error).split())
        return {**architecture, "runs": None, "obstacle": obstacle}, frozenset()
    if pooling is None:
        return architecture, frozenset()
    described = {**architecture, "pooling": describe_pooling(pooling)}
    return described, frozenset(pooling_shapes(pooling))


def _predicting(checkpoint: Checkpoint, model: ModelConfig) -> JsonObject | None:
    """Return what there is of layers that predict further tokens; None without any that are known."""
    from freight.model.config.predicting import published_predicting

    published = published_predicting(model, checkpoint.names)
    if published is None:
        return None
    roots = published.prefixes
    if published.form.outside is not None:
        roots += (published.form.outside,)
    size = 0
    for name in checkpoint.names:
        if name.startswith(roots):
            size += checkpoint.entry(name).size
    return {"layers": len(published.prefixes), "bytes": size}


def _is_gguf_on_hub(model: str) -> bool:
    """Return whether `model` names a GGUF file of the hub, OWNER/NAME:FILE."""
    from freight.checkpoint.gguf.ollama import PREFIX

    repository, _, file = model.partition(":")
    is_local = model.startswith(PREFIX) or Path(repository).exists() or Path(model).exists()
    return bool(file) and not is_local and repository.count("/") <= 1


def _is_config_alone(path: Path) -> bool:
    from freight.checkpoint.gguf.places import is_gguf

    if not path.is_dir():
        return path.is_file() and not is_gguf(path)
    for file in path.iterdir():
        if file.name.endswith((".safetensors", ".index.json", ".bin", ".pt", ".pth", ".npz")):
            return False
    return (path / "config.json").is_file()


def _read(
    config: JsonObject,
    hf_quant_config: JsonObject | None,
    tensors: Collection[str],
    stored: Format | None,
    ignore_keys: Collection[str],
) -> tuple[JsonObject, ModelConfig | None, Scheme]:
    """Return what a config.json describes: (its facts, the model that runs or None, the declared
    scheme or an empty one).
    """
    from freight.checkpoint.layouts import read_scheme
    from freight.fp8.scheme import Scheme
    from freight.model.open import read_model_config
    from freight.settings.resolve import check_stored_weights

    try:
        scheme = read_scheme(config, hf_quant_config)
        model = read_model_config(config, tensors, stored, ignore_keys)
    except CheckpointError as error:
        return _blocked(config, str(error), stored), None, Scheme()
    try:
        check_stored_weights(model, scheme)
    except ConfigError as error:
        return _blocked(config, str(error), stored), None, scheme
    return _architecture(model), model, scheme


def _blocked(config: JsonObject, obstacle: str, stored: Format | None) -> JsonObject:
    from freight.model.config.dtype import checkpoint_dtype

    try:
        dtype, source = checkpoint_dtype(config, stored)
    except CheckpointError:  # it may be the obstacle
        dtype = None
        source = None
    inner = config
    text = config.get("text_config", config.get("llm_config"))
    if isinstance(text, dict):
        inner = {**config, **text}
    architecture = None
    names = config.get("architectures")
    if isinstance(names, list) and names:
        architecture = names[0]
    return {
        "architecture": architecture,
        "model_type": config.get("model_type"),
        "dtype": dtype,
        "dtype_source": source,
        "num_layers": inner.get("num_hidden_layers"),
        "max_position_embeddings": inner.get("max_position_embeddings"),
        "runs": None,
        "obstacle": " ".join(obstacle.split()),
        "pooling": None,
        "predicting": None,
        "unread_keys": asdict(UnreadKeys()),
    }


def _scheme(scheme: Scheme) -> JsonObject:
    return {
        "method": scheme.method,
        "weight_format": scheme.weight_format,
        "kv_format": scheme.kv_format,
        "kv_static": scheme.kv_static,
        "description": scheme.description,
    }


def _kv_cache(scales: KVScales | None, without_keys: Collection[int] = ()) -> JsonObject:
    facts: dict[str, object] = {
        "scales_format": None,
        "scales_format_assumed": scales is not None and scales.format_assumed,
        "scales": [],
        "faults": [],
    }
    if scales is not None and not scales.empty:
        facts["scales_format"] = scales.format
        facts["scales"] = _scales(scales, without_keys)
        facts["faults"] = [fault.what for fault in scales.faults]
    return {"kv_cache": facts}


def _describe_rank_export(model: str, path: Path) -> JsonObject:
    from freight.checkpoint.rank_export import read_rank_export, sizes
    from freight.fp8.formats import Format

    export = read_rank_export(path)
    scales = export.scales
    return {
        "model": model,
        "path": str(path),
        "architecture": export.decoder,
        "model_type": export.model_types[0],
        "dtype": None,
        "dtype_source": None,
        "num_layers": export.num_layers,
        "max_position_embeddings": export.max_position_embeddings,
        "runs": None,
        "pooling": None,
        "predicting": None,
        "unread_keys": asdict(UnreadKeys()),
        "obstacle": "an export for TensorRT-LLM: its KV scales can be read",
        "num_parameters": None,
        "bytes": sizes(export),
        "skipped": {},
        "scheme": {
            "method": export.producer,
            "weight_format": Format.E4M3FN if export.weights == "fp8" else None,
            "kv_format": None if scales.empty else scales.format,
            "kv_static": not scales.empty,
            "description": export.description,
            **_NO_MATRICES,
        },
        **_kv_cache(scales),
    }


def _architecture(config: ModelConfig) -> JsonObject:
    return {
        "architecture": config.architecture,
        "model_type": config.model_type,
        "dtype": config.checkpoint_format,
        "dtype_source": config.dtype_source,
        "num_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "runs": "natively" if config.foreign is None else "through transformers",
        "obstacle": None,
        "pooling": None,
        "predicting": None,
        "unread_keys": asdict(config.unread_keys),
    }


def _sizes(checkpoint: Checkpoint) -> JsonObject:
    """Parameters (scales and buffers are none) and bytes by dtype, from the headers."""
    parameters = 0
    sizes = Counter[str]()
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        sizes[entry.dtype_name] += entry.size
        if not name.endswith(_NOT_PARAMETERS):
            parameters += math.prod(entry.shape) * _codes_of_a_number(name, entry.dtype)
    return {"num_parameters": parameters, "bytes": dict(sizes.most_common())}


def _codes_of_a_number(name: str, dtype: str) -> int:
    """Return how many parameters a number of a tensor holds: in 4 bits, two to a byte."""
    if dtype == "I32" and name.endswith((".qweight", ".weight_packed")):
        return 8
    if name.endswith((".qweight", ".weight_packed", "_blocks")):
        return 2
    return 2 if dtype == "U8" and name.endswith(".weight") else 1


def _matrices(checkpoint: Checkpoint, scheme: Scheme) -> JsonObject:
    """Matrices in FP8 and INT8, and those in 4 bits, by what is declared of them, from the headers."""
    from freight.checkpoint.linears import WEIGHTS

    eight = Counter[str]()
    four = Counter[str]()
    for name in checkpoint.names:
        entry = checkpoint.entry(name)
        declared = scheme.linear(checkpoint.declared_module(name))
        in_four_bits = declared is not None and declared.four is not None
        in_bytes = name.rpartition(".")[2] in WEIGHTS and entry.dtype_name.startswith(
            ("fp8", "int8")
        )
        if in_bytes and not in_four_bits:
            eight[str(declared or "not declared")] += 1
        if in_four_bits and (in_bytes or _codes_of_a_number(name, entry.dtype) > 1):
            four[str(declared)] += 1
    return {"fp8_weights": dict(eight.most_common()), "four_bit_weights": dict(four.most_common())}


def _scales(scales: KVScales, without_keys: Collection[int]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for index, layer in enumerate(scales.layers):
        entries.append({"layer": index, "k": _side(layer, "k"), "v": _side(layer, "v")})
    for index in without_keys:
        entries[index]["stores_keys"] = False
    # empty unless layers differ
    for entry, granularity in zip(entries, scales.mixed, strict=False):
        entry["dtype"] = scales.format if granularity else "16 bits"
        entry["granularity"] = granularity
    return entries


def _side(layer: LayerScales | None, side: str) -> JsonObject | None:
    from freight.checkpoint.kv_scales import parse_scale_name

    if layer is None:
        return None
    values = layer.k if side == "k" else layer.v
    names = []
    for name in layer.names:
        _, sides = parse_scale_name(name) or (0, "kv")
        if side in sides:
            names.append(name)
    facts: dict[str, Any] = {
        "granularity": layer.granularity,
        "min": min(values),
        "max": max(values),
    }
    if len(values) == 1:
        facts["value"] = values[0]
    if side == "k":
        facts["centered"] = bool(layer.k_center)
    facts["names"] = names or list(layer.names)
    return facts


def _print_table(facts: JsonObject) -> None:
    from rich.table import Table

    console = terminal.console()
    table = Table.grid(padding=(0, 2))
    sizes = ", ".join(f"{_size(count)} {dtype}" for dtype, count in facts["bytes"].items())
    scheme = facts["scheme"]
    matrices = _counted(scheme["fp8_weights"])
    packed = _counted(scheme["four_bit_weights"])
    stored = "INT8" if scheme["weight_format"] == "int8" else "FP8"
    rows = [
        ("model", facts["path"]),
        (
            "architecture",
            f"{facts['architecture'] or 'unknown'}, {facts['num_layers'] or 'unknown'} layers",
        ),
        ("runs", _runs(facts)),
        ("parameters", _or_unknown(facts["num_parameters"], lambda n: f"{n / 1e6:,.1f} M")),
        ("dtype", _dtype(facts)),
        ("context", _or_unknown(facts["max_position_embeddings"], lambda n: f"{n:,} tokens")),
        ("weights", sizes or "none: a config.json alone"),
        ("declared scheme", scheme["description"]),
    ]
    if facts["pooling"]:
        rows.insert(3, ("pooling", facts["pooling"]))
    if matrices or not packed:
        rows.append((f"{stored} matrices", matrices or "none"))
    if packed:
        rows.append(("4-bit matrices", packed))
    if facts["predicting"]:
        rows.append(("predicts", _predicts(facts["predicting"])))
    rows.append(("KV scales", _made_for(facts["kv_cache"])))
    rows += [("", f"cannot be used: {what}") for what in facts["kv_cache"]["faults"][:3]]
    for kind, keys in facts["unread_keys"].items():
        if keys:
            rows.append(("not read", f"{listed(keys)} ({kind})"))
    rows += [("skipped", f"{n} tensors {reason}") for reason, n in facts["skipped"].items()]
    for label, value in rows:
        table.add_row(label, legible(value))
    console.print(table)
    if facts["kv_cache"]["scales"]:
        console.print(_scale_table(facts["kv_cache"]["scales"]))


def _counted(kinds: JsonObject) -> str:
    return "; ".join(f"{count}: {kind}" for kind, count in kinds.items())


def _predicts(predicting: JsonObject) -> str:
    count = predicting["layers"]
    layers = "1 layer predicts" if count == 1 else f"{count} layers predict"
    line = f"{layers} further tokens, {_size(predicting['bytes'])}: "
    first = "" if count == 1 else "the first of them "
    return f"{line}{first}drafts on a CPU with --speculate auto"


def _runs(facts: JsonObject) -> str:
    """Say how the model runs: INT8 and 4 bits but MXFP4 on CPUs alone."""
    if facts["runs"] is None:
        return f"no: {facts['obstacle']}"
    scheme = facts["scheme"]
    has_groups = any(not kind.startswith("MXFP4") for kind in scheme["four_bit_weights"])
    if has_groups or scheme["weight_format"] == "int8":
        return f"{facts['runs']}, on CPUs: GPUs refuse the weights"
    return str(facts["runs"])


def _dtype(facts: JsonObject) -> str:
    from freight.model.config.dtype import describe_dtype

    if facts["dtype"] is None:
        return "unknown"
    return describe_dtype(facts["dtype"], facts["dtype_source"])


def _or_unknown(value: int | None, write: Callable[[int], str]) -> str:
    return "unknown" if value is None else write(value)


def _made_for(kv_cache: JsonObject) -> str:
    if not kv_cache["scales"]:
        return "none"
    chosen = [entry for entry in kv_cache["scales"] if "granularity" in entry]
    if chosen:
        fp8 = sum(entry["granularity"] is not None for entry in chosen)
        return f"made for {kv_cache['scales_format']}, by layer: {fp8} in FP8, {len(chosen) - fp8} in 16 bits"
    line = f"made for {kv_cache['scales_format']}"
    if kv_cache["scales_format_assumed"]:
        line += ", assumed: config.json has no kv_cache_torch_dtype to declare it"
    return line


def _size(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB" if count >= 2**20 / 100 else f"{count:,} bytes"


def _scale_table(layers: list[JsonObject]) -> Any:
    from rich.table import Table

    table = Table("layer", "granularity", "k scale", "v scale")
    table.add_column("tensors", overflow="fold")
    for entry in layers:
        k = entry["k"]
        v = entry["v"]
        if k is None:
            granularity, what = _without_scales(entry)
            table.add_row(
                str(entry["layer"]), granularity, what, what.replace("keys", "values"), ""
            )
            continue
        names = []
        for name in dict.fromkeys(k["names"] + v["names"]):
            names.append(name.rpartition(f".{entry['layer']}.")[2])
        layer = str(entry["layer"])
        table.add_row(layer, k["granularity"], _range(k), _range(v), "\n".join(names))
    return table


def _without_scales(entry: JsonObject) -> tuple[str, str]:
    """Return the granularity of a layer for which no scale is stored, and why none is."""
    if not entry.get("stores_keys", True):
        return "", "no keys"
    if "granularity" not in entry:
        return "", "missing"
    if entry["granularity"]:
        return entry["granularity"], "measured as stored"
    return "", "16 bits"


def _range(side: JsonObject) -> str:
    centered = ", centered" if side.get("centered") else ""
    if side["min"] == side["max"]:
        return f"{side['min']:.6g}{centered}"
    return f"{side['min']:.6g} … {side['max']:.6g}{centered}"
