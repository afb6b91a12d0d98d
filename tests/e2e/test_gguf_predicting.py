"""Layers that predict further tokens in a GGUF file: written under the names of llama.cpp's own package,
they draft what those of the safetensors folder draft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.formats.gguf_files import converted
from tests.gguf_files import Tensor, gguf_bytes
from tests.parity.shapes import GLM_MOE, LATENT, MSCALE, SHAPE
from tests.parity.test_predicting import Case, nextn, save
from tests.refusals import refuses
from transformers import DeepseekV3Config, Glm4MoeConfig

from freight import LLM, SamplingParams
from freight.checkpoint.config_only import gguf_model
from freight.checkpoint.gguf.names import COPIES
from freight.checkpoint.gguf.reader import GGUFCheckpoint
from freight.engine.guesses import Guesses
from freight.errors import CheckpointError, ConfigError
from freight.kernels.cpu.library import runnable
from freight.lab.capacity import Wish, make_plan
from freight.model.held_tensors import held_tensors
from freight.model.open import open_checkpoint
from freight.model.sizes import Layout

GROUPS = {"n_group": 4, "topk_group": 2}
ROPE = {**MSCALE, "mscale_all_dim": 1.0}  # a file has one number for both
LATENTS = {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1}
GLM = Glm4MoeConfig(**SHAPE, **GLM_MOE, **GROUPS, use_qk_norm=True, attention_bias=True)
DEEPSEEK = DeepseekV3Config(**LATENTS, **GROUPS, rope_parameters=ROPE)
CASES = {
    "glm4-moe": (nextn(GLM), gguf.MODEL_ARCH.GLM4_MOE),
    "deepseek-v3": (nextn(DEEPSEEK), gguf.MODEL_ARCH.DEEPSEEK2),
}
F32 = 0
BF16 = 30
Q8_0 = 8
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "threads": 1,
    "max_model_len": 120,
    "kv_cache_memory": 2**20,
}
MTP = {"method": "mtp", "num_speculative_tokens": 4}
BEHIND = 2  # the block of the layer that predicts


def stacked(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """The tensors with experts in one (conversion/base.py), and the parts of kv_b (deepseek.py)."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        before, _, part = name.partition(".mlp.experts.")
        if part.startswith("0."):
            parts = [tensors[f"{before}.mlp.experts.{i}.{part[2:]}"] for i in range(experts)]
            found[f"{before}.mlp.experts.{part[2:]}"] = torch.stack(parts)
        elif name.endswith("kv_b_proj.weight"):
            heads = tensor.view(LATENT["num_attention_heads"], -1, LATENT["kv_lora_rank"])
            k, v = heads.split([LATENT["qk_nope_head_dim"], LATENT["v_head_dim"]], 1)
            found[name.replace("kv_b", "k_b")] = k.transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = v
        elif not part:
            found[name] = tensor
    return found


