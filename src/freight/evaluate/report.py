"""What an FP8 cache costs and saves: every cache and the 16-bit one over the same text, in one pass.

The weights are loaded once: a decoder takes its cache as an argument, so each cache is a pool of its own behind the
same model, and the distributions of one chunk are compared before the next chunk is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from freight.cache.pool import allocate_pool
from freight.config.engine import EngineArgs, EngineConfig, KVCacheConfig
from freight.engine.runner import ModelRunner
from freight.errors import ConfigError
from freight.evaluate.divergence import kl_divergence, same_top
from freight.evaluate.perplexity import Window, cut_windows, perplexity, target_logprobs
from freight.models.decoder import Decoder
from freight.models.open import OpenModel, open_model

MEMORY = 64 * 2**20  # bytes of cache for which `tokens_in_64_mib` is given


@dataclass(frozen=True)
class CacheScore:
    """One cache over the text. `mean_kl` in nats per token and `same_top_share` are against the 16-bit cache.

    `cut_off_share` of its keys and values were clipped, as they lay beyond the range of their scales.
    """

    dtype: str
    granularity: str | None
    scale_source: str | None
    perplexity: float
    mean_kl: float
    same_top_share: float
    bytes_per_token: int
    tokens_in_64_mib: int
    cut_off_share: float
    num_tokens: int
    seconds: float


@dataclass
class CacheRun:
    """One cache, with what has been measured of it so far. Sums are float64."""

    config: EngineConfig
    runner: ModelRunner
    logprob_sum: float = 0.0
    kl_sum: float = 0.0
    same_top: int = 0
    count: int = 0
    num_stored: int = 0
    seconds: float = 0.0
    parts: list[Tensor] = field(default_factory=list)

    @property
    def token_logprobs(self) -> Tensor:
        """Log-probability of each token of the text, in order, float32 [num_tokens]."""
        return torch.cat(self.parts)

    def logprobs(self, window: Window, start: int, stop: int) -> Tensor:
        """float32 log-probabilities after tokens start … stop - 1 of the window, [stop - start, vocab_size]."""
        begin = time.perf_counter()
        logits = self.runner.logits(window.token_ids[start:stop], start, self.runner.pool.whole)
        self.seconds += time.perf_counter() - begin
        self.num_stored += stop - start
        return torch.log_softmax(logits, -1)

    def add(self, reference: Tensor, own: Tensor, targets: Tensor) -> None:
        self.parts.append(target_logprobs(own, targets))
        self.logprob_sum += float(self.parts[-1].double().sum())
        self.kl_sum += float(kl_divergence(reference, own).double().sum())
        self.same_top += int(same_top(reference, own).sum())
        self.count += len(targets)

    def score(self) -> CacheScore:
        names, pool = self.config.kv.names(), self.runner.pool
        spec = pool.spec
        _, clipped = pool.counters()
        return CacheScore(
            dtype=str(names["dtype"]),
            granularity=names["granularity"],
            scale_source=names["scale_source"],
            perplexity=perplexity(self.logprob_sum, self.count),
            mean_kl=self.kl_sum / self.count,
            same_top_share=self.same_top / self.count,
            bytes_per_token=spec.bytes_per_token,
            tokens_in_64_mib=spec.tokens_in(MEMORY),
            cut_off_share=clipped / (self.num_stored * pool.values_per_token),
            num_tokens=self.count,
            seconds=self.seconds,
        )


def compare_caches(
    args: EngineArgs,
    caches: Sequence[tuple[str, str] | KVCacheConfig],
    text: str | Sequence[int],
    window: int | None = None,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CacheScore]:
    """Score on `text` a cache in the compute dtype, and every one of `caches` that differs from it.

    A cache is (kv_cache_dtype, kv_scales), or a resolved KVCacheConfig.

    `window` is the number of tokens judged together (default: the model's context, at most 1024); of the text, the
    first `max_tokens` count.
    `on_progress(done, total)` counts windows. Raises ConfigError for a text of fewer than two tokens, and what
    `resolve` raises, before weights are read.
    """
    return [run.score() for run in run_caches(args, caches, text, window, max_tokens, on_progress)]


def run_caches(
    args: EngineArgs,
    caches: Sequence[tuple[str, str] | KVCacheConfig],
    text: str | Sequence[int],
    window: int | None = None,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CacheRun]:
    """`compare_caches`, but returns the runs, with the log-probability of each token."""
    opened = open_model(args)
    plain = replace(
        args, kv_cache_dtype="float32", kv_scales="auto", quantization_param_path=None, attention_compute="auto"
    )
    plain = replace(plain, kv_cache_dtype=str(opened.resolve(plain).compute_format))
    configs = [opened.resolve(plain)]
    for cache in caches:
        if isinstance(cache, KVCacheConfig):
            configs.append(replace(configs[0], kv=cache))
        else:
            config = opened.resolve(replace(args, kv_cache_dtype=cache[0], kv_scales=cache[1]))
            if config.kv.format is not configs[0].kv.format:  # that one is the first row
                configs.append(config)
    length = min(window or 1024, configs[0].max_model_len)
    windows = text_windows(opened, text, length, max_tokens)
    # FP8 products apply to E4M3 caches only, so they do not change attention over the first cache
    with opened.threads(configs[0]):
        decoder = opened.load(replace(configs[0], fp8_attention=any(config.fp8_attention for config in configs)))
        num_blocks = -(-length // configs[0].block_size)
        device = configs[0].device
        runs = []
        for config in configs:
            spec = opened.cache_spec(config)
            kernels, blocks = opened.kernels(config), [num_blocks] * len(spec.groups)
            pool = allocate_pool(spec, config.kv, blocks, kernels, device, decoder.rotaries)
            runs.append(CacheRun(config, ModelRunner(decoder, pool, device)))
        chunk = configs[0].max_num_batched_tokens
        for done, part in enumerate(windows):
            on_progress(done, len(windows))
            for start in range(0, len(part.token_ids), chunk):
                stop = min(start + chunk, len(part.token_ids))
                _score_chunk(runs, part, start, stop)
        on_progress(len(windows), len(windows))
    return runs


def _score_chunk(runs: list[CacheRun], window: Window, start: int, stop: int) -> None:
    targets = torch.tensor(window.targets[start:stop], dtype=torch.int64, device=runs[0].runner.device)
    reference = runs[0].logprobs(window, start, stop)
    for run in runs:
        own = reference if run is runs[0] else run.logprobs(window, start, stop)
        run.add(reference, own, targets)


def text_windows(opened: OpenModel, text: str | Sequence[int], length: int, max_tokens: int | None) -> list[Window]:
    """The windows of a text, or of token ids. Raises ConfigError for fewer than two tokens."""
    token_ids, bos = text, opened.model.bos_token_id
    if isinstance(text, str):
        tokenizer = opened.load_tokenizer()
        if tokenizer is None:
            raise ConfigError("a text needs a tokenizer; with skip_tokenizer_init pass token ids")
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        bos = tokenizer.bos_token_id if tokenizer.encode("a")[:1] == [tokenizer.bos_token_id] else None
    assert not isinstance(token_ids, str)
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens; perplexity needs at least 2")
    return cut_windows(token_ids[:max_tokens], length, bos)


@dataclass(frozen=True)
class WeightBytes:
    """Memory of a loaded model: `embeddings` are the embedding and the head, `layers` all else, scales included."""

    layers: int
    embeddings: int


def weight_bytes(model: Decoder) -> WeightBytes:
    """What the tensors of `model` occupy, packed as its kernels have them. One that is there twice counts once."""
    outer = _tensors((model.embedding, model.head))
    inner = _tensors((model.layers, model.norm))
    rope = _tensors(tuple((rotary.cos, rotary.sin) for rotary in model.rotaries))
    return WeightBytes(
        layers=sum(size for at, size in inner.items() if at not in outer and at not in rope),
        embeddings=sum(outer.values()),
    )


def _tensors(value: object) -> dict[int, int]:
    """{address: bytes} of the tensors in `value`, however deep in tuples and dataclasses they lie."""
    if isinstance(value, Tensor):
        return {value.data_ptr(): value.nbytes}
    parts: Sequence[object] = ()
    if isinstance(value, tuple):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, part.name) for part in fields(value)]
    return {at: size for part in parts for at, size in _tensors(part).items()}


def as_json(scores: Sequence[CacheScore]) -> list[dict[str, Any]]:
    return [asdict(score) for score in scores]


def as_table(scores: Sequence[CacheScore]) -> str:
    """For people: a row a cache, the first being the one that the others are compared with. KL in nats."""
    headings = ("KV cache", "scales", "perplexity", "mean KL", "same top", "bytes/token", "in 64 MiB")
    rows = [
        (
            score.dtype,
            f"{score.granularity}, {score.scale_source}" if score.granularity else "none",
            f"{score.perplexity:.3f}",
            f"{score.mean_kl:.5f}",
            f"{score.same_top_share:.2%}",
            str(score.bytes_per_token),
            f"{score.tokens_in_64_mib:,}",
        )
        for score in scores
    ]
    return markdown([headings, *rows], num_left=2)


def markdown(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """A Markdown table, never wrapped. The first row is the heading; columns after the first `num_left` end flush."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width if i < num_left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    flush = [str.ljust if i < num_left else str.rjust for i in range(len(widths))]
    lines = [[pad(cell, width) for pad, cell, width in zip(flush, row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))
