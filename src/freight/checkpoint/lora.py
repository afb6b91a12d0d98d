"""LoRA adapters for run time: A, B and scaling of each Linear module that an adapter changes.

    y + scaling * B (A x)        A [r, inputs], B [outputs, r]

`adapter.py` reads the files, as it does for merging. Here everything that is not applied by row is
refused by name, from config and header alone, before anything is allocated. `check_values` then
reads every tensor once. An adapter is known by its digest: its name and its folder may get other
values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from freight.checkpoint.adapter import Adapter, Change
from freight.checkpoint.headers import Shape
from freight.errors import CheckpointError, ConfigError, printable

# What may stand before the names of a decoder's modules: transformers and checkpoints differ here
_BODY = re.compile(r"(?:(?:model|language_model|decoder|backbone)\.)*")
_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")
_STACKED = re.compile(r"\.experts(?:\.base_layer)*$")
_WAY_OUT = "merge it: freight merge BASE ADAPTER OUT"


@dataclass(frozen=True)
class StackedModules:
    """Modules of experts whose matrices are one parameter in transformers' model.

    modules       of each expert, in the order of their rows
    alternating   whether the rows of an expert's modules alternate; the parameter then is [experts,
                  inputs, outputs], otherwise [experts, outputs, inputs]
    """

    modules: tuple[tuple[str, ...], ...]
    alternating: bool = False

    def pieces(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, _Piece]]:
        """Yield each module with its part of the parameter."""
        for expert, modules in enumerate(self.modules):
            begin = 0
            for index, module in enumerate(modules):
                end = begin + shapes[module][0]
                rows = slice(index, None, len(modules)) if self.alternating else slice(begin, end)
                yield module, _Piece(expert, rows)
                begin = end

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return (outputs, inputs) of an expert's rows of the parameter."""
        first = self.modules[0]
        return sum(shapes[module][0] for module in first), shapes[first[0]][1]


class _Piece(NamedTuple):
    """An expert, and the rows of its B."""

    expert: int
    rows: slice


@dataclass(frozen=True)
class AdapterModules:
    """The modules of a base model, by their names in its checkpoint, without `.weight`.

    shapes      Linear modules that adapters may change -> (outputs, inputs)
    refused     other modules -> what they are
    stacked     parameters of transformers' model that hold some of `shapes` -> these
    renamed     (beginning that transformers gives, beginning in the checkpoint) of names within a
                layer, where the two may differ
    """

    shapes: Mapping[str, Shape]
    refused: Mapping[str, str]
    renamed: tuple[tuple[str, str], ...]
    num_layers: int
    stacked: Mapping[str, StackedModules] = field(default_factory=dict)

    @cached_property
    def _by_inner_name(self) -> dict[str, str]:
        return {_inner(name): name for name in (*self.shapes, *self.refused)}

    @cached_property
    def _stacked_by_inner_name(self) -> dict[str, StackedModules]:
        return {_inner(name): modules for name, modules in self.stacked.items()}

    def stacked_in(self, parameter: str) -> StackedModules | None:
        """Return the modules whose matrices transformers keeps in `parameter`; None if there are
        none.
        """
        return self._stacked_by_inner_name.get(_inner(parameter))

    def stored_name(self, name: str) -> str | None:
        """Return the checkpoint's name of the module that transformers calls `name`; None if there
        is none.
        """
        inner = _inner(name)
        candidates = [inner]
        if layer := _LAYER.match(inner):
            module = inner[layer.end() :]
            candidates += [
                layer[0] + stored + module.removeprefix(written)
                for written, stored in self.renamed
                if module.startswith(written)
            ]
        names = (self._by_inner_name.get(candidate) for candidate in candidates)
        return next((stored for stored in names if stored is not None), None)


@dataclass(frozen=True, eq=False)
class LoraMatrices:
    """What an adapter adds to one module: scaling * B (A x).

    a          [r, inputs]
    b          [outputs, r], in the dtype of `a`
    scaling    a float32 number; B and A are as stored, without it
    """

    a: Tensor
    b: Tensor
    scaling: float


