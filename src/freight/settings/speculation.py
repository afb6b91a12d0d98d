"""How many tokens a step may draft, and what drafts them: `--speculate N` or `auto`, and vLLM's
--speculative-config. Imports no torch.

Without either there are up to DEFAULT_DRAFTS from each request's own text (`engine/drafts.py`): they
change no bit, and a text that does not repeat itself has hardly any. Where they would, or gain nothing,
as on a GPU, the engine has none (`engine/build.py`). vLLM's 'ngram' and 'suffix' are the same here: how
long a match has to be, and how much is drafted behind it, follows from how often such drafts came true.

A head is a second model, or layers that take the model's states (`model/draft_head.py`). `auto` drafts
from the text first, and by the head where the text gives nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from os import PathLike

from freight.base.fields import is_integer
from freight.errors import ConfigError, choices
from freight.model.config.model import ModelConfig
from freight.model.mixers.spec import PagedMixer

MOST_DRAFTS = 63  # with the row before them, the 64 rows of the largest captured step
DEFAULT_DRAFTS = 8  # of 9 rows a step takes a quarter longer than of 1 (`engine/drafts.py`)
AUTO = "auto"


class HeadKind(StrEnum):
    """What drafts besides a request's own text."""

    MODEL = "draft_model"
    MTP = "mtp"
    EAGLE3 = "eagle3"


_RANKS = "draft_tensor_parallel_size"
_OF_TEXT = ("ngram", "suffix")
METHODS = (*_OF_TEXT, *map(str, HeadKind))
# vLLM's names of the layers that its models publish; it reads them as 'mtp'
_OF_FAMILIES = ("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_5_mtp", "qwen3_next_mtp")
_LEARNED = (
    "how long matches have to be follows from how often their drafts come true, in each request: "
    "omit it"
)
_AS_THE_MODEL = "what drafts is loaded as the model is: omit it"
_OTHER_KEYS = {
    "quantization": _AS_THE_MODEL,
    "max_model_len": _AS_THE_MODEL,
    "revision": "the folder is the one that is named: omit it, and give a folder of that revision",
    "prompt_lookup_max": _LEARNED,
    "prompt_lookup_min": _LEARNED,
    "suffix_decoding_max_tree_depth": _LEARNED,
    "suffix_decoding_max_cached_requests": "drafts come from the request's own text alone: omit it",
    "suffix_decoding_max_spec_factor": _LEARNED,
    "suffix_decoding_min_token_prob": _LEARNED,
    "disable_by_batch_size": "a step of many requests has no drafts: omit it",
}
_EXAMPLE = '\'{"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": 4}\''


@dataclass(frozen=True)
class HeadSource:
    """A head, and the folder or file that it is read from; None: the model's own."""

    kind: HeadKind
    folder: str | None = None


@dataclass(frozen=True)
class Speculation:
    """What drafts.

    most       drafted tokens of a step, all requests together; 0: none
    from_text  whether each request's own text does
    head       what does besides, or where the text gives nothing; None: nothing
    finds_head whether the model's own layers are meant, if it has any and no head is named
    ranks      that divide the head, which have to be those of the model; None: those
    """

    most: int
    from_text: bool = True
    head: HeadSource | None = None
    finds_head: bool = False
    ranks: int | None = None


NO_DRAFTS = Speculation(0)


def speculation(speculate: object, config: str | None) -> Speculation:
    """Read --speculate and the JSON of --speculative-config.

    Raises ConfigError for what is not known, and where the two differ.
    """
    is_auto = speculate == AUTO
    most = None
    if speculate is not None and not is_auto:
        most = _require_count("--speculate", as_number(speculate))
    if config is None:
        return Speculation(DEFAULT_DRAFTS if most is None else most, finds_head=is_auto)
    configured = _read(config, DEFAULT_DRAFTS if most is None else most)
    if most is not None and most != configured.most:
        raise ConfigError(
            f"--speculate is {most} and num_speculative_tokens of --speculative-config {configured.most}: "
            "give one of the two"
        )
    if not is_auto:
        return configured
    finds_head = configured.head is None
    return replace(configured, from_text=True, finds_head=finds_head)


def obstacle_to_drafts(is_foreign: bool, launches_ahead: bool) -> str:
    """Return why a model has no drafts; '' where it may. is_foreign: it runs through transformers'
    modules; launches_ahead: as `EngineConfig.launches_ahead`.
    """
    if is_foreign:
        return "the modules of transformers may round a row differently beside others"
    if launches_ahead:
        return "on a GPU the next step is launched before the tokens of the last are known"
    return ""


