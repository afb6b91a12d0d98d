"""Checkpoint: a folder of safetensors, read lazily, in which every tensor is accounted for.

Opening checks every header against its file: sizes, offsets, shards and index must agree, and no
tensor may appear twice, so damage is reported before a weight is read. `take` maps one tensor into
memory. `finish` refuses a checkpoint with tensors that were neither taken nor skipped by name,
because an unused tensor means that config.json describes another model. Only safetensors are read:
pickle files can run code when they are opened (`convert.py` reads those).
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from freight.base.fields import JsonObject
from freight.base.files import read_object
from freight.checkpoint.config_only import local_path
from freight.checkpoint.gguf.hub import file_on_hub
from freight.checkpoint.gguf.ollama import PREFIX, ollama_model
from freight.checkpoint.gguf.places import gguf_in, is_gguf, parts_of
from freight.checkpoint.headers import (
    FORMAT_NAMES,
    Index,
    Shape,
    TensorEntry,
    narrowed,
    part_shape,
    read_header,
    unreadable,
)
from freight.checkpoint.partial import restore
from freight.checkpoint.stored_dtype import stored_format
from freight.errors import CheckpointError, ConfigError, first_line, listed, shown
from freight.fp8.block_formats import BlockFormat
from freight.fp8.formats import Format
from freight.model.config.dtype import TEXT_KEYS

logger = logging.getLogger("freight")
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*")
# Files that `convert` fetches
PICKLED = ("*.json", "pytorch_model*.bin", "*.jinja", "*.txt", "tokenizer*", "*.model")
# The same weights in other forms: all folders but those of sentence-transformers' modules, 2_Dense
_NOT_FETCHED = ["[!0-9]*/*", "[0-9][!0-9_]*/*", "[0-9]*/*/*", "consolidated*"]
# Tensors that other tools write and Freight does not use: name -> reason
_UNUSED = {
    "*decoder.version": "the version of an older format of OPT",
    "*.rotary_emb.inv_freq": "computed from config.json",
    "*.q_scale": "a query scale: attention keeps queries in 16 bits",
    "*.q_proj.output_scale": "a query scale: attention keeps queries in 16 bits",
    "*.self_attn.q.scale": "a query scale: attention keeps queries in 16 bits",
    "*.q_zero_point": "a zero point of queries, which stay in 16 bits",
    "*.q_proj.output_zero_point": "a zero point of queries, which stay in 16 bits",
    "*.prob_output_scale": "a scale of probabilities, which stay in 32 bits",
    "*.prob_scale": "a scale of probabilities, which stay in 32 bits",
}
# Files in which tools declare their quantization -> method
_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Suffixes of the tensor that holds a matrix, in all producers' forms
_CODES = ("weight", "_weight_qdata", "weight_packed", "qweight")
_TIES = ("tie_word_embeddings", "tie_embedding")  # the second is LFM2's
_NAMED = 20  # names that a message has at most
_COMPARED = 2**24  # bytes of two tensors that are compared at a time
_ZERO_POINTS = (
    "*.[qkv]_zero_point",
    "*.[qkv]_proj.output_zero_point",
    "*.weight_zero_point",
    "*.input_zero_point",
)


class Checkpoint:
    """One opened folder. `config`, `generation_config` and `hf_quant_config` hold its JSON files,
    None if a file is not there. `unread_metadata` has keys of a GGUF file's metadata about the model
    that are not read.
    """

    unread_metadata: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        """Open the folder. Raises CheckpointError, naming file and fault, if it is incomplete or
        damaged.
        """
        self.path = path
        if path.is_file():
            raise CheckpointError(
                f"{path} is a GGUF file, and a folder of safetensors is needed here: freight convert {path} OUT writes "
                "one"
            )
        config = read_json(path / "config.json")
        if config is None:
            _refuse_consolidated(path)
            raise CheckpointError(f"{path} has no config.json, so it is not a model folder")
        self.config: JsonObject = config
        self.generation_config = read_json(path / "generation_config.json")
        self.hf_quant_config = read_json(path / "hf_quant_config.json")
        self._entries = _read_entries(path)
        self._read_own_declaration()
        files = {entry.file for entry in self._entries.values()}
        self._states = {file: file_state(file) for file in sorted(files)}
        self._taken: set[str] = set()
        self._skipped: dict[str, str] = {}

    def _read_own_declaration(self) -> None:
        """Take the declaration of AutoGPTQ or AutoAWQ from the tool's own file where config.json has
        none, and the tensors are that tool's.
        """
        declared = any(
            self.config.get(key) for key in ("quantization_config", "compression_config")
        )
        if declared or not any(name.endswith(".qweight") for name in self._entries):
            return
        for file, method in _OWN_FILES.items():
            content = read_json(self.path / file)
            if content is not None:
                logger.info(
                    "%s: config.json declares no quantization, and %s does", self.path, file
                )
                self.config = {
                    **self.config,
                    "quantization_config": {"quant_method": method, **content},
                }
                return

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the tensors; a tensor that was divided is replaced by its parts."""
        return frozenset(self._entries)

    @cached_property
    def stored_format(self) -> Format | None:
        """The dtype of the weights that are not quantized; None if no tensor shows one."""
        return stored_format(
            (name, entry.dtype, entry.size) for name, entry in self._entries.items()
        )

    @property
    def skipped(self) -> Mapping[str, str]:
        """Names that were skipped so far -> reason."""
        return self._skipped

    def entry(self, name: str) -> TensorEntry:
        """Return the header entry of `name`. Raises CheckpointError if there is no such tensor."""
        if name not in self._entries:
            raise self.fault(f"tensor {name} is missing")
        return self._entries[name]

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a file of weights is not the one that was opened: some tensors
        would be of the old file, and some of the new one. Asks for size, date and inode alone.
        """
        for file, state in self._states.items():
            if file_state(file) != state:
                raise CheckpointError(
                    f"{file} was changed or replaced while it was read; start again, and put a new model into a new "
                    "folder, or in the place of the whole folder, and not over files that are in use"
                )

    @property
    def identity(self) -> dict[str, str]:
        """What tells the files of weights from others: of each, by its path, size, date and inode."""
        return {str(file): str(state) for file, state in self._states.items()}

    def fault(self, what: str) -> CheckpointError:
        """Return the error for a fault of this checkpoint."""
        return CheckpointError(f"{self.path}: {what}")

    def shape_of(self, name: str) -> Shape:
        """Return the tensor's shape. Raises CheckpointError if there is no such tensor."""
        return self.entry(name).shape

    def format_of(self, name: str) -> Format:
        """Return the tensor's format. Raises CheckpointError for a dtype that Freight does not
        compute with, such as wide integers.
        """
        dtype = self.entry(name).dtype
        if dtype not in FORMAT_NAMES:
            raise self.fault(f"tensor {name} is stored as {dtype}, which is not implemented")
        return FORMAT_NAMES[dtype]

    def block_format(self, name: str) -> BlockFormat | None:
        """Return the format of a matrix in a GGUF file's blocks; None for all other tensors."""
        return None

    def take_blocks(self, name: str) -> Tensor:
        """Return the blocks of a matrix that has a `block_format`, uint8 [outputs, bytes of a row]."""
        raise NotImplementedError

    @property
    def files(self) -> list[Path]:
        """The files of weights, sorted."""
        return sorted(self._states)

    def digest(self) -> str:
        """Return a digest of weights that are in no file, '' where all are in `files`."""
        return ""

    def other_files(self) -> dict[str, bytes]:
        """Return the files of a model that are made from a GGUF file: tokenizer and generation
        defaults. A folder has them as files.
        """
        return {}

    def declared_module(self, name: str) -> str:
        """Return the quantization_config's name for the module of the tensor `name`."""
        return self.entry(name).module or name.rpartition(".")[0]

    def divide(
        self, stored: str, parts: Mapping[str, tuple[Index, str]], turned: bool = False
    ) -> None:
        """Present the tensor `stored` as `parts`: name -> (index in `stored`, module in the
        declaration).

        An empty index is the full tensor under another name. Each part is read alone, and `stored`
        itself is no longer listed. With `turned` the last two dimensions of a part are exchanged;
        its index refers to the file's order. Raises CheckpointError for a part whose name another
        tensor has.
        """
        source = self.entry(stored)
        for name in sorted(parts):
            if name in self._entries and name != stored:
                raise self.fault(f"{stored} and {name} are the same tensor twice")
        del self._entries[stored]
        for name, (index, module) in parts.items():
            shape = part_shape(source.shape, index)
            if turned:
                shape = (*shape[:-2], *reversed(shape[-2:]))
            size = source.size_of(shape)
            self._entries[name] = TensorEntry(
                source.file, source.dtype, shape, size, stored, index, module, turned
            )
        self.__dict__.pop("names", None)

    def narrow(self, name: str, pieces: Sequence[Index], alias: str | None = None) -> None:
        """Present `pieces` of the tensor `name`, joined along their first dimension, in its place
        or under the name `alias`.

        Only they are read. Their indices are slices of leading dimensions.
        """
        source = self.entry(name)
        shape = narrowed(source.shape, pieces)
        self._entries[alias or name] = replace(
            source,
            shape=shape,
            size=source.size_of(shape),
            stored=source.stored or name,
            pieces=tuple(pieces),
        )
        self.__dict__.pop("names", None)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Compare with the shapes that a model needs, without reading a tensor. Raises
        CheckpointError with all mismatches.
        """
        missing = []
        different = []
        for name, shape in shapes.items():
            if name not in self._entries:
                missing.append(f"{name} is missing")
            elif self._entries[name].shape != tuple(shape):
                different.append(self._different(name, shape))
        faults = missing + different
        if faults:
            more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
            raise self.fault("; ".join(faults[:_NAMED]) + more)

    def _different(self, name: str, shape: Iterable[int]) -> str:
        stored = list(self._entries[name].shape)
        return f"{name} has shape {stored}, config.json asks for {list(shape)}"

    def take(self, name: str, shape: Iterable[int], format: Format | None = None) -> Tensor:
        """Map the tensor from its file. Raises CheckpointError if it is missing, or of another
        shape or format.

        Without `format` any 16- or 32-bit format is accepted. FP8 and INT8 must be requested: they
        are meaningless without a scale.
        """
        self.require(name, shape, format)
        return self.copy(name)

    def require(self, name: str, shape: Iterable[int], format: Format | None = None) -> None:
        """Account for a tensor that is read later. Raises CheckpointError as `take`."""
        shape = tuple(shape)
        stored = self.format_of(name)
        if self.entry(name).shape != shape:
            raise self.fault(self._different(name, shape))
        expected = format or "16 or 32 bits, as no quantization is declared,"
        if stored is not format and (format is not None or stored.is_quantized):
            raise self.fault(f"{name} is stored in {stored} where {expected} is expected")
        self._taken.add(name)

    def copy(self, name: str) -> Tensor:
        """Map the tensor from its file in its stored dtype, which may be one that Freight does not
        compute with.
        """
        self.entry(name)
        self._taken.add(name)
        return self._read(name)

    def take_bytes(self, name: str, shape: Iterable[int]) -> Tensor:
        """Take a tensor of uint8 codes, as `take`."""
        entry = self.entry(name)
        shape = tuple(shape)
        if entry.dtype not in ("U8", "F8_E8M0") or entry.shape != shape:
            raise self.fault(
                f"{name} is {entry.dtype} of shape {list(entry.shape)}, expected is U8 of {list(shape)}"
            )
        return self.copy(name).view(torch.uint8)

    def take_scale(
        self, name: str, cause: str = "fp16 models with an all-zero weight are known for this"
    ) -> Tensor:
        """Return scales as float32, in a copy. Raises CheckpointError, with `cause`, unless every
        one is finite and above 0.

        They are stored in 16 or 32 bits, or as powers of two in one byte, E8M0: 2 ** (byte - 127)
        (OCP MX 1.0, section 5.4).
        """
        dtype = self.entry(name).dtype
        stored = self.copy(name)
        if dtype in ("U8", "F8_E8M0"):
            stored = torch.exp2(stored.view(torch.uint8).double() - 127)
        elif self.format_of(name).is_quantized:
            raise self.fault(f"the scale {name} is stored as {dtype}, which is not implemented")
        scale = stored.to(torch.float32, copy=True)
        bad = scale[~((scale > 0) & (scale < torch.inf))]
        if len(bad):
            raise self.fault(
                f"{name} has {bad[0].item()} among its {scale.numel()} values; a scale has to be finite "
                f"and above 0. Quantize the model again ({cause})"
            )
        return scale

    def beside(self, folder: str, name: str, shape: Iterable[int]) -> Tensor:
        """Read a tensor of `folder`/model.safetensors, which belongs to a part that another library
        runs behind the model. Raises CheckpointError for one that is missing or misshapen, or has
        NaN or infinite values.
        """
        file = self.path / folder / _SINGLE
        tensor = read_tensor(file, name)
        if tensor.shape != torch.Size(shape):
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(tensor.shape)}, and its config.json says {tuple(shape)}"
            )
        if not bool(tensor.float().isfinite().all()):
            raise CheckpointError(
                f"{file}: {name} has NaN or infinite values; fetch the model again"
            )
        return tensor

    def names_beside(self, folder: str) -> list[str]:
        """Return the names of the tensors in `folder`/model.safetensors, in order. Raises
        CheckpointError.
        """
        file = self.path / folder / _SINGLE
        try:
            with safe_open(file, framework="pt") as handle:
                return sorted(handle.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def same_bits(self, name: str, other: str) -> bool:
        """Return whether two stored tensors have the same dtype, shape and bits. Reads both, up to
        the first difference. Raises CheckpointError if one is missing.
        """
        entry = self.entry(name)
        compared = self.entry(other)
        if (entry.dtype, entry.shape) != (compared.dtype, compared.shape):
            return False
        parts = zip(self._bytes(name), self._bytes(other), strict=True)
        return all(torch.equal(part, of_other) for part, of_other in parts)

    def _bytes(self, name: str) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = self._read(name).flatten().view(torch.uint8).split(_COMPARED)
        return parts

    def stored_of(self, module: str, suffixes: Iterable[str]) -> list[str]:
        """Return the names of the module's tensors that are stored, of those with these suffixes."""
        names = [f"{module}.{suffix}" for suffix in suffixes]
        return [name for name in names if name in self._entries]

    def has_values(self, name: str) -> bool:
        """Return whether a stored tensor has a value that is not 0, without taking it."""
        return bool(self._read(name).float().any())

    def skip(self, pattern: str, reason: str, pending: Container[str] = ()) -> None:
        """Skip the tensors whose name matches `pattern` (`*`, `?` and `[...]`), but those about to be
        taken (`pending`), and record the reason.
        """
        for name in fnmatch.filter(self._entries, pattern):
            if name not in self._taken and name not in pending:
                self._skipped[name] = reason

    def finish(self, pending: Iterable[str] = ()) -> None:
        """Raise CheckpointError that lists every tensor neither taken, nor skipped, nor about to be
        taken (`pending`).

        Tensors that other tools write and Freight does not use are skipped by name: `inv_freq`
        buffers, scales of queries and probabilities, and zero points, which must be zero.
        """
        for pattern, reason in _UNUSED.items():
            self.skip(pattern, reason)
        # of a matrix in 4 bits, or of the KV cache, a zero point is judged there
        unused = sorted(self.names - self._taken.union(pending, self._skipped))
        for pattern in _ZERO_POINTS:
            for name in fnmatch.filter(unused, pattern):
                if self.has_values(name):
                    raise self.fault(
                        f"{name} is not zero: of weights in 8 bits only symmetric quantization is implemented, and of "
                        "weights in 4 bits config.json must declare zero points (`symmetric: false`)"
                    )
                self.skip(name, "a zero point that is zero")
        left = [name for name in unused if name not in self._skipped]
        if left:
            where = INDEX
            if not (self.path / INDEX).is_file():
                files = {self._entries[name].file.name for name in left}
                where = listed(sorted(files), 3)
            raise self.fault(
                f"{len(left)} tensors belong to no part of the model that config.json describes: "
                f"{listed(left, _NAMED)}; correct config.json if the model has such a part, else remove them from "
                f"{where}"
            )

    def _read(self, name: str) -> Tensor:
        """Read the tensor through its own mapping, so that its memory is released with the tensor."""
        return self._read_entry(self._entries[name], name)

    def _read_entry(self, entry: TensorEntry, name: str) -> Tensor:
        file = entry.file
        stored = entry.stored or name
        if entry.pieces and (entry.index or entry.turned):  # of a part that is read first
            part = self._read_entry(replace(entry, pieces=()), name)
            return torch.cat([part[piece] for piece in entry.pieces])
        index, steps = _without_steps(entry.index)
        try:
            with safe_open(file, framework="pt") as handle:
                if entry.pieces:
                    pieces = [handle.get_slice(stored)[piece] for piece in entry.pieces]
                    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                tensor: Tensor = (
                    handle.get_slice(stored)[index] if index else handle.get_tensor(stored)
                )
        except (SafetensorError, OSError) as error:
            if file.exists():
                self.require_unchanged()  # that is the cause, where it was changed
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
        tensor = tensor[steps].contiguous()
        return tensor.mT.contiguous() if entry.turned else tensor


