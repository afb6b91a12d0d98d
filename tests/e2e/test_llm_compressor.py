"""llm-compressor's scripts with only the import changed: their scales are its own, and what cannot
be done is named.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.refusals import assert_names, refuses
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

from freight import LLM, CheckpointError, ConfigError, SamplingParams
from freight.checkpoint.reader import Checkpoint
from freight.llm_compressor import QuantizationArgs, QuantizationModifier, oneshot

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASE = FIXTURES / "base_bf16"
IDS = json.loads((FIXTURES / "llmcompressor_scales.json").read_text())["input_ids"]
KV_RECIPE = """
quant_stage:
    quant_modifiers:
        QuantizationModifier:
            ignore: ["lm_head"]
            config_groups:
                group_0:
                    weights:
                        num_bits: 8
                        type: float
                        strategy: tensor
                        dynamic: false
                        symmetric: true
                    input_activations:
                        num_bits: 8
                        type: float
                        strategy: tensor
                        dynamic: false
                        symmetric: true
                    targets: ["Linear"]
            kv_cache_scheme:
                num_bits: 8
                type: float
                strategy: tensor
                dynamic: false
                symmetric: true
"""
DYNAMIC = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
STATIC = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])
BLOCK = QuantizationModifier(targets="Linear", scheme="FP8_BLOCK", ignore=["lm_head"])
PER_HEAD = QuantizationModifier(
    targets="Linear",
    scheme="FP8_DYNAMIC",
    ignore=["lm_head"],
    kv_cache_scheme=QuantizationArgs(num_bits=8, type="float", strategy="attn_head"),
)


class Columns:
    """Rows as `datasets` has them."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))


def scales(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for name, t in load_file(folder / "model.safetensors").items()
        if name.endswith("_scale")
    }


