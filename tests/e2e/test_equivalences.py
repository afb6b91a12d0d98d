"""How a request is computed changes no bit of it: cache bytes, scales, log-probabilities, tokens.

Alone or batched, whole or chunked prefill down to token by token, prefix hit or miss, preempted or not; for a 16-bit
cache, E4M3 with static scales, with those of tokens and of groups of a latent, E5M2, INT8, and those whose layers
differ; greedy and seeded; on the kernels that run by default, and for one cache on each other set that runs here, and
for one cache in models whose layers differ. `slow` cases do so for every variant of `tests/parity/variants.py`, with a
cache in 16 bits and in E4M3.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drafters import Told
from tests.parity.random_models import save_random
from tests.parity.variants import CASES, VARIANTS
from tests.scaled_models import with_scales
from transformers import PretrainedConfig

from freight import LLM, SamplingParams
from freight.cache import stored
from freight.checkpoint.extras import write_extras
from freight.checkpoint.reader import resolve_model
from freight.engine.runner import ModelRunner
from freight.engine.step import Mode
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import KVScales, LayerScales
from freight.kernels.cpu import library
from freight.kernels.select import select_kernels
from freight.model import open as opening
from freight.operands.tiles import STATE_TILE

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n" * 3
OTHERS = [f"def function_{i}(argument):\n" + f"    value = {i}\n" * i for i in range(16)]
CACHES: dict[str, dict[str, Any]] = {
    "bfloat16": {"kv_cache_dtype": "bfloat16"},
    "e4m3-tensor": {"kv_cache_dtype": "fp8_e4m3"},
    "e4m3-token": {"kv_cache_dtype": "fp8_e4m3", "kv_scales": "dynamic"},
    "e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "int8": {"kv_cache_dtype": "int8"},
    "e4m3-group": {"kv_cache_dtype": "fp8", "kv_scales": "group"},
    "int8-group": {"kv_cache_dtype": "int8", "kv_scales": "group"},
    "mixed": {"kv_cache_dtype": "auto"},
    "skipped": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "1,4"},
    "skipped-windows": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "sliding_window"},
}
MIXED = (Granularity.CHANNEL, None, Granularity.TOKEN, Granularity.HEAD, Granularity.TENSOR, None)
OTHER_KERNELS = ["reference", *(f"cpu-{build}" for build in library.runnable()[1:])]
SLOW_KERNELS = ("reference", *OTHER_KERNELS[2:])
DIFFERENT = (
    *("ministral3", "gemma2", "gemma3", "gemma4", "gemma4-own-inputs", "gemma4-moe"),
    *("opt", "opt-350m", "qwen3-moe", "minimax-m2", "gpt-oss", "laguna", "mimo-v2-flash"),
    *("olmo3", "step3p7", "lfm2", "lfm2-moe", "granite-h", "nemotron-h-latent", "deepseek-v3"),
)
FAMILIES = [(variant, kernels) for variant, kernels in CASES if variant in DIFFERENT]
FROM_FAMILIES = [(variant, "e4m3-token", kernels) for variant, kernels in FAMILIES]
NOT_OF_DEMO = ("e4m3-token", "skipped-windows", "e4m3-group", "int8-group")
OTHER_CACHES = [("demo", cache, "auto") for cache in CACHES if cache not in NOT_OF_DEMO]
GROUPED = "deepseek-v3-groups"  # a latent of two groups
SETUPS = [  # (model, cache, kernels)
    ("demo", "e4m3-token", "auto"),
    *OTHER_CACHES,
    ("gemma3", "skipped-windows", "auto"),
    *(("demo", "e4m3-token", kernels) for kernels in OTHER_KERNELS),
    *FROM_FAMILIES,
    (GROUPED, "e4m3-group", "auto"),
]
EVERY = [  # one value of each argument, and slow
    setup
    for variant in VARIANTS
    for cache in ("bfloat16", "e4m3-token")
    if (setup := (variant, cache, "auto")) not in SETUPS
]
EVERY += [
    (GROUPED, "int8-group", "auto"),
    *((GROUPED, "e4m3-group", kernels) for kernels in OTHER_KERNELS),
]
LATENT = VARIANTS["deepseek-v3"]
MODELS = {**VARIANTS, GROUPED: type(LATENT)(**LATENT.to_dict() | {"kv_lora_rank": 256})}
FULL = [("demo", "e4m3-token", "auto")]
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
    "seeded": SamplingParams(
        temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True, logprobs=3
    ),
}


@dataclass
class Trace:
    """All that a request left behind: `cache` is the bytes of K, V and their measured scales, token
    by token.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Any]]
    cache: list[torch.Tensor]
    num_cached_tokens: int
    num_preemptions: int

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trace)
        same_cache = len(self.cache) == len(other.cache)
        same_cache = same_cache and all(
            torch.equal(a, b) for a, b in zip(self.cache, other.cache, strict=True)
        )
        return self.token_ids == other.token_ids and self.logprobs == other.logprobs and same_cache


