"""The dtype of a checkpoint's weights, and where it was found. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from freight.base.fields import JsonObject
from freight.errors import CheckpointError, choices
from freight.fp8.formats import COMPUTE_FORMATS, Format

TEXT_KEYS = ("text_config", "llm_config")  # every `Family.text_key`


class DtypeSource(StrEnum):
    """The place where a dtype was found, in order of precedence. The value is the name in every
    JSON.
    """

    OPTION = "--dtype"  # for the compute dtype only; never for that of a checkpoint
    CONFIG = "config.json"
    TEXT_CONFIG = "text_config"  # the object in config.json that describes the text model
    TENSORS = "tensors"  # the headers of the safetensors files
    ASSUMED = "assumed"


_FOUND = {
    DtypeSource.OPTION: "from --dtype",
    DtypeSource.CONFIG: "from config.json",
    DtypeSource.TEXT_CONFIG: "from text_config in config.json",
    DtypeSource.TENSORS: "as the tensors are stored: no config names one",
    DtypeSource.ASSUMED: "assumed: neither config.json nor a tensor names one",
}


def checkpoint_dtype(
    config: JsonObject, stored: Format | None = None
) -> tuple[Format, DtypeSource]:
    """Return the dtype of a checkpoint and its source. `config` is the content of config.json.

    In order of precedence: config.json, its `text_config`, `stored` (the dtype of the tensors; None
    if not known), bfloat16. Raises CheckpointError for a dtype that is not implemented, and for two
    that differ in one object.
    """
    for source, part in _places(config):
        named = _named(part)
        if named is not None:
            return named, source
    if stored is None:
        return Format.BFLOAT16, DtypeSource.ASSUMED
    return stored, DtypeSource.TENSORS


def names_dtype(config: JsonObject) -> bool:
    """Return whether a config.json names a dtype, implemented or not; if so, the tensors do not
    decide.
    """
    return any(_values(part) for _, part in _places(config))


def describe_dtype(format: Format, source: DtypeSource) -> str:
    """Describe a dtype and its source: 'bfloat16, from config.json'."""
    return f"{format}, {_FOUND[source]}"


def _places(config: JsonObject) -> Iterator[tuple[DtypeSource, JsonObject]]:
    yield DtypeSource.CONFIG, config
    for key in TEXT_KEYS:
        if isinstance(config.get(key), Mapping):
            yield DtypeSource.TEXT_CONFIG, config[key]


def _values(part: JsonObject) -> dict[str, str]:
    """Return the values of `dtype` and `torch_dtype`; 'torch.bfloat16' becomes 'bfloat16'."""
    return {
        key: str(part[key]).removeprefix("torch.")
        for key in ("dtype", "torch_dtype")
        if part.get(key) is not None
    }


def _named(part: JsonObject) -> Format | None:
    values = _values(part)
    if not values:
        return None
    if len(set(values.values())) > 1:
        raise CheckpointError(
            f"config.json contradicts itself: dtype = {values['dtype']}, torch_dtype = {values['torch_dtype']}"
        )
    name = next(iter(values.values()))
    if name not in tuple(COMPUTE_FORMATS):
        raise CheckpointError(
            f"config.json: dtype {name!r} is not implemented; {choices(COMPUTE_FORMATS)} are"
        )
    return Format(name)
