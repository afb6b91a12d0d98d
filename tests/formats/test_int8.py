"""INT8 weights with INT8 activations: files that compressed-tensors wrote, what is refused, and the
files and models that Freight rounds itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.forms import arguments, groups
from tests.formats.writers import Form, write
from tests.refusals import refuses
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import freight
from freight import LLM, SamplingParams
from freight.checkpoint.layouts import read_scheme
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.model.config.model import ForeignModel
from freight.model.loader import load_model
from freight.model.open import open_model
from freight.operands.weight import Activations, Weight
from freight.settings.device import probe
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check, resolve
from freight.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "compressed_int8"
NAMES = {"token": Activations.DYNAMIC, "static": Activations.STATIC}
INT8 = {"num_bits": 8, "type": "int"}
WEIGHTS = arguments("channel", **INT8)
TOKENS = arguments("token", dynamic=True, **INT8)


def logits_of(folder: str | Path, prompts: list[list[int]], **options: Any) -> Tensor:
    """Log-probabilities of each next token, [prompts, length - 1]."""
    llm = LLM(model=str(folder), skip_tokenizer_init=True, kv_cache_dtype="bfloat16", **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        rows.append([found[token].logprob for token, found in pairs if found is not None])
    return torch.tensor(rows)


def of_next(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]


def dequantized(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The 16-bit model that the file stands for, in float32, by codes times scales alone."""
    plain = {name: tensor.float() for name, tensor in stored.items() if "scale" not in name}
    for name, tensor in stored.items():
        if name.endswith("weight_scale"):
            plain[name.removesuffix("_scale")] *= tensor.float().reshape(-1, 1)
    return plain


@pytest.mark.parametrize("name", NAMES)
def test_what_compressed_tensors_wrote_is_read(name: str):
    folder = FIXTURES / name
    stored, expected = (load_file(folder / f"{one}.safetensors") for one in ("model", "expected"))
    assert stored["model.layers.0.mlp.down_proj.weight"].dtype is torch.int8
    opened = open_model(EngineArgs(str(folder), skip_tokenizer_init=True))
    assert opened.checkpoint is not None
    model = load_model(
        opened.checkpoint, opened.model, REFERENCE, Format.FLOAT32, Format.INT8, 64, "cpu", opened.scheme
    )  # fmt: skip
    plain = dequantized(stored)
    for index, layer in enumerate(model.layers):
        for module, projection in (
            ("self_attn.o_proj", layer.mixer.o),
            ("mlp.down_proj", layer.mlp.down),
        ):
            weight = projection.weight
            assert isinstance(weight, Weight)
            full = f"model.layers.{index}.{module}"
            assert torch.equal(weight.data, stored[f"{full}.weight"])
            assert torch.equal(weight.dequantized(), plain[f"{full}.weight"])
            assert weight.activations is NAMES[name]
            if name == "static":
                assert weight.input_scale == float(stored[f"{full}.input_scale"])
    tokens = expected["tokens"]
    prompts = tokens.tolist()
    config = LlamaConfig.from_pretrained(folder)
    del config.quantization_config
    theirs = LlamaForCausalLM(config).float().eval()
    theirs.load_state_dict(plain)
    with torch.no_grad():
        unrounded = of_next(theirs(tokens).logits, tokens)
    ours = logits_of(folder, prompts, dtype="float32")
    # The model of the file without rounding of activations, which moves a value by 1/254 of the
    # largest of its row, or of all; and compressed-tensors' own, in bfloat16, whose dynamic scale is
    # amax / 127.5.
    assert (ours - unrounded).abs().max() < 0.1
    assert (ours - of_next(expected["logits"], tokens)).abs().max() < 0.2
    reference = logits_of(folder, prompts, dtype="float32", kernels="reference")
    assert (ours - reference).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("weights", "inputs", "says"),
    [
        (WEIGHTS, None, "weights in INT8 without input_activations"),
        (WEIGHTS | {"symmetric": False}, TOKENS, "weights with symmetric False"),
        (WEIGHTS, TOKENS | {"symmetric": False}, "input_activations with symmetric False"),
        (WEIGHTS | {"strategy": "group", "group_size": 64}, TOKENS, "strategy 'group'"),
        (WEIGHTS | {"strategy": "block"}, TOKENS, "strategy 'block'"),
        (WEIGHTS, TOKENS | {"strategy": "group", "group_size": 64}, "strategy 'group'"),
        (WEIGHTS, TOKENS | {"dynamic": "local"}, "dynamic 'local'"),
        (WEIGHTS, TOKENS | {"dynamic": False}, "dynamic False and strategy 'token'"),
        (WEIGHTS, arguments("token", dynamic=True), "type 'float' is not implemented; INT8"),
        (WEIGHTS | {"num_bits": 4}, TOKENS, "weights of 4 bits in format"),
        (arguments("channel"), TOKENS, "type 'int' is not implemented; FP8"),
        (WEIGHTS | {"dynamic": True}, TOKENS, "dynamic True"),
    ],
)
def test_other_integers_are_refused_by_name(
    weights: dict[str, Any], inputs: dict[str, Any] | None, says: str
):
    with pytest.raises(CheckpointError) as caught:
        read_scheme({"quantization_config": groups(weights, inputs)}, None)
    assert says in str(caught.value)


