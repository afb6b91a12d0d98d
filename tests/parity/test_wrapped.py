"""Text models within models of text and pictures, and model types that transformers does not know.

The forms of their config.json, and the names of their tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.shapes import LATENT
from tests.parity.variants import LONG, SHAPE, VARIANTS
from tests.refusals import refuses
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Glm46VConfig,
    InternVLConfig,
    Kimi_K25Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from freight.errors import CheckpointError
from freight.model.open import open_checkpoint

IDS = tokens(80)
VISION = {"vision_config": {"hidden_size": 16}}
Renamed = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def logits(folder: Path, **options: Any) -> Tensor:
    return freight_logits(folder, IDS, "float32", "reference", **options)


def theirs(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([IDS])).logits[0]
    return found


def change(
    folder: Path, config: dict[str, Any] | None = None, rename: Renamed | None = None
) -> None:
    """Write another config.json, and the tensors under other names."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if rename is not None:
        file = folder / "model.safetensors"
        save_file(
            {name: x.contiguous() for name, x in rename(load_file(file)).items()},
            file,
            {"format": "pt"},
        )


def said(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def close(folder: Path, expected: Tensor) -> None:
    assert expected.std() > 0.1
    assert (logits(folder) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", ["qwen2-vl", "qwen2-5-vl"])
def test_qwen_2_vl_and_2_5_vl_as_the_hub_has_them(variant: str, tmp_path: Path):
    """Keys of the text model outside, `type` mrope, and no `language_model` in the names."""
    expected = theirs(save_random(VARIANTS[variant], tmp_path, torch.float32))
    config = said(tmp_path)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "rope_theta": 10000.0,
    }
    flat = (
        text
        | {"use_sliding_window": False, "sliding_window": 32768, "vision_token_id": 151654}
        | config
    )

    def older(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): x
                for name, x in stored.items()}  # fmt: skip

    change(tmp_path, flat, older)
    assert "model.layers.0.mlp.down_proj.weight" in load_file(tmp_path / "model.safetensors")
    close(tmp_path, expected)
    both = config | {key: text[key] for key in ("hidden_size", "vocab_size", "max_window_layers")}
    change(tmp_path, both | {"text_config": text})  # as transformers 4.52 wrote it
    close(tmp_path, expected)
    change(tmp_path, flat | {"use_logn_attn": True})
    with pytest.raises(CheckpointError, match="use_logn_attn = True"):
        logits(tmp_path)


@pytest.mark.parametrize("variant", ["qwen3-vl-moe", "qwen3-vl-moe-dense-layer"])
def test_experts_of_qwen_3_vl_in_every_form(variant: str, tmp_path: Path):
    """A 3-D tensor [experts, inputs, outputs] on the hub; [experts, outputs, inputs]; a matrix for
    each.
    """
    expected = theirs(save_random(VARIANTS[variant], tmp_path, torch.float32))
    stored = load_file(tmp_path / "model.safetensors")
    experts = {name: x for name, x in stored.items() if x.ndim == 3 and ".experts." in name}
    assert {tuple(x.shape) for x in experts.values()} == {
        (8, 64, 64),
        (8, 64, 32),
    }  # the first is the same in both
    turned = {name: x.mT for name, x in experts.items()}
    split = {}
    for name, x in experts.items():
        parts = (
            {"gate_proj": x[:, :32], "up_proj": x[:, 32:]}
            if "gate_up" in name
            else {"down_proj": x}
        )
        for part, matrices in parts.items():
            for expert, matrix in enumerate(matrices):
                split[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = matrix
    others = {name: x for name, x in stored.items() if name not in experts}
    for form in (experts, turned, split):
        change(tmp_path, rename=lambda _, form=form: others | form)
        close(tmp_path, expected)


TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14}  # fmt: skip
TEXTS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


