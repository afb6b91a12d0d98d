"""LoRA adapters as PEFT writes them, read as changes of the base model's tensors.

    W' = W + scaling * B @ A        scaling = alpha / r, or alpha / sqrt(r) with use_rslora
    W' = m * (W + scaling * B @ A) / |W + scaling * B @ A|     by output row, with use_dora

A [r, inputs], B [outputs, r], m [outputs]; for an embedding A [r, rows], B [width, r]. The files
are adapter_config.json and adapter_model.safetensors. Anything else that the config declares is
refused: an adapter merged without it would compute something else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from freight.base.fields import JsonObject
from freight.base.patterns import MOST_EXPRESSIONS, FilePattern
from freight.checkpoint.headers import Shape, read_header
from freight.checkpoint.reader import read_json, read_tensor, resolve_model
from freight.errors import CheckpointError, ConfigError, shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"}
_READ |= {"init_lora_weights", "ensure_weight_tying"}
_NO_EFFECT = {  # on a trained adapter: they decide what is trained, and how
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "peft_version",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "bias",
    "lora_dropout",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "kasa_config",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
    "monteclora_config",
    "velora_config",
}
# Values of init_lora_weights that leave the base model's weights unchanged
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
_WAY_OUT = "merge it with peft's merge_and_unload"
_PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
}


@dataclass
class Change:
    """The change of one module's weight, as names of tensors in the adapter's file.

    replacement  the tensor that replaces the weight, before the rest is added
    """

    scaling: float = 0.0
    is_embedding: bool = False
    replacement: str | None = None
    parts: dict[str, str] = field(default_factory=dict)  # a, b, magnitude


class Adapter:
    """An opened adapter. `changes`: by the name of the base model's tensor, as transformers calls
    it.
    """

    def __init__(self, name: str) -> None:
        """Open `name`, a folder or a hub id. Raises CheckpointError for a damaged adapter,
        ConfigError for one that is not merged here.
        """
        self.path = resolve_model(name, fetched=(CONFIG, "adapter_model.*"))
        config = read_json(self.path / CONFIG)
        if config is None:
            raise CheckpointError(f"{self.path} has no {CONFIG}, so it is not a PEFT adapter")
        if not (self.path / WEIGHTS).is_file():
            hint = ""
            if (self.path / "adapter_model.bin").is_file():
                hint = "; load adapter_model.bin with peft and save it again, as safetensors"
            raise CheckpointError(f"{self.path} has no {WEIGHTS}{hint}")
        _check_config(self.path / CONFIG, config)
        self.ties_weights = config.get("ensure_weight_tying") is True
        self._file = self.path / WEIGHTS
        self._entries = read_header(self._file)
        self._ranks = _Numbers(config, "rank_pattern", "r")
        self._alphas = _Numbers(config, "alpha_pattern", "lora_alpha")
        self._is_rank_stabilized = bool(config.get("use_rslora"))
        self.changes = self._changes(bool(config.get("use_dora")))

    def merged(self, change: Change, weight: Tensor) -> Tensor:
        """Return `weight` [outputs, inputs] with the change, computed in float32 and rounded once
        to `weight`'s dtype.
        """
        if change.replacement is not None:
            weight = self._read(change.replacement).to(weight.dtype)
        if not change.parts:
            return weight
        a = self._read(change.parts["a"]).float()
        b = self._read(change.parts["b"]).float()
        added = (b @ a).mul_(change.scaling)
        if change.is_embedding:
            added = added.T
        total = added + weight.float()
        if "magnitude" in change.parts:
            magnitude = self._read(change.parts["magnitude"]).float().view(-1)
            total *= (magnitude / torch.linalg.norm(total, dim=1)).view(-1, 1)
        rounded = total.to(weight.dtype)  # float16 ends at 65,504
        if not rounded.isfinite().all():
            raise CheckpointError(
                f"{self._file}: with {shown(change.parts['b'])} the weight is not finite in {weight.dtype}"
            )
        return rounded

    def check(self, name: str, change: Change, shape: Shape) -> None:
        """Raise CheckpointError unless `change` fits the tensor `name` of the base model, of
        `shape`.
        """
        added = self._shape(change)
        if added is not None and added != shape:
            hint = ""
            if added[1:] == shape[1:] and name.endswith(("embed_tokens.weight", "lm_head.weight")):
                hint = ". Its vocabulary was extended: merge it with peft"
            raise CheckpointError(
                f"{self._file} has {list(added)} for {name}, which is {list(shape)} in the base model: they do not "
                f"belong together{hint}"
            )
        if change.replacement is None:
            return
        stored = self._entries[change.replacement].shape
        if stored != shape:
            raise CheckpointError(
                f"{self._file}: {shown(change.replacement)} is {list(stored)}, and {name} of the base model "
                f"{list(shape)}: the vocabulary was extended, which is not merged here; {_WAY_OUT}"
            )

    def _shape(self, change: Change) -> Shape | None:
        """Return the shape of the addition, [outputs, inputs]; None if nothing is added."""
        if not change.parts:
            return None
        inputs = self._entries[change.parts["a"]].shape[1]
        outputs = self._entries[change.parts["b"]].shape[0]
        return (inputs, outputs) if change.is_embedding else (outputs, inputs)

    def _scaling(self, module: str) -> float:
        rank = self._ranks.of(module)
        if self._is_rank_stabilized:
            rank = math.sqrt(rank)
        return self._alphas.of(module) / rank

    def _changes(self, has_magnitudes: bool) -> dict[str, Change]:
        changes: dict[str, Change] = {}
        for name in self._entries:
            if not name.startswith(_PREFIX):
                raise CheckpointError(
                    f"{self._file}: {shown(name)} does not begin with {_PREFIX}, as PEFT's tensors do"
                )
            module = name.removeprefix(_PREFIX)
            suffix = next((suffix for suffix in _PARTS if module.endswith(suffix)), "")
            if suffix:
                module = module.removesuffix(suffix)
                change = changes.setdefault(f"{module}.weight", Change())
                change.parts[_PARTS[suffix]] = name
                change.is_embedding = change.is_embedding or "embedding" in suffix
                change.scaling = self._scaling(module)
            elif ".lora_" in module:
                raise ConfigError(
                    f"{self._file}: {shown(name)} is not merged here (lora_bias, target_parameters); {_WAY_OUT}"
                )
            else:
                changes.setdefault(module.replace(".base_layer.", "."), Change()).replacement = name
        for tensor, change in changes.items():
            self._check_parts(has_magnitudes, tensor, change)
        if not changes:
            raise CheckpointError(f"{self._file} has no tensor")
        return changes

    def _check_parts(self, has_magnitudes: bool, tensor: str, change: Change) -> None:
        shapes = {part: self._entries[name].shape for part, name in change.parts.items()}
        if not shapes:
            return
        needed = {"a", "b", "magnitude"} if has_magnitudes else {"a", "b"}
        if shapes.keys() != needed:
            raise CheckpointError(
                f"{self._file}: it has only {', '.join(change.parts)} of the parts of the change of {shown(tensor)}"
            )
        if has_magnitudes and change.is_embedding:
            raise ConfigError(
                f"{self._file}: DoRA of the embedding {shown(tensor)} is not merged here; {_WAY_OUT}"
            )
        rank = self._ranks.of(tensor.removesuffix(".weight"))
        a = shapes["a"]
        b = shapes["b"]
        fits = len(a) == len(b) == 2 and a[0] == b[1] == rank
        if not fits or (has_magnitudes and math.prod(shapes["magnitude"]) != b[0]):
            raise CheckpointError(
                f"{self._file}: what is added to {shown(tensor)} is {list(b)} by {list(a)}, and {CONFIG} has rank "
                f"{rank:g}"
            )

    def _read(self, name: str) -> Tensor:
        tensor = read_tensor(self._file, name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{self._file}: {shown(name)} is {tensor.dtype}; an adapter has 16 or 32 bits"
            )
        return tensor


def _check_config(file: Path, config: JsonObject) -> None:
    """Raise ConfigError for what is declared and not merged here."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"{file}: peft_type is {shown(kind)}; only LORA is merged here, {_WAY_OUT}"
        )
    initial = config.get("init_lora_weights")
    if not isinstance(initial, str | bool | None) or initial not in _INITIAL:
        raise ConfigError(
            f"{file}: init_lora_weights is {shown(initial)}, which changes the base model as well; {_WAY_OUT}"
        )
    for key, value in config.items():
        if key in _READ | _NO_EFFECT or key.startswith("_"):
            continue
        if value not in (None, False, 0, {}, [], ""):
            raise ConfigError(
                f"{file}: {key} is {shown(value)}, which is not merged here; {_WAY_OUT}"
            )