def part_of(stored: Tensor, entry: TensorEntry) -> Tensor:
    """Return what an entry has of its tensor in the file, which is in memory."""
    part = stored
    if entry.index:
        part = part[entry.index]
    if entry.turned:
        part = part.mT
    if entry.pieces:
        part = torch.cat([part[piece] for piece in entry.pieces])
    return part


def _without_steps(index: Index) -> tuple[Index, tuple[slice, ...]]:
    """Return (`index` with all of each dimension that has a step, because safetensors reads
    contiguous ranges only; the index of the part in what is read so).
    """
    ranges: list[int | slice] = []
    steps: list[slice] = []
    for at in index:
        is_range = isinstance(at, int) or at.step is None
        ranges.append(at if is_range else slice(None))
        if isinstance(at, slice):
            steps.append(slice(None) if is_range else at)
    return tuple(ranges), tuple(steps)


def read_tensor(file: Path, name: str) -> Tensor:
    """Map a tensor of a safetensors file. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: tensor {shown(name)} cannot be read: {error}") from error
    return tensor


def resolve_model(
    name: str, revision: str | None = None, fetched: Sequence[str] = _FETCHED
) -> Path:
    """Return the folder of a model, or its GGUF file: 'demo' (shipped with Freight), an existing
    folder or FILE.gguf, 'ollama:NAME', or a Hugging Face hub id, of which the files that match
    `fetched` are downloaded; of 'OWNER/NAME:FILE' that GGUF file alone (`file_on_hub`).

    A folder that has one GGUF file and no other weights stands for that file. A folder whose files a
    killed run was replacing gets them back. Raises CheckpointError if there is no model, ConfigError
    for a revision of anything but a hub id.
    """
    name = str(name)
    if name.startswith(PREFIX):
        model = ollama_model(name)
        if model.not_read:
            logger.warning(
                "%s: what Ollama adds to the file is not read: %s", name, listed(model.not_read)
            )
        return model.file
    path = _local_model(name, revision)
    if path is not None:
        return path
    repository, _, file = name.partition(":")
    if name.startswith((".", "/", "~")) or repository.count("/") > 1 or not repository:
        what = "file" if name.endswith(".gguf") else "folder"
        raise CheckpointError(f"there is no {what} {name!r}")
    from huggingface_hub import snapshot_download

    ignored = _NOT_FETCHED
    if file:
        file = file_on_hub(repository, file, revision)
        fetched = (parts_of(file),)
        ignored = []
    try:
        path = Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[*fetched],
                ignore_patterns=ignored,
            )
        )
    except Exception as error:  # the client's own errors, and whatever its network stack raises
        which = repr(name)
        if revision is not None:
            which += f" at revision {revision!r}"
        raise CheckpointError(
            f"{which} is neither a file, nor a folder, nor a model that could be fetched from the Hugging Face hub; "
            f"check the name and the connection, or give a folder ({first_line(error)})"
        ) from error
    if file and not (path / file).is_file():
        raise CheckpointError(
            f"the repository {repository} has no file {file}; see the names there"
        )
    return path / file if file else path


def _local_model(name: str, revision: str | None) -> Path | None:
    """Return the folder or the GGUF file of this name; None if there is none. Raises as
    `resolve_model`.
    """
    folder = local_path(name)
    if name and folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"--revision {revision}: {name} is a folder, only a hub id has revisions; omit it"
            )
        restore(folder)
        return gguf_in(folder) or folder
    if folder.is_file() and is_gguf(folder):
        if revision is not None:
            raise ConfigError(
                f"--revision {revision}: {name} is a file, only a hub id has revisions; omit it"
            )
        return folder
    if folder.is_file():
        raise CheckpointError(
            f"{name} is a file, and no GGUF file; give the folder that holds config.json and *.safetensors"
        )
    if name and folder.exists():
        raise CheckpointError(f"{name} is neither a folder nor a regular file; name the model's")
    if name.endswith(".gguf") and "/" not in name:
        raise CheckpointError(
            f"there is no file {name!r}; one of a repository of the hub is named OWNER/NAME:FILE"
        )
    return None


def read_json(path: Path) -> dict[str, Any] | None:
    """Read the object in a JSON file; None if there is no such file. Raises CheckpointError for
    anything else.
    """
    if not _is_there(path):
        return None
    try:
        return read_object(path)
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    except ValueError as error:
        raise CheckpointError(f"{path} {error}") from error


def file_state(file: Path) -> tuple[int, int, int] | None:
    """Return size, date of change in nanoseconds, and inode; None where there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _is_there(path: Path) -> bool:
    """Return whether the path exists. A dangling link counts, so that the error names its target."""
    return path.is_symlink() or path.exists()


