"""llm-compressor's scripts with only the import changed: their scales are its own, and what cannot
be done is named. Also around `oneshot`: run a second time, and with a data set of the hub.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
from freight.checkpoint.writer import CheckpointWriter
from freight.llm_compressor import QuantizationArgs, QuantizationModifier, oneshot

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASE = FIXTURES / "base_bf16"
IDS = json.loads((FIXTURES / "llmcompressor_scales.json").read_text())["input_ids"]
TENSOR = "{num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}"
KV_RECIPE = f"""
quant_stage:
    quant_modifiers:
        QuantizationModifier:
            ignore: ["lm_head"]
            config_groups:
                group_0:
                    weights: {TENSOR}
                    input_activations: {TENSOR}
                    targets: ["Linear"]
            kv_cache_scheme: {TENSOR}
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


def require_theirs(folder: Path, name: str, ends: tuple[str, ...] = ("_scale",)) -> None:
    """The scales of `folder` are those that llm-compressor wrote."""
    ours, (other, _) = scales(folder), theirs(name)
    assert {key: scale.shape for key, scale in ours.items()} == {
        key: scale.shape for key, scale in other.items() if key.endswith(ends)
    }
    assert [key for key in ours if far(ours[key], other[key])] == []


def assert_same(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == other.keys()
    assert all(torch.equal(ours[name], other[name]) for name in ours)


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
    columns = Columns(input_ids=IDS, attention_mask=[[1] * len(ids) for ids in IDS])
    data = {"dataset": columns, "max_seq_length": 2048, "num_calibration_samples": 512}
    oneshot(model=model, recipe=recipe, **(data if name in ("fp8_kv", "fp8") else {}))
    out = tmp_path / "deep" / "out"
    model.save_pretrained(str(out), save_compressed=True)
    require_theirs(out, name)
    config, ours = theirs(name)[1], declared(out)
    assert (ours["format"], ours["ignore"]) == (config["format"], ["lm_head"])
    assert ours["quant_method"] == "compressed-tensors"
    (group,), (group_of_theirs,) = ours["config_groups"].values(), config["config_groups"].values()
    for part in ("weights", "input_activations"):
        for key in ("num_bits", "type", "strategy", "dynamic", "group_size", "block_structure"):
            assert group[part][key] == group_of_theirs[part][key]
    assert bool(ours.get("kv_cache_scheme")) == bool(config.get("kv_cache_scheme"))
    assert len(text_of(out)) == 4


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
        require_theirs(tmp_path / str(number), "fp8_kv")


def batch(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Two rows, padded with a token whose keys are larger."""
    length = max(len(row["ids"]) for row in rows)
    ids = [row["ids"] + [255] * (length - len(row["ids"])) for row in rows]
    mask = [[1] * len(row["ids"]) + [0] * (length - len(row["ids"])) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def test_every_form_of_token_ids(tmp_path: Path):
    from datasets import Dataset

    cut = [{"ids": ids[:40] if i % 2 else ids} for i, ids in enumerate(IDS)]
    forms: dict[str, Any] = {
        "columns": Columns(input_ids=IDS),
        "splits": {"train": Columns(input_ids=IDS), "test": Columns(input_ids=[[1, 2]])},
        "tensors": [{"input_ids": torch.tensor([ids])} for ids in IDS],
        "tokenized": BatchEncoding({"input_ids": IDS}),
        "datasets": Dataset.from_dict({"input_ids": IDS}).map(lambda row: row),
        "list, cut": [row["ids"] for row in cut],
        "batches": DataLoader(cut, batch_size=2, collate_fn=batch),
    }
    for name, dataset in forms.items():
        oneshot(model=BASE, dataset=dataset, recipe=STATIC, output_dir=tmp_path / name)
        if name not in ("list, cut", "batches"):
            require_theirs(tmp_path / name, "fp8")
    assert_same(scales(tmp_path / "batches"), scales(tmp_path / "list, cut"))


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
    answer = {"role": "assistant", "content": "yes"}
    chats = [[{"role": "user", "content": text}, answer] for text in texts]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    datasets: dict[str, Any] = {
        "ids": [list(tokenizer(text)["input_ids"]) for text in texts],
        "texts": texts,
        "rows": Columns(text=texts, source=["web"] * 4, messages=chats),
        "column": Columns(body=texts),
        "file": str(file),
        "rendered": [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats],
        "chats": Columns(messages=chats),
    }
    written = {}
    for name, dataset in datasets.items():
        out, column = tmp_path / name, "body" if name == "column" else "text"
        more = {"text_column": column, "tokenizer": tokenizer, "output_dir": out}
        oneshot(model=talking, dataset=dataset, recipe=STATIC, **more)
        written[name] = scales(out)
        assert (out / "tokenizer.json").is_file()
    for name in ("texts", "rows", "column", "file"):
        assert_same(written[name], written["ids"])
    assert_same(written["chats"], written["rendered"])
    assert any(not written["chats"][key].equal(scale) for key, scale in written["ids"].items())


def test_samples_and_their_length_are_limited(tmp_path: Path):
    few = [ids[:9] for ids in IDS[:2]]
    oneshot(model=BASE, dataset=few, recipe=STATIC, output_dir=tmp_path / "few")
    limits: dict[str, Any] = {"max_seq_length": 9, "num_calibration_samples": 2}
    quantized = oneshot(model=BASE, dataset=IDS, recipe=STATIC, **limits)
    quantized.save_pretrained(tmp_path / "limited")
    assert_same(scales(tmp_path / "limited"), scales(tmp_path / "few"))
    assert quantized.result is not None
    assert (quantized.result.num_samples, quantized.result.num_tokens) == (2, 18)


def test_modules_that_stay_in_16_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """`re:` begins at the name's start, targets restrict, and a pattern without a module is
    harmless.
    """
    ignore = ["lm_head", "re:down", "re:.*0.mlp.down_proj", "re:.*vision"]
    recipe = QuantizationModifier(targets=["re:.*mlp"], scheme="FP8_DYNAMIC", ignore=ignore)
    with caplog.at_level(logging.WARNING, "freight"):
        oneshot(model=BASE, recipe=recipe, output_dir=tmp_path / "out")
    quantized = {name.removesuffix(".weight_scale") for name in scales(tmp_path / "out")}
    parts = ("0.mlp.gate", "0.mlp.up", "1.mlp.gate", "1.mlp.up", "1.mlp.down")
    assert quantized == {f"model.layers.{part}_proj" for part in parts}
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
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    recipe = QuantizationModifier(kv_cache_scheme=scheme)
    oneshot(model=BASE, dataset=IDS, recipe=recipe, output_dir=tmp_path / "out")
    require_theirs(tmp_path / "out", "fp8_kv", ("k_scale", "v_scale"))


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
    config = model.config.__class__(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ConfigError, match="without a known folder"):
        oneshot(model=AutoModelForCausalLM.from_config(config), recipe=DYNAMIC)


def of_yaml(modifier: str) -> dict[str, str]:
    return {"recipe": f"quant_stage:\n  quant_modifiers:\n    {modifier}"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (of_yaml("SmoothQuantModifier: {smoothing_strength: 0.8}"), "no QuantizationModifier"),
    (of_yaml("QuIPModifier: {rotations: [v]}"), "QuIPModifier.*SpinQuantModifier"),
    (of_yaml("SparseGPTModifier: {sparsity: 0.5}"), "SparseGPTModifier.*prune"),
    (of_yaml("QuantisationModifier: {scheme: FP8}"), "unknown .did you mean QuantizationModifier"),
    (of_yaml("QuantizationModifier: {scheme: W4A8}"), "scheme 'W4A8'.*choose W4A16"),
    (of_yaml("QuantizationModifier: {scheme: MXFP8}"), "'MXFP8'.*FP8_DYNAMIC"),
    (of_yaml("QuantizationModifier: {scheme: FP8_DYNAMC}"), r"unknown \(did you mean FP8_DYNAMIC"),
    ({"recipe": "no_such_recipe.yaml"}, r"no_such_recipe\.yaml.*file"),
    ({"recipe": None}, "oneshot needs a recipe"),
    ({"recipe": [DYNAMIC, STATIC]}, "has 2 modifiers that quantize"),
    ({"dataset": Columns(prompt=["a"], answer=["b"])}, "dataset.*prompt, answer"),
    ({"dataset": [{"prompt": "a"}]}, "dataset.*columns are prompt"),
    ({"dataset": Columns(text=[3])}, "row 0: text is 3"),
    ({"dataset": []}, "the dataset is empty"),
    ({"dataset": 3}, "dataset is 3.*path"),
    ({"dataset": None}, "give oneshot a dataset"),
    ({"dataset": "ultrachat_200k"}, "ultrachat_200k.*owner"),
    ({"dataset": {"a": IDS}}, "splits 'train'.*it has a"),
    ({"dataset": "owner/name", "splits": "train-512"}, r"train-512.*train\[:512\]"),
    ({"splits": "train"}, "one part.*omit splits"),
    ({"num_calibration_samples": 0}, "num_calibration_samples 0 must be"),
    ({"max_seq_length": 0}, "max_seq_length 0 must be"),
    ({"tokenizer": "other/model"}, "tokenizer of the model"),
    ({"data_collator": batch}, "data_collator"),
    ({"max_seq_len": 3}, "no option 'max_seq_len'"),
    ({"save_compressed": False}, "save_compressed=False"),
    ({"model": None}, "without a known folder"),
    ({"output_dir": FIXTURES}, "exists"),
]


def test_bad_input_is_refused_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch):
    def opened(self: Checkpoint, folder: Path) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(Checkpoint, "__init__", opened)
    for options, says in REFUSED:
        with pytest.raises(ConfigError, match=says):
            oneshot(**{"model": BASE, "dataset": IDS, "recipe": KV_RECIPE} | options)


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
    out, source = tmp_path / "out", tmp_path / "source"
    oneshot(model=BASE, recipe=DYNAMIC, output_dir=out)
    (out / "notes.md").write_text("mine")
    for options in ({"output_dir": out}, {}):
        with refuses(ConfigError, str(out), "exists", "notes.md"):
            oneshot(model=BASE, recipe=DYNAMIC, **options).save_pretrained(out)
    assert (out / "notes.md").read_text() == "mine"
    with CheckpointWriter(source) as writer:  # 16-bit weights that Freight wrote, as by `convert`
        writer.add(load_file(BASE / "model.safetensors"))
        writer.finish(json.loads((BASE / "config.json").read_text()), BASE)
    for options in ({"output_dir": source}, {}):
        with pytest.raises(ConfigError, match="is the model itself"):
            oneshot(model=source, recipe=DYNAMIC, **options).save_pretrained(source)


def test_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "HuggingFaceH4/ultrachat_200k"
    rows = [{"input_ids": ids} for ids in IDS[:3]]
    splits = {"train_sft": rows, "test_sft": rows[:1]}
    hub = SimpleNamespace(load_dataset=lambda asked: {name: splits}[asked])
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 3),
        ({"splits": "train_sft[:2]"}, 2),
        ({"splits": {"calibration": "test_sft"}}, 1),
    ]
    for options, count in cases:
        hubs, lists = tmp_path / f"hub{count}", tmp_path / f"list{count}"
        oneshot(model=BASE, dataset=name, recipe=STATIC, output_dir=hubs, **options)
        oneshot(model=BASE, dataset=IDS[:count], recipe=STATIC, output_dir=lists)
        assert_same(scales(hubs), scales(lists))


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
    with pytest.raises(ImportError, match="no AutoRoundModifier; use GPTQModifier"):
        from freight.llm_compressor import AutoRoundModifier  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name"):
        from freight.llm_compressor import nothing  # noqa: F401


def test_a_dataset_that_nothing_needs_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "freight"):
        oneshot(model=BASE, dataset=Columns(prompt=["a"]), recipe=DYNAMIC)
    assert_names("\n".join(caplog.messages), "recipe calibrates nothing", "dataset")