def cache_of(llm: LLM, block_ids: tuple[tuple[int, ...], ...], length: int) -> list[torch.Tensor]:
    """Of a layer with a window, the part that the last token has seen: the rest is given back. Of
    one with a state, the one behind the last token, without rows of drafts."""
    pool, parts = llm.engine.runner.pool, []
    for index, layer in pool.states.items():
        block = block_ids[layer.group][(length - 1) // layer.states.every]
        width = llm.engine.runner.model.config.layers[index].mixer.width
        for name, part in layer.states.parts.items():
            rows = slice(None)
            if name in ("k", "u", "decay"):
                rows = slice((length - 1) % STATE_TILE + 1)
            elif name == "columns":
                rows = [at % part.shape[1] for at in range(max(0, length + 1 - width), length)]
            parts.append(part[block][rows].clone())
    for layer in pool.paged.values():
        pages, window = layer.pages, getattr(pool.spec.groups[layer.group], "window", None)
        seen = slice(max(0, length - (window or length)), length)
        tensors = [pages.k.view(torch.uint8), pages.v.view(torch.uint8)]
        tensors += [
            scale for scale in (pages.k_scale, pages.v_scale) if scale is not None and pages.dynamic
        ]
        tensors += [] if pages.rotated is None else [pages.rotated]
        parts += [
            tensor[list(block_ids[layer.group])].flatten(0, 1)[seen].clone() for tensor in tensors
        ]
    return parts


def trace(
    llm: LLM, params: SamplingParams, others: Sequence[str] = (), others_grow: int = 24
) -> Trace:
    """Run the prompt after `others`, and read its part of the cache right after its last step."""
    engine = llm.engine
    for index, other in enumerate(others):
        longer = replace(SAMPLING["greedy"], max_tokens=others_grow, logprobs=params.logprobs)
        engine.add(f"other {index}", engine.accept(other, longer), longer)
    engine.add("main", engine.accept(PROMPT, params), params)
    request = engine.groups["main"].completions[0].request
    blocks: tuple[tuple[int, ...], ...] = ()
    scheduler = engine.scheduler
    schedule, follow = scheduler.schedule, scheduler.follow

    def remember(step: Any) -> Any:
        nonlocal blocks
        chunks = () if step is None else step.chunks
        blocks = next((chunk.block_ids for chunk in chunks if chunk.request is request), blocks)
        return step

    scheduler.schedule = lambda *most: remember(schedule(*most))  # type: ignore[method-assign]
    scheduler.follow = lambda step: remember(follow(step))  # type: ignore[method-assign]
    while not request.is_finished:
        engine.step()
    scheduler.schedule, scheduler.follow = schedule, follow  # type: ignore[method-assign]
    output = engine.output("main").outputs[0]
    cache = cache_of(llm, blocks, request.num_tokens - 1)
    logprobs = output.logprobs or []
    result = Trace(
        output.token_ids, logprobs, cache, request.num_cached_tokens, request.num_preemptions
    )
    for name in ["main", *(f"other {index}" for index in range(len(others)))]:
        engine.release(name)
    return result


@pytest.fixture(scope="module")
def model_with_scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with one K and one V scale a layer."""

    def scales(layer: int) -> dict[str, torch.Tensor]:
        values = {"k_scale": 0.03 + 0.001 * layer, "v_scale": 0.02 + 0.001 * layer}
        return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}

    source = resolve_model("demo", None)
    return with_scales(source, tmp_path_factory.mktemp("scaled") / "demo", scales, 6)


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with another granularity, or 16 bits, in each layer."""
    folder = tmp_path_factory.mktemp("mixed") / "demo"
    shutil.copytree(resolve_model("demo", None), folder)
    counts = [granularity and granularity not in (None, Granularity.TOKEN) and granularity.num_scales(2, 64)
              for granularity in MIXED]  # fmt: skip
    layers = [
        LayerScales(tuple(0.03 + i / 2**12 for i in range(n)), tuple(0.02 + i / 2**12 for i in range(n)), granularity)
        if n else None
        for granularity, n in zip(MIXED, counts, strict=True)
    ]  # fmt: skip
    declared, files = write_extras(KVScales(tuple(layers), mixed=MIXED))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | declared))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def of_size(config: PretrainedConfig, vocab_size: int) -> PretrainedConfig:
    """The same model for that many tokens, at 512 positions."""
    said = config.to_dict()
    positions = "model_max_length" if "model_max_length" in said else "max_position_embeddings"
    size: dict[str, Any] = {"vocab_size": vocab_size, positions: 512}
    if "text_config" in said:
        return type(config)(**said | {"text_config": said["text_config"] | size})
    if "vocab_size_per_layer_input" in said:
        size["vocab_size_per_layer_input"] = max(vocab_size, said["vocab_size_per_layer_input"])
    original = said.get("original_max_position_embeddings")
    if original and original == said["max_position_embeddings"]:  # short factors remain in use
        size["original_max_position_embeddings"] = 512
        size["rope_parameters"] = said["rope_parameters"] | {
            "original_max_position_embeddings": 512
        }
    return type(config)(**said | size)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random models that read the demo model's tokens, each made when it is asked for."""
    parent, demo = tmp_path_factory.mktemp("families"), resolve_model("demo", None)
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]

    def make(variant: str) -> Path:
        folder = parent / variant
        if not folder.exists():
            save_random(of_size(MODELS[variant], vocab_size), folder, torch.bfloat16)
            for file in demo.glob("tokenizer*"):
                shutil.copy(file, folder)
        return folder

    return make


