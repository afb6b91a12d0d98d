"""How many tokens a step may draft: `--speculate N`, or vLLM's --speculative-config. Imports no
torch.

Without either there are up to DEFAULT_DRAFTS: they change no bit, and a text that does not repeat itself
has hardly any. Where they would, or gain nothing, as on a GPU, the engine has none (`engine/build.py`).

Drafts come from each request's own text (`engine/drafts.py`), and decide no token. So vLLM's 'ngram'
and 'suffix' are the same here: how long a match has to be, and how much is drafted behind it,
follows from how often such drafts came true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from freight.base.fields import is_integer
from freight.errors import ConfigError, choices

METHODS = ("ngram", "suffix")
MOST_DRAFTS = 63  # with the row before them, the 64 rows of the largest captured step
DEFAULT_DRAFTS = 8  # of 9 rows a step takes a quarter longer than of 1 (`engine/drafts.py`)
NEEDS_WEIGHTS = (
    "draft models, EAGLE and MTP heads are not implemented: drafts come from each request's own text, "
    "by 'ngram' or 'suffix'"
)
_LEARNED = (
    "how long matches have to be follows from how often their drafts come true, in each request: "
    "omit it"
)
_OTHER_KEYS = {
    "model": NEEDS_WEIGHTS,
    "draft_tensor_parallel_size": NEEDS_WEIGHTS,
    "quantization": NEEDS_WEIGHTS,
    "max_model_len": NEEDS_WEIGHTS,
    "revision": NEEDS_WEIGHTS,
    "prompt_lookup_max": _LEARNED,
    "prompt_lookup_min": _LEARNED,
    "suffix_decoding_max_tree_depth": _LEARNED,
    "suffix_decoding_max_cached_requests": "drafts come from the request's own text alone: omit it",
    "suffix_decoding_max_spec_factor": _LEARNED,
    "suffix_decoding_min_token_prob": _LEARNED,
    "disable_by_batch_size": "a step of many requests has no drafts: omit it",
}


def most_drafts(speculate: object, config: str | None) -> int:
    """Return the most drafts of a step, 0 for none, from --speculate and the JSON of
    --speculative-config.

    Raises ConfigError for what is not known, and where the two differ.
    """
    asked = DEFAULT_DRAFTS
    if speculate is not None:
        asked = _require_count("--speculate", speculate)
    if config is None:
        return asked
    configured = _count(config)
    if speculate is not None and asked != configured:
        raise ConfigError(
            f"--speculate is {asked} and num_speculative_tokens of --speculative-config {configured}: "
            "give one of the two"
        )
    return configured


def written(config: object) -> str | None:
    """Write a `speculative_config` of Python as on the command line, in JSON."""
    if config is None or isinstance(config, str):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"speculative_config is {config!r}; give a dictionary, as in {{'method': 'ngram'}}"
        )
    return json.dumps(dict(config), default=repr)


def _count(config: str) -> int:
    """Return the drafts of a step that the JSON of --speculative-config asks for."""
    try:
        read = json.loads(config)
    except ValueError as error:
        raise ConfigError(f"--speculative-config {config!r} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(
            f"--speculative-config {config!r} is not an object; write "
            '\'{"method": "ngram", "num_speculative_tokens": 8}\''
        )
    method = read.pop("method", None)
    for key in read:
        if key in _OTHER_KEYS:
            raise ConfigError(f"--speculative-config: {key!r}: {_OTHER_KEYS[key]}")
        if key != "num_speculative_tokens":
            raise ConfigError(
                f"--speculative-config: {key!r} is unknown; known are method and num_speculative_tokens"
            )
    if method not in METHODS:
        raise ConfigError(
            f"--speculative-config: method {method!r}: choose {choices(METHODS)}; {NEEDS_WEIGHTS}"
        )
    count = read.get("num_speculative_tokens", DEFAULT_DRAFTS)
    return _require_count("--speculative-config: num_speculative_tokens", count)


def _require_count(name: str, value: object) -> int:
    if not is_integer(value) or not 0 <= value <= MOST_DRAFTS:
        raise ConfigError(f"{name} {value!r} must be an integer from 0 to {MOST_DRAFTS}")
    return value
