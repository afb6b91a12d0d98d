"""LoRA adapters as PEFT writes them, read as changes of the base model's tensors.

    W' = W + scaling * B @ A        scaling = alpha / r, or alpha / sqrt(r) with use_rslora
    W' = m * (W + scaling * B @ A) / |W + scaling * B @ A|     by output row, with use_dora

A [r, inputs], B [outputs, r], m [outputs]; for an embedding A [r, rows], B [width, r]. Of a parameter
that holds the matrices of all experts of a layer (`target_parameters`), A is [experts * r, inputs],
expert by expert, and B [outputs, r * experts], whose columns of an expert are `experts` apart; before
PEFT 0.19 A had the outputs and B the inputs (`exchanges_parameters`). The files
are adapter_config.json and adapter_model.safetensors. Anything else that the config declares is
refused: an adapter without it would compute something else. `merge.py` merges what is read here, and
`lora.py` reads it for run time.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from freight.base.fields import JsonObject
from freight.base.files import open_regular
from freight.base.patterns import MOST_EXPRESSIONS, FilePattern
from freight.checkpoint.config_only import local_path
from freight.checkpoint.headers import Shape, read_header, unreadable
from freight.checkpoint.reader import file_state, read_json, resolve_model
from freight.errors import CheckpointError, ConfigError, printable, shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"}
_READ |= {"init_lora_weights", "ensure_weight_tying", "target_parameters"}
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
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,  # which merging has always read
}
# Parameters of a module in the order in which PEFT wraps them: the outermost wrapper has the last
_WEIGHT = ("weight",)
_OF_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")  # of modules called experts
_PIECE = 2**20  # bytes of the file that are hashed at a time
_PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
}


def has_folder(name: str) -> bool:
    """Return whether the files of the adapter `name` are in a folder of this machine. False: in none,
    or on the hub.
    """
    try:
        return local_path(name).is_dir()
    except OSError:  # such as a path of too many characters
        return False


def adapter_folder(name: str) -> Path:
    """Return the folder of the adapter `name`, a folder or a hub id, whose files are fetched. Raises
    CheckpointError if there is none.
    """
    try:
        is_file = local_path(name).exists() and not has_folder(name)
        # the names of models that `resolve_model` takes have a colon: a file of the hub, one of Ollama
        if is_file or (":" in name and not has_folder(name)):
            raise CheckpointError(
                f"{printable(name[:300])} is no folder; an adapter is named by the folder that holds {CONFIG} and "
                f"{WEIGHTS}, or by a hub id, OWNER/NAME"
            )
        return resolve_model(name, fetched=(CONFIG, "adapter_model.*"))
    except OSError as error:  # such as a path of too many characters
        raise CheckpointError(f"{shown(name)} cannot be read: {error.strerror}") from error


@dataclass
class Change:
    """The change of one module's weight, as names of tensors in the adapter's file.

    name         the module's or the parameter's name, which the config's patterns match
    rank         of A and B, for each expert if they are of several
    replacement  the tensor that replaces the weight, before the rest is added
    copies       matrices that A and B change: more than one if they are of experts
    """

    name: str = ""
    rank: int = 0
    scaling: float = 0.0
    copies: int = 1
    is_embedding: bool = False
    replacement: str | None = None
    parts: dict[str, str] = field(default_factory=dict)  # a, b, magnitude


class Adapter:
    """An opened adapter. `changes`: by the name of the base model's tensor, as transformers calls
    it.
    """

    def __init__(self, name: str) -> None:
        """Open `name`, a folder or a hub id: read its config and the header of its file. Raises
        CheckpointError for a damaged adapter, ConfigError for one that is not read here.
        """
        self.path = adapter_folder(name)
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
        self.declares_dora = bool(config.get("use_dora"))
        self.saves_modules = bool(config.get("modules_to_save"))
        self.file = self.path / WEIGHTS
        self._state = file_state(self.file)
        self._entries = read_header(self.file)
        self._begins = self._offsets()
        self._targets = _parameters(self.path / CONFIG, config)
        self.exchanges_parameters = bool(self._targets) and _precedes_0_19(config)
        self._ranks = _Numbers(config, "rank_pattern", "r")
        self._alphas = _Numbers(config, "alpha_pattern", "lora_alpha")
        self._is_rank_stabilized = bool(config.get("use_rslora"))
        self.changes = self._changes()

    def merged(self, change: Change, weight: Tensor) -> Tensor:
        """Return `weight` [outputs, inputs] with the change, computed in float32 and rounded once
        to `weight`'s dtype.
        """
        if change.replacement is not None:
            weight = self.read(change.replacement).to(weight.dtype)
        if not change.parts:
            return weight
        a = self.read(change.parts["a"]).float()
        b = self.read(change.parts["b"]).float()
        added = (b @ a).mul_(change.scaling)
        if change.is_embedding:
            added = added.T
        total = added + weight.float()
        if "magnitude" in change.parts:
            magnitude = self.read(change.parts["magnitude"]).float().view(-1)
            total *= (magnitude / torch.linalg.norm(total, dim=1)).view(-1, 1)
        rounded = total.to(weight.dtype)  # float16 ends at 65,504
        if not rounded.isfinite().all():
            raise CheckpointError(
                f"{self.file}: with {shown(change.parts['b'])} the weight is not finite in {weight.dtype}"
            )
        return rounded

    def check(self, name: str, change: Change, shape: Shape) -> None:
        """Raise CheckpointError unless `change` fits the tensor `name` of the base model, of
        `shape`.
        """
        added = self.shape(change)
        if added is not None and added != shape:
            hint = ""
            if added[1:] == shape[1:] and name.endswith(("embed_tokens.weight", "lm_head.weight")):
                hint = ". Its vocabulary was extended: merge it with peft"
            raise CheckpointError(
                f"{self.file} has {list(added)} for {name}, which is {list(shape)} in the base model: they do not "
                f"belong together{hint}"
            )
        if change.replacement is None:
            return
        stored = self._entries[change.replacement].shape
        if stored != shape:
            raise CheckpointError(
                f"{self.file}: {shown(change.replacement)} is {list(stored)}, and {name} of the base model "
                f"{list(shape)}: the vocabulary was extended, which is not merged here; {_WAY_OUT}"
            )

    def shape(self, change: Change) -> Shape | None:
        """Return the shape of the addition, [outputs, inputs]; None if nothing is added."""
        if not change.parts:
            return None
        inputs = self._entries[change.parts["a"]].shape[1]
        outputs = self._entries[change.parts["b"]].shape[0]
        return (inputs, outputs) if change.is_embedding else (outputs, inputs)

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of what decides the adapter's values: the fields of the
        config that are read, in one spelling, and the bytes of the file. Raises CheckpointError if
        the file cannot be read or was changed since it was opened.
        """
        fields = {
            "rank": self._ranks.canonical,
            "alpha": self._alphas.canonical,
            "use_rslora": self._is_rank_stabilized,
            "use_dora": self.declares_dora,
            "parameters": sorted(self._targets),
            "exchanged": self.exchanges_parameters,
        }
        canonical = json.dumps(fields, sort_keys=True).encode()
        digest = hashlib.sha256(len(canonical).to_bytes(8, "little") + canonical)
        try:
            with open_regular(self.file) as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(unreadable(self.file, error)) from error
        self._require_unchanged()
        return digest.hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor of the file, in its stored dtype.

        It is not mapped: a file that becomes shorter while a server reads it must not end the
        server. Raises CheckpointError if the file was changed since it was opened.
        """
        entry = self._entries[name]
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="cpu")
        try:
            with open_regular(self.file) as stream:
                stream.seek(self._begins[name])
                # a view: the file's bytes go where the tensor is
                count = stream.readinto(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(unreadable(self.file, error)) from error
        self._require_unchanged()
        if count != entry.size:
            raise CheckpointError(
                f"{self.file}: tensor {shown(name)} cannot be read: the file ended"
            )
        return tensor

    def _require_unchanged(self) -> None:
        if file_state(self.file) != self._state:
            raise CheckpointError(
                f"{self.file} was changed or replaced while it was read; load it again, and put a new adapter into "
                "a new folder"
            )

    def _offsets(self) -> dict[str, int]:
        """Return where each tensor begins in the file, which `read_header` has found to hold the
        tensors one after the other at its end. Raises CheckpointError for other dtypes than an
        adapter has.
        """
        size = 0 if self._state is None else self._state[0]
        begin = size - sum(entry.size for entry in self._entries.values())
        begins = {}
        for name, entry in self._entries.items():
            if entry.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{self.file}: {shown(name)} is {entry.dtype}; an adapter has 16 or 32 bits"
                )
            begins[name] = begin
            begin += entry.size
        return begins

    def _scaling(self, module: str) -> float:
        rank = self._ranks.of(module)
        if self._is_rank_stabilized:
            rank = math.sqrt(rank)
        return self._alphas.of(module) / rank

    def _changes(self) -> dict[str, Change]:
        changes: dict[str, Change] = {}
        for name in self._entries:
            if not name.startswith(_PREFIX):
                raise CheckpointError(
                    f"{self.file}: {shown(name)} does not begin with {_PREFIX}, as PEFT's tensors do"
                )
            module = name.removeprefix(_PREFIX)
            suffix = next((suffix for suffix in _PARTS if module.endswith(suffix)), "")
            if suffix:
                module = module.removesuffix(suffix)
                parameter = self._parameter(module)
                change = changes.setdefault(parameter or f"{module}.weight", Change())
                self._add_part(change, suffix, name)
                change.name = parameter or module
                change.scaling = self._scaling(change.name)
            elif ".lora_" in module:
                raise ConfigError(
                    f"{self.file}: {shown(name)} is not read here (lora_bias); {_WAY_OUT}"
                )
            else:
                change = changes.setdefault(module.replace(".base_layer.", "."), Change())
                self._require_new(change.replacement, name)
                change.replacement = name
        for tensor, change in changes.items():
            self._check_parts(tensor, change)
            self._check_wrappers(tensor, changes)
        if not changes:
            raise CheckpointError(f"{self.file} has no tensor")
        return changes

    def _parameter(self, module: str) -> str | None:
        """Return the name of the parameter that the wrapper `module` changes; None if it is a module
        of its own.

        PEFT wraps a module once for each of its parameters, and calls what is wrapped base_layer.
        """
        outer = module
        depth = 0
        while outer.endswith(".base_layer"):
            outer = outer.removesuffix(".base_layer")
            depth += 1
        targeted = self._targeted(outer)
        if not targeted:
            return None
        if depth >= len(targeted):
            raise CheckpointError(
                f"{self.file}: {shown(module)} is wrapped {depth + 1} times, and target_parameters has "
                f"{len(targeted)} of its parameters"
            )
        return targeted[-1 - depth]

    def _targeted(self, module: str) -> list[str]:
        """Return the names of the parameters of a module that `target_parameters` declares."""
        # a target that is a name alone, as PEFT makes from names of modules, ends names of others too
        parameters = _OF_EXPERTS if module.rpartition(".")[2] == "experts" else _WEIGHT
        names = [f"{module}.{parameter}" for parameter in parameters]
        return [name for name in names if self._is_targeted(name)]

    def _is_targeted(self, name: str) -> bool:
        """Say whether the name, or its end after a dot, is declared."""
        while name not in self._targets:
            _, dot, name = name.partition(".")
            if not dot:
                return False
        return True

    def _check_wrappers(self, tensor: str, changes: Mapping[str, Change]) -> None:
        """Raise CheckpointError if the file does not have all wrappers of a module: which parameter
        a wrapper changes is known by its place among them.
        """
        if not changes[tensor].parts:
            return
        missing = [
            name for name in self._targeted(tensor.rpartition(".")[0]) if name not in changes
        ]
        if missing and self._is_targeted(tensor):
            raise CheckpointError(
                f"{self.file} changes {shown(tensor)}, and has nothing for {shown(missing[0])}, which "
                f"target_parameters of {CONFIG} has as well"
            )

    def _add_part(self, change: Change, suffix: str, name: str) -> None:
        """Add the tensor `name`. Raises CheckpointError if the change has this part, or parts of
        the other kind of module.
        """
        part = _PARTS[suffix]
        self._require_new(change.parts.get(part), name)
        is_embedding = "embedding" in suffix
        if part != "magnitude":
            others = [other for key, other in change.parts.items() if key != "magnitude"]
            if others and change.is_embedding != is_embedding:
                self._require_new(others[0], name)
            change.is_embedding = is_embedding
        change.parts[part] = name

    def _require_new(self, known: str | None, name: str) -> None:
        if known is not None:
            raise CheckpointError(
                f"{self.file}: {shown(known.removeprefix(_PREFIX))} and {shown(name.removeprefix(_PREFIX))} are the "
                "same part of the adapter twice"
            )

    def _check_parts(self, tensor: str, change: Change) -> None:
        has_magnitudes = self.declares_dora
        shapes = {part: self._entries[name].shape for part, name in change.parts.items()}
        if not shapes:
            return
        needed = {"a", "b", "magnitude"} if has_magnitudes else {"a", "b"}
        if shapes.keys() != needed:
            raise CheckpointError(
                f"{self.file}: it has only {', '.join(change.parts)} of the parts of the change of {shown(tensor)}"
            )
        if has_magnitudes and change.is_embedding:
            raise ConfigError(
                f"{self.file}: DoRA of the embedding {shown(tensor)} is not merged here; {_WAY_OUT}"
            )
        rank = self._ranks.of(change.name)
        a = shapes["a"]
        b = shapes["b"]
        fits = len(a) == len(b) == 2 and a[0] == b[1] > 0 and rank == int(rank)
        if fits and self._is_targeted(tensor):
            change.copies = a[0] // int(rank)
        fits = fits and a[0] == change.copies * rank > 0
        change.rank = int(rank)
        if not fits or (has_magnitudes and math.prod(shapes["magnitude"]) != b[0]):
            raise CheckpointError(
                f"{self.file}: what is added to {shown(tensor)} is {list(b)} by {list(a)}, and {CONFIG} has rank "
                f"{rank:g}"
            )


def _check_config(file: Path, config: JsonObject) -> None:
    """Raise ConfigError for what is declared and not read here."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{file}: peft_type is {shown(kind)}; only LORA is read here; {_WAY_OUT}")
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
                f"{file}: {key} is {shown(value)}, which is not read here; {_WAY_OUT}"
            )


