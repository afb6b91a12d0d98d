"""What an FP8 cache costs and saves: every cache and the 16-bit one over the same text, in one
pass.

The weights are loaded once: a decoder takes its cache as an argument, so each cache is a separate
pool of the same model, and the distributions of one chunk are compared before the next chunk
is computed (`measure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from freight.base.tables import markdown
from freight.base.terminal import OnProgress, unseen
from freight.cache.pages import Empty
from freight.cache.pool import KVPool, allocate_pool
from freight.engine.runner import ModelRunner
from freight.kernels.interface import KernelSet
from freight.lab.columns import scales_name, text_rows
from freight.lab.evaluate.documents import cut_documents, window_length
from freight.lab.evaluate.measure import SettingRun, mean_perplexity, measure
from freight.lab.evaluate.stored_error import Probe, probed
from freight.model.decoder import LanguageModel
from freight.model.open import OpenModel, open_model
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig

MEMORY = 64 * 2**20  # bytes of cache for which `tokens_in_64_mib` is given


@dataclass(frozen=True)
class CacheScore:
    """One cache over the text. `mean_kl` in nats per token and `same_top_share` are against the
    16-bit cache.

    `cut_off_share` of its keys and values were clipped, as they lay beyond the range of their
    scales.
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

    @property
    def scales(self) -> str:
        return scales_name(self.granularity, self.scale_source)


class CacheRun(SettingRun):
    """A setting that differs from the others in its cache only."""

    def score(self) -> CacheScore:
        names = self.config.kv.names()
        spec = self.runner.pool.spec
        return CacheScore(
            dtype=str(names["dtype"]),
            granularity=names["granularity"],
            scale_source=names["scale_source"],
            perplexity=mean_perplexity(self.token_logprobs),
            mean_kl=self.mean_kl,
            same_top_share=float(self.token_same.double().mean()),
            bytes_per_token=spec.bytes_per_token,
            tokens_in_64_mib=spec.tokens_in(MEMORY),
            cut_off_share=self.clipped_share,
            num_tokens=len(self.token_kl),
            seconds=self.seconds,
        )


def compare_caches(
    args: EngineArgs,
    caches: Sequence[tuple[str, str] | KVCacheConfig],
    text: str | Sequence[int],
    window: int | None = None,
    max_tokens: int | None = None,
    on_progress: OnProgress = unseen,
) -> list[CacheScore]:
    """Score on `text` a cache in the compute dtype, and every one of `caches` that differs from it.

    A cache is (kv_cache_dtype, kv_scales), or a resolved KVCacheConfig.

    `window` is the number of tokens scored together (default: the model's context, at most 1024);
    of the text, the first `max_tokens` count. `on_progress(done, total)` counts the tokens of every cache. Raises
    ConfigError for a text of fewer than two tokens, for a window beyond the model's context, and
    what `resolve` raises, before weights are read.
    """
    return [run.score() for run in run_caches(args, caches, text, window, max_tokens, on_progress)]


def run_caches(
    args: EngineArgs,
    caches: Sequence[tuple[str, str] | KVCacheConfig],
    text: str | Sequence[int],
    window: int | None = None,
    max_tokens: int | None = None,
    on_progress: OnProgress = unseen,
    kernels: Sequence[KernelSet | None] = (),
) -> list[CacheRun]:
    """`compare_caches`, but returns the runs, with the log-probability of each token.

    `kernels` store and read the last of `caches`, each where it is not None.
    """
    opened = open_model(args)
    configs = resolve_caches(opened, caches)
    length = window_length(window, configs[0].max_model_len)
    windows = [part.window for part in cut_documents(opened, [text], length, max_tokens)]
    usual = [None] * (len(configs) - len(kernels))
    runs = []
    with opened.threads(configs[0]):
        decoder = load_for(opened, configs, length)
        for config, kernel_set in zip(configs, [*usual, *kernels], strict=True):
            runs.append(cache_run(opened, decoder, config, length, kernels=kernel_set))
        measure(runs, windows, on_progress)
    return runs


def resolve_caches(
    opened: OpenModel, caches: Sequence[tuple[str, str] | KVCacheConfig]
) -> list[EngineConfig]:
    """Return the 16-bit cache first, then every one of `caches` with another format, or resolved."""
    configs = [plain_config(opened)]
    for cache in caches:
        if isinstance(cache, KVCacheConfig):
            state = cache.state or configs[0].kv.state
            configs.append(replace(configs[0], kv=replace(cache, state=state)))
        else:
            config = opened.resolve(replace(opened.args.with_cache(cache[0]), kv_scales=cache[1]))
            if config.kv.stores != configs[0].kv.stores:  # that one is the first row
                configs.append(config)
    return configs


def plain_args(opened: OpenModel) -> EngineArgs:
    """Return the options that the others are compared with: the same, with a cache in the compute
    dtype.
    """
    args = opened.args.with_plain_cache()
    return args.with_cache(str(opened.resolve(args).compute_format))


def plain_config(opened: OpenModel) -> EngineConfig:
    """Return the configuration of `plain_args`."""
    return opened.resolve(plain_args(opened))


def load_for(
    opened: OpenModel, configs: Sequence[EngineConfig], num_positions: int | None = None
) -> LanguageModel:
    """Return the weights for all of `configs`. FP8 products apply to E4M3 caches only, so the
    others do not change by them.

    `num_positions` is as in `OpenModel.load`.
    """
    config = replace(configs[0], fp8_attention=any(config.fp8_attention for config in configs))
    return opened.load(config, num_positions)


def cache_run(
    opened: OpenModel,
    decoder: LanguageModel,
    config: EngineConfig,
    length: int,
    probe: Probe | None = None,
    kernels: KernelSet | None = None,
) -> CacheRun:
    """Return a run of `config` with a cache for `length` tokens, shown to `probe` if there is one.

    `kernels` store and read the cache, if not those of `config`.
    """
    pool = pool_for(opened, decoder, config, length, kernels)
    if probe is not None:
        pool = probed(pool, probe)
    return CacheRun(config, ModelRunner(decoder, pool, config.device), probe)


def pool_for(
    opened: OpenModel,
    decoder: LanguageModel,
    config: EngineConfig,
    length: int,
    kernels: KernelSet | None = None,
    empty: Empty | None = None,
) -> KVPool:
    """Allocate the cache of `config` for one sequence of `length` tokens. `kernels` and `empty` are
    those of `allocate_pool`, if not the usual ones.
    """
    spec = opened.cache_spec(config)
    kernels = kernels or opened.kernels(config)
    blocks = spec.blocks_of(length)
    return allocate_pool(spec, config.kv, blocks, kernels, config.device, decoder.rotaries, empty)


_COLUMNS = {
    "KV cache": "{0.dtype}",
    "scales": "{0.scales}",
    "perplexity": "{0.perplexity:.3f}",
    "mean KL": "{0.mean_kl:.5f}",
    "same top": "{0.same_top_share:.2%}",
    "bytes/token": "{0.bytes_per_token}",
    "in 64 MiB": "{0.tokens_in_64_mib:,}",
}


def as_table(scores: Sequence[CacheScore]) -> str:
    """For people: a row a cache, the first being the one that the others are compared with. KL in
    nats.
    """
    return markdown(text_rows(_COLUMNS, scores), num_left=2)
