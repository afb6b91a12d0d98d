"""SamplingParams: the sampling options of one request. Imports no torch.

Names and defaults are those that vLLM's users know. A value that exists is valid: construction
checks every field and raises RequestError with the field, the value and the range, so no later code
checks again (except token ids, which need the vocabulary: `check_vocabulary`). Nothing is ignored:
an unknown name is an error that suggests the nearest, and a number is never clamped into its range.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from freight.base.other_engines.fields import SAMPLING
from freight.errors import SHOWN, RequestError, as_float, nearest, shown
from freight.pooling import PoolingParams
from freight.structured import StructuredOutputs

# A temperature below this is greedy, as in vLLM: logits divided by less overflow float32
GREEDY_BELOW = 1e-5
# The beginning of the error if a request's own parameters exclude every token
NO_TOKEN_LEFT = "no token is left to draw"
# The largest seconds, temperature and |logit_bias|, so that no float32 logit overflows
LARGEST = 10**9
LARGEST_WHOLE = 2**63 - 1  # the largest count and token id: what an int64 holds

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
    "no_stop_trim": "include_stop_str_in_output",
    "truncate": "truncate_prompt_tokens",
    "bad_words_ids": "bad_words",
    "top_logprobs": "logprobs",
    "top_n_tokens": "logprobs",
    "echo": "prompt_logprobs",
    "max_time": "timeout_s",
    "timeout": "timeout_s",
    "reasoning_budget": "thinking_token_budget",
    "reasoning_budget_tokens": "thinking_token_budget",
    "thinking_budget": "thinking_token_budget",
    "budget_tokens": "thinking_token_budget",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
}

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingLimits:
    """The largest values that one request may ask for. The defaults hold for every SamplingParams.

    `check_limits` compares with lower ones, e.g. a server's.

    n, temperature, logprobs, prompt_logprobs, timeout_s  the largest value of that field
    stop, stop_token_ids, logit_bias,
    allowed_token_ids, bad_words                          the most entries of that field
    stop_length                                           the most characters of each stop string
                                                          and bad word
    cache_salt                                            the most characters
    """

    n: int = 128
    temperature: float = LARGEST
    logprobs: int = 20  # the most that OpenAI's API offers; each costs memory per token
    prompt_logprobs: int = 20
    timeout_s: float = LARGEST
    stop: int = 16  # each is searched for after every token
    stop_length: int = 256  # a stream holds back up to so many characters
    stop_token_ids: int = 1024
    logit_bias: int = 1024
    allowed_token_ids: int = 2**20  # more than any vocabulary has
    bad_words: int = 1024
    cache_salt: int = 1024


LIMITS = SamplingLimits()


@dataclass(frozen=True)
class Range:
    """The numbers that a field of SamplingParams takes: `low` to `high`, or to its SamplingLimits.

    above     `low` itself is too small
    optional  None is a value too
    hint      text after the range in errors
    """

    low: float
    high: float
    whole: bool = False
    above: bool = False
    optional: bool = False
    hint: str = ""


def _count(low: int, optional: bool = False, hint: str = "") -> Range:
    return Range(low, LARGEST_WHOLE, whole=True, optional=optional, hint=hint)


RANGES: Mapping[str, Range] = {  # field -> what it takes
    "n": _count(1),
    "temperature": Range(0, LARGEST, hint="; 0 is greedy"),
    "top_p": Range(0, 1, above=True, hint="; 1 keeps every token"),
    "top_k": _count(-1, hint="; 0 or -1 keeps every token"),
    "min_p": Range(0, 1),
    "seed": Range(-(2**63), 2**64 - 1, whole=True, optional=True),
    "max_tokens": _count(0, optional=True),
    "min_tokens": _count(0),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 100, hint="; 1 is none"),
    "logprobs": _count(0, optional=True),
    "prompt_logprobs": _count(0, optional=True),
    "truncate_prompt_tokens": _count(-1, optional=True),
    "timeout_s": Range(0, LARGEST, above=True, optional=True),
    "priority": Range(-(2**63), LARGEST_WHOLE, whole=True),
    "thinking_token_budget": _count(-1, optional=True, hint="; -1 is no limit"),
}


def _explains_unknown_names(cls: type[T]) -> type[T]:
    """Make an unknown keyword of a dataclass a RequestError with the nearest field, instead of a
    TypeError.
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    init = cls.__init__

    @functools.wraps(init)
    def explained(self: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                if name in SAMPLING and name not in _SYNONYMS:
                    raise RequestError(
                        f"SamplingParams has no field {shown(name)}: {SAMPLING[name]}"
                    )
                hint = nearest(name[:SHOWN], known, _SYNONYMS)
                raise RequestError(
                    f"SamplingParams has no field {shown(name)}{hint}; it has {', '.join(known)}"
                )
        init(self, **values)

    setattr(cls, "__init__", explained)  # noqa: B010, an assignment does not type-check
    return cls


@_explains_unknown_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of drawing tokens and of ending a completion. By keyword only.

    n                    completions per prompt, each with its own seed
    temperature          divides the logits; below 1e-5 the most likely token is taken (greedy)
    top_p                smallest set of tokens whose probability reaches this
    top_k                only the k most likely tokens; 0 or -1: all
    min_p                only tokens at least this share of the most likely one's probability
    seed                 same seed, prompt and parameters: same tokens; None: a fresh one for the
                         request
    max_tokens           tokens to generate at most; None: up to the end of the context; 0, only
                         with prompt_logprobs or pooling, and n=1: generate nothing
    min_tokens           no stop id is drawn and no stop string applies before this many tokens
    stop                 strings that end the text, which ends right before them; one string or
                         several
    stop_token_ids       ids that end the completion besides the model's own
    include_stop_str_in_output  the text ends right after the stop string, and includes the text of
                         a stop id that ended it; of a special token only if skip_special_tokens is
                         False
    ignore_eos           the model's own stop ids do not end the completion
    presence_penalty     subtracted once from the logit of each token already generated
    frequency_penalty    subtracted from the logit of a token for each time it was generated
    repetition_penalty   divides positive and multiplies negative logits of tokens in the prompt or
                         the output
    logit_bias           token id -> number added to its logit
    allowed_token_ids    only these ids are drawn, one or more; None: all. Without a stop id among
                         them only max_tokens, a stop string or a structured output ends the
                         completion
    bad_words            strings that are not generated. Each is tokenized twice, as the start of a
                         text and after a space; the last token is not drawn where the completion
                         ends with all tokens before it
    logprobs             log-probabilities of this many most likely tokens, besides the token's own;
                         None: none at all
    prompt_logprobs      the same for the prompt's tokens
    detokenize           give text back; without it, or without a tokenizer, there are token ids
                         only
    skip_special_tokens  leave special tokens out of the text
    truncate_prompt_tokens  keep only this many tokens of the prompt, the last ones; -1: as many as
                         the context has room for, less max_tokens, or less one token if that is
                         None; None: all
    cache_salt           requests share cached prefixes only with requests of the same salt
    prediction           the text that the completion may be, or be like, as in OpenAI's API: where
                         it is right, tokens come faster, on a CPU and unless `speculate` is 0. It changes
                         no result
    timeout_s            seconds after which the request ends with the tokens it has by then and
                         finish_reason "timeout", counted from when it is added; None: no limit
    priority             lower ones are admitted earlier, and preempted later, where the engine has
                         scheduling_policy "priority"; else only 0. It changes no result
    thinking_token_budget  tokens that are drawn within thoughts at most, of the whole completion:
                         then the model's closing tag follows, and the model goes on. Tokens of the
                         tags and of the prompt do not count (`engine/thinking.py`); None or -1: no
                         limit
    thinking_tags        the texts before and after a thought, two strings, for thinking_token_budget;
                         None: those of the model, as its chat template shows them
    structured_outputs   the form that the complete text must have: a StructuredOutputs, or its
                         fields as a mapping. Tokens that do not fit are not drawn, and the
                         completion ends with "stop" when nothing can follow, also under ignore_eos
                         and before min_tokens
    pooling              a vector of the prompt is asked for, with max_tokens 0, and no text
                         (`LLM.embed`); None: not

    `SamplingLimits` has the largest values and the most entries of each field. `stop`,
    `stop_token_ids`, `bad_words` and `logit_bias` also take None for none; lists are stored as
    tuples. Raises RequestError for a value of the wrong type or outside its range.
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
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    prediction: str | None = None
    timeout_s: float | None = None
    priority: int = 0
    thinking_token_budget: int | None = None
    thinking_tags: Sequence[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    pooling: PoolingParams | None = None

    def __post_init__(self) -> None:
        for name, value in _checked(self, LIMITS).items():
            object.__setattr__(self, name, value)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
            )
        if self.pooling is not None and not isinstance(self.pooling, PoolingParams):
            raise RequestError(f"pooling is {self.pooling!r:.60}; give a PoolingParams")
        if self.pooling is not None and self.max_tokens != 0:
            raise RequestError(f"max_tokens is {self.max_tokens} with pooling; it must be 0")
        if self.max_tokens == 0 and self.prompt_logprobs is None and self.pooling is None:
            raise RequestError(
                "max_tokens is 0 and prompt_logprobs None; set prompt_logprobs to score the prompt, "
                "or max_tokens to 1 or more"
            )
        if self.max_tokens == 0 and self.n != 1:
            raise RequestError(f"n is {self.n} and max_tokens 0; to score a prompt n must be 1")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is []: no token could be drawn; give one id or more, or leave it out"
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens is 0: nothing would be left of the prompt; give 1 or more, or -1"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop needs the text, and detokenize is False; use stop_token_ids, or leave detokenize True"
            )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError if a field names a token id outside [0, vocab_size)."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name) or ()
            if max(ids, default=-1) >= vocab_size:
                outside = [token for token in ids if token >= vocab_size]
                raise RequestError(
                    f"{name} names token id {outside[0]}; the vocabulary has 0 to {vocab_size - 1}"
                )


