"""tools/train_demo_model.py: what its options for long contexts change."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
import train_demo_model
from tokenizers import Tokenizer
from train_demo_model import FAMILIES, Model, record_batches, write_data

from freight.checkpoint.reader import resolve_model
from freight.lab.evaluate.retrieval import Vocabulary

DEMO = resolve_model("demo")


def test_half_of_the_records_are_earlier_ones():
    words = Vocabulary(range(100, 4000), [0], [1], [2])
    window = next(record_batches(words, 6000, 2, random.Random(0)))
    assert window.shape == (2, 6001)
    records = [tuple(record.tolist()) for record in window[0, 1:].split(6)]
    assert {record[2::3] for record in records} == {(1, 2)}  # equals and end in their places
    assert 0.4 < len(set(records)) / len(records) < 0.6


def test_context_theta_and_layers_reach_the_model_and_its_configuration(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(train_demo_model, "CALIBRATION", ["a.py"])
    family = replace(FAMILIES["llama"], theta=2e4, layers=2, context=2048)
    write_data(
        tmp_path, {"a.py": "a = 1"}, Tokenizer.from_file(str(DEMO / "tokenizer.json")), "b", family
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert (
        config["max_position_embeddings"],
        config["rope_theta"],
        config["num_hidden_layers"],
    ) == (2048, 2e4, 2)
    model = Model(family)
    assert len(model.layers) == 2
    assert model.cos.shape == (2048, 32)
    assert torch.allclose(
        model.cos[2000, 1], torch.tensor(2000 * 2e4 ** (-1 / 32)).cos(), atol=1e-3
    )
