"""Weights in 4 bits from every producer: their values, logits and sizes, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.formats.four_bits import (
    AUTO_ROUND,
    AWQ,
    FORMS,
    GPTQ,
    MODELOPT,
    Coded,
    Tensors,
    Written,
    awq,
    ct,
    gptq,
    int4,
    integers,
    packed,
    words,
    write,
)
from tests.parity.random_models import freight_logits
from tests.refusals import line_naming, refuses
from tests.unit.models.test_sizes import require_equal
from transformers import AutoModelForCausalLM

from freight.checkpoint.four_bits import StoredGroups, find_four_bits
from freight.checkpoint.layouts import read_scheme
from freight.checkpoint.reader import Checkpoint
from freight.cli.inspect import describe
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format
from freight.fp8.scheme import Packing
from freight.kernels.reference_experts import ExpertList
from freight.kernels.reference_set import REFERENCE, ReferenceKernels
from freight.model.decoder import Decoder
from freight.model.loader import load_model
from freight.model.open import OpenModel, open_model
from freight.model.shapes import tensor_shapes
from freight.model.shares import share_of
from freight.model.sources import CheckpointSource
from freight.operands.weight import Weight
from freight.settings.engine import EngineArgs

IDS = [5, 17, 3, 42, 60, 9, 31, 8, 25, 50, 1, 33]


def opened(folder: Path, **options: Any) -> OpenModel:
    return open_model(
        EngineArgs(
            str(folder), kernels="reference", device="cpu", skip_tokenizer_init=True, **options
        )
    )


def loaded(folder: Path, **options: Any) -> Decoder:
    model = opened(folder, **options)
    decoder = model.load(model.resolve(model.args))
    assert isinstance(decoder, Decoder)
    return decoder


def matrices(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The values of each projection, merged as they are loaded."""
    found = {}
    for index, layer in enumerate(decoder.layers):
        for name in ("qkv", "o"):
            found[f"{index}.{name}"] = getattr(layer.mixer, name).weight.dequantized()
        for name in ("gate_up", "down"):
            part = getattr(getattr(layer.mlp, "experts", layer.mlp), name)
            experts = part.matrices if isinstance(part, ExpertList) else (part.weight,)
            for number, weight in enumerate(experts):
                found[f"{index}.{name}.{number}"] = weight.dequantized()
    return found


