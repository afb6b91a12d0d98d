"""The messages between the server's two processes, as JSON values; `frames.py` puts them on a socket.

To the engine: a start, then requests and aborts. From the engine: facts about the model, then what happens. Every
message is a list whose first entry names it. A step, the message that there are many of, is flat, without names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from freight.outputs import (
    CompletionDelta,
    EngineStats,
    FinishReason,
    Logprob,
    RequestDelta,
    RequestTimes,
    TokenLogprobs,
)
from freight.sampling import SamplingParams
from freight.structured import StructuredOutputs

CAP = 1 << 28  # bytes of a message: log-probabilities of a long prompt

# from the engine's process
OPENED = "opened"  # headers are read: an EngineFacts without what needs weights
READY = "ready"  # the model is loaded: a whole EngineFacts
FAILED = "failed"  # it cannot be loaded: the error, and the process's exit status
ACCEPTED = "accepted"
REFUSED = "refused"
STEPPED = "stepped"
STATS = "stats"
# to it
START = "start"
ADD = "add"
ABORT = "abort"


@dataclass(frozen=True)
class EngineFacts:
    """What the server's other process has to know of the model.

    tokenizer     the folder of its tokenizer; None: there is none, and prompts are token ids
    defaults      sampling parameters of generation_config.json
    kv_cache      `LLM.kv_cache_info`, and `tokens_at_16_bits` that the same memory would hold; empty until loaded
    reproducible  whether the same fingerprint and seed promise the same bits
    """

    tokenizer: str | None
    vocab_size: int
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    kv_cache: Mapping[str, Any]
    kernels: str = ""
    fingerprint: str = ""
    reproducible: bool = False


def facts_to_json(facts: EngineFacts) -> dict[str, Any]:
    return asdict(facts)


def facts_from_json(value: Mapping[str, Any]) -> EngineFacts:
    return EngineFacts(**{**value, "stop_token_ids": tuple(value["stop_token_ids"])})


_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their default."""
    changed = {name: getattr(params, name) for name, value in _DEFAULTS.items() if getattr(params, name) != value}
    if "structured_outputs" in changed:
        changed["structured_outputs"] = StructuredOutputs.of(changed["structured_outputs"]).given()
    if "logit_bias" in changed:
        changed["logit_bias"] = list(changed["logit_bias"].items())  # JSON has no whole numbers as keys
    return changed


def params_from_json(value: Mapping[str, Any]) -> SamplingParams:
    """The same parameters; those that made the value were valid, so these are."""
    values = dict(value)
    if "logit_bias" in values:
        values["logit_bias"] = dict(map(tuple, values["logit_bias"]))
    return SamplingParams(**values)


def stats_to_json(stats: EngineStats) -> list[int]:
    return list(astuple(stats))


def stats_from_json(value: Sequence[int]) -> EngineStats:
    return EngineStats(*value)


def delta_to_json(delta: RequestDelta) -> list[Any]:
    scored, times = delta.prompt_logprobs, delta.times
    return [
        delta.request_id,
        [
            [
                one.index,
                one.token_ids,
                one.text,
                one.finish_reason,
                one.stop_reason,
                one.error,
                None if one.logprobs is None else [_entries(entry) for entry in one.logprobs],
            ]
            for one in delta.outputs
        ],
        delta.finished,
        None if scored is None else [None if entry is None else _entries(entry) for entry in scored],
        delta.num_cached_tokens,
        None if times is None else list(astuple(times)),
    ]


def delta_from_json(value: Sequence[Any]) -> RequestDelta:
    request_id, outputs, finished, scored, cached, times = value
    return RequestDelta(
        request_id,
        [
            CompletionDelta(
                index,
                token_ids,
                text,
                None if logprobs is None else [_logprobs(entry) for entry in logprobs],
                None if reason is None else FinishReason(reason),
                stop,
                error,
            )
            for index, token_ids, text, reason, stop, error, logprobs in outputs
        ],
        finished,
        None if scored is None else [None if entry is None else _logprobs(entry) for entry in scored],
        cached,
        None if times is None else RequestTimes(*times),
    )


def _entries(entry: TokenLogprobs) -> list[list[Any]]:
    return [[token, one.logprob, one.rank, one.decoded_token] for token, one in entry.items()]


def _logprobs(entries: Sequence[Sequence[Any]]) -> TokenLogprobs:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in entries}
