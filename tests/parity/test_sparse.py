"""Sparse attention beyond `index_topk` tokens, as transformers computes it: with keys of the indexer in
float32, which are neither multiplied by a Hadamard matrix nor quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.parity.random_models import save_random, tokens
from tests.parity.shapes import INDEXER, LATENT, MSCALE
from transformers import DeepseekV32Config, GlmMoeDsaConfig, PretrainedConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from freight.cache.pool import allocate_pool
from freight.engine.runner import ModelRunner
from freight.fp8.formats import Format
from freight.kernels import reference_sparse
from freight.kernels.select import select_kernels
from freight.model.config.latent import beyond_dense
from freight.model.open import open_model
from freight.model.sizes import Layout, loaded_bytes
from freight.model.weight_bytes import weight_bytes
from freight.settings.engine import EngineArgs

LENGTH = 100
# scores that differ by less are chosen by how they round
NEAR = 1e-5
SHAPE: dict[str, Any] = {**LATENT, **INDEXER, "n_group": 1, "topk_group": 1}
TWO: dict[str, Any] = {**SHAPE, "num_hidden_layers": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "deepseek": DeepseekV32Config(**TWO, first_k_dense_replace=1, rope_parameters=MSCALE),
    "glm": GlmMoeDsaConfig(**TWO, mlp_layer_types=["dense", "sparse"]),
    "glm-shared": GlmMoeDsaConfig(
        **{**SHAPE, "num_hidden_layers": 4, "index_n_heads": 5},
        indexer_types=["full", "shared", "full", "shared"],
        mlp_layer_types=["dense"] * 4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
}
Choices = list[list[set[int]]]  # by indexer and row
Calls = list[tuple[int, torch.Tensor]]  # position of the first row of a tile, and its rows' keys


def model_of(name: str, topk: int, folder: Path) -> Any:
    config = CONFIGS[name]
    return save_random(
        type(config)(**config.to_dict() | {"index_topk": topk}), folder, torch.float32
    )


class Best(NamedTuple):
    indices: torch.Tensor


@contextmanager
def their_choices(chosen: Choices, scores: list[torch.Tensor]) -> Iterator[None]:
    """Collect what their indexers choose, and the scores they choose by. Of equal scores, as the zeros
    where no head agrees with a key, they take the lowest positions, as Freight does; `torch.topk` takes
    any.
    """
    kinds = (DeepseekV32Indexer, GlmMoeDsaIndexer)
    forwards = [kind.forward for kind in kinds]

    def lowest(self: torch.Tensor, count: int, dim: int) -> Best:
        scores.append(self[0].clone())
        order = torch.sort(self + 0.0, dim=dim, descending=True, stable=True).indices
        return Best(order[..., :count])

    def collecting(forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "topk", lowest)
                indices: torch.Tensor = forward(*args, **kwargs)
            rows = indices[0].tolist()
            chosen.append([{key for key in keys if key <= row} for row, keys in enumerate(rows)])
            return indices

        return run

    with pytest.MonkeyPatch.context() as patch:
        for kind, forward in zip(kinds, forwards, strict=True):
            patch.setattr(kind, "forward", collecting(forward))
        yield


def run(
    folder: Path, ids: Sequence[int], chunks: Sequence[int], kv: str = "auto"
) -> tuple[torch.Tensor, Choices]:
    """Logits of every token, [len(ids), vocab_size], computed in chunks that begin at these positions,
    and what each indexer chose for each row; nothing where rows read all keys.
    """
    args = EngineArgs(
        model=str(folder),
        kernels="reference",
        kv_cache_dtype=kv,
        skip_tokenizer_init=True,
        activations="bfloat16",
    )
    opened = open_model(args)
    opened = replace(opened, model=beyond_dense(opened.model))
    config = opened.resolve(opened.args)
    kernels = select_kernels("reference")
    decoder = opened.load(config)
    spec = opened.cache_spec(config)
    pool = allocate_pool(spec, config.kv, [-(-len(ids) // config.block_size)], kernels)
    runner = ModelRunner(decoder, pool, "cpu")
    logits = []
    with our_choices() as calls:
        for begin, end in zip(chunks, [*chunks[1:], len(ids)], strict=True):
            logits.append(runner.logits(list(ids[begin:end]), begin, pool.whole))
    indexers = sum(mixer.index_dim > 0 for mixer in opened.model.paged.values())
    return torch.cat(logits), by_indexer(calls, indexers, len(ids))


@contextmanager
def our_choices() -> Iterator[Calls]:
    """Collect what indexers choose for one sequence, tile by tile."""
    calls: Calls = []
    choose = reference_sparse.highest

    def watched(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
        calls.append((int(seen[0].sum()) - 1, choose(scores, seen, count)))
        return calls[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_sparse, "highest", watched)
        yield calls


def by_indexer(calls: Calls, indexers: int, length: int) -> Choices:
    chosen: Choices = [[set() for _ in range(length)] for _ in range(indexers)]
    turn = dict.fromkeys(range(length), 0)
    for first, keys in calls:
        at = turn[first]
        for row, of_row in enumerate(keys.tolist()):
            chosen[at][first + row] = {key for key in of_row if key >= 0}
        turn[first] = at + 1
    return chosen


def rows_alike(theirs: Choices, ours: Choices, scores: list[torch.Tensor], topk: int) -> int:
    """Rows before the first whose choice differs, where scores are as near as rounding; those after it
    read what it made. Rows of ours that are empty read all keys.
    """
    alike = len(ours[0])
    for of_theirs, of_ours, by_score in zip(theirs, ours, scores, strict=True):
        for row in range(alike):
            others = of_theirs[row] ^ (of_ours[row] or set(range(row + 1)))
            if others:
                visible = by_score[row, : row + 1]
                cut = visible.topk(topk).values[-1]
                assert all(abs(visible[key] - cut) <= NEAR for key in others)
                alike = row
                break
    return alike


@pytest.mark.parametrize("topk", [8, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_choices_equal_transformers(name: str, topk: int, tmp_path: Path) -> None:
    """In one chunk, in several, and token by token behind a prompt, which all have the same bits."""
    model, ids = model_of(name, topk, tmp_path), tokens(LENGTH)
    theirs: Choices = []
    scores: list[torch.Tensor] = []
    with torch.no_grad(), their_choices(theirs, scores):
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    logits, ours = run(tmp_path, ids, [0])
    assert len(theirs) == len(ours) == len(scores) == 2
    alike = rows_alike(theirs, ours, scores, topk)
    assert alike > topk
    assert (logits - expected)[:alike].abs().max() <= 1e-4
    several, _ = run(tmp_path, ids, [0, 5, 40, 41, 77])
    assert torch.equal(several, logits)
    decoded, _ = run(tmp_path, ids, [0, *range(topk - 2, LENGTH)])
    assert torch.equal(decoded, logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_not_dense_and_a_choice_is_read(name: str, tmp_path: Path) -> None:
    """Beyond index_topk tokens, and there alone, other keys change the logits."""
    model_of(name, 8, tmp_path)
    ids = tokens(40)
    sparse, _ = run(tmp_path, ids, [0])
    with pytest.MonkeyPatch.context() as patch:
        lowest = reference_sparse.highest
        patch.setattr(reference_sparse, "highest", lambda scores, *rest: lowest(-scores, *rest))
        others, _ = run(tmp_path, ids, [0])
    assert torch.equal(sparse[:8], others[:8])
    assert ((sparse - others)[12:].abs().amax(-1) > 1e-3).all()


def test_a_loaded_model_takes_the_bytes_that_were_counted(tmp_path: Path) -> None:
    model_of("glm-shared", 8, tmp_path)
    opened = open_model(EngineArgs(str(tmp_path), kernels="reference", skip_tokenizer_init=True))
    dense = opened.model
    opened = replace(opened, model=beyond_dense(dense))
    config = opened.resolve(opened.args)
    loaded = weight_bytes(opened.load(config))
    facts = Format.FLOAT32, *opened.matrices(config), Layout.PLAIN, config.max_model_len
    counted = loaded_bytes(opened.model, *facts)
    assert loaded.layers == counted.layers
    assert counted.layers > loaded_bytes(dense, *facts).layers


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_quantized_keys_choose_alike_in_any_chunks(kv: str, tmp_path: Path) -> None:
    """The same bits in one chunk, several, and token by token; mostly the keys that float32 chooses."""
    model_of("glm-shared", 8, tmp_path)
    ids = tokens(60)
    _, exact = run(tmp_path, ids, [0])
    logits, chosen = run(tmp_path, ids, [0], kv)
    for chunks in ([0, 5, 40, 41], [0, *range(6, 60)]):
        assert torch.equal(run(tmp_path, ids, chunks, kv)[0], logits)
    shared = sum(len(a & b) for a, b in zip(exact[0], chosen[0], strict=True))
    assert shared >= 0.8 * sum(map(len, exact[0]))
