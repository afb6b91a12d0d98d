"""What a model occupies is counted from its config to the byte, whatever holds its matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.parity.variants import VARIANTS
from tests.pooling_models import save_body
from tests.shares import examples

import freight
from freight.checkpoint.config_only import read_config_only
from freight.checkpoint.layouts import read_scheme
from freight.errors import ConfigError
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.fp8.scheme import FourBits, Packing
from freight.kernels.cpu.interface import FORMATS
from freight.kernels.cpu.library import load, runnable
from freight.kernels.cpu.linear import packed_bytes
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES
from freight.model.mixers.attention.layer import Attention
from freight.model.mixers.latent.layer import Latent
from freight.model.open import OpenModel, open_model, open_random
from freight.model.sizes import (
    ONLINE,
    Layout,
    LinearOf,
    group_bytes,
    int4_online,
    loaded_bytes,
    matrix_bytes,
)
from freight.model.weight_bytes import weight_bytes
from freight.operands.weight import Codes, Groups, Weight
from freight.parallel.ranks import Ranks
from freight.parallel.shared import CAPACITY, SharedFiles, SharedMemory
from freight.settings.engine import EngineArgs

FIXTURES = Path(__file__).parents[2] / "fixtures"
LAYOUTS = {"amx": Layout.TILES}  # of builds; the others pack without tiles


def layout_of(kernels: str) -> Layout:
    builds = runnable()
    return (
        Layout.PLAIN
        if kernels == "reference" or not builds
        else LAYOUTS.get(builds[0], Layout.PACKED)
    )


def require_equal(opened: OpenModel, kernels: str, linear_of: LinearOf) -> None:
    config = opened.resolve(opened.args)
    decoder = opened.load(config)
    held = weight_bytes(decoder)
    mixers = [layer.mixer for layer in decoder.layers]
    rotaries = [
        rotary
        for mixer in mixers
        if isinstance(mixer, Attention | Latent)
        for rotary in mixer.rotaries
    ]
    tables = (table for rotary in rotaries for table in (rotary.cos, rotary.sin, rotary.q_factor))
    rope = {table.data_ptr(): table.nbytes for table in tables if table is not None}
    counted = loaded_bytes(
        *(opened.model, config.compute_format, config.weight_format, linear_of, layout_of(kernels)),
        config.max_model_len,
        opened.ranks.size,
    )
    assert (counted.layers, counted.embeddings) == (held.layers, held.embeddings)
    assert counted.tables == sum(rope.values())


def shape_file(variant: str, folder: Path) -> Path:
    """The config.json of a tiny model of some family, whose odd sizes leave gaps where matrices are
    packed.
    """
    content = VARIANTS[variant].to_dict()
    text = content.get("text_config", content)
    odd: dict[str, Any] = {
        "intermediate_size": 90,
        "ffn_dim": 90,
        "moe_intermediate_size": 90,
        "shared_expert_intermediate_size": 70,
    }
    if isinstance(text.get("moe_intermediate_size"), list):  # ERNIE's for text and for pictures
        odd["moe_intermediate_size"] = [90, 50]
    text |= {name: width for name, width in odd.items() if text.get(name)}
    content |= {
        "architectures": [FAMILIES[content["model_type"]].architecture],
        "dtype": "bfloat16",
    }
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return file


OF_FAMILIES = (
    *(
        "llama",
        "llama-tied",
        "llama-biases",
        "mistral-window",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma2-untied",
    ),
    *(
        "gemma3-two-ropes",
        "gemma4",
        "gemma4-plain",
        "gemma4-shared",
        "gemma4-own-inputs",
        "gemma4-own-inputs-alone",
        "gemma4-moe",
        "phi3-partial",
        "opt",
        "opt-untied",
        "opt-350m",
        "opt-without-final-norm",
        "ministral3",
    ),
    *("mixtral", "qwen2-moe", "qwen2-moe-sparse", "qwen3-moe", "qwen3-moe-dense-layer", "gpt-oss"),
    *(
        "granite-biases",
        "glm",
        "glm4",
        "glm4-moe",
        "minimax-m2",
        "ernie4-5-moe",
        "smollm3",
        "hy-v3-float32-head",
        "granite-moe",
    ),
    *(
        "laguna",
        "laguna-by-channel",
        "mellum",
        "mellum-plain",
        "olmo2",
        "olmo3",
        "exaone4",
        "afmoe",
        "arcee",
    ),
    *("hunyuan", "hunyuan-moe", "muse-glimmer", "ernie4-5-vl-moe"),
    *("mimo-v2-flash", "step3p7", "lfm2", "lfm2-biases", "lfm2-moe"),
    *(
        "granite-h",
        "granite-h-moe",
        "nemotron-h-biases",
        "nemotron-h-latent",
        "deepseek-v3",
        "glm4-moe-lite-groups",
    ),
    *("kimi-linear", "kimi-linear-groups", "ling"),
)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    "variant",
    [
        *OF_FAMILIES,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in VARIANTS
            if name not in OF_FAMILIES
        ),
    ],
)
def test_every_family_occupies_what_is_counted(
    variant: str, kernels: str, quantization: str | None, tmp_path: Path
) -> None:
    args = EngineArgs(kernels=kernels, quantization=quantization, device="cpu")
    opened = open_random(args, str(shape_file(variant, tmp_path)))
    require_equal(opened, kernels, lambda _: ONLINE if quantization else None)


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "modernbert": {"local_attention": 32},
    "gemma3_text": {
        "use_bidirectional_attention": True,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_occupy_what_is_counted(
    family: str, kernels: str, quantization: str | None, tmp_path: Path
) -> None:
    """Positions for each token type, norms of sums, a first layer without a norm; no head."""
    content = {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture.replace("ForCausalLM", "Model")],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 130,
        **ENCODERS[family],
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    args = EngineArgs(kernels=kernels, quantization=quantization, device="cpu")
    if quantization == "int4" and kernels == "reference":
        pytest.skip("these kernels decode groups")
    linear_of = (
        int4_online if quantization == "int4" else (lambda _: ONLINE if quantization else None)
    )
    require_equal(open_random(args, str(file)), kernels, linear_of)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_decoder_without_a_head_occupies_what_is_counted(kernels: str, tmp_path: Path) -> None:
    body = save_body(tmp_path / "body")
    opened = open_model(EngineArgs(str(body), kernels=kernels, device="cpu"))
    assert not opened.model.has_head
    require_equal(opened, kernels, lambda _: None)


DIVIDED = (
    *("llama-tied", "gpt-oss", "deepseek-v3", "ling", "qwen3-next", "granite-h-moe"),
    *("nemotron-h-latent", "gemma4-own-inputs"),
)


@pytest.mark.parametrize(
    "variant",
    [
        *DIVIDED,
        *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in DIVIDED),
    ],
)
def test_int4_occupies_what_is_counted(variant: str, tmp_path: Path) -> None:
    """What `freight plan` says of it, with inputs that groups of 128 do not divide, or none."""
    args = EngineArgs(quantization="int4", device="cpu")
    opened = open_random(args, str(shape_file(variant, tmp_path)))
    require_equal(opened, "auto", int4_online)


@pytest.mark.skipif(not runnable(), reason="ranks gather in the compiled kernels")
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize(
    "variant",
    [
        *DIVIDED,
        *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name not in DIVIDED),
    ],
)
def test_a_rank_occupies_what_is_counted(
    variant: str, quantization: str | None, tmp_path: Path
) -> None:
    """Its matrices with the odd sizes of a part, and whole what all ranks have."""
    args = EngineArgs(device="cpu", quantization=quantization, tensor_parallel_size=2)
    opened = open_random(args, str(shape_file(variant, tmp_path)))
    memory = SharedMemory(SharedFiles.create(2, CAPACITY), 1, 1.0)
    opened = opened.as_rank(Ranks(1, 2, memory), 1)
    try:
        assert opened.share is not None
    except ConfigError as error:
        pytest.skip(str(error))
    require_equal(opened, "auto", lambda _: ONLINE if quantization else None)
    memory.close()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    "name", ["autofp8_static_kv", "ct_docs", "modelopt_blocks", "quark_kv_outputs"]
)
def test_fp8_checkpoints_of_other_tools_occupy_what_is_counted(name: str, kernels: str) -> None:
    opened = open_model(
        EngineArgs(str(FIXTURES / name), kernels=kernels, device="cpu", skip_tokenizer_init=True)
    )
    require_equal(opened, kernels, read_scheme(*read_config_only(str(FIXTURES / name))).linear)


@pytest.mark.parametrize("weights", ["fp8", "fp8-channel", "fp8-block", "int8"])
def test_8_bits_in_every_granularity_occupies_what_is_counted(weights: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "ignore": ["lm_head", "model.layers.1.self_attn.k_proj"]
    }  # and one that is not merged
    freight.quantize("demo", tmp_path / "out", weights=weights, **options)
    config, beside = read_config_only(str(tmp_path / "out"))
    linear_of = read_scheme(config, beside).linear
    assert parse_model_config(config).num_layers > 1
    assert linear_of("model.layers.1.self_attn.k_proj") is None
    for kernels in ("auto", "reference"):
        require_equal(
            open_model(EngineArgs(str(tmp_path / "out"), kernels=kernels, device="cpu")),
            kernels,
            linear_of,
        )


@settings(max_examples=examples(200))
@given(
    build=st.sampled_from(runnable() or ("none",)),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    format=st.sampled_from(
        [Format.FLOAT32, Format.FLOAT16, Format.BFLOAT16, Format.E4M3FN, Format.INT8]
    ),
)
def test_every_build_packs_a_matrix_into_what_is_counted(
    build: str, rows: int, columns: int, format: Format
) -> None:
    functions = load(build).functions
    scales = 4 * -(-rows // 16) * 16
    packed = functions.freight_packed_bytes(FORMATS[torch_dtype(format)], rows, columns)
    expected = packed + scales
    assert matrix_bytes(rows, columns, format, None, LAYOUTS.get(build, Layout.PACKED)) == expected


@settings(max_examples=examples(200))
@given(
    build=st.sampled_from(runnable() or ("none",)),
    rows=st.integers(1, 300),
    groups=st.integers(1, 9),
    kind=st.sampled_from(
        [
            *(
                FourBits(Packing.INT4, size, zeros)
                for size in (32, 64, 128)
                for zeros in (False, True)
            ),
            FourBits(Packing.NVFP4, 16),
        ]
    ),
)
def test_every_build_packs_groups_into_what_is_counted(
    build: str, rows: int, groups: int, kind: FourBits
) -> None:
    assert kind.group is not None
    columns = kind.group * groups
    if kind.packing is Packing.NVFP4:
        held = Groups(Codes.E2M1, 16, torch.ones(rows, groups).to(torch.float8_e4m3fn))
    else:
        zeros = torch.zeros(rows, groups, dtype=torch.uint8) if kind.zeros else None
        held = Groups(Codes.INT4, kind.group, torch.ones(rows, groups).half(), zeros)
    data = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    packed = packed_bytes(load(build), Weight(data, groups=held))
    layout = LAYOUTS.get(build, Layout.PACKED)
    assert group_bytes(rows, columns, kind, layout) == packed + 4 * -(-rows // 16) * 16
