"""Every family and variant (`variants.py`) against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.covering import in_rotation
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import CASES, VARIANTS
from transformers import PretrainedConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from freight.errors import CheckpointError
from freight.fp8.formats import Format
from freight.fp8.weights import fit_rows
from freight.model.open import open_model
from freight.operands.weight import Activations, Weight
from freight.settings.engine import EngineArgs

BFLOAT16 = (
    *(
        "llama-llama3",
        "mistral-window",
        "ministral3",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3-window",
        "opt",
    ),
    *(
        "opt-350m",
        "granite",
        "glm",
        "glm4",
        "smollm3",
        "ernie4-5",
        "seed-oss",
        "gpt-oss",
        "mixtral",
        "qwen2-moe",
    ),
    *("qwen3-moe", "glm4-moe", "minimax-m2", "hy-v3", "ernie4-5-moe", "granite-moe", "gemma4"),
    *("gemma4-own-inputs", "gemma4-moe", "gemma4-unified"),
    *("laguna", "mellum", "olmo2", "olmo3", "exaone4", "afmoe", "arcee", "hunyuan", "hunyuan-moe"),
    *("muse-glimmer", "ernie4-5-vl-moe"),
    *("mimo-v2-flash", "lfm2", "lfm2-moe", "granite-h", "granite-h-moe"),
)


# what these have is in another variant too, or compared with transformers by test_mistral3.py and
# test_wrapped.py
ALIKE = (
    *("llama-tied", "llama-1-head-each", "llama-head-dim", "mistral", "ministral3-tied"),
    *("qwen2-window-off", "qwen2-vl", "qwen2-5-vl", "qwen3-vl-moe", "qwen3-vl-moe-dense-layer"),
    *("gemma2-one-window", "phi3", "qwen3-moe-dense-layer", "glm4-moe-plain", "glm4v-whole"),
    *("mistral4", "mistral4-groups", "deepseek-v3-without-q-lora", "olmo2-biases", "arcee-biases"),
    *("exaone4-without-window", "afmoe-plain", "mellum-plain", "granite-biases", "glm-whole"),
    *("granite-moe-biases", "gpt-oss-one-window", "ernie4-5-moe-few", "hunyuan-biases"),
    *("qwen3-5-moe-text", "minicpmv4-6", "nemotron-h-omni", "step3p7-plain", "lfm2-vl"),
)


def cases(
    variants: Iterable[str], with_reference: Iterable[str], alike: Iterable[str] = ()
) -> list[Any]:
    """Each with the kernels that run by default, unless it is `alike`, and with the reference if
    named. The others are slow tests.
    """
    chosen = [case for case in CASES if case[0] in variants]
    slow = [
        not in_rotation(variant)
        and (variant in alike or (kernels == "reference" and variant not in with_reference))
        for variant, kernels in chosen
    ]
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if late else [])
        for case, late in zip(chosen, slow, strict=True)
    ]


@pytest.mark.parametrize(("variant", "kernels"), cases(VARIANTS, BFLOAT16[::3], ALIKE))
def test_float32_logits_equal_transformers(variant: str, kernels: str, tmp_path: Path):
    model = save_random(VARIANTS[variant], tmp_path, torch.float32)
    ids = tokens()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    assert (freight_logits(tmp_path, ids, "auto", kernels) - expected).abs().max() <= 1e-4


def every_expert(config: PretrainedConfig) -> PretrainedConfig:
    """The model with all experts chosen for each token: where logits of a router nearly tie, two
    roundings choose other experts, whose difference says nothing of the roundings. Which are chosen
    is compared in float32."""
    said = config.to_dict()
    count = next((said[key] for key in ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
                  if key in said), None)  # fmt: skip
    everything = {
        "num_experts_per_tok": count,
        "moe_k": count,
        "top_k_experts": count,
        "topk_group": said.get("n_group"),
    }
    return type(config)(**said | {key: value for key, value in everything.items() if key in said})


def in_float32(head: torch.nn.Linear, given: tuple[torch.Tensor], rounded: object) -> torch.Tensor:
    """The logits of transformers' head as Freight defines them: not rounded to its dtype."""
    assert head.bias is None
    return F.linear(given[0].float(), head.weight.float())


