"""FP8Cache copied, pickled, saved, and filled in inference mode: it is continued with the same
tokens.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tests.unit.compat.test_transformers_cache import BYTES, MIXED, SHAPE, WINDOW, filled, states
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from freight.transformers import FP8Cache


def through_torch_save(cache: FP8Cache) -> FP8Cache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def through_pickle(cache: FP8Cache) -> FP8Cache:
    return pickle.loads(pickle.dumps(cache))  # type: ignore[no-any-return]


TINY = LlamaConfig(vocab_size=64, intermediate_size=64, **SHAPE)
TINY_WINDOW = MistralConfig(vocab_size=64, intermediate_size=64, sliding_window=WINDOW, **SHAPE)


@pytest.mark.parametrize("config", [TINY, TINY_WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("scales", ["dynamic", "0.03"])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("filled_under", [torch.inference_mode, torch.no_grad])
def test_a_copy_generates_the_same_tokens(
    config: Any, scales: str, copied: Any, filled_under: Any
) -> None:
    """A prompt is computed once, in inference mode too, and the copy of its cache is continued by
    `generate`.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (2, 12))
    how = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, past_key_values=FP8Cache(config, kv_scales=scales), **how)
    first = FP8Cache(config, kv_scales=scales)
    with filled_under():
        model(ids[:, :11], past_key_values=first)
    second = copied(first)
    for cache in (second, first, copied(FP8Cache(config, kv_scales=scales))):
        assert torch.equal(model.generate(ids, past_key_values=cache, **how), want)
        for layer in cache.layers:
            assert (
                layer.keys.data_ptr() == layer.tokens[0].stored.data_ptr()
            )  # a view: no second copy in memory


def test_what_inference_mode_began_is_changed_outside_of_it() -> None:
    """By every operation that writes: growth, beams, a crop."""
    ours, theirs = FP8Cache(MIXED), FP8Cache(MIXED)
    for cache, mode in ((ours, True), (theirs, False)):
        with torch.inference_mode(mode):
            filled(cache, 3)
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([1, 0, 3, 2]))
        for layer in range(2):
            cache.update(states(4, 1, layer), states(4, 1, layer + 9), layer)
        cache.batch_select_indices(torch.tensor([0, 3]))
        filled(cache, 40)
    for layer in range(2):
        assert torch.equal(
            ours.layers[layer].keys.view(BYTES), theirs.layers[layer].keys.view(BYTES)
        )
