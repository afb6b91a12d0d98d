"""What a folder declares about pooling: files of sentence-transformers as it saves them itself, those
of published models as far as they are known, and heads of transformers.
"""

from __future__ import annotations

import json
import logging
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pooling_models import DEMO, HIDDEN, copied, demo_tokenizer, save_body, save_embedder
from tests.refusals import assert_names, refuses

from freight.checkpoint import reader
from freight.errors import CheckpointError, ConfigError
from freight.model.config.pooling import PoolingActivation, PoolingConfig, PoolingKind, PoolingLayer
from freight.model.pooling_files import read_pooling
from freight.pooling import PoolingTask

TANH = PoolingActivation.TANH
LOGITS = PoolingActivation.IDENTITY
PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": ""}


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def read(folder: Path, option: str | None = None, encoder: bool = False) -> PoolingConfig | None:
    config = config_of(folder)
    return read_pooling(folder, config, config["hidden_size"], option, encoder)


def declared(folder: Path, **options: Any) -> PoolingConfig:
    pooling = read(folder, **options)
    assert pooling is not None
    return pooling


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def change(folder: Path, name: str, **keys: Any) -> None:
    """Set keys of a JSON file, None to take one out."""
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    content = {key: value for key, value in {**content, **keys}.items() if value is not None}
    write(folder, {name: content})


# as sentence-transformers saves them


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_body(tmp_path_factory.mktemp("body"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, body: Path) -> Path:
    """A model with all kinds of modules that are read."""
    st = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    base = pytest.importorskip("sentence_transformers.base.modules")
    folder = tmp_path_factory.mktemp("saved")
    dense = [
        base.Dense(HIDDEN, 24),
        base.Dense(24, 20, bias=False, activation_function=torch.nn.Identity()),
    ]
    modules = [st.Pooling(HIDDEN, "mean"), *dense, base.Normalize()]
    save_embedder(folder, body, modules, prompts=PROMPTS, default_prompt_name="query")
    return folder


def test_every_module_of_an_embedder(saved: Path) -> None:
    assert declared(saved) == PoolingConfig(
        PoolingTask.EMBED,
        PoolingKind.MEAN,
        20,
        (
            PoolingLayer("linear.weight", "linear.bias", HIDDEN, 24, TANH, folder="2_Dense"),
            PoolingLayer("linear.weight", None, 24, 20, LOGITS, folder="3_Dense"),
        ),
        prompts=PROMPTS,
        default_prompt="query",
        max_length=256,
        source="modules.json",
    )


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("cls", PoolingKind.CLS), ("mean", PoolingKind.MEAN), ("lasttoken", PoolingKind.LAST)],
)
def test_modes(tmp_path: Path, body: Path, mode: str, kind: PoolingKind) -> None:
    st = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    save_embedder(tmp_path, body, [st.Pooling(HIDDEN, mode)])
    pooling = declared(tmp_path)
    assert (pooling.kind, pooling.normalize, pooling.layers) == (kind, False, ())


@pytest.mark.parametrize("mode", ["max", "weightedmean", "mean_sqrt_len_tokens", ("cls", "mean")])
def test_a_mode_that_is_not_computed_is_refused(tmp_path: Path, body: Path, mode: Any) -> None:
    st = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    save_embedder(tmp_path, body, [st.Pooling(HIDDEN, mode)])
    named = mode if isinstance(mode, str) else "mean"
    with refuses(CheckpointError, "1_Pooling/config.json", "pooling_mode", named, "--pooling"):
        read(tmp_path)


def test_further_modules_are_refused_by_name(tmp_path: Path, body: Path) -> None:
    st = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    for index, module in enumerate((st.LSTM(HIDDEN, 16), st.LayerNorm(HIDDEN))):
        folder = tmp_path / str(index)
        modules = [st.Pooling(HIDDEN), module]
        if index == 0:
            modules.reverse()
        save_embedder(folder, body, modules)
        with refuses(CheckpointError, "modules.json", type(module).__name__):
            read(folder)


def test_dropout_is_nothing_while_a_model_answers(tmp_path: Path, body: Path) -> None:
    st = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    save_embedder(tmp_path, body, [st.Pooling(HIDDEN), st.Dropout(0.5)])
    assert declared(tmp_path).layers == ()