def as_tensor(values: torch.Tensor, kind: int) -> Tensor:
    values = values.contiguous()
    shape = tuple(values.shape)
    if values.ndim < 2 or kind == F32:
        return Tensor(F32, shape, values.float().numpy().tobytes())
    if kind == BF16:
        return Tensor(BF16, shape, values.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    packed = gguf.quantize(values.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    return Tensor(Q8_0, shape, packed.tobytes())


def write(name: str, folder: Path, kind: int, **keys: Any) -> Path:
    """The folder's model as a GGUF file, with the metadata that the converter writes."""
    _, architecture = CASES[name]
    # deepseek2 has these layers of GLM-4.7-Flash in later versions of the package, under the same names
    of_layers = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, BEHIND + 1)
    names = gguf.get_tensor_name_map(architecture, BEHIND + 1)
    tensors = {}
    for stored, values in stacked(load_file(folder / "model.safetensors"), 8).items():
        written = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        if written is None:
            written = of_layers.get_name(stored, try_suffixes=(".weight",))
        if written is None:  # as `e_score_correction_bias` becomes that of a module
            written = names.get_name(stored.replace("_bias", ".bias"), (".weight", ".bias"))
        assert written is not None, stored
        is_router = "ffn_gate_inp" in written
        blocks = values.shape[-1] % 32 == 0 and not is_router
        tensors[written] = as_tensor(values, F32 if is_router or not blocks else kind)
    prefix = gguf.MODEL_ARCH_NAMES[architecture]
    counts = {"block_count": BEHIND + 1, "nextn_predict_layers": 1, **keys}
    metadata = dict(converted(name).metadata)
    metadata |= {f"{prefix}.{key}": number for key, number in counts.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    file = folder / "model.gguf"
    file.write_bytes(gguf_bytes(metadata, tensors))
    return file


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    case: Case = CASES[request.param][0]
    folder = tmp_path_factory.mktemp(request.param)
    save(case, folder)
    return request.param, folder


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as there is room for: the layers are not trained, and hardly ever right."""
    monkeypatch.setattr(Guesses, "wants", lambda self, num_output: True)
    monkeypatch.setattr(Guesses, "likely", lambda self, kinds: 1.0)
    monkeypatch.setattr(Guesses, "goes_on", lambda self, kinds: True)


def drafted(model: Path, **options: Any) -> tuple[list[int], list[tuple[int, ...]]]:
    """The tokens of an answer, and every draft for it."""
    llm = LLM(str(model), **{**OPTIONS, "speculative_config": MTP, **options})
    drafting = llm.engine._drafting
    assert drafting is not None
    seen: list[tuple[int, ...]] = []
    propose = drafting._propose

    def noted(work: Any) -> list[tuple[int, ...]]:
        drafts = propose(work)
        seen.extend(drafts)
        return drafts

    drafting._propose = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    answer = llm.generate({"prompt_token_ids": list(range(5, 38))}, params)[0]
    assert llm.engine.stats().drafted > 20
    return list(answer.outputs[0].token_ids), seen


@pytest.mark.parametrize(("kind", "dtype"), [(F32, "float32"), (BF16, "bfloat16")])
def test_drafts_and_tokens_are_those_of_the_folder(saved: Any, kind: int, dtype: str) -> None:
    name, folder = saved
    file = write(name, folder, kind)
    model = open_checkpoint(str(file)).model
    assert (model.num_layers, model.prediction_layers) == (BEHIND, 1)
    assert model.layers == open_checkpoint(str(folder)).model.layers
    options = {"dtype": dtype, "activations": "bfloat16"}
    assert drafted(file, **options) == drafted(folder, **options)


def test_without_the_method_the_block_is_not_read(saved: Any, caplog: Any) -> None:
    name, folder = saved
    file = write(name, folder, F32)
    llm = LLM(str(file), **OPTIONS)
    assert llm.engine._drafting is None
    assert len(llm.engine.runner.pool.spec.layers) == BEHIND
    skipped = GGUFCheckpoint(file).skipped
    assert {tensor for tensor, why in skipped.items() if why == COPIES} == {
        f"blk.{BEHIND}.nextn.embed_tokens.weight",
        f"blk.{BEHIND}.nextn.shared_head_head.weight",
    }
    found = LLM(str(file), **OPTIONS, speculate="auto")
    assert found.engine._drafting is not None


def test_matrices_in_blocks_are_computed_and_planned_so(saved: Any) -> None:
    name, folder = saved
    file = write(name, folder, Q8_0)
    drafted(file)
    drafted(file, activations="bfloat16")  # decoded
    llm = LLM(str(file), **OPTIONS, speculative_config=MTP)
    drafting = llm.engine._drafting
    assert drafting is not None
    target = llm.engine.runner.model
    held = sum(held_tensors((target, drafting.runner.head)).values()) - sum(
        held_tensors(target).values()
    )
    described = gguf_model(str(file))
    assert described is not None
    tensors = dict.fromkeys(described.places.placed, "")
    layout = Layout.TILES if runnable()[:1] == ("amx",) else Layout.PACKED
    wish = Wish(2**26, 120, None, "cpu", layout, speculative_config=json.dumps(MTP))
    config = described.described.config
    plan = make_plan(config, wish, None, described.stored, (), described.scheme, tensors)
    assert {setting.loaded.head for setting in plan.settings} == {held}


def test_a_file_without_the_layers_drafts_nothing(saved: Any) -> None:
    """As converters leave them out: neither blocks nor their number."""
    name, folder = saved
    file = write(name, folder, F32, block_count=BEHIND, nextn_predict_layers=None)
    with refuses(ConfigError, "has no layers that predict further tokens"):
        LLM(str(file), **OPTIONS, speculative_config=MTP)


@pytest.mark.parametrize(
    ("keys", "block", "has"),
    [
        ({"nextn_predict_layers": 2}, 1, "no tensor"),
        ({"block_count": 2}, 1, "no tensor"),
        ({"nextn_predict_layers": 0}, 2, "a tensor"),
        ({"nextn_predict_layers": None}, 2, "a tensor"),
        ({"block_count": 4}, 2, "a tensor"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"speculative_config": MTP}], ids=["plain", "mtp"])
def test_another_number_of_layers_than_the_tensors_show_is_refused(
    saved: Any, keys: dict[str, Any], block: int, has: str, options: dict[str, Any]
) -> None:
    """Without the method, too: the model would run with a layer less."""
    name, folder = saved
    file = write(name, folder, F32, **keys)
    with refuses(CheckpointError, f"blk.{block} has {has} nextn.*", "nextn_predict_layers, counts"):
        LLM(str(file), **OPTIONS, **options)
