"""Scripts of llm-compressor around `oneshot`: run a second time, and with a data set of the hub by
its name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.refusals import refuses

from freight import ConfigError
from freight.checkpoint.writer import CheckpointWriter
from freight.llm_compressor import QuantizationModifier, oneshot

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASE = FIXTURES / "base_bf16"
IDS = json.loads((FIXTURES / "llmcompressor_scales.json").read_text())["input_ids"]
DYNAMIC = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
STATIC = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])


def scales(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for name, t in load_file(folder / "model.safetensors").items()
        if name.endswith("_scale")
    }


def declared(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())[
        "quantization_config"
    ]
    return content


def test_the_script_run_again_replaces_what_it_wrote(tmp_path: Path):
    out = tmp_path / "out"
    for recipe in (STATIC, DYNAMIC):
        oneshot(model=BASE, dataset=IDS, recipe=recipe).save_pretrained(out)
        (out / "tokenizer_config.json").write_text("{}")  # as tokenizer.save_pretrained does
    oneshot(model=BASE, recipe=DYNAMIC, output_dir=tmp_path / "fresh")
    assert scales(out).keys() == scales(tmp_path / "fresh").keys()
    assert declared(out) == declared(tmp_path / "fresh")
    oneshot(model=BASE, recipe=DYNAMIC, output_dir=out)
    assert not (out / "tokenizer_config.json").exists()


def test_a_folder_that_freight_did_not_write_is_never_replaced(tmp_path: Path):
    out = tmp_path / "out"
    oneshot(model=BASE, recipe=DYNAMIC, output_dir=out)
    (out / "notes.md").write_text("mine")
    for options in ({"output_dir": out}, {}):
        with refuses(ConfigError, str(out), "exists", "notes.md"):
            oneshot(model=BASE, recipe=DYNAMIC, **options).save_pretrained(out)
    assert (out / "notes.md").read_text() == "mine"
    source = tmp_path / "source"
    with CheckpointWriter(
        source
    ) as writer:  # 16-bit weights that Freight wrote, as `freight convert` does
        writer.add(load_file(BASE / "model.safetensors"))
        writer.finish(json.loads((BASE / "config.json").read_text()), BASE)
    for options in ({"output_dir": source}, {}):
        with pytest.raises(ConfigError, match="is the model itself"):
            oneshot(model=source, recipe=DYNAMIC, **options).save_pretrained(source)


@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, 8), ({"splits": "train_sft[:2]"}, 2), ({"splits": {"calibration": "test_sft"}}, 1)],
)
def test_a_data_set_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], rows: int
):
    found = {
        "train_sft": [{"input_ids": ids} for ids in IDS[:8]],
        "test_sft": [{"input_ids": IDS[0]}],
    }
    hub = SimpleNamespace(load_dataset=lambda name: {"HuggingFaceH4/ultrachat_200k": found}[name])
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    oneshot(
        model=BASE,
        dataset="HuggingFaceH4/ultrachat_200k",
        recipe=STATIC,
        output_dir=tmp_path / "hub",
        **options,
    )
    oneshot(model=BASE, dataset=IDS[:8][:rows], recipe=STATIC, output_dir=tmp_path / "list")
    ours, same = scales(tmp_path / "hub"), scales(tmp_path / "list")
    assert all(torch.equal(ours[name], same[name]) for name in same)