FAULTS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("1_Pooling/config.json", {"include_prompt": False}, ["include_prompt"]),
    ("1_Pooling/config.json", {"embedding_dimension": 33}, ["33", "32"]),
    ("2_Dense/config.json", {"use_residual": True}, ["use_residual"]),
    ("2_Dense/config.json", {"in_features": 31}, ["in_features", "31", "32"]),
    ("2_Dense/config.json", {"activation_function": "torch.nn.SiLU"}, ["torch.nn.SiLU", "Tanh"]),
    ("2_Dense/config.json", {"activation_function": "mine.Tanh"}, ["mine.Tanh"]),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, ["token_embeddings"]),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, ["SparseEncoder"]),
    ("config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"}, ["model_type"]),
    ("config_sentence_transformers.json", {"truncate_dim": 8}, ["truncate_dim", "8"]),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, ["x", "document, query"]),
    ("config_sentence_transformers.json", {"prompts": {"a": 3}}, ["a", "3"]),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, ["fill-mask"]),
    ("sentence_bert_config.json", {"query_length": 32}, ["query_length", "32"]),
    ("sentence_bert_config.json", {"config_kwargs": {"is_causal": False}}, ["is_causal"]),
    ("sentence_bert_config.json", {"tokenizer_args": {"add_eos": 1}}, ["add_eos"]),
    ("sentence_bert_config.json", {"do_lower_case": True}, ["do_lower_case", "Lowercase"]),
    ("sentence_bert_config.json", {"modality_config": {"text": {}, "message": {}}}, ["message"]),
    (
        "sentence_bert_config.json",
        {"modality_config": {"text": {"method_output_name": ["hidden_states", -2]}}},
        ["method_output_name", "hidden_states", "-2"],
    ),
    (
        "sentence_bert_config.json",
        {"modality_config": {"text": {"method": "get_text_features"}}},
        ["method", "get_text_features"],
    ),
    ("sentence_bert_config.json", {"module_output_name": "all"}, ["module_output_name", "all"]),
]
# Values of another type than the libraries write: none is taken for one that is not there
DAMAGED: list[tuple[str, str, Any]] = [
    ("1_Pooling/config.json", "pooling_mode", {}),
    ("1_Pooling/config.json", "pooling_mode", [["mean"]]),
    ("config_sentence_transformers.json", "default_prompt_name", ["query"]),
    ("config_sentence_transformers.json", "prompts", ["query"]),
    ("config_sentence_transformers.json", "prompts", {"prompts": "\ud800"}),
    ("sentence_bert_config.json", "max_seq_length", "128"),
    ("sentence_bert_config.json", "max_seq_length", -1),
    ("sentence_bert_config.json", "max_seq_length", 0),
    ("sentence_bert_config.json", "modality_config", ["text"]),
    ("sentence_bert_config.json", "config_kwargs", "is_causal"),
    ("sentence_bert_config.json", "processor_kwargs", ["add_eos"]),
    ("sentence_bert_config.json", "processor_kwargs", {"model_max_length": "processor_kwargs"}),
    ("sentence_bert_config.json", "processing_kwargs", [1]),
    ("sentence_bert_config.json", "processing_kwargs", {"text": "processing_kwargs"}),
    ("tokenizer_config.json", "model_max_length", "long"),
    ("tokenizer_config.json", "model_max_length", True),
]


@pytest.mark.parametrize(("file", "keys", "names"), FAULTS)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, saved: Path, file: str, keys: dict[str, Any], names: list[str]
) -> None:
    folder = copied(saved, tmp_path / "model")
    change(folder, file, **keys)
    with refuses(CheckpointError, *names):
        read(folder)


@pytest.mark.parametrize(("file", "key", "value"), DAMAGED)
def test_values_of_another_type_are_refused(
    tmp_path: Path, saved: Path, file: str, key: str, value: Any
) -> None:
    folder = copied(saved, tmp_path / "model")
    change(folder, file, **{key: value})
    named = value if not isinstance(value, dict) else next(iter(value), key)
    with refuses(CheckpointError, file, key, str(named).strip("[]'")):
        read(folder)