@pytest.mark.parametrize(("variant", "kernels"), cases(BFLOAT16, ()))
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    variant: str, kernels: str, tmp_path: Path
):
    """Roundings to bfloat16 fall differently in any two programs; transformers' own move top-5
    log-probabilities by 0.05 to 0.06 at most. So: on average no farther from the truth, and 99 of
    100 lie within 0.05 of transformers', or within what two roundings as large as its own differ
    by. Its logits are rounded, too, and Freight's are not. So the same holds where the roundings of
    its logits are taken away, which leaves less of them, but for the noise of the others."""
    model = save_random(every_expert(VARIANTS[variant]), tmp_path, torch.bfloat16)
    ids = tokens()
    with torch.no_grad():
        rounded = model(torch.tensor([ids])).logits[0]
        hook = model.get_output_embeddings().register_forward_hook(in_float32)
        whole = model(torch.tensor([ids])).logits[0]
        hook.remove()
        exact = model.float()(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert whole.dtype is torch.float32
    ours = freight_logits(tmp_path, ids, "auto", kernels).log_softmax(-1)
    for logits, most in ((rounded, 1.05), (whole, 1.1)):
        theirs = logits.float().log_softmax(-1)
        top = theirs.topk(5).indices
        rounding = (theirs - exact).gather(1, top).abs()
        apart = (ours - theirs).gather(1, top).abs().quantile(0.99)
        assert apart <= max(0.05, 2**0.5 * rounding.quantile(0.99))
        assert (ours - exact).gather(1, top).abs().mean() <= most * rounding.mean()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("variant", ["llama-llama3", "hy-v3-float32-head", "gemma2", "granite"])
def test_no_head_rounds_its_logits(variant: str, kernels: str, tmp_path: Path):
    """Plain, tied, with a soft cap, with a divisor. `enable_lm_head_fp32` asks for what holds
    anyway.
    """
    torch.manual_seed(0)
    model = save_random(VARIANTS[variant], tmp_path, torch.bfloat16)
    opened = open_model(EngineArgs(str(tmp_path), kernels=kernels, skip_tokenizer_init=True))
    head = opened.load(opened.resolve(opened.args)).head
    hidden = torch.randn(40, 64).bfloat16()
    expected = hidden.double() @ model.lm_head.weight.double().T
    expected = expected / getattr(model.config, "logits_scaling", 1.0)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        expected = cap * torch.tanh(expected / cap)
    for rows in (1, 40):
        logits = head(hidden[:rows])
        assert logits.dtype is torch.float32
        bound = 1e-5 * expected.abs().max()
        assert (logits - expected[:rows]).abs().max() <= bound
        assert (logits.bfloat16() - logits).abs().max() > 10 * bound


@pytest.mark.parametrize(
    "variant", ["llama-llama3", "llama-linear", "llama-yarn-mscale", "qwen3-tied-theta", "hunyuan"]
)
def test_the_older_spelling_of_config_json_means_the_same(variant: str, tmp_path: Path):
    save_random(VARIANTS[variant], tmp_path, torch.float32)
    ids = tokens(40)
    expected = freight_logits(tmp_path, ids, "auto")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    if kind != "default":
        config["rope_scaling"] = {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    assert torch.equal(freight_logits(tmp_path, ids, "auto"), expected)


@pytest.mark.parametrize("under", ["model.language_model.", "language_model.model."])
def test_the_text_model_of_gemma_3_beside_a_vision_model(under: str, tmp_path: Path):
    """Under both of the names that its checkpoints use; the tensors of the vision model are skipped
    by name.
    """
    save_random(VARIANTS["gemma3"], tmp_path, torch.float32)
    ids = tokens(40)
    expected = freight_logits(tmp_path, ids, "auto", "reference")
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    text = json.loads(path.read_text())
    vision = {"vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 4, "image_token_index": 9}
    wrapped = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        **vision,
    }
    path.write_text(json.dumps({**wrapped, "text_config": text, "dtype": "float32"}))
    tensors = {
        under + name.removeprefix("model."): tensor for name, tensor in load_file(file).items()
    }
    outer = under.removesuffix("language_model.") if under.startswith("model.") else ""
    for name in ("vision_tower.patch.weight", "multi_modal_projector.mm_soft_emb_norm.weight"):
        tensors[outer + name] = torch.ones(3)
    save_file(tensors, file)
    assert torch.equal(freight_logits(tmp_path, ids, "auto", "reference"), expected)
    save_file(tensors | {"audio_tower.weight": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=r"audio_tower\.weight"):
        freight_logits(tmp_path, ids, "auto", "reference")


@pytest.mark.parametrize("kind", ["gemma4", "gemma4-unified"])
def test_the_text_model_of_gemma_4_beside_models_of_images_and_sound(kind: str, tmp_path: Path):
    """As the hub has it: head sizes in keys of their own, and tensors of other models, which are
    skipped by name.
    """
    save_random(VARIANTS[kind], tmp_path, torch.float32)
    ids = tokens(40)
    expected = freight_logits(tmp_path, ids, "auto", "reference")
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    text = json.loads(path.read_text())
    assert text.pop("per_layer_config") == {"3": {"head_dim": 64, "num_key_value_heads": 1}}
    text |= {
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "use_bidirectional_attention": "vision",
    }
    outside = {
        "vision_config": {"hidden_size": 8},
        "audio_config": {"hidden_size": 8},
        "image_token_id": 9,
    }
    name = (
        "Gemma4ForConditionalGeneration"
        if kind == "gemma4"
        else "Gemma4UnifiedForConditionalGeneration"
    )
    wrapped = {"model_type": kind.replace("-", "_"), "architectures": [name], **outside}
    path.write_text(json.dumps({**wrapped, "text_config": text, "dtype": "float32"}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): x for name, x in load_file(file).items()
    }
    for name in (
        "vision_tower.a.weight",
        "audio_tower.b.weight",
        "embed_vision.c.weight",
        "embed_audio.d.weight",
    )[
        2
        * (
            kind != "gemma4"
        ) :  # the unified model embeds patches and waves without models of their own
    ]:
        tensors["model." + name] = torch.ones(3)
    save_file(tensors, file)
    assert torch.equal(freight_logits(tmp_path, ids, "auto", "reference"), expected)
    save_file(tensors | {"model.touch_tower.weight": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=r"touch_tower\.weight"):
        freight_logits(tmp_path, ids, "auto", "reference")


def test_gemma_3_in_its_older_spelling_means_the_same(tmp_path: Path):
    save_random(VARIANTS["gemma3-two-ropes"], tmp_path, torch.float32)
    ids = tokens(40)
    expected = freight_logits(tmp_path, ids, "auto", "reference")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters")
    config.pop("layer_types")
    older = {
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 20.0,
    }
    path.write_text(json.dumps(config | older | {"sliding_window_pattern": 2}))
    assert torch.equal(freight_logits(tmp_path, ids, "auto", "reference"), expected)


def test_soft_caps_are_those_of_gemma_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Llama whose attention is Gemma 2's, and whose logits are capped as Gemma 2's are."""
    model = save_random(VARIANTS["llama"], tmp_path, torch.float32)
    ids, cap = tokens(), 0.5
    with torch.no_grad():
        uncapped = model(torch.tensor([ids])).logits[0]
        capped_attention = partial(modeling_gemma2.eager_attention_forward, softcap=cap)
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped_attention)
        expected = model(torch.tensor([ids])).logits[0]
    assert (expected - uncapped).abs().max() > 0.1
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"attn_logit_softcapping": cap}
    path.write_text(json.dumps(config))
    assert (freight_logits(tmp_path, ids, "auto") - expected).abs().max() <= 1e-4
    path.write_text(json.dumps(config | {"final_logit_softcapping": 3.0}))
    assert (
        freight_logits(tmp_path, ids, "auto") - 3 * torch.tanh(expected / 3)
    ).abs().max() <= 1e-4


def test_experts_of_gpt_oss_are_rounded_by_output_row(tmp_path: Path):
    """`--quantization fp8`: from [inputs, outputs of gate and up in turn] to rows of gate, then of
    up.
    """
    save_random(VARIANTS["gpt-oss"], tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    opened = open_model(
        EngineArgs(str(tmp_path), quantization="fp8", kernels="reference", skip_tokenizer_init=True)
    )
    experts = opened.load(opened.resolve(opened.args)).layers[1].mlp.experts
    for expert in (0, 7):
        matrix = stored["model.layers.1.mlp.experts.gate_up_proj"][expert].t()
        data, scale = fit_rows(torch.cat((matrix[::2], matrix[1::2])), Format.E4M3FN)
        weight, bias = experts.gate_up.of(expert)
        assert torch.equal(weight.data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(weight.scale, scale)
        in_turn = stored["model.layers.1.mlp.experts.gate_up_proj_bias"][expert]
        assert torch.equal(bias, torch.cat((in_turn[::2], in_turn[1::2])))
        weight, bias = experts.down.of(expert)
        data, scale = fit_rows(
            stored["model.layers.1.mlp.experts.down_proj"][expert].t(), Format.E4M3FN
        )
        assert torch.equal(
            weight.dequantized(), Weight(data, scale, Activations.DYNAMIC).dequantized()
        )
        assert torch.equal(bias, stored["model.layers.1.mlp.experts.down_proj_bias"][expert])