def theirs(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What llm-compressor wrote: scales, and its declaration."""
    path = FIXTURES / "llmcompressor_oneshot" / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["quantization_config"])


def far(ours: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether any two bfloat16 values are more than one ulp apart."""
    assert ours.dtype is other.dtype is torch.bfloat16
    return bool(((ours.view(torch.int16).int() - other.view(torch.int16).int()).abs() > 1).any())


def declared(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())[
        "quantization_config"
    ]
    return content


def text_of(folder: Path) -> list[int]:
    llm = LLM(str(folder), kv_cache_memory="4MiB", max_model_len=128, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, ignore_eos=True)
    return list(llm.generate([1, 2, 3], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("fp8_kv", KV_RECIPE), ("fp8_dynamic", DYNAMIC), ("fp8", STATIC), ("fp8_block", BLOCK)],
)
def test_the_scripts_give_llm_compressors_scales(tmp_path: Path, name: str, recipe: Any):
    """The script's own steps, up to `model.save_pretrained` of the model that it loaded."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype="auto")
    dataset = Columns(input_ids=IDS, attention_mask=[[1] * len(ids) for ids in IDS])
    if name in ("fp8_kv", "fp8"):
        oneshot(
            model=model,
            dataset=dataset,
            recipe=recipe,
            max_seq_length=2048,
            num_calibration_samples=512,
        )
    else:
        oneshot(model=model, recipe=recipe)
    model.save_pretrained(str(tmp_path / "deep" / "out"), save_compressed=True)
    got, (other, config) = scales(tmp_path / "deep" / "out"), theirs(name)
    assert {key: (t.dtype, t.shape) for key, t in got.items()} == {
        k: (t.dtype, t.shape) for k, t in other.items()
    }
    assert [key for key in got if far(got[key], other[key])] == []
    said = declared(tmp_path / "deep" / "out")
    assert (said["format"], said["ignore"], said["quant_method"]) == (
        config["format"],
        ["lm_head"],
        "compressed-tensors",
    )
    (group,), (group_of_theirs,) = said["config_groups"].values(), config["config_groups"].values()
    for part in ("weights", "input_activations"):
        for key in ("num_bits", "type", "strategy", "dynamic", "group_size", "block_structure"):
            assert group[part][key] == group_of_theirs[part][key]
    assert bool(said.get("kv_cache_scheme")) == bool(config.get("kv_cache_scheme"))
    assert len(text_of(tmp_path / "deep" / "out")) == 4


def test_a_scale_per_head_is_llm_compressors(tmp_path: Path):
    oneshot(model=BASE, dataset=IDS, recipe=PER_HEAD, output_dir=tmp_path / "out")
    (other, _), got = theirs("head_kv"), scales(tmp_path / "out")
    finer = json.loads((tmp_path / "out" / "freight_kv_scales.json").read_text())["layers"]
    for index in range(2):
        for side in "kv":
            key = f"model.layers.{index}.self_attn.{side}_scale"
            assert not far(torch.tensor(finer[index][side]).bfloat16(), other[key].flatten())
            assert got[key].item() == pytest.approx(other[key].max().item(), rel=2**-7)


def test_a_recipe_file_and_a_list_are_recipes(tmp_path: Path):
    file = tmp_path / "recipe.yaml"
    file.write_text(KV_RECIPE)
    for number, recipe in enumerate((str(file), [KV_RECIPE], file)):
        oneshot(model=str(BASE), dataset=IDS, recipe=recipe, output_dir=tmp_path / str(number))
    first, *rest = (scales(tmp_path / str(number)) for number in range(3))
    assert all(other[name].equal(first[name]) for other in rest for name in first)
    assert len(first) == 32


def batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Two rows, padded with a token whose keys are larger."""
    length = max(len(row["ids"]) for row in rows)
    ids = [row["ids"] + [255] * (length - len(row["ids"])) for row in rows]
    mask = [[1] * len(row["ids"]) + [0] * (length - len(row["ids"])) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize(
    "dataset",
    [
        Columns(input_ids=IDS),
        {"train": Columns(input_ids=IDS), "test": Columns(input_ids=[[1, 2]])},
        [{"input_ids": torch.tensor([ids])} for ids in IDS],
        BatchEncoding({"input_ids": IDS}),
        DataLoader(
            [{"ids": ids[:40] if i % 2 else ids} for i, ids in enumerate(IDS)],
            batch_size=2,
            collate_fn=batch,
        ),
    ],
    ids=["columns", "splits", "tensors", "tokenized", "batches"],
)
def test_every_form_of_token_ids(tmp_path: Path, dataset: Any):
    rows = (
        [ids[:40] if i % 2 else ids for i, ids in enumerate(IDS)]
        if isinstance(dataset, DataLoader)
        else IDS
    )
    oneshot(model=BASE, dataset=rows, recipe=STATIC, output_dir=tmp_path / "list")
    oneshot(model=BASE, dataset=dataset, recipe=STATIC, output_dir=tmp_path / "other")
    first, second = scales(tmp_path / "list"), scales(tmp_path / "other")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_real_data_set(tmp_path: Path):
    from datasets import Dataset

    dataset = Dataset.from_dict({"input_ids": IDS}).map(lambda row: row)
    oneshot(model=BASE, dataset=dataset, recipe=STATIC, output_dir=tmp_path / "out")
    got, (other, _) = scales(tmp_path / "out"), theirs("fp8")
    assert [name for name in got if far(got[name], other[name])] == []


@pytest.fixture
def talking(tmp_path: Path) -> Path:
    """The fixture with a token for each byte, and a chat template."""
    folder = tmp_path / "talking"
    shutil.copytree(BASE, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_texts_chats_and_files_go_through_the_models_tokenizer(talking: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(talking)
    texts = [f"def f{i}(x):\n    return x * {i}\n" * 3 for i in range(4)]
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
        for text in texts
    ]
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    seen = {}
    for name, dataset, column in (
        ("ids", [list(tokenizer(text)["input_ids"]) for text in texts], "text"),
        ("texts", texts, "text"),
        ("rows", Columns(text=texts, source=["web"] * 4, messages=chats), "text"),
        ("column", Columns(body=texts), "body"),
        ("file", str(file), "text"),
        ("rendered", rendered, "text"),
        ("chats", Columns(messages=chats), "text"),
    ):
        out = tmp_path / name
        oneshot(
            model=talking,
            dataset=dataset,
            recipe=STATIC,
            output_dir=out,
            text_column=column,
            tokenizer=tokenizer,
        )
        seen[name] = scales(out)
        assert (out / "tokenizer.json").is_file()
    for name in ("texts", "rows", "column", "file"):
        assert all(torch.equal(seen[name][key], seen["ids"][key]) for key in seen["ids"])
    assert all(torch.equal(seen["chats"][key], seen["rendered"][key]) for key in seen["ids"])
    assert any(not torch.equal(seen["chats"][key], seen["ids"][key]) for key in seen["ids"])


def test_samples_and_their_length_are_limited(tmp_path: Path):
    oneshot(
        model=BASE, dataset=[ids[:9] for ids in IDS[:2]], recipe=STATIC, output_dir=tmp_path / "few"
    )
    quantized = oneshot(
        model=BASE, dataset=IDS, recipe=STATIC, max_seq_length=9, num_calibration_samples=2
    )
    quantized.save_pretrained(tmp_path / "limited")
    first, second = scales(tmp_path / "few"), scales(tmp_path / "limited")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert quantized.result is not None
    assert (quantized.result.num_samples, quantized.result.num_tokens) == (2, 18)


def test_modules_that_stay_in_16_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """`re:` begins at the name's start, targets restrict, and a pattern without a module is
    harmless.
    """
    recipe = QuantizationModifier(
        targets=["re:.*mlp"],
        scheme="FP8_DYNAMIC",
        ignore=["lm_head", "re:down", "re:.*0.mlp.down_proj", "re:.*vision"],
    )
    with caplog.at_level(logging.WARNING, "freight"):
        oneshot(model=BASE, recipe=recipe, output_dir=tmp_path / "out")
    quantized = {name.removesuffix(".weight_scale") for name in scales(tmp_path / "out")}
    every = {
        f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up", "down")
    }
    assert quantized == every - {"model.layers.0.mlp.down_proj"}
    assert [m for m in caplog.messages if "'re:down' matches no Linear module" in m]


def test_the_head_is_quantized_unless_ignored(tmp_path: Path):
    oneshot(
        model=BASE, recipe=QuantizationModifier(scheme="FP8_DYNAMIC"), output_dir=tmp_path / "out"
    )
    assert "lm_head.weight_scale" in scales(tmp_path / "out")
    with refuses(ConfigError, "recipe: lm_head", "calibrated", "add 'lm_head' to ignore"):
        oneshot(model=BASE, recipe=QuantizationModifier(scheme="FP8"), dataset=IDS)
    with refuses(ConfigError, "recipe: lm_head", "embedding", "add 'lm_head' to ignore"):
        oneshot(model="demo", recipe=QuantizationModifier(scheme="FP8_DYNAMIC"))


def test_the_cache_alone(tmp_path: Path):
    recipe = QuantizationModifier(
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}
    )
    oneshot(model=BASE, dataset=IDS, recipe=recipe, output_dir=tmp_path / "out")
    got, (other, _) = scales(tmp_path / "out"), theirs("fp8_kv")
    assert got.keys() == {name for name in other if name.endswith(("k_scale", "v_scale"))}
    assert [name for name in got if far(got[name], other[name])] == []


def test_saving_again_where_it_was_saved_changes_nothing(tmp_path: Path):
    out = tmp_path / "out"
    quantized = oneshot(model=BASE, recipe=DYNAMIC, output_dir=out)
    before = (out / "config.json").stat().st_mtime_ns
    quantized.save_pretrained(out, safe_serialization=True)
    assert (out / "config.json").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="save_compressed=False"):
        quantized.save_pretrained(tmp_path / "b", save_compressed=False)
    with refuses(ConfigError, "'push_to_hub'"):
        quantized.save_pretrained(tmp_path / "b", push_to_hub=True)


def test_a_model_changed_after_loading_is_refused():
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype="auto")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] += 1
    with refuses(ConfigError, "model.layers.1.mlp.up_proj.weight", "differs"):
        oneshot(model=model, recipe=DYNAMIC)
    with pytest.raises(ConfigError, match="without a known folder"):
        oneshot(
            model=AutoModelForCausalLM.from_config(model.config.__class__(**SMALL)), recipe=DYNAMIC
        )


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def of_yaml(modifier: str) -> str:
    return f"quant_stage:\n  quant_modifiers:\n    {modifier}"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"recipe": of_yaml("SmoothQuantModifier: {smoothing_strength: 0.8}")},
            "SmoothQuantModifier",
        ),
        (
            {"recipe": of_yaml("GPTQModifier: {scheme: W4A16}")},
            "GPTQModifier.*QuantizationModifier",
        ),
        (
            {"recipe": of_yaml("SparseGPTModifier: {sparsity: 0.5}")},
            "SparseGPTModifier.*prune",
        ),
        (
            {"recipe": of_yaml("QuantisationModifier: {scheme: FP8}")},
            "unknown .did you mean QuantizationModifier",
        ),
        (
            {"recipe": of_yaml("QuantizationModifier: {scheme: W4A16}")},
            "scheme 'W4A16'.*FP8",
        ),
        (
            {"recipe": of_yaml("QuantizationModifier: {scheme: MXFP8}")},
            "'MXFP8'.*FP8, ",
        ),
        (
            {"recipe": of_yaml("QuantizationModifier: {scheme: FP8_DYNAMC}")},
            r"unknown \(did you mean FP8_DYNAMIC",
        ),
        ({"recipe": "no_such_recipe.yaml"}, r"no_such_recipe\.yaml.*file"),
        ({"recipe": None}, "oneshot needs a recipe"),
        ({"recipe": [DYNAMIC, STATIC]}, "has 2 QuantizationModifiers"),
        (
            {"dataset": Columns(prompt=["a"], answer=["b"])},
            "dataset.*prompt, answer",
        ),
        ({"dataset": [{"prompt": "a"}]}, "dataset.*columns are prompt"),
        ({"dataset": Columns(text=[3])}, "row 0: text is 3"),
        ({"dataset": []}, "the dataset is empty"),
        ({"dataset": 3}, "dataset is 3.*path"),
        ({"dataset": None}, "give oneshot a dataset"),
        (
            {"dataset": "ultrachat_200k"},
            "ultrachat_200k.*owner",
        ),
        ({"dataset": {"a": IDS}}, "splits 'train'.*it has a"),
        (
            {"dataset": "owner/name", "splits": "train-512"},
            r"train-512.*train\[:512\]",
        ),
        ({"splits": "train"}, "one part.*omit splits"),
        ({"num_calibration_samples": 0}, "num_calibration_samples 0 must be"),
        ({"max_seq_length": 0}, "max_seq_length 0 must be"),
        ({"tokenizer": "other/model"}, "tokenizer of the model"),
        ({"data_collator": batch}, "data_collator"),
        ({"max_seq_len": 3}, "no option 'max_seq_len'"),
        ({"save_compressed": False}, "save_compressed=False"),
        ({"model": None}, "without a known folder"),
        ({"output_dir": FIXTURES}, "exists"),
    ],
)
def test_bad_input_is_refused_before_a_weight_is_read(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
):
    def opened(self: Checkpoint, folder: Path) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(Checkpoint, "__init__", opened)
    with pytest.raises(ConfigError, match=says):
        oneshot(**{"model": BASE, "dataset": IDS, "recipe": KV_RECIPE} | options)


def test_a_folder_that_is_not_there_and_modules_that_are_not():
    with pytest.raises(CheckpointError, match="there is no folder"):
        oneshot(model="/no/such/folder", recipe=DYNAMIC)
    with refuses(ConfigError, "recipe:", "'q_proj'", "Linear"):
        oneshot(model=BASE, recipe=QuantizationModifier(targets="q_proj", scheme="FP8_DYNAMIC"))
    with refuses(ConfigError, "recipe: ignore", "no module"):
        oneshot(model=BASE, recipe=QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["re:.*"]))
    with pytest.raises(CheckpointError, match="is quantized already"):
        oneshot(model=FIXTURES / "ct_docs", recipe=DYNAMIC)


def test_other_modifiers_are_named_when_imported():
    with pytest.raises(ImportError, match="no GPTQModifier; use QuantizationModifier"):
        from freight.llm_compressor import GPTQModifier  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name"):
        from freight.llm_compressor import nothing  # noqa: F401


def test_a_dataset_that_nothing_needs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "freight"):
        oneshot(model=BASE, dataset=Columns(prompt=["a"]), recipe=DYNAMIC)
    assert_names("\n".join(caplog.messages), "recipe calibrates nothing", "dataset")
