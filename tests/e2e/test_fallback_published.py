"""Models without a row whose config.json is spelled as transformers 4.40 and before wrote it.

The keys and values are those of published files; only sizes are smaller. The model to compare with
is made from the spelling of transformers 5, in which the rotary embedding is written here by hand.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.test_fallback import FAST, PROMPTS, SLOW, SMALL, expected, llm, tokens
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from freight.model.fallback_probe import foreign_config
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

# by model type: which model it is, its config.json as published but for the sizes, and its rotary
# embedding as transformers 5 writes it
FILE = Path(__file__).parents[1] / "fixtures" / "fallback_published.json"
PUBLISHED: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
QUICK = ("gpt_neox", "olmo", "gpt_bigcode", "persimmon")
OLD_ROPE = ("rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "partial_rotary_factor")


def old_spelling(saved: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 as 4.40 would have written it."""
    old = {
        key: value
        for key, value in saved.items()
        if key not in ("dtype", "rope_parameters", "layer_types")
    }
    old |= {"torch_dtype": saved["dtype"], "transformers_version": "4.40.0"}
    rope = dict(saved.get("rope_parameters") or {})
    theta, share, kind = (
        rope.pop(key, None) for key in ("rope_theta", "partial_rotary_factor", "rope_type")
    )
    neox = saved["model_type"] == "gpt_neox"
    if theta is not None:
        old["rotary_emb_base" if neox else "rope_theta"] = theta
    if share is not None:
        old["rotary_pct" if neox else "partial_rotary_factor"] = share
    if kind not in (None, "default"):
        old["rope_scaling"] = {"type": kind} | rope
    return old


def save_published(model_type: str, folder: Path) -> Any:
    """The model, made from the spelling of transformers 5 and saved with the published config.json."""
    published, rope = PUBLISHED[model_type]["config"], PUBLISHED[model_type]["rope"]
    torch.manual_seed(0)
    new = {
        key: value
        for key, value in published.items()
        if key not in (*OLD_ROPE, "torch_dtype", "architectures")
    }
    if rope is not None:
        new["rope_parameters"] = rope
    config = CONFIG_MAPPING[model_type](**new | {"bos_token_id": 1, "eos_token_id": 2})
    dtype = getattr(torch, published["torch_dtype"])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(
        folder
    )  # a copy: it rounds the frequencies of the rope too
    saved = json.loads((folder / "config.json").read_text())
    old = published | {
        "model_type": model_type,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "transformers_version": "4.40.0",
    }
    made = old_spelling(saved)
    assert {key: made[key] for key in OLD_ROPE if made.get(key) is not None} == {
        key: _without_repeats(old[key])
        for key in OLD_ROPE
        if old.get(key) is not None and key in made
    }
    (folder / "config.json").write_text(json.dumps(old))
    return model


def _without_repeats(value: Any) -> Any:
    """`rope_scaling` with the kind as 'type', as 4.40 has it; later versions wrote 'rope_type'."""
    if not isinstance(value, dict):
        return value
    return {("type" if key == "rope_type" else key): one for key, one in value.items()}


def difference(folder: Path, model: Any) -> float:
    """The largest difference between logits over the cache and transformers' own, all computed in
    float32.
    """
    runner = llm(folder, dtype="float32").engine.runner
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits[0]
    found = runner.logits(PROMPTS[0], 0, runner.pool.whole)
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


@pytest.mark.parametrize(
    "model_type",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED if name not in QUICK),
    ],
)
def test_a_published_config_gives_the_model(model_type: str, tmp_path: Path) -> None:
    model = save_published(model_type, tmp_path)
    stored = open_model(EngineArgs(str(tmp_path))).model.checkpoint_format
    assert stored == PUBLISHED[model_type]["config"]["torch_dtype"]
    assert difference(tmp_path, model) < 1e-4
    assert tokens(llm(tmp_path, dtype="float32", max_num_batched_tokens=4)) == expected(model)


@pytest.mark.parametrize("model_type", sorted(FAST | SLOW))
def test_the_old_spelling_describes_the_same_model(model_type: str) -> None:
    """Every model type whose tokens are compared (`test_fallback`)."""
    config = CONFIG_MAPPING[model_type](**SMALL | (FAST | SLOW)[model_type], dtype="bfloat16")
    saved = json.loads(config.to_json_string())
    assert "torch_dtype" not in saved
    assert foreign_config(old_spelling(saved)) == foreign_config(saved)
