"""Layers that predict further tokens against their definition in torch: norms, a projection and a norm
as vLLM's and SGLang's loaders have them (named in `model/config/families/`), around a decoder layer of
transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.formats.forms import BLOCKS, INVERSE
from tests.formats.writers import per_block, renamed
from tests.parity.random_models import save_random, tokens
from tests.parity.shapes import DELTA_NET, GLM_MOE, LATENT, MOE, MSCALE, SHAPE
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from freight.cache.pool import KVPool, allocate_pool
from freight.cache.spec import KVCacheSpec, layer_spec
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.engine.recordings import with_kernels
from freight.errors import CheckpointError, ConfigError
from freight.fp8.formats import Format
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.library import Library
from freight.kernels.cpu.recording import Arena, record
from freight.model.decoder import Decoder
from freight.model.draft_head import DraftHead
from freight.model.mixers.latent.layer import Latent
from freight.model.open import OpenModel, open_checkpoint, open_model
from freight.model.predicting import PredictingHead, load_predicting
from freight.operands.weight import Weight
from freight.settings.engine import EngineArgs, EngineConfig

HIDDEN = SHAPE["hidden_size"]
ROWS = 45  # more than two blocks of the cache
CHUNKS = {"one chunk": (ROWS,), "chunks": (1, 16, 20, 8), "tokens": (1,) * ROWS}
FULL = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
QWEN = {**DELTA_NET, **FULL, "num_hidden_layers": 4}
SHARED = {"shared_expert_intermediate_size": 48}


@dataclass(frozen=True)
class Case:
    """A model of transformers whose last layers stand for those that predict.

    layer, outer    where the tensors of layer `{}`, and the four modules, are in the checkpoint; `{}`
                    of `follows` counts the model's layers as well
    modules         the norms of embedding and states, the projection and the last norm
    """

    config: PretrainedConfig
    layer: str
    modules: tuple[str, str, str, str]
    said: dict[str, Any]
    outer: str = ""
    follows: bool = False
    states_first: bool = False
    masks: bool = False
    count: int = 1


NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
FC = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": MSCALE,
}


def nextn(config: PretrainedConfig, count: int = 1) -> Case:
    said = {"num_nextn_predict_layers": count}
    return Case(config, "model.layers.{}.", NEXTN, said, follows=True, masks=True, count=count)


def fc(config: PretrainedConfig, said: dict[str, Any]) -> Case:
    return Case(config, "mtp.layers.{}.", FC, said, outer="mtp.")


CASES = {
    "deepseek-v3": nextn(DeepseekV3Config(**DEEPSEEK)),
    "deepseek-v3-two": nextn(DeepseekV3Config(**DEEPSEEK | {"num_hidden_layers": 4}), count=2),
    "glm4-moe": nextn(Glm4MoeConfig(**SHAPE, **GLM_MOE, use_qk_norm=True, attention_bias=True)),
    "qwen3-5": fc(Qwen3_5TextConfig(**QWEN), {"mtp_num_hidden_layers": 1}),
    "qwen3-5-moe": fc(Qwen3_5MoeTextConfig(**QWEN, **MOE, **SHARED), {"mtp_num_hidden_layers": 1}),
    "qwen3-next": fc(Qwen3NextConfig(**QWEN, **MOE, **SHARED), {}),
    "mimo": Case(
        Qwen2Config(**SHAPE),
        "model.mtp_layers.{}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        {
            "num_nextn_predict_layers": 1,
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "head_dim": 16,
        },
        states_first=True,
        masks=True,
    ),
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a case; the model of transformers, and the four modules of each layer."""

    case: Case
    folder: Path
    theirs: Any
    modules: list[tuple[nn.Module, nn.Module, Tensor, nn.Module]]

    @property
    def main_layers(self) -> int:
        return int(self.theirs.config.num_hidden_layers) - self.case.count

    def body(self, layers: slice, norm: nn.Module | None = None) -> Any:
        """The model with these layers alone."""
        body = copy.copy(self.theirs.model)
        body._modules = dict(body._modules)
        body.config = copy.deepcopy(body.config)
        body.layers = nn.ModuleList(self.theirs.model.layers[layers])
        body.config.num_hidden_layers = len(body.layers)
        if getattr(body.config, "layer_types", None):
            body.config.layer_types = body.config.layer_types[layers]
        if norm is not None:
            body.norm = norm
        return body

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> Tensor:
        """The final states of the model, normed."""
        found: Tensor = self.body(slice(self.main_layers))(torch.tensor([ids]), use_cache=False)[0]
        return found[0]

    @torch.no_grad()
    def predicted(self, behind: Sequence[int], states: Tensor, depth: int = 0) -> Tensor:
        """What the layer of `depth` returns for rows from position 0, whose next tokens are `behind`."""
        embedding_norm, states_norm, projection, norm = self.modules[depth]
        embedded = self.theirs.model.embed_tokens(torch.tensor(behind))
        if self.case.masks:
            embedded[0] = 0
        parts = [embedding_norm(embedded), states_norm(states)]
        if self.case.states_first:
            parts.reverse()
        x = torch.cat(parts, -1) @ projection.T
        index = self.main_layers + depth
        found: Tensor = self.body(slice(index, index + 1), norm)(
            inputs_embeds=x[None], use_cache=False
        )[0]
        return found[0]


