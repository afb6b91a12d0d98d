"""Adapters that PEFT wrote, merged: the weights of `merge_and_unload`, and the logits of the model
with its adapter.

`expected.safetensors` of each has what PEFT computes: every tensor that differs after
`merge_and_unload` of the model in bfloat16, and the logits of the model in float32 with the adapter
beside it, of the tokens 1 to 40.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.refusals import refuses
from torch import Tensor

from freight.cache.pool import allocate_pool
from freight.checkpoint.merge import merge
from freight.checkpoint.writer import CheckpointWriter
from freight.engine.runner import ModelRunner
from freight.errors import CheckpointError, ConfigError
from freight.kernels.select import select_kernels
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[1] / "fixtures"
PEFT = FIXTURES / "peft"
MODULES = "base_model.model.model."
NAMES = sorted(path.name for path in PEFT.iterdir() if not path.name.startswith("base"))


def base_of(name: str) -> Path:
    return PEFT / ("base_tied" if name.startswith("tied") else "base")


def logits(folder: Path) -> Tensor:
    """Of the tokens 1 to 40, in float32."""
    args = EngineArgs(
        str(folder), dtype="float32", kv_cache_dtype="float32", skip_tokenizer_init=True
    )
    opened = open_model(args)
    config, kernels = opened.resolve(opened.args), select_kernels("auto")
    decoder, spec = opened.load(config), opened.cache_spec(config)
    pool = allocate_pool(
        spec, config.kv, [3] * len(spec.groups), kernels, rotaries=decoder.rotaries
    )
    return ModelRunner(decoder, pool, "cpu").logits(list(range(1, 41)), 0, pool.whole).clone()


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("tied")])
def test_weights_are_those_of_merge_and_unload(name: str, tmp_path: Path) -> None:
    """To the bit, but for sums in another order, and for PEFT's second rounding where the adapter
    has 16 bits.
    """
    result = merge(str(PEFT / "base"), str(PEFT / name), tmp_path / "out")
    before, after = (
        load_file(PEFT / "base/model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    expected = load_file(PEFT / name / "expected.safetensors")
    assert after.keys() == before.keys()
    assert result.num_changed == len(expected) - 1
    assert not result.untied
    for tensor, value in after.items():
        if tensor not in expected:
            assert torch.equal(value, before[tensor]), tensor
            continue
        if name == "embeddings" and "embed" in tensor:  # of which PEFT rounds A and B as well
            torch.testing.assert_close(value, expected[tensor], rtol=0.01, atol=0.02)
            continue
        steps = (value.view(torch.int16).int() - expected[tensor].view(torch.int16).int()).abs()
        assert steps.max() <= 1, tensor
        assert (steps > 0).float().mean() <= (0.2 if name == "half" else 0.01), tensor


@pytest.mark.parametrize("name", NAMES)
def test_the_merged_model_computes_what_the_model_with_its_adapter_does(
    name: str, tmp_path: Path
) -> None:
    """In float32, where merging rounds nothing that shows. A head that is the embedding gets a
    tensor of its own.
    """
    shutil.copytree(base_of(name), tmp_path / "base")
    stored = {
        tensor: value.float()
        for tensor, value in load_file(tmp_path / "base/model.safetensors").items()
    }
    save_file(stored, tmp_path / "base/model.safetensors")
    result = merge(str(tmp_path / "base"), str(PEFT / name), tmp_path / "out")
    expected = load_file(PEFT / name / "expected.safetensors")["logits"]
    assert result.untied == name.startswith("tied")
    assert (logits(tmp_path / "out") - expected).abs().max() < 1e-3
    assert (logits(tmp_path / "base") - expected).abs().max() > 0.1


def test_files_of_the_model_come_along_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter.__init__, "__defaults__", (4000, None))
    shutil.copytree(PEFT / "base", tmp_path / "base")
    (tmp_path / "base/tokenizer.json").write_text("{}")
    (tmp_path / "base/LICENSE").write_text("free")
    merge(str(tmp_path / "base"), str(PEFT / "plain"), tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out/LICENSE").read_text() == "free"
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert not list(tmp_path.glob(".freight*"))
    before, after = (
        json.loads((tmp_path / one / "config.json").read_text()) for one in ("base", "out")
    )
    assert {key: value for key, value in after.items() if key != "freight"} == before
    assert torch.isfinite(logits(tmp_path / "out")).all()


def test_modules_of_wrapped_models_are_found_under_their_stored_names(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    stored = load_file(PEFT / "plain/adapter_model.safetensors")
    renamed = {
        name.replace(MODULES, f"{MODULES}language_model."): value for name, value in stored.items()
    }
    assert renamed.keys() != stored.keys()
    save_file(renamed, tmp_path / "adapter/adapter_model.safetensors")
    merge(str(PEFT / "base"), str(tmp_path / "adapter"), tmp_path / "out")
    merge(str(PEFT / "base"), str(PEFT / "plain"), tmp_path / "plain")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        tmp_path / "plain/model.safetensors"
    ).read_bytes()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"peft_type": "IA3"}, ConfigError, "peft_type is 'IA3'"),
    "transposed": ({"fan_in_fan_out": True}, ConfigError, "fan_in_fan_out is True"),
    "residual base": (
        {"init_lora_weights": "pissa_niter_4"},
        ConfigError,
        "init_lora_weights is 'pissa_niter_4'",
    ),
    "bias of its own": ({"lora_bias": True}, ConfigError, "lora_bias"),
    "parameters": (
        {"target_parameters": ["mlp.experts.gate_up_proj_bias"]},
        ConfigError,
        "target_parameters",
    ),
    "layers": ({"layer_replication": [[0, 2], [1, 2]]}, ConfigError, "layer_replication"),
    "tokens": ({"alora_invocation_tokens": [1]}, ConfigError, "alora_invocation_tokens"),
    "a later key": ({"use_something_new": True}, ConfigError, "use_something_new is True"),
    "rank": ({"r": 8}, CheckpointError, "rank 8"),
    "no rank": ({"r": 0}, CheckpointError, "r is 0"),
    "a pattern": ({"rank_pattern": {"(": 4}}, CheckpointError, "not a regular expression"),
    "a truth": ({"lora_alpha": True, "alpha_pattern": {}}, CheckpointError, "lora_alpha is True"),
    "400 digits": ({"lora_alpha": 10**400, "alpha_pattern": {}}, CheckpointError, "lora_alpha is"),
    "no end": (
        {"rank_pattern": {"(?:.*[a-z.]|.*[a-z.]|.*[a-z.]){18}[^j]": 4}},
        CheckpointError,
        "nested repeats",
    ),
    "no object": ({"rank_pattern": [4]}, CheckpointError, "rank_pattern is"),
    "DoRA without magnitudes": ({"use_dora": True}, CheckpointError, "only a, b of the parts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_merged_is_refused(case: str, tmp_path: Path) -> None:
    changed, kind, said = REFUSED[case]
    shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(kind, match=said):
        merge(str(PEFT / "base"), str(tmp_path / "adapter"), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".freight*"))


def _lost(tensors: dict[str, Tensor]) -> None:
    del tensors[next(name for name in tensors if name.endswith("lora_B.weight"))]


def _foreign(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)


def _wide(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    tensors[name] = torch.zeros(4, 64)


def _longer(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(65, 32)


def _short(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("down_proj.lora_B.weight"))
    tensors[name] = tensors[name][:-1].clone()


def _in_8_bits(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: value.to(torch.float8_e4m3fn) for name, value in tensors.items()})


def _infinite(tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    tensors[name] = torch.full_like(tensors[name], torch.inf)


def _unprefixed(tensors: dict[str, Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name.removeprefix("base_model.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (dict.clear, "has no tensor"),
        (_unprefixed, r"does not begin with base_model\.model\., as PEFT's"),
        (_lost, "it has only a of the parts"),
        (_foreign, "has no such tensor"),
        (_wide, "do not belong together"),
        (_longer, "vocabulary was extended"),
        (_short, "do not belong together$"),
        (_in_8_bits, "an adapter has 16 or 32 bits"),
        (_infinite, "not finite"),
    ],
)
def test_damaged_adapters_are_refused(
    spoil: Callable[[dict[str, Tensor]], None], said: str, tmp_path: Path
) -> None:
    shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=said):
        merge(str(PEFT / "base"), str(tmp_path / "adapter"), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".freight*"))


def test_a_bias_of_the_change_is_refused(tmp_path: Path) -> None:
    """PEFT stores one with `lora_bias`; here config.json does not say so."""
    shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    bias = name.removesuffix("weight") + "bias"
    save_file(tensors | {bias: torch.zeros(len(tensors[name]))}, file)
    with refuses(ConfigError, "lora_B.bias'", "merge_and_unload"):
        merge(str(PEFT / "base"), str(tmp_path / "adapter"), tmp_path / "out")


def test_magnitudes_of_another_shape_are_refused(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "dora", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("magnitude_vector"))
    save_file(tensors | {name: tensors[name][:1].clone()}, file)
    with pytest.raises(CheckpointError, match="what is added to"):
        merge(str(PEFT / "base"), str(tmp_path / "adapter"), tmp_path / "out")


def test_a_pattern_is_the_end_of_a_name_from_a_dot_on(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    config = json.loads(file.read_text())
    others = dict.fromkeys(("proj", "q_pro", "self_attn", "layers"), 100)
    file.write_text(
        json.dumps(config | {"alpha_pattern": others | (config.get("alpha_pattern") or {})})
    )
    for adapter, out in ((PEFT / "plain", "plain"), (tmp_path / "adapter", "out")):
        merge(str(PEFT / "base"), str(adapter), tmp_path / out)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        tmp_path / "plain/model.safetensors"
    ).read_bytes()


def test_bases_in_8_bits_are_refused(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "base", tmp_path / "base")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(
        json.dumps(config | {"compression_config": {"format": "x"}})
    )
    with pytest.raises(ConfigError, match="is quantized"):
        merge(str(tmp_path / "base"), str(PEFT / "plain"), tmp_path / "out")
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "base/model.safetensors")
    file = tmp_path / "base/model.safetensors"
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in stored.items()}, file)
    with refuses(ConfigError, "16 bits", "merge"):
        merge(str(tmp_path / "base"), str(PEFT / "plain"), tmp_path / "out")


def test_a_weight_that_only_rounding_makes_infinite_is_refused(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "base", tmp_path / "base")
    stored = {
        tensor: value.half()
        for tensor, value in load_file(tmp_path / "base/model.safetensors").items()
    }
    save_file(stored, tmp_path / "base/model.safetensors")
    shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    config = json.loads(file.read_text())
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "fits")
    file.write_text(json.dumps(config | {"lora_alpha": 1e8, "alpha_pattern": {}}))
    with refuses(CheckpointError, "finite", "torch.float16"):
        merge(str(tmp_path / "base"), str(tmp_path / "adapter"), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is quantized.*freight quantize"):
        merge(str(FIXTURES / "ct_docs"), str(PEFT / "plain"), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        merge(str(PEFT / "base"), str(PEFT / "base"), tmp_path / "out")
    shutil.copytree(PEFT / "plain", tmp_path / "adapter")
    (tmp_path / "adapter/adapter_model.safetensors").rename(tmp_path / "adapter/adapter_model.bin")
    with refuses(CheckpointError, "safetensors"):
        merge(str(PEFT / "base"), str(tmp_path / "adapter"), tmp_path / "out")
    with pytest.raises(ConfigError, match="exists"):
        merge(str(PEFT / "base"), str(PEFT / "plain"), tmp_path / "adapter")
