"""What is wrong with an FP8 checkpoint is named before a weight is read: tensor, value, and the way
out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.formats.forms import (
    AO_DYNAMIC,
    ARGS,
    FORMS,
    PER_ROW,
    STATIC,
    TOKEN,
    ao,
    arguments,
    groups,
    quark,
)
from tests.formats.writers import Form, Written, write
from tests.refusals import refuses

from freight import LLM
from freight.checkpoint.reader import Checkpoint
from freight.cli.inspect import describe
from freight.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def said(made: Written) -> dict:
    return made.config["quantization_config"]


def fill(name: str, value: float) -> Callable[[Written], object]:
    return lambda made: made.tensors[name].fill_(value)


def put(name: str, tensor: torch.Tensor) -> Callable[[Written], object]:
    return lambda made: made.tensors.update({name: tensor})


def drop(name: str) -> Callable[[Written], object]:
    return lambda made: made.tensors.pop(name)


def declare(**more: object) -> Callable[[Written], object]:
    return lambda made: said(made).update(more)


CASES = [
    (
        "autofp8 dynamic",
        put(f"{Q}.pre_quant_scale", torch.ones(192)),
        ("1 tensors belong to no part", "pre_quant_scale"),
    ),
    (
        "autofp8 static",
        fill(f"{Q}.weight_scale", 0.0),
        (f"{Q}.weight_scale has 0.0", "fp16 models", "Quantize"),
    ),
    ("autofp8 static", fill(f"{Q}.weight_scale", -1.0), (f"{Q}.weight_scale has -1.0",)),
    ("autofp8 static", fill(f"{Q}.weight_scale", float("nan")), (f"{Q}.weight_scale has nan",)),
    ("autofp8 static", fill(f"{DOWN}.input_scale", float("inf")), (f"{DOWN}.input_scale has inf",)),
    (
        "ct channel token",
        lambda made: made.tensors[f"{Q}.weight_scale"][7].zero_(),
        ("has 0.0 among its 192 values",),
    ),
    (
        "deepseek ue8m0 as bytes",
        fill(f"{Q}.weight_scale_inv", 255),
        (f"{Q}.weight_scale_inv has inf",),
    ),
    (
        "autofp8 static",
        drop(f"{Q}.weight_scale"),
        (f"{Q}.weight is stored in FP8", f"{Q}.weight_scale is missing"),
    ),
    (
        "deepseek",
        drop(f"{Q}.weight_scale_inv"),
        (f"{Q}.weight is stored in FP8", f"{Q}.weight_scale_inv is missing"),
    ),
    (
        "autofp8 static",
        drop(f"{DOWN}.input_scale"),
        ("declared static", f"{DOWN}.input_scale is missing"),
    ),
    ("autofp8 static", drop(f"{DOWN}.weight"), (f"{DOWN}.weight is missing",)),
    (
        "autofp8 static",
        put(f"{Q}.weight_scale", torch.ones(192)),
        ("has shape [192]", "[192, 192], one number"),
    ),
    (
        "autofp8 static",
        put(f"{Q}.input_scale", torch.ones(192)),
        (f"{Q}.input_scale has shape [192]", "one number"),
    ),
    (
        "ct channel token",
        put(f"{Q}.weight_scale", torch.ones(1)),
        ("has shape [1]", "[192] or [192, 1] is expected"),
    ),
    (
        "deepseek",
        put(f"{Q}.weight_scale_inv", torch.ones(1, 2)),
        ("has shape [1, 2]", "[2, 2] is expected"),
    ),
    ("deepseek", declare(weight_block_size=[64, 64]), ("has shape [2, 2]", "[3, 3] is expected")),
    (
        "deepseek",
        declare(weight_block_size=[128]),
        ("weight_block_size = [128]", "[rows, columns]"),
    ),
    (
        "autofp8 static",
        put(f"{Q}.weight", torch.zeros(96, 192).to(torch.float8_e4m3fn)),
        ("[96, 192]", "[192, 192]"),
    ),
    (
        "autofp8 static",
        put(f"{Q}.weight", torch.zeros(192, 192).to(torch.float8_e5m2)),
        (Q, "fp8_e5m2", "E4M3"),
    ),
    (
        "autofp8 static",
        put(f"{Q}.weight", torch.zeros(192, 192, dtype=torch.int8)),
        (Q, "stored in int8", "declares FP8"),
    ),
    (
        "autofp8 static",
        put(f"{Q}.weight_scale", torch.ones(1).to(torch.float8_e4m3fn)),
        (Q, "F8_E4M3"),
    ),
    (
        "autofp8 static",
        put(f"{Q}.weight_scale_inv", torch.ones(1)),
        ("weight_scale", "weight_scale_inv", "twice"),
    ),
    (
        "autofp8 dynamic",
        put(f"{Q}.input_scale", torch.ones(1)),
        (f"there is {Q}.input_scale", "activations dynamic"),
    ),
    (
        "autofp8 static",
        put(f"{Q}.weight", torch.zeros(192, 192)),
        (f"{Q}.weight is stored in float32", "declares it quantized", f"list {Q} as ignored"),
    ),
    (
        "torchao row",
        put(f"{Q}.weight", torch.zeros(192, 192)),
        (f"{Q}._weight_scale", "weights compressed"),
    ),
    (
        "autofp8 static",
        declare(ignored_layers=["lm_head", Q]),
        (f"lists {Q} as not quantized", "remove it from"),
    ),
    (
        "ct of 2024",
        put(f"{Q}.weight_zero_point", torch.ones(1)),
        ("weight_zero_point is not zero",),
    ),
    (
        "autofp8 static",
        lambda made: made.config.pop("quantization_config"),
        ("stored in fp8_e4m3fn", "declares no"),
    ),
    (
        "ct block",
        declare(config_groups={}),
        ("stored in fp8_e4m3fn", "declares no quantization of weights"),
    ),
    (
        "ct block",
        declare(**groups(arguments("group", group_size=64), None)),
        ("has shape [2, 2]", "[192, 3] is expected"),
    ),
    (
        "ct tensor static",
        declare(quantization_status="compressed", ignore=["re:["]),
        ("config.json: '['", "regular expression"),
    ),
    ("ct tensor static", declare(ignore="lm_head"), ("ignore = 'lm_head'", "list of module names")),
    (
        "ct tensor static",
        declare(**groups(ARGS | {"num_bits": 4}, None)),
        ("config_groups['group_0'] weights", "num_bits 4"),
    ),
    (
        "ct tensor static",
        declare(**groups(ARGS, ARGS | {"type": "int"})),
        ("input_activations", "type 'int'"),
    ),
    (
        "ct tensor static",
        declare(**groups(arguments("channel"), arguments("channel"))),
        ("strategy 'channel'", "static"),
    ),
    (
        "ct tensor static",
        declare(**groups(ARGS, arguments("group", True))),
        ("input_activations of group", "blocks"),
    ),
    (
        "quark",
        declare(
            global_quant_config={
                "weight": STATIC,
                "input_tensors": {**TOKEN, "qscheme": "per_group"},
            }
        ),
        ("input_tensors of per_group", "blocks"),
    ),
    ("ct tensor static", declare(**groups({}, ARGS)), ("input_activations but no weights",)),
    (
        "ct tensor static",
        declare(**groups(ARGS | {"symmetric": False}, None)),
        ("symmetric False",),
    ),
    (
        "ct tensor static",
        declare(**groups(arguments("attn_head"), None)),
        ("strategy 'attn_head'",),
    ),
    (
        "autofp8 static",
        declare(activation_scheme="none"),
        ("activation_scheme 'none'", "static, dynamic or null"),
    ),
    ("fbgemm", declare(activation_scale_ub=0), ("activation_scale_ub 0",)),
    (
        "torchao row",
        declare(**ao(AO_DYNAMIC, [{"_type": "PerGroup", "_data": {"group_size": 128}}, PER_ROW])),
        ("activations of PerGroup",),
    ),
    (
        "modelopt own file",
        put("model.layers.0.self_attn.k_proj.k_bias", torch.zeros(96)),
        ("layers.0.self_attn.k_proj.k_bias", "affine KV cache", "symmetric"),
    ),
    ("torchao row", declare(quant_type="float8wo"), ("'float8wo'", "Float8WeightOnlyConfig")),
]


@pytest.mark.parametrize(
    ("name", "spoil", "named"), CASES, ids=[f"{name}-{named[0]}" for name, _, named in CASES]
)
def test_refused_before_a_weight_is_read(
    name, spoil, named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = write(FORMS[name])
    made.tensors = {name: tensor.clone() for name, tensor in made.tensors.items()}
    made.config = {**made.config}
    if "quantization_config" in made.config:
        made.config["quantization_config"] = {**made.config["quantization_config"]}
    spoil(made)
    folder, read = made.save(tmp_path), []
    original = Checkpoint._read
    monkeypatch.setattr(
        Checkpoint, "_read", lambda self, name: (read.append(name), original(self, name))[1]
    )
    with pytest.raises(CheckpointError) as error:
        LLM(model=folder, skip_tokenizer_init=True)
    for words in named:
        assert words in str(error.value), f"{words!r} is not in: {error.value}"
    assert [name for name in read if not re.search("scale|zero_point", name)] == []


@pytest.mark.parametrize("name", ["torchao row", "deepseek"])
def test_what_a_producer_leaves_out_unnamed_stays_as_it_is(name: str, tmp_path: Path):
    """torchao and transformers leave matrices that their kernels or blocks do not divide."""
    made = write(FORMS[name])
    made.tensors = {n: t for n, t in made.tensors.items() if not n.startswith(Q)}
    made.tensors[f"{Q}.weight"] = torch.randn(
        192, 192, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    LLM(model=made.save(tmp_path), skip_tokenizer_init=True)


def test_weights_that_were_only_rounded_in_place_are_16_bit(tmp_path: Path):
    """Quark's `fake_quantized` keeps scales beside weights that are not in FP8."""
    fake = quark("per_tensor", STATIC, export={"weight_format": "fake_quantized"})
    made = write(
        Form(fake, kv=lambda layer: {"mlp.down_proj.weight_scale": torch.ones(()) * layer})
    )
    llm = LLM(model=made.save(tmp_path), skip_tokenizer_init=True)
    assert str(llm.config.weight_format) == "bfloat16"