def save(case: Case, folder: Path) -> Saved:
    theirs = save_random(case.config, folder, torch.float32)
    main = case.config.num_hidden_layers - case.count
    stored = load_file(folder / "model.safetensors")
    modules = []
    for index in range(case.count):
        prefix = case.layer.format(index + main * case.follows)
        before = f"model.layers.{main + index}."
        for name in [name for name in stored if name.startswith(before)]:
            stored[prefix + name.removeprefix(before)] = stored.pop(name)
        *norm_names, last_name = (case.modules[0], case.modules[1], case.modules[3])
        projection = 0.12 * torch.randn(HIDDEN, 2 * HIDDEN)
        norms = []
        for name in (*norm_names, last_name):
            norm = copy.deepcopy(theirs.model.norm)
            norm.weight.data += 0.3 * torch.randn(HIDDEN)
            stored[f"{case.outer or prefix}{name}.weight"] = norm.weight.data
            norms.append(norm)
        stored[f"{case.outer or prefix}{case.modules[2]}.weight"] = projection
        modules.append((norms[0], norms[1], projection, norms[2]))
        if case.follows:  # published files repeat the embedding and the head
            stored[f"{prefix}embed_tokens.weight"] = torch.ones(SHAPE["vocab_size"], HIDDEN)
            stored[f"{prefix}shared_head.head.weight"] = torch.ones(SHAPE["vocab_size"], HIDDEN)
    said = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types"):
        if said.get(key):
            said[key] = said[key][:main]
    said |= {"num_hidden_layers": main} | case.said
    (folder / "config.json").write_text(json.dumps(said))
    write(folder, stored)
    return Saved(case, folder, theirs, modules)


