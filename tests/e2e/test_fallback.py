"""Models that Freight has no row for: transformers' modules over Freight's cache give transformers'
own tokens.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.refusals import assert_names, line_naming, refuses
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from freight import LLM, SamplingParams
from freight.cli.inspect import describe
from freight.errors import CheckpointError, ConfigError
from freight.lab.capacity import Wish, make_plan
from freight.model.config.registry import FAMILIES
from freight.model.open import open_model
from freight.model.sizes import Layout
from freight.model.weight_bytes import weight_bytes
from freight.quantizer.quantize import open_unquantized
from freight.settings.engine import EngineArgs

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
ROUTED = GROUPS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
WINDOW = {"sliding_window": 8}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
GRANITE = LOCAL | {"shared_intermediate_size": 32}

FAST: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("olmo", "gpt_neox", "gpt2")},
    "cohere2": HEAD | WINDOW,
    "starcoder2": WINDOW,
}
PLAIN = ("apertus", "biogpt", "bitnet", "cohere", "gpt_bigcode", "nanochat", "persimmon", "phi")
WITH_HEAD = ("gemma", "helium", "hyperclovax", "internlm3", "iquestcoder", "jais2")
SLOW: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    **dict.fromkeys(WITH_HEAD, HEAD),
    **dict.fromkeys(("cwm", "ministral"), HEAD | WINDOW),
    **dict.fromkeys(("dots1", "solar_open"), HEAD | ROUTED),
    **dict.fromkeys(("flex_olmo", "olmoe"), EXPERTS),
    "cohere2_moe": HEAD | WINDOW | EXPERTS,
    "exaone_moe": HEAD | WINDOW | GROUPS | {"num_experts": 8, "num_shared_experts": 1},
    "granitemoeshared": GRANITE,
    "phimoe": LOCAL,
    "vaultgemma": HEAD | WINDOW | {"query_pre_attn_scalar": 16},
}
PROMPTS = ([5, 9, 33, 17, 88, 21, 40, 77, 12, 101, 64], [5, 9, 33])


def save(
    model_type: str, more: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32
) -> Any:
    """A model with weights that make its tokens differ, saved as transformers does."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SMALL | more)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return model


def llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=64, kv_cache_memory="2MiB", **options
    )


def tokens(model: LLM, count: int = 12) -> list[list[int]]:
    outputs = model.generate(
        list(PROMPTS), SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(model: Any, count: int = 12) -> list[list[int]]:
    """transformers' own greedy tokens, without its cache."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize(
    "model_type", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_its_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    assert model_type not in FAMILIES
    model = save(model_type, (FAST | SLOW)[model_type], tmp_path)
    # the prompts are computed in chunks, and together
    small_steps = llm(tmp_path, max_num_batched_tokens=4)
    assert tokens(small_steps) == expected(model)


def test_it_says_what_it_is_and_what_is_not_promised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("olmo", {}, tmp_path)
    with caplog.at_level(logging.INFO, "freight"):
        llm(tmp_path)
    assert_names(
        line_naming(caplog.text, "OlmoForCausalLM of transformers"), "Not guaranteed: the same bits"
    )
    assert describe(str(tmp_path))["runs"] == "through transformers"
    assert describe("demo")["runs"] == "natively"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_pass_the_check(dtype: str, tmp_path: Path) -> None:
    save("olmo", {}, tmp_path, getattr(torch, dtype))
    assert len(tokens(llm(tmp_path))[0]) == 12


def test_an_fp8_cache_is_used(tmp_path: Path) -> None:
    model = save("cohere2", HEAD | WINDOW, tmp_path)
    engine = llm(tmp_path, kv_cache_dtype="fp8", kv_scales="dynamic").engine
    assert engine.runner.pool.spec.layers[0].format.is_fp8
    assert [layer.window for layer in engine.runner.pool.spec.layers] == [
        8 if kind == "sliding_attention" else None for kind in model.config.layer_types
    ]


def test_linears_become_fp8_and_routers_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save("granitemoeshared", GRANITE, tmp_path)
    with caplog.at_level(logging.INFO, "freight"):
        causal: Any = llm(tmp_path, quantization="fp8").engine.runner.model.causal
    kinds = {name: type(module).__name__ for name, module in causal.named_modules()}
    assert kinds["model.layers.0.self_attn.q_proj"] == "FreightLinear"
    assert kinds["lm_head"] == "FreightHead"
    assert not [name for name in kinds if kinds[name] == "FreightLinear" and "router" in name]
    line = next(line for line in caplog.messages if line.startswith("weights: "))
    stacked = sum(parameter.nbytes for parameter in causal.parameters() if parameter.ndim == 3)
    assert stacked > 0
    assert_names(line, "float32", f"{stacked / 1e9:.3g} GB of experts")
    percent = re.search(r"\((\d+)%\) are fp8_e4m3fn", line)
    assert percent is not None
    assert 0 < int(percent[1]) < 60


def test_fp8_is_refused_where_no_matrix_is_a_linear(tmp_path: Path) -> None:
    save("gpt2", {}, tmp_path)  # its matrices are Conv1D
    with refuses(ConfigError, "quantization = 'fp8'", "GPT2LMHeadModel"):
        llm(tmp_path, quantization="fp8")


def logits(folder: Path) -> torch.Tensor:
    runner = llm(folder).engine.runner
    return runner.logits(PROMPTS[0], 0, runner.pool.whole)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_are_not_rounded_to_sixteen_bits(kernels: str, tied: bool, tmp_path: Path) -> None:
    """transformers multiplies Cohere's logits by `logit_scale`: in float32, too."""
    given = HEAD | WINDOW | {"tie_word_embeddings": tied, "logit_scale": 0.3}
    causal = save("cohere2", given, tmp_path, torch.bfloat16)
    engine = llm(tmp_path, kernels=kernels).engine
    model = engine.runner.model
    hidden = torch.randn(9, causal.config.hidden_size).bfloat16()
    with torch.inference_mode():
        found = model.logits(hidden)
    expected = 0.3 * (hidden.double() @ causal.lm_head.weight.double().T)
    assert found.dtype is torch.float32
    bound = 1e-5 * expected.abs().max()
    assert (found - expected).abs().max() <= bound
    assert (found.bfloat16() - found).abs().max() > 10 * bound


def test_a_stored_fp8_scale_is_used(tmp_path: Path) -> None:
    """The logits are those of the model in 32 bits up to rounding, and others when one scale
    changes.
    """
    save("olmo", {}, tmp_path)
    plain = logits(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name + "_scale"] = scale
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    form = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": form | {"strategy": "channel"},
        "input_activations": form | {"strategy": "token", "dynamic": True},
    }
    declared = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    stored = logits(tmp_path)
    assert (stored - plain).norm() < 0.2 * plain.norm()
    tensors["model.layers.1.mlp.down_proj.weight_scale"] *= torch.linspace(0.1, 3, 64)[:, None]
    save_file(tensors, file, {"format": "pt"})
    assert (logits(tmp_path) - stored).norm() > 0.25 * plain.norm()