def _read_entries(path: Path) -> dict[str, TensorEntry]:
    """Read the entries of all tensors of the folder, with every header checked."""
    index = path / INDEX
    single = path / _SINGLE
    if _is_there(single) and not (_is_there(index) and _is_in_use(path, index)):
        return read_header(single)
    if _is_there(index):
        return _read_shards(path, index)
    _refuse_consolidated(path)
    files = _matching(path, "*.safetensors")
    if len(files) == 1:
        return read_header(path / files[0])
    if files:
        raise CheckpointError(
            f"{path} has {listed(files, _NAMED)}, but no {index.name} to join them"
        )
    pickles = _matching(path, "*.bin", "*.pt", "*.pth")
    if pickles:
        raise CheckpointError(
            f"{path} has {listed(pickles, _NAMED)}, which can run code when opened; Freight reads safetensors only: "
            f"freight convert {path} OUT"
        )
    raise CheckpointError(
        f"{path} has no *.safetensors file; if the model has pytorch_model.bin instead: freight convert MODEL OUT"
    )


def _matching(path: Path, *patterns: str) -> list[str]:
    """Return the names of the files in `path` that match one of `patterns`, sorted."""
    names: set[str] = set()
    for pattern in patterns:
        names.update(file.name for file in path.glob(pattern))
    return sorted(names)