NVFP4_KV = {
    "ct tensor static": {
        "kv_cache_scheme": arguments("tensor_group", "local", num_bits=4, group_size=16)
    },
    "modelopt in config": {"kv_cache_scheme": "NVFP4"},
}


@pytest.mark.parametrize("name", NVFP4_KV)
def test_scales_of_a_cache_in_nvfp4_are_for_no_other(name: str, tmp_path: Path):
    """Their weights can be used, with a cache that the user names."""
    made = write(FORMS[name])
    made.config = {**made.config, "quantization_config": {**said(made), **NVFP4_KV[name]}}
    if name.startswith("ct"):
        made.tensors["model.layers.0.self_attn.k_global_scale"] = torch.ones(1)
    folder = made.save(tmp_path)
    for options in ({}, {"kv_cache_dtype": "fp8"}):
        with refuses(CheckpointError, "NVFP4", "--kv-scales dynamic", "--kv-cache-dtype bfloat16"):
            LLM(model=folder, skip_tokenizer_init=True, **options)
    assert "NVFP4" in describe(str(folder))["scheme"]["description"]
    for options in (
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8", "kv_scales": "dynamic"},
    ):
        llm = LLM(model=folder, skip_tokenizer_init=True, **options)
        assert str(llm.config.kv.format) in ("bfloat16", "fp8_e4m3fn")