def in_setups(
    name: str,
    *values: Any,
    setups: Sequence[tuple[str, str, str]] = SETUPS,
    third: int | None = None,
    every_variant: bool = False,
) -> pytest.MarkDecorator:
    """Every setup with every value of the argument; of those not in `FULL` all but the first are
    slow tests.

    With `third`, so are all but that third of the families and of the other caches: for what their
    layers do not compute, but the engine, whose work differs by cache groups alone. Each third has
    families with windows. `every_variant`: with the first value, those in `EVERY` too, as slow
    tests.
    """
    thinned = () if third is None else (FROM_FAMILIES, OTHER_CACHES)
    left_out = [setup for each in thinned for index, setup in enumerate(each) if index % 3 != third]

    def is_slow(setup: tuple[str, str, str], value: Any) -> bool:
        further = setup not in FULL and value != values[0]
        return setup[2] in SLOW_KERNELS or further or setup in left_out

    rows = [(setup, value, is_slow(setup, value)) for setup in setups for value in values]
    rows += [(setup, values[0], True) for setup in (EVERY if every_variant else ())]
    cases = [
        pytest.param(
            *(setup, value),
            id="-".join((*setup, str(value))),
            marks=[pytest.mark.slow] if slow else [],
        )
        for setup, value, slow in rows
    ]
    return pytest.mark.parametrize(("open_llm", name), cases, indirect=["open_llm"], scope="module")


@pytest.fixture(scope="module")
def open_llm(
    request: pytest.FixtureRequest,
    model_with_scales: Path,
    mixed_model: Path,
    family: Callable[[str], Path],
) -> Callable[..., LLM]:
    name, cache, kernels = request.param
    of_cache = {"e4m3-tensor": str(model_with_scales), "mixed": str(mixed_model)}
    model = str(family(name)) if name != "demo" else of_cache.get(cache, name)

    def build(**options: Any) -> LLM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "select_kernels", lambda *_: select_kernels(kernels))
            # drafts only where they are what is tested
            plain = {"max_model_len": 512, "kv_cache_memory": "64MiB", "speculate": 0}
            llm = LLM(model, **{**CACHES[cache], **plain, **options})
        assert kernels in ("auto", llm.engine.runner.model.kernels.name)
        return llm

    return build


Setup = tuple[str, str, str]


@pytest.fixture(scope="module")
def traces() -> dict[tuple[Setup, str], Trace]:
    """What `expected` has computed, by setup and sampling: pytest comes back to each of them."""
    return {}