def _refuse_consolidated(path: Path) -> None:
    """Raise CheckpointError for a folder in Mistral's own format alone.

    It is called where the usual files are absent, so repositories that have both forms pass.
    """
    files = _matching(path, "params.json", "consolidated*.safetensors")
    if files:
        raise CheckpointError(
            f"{path} is in Mistral's own format ({listed(files, _NAMED)}), which is not read; give the folder with "
            "config.json and model*.safetensors, which most of its repositories have as well, or make one with "
            "transformers' convert_ministral3_weights_to_hf.py or convert_mistral3_weights_to_hf.py"
        )


def _is_in_use(path: Path, index: Path) -> bool:
    """Return whether the index of a folder with a model.safetensors is to be read: it names that
    file and others. One that names files that are not there is of an earlier model, and a line of
    the log says so.

    Raises CheckpointError if the folder has two models, the index's and model.safetensors:
    transformers reads the latter, other engines the former, and neither is known to be meant.
    """
    files = sorted(set(_weight_map(index).values()))
    if files in ([], [_SINGLE]):
        return False
    missing = [file for file in files if not _is_there(path / file)]
    if missing:
        logger.warning(
            "%s: %s is read; %s names other files, of which %d are not there: %s",
            path,
            _SINGLE,
            index.name,
            len(missing),
            listed([*map(shown, missing)], 3),
        )
        return False
    if _SINGLE in files:
        return True
    raise CheckpointError(
        f"{path} has the weights of two models: {_SINGLE}, and the files that {index.name} names "
        f"({listed([*map(shown, files)], 3)}); keep one of the two in the folder, or fetch "
        f"the model without the other: hf download ID --exclude {_SINGLE} --local-dir DIR"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor. Raises CheckpointError for an index that does not say it."""
    weight_map = (read_json(index) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise CheckpointError(
            f"{index}: weight_map is missing, or does not give a file for every tensor"
        )
    return weight_map


def indexed_shards(index: Path) -> dict[Path, list[str]]:
    """Return the files that an index names, sorted, with the tensors that it places in each. Raises
    CheckpointError for an index that does not say it, or names a file outside of its folder.
    """
    shards: dict[str, list[str]] = {}
    for name, shard in _weight_map(index).items():
        shards.setdefault(shard, []).append(name)
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names {shown(shard)}, which lies outside the folder")
    return {index.parent / shard: shards[shard] for shard in sorted(shards)}


def _read_shards(path: Path, index: Path) -> dict[str, TensorEntry]:
    """Read the entries of the tensors that the index lists, each from the shard where it places
    them. What else a shard holds is not read: an overlay replaces tensors of older shards, and a
    shard may be shared with a model of other parts.
    """
    entries: dict[str, TensorEntry] = {}
    passed: list[str] = []
    missing: set[str] = set()
    for file, names in indexed_shards(index).items():
        shard = shown(file.name)
        if not _is_there(file):
            raise CheckpointError(
                f"{path}: the shard {shard}, which {index.name} names, is missing; fetch the model again"
            )
        placed = frozenset(names)
        for name, entry in read_header(file).items():
            if name in placed:
                entries[name] = entry
            else:
                passed.append(f"{shown(name)} in {shard}")
        missing |= placed - entries.keys()
    if missing:
        weight_map = _weight_map(index)
        name = next(name for name in weight_map if name in missing)
        raise CheckpointError(
            f"{path}: {index.name} places tensor {shown(name)} in {shown(weight_map[name])}, which does not hold it; "
            "correct the index, or fetch the model again"
        )
    if passed:
        logger.warning(
            "%s: %d tensors are not read, because %s does not list them, or places them in another file: %s",
            path,
            len(passed),
            index.name,
            listed(passed, 3),
        )
    return entries


def untie_stored_head(checkpoint: Checkpoint, head: str, embedding: str) -> bool:
    """Return whether the checkpoint stores a head that is not its embedding, where config.json says
    that the two are one tensor. `checkpoint.config` then says that they are two, and a line of the
    log names both.

    A head in 8 or 4 bits is not its embedding, and a tensor without values is no head: tools that
    divide a model leave it in the place of a tied one. Where the head alone is stored, it is the
    embedding as well.
    """
    module = head.removesuffix(".weight")
    stored = checkpoint.stored_of(module, _CODES)
    stored = [name for name in stored if checkpoint.entry(name).size]
    if stored == [head] and embedding not in checkpoint.names:
        checkpoint.divide(head, {embedding: ((), embedding.removesuffix(".weight"))})
        return False
    different = [name for name in stored if not checkpoint.same_bits(name, embedding)]
    bias = f"{module}.bias"
    if bias in checkpoint.names and checkpoint.has_values(bias):
        different.append(bias)
    if not different:
        return False
    logger.warning(
        "%s: config.json says tie_word_embeddings, but the stored %s is not %s: the stored head is used",
        checkpoint.path,
        different[0],
        embedding,
    )
    checkpoint.config = untied(checkpoint.config)
    return True


def untied(config: JsonObject) -> JsonObject:
    """Return a config.json that says that head and embedding are two, wherever it is read."""
    changed = {**config, "tie_word_embeddings": False}
    changed |= _not_tied(config)
    for key in TEXT_KEYS:
        part = config.get(key)
        if isinstance(part, Mapping):
            changed[key] = {**part, **_not_tied(part)}
    return changed


def _not_tied(config: JsonObject) -> dict[str, bool]:
    return dict.fromkeys(config.keys() & _TIES, False)