def test_what_attends_otherwise_is_refused_with_the_difference(tmp_path: Path) -> None:
    save("olmo", {}, tmp_path)
    opened = open_model(EngineArgs(str(tmp_path), skip_tokenizer_init=True, max_model_len=64))
    layers = opened.model.layers
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=4)) for layer in layers)
    wrong = replace(opened, model=replace(opened.model, layers=layers))
    with refuses(CheckpointError, "logits", "spread", "0.001", "float32"):
        wrong.load(wrong.resolve(wrong.args))


def test_quantizing_it_is_refused(tmp_path: Path) -> None:
    save("olmo", {}, tmp_path)
    with refuses(CheckpointError, "'olmo'", "transformers", "quantizing"):
        open_unquantized(str(tmp_path))


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("layout", [Layout.PLAIN, Layout.PACKED])
@pytest.mark.parametrize("model_type", ["olmo", "starcoder2", "granitemoeshared", "phi"])
def test_the_plan_counts_the_bytes_that_are_loaded(
    model_type: str, layout: Layout, quantization: str | None, tmp_path: Path
) -> None:
    """From config.json alone. starcoder2 has a tied head, phi a head with a bias, Granite experts
    and a router. The CPU kernels pack the head, and here nothing that AMX would lay out otherwise.
    """
    if layout is Layout.PACKED and quantization is not None:
        pytest.skip("FP8 is laid out in tiles where the processor has AMX")
    save(model_type, (FAST | SLOW)[model_type], tmp_path)
    args = EngineArgs(
        str(tmp_path),
        skip_tokenizer_init=True,
        quantization=quantization,
        kernels="reference" if layout is Layout.PLAIN else "auto",
    )
    opened = open_model(args)
    size = weight_bytes(opened.load(opened.resolve(args)))
    config = json.loads((tmp_path / "config.json").read_text())
    settings = make_plan(config, Wish(2**22, 64, device="cpu", layout=layout)).settings
    one = next(one for one in settings if one.weights.is_fp8 == (quantization == "fp8"))
    assert (one.loaded.layers, one.loaded.embeddings) == (size.layers, size.embeddings)
    assert one.loaded.tables == 0
    assert one.spec.bytes_per_token == 3 * 2 * opened.model.layers[0].mixer.num_kv_heads * 16 * 4


def test_its_weights_are_counted(tmp_path: Path) -> None:
    save("olmo", {}, tmp_path)
    args = EngineArgs(str(tmp_path), skip_tokenizer_init=True)
    opened = open_model(args)
    loaded = opened.load(opened.resolve(args))
    size = weight_bytes(loaded)
    scales = 128 * 4  # which the CPU kernels hold with each matrix that they pack, as the head
    assert size.embeddings == 2 * 128 * 64 * 4 + scales
    stored = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert size.layers + size.embeddings == stored + scales
