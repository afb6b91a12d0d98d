"""Models that Ollama has fetched: the GGUF file of one, found by its name. Nothing is written.

Ollama's folder has `manifests/HOST/NAMESPACE/NAME/TAG`, a JSON object whose layers name files of
`blobs/` by their SHA-256. A name is looked up among those that are there, so none leads elsewhere.
Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from freight.base.files import read_object
from freight.errors import CheckpointError, listed, nearest, shown

PREFIX = "ollama:"
_HOST = "registry.ollama.ai"
_NAMESPACE = "library"
_TAG = "latest"
_LAYER = "application/vnd.ollama.image."  # a layer's kind follows
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")

_Name: TypeAlias = tuple[str, str, str, str]  # host, namespace, name, tag


@dataclass(frozen=True)
class OllamaModel:
    """A model of Ollama's: `file` is its GGUF file, which has no suffix.

    name: as `ollama list` prints it. not_read: kinds of its other layers, which Ollama would use:
        'template', 'params', 'system', 'license'; 'adapter' (LoRA) and 'projector' (images) change what
        the model answers.
    """

    name: str
    file: Path
    not_read: tuple[str, ...]


def ollama_model(name: str) -> OllamaModel:
    """Find the model `[ollama:][HOST/][NAMESPACE/]NAME[:TAG]`, case ignored as Ollama does.

    Its folder is $OLLAMA_MODELS, else ~/.ollama/models and that of Ollama's service. Raises
    CheckpointError, a line that names the models that are there, if it is not among them, or has
    no GGUF file.
    """
    folders = _folders()
    manifests: dict[_Name, Path] = {}
    for folder in reversed(folders):
        manifests.update(_manifests(folder))
    wanted = _parsed(name.removeprefix(PREFIX))
    for installed, manifest in manifests.items():
        if _folded(installed) == _folded(wanted):
            return _read(_short(installed), manifest)
    where = " and ".join(map(str, folders))
    if not manifests:
        raise CheckpointError(
            f"{PREFIX}{_short(wanted)}: there are no models of Ollama in {where}; set OLLAMA_MODELS to its folder, "
            f"and see that you may read it"
        )
    names = sorted(map(_short, manifests))
    raise CheckpointError(
        f"there is no model of Ollama's {shown(_short(wanted))} in {where}{nearest(_short(wanted), names)}; it has "
        f"{listed(names, 20)}"
    )


def _folders() -> list[Path]:
    chosen = os.environ.get("OLLAMA_MODELS")
    if chosen:
        return [Path(chosen).expanduser()]
    return [
        Path("~/.ollama/models").expanduser(),
        Path("/usr/share/ollama/.ollama/models"),  # of the service, under Linux
    ]


def _manifests(folder: Path) -> Iterator[tuple[_Name, Path]]:
    root = folder / "manifests"
    for path in sorted(root.glob("*/*/*/*")):  # nothing where it may not be read
        host, namespace, name, tag = path.relative_to(root).parts
        yield (host, namespace, name, tag), path


def _parsed(text: str) -> _Name:
    _, _, rest = text.rpartition("://")
    tag = _TAG
    if rest.rfind(":") > rest.rfind("/"):  # a colon before that is of the host's port
        rest, _, tag = rest.rpartition(":")
    rest, _, name = rest.rpartition("/")
    host, _, namespace = rest.rpartition("/")
    return (host or _HOST, namespace or _NAMESPACE, name, tag)


def _folded(name: _Name) -> list[str]:
    return [part.casefold() for part in name]


def _short(name: _Name) -> str:
    """Return the name without the parts that Ollama adds, but with its tag."""
    host, namespace, model, tag = name
    parts = [model]
    if (host, namespace) != (_HOST, _NAMESPACE):
        parts.insert(0, namespace)
    if host != _HOST:
        parts.insert(0, host)
    return f"{'/'.join(parts)}:{tag}"


def _read(name: str, manifest: Path) -> OllamaModel:
    what = f"{PREFIX}{name}"
    layers = _layers(what, manifest)
    models = [layer for layer in layers if layer.kind == "model"]
    others = tuple(dict.fromkeys(layer.kind for layer in layers if layer.kind != "model"))
    if not models:
        raise CheckpointError(
            f"{what} has no GGUF file, its layers are {listed(others, 8) or 'none'}; fetch a tag that is GGUF"
        )
    if len(models) > 1:
        raise CheckpointError(f"{what} has {len(models)} GGUF files; only models of one are read")
    return OllamaModel(name, _blob(what, manifest.parents[4] / "blobs", models[0]), others)


@dataclass(frozen=True)
class _Layer:
    kind: str
    digest: str
    size: int | None


def _layers(what: str, manifest: Path) -> list[_Layer]:
    try:
        entries = read_object(manifest)["layers"]
        return [_layer(entry) for entry in entries]
    except OSError as error:
        raise CheckpointError(f"{what}: {manifest} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{what}: {manifest} is not a manifest of Ollama's; fetch the model again: ollama pull"
        ) from error


def _layer(entry: Mapping[str, Any]) -> _Layer:
    size = entry.get("size")
    return _Layer(
        str(entry["mediaType"]).removeprefix(_LAYER),
        str(entry["digest"]),
        size if isinstance(size, int) else None,
    )


def _blob(what: str, blobs: Path, layer: _Layer) -> Path:
    digest = _DIGEST.fullmatch(layer.digest)
    if digest is None:
        raise CheckpointError(f"{what}: its GGUF file has the digest {shown(layer.digest)}")
    file = blobs / f"sha256-{digest[1]}"
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{what}: its GGUF file, {file}, cannot be read: {error.strerror}; fetch the model again: ollama pull"
        ) from error
    if layer.size not in (None, size):
        raise CheckpointError(
            f"{what}: its GGUF file, {file}, has {size} bytes, not {layer.size}; fetch the model again: ollama pull"
        )
    return file