def _parameters(file: Path, config: JsonObject) -> frozenset[str]:
    """Return `target_parameters`. Raises CheckpointError for anything but names, and ConfigError for
    parameters that are not read here.
    """
    declared = config.get("target_parameters") or []
    if not isinstance(declared, list) or not all(isinstance(name, str) for name in declared):
        raise CheckpointError(
            f"{file}: target_parameters is {shown(declared)}, not a list of names"
        )
    for name in declared:
        if name.rpartition(".")[2] not in (*_WEIGHT, *_OF_EXPERTS):
            raise ConfigError(
                f"{file}: target_parameters has {shown(name)}, which is not read here; {_WAY_OUT}"
            )
    return frozenset(declared)


def _precedes_0_19(config: JsonObject) -> bool:
    """Say whether an earlier PEFT than 0.19 wrote the config. Until then the A of a parameter had its
    first dimension after that of experts, whether these are inputs or not.
    """
    version = config.get("peft_version")  # 0.17 does not write it
    numbers = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", version if isinstance(version, str) else "")
    return numbers is None or (int(numbers[1]), int(numbers[2])) < (0, 19)


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

    @property
    def canonical(self) -> list[object]:
        """Both, in one spelling: the number of the others, then each expression with its own."""
        return [self._default, [[p.expression, number] for p, number in self._by_pattern]]

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
