"""`Decoder.hidden_with`: the streams behind layers, against transformers' `output_hidden_states`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.random_models import save_random, tokens
from tests.parity.variants import VARIANTS

from freight.cache.pool import KVPool, allocate_pool
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.model.decoder import Decoder
from freight.model.open import open_model
from freight.settings.engine import EngineArgs

KINDS = {
    "llama-llama3": (1, 0),
    "granite": (0, 1),  # the stream is divided by the residual multiplier
    "gemma2": (2, 0),  # what is added is normed first
    "olmo2": (0, 1),  # no input is normed
    "opt-350m": (0, 1),  # sums are normed, and the last projected
    "gemma4-own-inputs": (0, 3),  # a factor of the sum, and inputs of each layer
    "muse-glimmer": (0, 1),  # norms of outputs have another epsilon
    "granite-h": (0, 1),
    "nemotron-h": (0, 1, 2),  # layers of one part each
}
TOKENS = tokens(70)


def load(folder: Path, **more: Any) -> tuple[Decoder, KVPool]:
    args = EngineArgs(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, activations="bfloat16", **more
    )
    opened = open_model(args)
    config = opened.resolve(args)
    decoder = opened.load(config)
    assert isinstance(decoder, Decoder)
    spec = opened.cache_spec(config)
    blocks = [-(-len(TOKENS) // config.block_size)] * len(spec.groups)
    pool = allocate_pool(
        spec, config.kv, blocks, decoder.kernels, rotaries=decoder.rotaries, stages=decoder.stages
    )
    return decoder, pool


def features(
    decoder: Decoder, pool: KVPool, layers: tuple[int, ...], cuts: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of TOKENS in chunks that end at `cuts`: final states of each chunk's last row, features of all rows."""
    states = []
    rows = []
    first = 0
    for end in (*cuts, len(TOKENS)):
        part = SequenceSlice(TOKENS[first:end], first, pool.whole, Logits.LAST)
        batch = prepare([part], pool.spec.groups)
        with torch.inference_mode():
            state, of_rows = decoder.hidden_with(batch, pool.layers, layers)
            if not pool.states:  # it would pass them twice
                assert torch.equal(state, decoder.hidden(batch, pool.layers))
        states.append(state)
        rows.append(of_rows)
        first = end
    return torch.cat(states), torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save_random(VARIANTS[kind], tmp_path, torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    layers = KINDS[kind]
    decoder, pool = load(tmp_path)
    state, rows = features(decoder, pool, layers)
    behind = torch.cat([expected[index + 1][0] for index in layers], 1)
    torch.testing.assert_close(rows, behind, atol=1e-4, rtol=1e-4)
    decoder, pool = load(tmp_path)
    last, rows = features(decoder, pool, ())
    assert torch.equal(last, rows[-1:])
    assert torch.equal(last, state)
    projection = decoder.logits_head.projection
    projected = rows if projection is None else projection(rows)
    torch.testing.assert_close(projected, expected[-1][0], atol=1e-4, rtol=1e-4)


def test_chunks_and_stages_change_no_bit(tmp_path: Path) -> None:
    save_random(VARIANTS["granite"], tmp_path, torch.float32)
    for layers in ((2, 0), ()):
        whole = features(*load(tmp_path), layers)[1]
        for cuts in ((31,), tuple(range(1, len(TOKENS)))):
            assert torch.equal(features(*load(tmp_path), layers, cuts)[1], whole)
        assert torch.equal(features(*load(tmp_path, pipeline_parallel_size=2), layers)[1], whole)