@pytest.mark.parametrize(
    "file",
    [
        "modules.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "tokenizer_config.json",
    ],
)
def test_a_file_that_is_no_file_is_not_taken_for_none(
    tmp_path: Path, saved: Path, file: str
) -> None:
    """A download that ended early leaves links to nothing."""
    folder = copied(saved, tmp_path / "model")
    (folder / file).unlink()
    (folder / file).symlink_to(tmp_path / "blob")
    with refuses(CheckpointError, file, "No such file"):
        read(folder)
    (folder / file).unlink()
    (folder / file).mkdir()
    with refuses(CheckpointError, file, "directory"):
        read(folder)
    (folder / file).rmdir()
    (folder / file).write_bytes(b'{"prompts": "\xff"}')
    with refuses(CheckpointError, file):
        read(folder)


def test_a_normalizer_that_is_none(tmp_path: Path, saved: Path) -> None:
    folder = copied(saved, tmp_path / "model")
    change(folder, "sentence_bert_config.json", do_lower_case=True)
    change(folder, "tokenizer.json", normalizer={"type": "Sequence", "normalizers": 5})
    with refuses(CheckpointError, "do_lower_case"):
        read(folder)


def test_lists_of_modules_that_are_refused(tmp_path: Path, saved: Path) -> None:
    folder = copied(saved, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    for entry, names in (
        ({"path": "../else"}, ["../else", "outside"]),
        ({"path": "é" * 200}, ["no name of a folder"]),
        ({"path": "\ud800"}, ["no name of a folder"]),
        ({"type": "custom_st.Dense"}, ["custom_st.Dense"]),
        ({"type": 3}, ["type"]),
        ({"type": "sentence_transformers.models.Normalize"}, ["Normalize", "before"]),
    ):
        write(folder, {"modules.json": [*modules[:2], {**modules[2], **entry}, *modules[3:]]})
        with refuses(CheckpointError, "modules.json", *names):
            read(folder)
    for content in ([], {}, modules[1:]):
        write(folder, {"modules.json": content})
        with refuses(CheckpointError, "modules.json"):
            read(folder)


def test_a_layer_in_pickle_alone_is_refused(tmp_path: Path, saved: Path) -> None:
    folder = copied(saved, tmp_path / "model")
    weights = folder / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with refuses(CheckpointError, "2_Dense", "pytorch_model.bin", "save_pretrained"):
        read(folder)
    weights.with_name("pytorch_model.bin").unlink()
    with refuses(CheckpointError, "2_Dense", "model.safetensors", "missing"):
        read(folder)


def test_the_longest_input(tmp_path: Path, saved: Path) -> None:
    folder = copied(saved, tmp_path / "model")
    change(folder, "sentence_bert_config.json", processor_kwargs={"model_max_length": 99})
    assert declared(folder).max_length == 99
    change(folder, "sentence_bert_config.json", max_seq_length=77)
    assert declared(folder).max_length == 77
    change(folder, "sentence_bert_config.json", processing_kwargs={"text": {"max_length": 55}})
    assert declared(folder).max_length == 55
    (folder / "sentence_bert_config.json").unlink()
    change(folder, "tokenizer_config.json", model_max_length=10**30)
    assert declared(folder).max_length is None


def test_the_option_decides(tmp_path: Path, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(saved, "none") is None
    assert read(saved, "mean") == read(saved)
    with caplog.at_level(logging.WARNING, "freight"):
        assert declared(saved, option="cls").kind is PoolingKind.CLS
    assert_names(caplog.text, "--pooling cls", "modules.json", "mean")
    beside = declared(DEMO, option="last")
    assert (beside.beside, beside.kind, beside.normalize) == (True, PoolingKind.LAST, True)
    assert read(DEMO) is None
    with refuses(ConfigError, "--pooling max", "last, mean, cls or none"):
        read(saved, "max")
    with refuses(ConfigError, "--pooling none", "encoder"):
        read(saved, "none", encoder=True)


# cross encoders


def test_a_cross_encoder_by_its_head(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    body = save_body(tmp_path / "body", head="ForSequenceClassification", num_labels=1)
    st.CrossEncoder(str(body), device="cpu").save_pretrained(str(tmp_path / "model"))
    pooling = declared(tmp_path / "model")
    assert pooling.layers == (PoolingLayer("score.weight", None, HIDDEN, 1),)
    assert (pooling.kind, pooling.activation) == (PoolingKind.LAST, PoolingActivation.SIGMOID)
    assert (pooling.pairs, pooling.max_length) == (True, 256)
    change(
        tmp_path / "model",
        "config_sentence_transformers.json",
        activation_fn="torch.nn.modules.linear.Identity",
    )
    assert declared(tmp_path / "model").activation is PoolingActivation.IDENTITY


def test_a_cross_encoder_by_logits(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.cross_encoder.modules")
    body = save_body(tmp_path / "body", head="ForCausalLM", chat_template="{{ messages }}")
    first = modules.Transformer(
        str(body),
        transformer_task="text-generation",
        processing_kwargs={
            "chat_template": {"add_generation_prompt": True, "restore_suffix": True}
        },
    )
    for ids in ((7, 9), (7,)):
        folder = tmp_path / str(len(ids))
        score = modules.LogitScore(*ids)
        st.CrossEncoder(modules=[first, score], device="cpu").save_pretrained(str(folder))
        pooling = declared(folder)
        assert (pooling.task, pooling.token_ids) == (PoolingTask.CLASSIFY, ids)
        assert (pooling.kind, pooling.layers, pooling.size) == (PoolingKind.LAST, (), 1)
        assert pooling.template_values == {"add_generation_prompt": True}
        with refuses(ConfigError, "--pooling mean", "modules.json"):
            read(folder, "mean")
    change(folder, "1_LogitScore/config.json", true_token_id="yes")
    with refuses(CheckpointError, "true_token_id"):
        read(folder)


def test_a_cross_encoder_by_a_layer(tmp_path: Path, body: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    base = pytest.importorskip("sentence_transformers.base.modules")
    dense = base.Dense(
        HIDDEN, 3, activation_function=torch.nn.Identity(), module_output_name="scores"
    )
    model = st.CrossEncoder(
        modules=[base.Transformer(str(body)), modules.Pooling(HIDDEN), dense], device="cpu"
    )
    model.save_pretrained(str(tmp_path))
    pooling = declared(tmp_path)
    assert (pooling.task, pooling.kind, pooling.size) == (PoolingTask.CLASSIFY, PoolingKind.MEAN, 3)
    assert pooling.layers[0].folder == "2_Dense"


# heads of transformers


def head(family: str, **keys: Any) -> PoolingConfig:
    config = {"architectures": [f"{family}ForSequenceClassification"], **keys}
    encoder = "ert" in family
    pooling = read_pooling(Path("/nowhere"), config, 8, None, encoder)
    assert pooling is not None
    return pooling


def test_heads_have_the_tensors_that_transformers_writes() -> None:
    """Names, shapes and biases, of models that transformers makes."""
    import transformers

    for family, module in (
        ("Bert", "bert"),
        ("Roberta", "roberta"),
        ("XLMRoberta", "xlm_roberta"),
        ("ModernBert", "modernbert"),
        ("Llama", "llama"),
        ("Qwen3", "qwen3"),
    ):
        keys = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
        keys |= {"intermediate_size": 8, "vocab_size": 16, "num_labels": 3}
        if family == "ModernBert":
            keys |= {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
            keys |= {"eos_token_id": 2, "bos_token_id": 1}
        config = getattr(transformers, f"{family}Config")(**keys)
        model = getattr(transformers, f"{family}ForSequenceClassification")(config)
        tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        content = json.loads(config.to_json_string())
        layers = head(family, **{key: content[key] for key in ("id2label",)}).layers
        named: set[str] = set()
        for layer in layers:
            assert tensors[layer.weight] == (layer.outputs, layer.inputs), module
            named.add(layer.weight)
            if layer.bias is not None:
                assert tensors[layer.bias] == (layer.outputs,)
                named.add(layer.bias)
            if layer.norm is not None:
                assert tensors[layer.norm] == (layer.outputs,)
                named.add(layer.norm)
        # nothing of the head is left
        assert {
            name for name in tensors if name.startswith(("classifier", "score", "head"))
        } <= named, family


def test_kinds_and_activations_of_heads() -> None:
    assert head("Bert").kind is PoolingKind.CLS
    assert head("ModernBert", classifier_pooling="mean").kind is PoolingKind.MEAN
    assert head("Qwen3").kind is PoolingKind.LAST
    assert head("Qwen3").labels == ("LABEL_0", "LABEL_1")
    one = head("Qwen3", id2label={"0": "good"})
    assert (one.labels, one.activation, one.pairs) == (("good",), PoolingActivation.SIGMOID, True)
    assert head("Qwen3", num_labels=3).activation is PoolingActivation.SOFTMAX
    for problem, activation in (
        ("multi_label_classification", PoolingActivation.SIGMOID),
        ("regression", PoolingActivation.IDENTITY),
        ("single_label_classification", PoolingActivation.SOFTMAX),
    ):
        assert head("Qwen3", problem_type=problem).activation is activation
    path = "torch.nn.modules.linear.Identity"
    for keys in (
        {"sentence_transformers": {"activation_fn": path}},
        {"sbert_ce_default_activation_function": path},
    ):
        assert head("XLMRoberta", **keys).activation is PoolingActivation.IDENTITY


@pytest.mark.parametrize(
    ("family", "keys", "names"),
    [
        ("DistilBert", {}, ["DistilBertForSequenceClassification"]),
        ("ModernBert", {"norm_bias": True}, ["norm_bias"]),
        ("ModernBert", {"classifier_pooling": "max"}, ["classifier_pooling", "max"]),
        ("ModernBert", {"classifier_activation": "silu"}, ["classifier_activation", "silu"]),
        ("Bert", {"id2label": {"0": "a", "2": "b"}}, ["id2label"]),
        ("Bert", {"id2label": {"x": "a"}}, ["id2label"]),
        ("Bert", {"id2label": {"0": "a"}, "num_labels": 2}, ["num_labels", "2"]),
        ("Bert", {"sbert_ce_default_activation_function": "a.b"}, ["a.b"]),
        ("Bert", {"num_labels": 2**31 - 1}, ["num_labels", "2,147,483,647", "10,000"]),
        ("Bert", {"sentence_transformers": "Tanh"}, ["sentence_transformers", "Tanh", "object"]),
    ],
)
def test_heads_that_are_refused(family: str, keys: dict[str, Any], names: list[str]) -> None:
    with refuses(CheckpointError, *names):
        head(family, **keys)


# bodies, and published models


def test_a_body_alone(body: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "freight"):
        decoder = declared(body)
        encoder = declared(body, encoder=True)
    assert (decoder.kind, encoder.kind) == (PoolingKind.LAST, PoolingKind.MEAN)
    assert not decoder.normalize
    assert_names(caplog.text, "modules.json", "last", "mean", "--pooling")
    config = config_of(body)
    cut = read_pooling(body, {**config, "matryoshka_dimensions": [8, 16]}, HIDDEN)
    assert cut is not None
    assert cut.dimensions == (8, 16)
    assert read_pooling(body, {**config, "architectures": ["Qwen3ForCausalLM"]}, HIDDEN) is None


OLD = "sentence_transformers.models."


def modules(*kinds: str) -> list[dict[str, Any]]:
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    return [
        {"idx": index, "name": str(index), "path": path, "type": OLD + kind}
        for index, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]


def legacy(size: int, mode: str) -> dict[str, Any]:
    names = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
    )
    flags = {f"pooling_mode_{name}": name == mode for name in (*names, "lasttoken")}
    return {"word_embedding_dimension": size, **flags}


# Transcribed from what is known of these repositories, not fetched: the files that decide.
PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Qwen/Qwen3-Embedding-0.6B": (
        {
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": {**legacy(1024, "lasttoken"), "include_prompt": True},
            "config_sentence_transformers.json": {
                "prompts": {
                    "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query"
                    "\nQuery:",
                    "document": "",
                },
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
            "config.json": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024},
        },
        1024,
        {"kind": PoolingKind.LAST, "normalize": True},
    ),
    "intfloat/e5-mistral-7b-instruct": (
        {
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": legacy(4096, "lasttoken"),
            "sentence_bert_config.json": {"max_seq_length": 4096, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": {"web_search_query": "Instruct: Given a web search query\nQuery: "}
            },
            "config.json": {"architectures": ["MistralModel"], "hidden_size": 4096},
        },
        4096,
        {"kind": PoolingKind.LAST, "normalize": True, "max_length": 4096},
    ),
    "BAAI/bge-m3": (
        {
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": legacy(1024, "cls_token"),
            "sentence_bert_config.json": {"max_seq_length": 8192, "do_lower_case": False},
            "config_sentence_transformers.json": {"__version__": {"pytorch": "2.1.2"}},
            "config.json": {"architectures": ["XLMRobertaModel"], "hidden_size": 1024},
        },
        1024,
        {"kind": PoolingKind.CLS, "normalize": True, "max_length": 8192},
    ),
    "sentence-transformers/all-MiniLM-L6-v2": (
        {
            "modules.json": modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": legacy(384, "mean_tokens"),
            "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
            "config.json": {"architectures": ["BertModel"], "hidden_size": 384},
        },
        384,
        {"kind": PoolingKind.MEAN, "normalize": True, "max_length": 256},
    ),
    "google/embeddinggemma-300m": (
        {
            "modules.json": modules("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
            "1_Pooling/config.json": {**legacy(768, "mean_tokens"), "include_prompt": True},
            "2_Dense/config.json": {
                "in_features": 768,
                "out_features": 3072,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "3_Dense/config.json": {
                "in_features": 3072,
                "out_features": 768,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "2_Dense/model.safetensors": "",
            "3_Dense/model.safetensors": "",
            "config_sentence_transformers.json": {
                "model_type": "SentenceTransformer",
                "prompts": {
                    "query": "task: search result | query: ",
                    "document": "title: none | text: ",
                },
            },
            "sentence_bert_config.json": {"max_seq_length": 2048, "do_lower_case": False},
            "config.json": {"architectures": ["Gemma3TextModel"], "hidden_size": 768},
        },
        768,
        {"kind": PoolingKind.MEAN, "normalize": True, "max_length": 2048},
    ),
    "BAAI/bge-reranker-v2-m3": (
        {
            "config.json": {
                "architectures": ["XLMRobertaForSequenceClassification"],
                "hidden_size": 1024,
                "id2label": {"0": "LABEL_0"},
            }
        },
        1,
        {"kind": PoolingKind.CLS, "pairs": True, "activation": PoolingActivation.SIGMOID},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(tmp_path: Path, name: str) -> None:
    files, size, expected = PUBLISHED[name]
    pooling = declared(write(tmp_path, files), encoder="BAAI" in name)
    assert pooling.size == size
    assert {key: getattr(pooling, key) for key in expected} == expected
    prompts = files.get("config_sentence_transformers.json", {}).get("prompts", {})
    assert pooling.prompts == prompts


def test_qwen3_reranker_by_the_keys_that_vllm_reads(tmp_path: Path) -> None:
    """The published config.json is of a model that generates; vLLM's documentation adds the keys."""
    demo_tokenizer(tmp_path)
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}
    assert read_pooling(tmp_path, config, 8) is None
    config |= {"architectures": ["Qwen3ForSequenceClassification"]}
    config |= {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.__getitem__)[300:302]
    config["classifier_from_token"] = names
    pooling = read_pooling(tmp_path, config, 8)
    assert pooling is not None
    assert pooling.token_ids == (vocabulary[names[1]], vocabulary[names[0]])
    assert (pooling.yes_or_no, pooling.pairs, pooling.layers) == (True, True, ())
    for keys, said in (
        ({"classifier_from_token": ["no", "such token"]}, ["tokenizer.json", "such token"]),
        ({"classifier_from_token": "yes"}, ["classifier_from_token"]),
        ({"classifier_from_token": ["a", "b", "c"]}, ["3", "tokens"]),
        ({"is_original_qwen3_reranker": False}, ["is_original_qwen3_reranker"]),
    ):
        with refuses(CheckpointError, *said):
            read_pooling(tmp_path, {**config, **keys}, 8)
    (tmp_path / "tokenizer.json").unlink()
    with refuses(CheckpointError, "tokenizer.json", "save_pretrained"):
        read_pooling(tmp_path, config, 8)


def test_the_files_that_are_fetched() -> None:
    """Folders of modules are, and no weights in other forms."""

    def fetched(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in reader._FETCHED) and not any(
            fnmatchcase(name, pattern) for pattern in reader._NOT_FETCHED
        )

    for name in (
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "config_sentence_transformers.json",
        "model.safetensors",
    ):
        assert fetched(name), name
    for name in (
        "onnx/config.json",
        "openvino/config.json",
        "original/model.safetensors",
        "2_Dense/pytorch_model.bin",
        "1_Pooling/onnx/config.json",
        "4bit/model.safetensors",
        "0_Transformer.onnx/model.json",
    ):
        assert name.startswith("0_") or not fetched(name), name
