"""The messages between an engine's process and its parent, as JSON values; `frames.py` sends them.

To the engine: a start, then requests, aborts and pings. From the engine: facts about the model,
then events. Every message is a list whose first entry names it. The contents of a step, the most
frequent message, are flat lists without names. Log-probabilities of a prompt are columns of numbers
in base64, in native byte order: both processes are on one machine.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any, TypeVar

from freight.base.fields import JsonDict, JsonObject
from freight.cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheChange,
    CacheChanged,
    CacheCleared,
)
from freight.engine.adapters import LoadedAdapter, LoRARequest
from freight.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    FreightError,
    KernelError,
    RankError,
    RequestError,
)
from freight.model.config.pooling import PoolingActivation, PoolingConfig, PoolingKind
from freight.outputs import (
    CompletionDelta,
    EngineStats,
    FinishReason,
    Logprob,
    Pooled,
    RequestDelta,
    RequestTimes,
    Scores,
    StoreStats,
    TokenLogprobs,
)
from freight.pooling import PoolingParams, PoolingTask
from freight.sampling import SamplingParams
from freight.structured import StructuredOutputs

T = TypeVar("T")
Entry = tuple[int, float, int, str | None]  # a token, log-probability, rank and text

CAP = 1 << 28  # bytes of a message
MOST_ENTRIES = 8192  # log-probabilities in a message, roughly: some 200 KB, more with their texts

# from the engine's process
OPENED = "opened"  # headers are read: an EngineFacts without the fields that need weights
READY = "ready"  # the model is loaded: a complete EngineFacts
FAILED = "failed"  # it cannot be loaded: the error
ACCEPTED = "accepted"
REFUSED = "refused"
STEPPED = "stepped"
STATS = "stats"
ADAPTERS = "adapters"  # those that are loaded now, the command that this answers, and its error
CHANGED = "changed"  # what a change came to: its command, fingerprint, sleep level, and its error
CACHE = "cache"  # what the cache gained and lost
LOST = "lost"  # a delta is too long for a message: the request, and why
PONG = "pong"  # the answer to a ping: seconds without progress in the steps
# to it
START = "start"
ADD = "add"
ABORT = "abort"
LOAD_ADAPTER = "load adapter"
UNLOAD_ADAPTER = "unload adapter"
CHANGE = "change"  # weights, cache or steps: a command's id, `messages.Action`, and its value
PING = "ping"


@dataclass(frozen=True)
class EngineFacts:
    """Facts about the model that the parent needs.

    tokenizer     the folder of its tokenizer; None: there is none, and prompts are token ids
    defaults      sampling parameters of generation_config.json
    kv_cache      `LLM.kv_cache_info`, and `tokens_at_16_bits` that the same memory would hold;
                  empty until loaded
    drafts        whether steps have drafts
    reproducible  whether an equal fingerprint and seed guarantee equal bits
    ranks         processes that compute the model together
    max_adapters  adapters that can be loaded at a time; 0: the engine takes none
    adapters      those that are loaded
    pooling       how the model makes a vector of a prompt; None: it only generates
    generates     whether text may be asked of it
    """

    tokenizer: str | None
    vocab_size: int
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    defaults: JsonObject
    kv_cache: JsonObject
    kernels: str = ""
    fingerprint: str = ""
    reproducible: bool = False
    drafts: bool = False
    ranks: int = 1
    max_adapters: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()
    pooling: PoolingConfig | None = None
    generates: bool = True


_ERRORS = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        RequestError,
        CheckpointError,
        CapacityError,
        KernelError,
        RankError,
    )
}


def error_to_json(error: FreightError) -> list[str]:
    """The name of its class, as far as Freight's callers know it, and its message."""
    for kind in type(error).__mro__:
        if kind.__name__ in _ERRORS:
            return [kind.__name__, str(error)]
    return [FreightError.__name__, str(error)]


def error_from_json(kind: str, message: str) -> FreightError:
    return _ERRORS.get(kind, FreightError)(message)


def exit_status(error: FreightError) -> int:
    """Of a process that ends by `error`: 2 for what was asked for, 1 for what was found."""
    if isinstance(error, ConfigError | RequestError):
        return 2
    return 1


def facts_to_json(facts: EngineFacts) -> JsonDict:
    return asdict(facts) | {"adapters": adapters_to_json(facts.adapters)}