def test_int8_beside_fp8_is_refused():
    declared = groups(WEIGHTS, TOKENS)
    other = groups(arguments("channel"), arguments("token", dynamic=True))["config_groups"]
    declared["config_groups"] |= {"group_1": other["group_0"] | {"targets": ["re:.*down_proj"]}}
    with refuses(CheckpointError, "INT8", "side by side"):
        read_scheme({"quantization_config": declared}, None)


@pytest.mark.parametrize(("declares", "stores"), [("float", "int8"), ("int", "fp8_e4m3fn")])
def test_a_matrix_in_another_format_than_declared_is_refused(
    declares: str, stores: str, tmp_path: Path
):
    kinds = {"num_bits": 8, "type": declares}
    declared = groups(arguments("channel", **kinds), arguments("token", dynamic=True, **kinds))
    dtype = torch.int8 if stores == "int8" else torch.float8_e4m3fn
    form = Form(
        declared,
        lambda _, w: (
            {"weight": torch.zeros_like(w, dtype=dtype), "weight_scale": torch.ones(len(w), 1)},
            w,
        ),
        "dynamic",
    )
    with pytest.raises(CheckpointError, match=f"stored in {stores}, but config.json declares"):
        LLM(model=str(write(form).save(tmp_path)), skip_tokenizer_init=True)


def written(tmp_path: Path, scale: torch.dtype) -> Path:
    """A model in INT8 whose scales are all 1."""
    form = Form(
        groups(WEIGHTS, TOKENS),
        lambda _, w: (
            {
                "weight": torch.zeros_like(w, dtype=torch.int8),
                "weight_scale": torch.ones(len(w), 1).to(scale),
            },
            w,
        ),
        "dynamic",
    )
    tmp_path.mkdir()
    return Path(write(form).save(tmp_path))


def test_integers_are_read_where_codes_are_expected_alone(tmp_path: Path):
    """Neither as a scale nor as a tensor that has no scale."""
    folder = written(tmp_path / "scale", torch.int8)
    with refuses(CheckpointError, "weight_scale", "I8"):
        LLM(model=str(folder), skip_tokenizer_init=True)
    folder = written(tmp_path / "norm", torch.bfloat16)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, file)
    with refuses(CheckpointError, "norm.weight", "int8", "16 or 32 bits"):
        LLM(model=str(folder), skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "out"
    freight.quantize("demo", out, weights="int8")
    return out


def test_quantize_writes_what_is_rounded_at_load(quantized: Path):
    declared = json.loads((quantized / "config.json").read_text())["quantization_config"]
    group = declared["config_groups"]["group_0"]
    assert declared["format"] == "int-quantized"
    for side, strategy, dynamic in (
        ("weights", "channel", False),
        ("input_activations", "token", True),
    ):
        args = group[side]
        assert (args["num_bits"], args["type"], args["symmetric"]) == (8, "int", True)
        assert (args["strategy"], args["dynamic"]) == (strategy, dynamic)
    stored = load_file(quantized / "model.safetensors")
    demo = load_file(Path(freight.__file__).parent / "demo" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    scale = demo[name].float().abs().amax(1, keepdim=True) / 127
    assert torch.equal(stored[f"{name}_scale"], scale.bfloat16())
    codes = (demo[name].float() / scale.bfloat16().float()).round().clamp(-127, 127)
    assert torch.equal(stored[name], codes.to(torch.int8))


def test_its_perplexity_is_close_to_that_of_16_bits(quantized: Path):
    """Means over 4 x 120 tokens of the demo's held-out text, which decides little: a wrong scale or
    order of codes would show.
    """
    demo = Path(freight.__file__).parent / "demo"
    ids = Tokenizer.load(demo).encode((demo / "heldout.txt").read_text()[:8000])
    prompts = [ids[at : at + 120] for at in range(0, 480, 120)]
    plain = logits_of("demo", prompts).mean()
    found = {
        "stored": logits_of(quantized, prompts),
        "at load": logits_of("demo", prompts, quantization="int8"),
        "reference": logits_of(quantized, prompts, kernels="reference"),
    }
    for name, one in found.items():
        assert abs(one.mean() - plain) < 0.02, name


def test_a_quantized_model_is_not_rounded_again(quantized: Path):
    with pytest.raises(ConfigError, match=r"quantized already \(.*\); omit it"):
        LLM(model=str(quantized), quantization="fp8")
    assert open_model(EngineArgs(str(quantized), quantization="int8")) is not None
    with pytest.raises(CheckpointError, match="quantized already"):
        freight.quantize(str(quantized), quantized.parent / "again", weights="fp8")


@pytest.mark.parametrize("activations", ["static", "none"])
def test_other_activations_are_not_written(activations: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"--activations {activations} with --weights int8"):
        freight.quantize("demo", tmp_path / "out", weights="int8", activations=activations)


def test_gpus_refuse_int8():
    with refuses(ConfigError, "weights in INT8", "--device cuda"):
        check(EngineArgs(quantization="int8", device="cuda"))
    check(EngineArgs(quantization="int8", device="cuda", kernels="reference"))


def test_models_of_transformers_refuse_int8():
    opened = open_model(EngineArgs("demo", quantization="int8"))
    foreign = ForeignModel(attention=(), tensors=(), embedding="", head="", linears=())
    model = replace(opened.model, foreign=foreign)
    with pytest.raises(ConfigError, match="runs through transformers' modules"):
        resolve(opened.args, model, opened.scheme, opened.kv_scales, probe("cpu"))