def write(folder: Path, stored: dict[str, Tensor]) -> None:
    tensors = {name: tensor.detach().contiguous() for name, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(CASES[request.param], tmp_path_factory.mktemp(request.param))


def loaded(folder: Path, **options: Any) -> tuple[OpenModel, EngineConfig, Decoder, PredictingHead]:
    options = {"dtype": "float32", "activations": "bfloat16", "kernels": "reference", **options}
    opened = open_model(EngineArgs(model=str(folder), skip_tokenizer_init=True, **options))
    config = opened.resolve(opened.args)
    decoder = opened.load(config)
    assert isinstance(decoder, Decoder)
    return opened, config, decoder, load_predicting(opened, config, decoder)


def pool_of(head: PredictingHead, config: EngineConfig) -> KVPool:
    kv = replace(config.kv, scales=None, layers=None)
    layers = [layer_spec(mixer, kv.of_layer(0), config.compute_format) for mixer in head.mixers]
    spec = KVCacheSpec(tuple(layers), config.block_size)
    blocks = [-(-ROWS // config.block_size)] * len(spec.groups)
    return allocate_pool(spec, kv, blocks, head.kernels, rotaries=head.rotaries)


@torch.inference_mode()
def in_chunks(
    head: DraftHead,
    pool: KVPool,
    behind: Sequence[int],
    states: Tensor,
    chunks: Sequence[int],
    depth: int = 0,
) -> Tensor:
    found = []
    start = 0
    for count in chunks:
        rows = slice(start, start + count)
        part = SequenceSlice(behind[rows], start, pool.whole, Logits.ALL)
        batch = prepare([part], pool.spec.groups)
        found.append(head.hidden(batch, states[rows], pool.layers, depth))
        start += count
    return torch.cat(found)


@torch.inference_mode()
def states_of(opened: OpenModel, config: EngineConfig, decoder: Decoder, ids: list[int]) -> Tensor:
    """What `feature_layers` () asks for."""
    spec = opened.cache_spec(config)
    pool = allocate_pool(
        spec, config.kv, [4] * len(spec.groups), decoder.kernels, rotaries=decoder.rotaries
    )
    batch = prepare([SequenceSlice(ids, 0, pool.whole, Logits.ALL)], spec.groups)
    return decoder.hidden(batch, pool.layers)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("saved", CASES, indirect=True)
def test_states_and_logits_are_those_of_the_definition(saved: Saved, kernels: str):
    ids = tokens(ROWS + 2)
    opened, config, decoder, head = loaded(saved.folder, kernels=kernels)
    assert head.feature_layers == ()
    states = states_of(opened, config, decoder, ids[:ROWS])
    given = saved.states(ids[:ROWS])
    for depth in range(saved.case.count + 1):
        layer = depth % saved.case.count  # a depth behind the last has the first layer again
        behind = ids[1 + layer : ROWS + 1 + layer]
        expected = saved.predicted(behind, given, layer)
        assert expected.std() > 0.1
        for chunks in CHUNKS.values():
            found = in_chunks(head, pool_of(head, config), behind, states, chunks, depth)
            assert (found - expected).abs().max() <= 1e-4
        logits = saved.theirs.lm_head(expected)
        assert logits.std() > 0.1
        assert (head.logits(found) - logits).abs().max() <= 1e-4
        given = expected
        states = found


@pytest.mark.parametrize("saved", ["deepseek-v3", "glm4-moe", "qwen3-5-moe", "mimo"], indirect=True)
def test_with_pages_and_weights_in_fp8(saved: Saved):
    ids = tokens(ROWS + 1)
    opened, config, decoder, head = loaded(
        saved.folder, kernels="auto", kv_cache_dtype="fp8", quantization="fp8"
    )
    states = states_of(opened, config, decoder, ids[:ROWS])
    pool = pool_of(head, config)
    assert config.kv.format is Format.E4M3FN
    found = in_chunks(head, pool, ids[1:], states, CHUNKS["chunks"])
    expected = saved.predicted(ids[1:], saved.states(ids[:ROWS]))
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.9
    assert torch.equal(in_chunks(head, pool_of(head, config), ids[1:], states, (ROWS,)), found)


@pytest.mark.parametrize("saved", ["deepseek-v3", "qwen3-5-moe"], indirect=True)
def test_embedding_and_head_are_the_models(saved: Saved):
    _, _, decoder, head = loaded(saved.folder)
    assert head.embedding is decoder.embedding
    assert head.head is decoder.head


@pytest.mark.parametrize("saved", ["deepseek-v3", "qwen3-5-moe", "mimo"], indirect=True)
def test_a_row_behind_the_prompt_can_be_recorded(saved: Saved):
    """No operation of torch stands between those of the kernels."""
    _, config, _, head = loaded(saved.folder, kernels="auto")
    pool = pool_of(head, config)
    kernels = head.kernels
    assert isinstance(kernels, CpuKernels)
    states = torch.randn(ROWS, HIDDEN)
    expected = in_chunks(head, pool, tokens(ROWS), states, (ROWS - 1, 1))[-1:]
    last = SequenceSlice(tokens(ROWS)[-1:], ROWS - 1, pool.whole, Logits.LAST)
    batch = prepare([last], pool.spec.groups)

    def step(library: Library) -> Tensor:
        by_library = replace(kernels, library=library)
        layers = with_kernels(pool.layers, by_library)
        return with_kernels(head, by_library).hidden(batch, states[-1:], layers)

    recorded = record(kernels.library, Arena(1), step)
    assert recorded.obstacle == ""
    assert recorded.recording is not None
    assert torch.equal(recorded.recording.replay(), expected)


@pytest.mark.parametrize("saved", ["deepseek-v3"], indirect=True)
def test_rows_without_logits_are_left_out(saved: Saved):
    _, config, _, head = loaded(saved.folder)
    states = torch.randn(3, HIDDEN)
    pool = pool_of(head, config)
    batch = prepare([SequenceSlice([4, 5, 6], 0, pool.whole, Logits.LAST)], pool.spec.groups)
    of_last = head.hidden(batch, states, pool.layers)
    of_all = in_chunks(head, pool, [4, 5, 6], states, (3,))
    assert torch.equal(of_last, of_all[-1:])


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    save(CASES["mimo"], tmp_path)
    return tmp_path


def without(folder: Path, end: str) -> None:
    stored = load_file(folder / "model.safetensors")
    write(folder, {name: x for name, x in stored.items() if not ("mtp" in name and end in name)})


def test_a_checkpoint_without_the_tensors_has_none(changed: Path):
    without(changed, "")
    with pytest.raises(ConfigError, match=r"has no layers that predict further tokens.*mimo"):
        loaded(changed)


def test_a_config_that_says_0_has_none(changed: Path):
    config = json.loads((changed / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (changed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has no layers that predict further tokens"):
        loaded(changed)


def test_a_missing_tensor_is_named(changed: Path):
    without(changed, "input_proj")
    with pytest.raises(CheckpointError, match=r"mtp_layers\.0\.input_proj\.weight is missing"):
        loaded(changed)


def test_a_tensor_that_nothing_reads_is_named(changed: Path):
    stored = load_file(changed / "model.safetensors")
    write(changed, stored | {"model.mtp_layers.0.embed_tokens.weight": torch.ones(2, 2)})
    open_checkpoint(str(changed))  # the model alone skips it
    with pytest.raises(CheckpointError, match=r"1 tensors belong to no layer.*embed_tokens"):
        loaded(changed)


@pytest.mark.parametrize("whole", [True, False], ids=["all layers", "the model's layers"])
def test_matrices_in_blocks_of_fp8(whole: bool, tmp_path: Path):
    """As DeepSeek publishes them; and as tools leave these layers in 16 bits, and do not say so."""
    wide = DeepseekV3Config(**DEEPSEEK | {"moe_intermediate_size": 128})
    saved = save(nextn(wide), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    last = f"layers.{saved.main_layers}."
    exact = dict(stored)
    for name, matrix in stored.copy().items():
        if not name.endswith("_proj.weight") or "eh_proj" in name or (last in name and not whole):
            continue
        written, exact[name] = renamed(per_block(matrix), INVERSE)
        module = name.removesuffix("weight")
        stored |= {module + suffix: tensor for suffix, tensor in written.items()}
    states = torch.randn(ROWS, HIDDEN)
    _, config, _, expected_head = loaded_of(tmp_path, exact)
    expected = in_chunks(
        expected_head, pool_of(expected_head, config), tokens(ROWS), states, (ROWS,)
    )
    said = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(said))
    _, config, _, head = loaded_of(tmp_path, stored)
    found = in_chunks(head, pool_of(head, config), tokens(ROWS), states, (ROWS,))
    weights = [weight.data.dtype for weight in matrices_of(head)]
    assert (torch.float8_e4m3fn in weights) == whole
    if whole:  # inputs are rounded too
        assert torch.cosine_similarity(found.flatten(), expected.flatten(), 0) > 0.98
    else:
        assert (found - expected).abs().max() <= 1e-4


def loaded_of(folder: Path, stored: dict[str, Tensor]) -> Any:
    write(folder, stored)
    return loaded(folder)


def matrices_of(head: PredictingHead) -> list[Weight]:
    mixer = head.layers[0].decoder.mixer
    assert isinstance(mixer, Latent)
    return [part.weight for part in getattr(mixer.first, "parts", (mixer.first,))]