def under(body: str, head: str, vision: str) -> Renamed:
    """From the names of `transformers.InternVLForConditionalGeneration`, as it saves them."""

    def rename(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, x in stored.items():
            bare = name.removeprefix("model.").replace("language_model.model.", "language_model.")
            if "lm_head" in bare:
                found[f"{head}lm_head.weight"] = x
            elif bare.startswith("language_model."):
                found[body + bare.removeprefix("language_model.")] = x
            else:
                found[vision + bare] = x
        return found

    return rename


@pytest.mark.parametrize("text", TEXTS)
def test_internvl_in_transformers_form(text: str, tmp_path: Path):
    whole = InternVLConfig(
        text_config=TEXTS[text].to_dict(), vision_config=TINY, tie_word_embeddings=False
    )
    expected = theirs(save_random(whole, tmp_path, torch.float32))
    for names in (
        ("model.language_model.", "", "model."),
        ("language_model.model.", "language_model.", ""),
    ):
        change(tmp_path, rename=under(*names))
        close(tmp_path, expected)
    skipped = open_checkpoint(str(tmp_path)).checkpoint
    assert any(name.startswith("vision_tower.") for name in skipped.names)
    intern = said(tmp_path) | {
        "model_type": "interns1",
        "architectures": ["InternS1ForConditionalGeneration"],
    }
    change(tmp_path, intern, under("model.language_model.", "", "model."))
    close(tmp_path, expected)


@pytest.mark.parametrize("text", TEXTS)
def test_internvl_in_the_form_of_its_own_code(text: str, tmp_path: Path):
    expected = theirs(save_random(TEXTS[text], tmp_path, torch.float32))
    own = said(tmp_path) | {"ep_size": 1, "use_deepep": False, "moe_config": None}
    beside = {
        "hidden_size": 64,
        "select_layer": -1,
        "template": "internvl2_5",
        "use_thumbnail": True,
        "dtype": "float32",
    }
    beside |= {
        "ps_version": "v2",
        "max_dynamic_patch": 12,
        "use_llm_lora": 0,
        "downsample_ratio": 0.5,
    }
    chat = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        **VISION,
        **beside,
    }

    def inside(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        others = {
            "vision_model.encoder.layers.0.ls1": torch.ones(3),
            "mlp1.0.weight": torch.ones(3),
        }
        return {f"language_model.{name}": x for name, x in stored.items()} | others

    change(tmp_path, chat | {"llm_config": own}, inside)
    close(tmp_path, expected)
    change(tmp_path, chat | {"llm_config": own | {"model_type": "internlm2"}})
    with refuses(CheckpointError, "llm_config", "'qwen2', 'qwen3', 'qwen3_moe' or 'llama'"):
        logits(tmp_path)
    change(tmp_path, chat | {"llm_config": own | {"use_logn_attn": True}})
    with pytest.raises(CheckpointError, match="use_logn_attn = True"):
        logits(tmp_path)


@pytest.mark.parametrize("model_type", ["glm46v", "glmga"])
def test_glm_4_6v_of_the_dense_kind(model_type: str, tmp_path: Path):
    dense = VARIANTS["glm4v"].to_dict()
    whole = Glm46VConfig(text_config=dense["text_config"], vision_config=dense["vision_config"])
    expected = theirs(save_random(whole, tmp_path, torch.float32))
    change(tmp_path, said(tmp_path) | {"model_type": model_type})
    assert said(tmp_path)["architectures"] == ["Glm46VForConditionalGeneration"]
    close(tmp_path, expected)


def test_phi_4_multimodal_with_adapters_for_pictures_and_sound(tmp_path: Path):
    """Text goes through the matrices that the adapters are beside."""
    text = Phi3Config(**SHAPE, pad_token_id=0, tie_word_embeddings=True, original_max_position_embeddings=64,
                      rope_parameters={**LONG, "partial_rotary_factor": 1.0})  # fmt: skip
    expected = theirs(save_random(text, tmp_path, torch.float32))
    lora = {
        "dp": 0.0,
        "layer": "layers.*((self_attn.(qkv_proj|o_proj))|(mlp.(gate_up|down)_proj))",
        "lora_alpha": 4,
    }
    beside = {"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "vision_lora": lora, "speech_lora": lora,
              "embd_layer": {"embedding_cls": "image_audio"}, "audio_processor": {"name": "cascades"}}  # fmt: skip

    def adapted(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {"model.embed_tokens_extend.audio_embed.a.weight": torch.ones(3)}
        for name, x in stored.items():
            if name.endswith("_proj.weight"):
                module = name.removesuffix("weight")
                found |= {f"{module}lora_{one}.vision.weight": torch.ones(2, 2) for one in "AB"}
                found |= {f"{module}lora_{one}.speech.weight": torch.ones(2, 2) for one in "AB"}
                name = f"{module}base_layer.weight"
            found[name] = x
        return found

    change(tmp_path, said(tmp_path) | beside, adapted)
    close(tmp_path, expected)


PUBLISHED = Path(__file__).parents[1] / "fixtures/published"
# model types that transformers does not know -> one that computes the same
SAME_WEIGHTS = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}


def mimo(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """A MiMo with the config.json of MiMo-7B-Base in small sizes. Returns the logits of
    transformers' Qwen2 with its weights, and the tensors of a layer that predicts a further token.
    """
    published = json.loads((PUBLISHED / "XiaomiMiMo--MiMo-7B-Base.json").read_text())
    small = published | SHAPE | {"head_dim": 16, "torch_dtype": "float32"}
    qwen2 = {
        key: value for key, value in small.items() if key not in ("model_type", "architectures")
    }
    expected = theirs(save_random(Qwen2Config(**qwen2), folder, torch.float32))
    body = {
        name: x
        for name, x in load_file(folder / "model.safetensors").items()
        if ".layers.0." in name
    }
    further = {name.replace(".layers.0.", ".mtp_layers.0."): x + 1 for name, x in body.items()}
    further["model.mtp_layers.0.input_proj.weight"] = torch.randn(64, 128)
    change(folder, small, lambda stored: stored | further)
    return expected, further


def test_kimi_k2_as_deepseek_v3_with_the_same_weights(tmp_path: Path):
    published = json.loads((PUBLISHED / "moonshotai--Kimi-K2-Instruct.json").read_text())
    del published["quantization_config"]
    small = published | LATENT | {"torch_dtype": "float32"}
    known = {
        key: value
        for key, value in small.items()
        if key not in ("model_type", "architectures", "auto_map")
    }
    expected = theirs(save_random(DeepseekV3Config(**known), tmp_path, torch.float32))
    change(tmp_path, small)
    assert said(tmp_path)["model_type"] == "kimi_k2"
    close(tmp_path, expected)


KIMI_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
               "pos_emb_height": 4, "pos_emb_width": 4}  # fmt: skip


def as_kimi_publishes(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers 5.23 saves the layers of the text model as `blocks`, as those of the vision
    model are called.
    """
    return {name.replace("language_model.model.blocks.", "language_model.model.layers."): x
            for name, x in stored.items()}  # fmt: skip


def as_transformers_names_it(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    inner = {
        name.replace("language_model.model.", "model.language_model."): x
        for name, x in stored.items()
    }
    return {name.replace("language_model.lm_head", "lm_head"): x for name, x in inner.items()}


def test_the_text_model_of_kimi_k2_5(tmp_path: Path):
    """With the keys that transformers writes, and those of the published file; under both names of
    its tensors.
    """
    whole = Kimi_K25Config(text_config=VARIANTS["deepseek-v3"].to_dict(), vision_config=KIMI_VISION,
                           projection_hidden_size=16, tie_word_embeddings=False)  # fmt: skip
    expected = theirs(save_random(whole, tmp_path, torch.float32))
    change(tmp_path, rename=as_kimi_publishes)
    close(tmp_path, expected)
    assert (freight_logits(tmp_path, IDS, "float32") - expected).abs().max() <= 1e-4
    published = json.loads((PUBLISHED / "moonshotai--Kimi-K2.5.json").read_text())
    assert (
        said(tmp_path)["architectures"]
        == ["Kimi_K25ForConditionalGeneration"]
        != published["architectures"]
    )
    text = published["text_config"] | said(tmp_path)["text_config"] | {"model_type": "kimi_k2"}
    del text["quantization_config"], text["rope_scaling"], text["rope_theta"]
    change(
        tmp_path, published | {"text_config": text, "dtype": "float32"}, as_transformers_names_it
    )
    close(tmp_path, expected)
    skipped = open_checkpoint(str(tmp_path)).checkpoint.names
    assert {"mm_projector.proj.0.weight", "vision_tower.encoder.blocks.0.wqkv.weight"} <= {*skipped}
    for wrong, word in (
        ({"use_logn_attn": True}, "use_logn_attn"),
        ({"scoring_func": "softmax"}, "scoring_func"),
    ):
        change(tmp_path, published | {"text_config": text | wrong, "dtype": "float32"})
        with pytest.raises(CheckpointError, match=word):
            logits(tmp_path)


def test_mimo_as_qwen_2_with_the_same_weights(tmp_path: Path):
    expected, further = mimo(tmp_path)
    assert said(tmp_path)["model_type"] == "mimo"
    close(tmp_path, expected)
    compiled = freight_logits(tmp_path, IDS, "float32")
    assert (compiled - expected).abs().max() <= 1e-4
    assert len(further) > 10
    assert further.keys() <= {*open_checkpoint(str(tmp_path)).checkpoint.names}
    change(tmp_path, rename=lambda stored: stored | {"model.other_layers.0.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"model\.other_layers\.0\.weight"):
        logits(tmp_path)