@pytest.fixture
def expected(
    request: pytest.FixtureRequest,
    open_llm: Callable[..., LLM],
    traces: dict[tuple[Setup, str], Trace],
) -> Callable[[str], Trace]:
    """Alone, whole prompt in one chunk, no prefix cache."""
    setup = request.node.callspec.params["open_llm"]

    def of(sampling: str) -> Trace:
        if (setup, sampling) not in traces:
            llm = open_llm(enable_prefix_caching=False)
            traces[setup, sampling] = trace(llm, SAMPLING[sampling])
        return traces[setup, sampling]

    return of


@in_setups("sampling", *SAMPLING, every_variant=True)
def test_batched_with_16_others(open_llm, expected, sampling):
    llm = open_llm(enable_prefix_caching=False)
    assert trace(llm, SAMPLING[sampling], others=OTHERS) == expected(sampling)


@in_setups("budget", 7, 1, 64, every_variant=True)
def test_chunked_prefill_down_to_token_by_token(open_llm, expected, budget):
    llm = open_llm(enable_prefix_caching=False, max_num_batched_tokens=budget)
    assert trace(llm, SAMPLING["seeded"]) == expected("seeded")


@in_setups(
    "seed", 1, setups=[("demo", cache, "auto") for cache in ("e4m3-token", "mixed", "skipped")]
)
def test_chunks_by_a_clock_that_runs_wild(open_llm, expected, seed):
    """Beside requests that decode, every step has as many tokens of prompts as the times of earlier
    ones allow.
    """
    rng, now, sizes = random.Random(seed), 0.0, set()
    llm = open_llm(enable_prefix_caching=False, max_step_seconds=0.05)

    def clock() -> float:
        nonlocal now
        now += 0.25 * rng.random() ** 4
        return now

    schedule = llm.engine.scheduler.schedule

    def remember(most: int | None, microbatch: int) -> Any:
        step = schedule(most, microbatch)
        sizes.update(chunk.num_tokens for chunk in step.chunks if chunk.request.group == "main")
        return step

    llm.engine.clock, llm.engine.scheduler.schedule = clock, remember
    params = replace(SAMPLING["greedy"], max_tokens=48)
    llm.engine.add("early", llm.engine.accept(OTHERS[0], params), params)
    llm.engine.step()
    assert trace(llm, SAMPLING["seeded"], OTHERS[3:7]) == expected("seeded")
    length = len(llm.engine.tokenizer.encode(PROMPT))
    assert max(sizes) < length, "the prompt was computed in one chunk"


@in_setups("block_size", 8, 64, third=0)
def test_block_size(open_llm, expected, block_size):
    assert trace(open_llm(block_size=block_size), SAMPLING["seeded"]) == expected("seeded")


@in_setups("sampling", *SAMPLING, third=1, every_variant=True)
def test_prefix_hit_or_miss(open_llm, expected, sampling):
    llm = open_llm()
    miss, hit = (trace(llm, SAMPLING[sampling]) for _ in range(2))
    assert miss.num_cached_tokens == 0
    assert hit.num_cached_tokens >= 16
    assert miss == expected(sampling)
    assert hit == expected(sampling)


KINDS_OF_DRAFTS = ("mixed-seeded", "right-greedy", "wrong-greedy", "right-seeded")


@in_setups("drafts", *KINDS_OF_DRAFTS, third=0, every_variant=True)
def test_drafts(open_llm, expected, drafts):
    """Guessed tokens are computed beside the known one, and kept where they are what is drawn."""
    kind, sampling = drafts.split("-")
    llm = open_llm(speculate=5)
    answers, vocab_size = [expected(sampling).token_ids], llm.engine.intake.vocab_size
    told = Told(answers, kind, random.Random(1), vocab_size)
    llm.engine.drafters = lambda prompt, params: [told] * params.n
    assert trace(llm, SAMPLING[sampling]) == expected(sampling)
    stats = llm.engine.stats()
    assert stats.drafted > 0
    assert (stats.accepted > 0) == (kind != "wrong")
    assert (stats.accepted < stats.drafted) == (kind != "right")


@in_setups("sampling", "seeded", "greedy", third=2, every_variant=True)
def test_from_a_store(open_llm, expected, sampling, tmp_path, monkeypatch):
    """What one engine stored another finds, from the disk."""
    monkeypatch.setattr(stored, "LEAST_TOKENS", 1)
    miss, hit = (
        trace_and_close(open_llm(kv_store=str(tmp_path)), SAMPLING[sampling]) for _ in range(2)
    )
    assert miss.num_cached_tokens == 0
    assert hit.num_cached_tokens >= 16
    assert miss == expected(sampling)
    assert hit == expected(sampling)


