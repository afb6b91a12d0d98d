"""SamplingParams: what one request asks of the sampler. Imports no torch.

Names and defaults are those that vLLM's users know. A value that exists is valid: construction checks every field and
raises RequestError with the field, the value and the range, so nothing behind it checks again (except token ids,
which need the vocabulary: `check_vocabulary`). Nothing is ignored: an unknown name is an error that suggests the
nearest, and a number is never clamped into its range.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from freight.errors import RequestError, nearest

GREEDY_BELOW = 1e-5  # a temperature under this is greedy, as in vLLM: logits divided by less overflow float32
MAX_LOGPROBS = 20  # the most that OpenAI's API offers; each costs memory per token
MAX_COMPLETIONS = 128
MAX_SALT = 1024  # characters
LARGEST = 10**9  # of temperature and of |logit_bias|, so that no float32 logit overflows

_SYNONYMS = {  # names of other engines -> the field that does the same or comes closest
    "best_of": "n",
    "num_return_sequences": "n",
    "use_beam_search": "n",
    "do_sample": "temperature",
    "temp": "temperature",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "bad_words": "logit_bias",
    "allowed_token_ids": "logit_bias",
    "top_logprobs": "logprobs",
    "top_n_tokens": "logprobs",
    "echo": "prompt_logprobs",
}

T = TypeVar("T")


def _explains_unknown_names(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword raises RequestError with the nearest field, in place of a TypeError."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    init = cls.__init__

    @functools.wraps(init)
    def explained(self: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                hint = nearest(name, known, _SYNONYMS)
                raise RequestError(f"SamplingParams has no field {name!r}{hint}; it has {', '.join(known)}")
        init(self, **values)

    setattr(cls, "__init__", explained)  # noqa: B010, an assignment does not type-check
    return cls


@_explains_unknown_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a completion ends. By keyword only.

    n                    completions per prompt, each with a seed of its own
    temperature          divides the logits; below 1e-5 the most likely token is taken (greedy)
    top_p                smallest set of tokens whose probability reaches this
    top_k                only the k most likely tokens; 0 or -1: all
    min_p                only tokens at least this share of the most likely one's probability
    seed                 same seed, prompt and parameters: same tokens; None: a fresh one for the request
    max_tokens           tokens to generate at most; None: up to the end of the context
    min_tokens           no stop id is drawn and no stop string looked for before this many tokens
    stop                 strings that end the text, which ends right before them; one string or several
    stop_token_ids       ids that end the completion besides the model's own
    ignore_eos           the model's own stop ids do not end the completion
    presence_penalty     subtracted once from the logit of each token already generated
    frequency_penalty    subtracted from the logit of a token for each time it was generated
    repetition_penalty   divides positive and multiplies negative logits of tokens in the prompt or the output
    logit_bias           token id -> number added to its logit
    logprobs             log-probabilities of this many most likely tokens, besides the token's own; None: none at all
    prompt_logprobs      the same for the prompt's tokens
    detokenize           give text back; without it there are token ids only
    skip_special_tokens  leave special tokens out of the text
    cache_salt           requests share cached prefixes only with requests of the same salt

    `stop`, `stop_token_ids` and `logit_bias` also take None for none; `stop` and `stop_token_ids` are stored as tuples.
    Raises RequestError for a value of the wrong type or outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        values: dict[str, object] = {
            "n": _whole("n", self.n, 1, MAX_COMPLETIONS),
            "temperature": _number("temperature", self.temperature, 0, LARGEST, hint="; 0 is greedy"),
            "top_p": _number("top_p", self.top_p, 0, 1, above=True, hint="; 1 keeps every token"),
            "top_k": _whole("top_k", self.top_k, -1, hint="; 0 or -1 keeps every token"),
            "min_p": _number("min_p", self.min_p, 0, 1),
            "seed": _optional(_whole, "seed", self.seed, -(2**63), 2**64 - 1),
            "max_tokens": _optional(_whole, "max_tokens", self.max_tokens, 0),
            "min_tokens": _whole("min_tokens", self.min_tokens, 0),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": tuple(
                _whole("stop_token_ids", token, 0) for token in _listed("stop_token_ids", self.stop_token_ids)
            ),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2, 2),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100, hint="; 1 is none"),
            "logit_bias": _biases("logit_bias", self.logit_bias),
            "logprobs": _optional(_whole, "logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": _optional(_whole, "prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            "detokenize": _flag("detokenize", self.detokenize),
            "skip_special_tokens": _flag("skip_special_tokens", self.skip_special_tokens),
            "cache_salt": _salt("cache_salt", self.cache_salt),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop needs the text, and detokenize is False; use stop_token_ids, or leave detokenize True"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError when `logit_bias` or `stop_token_ids` name a token id outside [0, vocab_size)."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise RequestError(f"{name} names token id {outside[0]}; the vocabulary has 0 to {vocab_size - 1}")


def _range(low: float, high: float, above: bool = False) -> str:
    if high == math.inf:
        return f"{low} or more"
    return f"greater than {low} and at most {high}" if above else f"{low} to {high}"


def _whole(name: str, value: object, low: int, high: float = math.inf, hint: str = "") -> int:
    """`value` as an int in [low, high]; bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise RequestError(f"{name} is {value!r:.60}; it must be a whole number, {_range(low, high)}{hint}")
    return int(value)


def _number(name: str, value: object, low: float, high: float, above: bool = False, hint: str = "") -> float:
    """`value` as a finite float in [low, high], or in (low, high] when `above`; bool is not a number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond float64
            number = math.inf
        if math.isfinite(number) and low <= number <= high and not (above and number == low):
            return number
    raise RequestError(f"{name} is {value!r:.60}; it must be a finite number, {_range(low, high, above)}{hint}")


def _optional(check: Callable[..., T], name: str, value: object, *limits: float) -> T | None:
    return None if value is None else check(name, value, *limits)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.60}; it must be True or False")
    return value


def _listed(name: str, value: object) -> Iterable[Any]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r:.60}; it must be a list")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(_listed(name, value))
    for string in strings:
        if not isinstance(string, str) or not string:
            raise RequestError(f"{name} has {string!r:.60}; a stop string is a string of one character or more")
    return strings


def _biases(name: str, value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {value!r:.60}; it must map token ids to numbers")
    return {
        _whole(f"{name} key", token, 0): _number(f"{name}[{token}]", bias, -LARGEST, LARGEST)
        for token, bias in value.items()
    }


def _salt(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= MAX_SALT):
        raise RequestError(f"{name} is {value!r:.80}; it must be a string of 1 to {MAX_SALT} characters")
    return value
