"""llm-compressor's interface to Freight's quantizer: a script that used `llmcompressor` runs with
its import changed.

    from freight.llm_compressor import QuantizationModifier, oneshot

    recipe = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])
    model = oneshot(model=DIR, dataset=texts, recipe=recipe, max_seq_length=2048, num_calibration_samples=512)
    model.save_pretrained(OUT)

The output is a compressed-tensors checkpoint. Its scales are llm-compressor's with the observer
`static_minmax`: the largest magnitude over all samples. Options that Freight does not implement are
refused by name before a weight is read. The first `num_calibration_samples` are used in their
order; llm-compressor shuffles.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from freight.base.fields import JsonObject
from freight.checkpoint.writer import require_new
from freight.errors import ConfigError, nearest, shown
from freight.quantizer.calibration import Calibration
from freight.quantizer.hub_data import hub_rows, is_hub_id
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modifier import (
    GPTQModifier,
    QuantizationArgs,
    QuantizationModifier,
    Recipe,
)
from freight.quantizer.modules import head_module, ignored_modules, kept_modules, linear_modules
from freight.quantizer.plan import (
    NUM_SAMPLES,
    ActivationScheme,
    Layout,
    QuantizePlan,
    Transform,
    plan,
)
from freight.quantizer.quantize import (
    NOTHING_CALIBRATED,
    QuantizeResult,
    Unquantized,
    load_samples,
    open_unquantized,
    require_blocks,
    require_other,
    run_of,
)
from freight.quantizer.quantize import write as write_checkpoint
from freight.quantizer.recipe import read_recipe
from freight.quantizer.report import Report, data_name
from freight.quantizer.transform_modifiers import (
    AWQModifier,
    SmoothQuantModifier,
    SpinQuantModifier,
)
from freight.quantizer.write import check_disk_space

__all__ = [
    "AWQModifier",
    "GPTQModifier",
    "OneshotModel",
    "QuantizationArgs",
    "QuantizationModifier",
    "SmoothQuantModifier",
    "SpinQuantModifier",
    "oneshot",
]

logger = logging.getLogger("freight")

# options of loading and calibration that have no counterpart here, or change no scale
_IGNORED = frozenset(
    """
    precision trust_remote_code_model tie_word_embeddings config_name clear_sparse_session batch_size
    shuffle_calibration_samples pad_to_max_length streaming overwrite_cache preprocessing_num_workers
    dataloader_num_workers min_tokens_per_module moe_calibrate_all_experts pipeline tracing_ignore sequential_targets
    sequential_offload_device sequential_prefetch quantization_aware_calibration enable_compile log_dir
    """.split()  # noqa: SIM905, a list would take a page
)
_REFUSED = {  # options that would change the scales or the output -> what to do instead
    "concatenate_data": "concatenate the samples before, and give them as the dataset",
    "data_collator": "apply it before, and give what it returns as the dataset",
    "dataset_config_name": "load the dataset with datasets.load_dataset, and give what it returns",
    "dataset_path": "give the path of a text or .jsonl file as the dataset",
    "processor": "tokenize before, and give a dataset with input_ids",
    "recipe_args": "write the values into the recipe",
    "stage": "give the recipe of that stage only",
    "oneshot_device": "the device is chosen by Freight",
}
_SAVE_IGNORED = frozenset(  # options of save_pretrained
    ("safe_serialization", "max_shard_size", "skip_sparsity_compression_stats", "is_main_process")
)


class OneshotModel:
    """A checkpoint that oneshot has quantized. Each save reads the weights and writes them quantized.

    `result` describes what the last save wrote; None before.
    """

    def __init__(
        self,
        opened: Unquantized,
        plan: QuantizePlan,
        ignored: tuple[str, ...],
        partly_kept: tuple[str, ...],
        calibration: Calibration,
        store: LayerStore | None = None,
        folder: TemporaryDirectory[str] | None = None,
        report: Report | None = None,
    ) -> None:
        """`store`: layers that are quantized already, in `folder`, which is removed with this.
        `report`: what is written beside a model that was quantized by data.
        """
        self._parts = opened, plan, ignored, partly_kept, calibration, store
        self._folder = folder
        self._report = report
        self.result: QuantizeResult | None = None

    def save_pretrained(
        self, save_directory: str | Path, save_compressed: bool = True, **options: object
    ) -> None:
        """Write the quantized checkpoint, tokenizer included, into a folder; parents are created.

        A folder that Freight wrote before is replaced; the folder that this object saved last is
        kept. Raises ConfigError for any other folder that exists, for `save_compressed=False`, and
        for an unknown option; CapacityError for a full disk.
        """
        for name, value in options.items():
            if name not in _SAVE_IGNORED and value:
                raise ConfigError(f"save_pretrained has no option {name!r} here; omit it")
        if not save_compressed:
            raise ConfigError(
                "save_compressed=False: Freight writes quantized weights only; omit it"
            )
        out = Path(save_directory).expanduser()
        if (
            self.result is not None
            and self.result.path.absolute() == out.absolute()
            and out.is_dir()
        ):
            return
        opened, plan, ignored, partly_kept, calibration, store = self._parts
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        require_new(out, overwrite=True)
        require_other(opened.checkpoint, out)
        check_disk_space(opened.checkpoint, out)
        self.result = write_checkpoint(
            opened,
            plan,
            ignored,
            partly_kept,
            calibration,
            out,
            overwrite=True,
            layers=store,
            report=self._report,
        )
        for warning in self.result.warnings:
            logger.warning("%s", warning)


def oneshot(
    model: object = None,
    *,
    dataset: object = None,
    recipe: object = None,
    max_seq_length: int | None = None,
    num_calibration_samples: int = NUM_SAMPLES,
    output_dir: str | Path | None = None,
    text_column: str = "text",
    splits: object = None,
    tokenizer: object = None,
    model_revision: str = "main",
    save_compressed: bool = True,
    **options: object,
) -> OneshotModel:
    """Quantize `model` according to `recipe`, and write it if there is an `output_dir`.

    model     a folder, a hub id, or a model of transformers that was loaded from one. The weights
              of a loaded model must be those of its folder. Its `save_pretrained` then writes the
              quantized checkpoint; its `generate` still computes in 16 bits
    recipe    YAML, the path of a YAML file, a modifier, or a list of these
    dataset   the path of a text or .jsonl file; a data set of the hub by `owner/name`; rows with
              `input_ids` (without padding marked by `attention_mask`), `text` (or `text_column`) or
              `messages`, from `datasets` or data loaders; or a list of texts or token ids.
              `splits` selects one of several parts, as in `train[:512]`
    max_seq_length   longest sample in tokens; default: the model's context

    Raises ConfigError for options that are unknown or not implemented, before a weight is read;
    CheckpointError if the model is at fault.
    """
    _check_options(options, save_compressed)
    _count("num_calibration_samples", num_calibration_samples)
    if max_seq_length is not None:
        _count("max_seq_length", max_seq_length)
    steps = read_recipe(recipe)
    name, revision = _source(model, model_revision, tokenizer)
    calibrated = steps.needs_data
    rows = None
    if dataset is not None and not calibrated:
        logger.warning("the recipe calibrates nothing, so the dataset is not read")
    elif dataset is not None:
        rows = _data(dataset, text_column, splits, num_calibration_samples)
    elif calibrated and name != "demo":
        raise ConfigError(
            "the recipe calibrates weights, static activations or a KV cache: give oneshot a dataset"
        )
    if output_dir is not None and Path(output_dir).expanduser().absolute().parent.is_dir():
        require_new(Path(output_dir).expanduser(), overwrite=True)
    opened = _open(name, revision, model, steps)
    if output_dir is not None:
        require_other(opened.checkpoint, Path(output_dir).expanduser())
    decided, ignored, partly_kept = _decide(steps, opened)
    require_blocks(opened.model, decided, ignored)
    length = max_seq_length or opened.model.max_position_embeddings
    decided = replace(decided, num_samples=num_calibration_samples, max_seq_len=length)
    calibration = NOTHING_CALIBRATED
    folder: TemporaryDirectory[str] | None = None
    store = None
    report = None
    if decided.method.transform is Transform.ROTATION:
        opened = opened.rotated()
    if calibrated:
        samples = load_samples(opened, decided, rows)
        if decided.method.needs_data:
            folder = TemporaryDirectory(prefix="freight-", dir=_beside(output_dir))
            run = run_of(opened, decided, samples, ignored)
            store = LayerStore(Path(folder.name) / "model", run)
        opened, calibration = opened.prepared(decided, samples, ignored, store=store)
        data = data_name(dataset or "calibration.txt")
        report = Report(opened.name, opened.model, decided, data, samples, calibration, store)
    quantized = OneshotModel(
        opened, decided, ignored, partly_kept, calibration, store, folder, report
    )
    if hasattr(model, "save_pretrained"):
        # as in llm-compressor: scripts save the model that they passed
        model.save_pretrained = quantized.save_pretrained
    if output_dir is not None:
        quantized.save_pretrained(output_dir)
    return quantized


def _beside(out: str | Path | None) -> Path | None:
    """Return the folder of the output, on whose disk layers have room; None: the default."""
    if out is None:
        return None
    parent = Path(out).expanduser().absolute().parent
    return parent if parent.is_dir() else None


def _check_options(options: JsonObject, save_compressed: bool) -> None:
    for name, value in options.items():
        if name in _IGNORED:
            continue
        if name not in _REFUSED:
            raise ConfigError(
                f"oneshot has no option {name!r}{nearest(name, (*_IGNORED, *_REFUSED))}"
            )
        harmless = value in (None, False) or (name == "data_collator" and isinstance(value, str))
        if not harmless:
            raise ConfigError(f"oneshot: {name} is not implemented; {_REFUSED[name]}")
    if not save_compressed:
        raise ConfigError(
            "oneshot: save_compressed=False: Freight writes quantized weights only; omit it"
        )


def _count(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} {shown(value)} must be an integer ≥ 1")
    return int(value)


def _source(model: object, model_revision: str, tokenizer: object) -> tuple[str, str | None]:
    """Return (folder or hub id, revision) of a model, loaded or not. Raises ConfigError for another
    tokenizer.
    """
    revision: str | None = model_revision
    if model_revision == "main":
        revision = None
    if isinstance(model, str | Path):
        name = str(model)
    else:
        config = getattr(model, "config", None)
        name = getattr(model, "name_or_path", None) or getattr(config, "_name_or_path", None) or ""
        if not name:
            raise ConfigError(
                f"the model is {shown(model)}, without a known folder; give the folder or hub id that it was loaded "
                "from, or save it first"
            )
        if not Path(name).is_dir():
            revision = getattr(config, "_commit_hash", None) or revision
    other = getattr(tokenizer, "name_or_path", tokenizer)
    if other is not None and str(other) != name:
        raise ConfigError(
            f"oneshot uses the tokenizer of the model, {name}, and was given that of {shown(str(other))}; tokenize "
            "before, and give a dataset with input_ids"
        )
    return name, revision


def _open(name: str, revision: str | None, model: object, recipe: Recipe) -> Unquantized:
    """Open the model in its quantized form. A loaded `model` is compared with its checkpoint first."""
    opened = open_unquantized(name, revision)
    _require_same_weights(model, opened)
    unquantized: list[str] = []
    with suppress(ConfigError):  # a target may name a module that only the quantized form has
        unquantized, _ = recipe.unquantized(linear_modules(opened.model))
    return opened.quantized_as(recipe.weights, Layout.COMPRESSED_TENSORS, unquantized)


def _decide(
    recipe: Recipe, opened: Unquantized
) -> tuple[QuantizePlan, tuple[str, ...], tuple[str, ...]]:
    """Return the plan, the modules that stay in 16 bits, and those that are only part of their
    merged group.
    """
    head = head_module(opened.model)
    linear = (*linear_modules(opened.model), head)
    always_kept = kept_modules(opened.model)
    other_parts = opened.modules_beside  # outside the text model
    unquantized, idle = recipe.unquantized((*linear, *always_kept, *other_parts))
    ignored = [name for name in unquantized if name not in set(other_parts)]
    refused = sorted({*always_kept} - {*ignored})  # the recipe would quantize these
    for pattern in idle:
        logger.warning("recipe: ignore %r matches no Linear module of the model", pattern)
    if refused:
        why = "routers, gates of shared experts and projections of the embedding are not quantized"
        logger.warning(
            "recipe: %s (%d modules in all) stay in 16 bits: %s", refused[0], len(refused), why
        )
    if other_parts and set(other_parts).isdisjoint(unquantized):
        logger.warning(
            "recipe: %s and others outside the text model are not quantized; they stay as stored",
            other_parts[0],
        )
    if all(name in ignored for name in linear) and recipe.kv is None:
        raise ConfigError(f"recipe: ignore leaves no module to quantize in {opened.name}")
    lm_head = head not in ignored
    why = ""
    if opened.model.tie_word_embeddings:
        why = "is the embedding, which stays in 16 bits"
    elif recipe.activations is ActivationScheme.STATIC:
        why = "is not calibrated"
    if lm_head and why:
        raise ConfigError(f"recipe: {head} would be quantized, but {why}; add 'lm_head' to ignore")
    decided = plan(recipe.args(lm_head=lm_head))
    if decided.weights == "none":
        ignored = []
    return decided, *ignored_modules(opened.model, ignored, lm_head)


def _data(
    dataset: object, text_column: str, splits: object, num_samples: int
) -> Path | list[object]:
    """Return a file, or the first samples: texts, lists of token ids, or {"messages": …}."""
    if isinstance(dataset, str | Path):
        if not is_hub_id(str(dataset)):
            return _file(dataset, text_column)
        name, stop = _part(splits)
        source = str(dataset)
        if name:
            source += f":{name}"
        dataset = hub_rows(f"dataset {dataset}", source)
    else:
        dataset, stop = _split(dataset, splits)
    if isinstance(dataset, Mapping):  # a batch, as a tokenizer returns it
        dataset = [dataset]
    columns = getattr(dataset, "column_names", None)
    if columns is not None:
        _column(columns, text_column)
    if not isinstance(dataset, Iterable):
        raise ConfigError(
            f"the dataset is {shown(dataset)}; give a path, a list, or an object of datasets"
        )
    rows = list(islice(_rows(islice(dataset, *stop), text_column), num_samples))
    if not rows:
        raise ConfigError("the dataset is empty; give text")
    return rows


def _file(dataset: str | Path, text_column: str) -> Path:
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"dataset {shown(str(dataset))} is not a file; a data set of the hub is named with its owner, as in "
            "HuggingFaceH4/ultrachat_200k"
        )
    if path.suffix in (".json", ".csv", ".parquet", ".arrow") or text_column != "text":
        raise ConfigError(
            f"dataset {path}: give text, or .jsonl with `text`, `messages` or `input_ids` in each line; for other "
            "files and columns give what datasets.load_dataset returns"
        )
    return path


def _part(splits: object) -> tuple[str | None, tuple[int | None, int | None]]:
    """Parse `train[:512]` as (the part's name, (its first row, one after its last)); (None, all
    rows) without splits.
    """
    if isinstance(splits, Mapping):
        splits = splits.get("calibration")
    if isinstance(splits, list | tuple):
        splits = next(iter(splits), None)
    if splits is None:
        return None, (0, None)
    match = re.fullmatch(r"(\w+)(?:\[(\d*):(\d*)\])?", str(splits))
    if match is None:
        raise ConfigError(
            f"splits {shown(splits)} names no part of the dataset; write it as train[:512]"
        )
    return match[1], (_bound(match[2]), _bound(match[3]))


def _bound(digits: str | None) -> int | None:
    if not digits:
        return None
    return int(digits)


def _split(dataset: object, splits: object) -> tuple[object, tuple[int | None, int | None]]:
    """Return (the part of `dataset` that `splits` names, (its first row, one after its last))."""
    name, rows = _part(splits)
    if not isinstance(dataset, Mapping) or "input_ids" in dataset:
        if name is None:
            return dataset, rows
        raise ConfigError(
            f"splits {name!r} names no part of the dataset, which has one part only; omit splits"
        )
    name = name or "train"
    if name not in dataset:
        raise ConfigError(
            f"splits {name!r} names no part of the dataset; it has {', '.join(map(str, dataset))}"
        )
    return dataset[name], rows


def _column(columns: Iterable[str], text_column: str) -> str:
    """Return the column to calibrate with. Raises ConfigError if there is none."""
    columns = list(columns)
    for name in ("input_ids", text_column, "messages"):
        if name in columns:
            return name
    raise ConfigError(
        f"the dataset has no text: its columns are {', '.join(map(str, columns)) or 'none'}; name one with "
        "text_column=, or map it to `text`, `messages` or `input_ids`"
    )


def _rows(dataset: Iterable[object], text_column: str) -> Iterator[object]:
    for number, row in enumerate(dataset):
        if not isinstance(row, Mapping):
            yield _list(row)
            continue
        column = _column(row, text_column)
        if column == "input_ids":
            yield from _unpadded(row)
        elif column == "messages" and column != text_column:
            yield {"messages": row[column]}
        elif isinstance(row[column], str):
            yield row[column]
        else:
            raise ConfigError(
                f"dataset, row {number}: {column} is {shown(row[column])}, not a text"
            )


def _unpadded(row: JsonObject) -> Iterator[list[int]]:
    """Yield the token ids of a row, or of each row of a batch, without those that its attention
    mask marks as padding.
    """
    ids = _list(row["input_ids"])
    mask = _list(row.get("attention_mask"))
    is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    if not is_batch:
        ids = [ids]
        mask = mask and [mask]
    for number, tokens in enumerate(ids):
        mask_row = mask and mask[number]
        if mask_row is not None and len(mask_row) != len(tokens):
            raise ConfigError(
                f"dataset: attention_mask has {len(mask_row)} values for {len(tokens)} input_ids"
            )
        if mask_row is not None:
            tokens = [token for token, is_token in zip(tokens, mask_row, strict=True) if is_token]
        yield tokens


def _list(values: object) -> Any:
    """Return a tensor or an array as lists; other values unchanged."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return values


def _require_same_weights(model: object, opened: Unquantized) -> None:
    """Raise ConfigError if a loaded model has other weights than its folder: those of the folder
    would be quantized.
    """
    for name, parameter in getattr(model, "named_parameters", dict)() or ():
        if name not in opened.checkpoint.names or parameter.is_meta:
            continue
        stored = opened.checkpoint.take(name, tuple(parameter.shape))
        if not torch.equal(stored.to(parameter.dtype), parameter.detach().cpu()):
            raise ConfigError(
                f"{name} of the loaded model differs from {opened.name}, whose weights would be quantized; save the "
                "model first, and give that folder"
            )