def check_limits(params: SamplingParams, limits: SamplingLimits) -> None:
    """Raise RequestError, with the field, its value and its limit, for `params` that ask for more
    than `limits`.
    """
    _checked(params, limits)


def _checked(params: SamplingParams, limits: SamplingLimits) -> dict[str, object]:
    """Return each field's value in its stored form. Raises RequestError for a wrong type or a value
    beyond `limits`.
    """

    def number(name: str) -> float | None:
        value = getattr(params, name)
        within = RANGES[name]
        if value is None and within.optional:
            return None
        high = getattr(limits, name, within.high)
        if within.whole:
            return _whole(name, value, int(within.low), int(high), within.hint)
        return _number(name, value, within.low, high, within.above, within.hint)

    return {
        "n": number("n"),
        "temperature": number("temperature"),
        "top_p": number("top_p"),
        "top_k": number("top_k"),
        "min_p": number("min_p"),
        "seed": number("seed"),
        "max_tokens": number("max_tokens"),
        "min_tokens": number("min_tokens"),
        "stop": _strings("stop", params.stop, limits.stop, limits.stop_length),
        "stop_token_ids": _token_ids(
            "stop_token_ids", params.stop_token_ids, limits.stop_token_ids
        ),
        "include_stop_str_in_output": _flag(
            "include_stop_str_in_output", params.include_stop_str_in_output
        ),
        "ignore_eos": _flag("ignore_eos", params.ignore_eos),
        "presence_penalty": number("presence_penalty"),
        "frequency_penalty": number("frequency_penalty"),
        "repetition_penalty": number("repetition_penalty"),
        "logit_bias": _biases("logit_bias", params.logit_bias, limits.logit_bias),
        "allowed_token_ids": None
        if params.allowed_token_ids is None
        else _token_ids("allowed_token_ids", params.allowed_token_ids, limits.allowed_token_ids),
        "bad_words": _strings("bad_words", params.bad_words, limits.bad_words, limits.stop_length),
        "logprobs": number("logprobs"),
        "prompt_logprobs": number("prompt_logprobs"),
        "detokenize": _flag("detokenize", params.detokenize),
        "skip_special_tokens": _flag("skip_special_tokens", params.skip_special_tokens),
        "truncate_prompt_tokens": number("truncate_prompt_tokens"),
        "cache_salt": _salt("cache_salt", params.cache_salt, limits.cache_salt),
        "prediction": _text("prediction", params.prediction),
        "timeout_s": number("timeout_s"),
        "priority": number("priority"),
        "thinking_token_budget": number("thinking_token_budget"),
        "thinking_tags": _tags("thinking_tags", params.thinking_tags, limits.stop_length),
        "structured_outputs": None
        if params.structured_outputs is None
        else StructuredOutputs.of(params.structured_outputs),
    }