def require_drafts_of(model: ModelConfig, name: str) -> None:
    """Raise ConfigError unless `model`, which messages call `name`, can draft for another one."""
    if model.foreign is not None:
        raise ConfigError(
            f"--speculative-config: {name} is of model_type {model.model_type!r}, which runs through transformers' "
            "modules; what drafts needs Freight's own decoder"
        )
    if not model.generates:
        raise ConfigError(f"--speculative-config: {name} gives no text, and so drafts nothing")
    for layer in model.layers:
        if not isinstance(layer.mixer, PagedMixer):
            raise ConfigError(
                f"--speculative-config: {name} ({model.model_type}) has layers that keep a state, which do not take "
                "back a draft; use a model of attention alone"
            )


def written(config: object) -> str | None:
    """Write a `speculative_config` of Python as on the command line, in JSON."""
    if config is None or isinstance(config, str):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"speculative_config is {config!r}; give a dictionary, as in {{'method': 'ngram'}}"
        )
    return json.dumps(dict(config), default=_as_text)


def _as_text(value: object) -> str:
    if isinstance(value, PathLike):
        return os.fsdecode(value)
    return repr(value)


def _read(config: str, most: int) -> Speculation:
    """Return what the JSON of --speculative-config asks for; `most` drafts unless it says how many."""
    try:
        read = json.loads(config)
    except ValueError as error:
        raise ConfigError(f"--speculative-config {config!r} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(
            f"--speculative-config {config!r} is not an object; write "
            '\'{"method": "ngram", "num_speculative_tokens": 8}\''
        )
    folder = read.pop("model", None)
    method = read.pop("method", None)
    if method is None and folder is not None:
        method = str(HeadKind.MODEL)
    if method in _OF_FAMILIES:
        method = str(HeadKind.MTP)
    _check_keys(read)
    if method not in METHODS:
        raise ConfigError(f"--speculative-config: method {method!r}: choose {choices(METHODS)}")
    most = _require_count(
        "--speculative-config: num_speculative_tokens",
        read.get("num_speculative_tokens", most),
    )
    if method in _OF_TEXT:
        if folder is not None:
            raise ConfigError(
                f"--speculative-config: method {method!r} drafts from each request's own text, and takes no model: "
                f"omit it, or write {_EXAMPLE}"
            )
        return Speculation(most)
    ranks = read.get(_RANKS)
    return Speculation(most, False, _head(HeadKind(method), folder), ranks=ranks)


def _check_keys(read: Mapping[str, object]) -> None:
    for key, value in read.items():
        if key in _OTHER_KEYS:
            raise ConfigError(f"--speculative-config: {key!r}: {_OTHER_KEYS[key]}")
        if key == _RANKS and (not is_integer(value) or value < 1):
            raise ConfigError(
                f"--speculative-config: {key!r} is {value!r}: what drafts is divided as the model is; omit it"
            )
        if key != _RANKS and key != "num_speculative_tokens":
            raise ConfigError(
                f"--speculative-config: {key!r} is unknown; known are method, model and num_speculative_tokens"
            )


def _head(kind: HeadKind, folder: object) -> HeadSource:
    """Return the head that is named. Raises ConfigError for a folder that it has not, or lacks."""
    if kind is HeadKind.MTP and folder is not None:
        raise ConfigError(
            f"--speculative-config: method {str(kind)!r} takes the layers of the model's own checkpoint: omit model"
        )
    if kind is HeadKind.MTP:
        return HeadSource(kind)
    if not isinstance(folder, str) or not folder:
        raise ConfigError(
            f"--speculative-config: method {str(kind)!r} needs the folder of what drafts; write {_EXAMPLE}"
        )
    return HeadSource(kind, folder)


def as_number(value: object) -> object:
    """Return the number that a text of digits says, and anything else as it is: `speculation` refuses it."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
        return int(value)
    return value


def _require_count(name: str, value: object) -> int:
    if not is_integer(value) or not 0 <= value <= MOST_DRAFTS:
        also = " or 'auto'" if name == "--speculate" else ""
        raise ConfigError(f"{name} {value!r} must be an integer from 0 to {MOST_DRAFTS}{also}")
    return value