def trace_and_close(llm: LLM, params: SamplingParams) -> Trace:
    """Run the prompt once the store of `llm` is open, and store what it leaves behind."""
    store = llm.engine.store
    while not store.mover.tiers.is_open:
        time.sleep(0.001)
    try:
        return trace(llm, params)
    finally:
        llm.engine.close()


@in_setups("prefix_caching", True, False, third=2, every_variant=True)
def test_preempted_and_recomputed(open_llm, expected, prefix_caching):
    """Layers without a window have blocks for all at first, and not for what they grow to: the last
    to come gives way and starts again."""
    llm = open_llm(enable_prefix_caching=prefix_caching, max_model_len=160)
    others, grow = OTHERS[:4], 40
    blocks = sum(len(llm.engine.tokenizer.encode(text)) // 16 + 2 for text in (PROMPT, *others))
    groups = llm.engine.runner.pool.spec.groups
    full = next((index for index, group in enumerate(groups) if group.keeps_all), None)
    if full is None:
        # a request that is longer than the window grows no more: those beside start with a block of
        # three
        options = {"max_model_len": 160, "max_num_batched_tokens": 16}
        llm = open_llm(enable_prefix_caching=prefix_caching, **options)
        others, grow, full, blocks = OTHERS[:1] * 4, 60, 0, 13
    allocator = llm.engine.cache.allocators[full]
    allocator.allocate(allocator.num_free - blocks)
    result = trace(llm, SAMPLING["seeded"], others, others_grow=grow)
    assert result.num_preemptions > 0
    assert result == expected("seeded")


@in_setups("sampling", *SAMPLING, third=0)
def test_launched_before_the_last_tokens_are_known(open_llm, expected, sampling, monkeypatch):
    """… alone, beside others that end earlier, and over the blocks that such steps filled."""
    params = replace(SAMPLING[sampling], logprobs=None)
    wanted = replace(expected(sampling), logprobs=[])
    llm, ahead = open_llm(), []
    llm.engine.mode = Mode.OVERLAPPED
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda *args: ahead.append(args[2:]) or run(*args))
    assert trace(llm, params) == wanted
    launched = [tokens for (tokens,) in filter(None, ahead) if tokens is not None]
    assert len(launched) == 22  # the first two of 24 are not
    hit = trace(llm, params, OTHERS[:4], others_grow=12)
    assert hit == wanted
    assert hit.num_cached_tokens >= 16


def test_a_mixed_cache_has_each_layer_as_the_checkpoint_says(mixed_model):
    llm = LLM(str(mixed_model), max_model_len=64, kv_cache_memory="4MiB")
    info = llm.kv_cache_info()
    of_all = [info[name] for name in ("dtype", "granularity", "scale_source")]
    assert of_all == ["mixed", "mixed", "checkpoint"]
    formats = [Format.E4M3FN if granularity else Format.BFLOAT16 for granularity in MIXED]
    assert [layer["granularity"] for layer in info["layers"]] == [g and str(g) for g in MIXED]
    names = {Format.E4M3FN: "fp8_e4m3fn", Format.BFLOAT16: "bfloat16"}
    assert [layer["dtype"] for layer in info["layers"]] == [names[form] for form in formats]
    pages = [layer.pages for layer in llm.engine.runner.pool.layers]
    assert [page.format for page in pages] == formats
    assert [page.dynamic for page in pages] == [g is Granularity.TOKEN for g in MIXED]
    values = 2 * 2 * 64  # K and V, 2 heads of 64
    assert info["bytes_per_token"] == 4 * values + 2 * 2 * 2 + 2 * 2 * values
    assert len(llm.engine.runner.pool.spec.groups) == 1


@in_setups("budget", 5, third=1)
def test_prompt_logprobs_do_not_depend_on_chunks(open_llm, budget):
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0.0)
    llms = [open_llm(max_num_batched_tokens=tokens) for tokens in (512, budget)]
    whole, chunked = (llm.generate(PROMPT, params)[0] for llm in llms)
    assert whole.prompt_logprobs == chunked.prompt_logprobs
    assert whole.prompt_logprobs[0] is None
    assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids)