def facts_from_json(value: JsonObject) -> EngineFacts:
    facts = EngineFacts(**{**value, "stop_token_ids": tuple(value["stop_token_ids"])})
    pooling = None
    if value["pooling"] is not None:
        pooling = pooling_from_json(value["pooling"])
    return replace(facts, adapters=adapters_from_json(value["adapters"]), pooling=pooling)


def pooling_from_json(value: JsonObject) -> PoolingConfig:
    """Build the configuration from `asdict` of it; the layers, which the engine alone needs, are left
    out.
    """
    lists = {name: tuple(value[name]) for name in ("dimensions", "token_ids", "labels")}
    enums = {
        "task": PoolingTask(value["task"]),
        "kind": PoolingKind(value["kind"]),
        "activation": PoolingActivation(value["activation"]),
    }
    return PoolingConfig(**{**value, **lists, **enums, "layers": ()})


def adapters_to_json(adapters: Sequence[LoadedAdapter]) -> list[Any]:
    return list(map(astuple, adapters))


def adapters_from_json(value: Sequence[Sequence[Any]]) -> tuple[LoadedAdapter, ...]:
    return tuple(LoadedAdapter(*fields) for fields in value)


def request_to_json(adapter: LoRARequest | None) -> list[Any] | None:
    """Return the name and the path of the adapter of a request."""
    if adapter is None:
        return None
    return [adapter.lora_name, adapter.lora_path]


def request_from_json(value: Sequence[str] | None) -> LoRARequest | None:
    if value is None:
        return None
    name, path = value
    return LoRARequest(name, lora_path=path)


_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}


def params_to_json(params: SamplingParams) -> JsonDict:
    """Return the fields that are not at their default."""
    changed: JsonDict = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default:
            changed[name] = value
    if "pooling" in changed:
        changed["pooling"] = asdict(changed["pooling"])
    if "structured_outputs" in changed:
        changed["structured_outputs"] = StructuredOutputs.of(changed["structured_outputs"]).given()
    if "logit_bias" in changed:
        # JSON has no integer keys.
        changed["logit_bias"] = list(changed["logit_bias"].items())
    return changed


def params_from_json(value: JsonObject) -> SamplingParams:
    """Build the parameters from `params_to_json`. They were valid when they were sent."""
    values = dict(value)
    if "logit_bias" in values:
        values["logit_bias"] = dict(map(tuple, values["logit_bias"]))
    if "pooling" in values:
        values["pooling"] = PoolingParams(**values["pooling"])
    return SamplingParams(**values)


def step_messages(
    deltas: Sequence[RequestDelta], steps: Sequence[tuple[float, int]]
) -> Iterator[list[Any]]:
    """Yield the deltas of some steps, as messages short enough not to block the reader for long.

    A prompt's log-probabilities, which may be hundreds of megabytes, are split over messages.
    """
    plain_deltas: list[Any] = []
    room = MOST_ENTRIES
    for delta in deltas:
        plain = _plain_to_json(delta)
        if plain is not None:
            plain_deltas.append(plain)
            continue
        for part in _parts(delta):
            plain_deltas.append(delta_to_json(part))
            room -= _num_entries(part)
            if room <= 0:
                yield [STEPPED, plain_deltas, []]
                plain_deltas = []
                room = MOST_ENTRIES
    yield [STEPPED, plain_deltas, steps]


def _num_entries(delta: RequestDelta) -> int:
    count = 0
    if delta.scores is not None:
        count = len(delta.scores.ids)
    for output in delta.outputs:
        count += sum(map(len, output.logprobs or ()))
    return count


