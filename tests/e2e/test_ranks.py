"""Several ranks against one: the same log-probabilities, tokens and bytes of the cache, to the last
bit.

Rank 0 is this process and rank 1 a forked one (`rank_follower.py`). What they compute is what an
engine computes: prompts in chunks, recorded decode steps, prefix hits and preemptions.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked_server import CAN_FORK, forked
from tests.formats import four_bits
from tests.formats.mxfp4 import save_mxfp4
from tests.machines import other_machine, two_machines
from tests.parity.random_models import save_random
from tests.parity.shapes import DELTA_NET, KIMI_LINEAR, LING
from tests.parity.variants import VARIANTS
from tests.rank_follower import clear, pages_of
from tests.shares import one_in
from torch import Tensor
from transformers import BailingHybridConfig, KimiLinearConfig, PretrainedConfig, Qwen3_5TextConfig

from freight import SamplingParams
from freight.cache import stored
from freight.cache.sizing import bytes_of_request
from freight.cache.spec import cache_spec
from freight.engine import build, leader
from freight.engine.engine import Engine
from freight.engine.leader import Leader
from freight.errors import ConfigError
from freight.fp8.formats import Granularity
from freight.kernels.cpu import library
from freight.lab.capacity import Wish, make_plan
from freight.model.mixers.delta_net.spec import DeltaNetConfig
from freight.model.mixers.kimi_delta.spec import KimiDeltaConfig
from freight.model.mixers.latent.spec import LatentConfig
from freight.model.mixers.mamba2.spec import Mamba2Config
from freight.model.mixers.short_conv.spec import ShortConvConfig
from freight.model.open import OpenModel, open_model, open_random
from freight.model.shares import share_of
from freight.model.sizes import Layout
from freight.model.weight_bytes import weight_bytes
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures"
pytestmark = [
    pytest.mark.skipif(not CAN_FORK, reason="the other rank is forked"),
    pytest.mark.skipif(not library.installed(), reason="ranks gather in the compiled kernels"),
]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def like_llama(name: str = "Llama", **more: Any) -> dict[str, Any]:
    """The config of a small model of a family whose keys are Llama's."""
    own = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower(), "head_dim": 32}
    widths = {"intermediate_size": 96, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    return SIZES | own | widths | {"tie_word_embeddings": False} | more


LLAMA, QWEN2, QWEN3 = like_llama(), like_llama("Qwen2"), like_llama("Qwen3")
GEMMA2 = like_llama(
    "Gemma2",
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=24,
    query_pre_attn_scalar=32,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    tie_word_embeddings=True,
)
OPT = SIZES | {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "do_layer_norm_before": True,
    "activation_function": "relu",
}
MIXTRAL = like_llama("Mixtral", num_local_experts=4, num_experts_per_tok=2)
QWEN2_MOE = like_llama(
    "Qwen2Moe",
    model_type="qwen2_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=64,
)
FP8 = {"quantization": "fp8"}
TOKEN = {"kv_cache_dtype": "fp8"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {  # a config, or the name of a fixture; options
    "16 bits": (LLAMA, {"speculate": 3}),
    "INT4": (LLAMA, {"quantization": "int4"}),
    "W8A8, scales per token": (LLAMA, FP8 | TOKEN),
    "W8A8, rows staged together": (  # parts of the inputs of o and down are whole panels
        LLAMA | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
        FP8 | TOKEN,
    ),
    "one KV head for both, tied": (
        LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True},
        TOKEN,
    ),
    "biases, one scale": (QWEN2, FP8 | TOKEN | {"kv_scales": "0.03"}),
    "norms of heads, INT8": (QWEN3, {"kv_cache_dtype": "int8"}),
    "norms of heads, weights in INT8": (QWEN3, {"quantization": "int8"}),
    "experts in INT8, and a shared one": (QWEN2_MOE, {"quantization": "int8"}),
    "windows, scales per head": (
        like_llama("Mistral", sliding_window=24),
        TOKEN | {"kv_scales": "by rank"},
    ),
    "fused projections": (like_llama("Phi3", pad_token_id=0), FP8 | {"kv_cache_dtype": "fp8_e5m2"}),
    "soft caps, tied": (GEMMA2, FP8 | TOKEN),
    "positions, layer norms": (OPT, TOKEN),
    "static W8A8 and scales": ("autofp8_static_kv", {}),
    "float32": (LLAMA, {"dtype": "float32"}),
    "experts": (MIXTRAL, TOKEN),
    "norms over all heads": (like_llama("Olmo2"), TOKEN),
    "experts in W8A8, and a shared one": (QWEN2_MOE, FP8),
    # of these more is random than `open_random` draws: decays, biases, norms
    "latents, of q too": (VARIANTS["deepseek-v3"], FP8 | TOKEN | {"speculate": 3}),
    "gates of latents, decays in one step": (
        BailingHybridConfig(**LING | {"kv_lora_rank": 128}),
        TOKEN | {"kv_scales": "group"},
    ),
    "decays in two steps": (
        KimiLinearConfig(**KIMI_LINEAR | {"linear_num_heads": 4}),
        FP8 | {"state_dtype": "float32"},
    ),
    "delta nets, states in INT8": (VARIANTS["qwen3-next"], FP8 | {"state_dtype": "int8"}),
    "one key head for both": (
        Qwen3_5TextConfig(**DELTA_NET | {"linear_num_key_heads": 1}),
        {"state_dtype": "fp8"},
    ),
    "Mamba-2, a group each; experts of latents": (VARIANTS["nemotron-h-latent"], FP8),
    "Mamba-2, one group and norm": (VARIANTS["granite-h-moe"], FP8 | TOKEN),
    "short convolutions": (VARIANTS["lfm2-biases"], FP8),
    "experts in INT8": (VARIANTS["qwen3-moe"], {"quantization": "int8"}),
    "experts in INT4": (VARIANTS["qwen2-moe"], {"quantization": "int4"} | TOKEN),
}


@pytest.fixture
def pages_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rank 1 is forked; its pages are in this file once it has ended."""
    path = tmp_path / "pages.pt"

    def spawn(files: Any) -> Any:
        command = ["python", "-m", "tests.rank_follower", *map(str, files)]
        return forked(command, files, os.environ | {"FREIGHT_TEST_PAGES": str(path)})

    monkeypatch.setattr(leader, "spawn", spawn)
    return path


def opened_as(
    given: Any, options: dict[str, Any], tmp_path: Path, **more: Any
) -> tuple[OpenModel, EngineArgs]:
    usual: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 24, "threads": 1}
    args = EngineArgs(**(usual | options | more))
    if isinstance(given, PretrainedConfig):
        if not (folder := tmp_path / "model").exists():
            save_random(given, folder, torch.bfloat16)
        given = str(folder)
    if isinstance(given, str):
        args = replace(args, model=str(FIXTURES / given), skip_tokenizer_init=True)
        return open_model(args), args
    config = tmp_path / "config.json"
    config.write_text(json.dumps(given))
    return open_random(args, str(config)), args


def started(opened: OpenModel) -> Engine:
    """The engine over pages of zeros."""
    engine, _ = build.start_engine(opened)
    clear(engine.runner.pool)
    return engine


def outputs_of(engine: Engine, vocab: int = 100) -> list[Any]:
    """What an engine gives: 3 prompts at once, then one that begins like the first."""
    generator = torch.Generator().manual_seed(7)
    first, second, third = (
        torch.randint(1, vocab, (count,), generator=generator).tolist() for count in (45, 7, 30)
    )
    greedy = SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, ignore_eos=True)
    scored = replace(greedy, prompt_logprobs=2)
    drawn = replace(greedy, temperature=1.0, seed=5)
    requests = ((first, greedy), (second, scored), (third, drawn), (first[:40] + second, greedy))
    for index, (prompt, params) in enumerate(requests):
        engine.add(str(index), engine.accept(prompt, params), params)
        while index > 1 and engine.has_unfinished:
            engine.step()
    outputs = [engine.output(str(index)) for index in range(4)]
    choices = [output.outputs[0] for output in outputs]
    return [
        *((choice.token_ids, choice.logprobs) for choice in choices),
        *(output.prompt_logprobs for output in outputs),
    ]


def close(engine: Engine) -> None:
    """End the other rank."""
    assert isinstance(engine.runner.leader, Leader)
    engine.runner.leader.close()


def of_ranks(mixer: Any, name: str, whole: Tensor) -> list[Tensor]:
    """What two ranks have of a part of a layer's pages or state."""
    dim = 1 if name in ("state", "scale") else 2
    if isinstance(mixer, LatentConfig):
        return [whole, whole]
    if name != "columns":
        shared = whole.shape[dim] == 1  # a KV head, or a key head
        return [whole, whole] if shared else [*whole.chunk(2, dim)]
    columns = whole.split([heads * each for heads, each in columns_of(mixer)], dim)
    halves = [
        [part, part] if heads == 1 else [*part.chunk(2, dim)]
        for part, (heads, _) in zip(columns, columns_of(mixer), strict=True)
    ]
    return [torch.cat(parts, dim) for parts in zip(*halves, strict=True)]


def columns_of(mixer: Any) -> list[tuple[int, int]]:
    """Heads of each input of a convolution, and channels of a head."""
    match mixer:
        case ShortConvConfig():
            return [(mixer.channels, 1)]
        case DeltaNetConfig():
            return [(mixer.key_heads, mixer.k_dim)] * 2 + [(mixer.heads, mixer.v_dim)]
        case KimiDeltaConfig():
            return [(mixer.heads, mixer.head_dim)] * 3
        case Mamba2Config():
            return [(mixer.heads, mixer.head_dim)] + [(mixer.groups, mixer.state_size)] * 2
    raise AssertionError(mixer)


def require_bits_of_one(
    given: Any,
    options: dict[str, Any],
    tmp_path: Path,
    pages_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    machines: dict[str, Any] | None = None,
) -> None:
    """Two ranks have one rank's log-probabilities, tokens and bytes of the cache. machines: options
    of ranks on several.
    """
    opened, args = opened_as(given, options, tmp_path)
    config = opened.resolve(args)
    spec = opened.cache_spec(config)
    blocks = (8,) * len(spec.groups)  # fewer than three sequences take
    memory = spec.bytes_of(blocks)
    if spec.bytes_per_state:  # else there were fewer for states, and none left for a later prompt
        monkeypatch.setattr(build, "split_memory", lambda *_: blocks)
    alone = started(opened_as(given, options, tmp_path, kv_cache_memory=memory)[0])
    expected = outputs_of(alone)
    stats = alone.stats()
    # windows give blocks back, and drafts end a sequence before another needs more
    assert stats.preemptions > 0 or len(spec.groups) > 1 or stats.accepted > 0
    assert stats.prefix_hits > 0

    sizes = config.compute_format, config.state_every, config.max_model_len
    own = cache_spec(
        config.kv, opened.model, config.block_size, *sizes, ranks=2, drafts=config.most_drafts
    )
    memory = 2 * own.bytes_of(alone.runner.pool.num_blocks)
    more = {"kv_cache_memory": memory, "tensor_parallel_size": 2} | (machines or {})
    opened = opened_as(given, options, tmp_path, **more)[0]
    with ExitStack() as stack:
        if machines:
            machine = stack.enter_context(other_machine(opened.args, opened.random_shape))
        engine = started(opened)
    assert engine.runner.pool.num_blocks == alone.runner.pool.num_blocks
    assert outputs_of(engine) == expected
    for counter in ("drafted", "preemptions", "prefix_hits"):
        assert getattr(engine.stats(), counter) == getattr(alone.stats(), counter)
    first = pages_of(engine.runner.pool)
    close(engine)
    if machines:
        assert machine.wait() == 0
    layers = zip(opened.model.layers, pages_of(alone.runner.pool), strict=True)
    pages = zip(layers, first, torch.load(pages_file), strict=True)
    for index, ((layer, whole), *ranks) in enumerate(pages):
        assert all(whole.keys() == rank.keys() for rank in ranks)
        for name, page in whole.items():
            for rank, part in zip(ranks, of_ranks(layer.mixer, name, page), strict=True):
                assert torch.equal(rank[name], part), (index, name)
            assert page.any(), (index, name)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_bits_of_one(
    case: str, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, options = CASES[case]
    if options.get("kv_scales") == "by rank":
        scales = {str(rank): {"0": 0.02 * (rank + 1), "1": 0.05} for rank in range(2)}
        cache = {"dtype": "float8_e4m3fn", "scaling_factor": scales}
        (tmp_path / "scales.json").write_text(json.dumps({"kv_cache": cache}))
        options = options | {"kv_scales": str(tmp_path / "scales.json")}
    require_bits_of_one(given, options, tmp_path, pages_file, monkeypatch)


OF_MACHINES = "experts in W8A8, and a shared one"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == OF_MACHINES else [pytest.mark.slow])
        for case in CASES
        if "kv_scales" not in CASES[case][1]
    ],
)
def test_two_machines_have_the_bits_of_one(
    case: str, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo; recorded steps gather in it as well, and so do experts between their products."""
    require_bits_of_one(*CASES[case], tmp_path, pages_file, monkeypatch, two_machines())


def test_four_ranks_of_two_machines_have_the_bits_of_one(tmp_path: Path, pages_file: Path) -> None:
    options = FP8 | TOKEN | {"kv_cache_memory": "1MiB"}
    expected = outputs_of(started(opened_as(LLAMA, options, tmp_path)[0]))
    options |= {"tensor_parallel_size": 4} | two_machines()
    opened = opened_as(LLAMA, options, tmp_path)[0]
    with other_machine(opened.args, opened.random_shape) as machine:
        engine = started(opened)
    assert outputs_of(engine) == expected
    close(engine)
    assert machine.wait() == 0


@pytest.mark.parametrize("case", ["one KV head for both, tied", "Mamba-2, one group and norm"])
def test_a_plan_is_what_ranks_allocate(case: str, tmp_path: Path, pages_file: Path) -> None:
    given = CASES[case][0]
    config = given.to_dict() if isinstance(given, PretrainedConfig) else given
    layout = Layout.TILES if library.runnable()[:1] == ("amx",) else Layout.PACKED
    plan = make_plan(config, Wish(16 << 20, 96, 4, "cpu", layout, ranks=2))
    chosen = next(one for one in plan.settings if one.kv.granularity is Granularity.TOKEN)
    options = TOKEN | {"max_num_batched_tokens": None, "max_num_seqs": 4}
    more = {"tensor_parallel_size": 2, "kv_cache_memory": 2 * chosen.cache_bytes}
    opened, _ = opened_as(given, options, tmp_path, **more)
    engine = started(opened)
    assert engine.runner.pool.spec == chosen.spec
    assert engine.runner.pool.num_blocks == chosen.num_blocks
    assert weight_bytes(engine.runner.model).total == chosen.loaded.total - chosen.loaded.tables
    close(engine)


def require_equal(folder: Path, vocab: int = 100) -> None:
    """The checkpoint gives the same with one rank and with two, which read it by slice."""
    expected = outputs_of(started(opened_as(str(folder), TOKEN, folder)[0]), vocab)
    engine = started(opened_as(str(folder), TOKEN, folder, tensor_parallel_size=2)[0])
    assert outputs_of(engine, vocab) == expected
    close(engine)


@pytest.mark.parametrize("form", ["gptq order", "ct nvfp4"])
def test_matrices_stored_in_4_bits(
    form: str, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has rows of them, and takes all inputs in the order of the whole."""
    folder = four_bits.write(four_bits.FORMS[form]).save(tmp_path / "model")
    require_bits_of_one(str(folder), TOKEN, tmp_path, pages_file, monkeypatch)


@pytest.mark.parametrize("lowest", [115, pytest.param(90, marks=pytest.mark.slow)])
def test_experts_in_mxfp4(lowest: int, tmp_path: Path, pages_file: Path) -> None:
    """With sinks and windows: gpt-oss. With scales from 90 on, other kernels would need 16 bits."""
    require_equal(save_mxfp4(tmp_path, lowest=lowest))


@pytest.mark.parametrize(
    ("form", "experts"),
    one_in(
        4,
        [
            *(
                ("awq", ""),
                ("gptq zeros", ""),
                ("gptq order", ""),
                ("ct int4 64 zeros", "qwen3_moe"),
            ),
            *(("ct mxfp4", "qwen3_moe"), ("modelopt nvfp4", "mixtral"), ("ct nvfp4", "")),
        ],
    ),
)
def test_files_in_4_bits(form: str, experts: str, tmp_path: Path, pages_file: Path) -> None:
    require_equal(four_bits.write(four_bits.FORMS[form], experts).save(tmp_path), vocab=64)


def test_context_that_is_made_to_fit_keeps_the_blocks_of_states(
    tmp_path: Path, pages_file: Path
) -> None:
    """Without --state-every blocks of states are as long as the context asks for. Every rank has
    those of the context before it was made to fit the memory.
    """
    given, options = CASES["delta nets, states in INT8"]
    given = copy.deepcopy(given)
    given.max_position_embeddings = 4096
    options = options | {"max_model_len": None}
    asked, _ = opened_as(given, options, tmp_path)
    spec = asked.cache_spec(asked.resolve(asked.args))
    assert spec.state_every is not None
    whole = opened_as(given, options, tmp_path, state_every=spec.state_every)[0]
    expected = outputs_of(started(whole))
    memory = bytes_of_request(spec, 128, 24)  # of two ranks: each has about half of it
    more = {"tensor_parallel_size": 2, "kv_cache_memory": memory, "max_num_seqs": 4}
    engine = started(opened_as(given, options, tmp_path, **more)[0])
    fitted = engine.intake.max_model_len
    assert fitted < 4096
    config = asked.resolve(replace(asked.args, max_model_len=fitted))
    assert asked.cache_spec(config).state_every < spec.state_every
    assert outputs_of(engine) == expected
    close(engine)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_that_divides_has_the_bits_of_one(
    variant: str, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints as transformers saves them, in W8A8 and with an FP8 cache."""
    opened, _ = opened_as(VARIANTS[variant], FP8, tmp_path)
    try:
        share_of(opened.model, 0, 2)
    except ConfigError as error:
        pytest.skip(str(error))
    require_bits_of_one(VARIANTS[variant], FP8 | TOKEN, tmp_path, pages_file, monkeypatch)


SLOW = ["decays in two steps", "one key head for both", "Mamba-2, one group and norm"]
STORED = [
    *("16 bits", "one KV head for both, tied", "norms of heads, INT8", "windows, scales per head"),
    *("fused projections", "static W8A8 and scales", "soft caps, tied", "latents, of q too"),
    *("gates of latents, decays in one step", "decays in two steps", "delta nets, states in INT8"),
    *("one key head for both", "Mamba-2, a group each; experts of latents"),
    *("Mamba-2, one group and norm", "short convolutions"),
]


@pytest.mark.parametrize(
    ("case", "writers"),
    [
        (case, writers)
        if index % 2 == writers - 1 and case not in SLOW
        else pytest.param(case, writers, marks=pytest.mark.slow)
        for index, case in enumerate(STORED)
        for writers in (1, 2)
    ],
)
def test_a_store_is_for_any_number_of_ranks(
    case: str, writers: int, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks read what one wrote, and one what two wrote."""
    monkeypatch.setattr(stored, "LEAST_TOKENS", 1)
    given, options = CASES[case]
    if options.get("kv_scales") == "by rank":
        options = options | {"kv_scales": "0.02,0.05"}
    options = options | {"kv_store": str(tmp_path / "store"), "kv_store_memory": 0}
    outputs = {}
    for size in (writers, 3 - writers):
        opened = opened_as(given, options, tmp_path, tensor_parallel_size=size)[0]
        engine = with_open_store(started(opened))
        outputs[size] = outputs_of(engine)
        engine.close()
        stats = engine.stats().store
        assert stats is not None
        assert (stats.disk_hits > 0) == (size != writers)
        assert stats.corrupt == stats.errors == 0
        if size == 2:
            close(engine)
    assert outputs[1] == outputs[2]
    assert len(list((tmp_path / "store").glob("*/name.json"))) == 1


@pytest.mark.parametrize(
    "case",
    ["norms of heads, INT8", pytest.param("delta nets, states in INT8", marks=pytest.mark.slow)],
)
def test_a_store_has_what_a_lost_rank_computed(
    case: str, tmp_path: Path, pages_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory stays mapped, so what was offered before is stored."""
    monkeypatch.setattr(stored, "LEAST_TOKENS", 1)
    given, options = CASES[case]
    options = options | {"kv_store": str(tmp_path / "store")}
    engine = with_open_store(
        started(opened_as(given, options, tmp_path, tensor_parallel_size=2)[0])
    )
    tiers = engine.store.mover.tiers
    disk, tiers.disk = tiers.disk, None  # nothing is stored yet
    expected = outputs_of(engine)
    assert isinstance(engine.runner.leader, Leader)
    os.kill(engine.runner.leader.pids[0], signal.SIGKILL)
    close(engine)
    tiers.disk = disk
    engine.close()
    assert tiers.stats().stored > 0
    alone = with_open_store(started(opened_as(given, options, tmp_path)[0]))
    assert outputs_of(alone) == expected
    alone.close()
    assert alone.stats().store.disk_hits > 0


def with_open_store(engine: Engine) -> Engine:
    """The engine once its store is open."""
    assert engine.store is not None
    while not engine.store.mover.tiers.is_open:
        time.sleep(0.001)
    return engine
