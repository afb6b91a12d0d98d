"""MXFP8: E4M3 with a power of two for each 32 inputs, as compressed-tensors and ModelOpt declare it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats.four_bits import Form, Rounded, Tensors, ct, write
from tests.parity.random_models import freight_logits
from tests.refusals import refuses

from freight import LLM
from freight.checkpoint.layouts import read_scheme
from freight.errors import CheckpointError
from freight.model.decoder import Decoder
from freight.model.open import open_model
from freight.model.sizes import Layout, loaded_bytes
from freight.model.sources import CheckpointSource
from freight.settings.engine import EngineArgs

Q = "model.layers.0.self_attn.q_proj"
WEIGHTS = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
CT = ct(WEIGHTS, "mxfp8-quantized", WEIGHTS | {"dynamic": True})
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
ARGS = {"dynamic": False, "num_bits": 8, "type": "float", "group_size": 32}
GROUPS = {"group_0": {"input_activations": ARGS, "weights": ARGS, "targets": ["Linear"]}}


def mxfp8(w: torch.Tensor, dtype: torch.dtype = torch.uint8) -> Rounded:
    """Round with the power of two from which the largest of 32 is 256 or more, and below 512."""
    groups = w.double().unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 8
    scale = torch.exp2(exponent)[..., None]
    stored = (groups / scale).clamp(-448, 448).flatten(1).float().to(torch.float8_e4m3fn)
    byte = (exponent + 127).to(torch.uint8)
    values = stored.double().unflatten(1, (-1, 32)) * scale
    return {"weight": stored, "weight_scale": byte.view(dtype)}, values.flatten(1).float()


def form(said: dict[str, Any], dtype: torch.dtype = torch.uint8) -> Form:
    return Form(said, lambda w, _: mxfp8(w, dtype), "MXFP8, scales per 32 inputs")


FORMS = {
    "ct": form(CT),
    "ct in e8m0": form(CT, torch.float8_e8m0fnu),
    "modelopt": form(MODELOPT),
    "modelopt of 2026, in config.json as in its own file": form(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}}
    ),
    "modelopt by group": form({"quant_method": "modelopt", "config_groups": GROUPS, "ignore": ["lm_head"]}),
}  # fmt: skip


def loaded(folder: Path, dtype: str = "bfloat16", **options: Any) -> Decoder:
    args = EngineArgs(str(folder), device="cpu", dtype=dtype, skip_tokenizer_init=True, **options)
    opened = open_model(args)
    decoder = opened.load(opened.resolve(args))
    assert isinstance(decoder, Decoder)
    return decoder


@pytest.mark.parametrize("name", FORMS)
def test_values_become_bfloat16_exactly(name: str, tmp_path: Path):
    written = write(FORMS[name])
    decoder = loaded(written.save(tmp_path), kernels="reference")
    down = decoder.layers[1].mlp.down.weight
    assert down.data.dtype == torch.bfloat16
    assert torch.equal(down.data.float(), written.plain["model.layers.1.mlp.down_proj.weight"])
    parts = [written.plain[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    qkv = decoder.layers[0].mixer.qkv.weight
    assert torch.equal(qkv.data.float(), torch.cat(parts))


@pytest.mark.parametrize("experts", ["", "qwen3_moe", "mixtral"])
def test_logits_are_those_of_the_values(experts: str, tmp_path: Path):
    written = write(FORMS["ct"], experts)
    ids = list(range(3, 40))
    found = freight_logits(written.save(tmp_path / "mx"), ids, "float32", "auto")
    plain = freight_logits(written.save_plain(tmp_path / "plain"), ids, "float32", "auto")
    assert torch.equal(found, plain)


def test_what_is_counted_is_what_is_loaded(tmp_path: Path):
    args = EngineArgs(
        str(write(FORMS["ct"]).save(tmp_path)), device="cpu", kernels="reference", dtype="bfloat16"
    )
    opened = open_model(args)
    config = opened.resolve(args)
    formats = config.compute_format, config.weight_format
    scheme = opened.scheme
    counted = loaded_bytes(opened.model, *formats, scheme.linear, Layout.PLAIN, 128)
    plain = loaded_bytes(opened.model, *formats, lambda module: None, Layout.PLAIN, 128)
    assert counted == plain


def filled(name: str, value: float, place: Any = ...) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].__setitem__(place, value)


WRONG: list[tuple[Callable[[Tensors], object], tuple[str, ...]]] = [
    (filled(f"{Q}.weight_scale", 255, (3, 1)), (f"{Q}.weight_scale has inf", "finite")),
    (
        lambda tensors: tensors.update({f"{Q}.weight_scale": torch.ones(128, 4)}),
        (f"{Q}.weight_scale is F32 of shape [128, 4]", "U8 or F8_E8M0 of [128, 4]"),
    ),
    (
        lambda tensors: tensors.update({f"{Q}.weight_scale": tensors[f"{Q}.weight_scale"][:, :3]}),
        (f"{Q}.weight_scale is U8 of shape [128, 3]", "of [128, 4] is expected"),
    ),
    (filled(f"{Q}.weight_scale", 250, (3, 1)), (f"{Q}.weight has values beyond bfloat16",)),
    (lambda tensors: tensors.pop(f"{Q}.weight_scale"), (f"{Q}.weight_scale is missing",)),
]


@pytest.mark.parametrize(("change", "named"), WRONG)
def test_what_is_wrong_is_named_before_a_weight_is_read(
    change: Callable[[Tensors], object],
    named: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    written = write(FORMS["ct"])
    change(written.tensors)
    for read in ("weight", "tensor"):
        monkeypatch.setattr(CheckpointSource, read, None)
    with refuses(CheckpointError, *named):
        loaded(written.save(tmp_path))


def test_groups_of_zeros_may_have_any_power_of_two(tmp_path: Path):
    written = write(FORMS["ct"])
    written.tensors[f"{Q}.weight"][3, 32:64] = 0.0
    written.tensors[f"{Q}.weight_scale"][3, 1] = 0
    q = loaded(written.save(tmp_path), kernels="reference").layers[0].mixer.qkv.weight.data[3]
    assert (q[32:64] == 0).all()
    assert torch.equal(q[:32].float(), written.plain[f"{Q}.weight"][3, :32])


def test_float16_that_does_not_have_the_values_is_refused(tmp_path: Path):
    written = write(FORMS["ct"])
    written.tensors[f"{Q}.weight_scale"][3] = 127 + 40
    with refuses(CheckpointError, f"{Q}.weight", "float16", "--dtype bfloat16"):
        loaded(written.save(tmp_path), "float16")


def test_ranks_cut_rows_anywhere(tmp_path: Path):
    """A group is one row high, so no block of scales is cut."""
    options = {"device": "cpu", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    folder = write(FORMS["ct"]).save(tmp_path)
    tokens = []
    for ranks in (1, 2):
        llm = LLM(model=str(folder), tensor_parallel_size=ranks, **options)
        tokens.append(llm.generate([[5, 6, 7]])[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_other_declarations():
    """E4M3 in groups of 32 whose scales are not in bytes are not MXFP8."""
    said = ct({**WEIGHTS, "scale_dtype": None}, "float-quantized")
    assert "MXFP8" not in read_scheme({"quantization_config": said}, None).description
    old = ct({**WEIGHTS, "scale_dtype": None}, "mxfp8-quantized")
    scheme = read_scheme({"quantization_config": old}, None)
    assert (
        scheme.description
        == "compressed-tensors: weights in MXFP8, scales per 32 inputs, activations plain"
    )
    assert scheme.weight_formats == "mxfp8"
