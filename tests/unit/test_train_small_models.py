"""tools/train_small_models.py, and the models in tests/fixtures/hybrids and latents that it
trained.
"""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import train_small_models
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from freight.checkpoint.reader import resolve_model
from freight.lab.evaluate.retrieval import Vocabulary

FIXTURES = Path(__file__).parents[1] / "fixtures"
HYBRIDS, LATENT = ("hybrids/delta_net", "hybrids/mamba2"), "latents/deepseek_v3"
CONTEXT, WINDOWS = 256, 8  # of the log's line that is read


def held_out_windows(fixture: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids [WINDOWS, CONTEXT], the next tokens, and their bytes."""
    tokenizer = Tokenizer.from_file(str(fixture / "tokenizer.json"))
    encoded = tokenizer.encode((resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8"))
    ids = encoded.ids[: WINDOWS * CONTEXT + 1]
    num_bytes = len(tokenizer.decode(ids[1:]).encode())
    stream = torch.tensor(ids)
    return stream[:-1].view(WINDOWS, CONTEXT), stream[1:].view(WINDOWS, CONTEXT), num_bytes


def logged_bits(fixture: Path, states: str) -> float:
    log = (fixture / "training.log").read_text()
    line = f"held out, first {WINDOWS} windows of {CONTEXT} tokens, states {states}: "
    return float(re.findall(re.escape(line) + r"(\S+) bits per byte", log)[0])


@pytest.mark.parametrize("kind", [*HYBRIDS, LATENT])
@torch.inference_mode()
def test_the_fixture_reaches_the_bits_per_byte_of_its_log(kind: str):
    fixture = FIXTURES / kind
    model = AutoModelForCausalLM.from_pretrained(fixture, dtype=torch.float32).eval()
    ids, targets, num_bytes = held_out_windows(fixture)
    losses = F.cross_entropy(model(input_ids=ids).logits.transpose(1, 2), targets, reduction="sum")
    bits = float(losses) / math.log(2) / num_bytes
    assert abs(bits - logged_bits(fixture, "kept")) < 0.01
    assert (
        bits < 0.75 * math.log2(train_small_models.VOCAB) * targets.numel() / num_bytes
    )  # of a uniform guess
    if kind in HYBRIDS:
        without = logged_bits(fixture, "set to 0 every 64 tokens")
        assert without > bits + 0.01  # its states carry memory


@pytest.mark.parametrize(
    ("kind", "most_bytes"), [(HYBRIDS[0], 1.6e6), (HYBRIDS[1], 1.6e6), (LATENT, 3.7e6)]
)
def test_the_fixture_is_small_and_in_bfloat16(kind: str, most_bytes: float):
    assert sum(path.stat().st_size for path in (FIXTURES / kind).iterdir()) <= most_bytes
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / kind, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    if kind in HYBRIDS:
        assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    else:
        assert model.config.kv_lora_rank == 256


def test_known_are_the_words_of_a_record_told_before():
    words = Vocabulary(range(100, 4000), [0], [1], [2])
    ids, known = train_small_models.record_row(words, 6000, random.Random(0))
    assert len(ids) == len(known) == 6001
    assert not known[0]
    told: dict[tuple[int, ...], list[int]] = {}
    for at in range(1, 6001, 6):
        first, second, equals, *value, end = ids[at : at + 6]
        assert (equals, end) == (1, 2)
        again = (first, second) in told
        assert known[at : at + 6] == [False, again, False, again, again, False]
        assert told.setdefault((first, second), value) == value
    assert 0.2 < len(told) / 1000 < 0.4