class LoraAdapter:
    """An opened adapter that fits a base model.

    name     what the caller named: a folder or a hub id
    path     its folder
    digest   hexadecimal SHA-256 of what decides its values (`Adapter.digest`)
    ranks    module -> rank, by the base model's names without `.weight`, in the file's order
    """

    def __init__(self, name: str, adapter: Adapter, modules: AdapterModules, max_rank: int) -> None:
        """Check every name, rank, shape and scaling. Raises as `open`."""
        self.name = name
        self.path: Path = adapter.path
        self._adapter = adapter
        if adapter.declares_dora:
            raise ConfigError(
                f"{self.path}: use_dora is true, and a base weight's norm is not known by row; {_WAY_OUT}"
            )
        if adapter.saves_modules:
            raise ConfigError(
                f"{self.path}: modules_to_save replaces modules of the base model, which is not done by row; {_WAY_OUT}"
            )
        self._changes: dict[str, Change] = {}
        self._pieces: dict[str, _Piece] = {}
        self._exchanged: set[str] = set()
        self._shapes: dict[str, Shape] = {}
        self._last: tuple[str, torch.dtype | None, Tensor, Tensor] | None = None
        self.ranks: dict[str, int] = {}
        for tensor, change in adapter.changes.items():
            stacked = modules.stacked_in(tensor)
            if stacked is None or change.replacement is not None:
                module = self._module(tensor.removesuffix(".weight"), change, modules)
                self._require_copies(module, change, 1)
                adapter.check(module, change, modules.shapes[module])
                self._check_numbers(module, change, max_rank)
                self._add(module, change, modules, None)
                continue
            self._require_copies(tensor, change, len(stacked.modules))
            shape = stacked.shape(modules.shapes)
            if self._is_exchanged(change, stacked, shape):
                self._exchanged.add(change.name)
                shape = shape[::-1]
            adapter.check(tensor, change, shape)
            self._check_numbers(tensor, change, max_rank)
            for module, piece in stacked.pieces(modules.shapes):
                self._add(module, change, modules, piece)
        self.digest = adapter.digest()

    def _is_exchanged(self, change: Change, stacked: StackedModules, shape: Shape) -> bool:
        """Say whether A has the outputs and B the inputs, as PEFT wrote them before 0.19 where
        transformers has outputs before inputs. Where both are as many, the version says it.
        """
        if stacked.alternating or self._adapter.shape(change) != shape[::-1]:
            return False
        return shape[0] != shape[1] or self._adapter.exchanges_parameters

    def _require_copies(self, name: str, change: Change, count: int) -> None:
        if change.copies != count:
            raise CheckpointError(
                f"{self._adapter.file} has matrices of {change.copies:,} experts for {_named(name)}, and the model has "
                f"{count:,} of them: they do not belong together"
            )

    def _check_numbers(self, name: str, change: Change, max_rank: int) -> None:
        if change.rank > max_rank:
            raise ConfigError(
                f"{self.path}: the rank of {name} is {change.rank:,}, and --max-lora-rank is {max_rank}; start with "
                f"--max-lora-rank {change.rank}"
            )
        if not change.scaling <= torch.finfo(torch.float32).max:
            raise CheckpointError(
                f"{self.path}: lora_alpha makes the scaling of {name} {change.scaling:g}, which float32 does "
                "not hold"
            )

    def _add(
        self, module: str, change: Change, modules: AdapterModules, piece: _Piece | None
    ) -> None:
        if module in self._changes:
            raise CheckpointError(f"{self._adapter.file} changes {module} under two names")
        self._changes[module] = change
        self._shapes[module] = modules.shapes[module]
        self.ranks[module] = change.rank
        if piece is not None:
            self._pieces[module] = piece

    @classmethod
    def open(cls, name: str, modules: AdapterModules, max_rank: int) -> LoraAdapter:
        """Open the adapter `name`, a folder or a hub id, for a base model that has `modules`
        (`model.adapter_modules`).

        Reads config and header, and the bytes of the file for the digest; no tensor is made. Raises
        ConfigError for an adapter that is not applied at run time, CheckpointError for one that is
        damaged or belongs to another model.
        """
        return cls(name, Adapter(name), modules, max_rank)

    @property
    def largest_rank(self) -> int:
        return max(self.ranks.values())

    def num_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of all A and B in a dtype of `dtype_bytes` bytes."""
        values = sum(rank * sum(self._shapes[module]) for module, rank in self.ranks.items())
        return values * dtype_bytes

    def matrices(self, module: str, dtype: torch.dtype | None = None) -> LoraMatrices:
        """Read A and B of one of `ranks`, in `dtype`, or as stored. Raises CheckpointError if a
        value is not finite in that dtype, or if the file was changed since it was opened.
        """
        change = self._changes[module]
        a, b = self._parts(change, dtype)
        if module in self._pieces:
            expert, rows = self._pieces[module]
            a = a[expert * change.rank : (expert + 1) * change.rank]
            b = b.view(len(b), change.rank, change.copies)[:, :, expert]
            if change.name in self._exchanged:
                exchanged = b.t()
                b = a.t()
                a = exchanged
            b = b[rows]
        return LoraMatrices(a, b, change.scaling)

    def check_values(self, dtype: torch.dtype | None = None) -> None:
        """Read every tensor once. Raises as `matrices`."""
        for module in self.ranks:
            self.matrices(module, dtype)

    def _parts(self, change: Change, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Read A and B; those of experts once for all modules that follow each other in `ranks`."""
        if change.copies == 1:
            self._last = None
        elif self._last is not None and self._last[:2] == (change.name, dtype):
            return self._last[2:]
        a = self._finite(change.parts["a"], dtype)
        b = self._finite(change.parts["b"], dtype)
        if change.copies > 1:
            self._last = (change.name, dtype, a, b)
        return a, b

    def _finite(self, name: str, dtype: torch.dtype | None) -> Tensor:
        stored = self._adapter.read(name)
        tensor = stored.to(dtype or stored.dtype)  # float16 ends at 65,504
        # aminmax passes NaN on, and takes a twentieth of the time of isfinite().all()
        least, most = torch.aminmax(tensor)
        if not (math.isfinite(least) and math.isfinite(most)):
            raise CheckpointError(
                f"{self._adapter.file}: {_named(name)} has values that are not finite in "
                f"{tensor.dtype}; the training failed, or the file is damaged"
            )
        return tensor

    def _module(self, written: str, change: Change, modules: AdapterModules) -> str:
        """Return the base model's name of the Linear module that transformers calls `written`.
        Raises ConfigError for what is not applied by row, CheckpointError for a module that the
        model does not have.
        """
        file = self._adapter.file
        name = _named(written)
        if change.replacement is not None:
            raise ConfigError(
                f"{file}: {_named(change.replacement)} replaces a tensor of the base model (modules_to_save, bias), "
                f"which is not done by row; {_WAY_OUT}"
            )
        if _STACKED.search(f".{written}"):
            raise ConfigError(
                f"{file} changes {name}, of experts, and target_parameters of adapter_config.json does not say which "
                "of their parameters; merge it with peft's merge_and_unload"
            )
        module = modules.stored_name(written)
        kind = "an embedding" if change.is_embedding else modules.refused.get(module or "")
        if kind is not None:
            raise ConfigError(
                f"{file} changes {name}, {kind}, whose adapters are not applied by row; {_WAY_OUT}"
            )
        if module is not None:
            return module
        layer = _LAYER.match(_inner(written))
        if layer and int(layer[1]) >= modules.num_layers:
            raise CheckpointError(
                f"{file} changes {name}, and the model has {modules.num_layers} layers: the adapter belongs "
                "to another model"
            )
        raise CheckpointError(
            f"{file} changes {name}, and the model has no such Linear module: the adapter belongs to another "
            "model, or to a part of it that Freight does not run"
        )


def _named(name: str) -> str:
    """Return a name of the file for a message: whole, unless it is longer than any module's."""
    return printable(name[:200])


def _inner(name: str) -> str:
    """Return a module's name without what stands before the decoder's names."""
    prefix = _BODY.match(name)
    assert prefix is not None  # it matches nothing as well
    return name[prefix.end() :]