class _Numbers:
    """A number for each module: `rank_pattern` or `alpha_pattern`, and the number of the others."""

    def __init__(self, config: JsonObject, patterns: str, default: str) -> None:
        """Read both. Raises CheckpointError for anything but positive numbers by expressions."""
        numbers = config.get(patterns) or {}
        if not isinstance(numbers, dict):
            raise CheckpointError(f"{CONFIG}: {patterns} is {shown(numbers)}, not an object")
        self._default = _positive(default, config.get(default))
        if len(numbers) > MOST_EXPRESSIONS:
            raise CheckpointError(
                f"{CONFIG}: {patterns} has {len(numbers):,} expressions; at most {MOST_EXPRESSIONS:,} are read"
            )
        self._by_pattern = []
        for key, number in numbers.items():
            # as PEFT: an expression that is all of a name, or its end after a dot
            pattern = FilePattern(rf"(.*\.)?({key})$", f"{CONFIG}: {patterns}")
            self._by_pattern.append((pattern, _positive(patterns, number)))

    def of(self, module: str) -> float:
        """Return the number of the first expression that matches `module`, or the default."""
        for pattern, number in self._by_pattern:
            if pattern.match(module):
                return number
        return self._default


def _positive(name: str, value: object) -> float:
    """Return a positive finite number. Raises CheckpointError for anything else."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise CheckpointError(f"{CONFIG}: {name} is {shown(value)}; it must be a positive number")
    return number