def _parts(delta: RequestDelta) -> Iterator[RequestDelta]:
    """Split `delta` into several with few prompt log-probabilities each, equivalent together."""
    scores = delta.scores
    if scores is None:
        yield delta
        return
    size = max(1, MOST_ENTRIES // scores.width)
    last = max(0, len(scores) - 1) // size * size
    for begin in range(0, last, size):
        part = scores.part(begin, begin + size)
        yield RequestDelta(
            delta.request_id,
            outputs=[],
            finished=False,
            scores=part,
            num_cached_tokens=delta.num_cached_tokens,
        )
    yield replace(delta, scores=scores.part(last, len(scores)))


def changed_to_json(changed: CacheChanged) -> list[Any]:
    return [list(map(_change_to_json, changed.changes)), changed.dropped]


def changed_from_json(changes: Sequence[Sequence[Any]], dropped: int) -> CacheChanged:
    return CacheChanged([_change(*change) for change in changes], dropped)


def _change_to_json(change: CacheChange) -> list[Any]:
    """Return a list of five entries for stored blocks, of one for removed ones, of none where all are
    gone.
    """
    match change:
        case BlocksStored():
            return [change.hashes, change.parent, change.token_ids, change.salt, change.adapter]
        case BlocksRemoved(hashes):
            return [hashes]
    return []


def _change(*values: Any) -> CacheChange:
    if not values:
        return CacheCleared()
    if len(values) == 1:
        return BlocksRemoved(*values)
    return BlocksStored(*values)


def stats_to_json(stats: EngineStats) -> list[Any]:
    return list(astuple(stats))


def stats_from_json(value: Sequence[Any]) -> EngineStats:
    *_, store, running, waiting = value
    if store is not None:
        store = StoreStats(*store)
    return replace(
        EngineStats(*value),
        store=store,
        running_adapters=tuple(running),
        waiting_adapters=tuple(waiting),
    )


_PLAIN = (False, None, None, None, None, 0, None, None, None)


def _plain_to_json(delta: RequestDelta) -> list[Any] | None:
    """Return a short form of a delta that has nothing but tokens and text of a first completion, as
    nearly all have; None for the others.
    """
    if len(delta.outputs) != 1:
        return None
    output = delta.outputs[0]
    ends = (delta.finished, delta.times, output.finish_reason, output.stop_reason, output.error)
    if (*ends, output.index, output.logprobs, delta.scores, delta.pooled) != _PLAIN:
        return None
    return [delta.request_id, output.token_ids, output.text, delta.num_cached_tokens]


def delta_to_json(delta: RequestDelta) -> list[Any]:
    """Return a list of four entries or of seven, for `delta_from_json`."""
    plain = _plain_to_json(delta)
    if plain is not None:
        return plain
    return [
        delta.request_id,
        list(map(_output_to_json, delta.outputs)),
        delta.finished,
        _optional(_scores_to_json, delta.scores),
        delta.num_cached_tokens,
        _optional(astuple, delta.times),
        _optional(_pooled_to_json, delta.pooled),
    ]


def _optional(convert: Callable[[T], object], value: T | None) -> object:
    """Return what `convert` makes of a value; None for None."""
    if value is None:
        return None
    return convert(value)


def _output_to_json(output: CompletionDelta) -> list[object]:
    return [
        output.index,
        output.token_ids,
        output.text,
        output.finish_reason,
        output.stop_reason,
        output.error,
        _optional(_logprobs_to_json, output.logprobs),
    ]


def delta_from_json(value: Sequence[Any]) -> RequestDelta:
    if len(value) == 4:
        request_id, token_ids, text, cached = value
        plain = CompletionDelta(0, token_ids, text, None, None, None, None)
        return RequestDelta(request_id, [plain], False, None, cached, None)
    request_id, outputs, finished, scores, cached, times, pooled = value
    if scores is not None:
        scores = _scores(*scores)
    if times is not None:
        times = RequestTimes(*times)
    if pooled is not None:
        pooled = Pooled(array("f", b64decode(pooled)))
    completions = [_output(*output) for output in outputs]
    return RequestDelta(request_id, completions, finished, scores, cached, times, pooled)


def _output(
    index: int,
    token_ids: list[int],
    text: str,
    reason: str | None,
    stop_reason: int | str | None,
    error: str | None,
    logprobs: list[list[Entry]] | None,
) -> CompletionDelta:
    return CompletionDelta(
        index,
        token_ids,
        text,
        None if logprobs is None else list(map(_logprobs, logprobs)),
        None if reason is None else FinishReason(reason),
        stop_reason,
        error,
    )


def _pooled_to_json(pooled: Pooled) -> str:
    return b64encode(pooled.values.tobytes()).decode("ascii")


def _scores_to_json(scores: Scores) -> list[object]:
    columns = (scores.ids, scores.logprobs, scores.ranks)
    return [scores.width, *(b64encode(column.tobytes()).decode("ascii") for column in columns)]


def _scores(width: int, *columns: str) -> Scores:
    ids, logprobs, ranks = map(b64decode, columns)
    return Scores(width, array("i", ids), array("f", logprobs), array("i", ranks))


def _logprobs_to_json(logprobs: Sequence[TokenLogprobs]) -> list[list[Entry]]:
    return list(map(_entries, logprobs))


def _entries(logprobs: TokenLogprobs) -> list[Entry]:
    return [
        (token, logprob.logprob, logprob.rank, logprob.decoded_token)
        for token, logprob in logprobs.items()
    ]


def _logprobs(entries: Sequence[Entry]) -> TokenLogprobs:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in entries}