def _whole(name: str, value: object, low: int, high: int = LARGEST_WHOLE, hint: str = "") -> int:
    """Return `value` as an int in [low, high]; bool is not a number."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is not None and low <= number <= high:
        return number
    # Do not mention the upper limit of int64: it would not help
    unbounded = high == LARGEST_WHOLE and (number is None or number < low)
    within = f"{low} or more" if unbounded else f"{low} to {high}"
    raise RequestError(f"{name} is {shown(value)}; it must be a whole number, {within}{hint}")


def _number(
    name: str, value: object, low: float, high: float, above: bool = False, hint: str = ""
) -> float:
    """Return `value` as a finite float in [low, high], or in (low, high] if `above`; bool is not a
    number.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        number = as_float(value)
        if math.isfinite(number) and low <= number <= high and not (above and number == low):
            return number + 0.0  # -0.0 is 0.0, so that no penalty is no penalty to the bit
    within = f"greater than {low} and at most {high}" if above else f"{low} to {high}"
    raise RequestError(f"{name} is {shown(value)}; it must be a finite number, {within}{hint}")


def _token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    """Return a list of at most `most` token ids, quickly for plain ints: there may be as many as
    the vocabulary has.
    """
    ids = _entries(name, value, most)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= LARGEST_WHOLE:
        return tuple(ids)
    return tuple(_whole(f"{name}[{i}]", token, 0) for i, token in enumerate(ids))


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; it must be True or False")
    return value


