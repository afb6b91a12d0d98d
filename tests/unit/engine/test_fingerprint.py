"""Which models' bits are promised: `x-freight-reproducible` says it to clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats.four_bits import FORMS, write
from transformers import AutoModelForCausalLM, PhiConfig

from freight.engine.fingerprint import fingerprint, is_reproducible
from freight.model.open import OpenModel, open_model
from freight.parallel.ranks import Ranks
from freight.settings.engine import EngineArgs


@pytest.fixture
def through_transformers(tmp_path: Path) -> OpenModel:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = PhiConfig(**shape, num_attention_heads=2, dtype=torch.float32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return open_model(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, device="cpu"))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_bits_are_promised_of_native_models_on_compiled_kernels(
    kernels: str, through_transformers: OpenModel
) -> None:
    args = EngineArgs(device="cpu", kernels=kernels)
    native = open_model(args)
    kernel_set = native.kernels(native.resolve(args))
    assert is_reproducible(native, kernel_set) is (kernels == "auto")
    assert through_transformers.model.foreign is not None
    assert not is_reproducible(through_transformers, kernel_set)


def test_what_is_declared_counts(tmp_path: Path) -> None:
    """The same tensors have other values where config.json says so."""
    found = set()
    for format in ("gptq", "gptq_v2"):
        written = write(FORMS["gptq zeros"])
        said = FORMS["gptq zeros"].said | {"checkpoint_format": format}
        written.config["quantization_config"] = said
        folder = str(written.save(tmp_path))
        args = EngineArgs(folder, device="cpu", kernels="reference", skip_tokenizer_init=True)
        opened = open_model(args)
        config = opened.resolve(args)
        found.add(fingerprint(opened, config, opened.kernels(config), "1"))
    assert len(found) == 2


def test_ranks_count_where_torch_multiplies() -> None:
    """On a GPU products of many rows are torch's, of a part of a matrix; stages have whole ones."""

    def found(ranks: int, **options: Any) -> str:
        opened = open_model(EngineArgs(device="cpu", kernels="reference", **options))
        config = opened.resolve(opened.args)
        transport: Any = None if ranks == 1 else object()
        divided = replace(opened, ranks=Ranks(0, ranks, transport))
        return fingerprint(divided, config, opened.kernels(config), "1")

    assert len({found(1), found(2), found(4)}) == 3
    assert found(1) == found(1, pipeline_parallel_size=2)
    assert found(1, exact_products=True) == found(2, exact_products=True) != found(1)


def test_ranks_do_not_count_on_compiled_kernels() -> None:
    opened = open_model(EngineArgs(device="cpu"))
    config = opened.resolve(opened.args)
    kernels = opened.kernels(config)
    transport: Any = object()
    divided = replace(opened, ranks=Ranks(0, 2, transport))
    assert fingerprint(divided, config, kernels, "1") == fingerprint(opened, config, kernels, "1")