def of_plain(written: Written) -> dict[str, torch.Tensor]:
    found = {}
    for index in range(2):
        prefix = f"model.layers.{index}."

        def rows(prefix: str, *names: str) -> torch.Tensor:
            return torch.cat([written.plain[f"{prefix}{name}.weight"] for name in names])

        found[f"{index}.qkv"] = rows(f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj")
        found[f"{index}.o"] = rows(f"{prefix}self_attn.", "o_proj")
        for number in range(4 if "num_experts_per_tok" in written.config else 1):
            block, names = "mlp.", ("gate_proj", "up_proj", "down_proj")
            if written.config["model_type"] == "mixtral":
                block, names = "block_sparse_moe.", ("w1", "w3", "w2")
            if "num_experts_per_tok" in written.config:
                block += f"experts.{number}."
            found[f"{index}.gate_up.{number}"] = rows(prefix + block, *names[:2])
            found[f"{index}.down.{number}"] = rows(prefix + block, names[2])
    return found


IN_ORDER = [name for name in FORMS if not name.endswith("order")]


@pytest.mark.parametrize("experts", ["", "qwen3_moe"])
@pytest.mark.parametrize("name", IN_ORDER)
def test_the_values_are_the_producer_s(name: str, experts: str, tmp_path: Path):
    if name == "ct int4 128" and experts:
        pytest.skip("experts of 64 inputs have no groups of 128")
    written = write(FORMS[name], experts)
    found, expected = matrices(loaded(written.save(tmp_path))), of_plain(written)
    assert found.keys() == expected.keys()
    exact = "nvfp4" not in name  # its scale of the tensor is multiplied in another order
    for key, matrix in expected.items():
        assert (found[key] - matrix).abs().max() <= (0 if exact else 1e-6 * matrix.abs().max())


def test_experts_whose_gate_and_up_have_orders_of_their_own_are_refused(tmp_path: Path):
    folder = write(FORMS["gptq order"], "qwen3_moe").save(tmp_path)
    with pytest.raises(CheckpointError, match="are not quantized alike"):
        loaded(folder)


@pytest.mark.parametrize("name", ["ct int4 order", "gptq order"])
def test_inputs_in_an_order_of_their_own(name: str, tmp_path: Path):
    written = write(FORMS[name])
    decoder = loaded(written.save(tmp_path))
    for index, layer in enumerate(decoder.layers):
        parts = [part.weight for part in layer.mixer.qkv.parts]
        assert all(part.order is not None for part in parts)
        for module, weight in zip("qkv", parts, strict=True):
            stored = written.plain[f"model.layers.{index}.self_attn.{module}_proj.weight"]
            assert torch.equal(weight.dequantized(), stored)


@pytest.mark.parametrize("name", ["gptq order", "ct int4 order"])
def test_one_order_for_all_merges_them(name: str, tmp_path: Path):
    """GPTQ orders inputs by their own statistics, which q, k and v share."""
    written = write(FORMS[name])
    first = "model.layers.0.self_attn."
    suffix = "g_idx" if "gptq" in name else "weight_g_idx"
    for module in ("k_proj", "v_proj"):
        of_q = written.tensors[f"{first}q_proj.{suffix}"]
        written.tensors[f"{first}{module}.{suffix}"] = of_q.clone()
    qkv = loaded(written.save(tmp_path)).layers[0].mixer.qkv
    assert qkv.weight.order is not None
    assert qkv.weight.shape == (256, 128)


@pytest.mark.parametrize(
    ("name", "experts"),
    [(name, "") for name in FORMS]
    + [(name, kind) for name in ("ct int4 32", "gptq", "awq", "ct nvfp4", "modelopt nvfp4", "ct mxfp4")
       for kind in ("qwen3_moe", "mixtral")],
)  # fmt: skip
def test_logits_equal_transformers_over_the_values(name: str, experts: str, tmp_path: Path):
    written = write(FORMS[name], experts)
    model = AutoModelForCausalLM.from_pretrained(
        written.save_plain(tmp_path / "plain"), attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    found = freight_logits(written.save(tmp_path / "packed"), IDS, "float32", "reference")
    assert (found - expected).abs().max() <= 1e-4


def test_values_are_rounded_to_the_dtype_of_the_rows_before_the_product(tmp_path: Path):
    """The definition of a product, in bfloat16, with bias, more rows than a tile, and NVFP4."""
    for name in ("ct nvfp4", "awq", "gptq order"):
        folder = write(FORMS[name]).save(tmp_path / name)
        layer = loaded(folder, dtype="bfloat16", activations="bfloat16").layers[0]
        weight = layer.mixer.o.weight
        x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
        bias = torch.randn(128, generator=torch.Generator().manual_seed(2)).bfloat16()
        values = weight.groups.decode(weight.data).bfloat16().double()
        taken = x.double() if weight.order is None else x.double()[:, weight.order]
        expected = taken @ values.t()
        if weight.scale is not None:
            expected = expected * weight.scale.double()
        expected += bias.double()
        result = REFERENCE.linear(x, weight, bias).double()
        assert torch.allclose(result, expected, rtol=2**-8, atol=1e-4)
        alone = REFERENCE.linear(x[7:8], weight, bias).double()
        assert torch.equal(alone[0], result[7])


@pytest.mark.parametrize("name", IN_ORDER)
def test_it_is_described_and_takes_the_bytes_that_are_counted(name: str, tmp_path: Path):
    form = FORMS[name]
    written = write(form)
    folder = written.save(tmp_path)
    said = describe(str(folder))
    assert said["runs"] == "natively"
    assert said["scheme"]["four_bit_weights"] == {f"{form.words}, activations plain": 14}
    assert said["scheme"]["fp8_weights"] == {}
    biases = sum(one.numel() for key, one in written.tensors.items() if key.endswith(".bias"))
    assert said["num_parameters"] - biases == sum(one.numel() for one in written.plain.values())
    for kernels in ("reference", "auto"):
        args = EngineArgs(str(folder), kernels=kernels, device="cpu", skip_tokenizer_init=True)
        model = open_model(args)
        require_equal(model, kernels, model.scheme.linear)


@pytest.mark.parametrize("name", ["gptq order", "ct int4 order"])
def test_orders_are_counted(name: str, tmp_path: Path):
    """One for projections that share their input, as GPTQ makes them."""
    written = write(FORMS[name])
    suffix = "g_idx" if "gptq" in name else "weight_g_idx"
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for first, *others in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            for other in others:
                order = written.tensors[f"{prefix}{first}.{suffix}"].clone()
                written.tensors[f"{prefix}{other}.{suffix}"] = order
    folder = written.save(tmp_path)
    for kernels in ("reference", "auto"):
        args = EngineArgs(str(folder), kernels=kernels, device="cpu", skip_tokenizer_init=True)
        model = open_model(args)
        require_equal(model, kernels, model.scheme.linear)


@pytest.mark.parametrize(("name", "added"), [("gptq zeros", 1), ("gptq v2", 0)])
def test_zero_points_of_gptq_from_0_to_15(name: str, added: int, tmp_path: Path):
    """In `gptq` one of 0 borrows from the next one, which is not read as one less."""
    written = write(FORMS[name])
    draw = torch.Generator().manual_seed(4)
    zeros = torch.randint(0, 16, written.tensors[f"{DOWN}.scales"].shape, generator=draw)
    zeros[:, ::3] = 0
    written.tensors[f"{DOWN}.qzeros"] = words(zeros) - added * 0x11111111
    found = loaded(written.save(tmp_path)).layers[1].mlp.down.weight.groups.zeros
    assert torch.equal(found, zeros.t().to(torch.uint8))


@pytest.mark.parametrize(
    ("name", "added", "place", "warns"),
    [
        ("gptq zeros", 1, 0, True),
        ("gptq zeros", 1, 6, True),
        ("gptq zeros", 1, 7, False),  # nothing is left in the int32 to borrow from
        ("gptq zeros", 1, None, False),
        ("gptq v2", 0, 0, False),  # stored as they are
    ],
)
def test_a_line_names_zero_points_that_tools_read_differently(
    name: str,
    added: int,
    place: int | None,
    warns: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """AutoGPTQ packs each zero point minus 1 alone, GPTQModel takes 1 from each of eight at once."""
    written = write(FORMS[name])
    for tensor, stored in written.tensors.items():
        if tensor.endswith(".qzeros"):
            zeros = torch.full((stored.shape[0], 8 * stored.shape[1]), 7)
            if place is not None and tensor == f"{DOWN}.qzeros":
                zeros[0, place] = 0
            written.tensors[tensor] = words(zeros) - added * 0x11111111
    with caplog.at_level(logging.WARNING, "freight"):
        loaded(written.save(tmp_path))
    said = [line for line in caplog.messages if "qzeros" in line]
    assert len(said) == warns
    assert all(f"{DOWN}.qzeros" in line and "gptq_v2" in line for line in said)


@pytest.mark.parametrize(
    ("name", "scales"),
    [("ct int4 32", "weight_scale"), ("gptq", "scales"), ("awq", "scales")],
)
def test_scales_of_integers_may_be_negative(name: str, scales: str, tmp_path: Path):
    """As AutoRound writes those of about half of the groups."""
    written = write(FORMS[name])
    written.tensors[f"{DOWN}.{scales}"] *= -1
    found = loaded(written.save(tmp_path)).layers[1].mlp.down.weight
    assert torch.equal(found.dequantized(), -written.plain[f"{DOWN}.weight"])


@pytest.mark.parametrize(
    ("said", "pack"),
    [
        (GPTQ | {"sym": False, "group_size": 192}, lambda coded: gptq(coded, 1)),
        (AWQ | {"group_size": 192}, awq),
        (int4(192, symmetric=False), lambda coded: packed(coded, zeros=True)),
    ],
    ids=["gptq", "awq", "ct"],
)
def test_groups_that_are_held_as_several_keep_their_scales_and_zero_points(
    said: dict[str, Any], pack: Callable[[Coded], Tensors], tmp_path: Path
):
    """Two groups of 192 inputs become six of 64, which kernels have."""
    draw = torch.Generator().manual_seed(6)
    coded = integers(torch.randn(16, 384, generator=draw), 192, False, draw)
    tensors = {f"layers.0.x.{name}": tensor.contiguous() for name, tensor in pack(coded).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    checkpoint, name = Checkpoint(tmp_path), "layers.0.x.weight"
    found = find_four_bits(checkpoint, read_scheme(checkpoint.config, None), {name: (16, 384)})
    stored = found[name]
    assert isinstance(stored, StoredGroups)
    weight = stored.read(checkpoint, "cpu")
    assert weight.groups is not None
    assert weight.groups.size == 64
    assert torch.equal(weight.dequantized(), coded.values)


def test_awq_without_zero_points_has_them(tmp_path: Path):
    """AutoRound writes zero_point false for symmetric integers, and zero points of 8."""
    written = write(FORMS["awq"])
    written.config["quantization_config"] = AWQ | {"zero_point": False, "sym": True}
    found = loaded(written.save(tmp_path)).layers[1].mlp.down.weight
    assert torch.equal(found.dequantized(), written.plain[f"{DOWN}.weight"])


def test_a_head_in_4_bits_is_used_where_config_says_that_it_is_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """llm-compressor quantizes one that `ignore` does not list. Its tensors decide, with a line."""
    form = FORMS["ct int4 64 zeros"]
    written = write(form)
    plain = written.tensors.pop("lm_head.weight").float()
    stored, dequantized = form.linear(plain, torch.Generator())
    written.tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()}
    written.config |= {"tie_word_embeddings": True}
    written.config["quantization_config"] = written.config["quantization_config"] | {"ignore": []}
    decoder = loaded(written.save(tmp_path))
    assert torch.equal(decoder.embedding.weight, written.tensors["model.embed_tokens.weight"])
    assert torch.equal(decoder.head.weight.dequantized(), dequantized)
    assert [r.getMessage().count("tie_word_embeddings") for r in caplog.records].count(1) == 1


def test_dynamic_is_another_name_of_an_order_by_group(tmp_path: Path):
    written = write(FORMS["ct int4 order"])
    written.config["quantization_config"] = int4(32, actorder="dynamic")
    found = loaded(written.save(tmp_path)).layers[1].mlp.down.weight
    assert found.order is not None
    assert torch.equal(found.dequantized(), written.plain[f"{DOWN}.weight"])


def test_a_router_in_4_bits_has_the_values_in_float32(tmp_path: Path):
    """llm-compressor quantizes one that `ignore` does not list."""
    written = write(FORMS["ct int4 32"], "qwen3_moe")
    written.config["quantization_config"] = int4(32) | {"ignore": ["lm_head"]}
    router = "model.layers.1.mlp.gate"
    for layer in range(2):
        module = f"model.layers.{layer}.mlp.gate"
        plain = written.tensors.pop(f"{module}.weight").float()
        stored, written.plain[f"{module}.weight"] = FORMS["ct int4 32"].linear(
            plain, torch.Generator()
        )
        written.tensors |= {f"{module}.{suffix}": one for suffix, one in stored.items()}
    found = loaded(written.save(tmp_path)).layers[1].mlp.router.matrix
    assert torch.equal(found.data, written.plain[f"{router}.weight"])


def test_activations_in_4_bits_are_said_to_stay_in_16(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for name in ("ct nvfp4", "modelopt nvfp4"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "freight"):
            loaded(write(FORMS[name]).save(tmp_path / name))
        line_naming(caplog.text, "14 tensors are not used", "inputs in 4 bits", "16 bits")
        assert any(
            line.startswith("weights in NVFP4, scales per 16 inputs") for line in caplog.messages
        )


@pytest.mark.parametrize("name", ["ct int4 64 zeros", "gptq zeros", "awq", "ct nvfp4", "ct mxfp4"])
def test_ranks_have_output_rows(name: str, tmp_path: Path):
    """Two ranks, one after the other: their rows are those of the whole matrix."""
    written = write(FORMS[name])
    whole = of_plain(written)
    for rank in range(2):
        model = opened(written.save(tmp_path))
        config = model.resolve(model.args)
        share = share_of(model.model, rank, 2)
        formats = config.compute_format, config.weight_format
        decoder = load_model(
            model.checkpoint, model.model, REFERENCE, *formats, 128, "cpu", model.scheme, share
        )
        heads = [slice(64 * rank, 64 * rank + 64), slice(128 + 32 * rank, 160 + 32 * rank)]
        heads.append(slice(192 + 32 * rank, 224 + 32 * rank))
        for index, layer in enumerate(decoder.layers):
            qkv, down = layer.mixer.qkv.weight, layer.mlp.down.linear.weight
            expected = torch.cat([whole[f"{index}.qkv"][rows] for rows in heads])
            assert torch.allclose(qkv.dequantized(), expected, rtol=1e-6, atol=0)
            expected = whole[f"{index}.down.0"][64 * rank : 64 * rank + 64]
            assert torch.allclose(down.dequantized(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["ct int4 order", "gptq order"])
def test_rows_of_a_rank_have_the_order_of_all(name: str, tmp_path: Path):
    written = write(FORMS[name])
    model = opened(written.save(tmp_path))
    assert model.checkpoint is not None
    found = find_four_bits(model.checkpoint, model.scheme, tensor_shapes(model.model))
    part = found[f"{DOWN}.weight"].of_rows([slice(96, 128), slice(0, 8)])
    assert isinstance(part, StoredGroups)
    expected = written.plain[f"{DOWN}.weight"][[*range(96, 128), *range(8)]]
    assert torch.equal(part.read(model.checkpoint, "cpu").dequantized(), expected)


def test_kernels_without_groups_refuse_them_and_convert_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ReferenceKernels, "packs_groups", False)
    with refuses(ConfigError, "self_attn.q_proj", "4 bits", "INT4", "reference", "FP8", "16 bits"):
        loaded(write(FORMS["gptq"]).save(tmp_path / "gptq"))
    loaded(write(FORMS["ct mxfp4"]).save(tmp_path / "mxfp4"))


def test_mxfp4_that_e4m3_does_not_have_is_in_16_bits_together(tmp_path: Path):
    """One matrix of one expert spans more than E4M3 does; all experts of its layer are in 16 bits."""
    written = write(FORMS["ct mxfp4"], "qwen3_moe")
    name = "model.layers.0.mlp.experts.2.up_proj.weight_scale"
    written.tensors[name][3, 0] = 100
    decoder = loaded(written.save(tmp_path), dtype="bfloat16")
    first, second = (layer.mlp.experts.gate_up.matrices for layer in decoder.layers)
    assert {one.data.dtype for one in first} == {torch.bfloat16}
    assert {one.data.dtype for one in second} == {torch.float8_e4m3fn}


def test_mxfp4_that_kernels_take_stays_and_is_merged(tmp_path: Path):
    written = write(FORMS["ct mxfp4"])
    model = opened(written.save(tmp_path))
    assert model.checkpoint is not None
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    found = find_four_bits(model.checkpoint, model.scheme, tensor_shapes(model.model))
    source = CheckpointSource(
        model.checkpoint, Format.BFLOAT16, Format.E4M3FN, "cpu", found, keeps_mxfp4=True
    )
    parts = [source.weight(name, (256, 128)) for name in names]
    assert all(part.is_mxfp4 for part in parts)
    assert Weight.mergeable(parts)
    merged = Weight.concat(parts)
    assert merged.shape == (512, 128)
    plain = torch.cat([written.plain[name] for name in names])
    assert torch.equal(merged.dequantized(), plain)
    rows = torch.tensor([3, 0, 500])
    assert torch.equal(merged.reordered(rows, "x").dequantized(), plain[rows])


Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[Tensors, dict[str, Any]], object]


def without(name: str) -> Change:
    return lambda tensors, said: tensors.pop(name)


def filled(name: str, value: float, at: Any = 0) -> Change:
    def change(tensors: Tensors, said: dict[str, Any]) -> None:
        changed = tensors[name].clone()
        if changed.itemsize == 1:
            changed.view(torch.uint8)[at] = int(value)
        else:
            changed[at] = value
        tensors[name] = changed

    return change


def cut(name: str) -> Change:
    return lambda tensors, said: tensors.update({name: tensors[name][:-1].clone()})


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors, said: tensors.update({name: tensors[name].to(dtype)})


def scales_in_bfloat16(first: float) -> Change:
    def change(tensors: Tensors, said: dict[str, Any]) -> None:
        scales = tensors[f"{Q}.weight_scale"].bfloat16()
        scales[0, 0] = first
        tensors[f"{Q}.weight_scale"] = scales

    return change


def says(**more: Any) -> Change:
    return lambda tensors, said: said.update(more)


def undeclared(tensors: Tensors, said: dict[str, Any]) -> None:
    said.clear()


def unpacked(tensors: Tensors, said: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith(DOWN)]:
        del tensors[name]
    tensors[f"{DOWN}.weight"] = torch.ones(128, 256).half()


def in_fp8(tensors: Tensors, said: dict[str, Any]) -> None:
    unpacked(tensors, said)
    tensors[f"{DOWN}.weight"] = torch.ones(128, 256).to(torch.float8_e4m3fn)


WRONG: list[tuple[str, Change, str]] = [
    ("ct int4 32", without(f"{Q}.weight_packed"), f"{Q}.weight_packed is missing: compressed-tensors"),
    ("ct int4 32", without(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing: config.json declares"),
    ("ct int4 64 zeros", without(f"{Q}.weight_zero_point"), f"{Q}.weight_zero_point is missing"),
    (
        "ct int4 32",
        lambda tensors, said: tensors.update({f"{Q}.weight_zero_point": torch.ones(16, 4).int()}),
        f"{Q}.weight_zero_point is not zero: of weights in 8 bits only",
    ),
    ("ct int4 32", cut(f"{Q}.weight_scale"), f"{Q}.weight_scale is F16 of shape [127, 4]"),
    ("ct int4 32", cut(f"{Q}.weight_packed"), f"{Q}.weight_packed is I32 of shape [127, 16]"),
    ("ct int4 32", cast(f"{Q}.weight_packed", torch.int64), f"{Q}.weight_packed is I64 of shape"),
    ("ct int4 32", filled(f"{Q}.weight_scale", torch.nan), f"{Q}.weight_scale has nan among its"),
    ("ct int4 32", filled(f"{Q}.weight_scale", -torch.inf), f"{Q}.weight_scale has -inf among its"),
    ("ct int4 32", filled(f"{Q}.weight_scale", torch.inf), f"{Q}.weight_scale has inf among its"),
    *(
        (
            "ct int4 32",
            scales_in_bfloat16(value),
            f"{Q}.weight_scale has {value:.3g} among its 512 values; a scale has to be 0, or 2 ** -126",
        )
        for value in (2.0**-127, -(2.0**101))
    ),
    ("ct int4 32", cut(f"{Q}.weight_shape"), f"{Q}.weight_shape is I64 of shape [1]"),
    ("ct int4 32", unpacked, f"{DOWN}.weight is stored in float16, but config.json declares it"),
    ("ct int4 32", in_fp8, f"{DOWN}.weight is stored in fp8_e4m3fn, but config.json declares INT4"),
    (
        "ct int4 32",
        says(ignore=["lm_head", "re:.*down_proj"]),
        "down_proj.weight_packed holds weights in 4 bits, but config.json declares model.layers.0.mlp.down_proj to be "
        "not quantized",
    ),
    ("ct int4 32", says(**GPTQ, format="gptq"), f"{Q}.weight_packed is there where gptq has {Q}.qweight"),
    (
        "ct int4 32",
        lambda tensors, said: tensors.update(
            {f"{Q}.weight_scale": tensors[f"{Q}.weight_scale"].float() * 1.0001}
        ),
        f"{Q}.weight_scale is in float32 and has values that neither bfloat16 nor float16 has",
    ),
    ("gptq", undeclared, f"{Q}.qweight holds weights in 4 bits, but config.json declares no quant"),
    ("ct int4 order", without(f"{Q}.weight_shape"), ""),  # nothing needs it
    ("ct int4 order", filled(f"{Q}.weight_g_idx", 3, slice(0, 9)), "does not put 32 of the 128 inputs"),
    ("gptq", without(f"{Q}.qzeros"), f"{Q}.qzeros is missing"),
    ("gptq", cut(f"{Q}.qzeros"), f"{Q}.qzeros is I32 of shape [3, 16]"),
    ("gptq", filled(f"{Q}.qzeros", 0), f"{Q}.qzeros has the zero point 1, but config.json says sym true"),
    ("gptq", says(checkpoint_format="gptq_v2"), f"{Q}.qzeros has the zero point 7, but config.json"),
    *(
        ("gptq order", filled(f"{Q}.g_idx", value, 5), f"{Q}.g_idx has the group {value} among its 128")
        for value in (4, -1, 2**31 - 1)
    ),
    ("gptq order", filled(f"{Q}.g_idx", -1, slice(None)), f"{Q}.g_idx has the group -1 among its 128"),
    ("ct int4 order", filled(f"{Q}.weight_g_idx", -1, slice(None)), ""),
    ("gptq order", without(f"{Q}.g_idx"), f"{Q}.g_idx is missing, the group of each input: config.json"),
    ("gptq", filled(f"{Q}.g_idx", 3, slice(0, 32)), f"{Q}.g_idx does not put 32 of the 128 inputs"),
    ("gptq order", says(desc_act=False), "order of their own, but config.json says desc_act false"),
    ("gptq", filled(f"{Q}.bias", 1.0), f"{Q}.bias is not zero, and config.json"),
    ("gptq", says(group_size=128), f"{Q}.qzeros is I32 of shape [4, 16]"),
    ("gptq", says(group_size=24), f"{Q} has 128 inputs in groups of 24, which is not implemented"),
    ("gptq", says(group_size=8), f"{Q} has 128 inputs in groups of 8, which is not implemented"),
    ("awq", filled(f"{DOWN}.scales", torch.nan), f"{DOWN}.scales has nan among its 1024 values"),
    ("awq", cut(f"{DOWN}.qweight"), f"{DOWN}.qweight is I32 of shape [255, 16]"),
    ("ct nvfp4", filled(f"{Q}.weight_global_scale", 0.0), f"{Q}.weight_global_scale has 0.0"),
    ("ct nvfp4", filled(f"{Q}.weight_global_scale", 1e-40), f"{Q}.weight_global_scale is 1e-40, by which"),
    ("ct nvfp4", without(f"{Q}.weight_global_scale"), f"{Q}.weight_global_scale is missing"),
    ("ct nvfp4", filled(f"{Q}.weight_scale", 0x7F, (0, 0)), f"{Q}.weight_scale has nan among its"),
    ("ct nvfp4", filled(f"{Q}.weight_scale", 0x81, (0, 0)), f"{Q}.weight_scale has -0.001953125 among"),
    ("ct nvfp4", cast(f"{Q}.weight_scale", torch.float32), f"{Q}.weight_scale is F32 of shape"),
    ("modelopt nvfp4", without(f"{Q}.weight_scale_2"), f"{Q}.weight_scale_2 is missing"),
    ("modelopt nvfp4", filled(f"{Q}.weight_scale_2", torch.nan, ()), f"{Q}.weight_scale_2 has nan"),
    ("modelopt nvfp4", cut(f"{Q}.weight"), f"{Q}.weight is U8 of shape [127, 64]"),
    ("ct mxfp4", filled(f"{Q}.weight_scale", 255, (1, 1)), f"{Q} has values that are not finite"),
    ("ct mxfp4", without(f"{Q}.weight_scale"), f"{Q}.weight_scale is missing"),
    ("ct mxfp4", cut(f"{Q}.weight_packed"), f"{Q}.weight_packed is U8 of shape [127, 64]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_what_is_wrong_is_named(
    name: str, change: Change, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written = write(FORMS[name])
    said = dict(written.config["quantization_config"])
    change(written.tensors, said)
    written.config["quantization_config"] = said

    def read(self: object, *given: object) -> Weight:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(CheckpointSource, "weight", read)
    monkeypatch.setattr(CheckpointSource, "tensor", read)
    with pytest.raises((CheckpointError, AssertionError)) as error:
        loaded(written.save(tmp_path))
    assert message in str(error.value)
    assert isinstance(error.value, CheckpointError) == bool(message)


# As AutoRound 0.16 writes MXFP8 and FP8_STATIC
AUTO_ROUND_FLOAT = AUTO_ROUND | {
    "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "bits": 8, "act_bits": 8,
    "act_data_type": "mx_fp", "act_dynamic": True, "act_group_size": 32,
}  # fmt: skip
AUTO_ROUND_FP8 = AUTO_ROUND | {
    "packing_format": "auto_round:fp8_static", "data_type": "fp", "bits": 8, "group_size": -1, "act_bits": 8,
    "act_data_type": "fp", "act_dynamic": False, "act_group_size": 0, "activation_scheme": "static", "fmt": "e4m3",
}  # fmt: skip
# As transformers writes them
BITS_AND_BYTES = {
    "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_threshold": 6.0, "load_in_4bit": False, "load_in_8bit": False,
}  # fmt: skip
HQQ = {
    "quant_method": "hqq",
    "quant_config": {
        "weight_quant_params": {"nbits": 4, "channel_wise": True, "group_size": 64, "optimize": True, "axis": 1},
        "scale_quant_params": None,
        "zero_quant_params": None,
        "offload_meta": False,
    },
    "skip_modules": ["lm_head"],
}  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    (GPTQ | {"bits": 8}, "gptq with bits 8 is not implemented; 4 is"),
    (GPTQ | {"bits": 3}, "gptq with bits 3"),
    (GPTQ | {"bits": 2}, "gptq with bits 2"),
    (GPTQ | {"bits": True}, "gptq with bits True"),
    (GPTQ | {"group_size": 0}, "gptq with group_size 0 is not a number of inputs"),
    (GPTQ | {"rotation": "random"}, "gptq with rotation 'random' is not implemented: inputs of down_proj"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not implemented"),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq with dynamic['+:.*down.*']"),
    (AWQ | {"version": "gemv"}, "awq with version 'gemv' is not implemented; gemm is"),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "checkpoint_format": "gemv_fast"},
        "awq with version 'gemv_fast' is not implemented",
    ),
    (AWQ | {"bits": 8}, "awq with bits 8"),
    (AWQ | {"rotation": "hadamard"}, "awq with rotation 'hadamard' is not implemented"),
    (int4(32, strategy="tensor"), "weights of 4 bits with strategy 'tensor' are not implemented"),
    (int4(32, dynamic=True), "weights with dynamic True are not implemented"),
    (int4(None, strategy="group"), "group_size = None is not a number of inputs"),
    (int4(32, type="nf4"), "num_bits 4, type 'nf4' are not implemented"),
    (int4(32) | {"format": "marlin-24"}, "in format 'marlin-24' are not implemented"),
    (
        ct(int4(32)["config_groups"]["group_0"]["weights"], "pack-quantized", {"num_bits": 8, "type": "nf"}),
        "weights of 4 bits and input_activations of type 'nf'",
    ),
    (
        ct({"num_bits": 4, "type": "float", "group_size": 64}, "nvfp4-pack-quantized"),
        "type 'float' in groups of 64 are not implemented; 16 (NVFP4) and 32 (MXFP4) are",
    ),
    (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ' is not implemented"),
    (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not implemented"),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq with dynamic['+:.*down.*'] = {'bits': 8}"),
    (AUTO_ROUND | {"packing_format": "auto_round:fp8"}, "packing_format 'auto_round:fp8' is not implemented"),
    (AUTO_ROUND | {"packing_format": "auto_round:mlx"}, "packing_format 'auto_round:mlx' is not implemented"),
    (
        AUTO_ROUND | {"packing_format": "auto_round:llm_compressor_nvfp4_e5m3", "data_type": "nvfp4_v2"},
        "packing_format 'auto_round:llm_compressor_nvfp4_e5m3'",
    ),
    (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 8}}}, "auto-round with bits 8 of 'lm_head', and 4 of all"),
    (AUTO_ROUND | {"extra_config": {"a": {"group_size": 64}}}, "auto-round with group_size 64 of 'a', and 32 of all"),
    (AUTO_ROUND | {"bits": 2}, "auto-round with bits 2, data_type 'int' and packing_format 'auto_gptq'"),
    (AUTO_ROUND | {"bits": 3}, "auto-round with bits 3"),
    (AUTO_ROUND | {"bits": 8}, "auto-round with bits 8"),
    (AUTO_ROUND | {"bits": True}, "auto-round with bits True"),
    (AUTO_ROUND | {"rotation_config": {"type": "hadamard"}}, "auto-round with rotation_config {'type': 'hadamard'}"),
    (AUTO_ROUND_FLOAT | {"bits": 6}, "auto-round with data_type 'mx_fp', bits 6, group_size 32"),
    (AUTO_ROUND_FLOAT | {"data_type": "mx_int"}, "auto-round with data_type 'mx_int', bits 8"),
    (AUTO_ROUND_FLOAT | {"group_size": [32]}, "group_size [32] is not implemented"),
    (AUTO_ROUND_FP8 | {"act_dynamic": True}, "auto-round with data_type 'fp', bits 8, act_bits 8"),
    (AUTO_ROUND_FP8 | {"group_size": [128, 128]}, "group_size [128, 128] is not implemented"),
    (AUTO_ROUND_FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
    ({"quant_method": "gguf"}, "quantization method 'gguf' is not implemented"),
    ({"quant_method": "quanto"}, "quantization method 'quanto' is not implemented"),
    (BITS_AND_BYTES | {"load_in_8bit": True}, "bitsandbytes with load_in_8bit, llm_int8_threshold 6.0"),
    (
        BITS_AND_BYTES | {"load_in_4bit": True},
        "bitsandbytes with load_in_4bit, bnb_4bit_quant_type 'nf4' and bnb_4bit_use_double_quant True",
    ),
    ({"quant_method": "bitsandbytes"}, "bnb_4bit_quant_type 'fp4' and bnb_4bit_use_double_quant False"),
    (HQQ, "hqq with nbits 4, group_size 64 and axis 1 is not implemented"),
    (
        {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": HQQ["quant_config"]}},
        "hqq with nbits 4, group_size 64 and axis 1",
    ),
    ({"quant_method": "hqq"}, "hqq with nbits None"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "message"), REFUSED)
def test_what_is_not_implemented_is_refused_by_its_declaration(said: dict[str, Any], message: str):
    with pytest.raises(CheckpointError) as error:
        read_scheme({"model_type": "llama", "quantization_config": said}, None)
    assert message in str(error.value)


@pytest.mark.parametrize("said", [HQQ, BITS_AND_BYTES])
def test_files_that_no_kernel_has_the_form_of_name_a_way_out(said: dict[str, Any]):
    with refuses(CheckpointError, str(said["quant_method"]), "--quantization int4", "GGUF"):
        read_scheme({"model_type": "llama", "quantization_config": said}, None)


@pytest.mark.parametrize(("group", "scales"), [(-1, "row"), (0, "tensor")])
def test_auto_round_in_static_fp8(group: int, scales: str):
    said = AUTO_ROUND_FP8 | {"group_size": group}
    scheme = read_scheme({"quantization_config": said}, None)
    assert scheme.description == (
        f"auto-round: weights fp8_e4m3fn, scales per {scales}, activations static"
    )


@pytest.mark.parametrize(
    ("dtype", "format", "named"),
    [("fp8", Format.E4M3FN, ""), ("nvfp4", None, "static_kv_dtype 'nvfp4'")],
)
def test_auto_round_declares_a_cache(dtype: str, format: Format | None, named: str):
    scheme = read_scheme({"quantization_config": AUTO_ROUND | {"static_kv_dtype": dtype}}, None)
    assert (scheme.kv_format, scheme.kv_refused) == (format, named)


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel"])
def test_auto_round_stores_zero_points_as_they_are_in_its_own_packing(packing: str):
    said = AUTO_ROUND | {"packing_format": packing, "sym": False}
    scheme = read_scheme({"quantization_config": said}, None)
    assert scheme.four_bits == {Packing.GPTQ_V2}


def test_modules_are_left_out_as_each_format_says(tmp_path: Path):
    """GPTQModel's `dynamic`, AutoAWQ's parts of names; both leave modules without saying so."""
    for name, more in (
        ("gptq", {"dynamic": {r"-:.*\.1\.mlp\.down.*": {}}}),
        ("awq", {"modules_to_not_convert": ["layers.1.mlp.down"]}),
        ("gptq", {}),
        ("awq", {}),
    ):
        written = write(FORMS[name])
        unpacked(written.tensors, {})
        written.config["quantization_config"] = FORMS[name].said | more
        decoder = loaded(written.save(tmp_path))
        assert decoder.layers[1].mlp.down.weight.groups is None
        assert decoder.layers[1].mlp.down.weight.data.dtype == torch.float16
        assert decoder.layers[0].mlp.down.weight.groups is not None
        model = opened(tmp_path)
        left = model.scheme.linear("model.layers.1.mlp.down_proj")
        assert (left is None) == bool(more)


def test_settings_of_modules_that_are_those_of_all() -> None:
    """The declaration of Qwen3.5's GPTQ checkpoints: a head and an embedding without settings of their own."""
    dynamic = {
        "lm_head": {},
        "model.language_model.embed_tokens": {},
        "-:.*attn.*": {},
        "-:.*shared_expert.*": {},
        "-:.*mtp.*": {},
        "-:.*visual.*": {},
        "+:.*down.*": {"bits": 4, "group_size": 32},
    }
    scheme = read_scheme({"quantization_config": GPTQ | {"dynamic": dynamic}}, None)
    layer = "model.language_model.layers.0"
    assert scheme.linear(f"{layer}.self_attn.q_proj") is None
    assert scheme.linear(f"{layer}.mlp.shared_expert.up_proj") is None
    for name in ("mlp.experts.0.up_proj", "mlp.experts.0.down_proj"):
        assert scheme.linear(f"{layer}.{name}").bits == 4


def test_a_form_of_its_own_per_module(tmp_path: Path):
    """ModelOpt's MIXED_PRECISION: NVFP4 in the feed-forward, FP8 in attention."""
    written = write(FORMS["modelopt nvfp4"])
    layers = {}
    for name in written.quantized:
        if "self_attn" in name:
            for suffix in ("weight_scale_2", "weight_scale", "weight"):
                del written.tensors[f"{name}.{suffix}"]
            plain = written.plain[f"{name}.weight"]
            scale = plain.abs().amax() / 448
            written.tensors[f"{name}.weight"] = (plain / scale).to(torch.float8_e4m3fn)
            written.tensors[f"{name}.weight_scale"] = scale
        layers[name] = {"quant_algo": "FP8" if "self_attn" in name else "NVFP4"}
    own = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "quant_method": "modelopt"}
    written.config["quantization_config"] = own
    model = opened(written.save(tmp_path))
    assert model.scheme.weight_formats == "fp8_e4m3fn and nvfp4"
    decoder = loaded(tmp_path)
    assert decoder.layers[0].mixer.o.weight.data.dtype == torch.float8_e4m3fn
    assert decoder.layers[0].mlp.down.weight.groups is not None
    require_equal(model, "reference", model.scheme.linear)