def _entries(name: str, value: object, most: int) -> list[Any]:
    """Return the entries of a list of at most `most`. Of a longer or infinite one, no more than one
    entry beyond is read.
    """
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {shown(value)}; it must be a list")
    if isinstance(value, Sized) and len(value) > most:
        raise _too_many(name, value, most)
    entries = list(itertools.islice(value, most + 1))
    if len(entries) > most:
        raise _too_many(name, value, most)
    return entries


def _too_many(name: str, value: object, most: int) -> RequestError:
    count = len(value) if isinstance(value, Sized) else f"more than {most}"
    return RequestError(f"{name} has {count} entries; at most {most} are allowed")


def _strings(name: str, value: object, most: int, longest: int) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(_entries(name, value, most))
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not 1 <= len(string) <= longest:
            raise RequestError(
                f"{name}[{i}] is {shown(string)}; it must be a string of 1 to {longest} characters"
            )
    return strings


def _tags(name: str, value: object, longest: int) -> tuple[str, ...] | None:
    if value is None:
        return None
    tags = _strings(name, value, 2, longest)
    if len(tags) != 2 or isinstance(value, str):
        raise RequestError(
            f"{name} is {shown(value)}; it must be two strings, as ('<think>', '</think>')"
        )
    for i, tag in enumerate(tags):
        _text(f"{name}[{i}]", tag)
    return tags


def _biases(name: str, value: object, most: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {shown(value)}; it must map token ids to numbers")
    if len(value) > most:
        raise _too_many(name, value, most)
    return {
        _whole(f"{name} key", token, 0): _number(f"{name}[{token}]", bias, -LARGEST, LARGEST)
        for token, bias in value.items()
    }


def _text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} is {shown(value)}; it must be a string or None")
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not Unicode: {error.reason} at character {error.start}"
        ) from error
    return value


def _salt(name: str, value: object, longest: int) -> str | None:
    if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= longest):
        raise RequestError(
            f"{name} is {shown(value)}; it must be a string of 1 to {longest} characters"
        )
    return value
