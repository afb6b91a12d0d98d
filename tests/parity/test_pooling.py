"""Embeddings and scores against sentence-transformers' encode() and predict(), and transformers' own
forward, of random models that these libraries save. In float32, to 1e-5.

The same bits come of any chunks, any batch, any order and any number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.pooling_models import BODIES, HIDDEN, save_body, save_embedder
from tests.refusals import refuses

from freight import LLM
from freight.errors import CheckpointError, RequestError
from freight.pooling import PoolingParams, PoolingTask

st = pytest.importorskip("sentence_transformers")
pytest.importorskip("sentence_transformers.sentence_transformer.modules")
from sentence_transformers.base import modules as base  # noqa: E402
from sentence_transformers.cross_encoder.modules import LogitScore  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402

TEXTS = [
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "Embeddings of texts are compared by their cosine. " * 6,
    "Grüße aus München, 12 °C",
    "def main():\n    return 0\n",
]
PAIRS = [("who is it?", text) for text in TEXTS] + [(TEXTS[1], "no")]
PROMPTS = {"query": "Instruct: find the passage\nQuery: ", "document": ""}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ROLES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


def opened(folder: Path, **options: Any) -> LLM:
    """The model in float32, with keys and values in float32 as well."""
    values = {"dtype": "float32", "kv_cache_dtype": "float32", "kv_cache_memory": "8MiB"}
    return LLM(str(folder), **{**values, "max_num_batched_tokens": 64, **options})


def vectors(llm: LLM, texts: Sequence[str], **options: Any) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in llm.embed(texts, **options)])


def expected(model: Any, texts: Sequence[str], **options: Any) -> torch.Tensor:
    """What sentence-transformers gives, one text at a time: padding changes bits."""
    rows = [model.encode(text, convert_to_tensor=True, **options) for text in texts]
    return torch.stack(rows).float()


@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls"])
@pytest.mark.parametrize("body", BODIES)
def test_embeddings(tmp_path: Path, body: str, mode: str) -> None:
    folder = save_body(tmp_path / "body", body)
    model = save_embedder(tmp_path / "model", folder, [Pooling(HIDDEN, mode)])
    llm = opened(tmp_path / "model")
    torch.testing.assert_close(vectors(llm, TEXTS), expected(model, TEXTS), **TOLERANCE)


def layered(folder: Path) -> Any:
    """Save a model with layers after pooling, whose vectors are normalized; return it."""
    body = save_body(folder / "body")
    torch.manual_seed(2)
    layers = [
        base.Dense(HIDDEN, 48),
        base.Dense(48, 24, bias=False, activation_function=torch.nn.GELU()),
    ]
    modules = [Pooling(HIDDEN, "mean"), *layers, base.Normalize()]
    return save_embedder(
        folder / "model", body, modules, prompts=PROMPTS, default_prompt_name="query"
    )


def test_layers_prompts_and_cuts(tmp_path: Path) -> None:
    model = layered(tmp_path)
    whole = st.SentenceTransformer(modules=list(model)[:-1], device="cpu")
    llm = opened(tmp_path / "model")
    for name in (None, "query", "document"):
        found = vectors(llm, TEXTS, prompt_name=name)
        torch.testing.assert_close(found, expected(model, TEXTS, prompt_name=name), **TOLERANCE)
    raw = expected(whole, TEXTS)  # no prompt, not normalized
    params = PoolingParams(normalize=False)
    found = vectors(llm, TEXTS, prompt_name="document", pooling_params=params)
    torch.testing.assert_close(found, raw, **TOLERANCE)
    # a cut vector is normalized after it is cut, as encode(truncate_dim, normalize_embeddings)
    cut = expected(whole, TEXTS, truncate_dim=8, normalize_embeddings=True)
    params = PoolingParams(dimensions=8)
    found = vectors(llm, TEXTS, prompt_name="document", pooling_params=params)
    torch.testing.assert_close(found, cut, **TOLERANCE)
    with refuses(RequestError, "summary", "document, query"):
        llm.embed(TEXTS, prompt_name="summary")


def test_damaged_layers_are_refused(tmp_path: Path) -> None:
    layered(tmp_path)
    folder = tmp_path / "model"
    file = folder / "2_Dense" / "model.safetensors"
    whole = load_file(file)
    weight, bias = whole["linear.weight"], whole["linear.bias"]
    for tensors, names in (
        ({"linear.weight": weight.T.contiguous(), "linear.bias": bias}, ["(32, 48)", "(48, 32)"]),
        ({"linear.weight": weight}, ["linear.bias"]),
        ({**whole, "extra": bias + 1}, ["extra"]),
        ({**whole, "linear.bias": bias / 0}, ["linear.bias", "NaN"]),
    ):
        save_file(tensors, file)
        with refuses(CheckpointError, "2_Dense", "model.safetensors", *names):
            opened(folder)
    save_file(whole, file)
    config = folder / "2_Dense" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bias": False}))
    with refuses(CheckpointError, "2_Dense", "model.safetensors", "linear.bias", "bias true"):
        opened(folder)
    file.write_bytes(b"x" * 100)
    with refuses(CheckpointError, "2_Dense/model.safetensors"):
        opened(folder)


@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls"])
def test_the_same_bits_however_it_is_computed(tmp_path: Path, mode: str) -> None:
    body = save_body(tmp_path / "body")
    save_embedder(
        tmp_path / "model", body, [Pooling(HIDDEN, mode), base.Dense(HIDDEN, 24), base.Normalize()]
    )
    llm = opened(tmp_path / "model", enable_prefix_caching=False)
    first = vectors(llm, TEXTS)
    alone = torch.cat([vectors(llm, [text]) for text in TEXTS])
    backwards = vectors(llm, TEXTS[::-1]).flip(0)
    assert torch.equal(first, alone)
    assert torch.equal(first, backwards)
    for options in (
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 512, "threads": 2},
        {"pipeline_parallel_size": 2},
        {"enable_prefix_caching": True},
    ):
        llm = opened(tmp_path / "model", **options)
        for _ in range(2):  # the second time from the cache, where there is one
            assert torch.equal(vectors(llm, TEXTS), first), options


def test_a_model_that_generates_is_pooled_beside(tmp_path: Path) -> None:
    folder = save_body(tmp_path, head="ForCausalLM")
    model = transformers.AutoModel.from_pretrained(folder)
    llm = opened(folder, pooling="mean")
    found = vectors(llm, TEXTS[:2])
    states = []
    for text in TEXTS[:2]:
        ids = torch.tensor([llm.engine.tokenizer.encode(text)])
        with torch.no_grad():
            states.append(model(ids).last_hidden_state[0].mean(0))
    rows = torch.nn.functional.normalize(torch.stack(states), dim=-1)
    torch.testing.assert_close(found, rows, **TOLERANCE)
    assert len(llm.generate(TEXTS[0])[0].outputs[0].token_ids) > 0


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("body", BODIES)
def test_sequence_classification(tmp_path: Path, body: str, count: int) -> None:
    """transformers' own head: logits, and probabilities."""
    folder = save_body(tmp_path, body, head="ForSequenceClassification", num_labels=count)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    llm = opened(folder)
    rows = []
    for text in TEXTS:
        ids = torch.tensor([llm.engine.tokenizer.encode(text)])
        with torch.no_grad():
            rows.append(model(ids).logits[0])
    logits = torch.stack(rows)
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False)
    found = [output.outputs.probs for output in llm.classify(TEXTS, pooling_params=params)]
    torch.testing.assert_close(torch.tensor(found), logits, **TOLERANCE)
    found = [output.outputs.probs for output in llm.classify(TEXTS)]
    probabilities = logits.sigmoid() if count == 1 else logits.softmax(-1)
    torch.testing.assert_close(torch.tensor(found), probabilities, **TOLERANCE)


def scores(llm: LLM, **options: Any) -> torch.Tensor:
    queries, documents = zip(*PAIRS, strict=True)
    outputs = llm.score(queries, documents, **options)
    return torch.tensor([output.outputs.score for output in outputs])


def predicted(model: Any, **options: Any) -> torch.Tensor:
    rows = [model.predict([pair], convert_to_tensor=True, **options)[0] for pair in PAIRS]
    return torch.stack(rows).float()


def test_pairs_by_a_head(tmp_path: Path) -> None:
    body = save_body(tmp_path / "body", head="ForSequenceClassification", num_labels=1)
    model = st.CrossEncoder(str(body), device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    llm = opened(tmp_path / "model")
    torch.testing.assert_close(scores(llm), predicted(model), **TOLERANCE)
    found = scores(llm, instruction="find ")
    torch.testing.assert_close(found, predicted(model, prompt="find "), **TOLERANCE)


@pytest.mark.parametrize("ids", [(300, 400), (300,)])
@pytest.mark.parametrize("template", [None, ROLES])
def test_pairs_by_logits(tmp_path: Path, template: str | None, ids: tuple[int, ...]) -> None:
    body = save_body(tmp_path / "body", head="ForCausalLM", chat_template=template)
    processing = {"chat_template": {"add_generation_prompt": True}} if template else None
    first = base.Transformer(
        str(body), transformer_task="text-generation", processing_kwargs=processing
    )
    model = st.CrossEncoder(modules=[first, LogitScore(*ids)], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    llm = opened(tmp_path / "model")
    torch.testing.assert_close(scores(llm), predicted(model), **TOLERANCE)
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False)
    logits = predicted(model, activation_fn=torch.nn.Identity())
    torch.testing.assert_close(scores(llm, pooling_params=params), logits, **TOLERANCE)
    found = scores(llm, instruction="find")
    torch.testing.assert_close(found, predicted(model, prompt="find"), **TOLERANCE)


def test_a_score_of_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    body = save_body(tmp_path / "body", head="ForCausalLM")
    first = base.Transformer(str(body), transformer_task="text-generation")
    model = st.CrossEncoder(modules=[first, LogitScore(300)], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    file = tmp_path / "model" / "1_LogitScore" / "config.json"
    file.write_text(json.dumps({"true_token_id": 300, "false_token_id": 4096}))
    with refuses(CheckpointError, "modules.json", "4096", "4095"):
        opened(tmp_path / "model")


@pytest.mark.parametrize("template", [None, ROLES])
def test_long_pairs_lose_the_end_of_the_document(tmp_path: Path, template: str | None) -> None:
    """As sentence-transformers cuts them, which puts back what the template ends with."""
    body = save_body(tmp_path / "body", head="ForCausalLM", chat_template=template)
    processing = {"chat_template": {"add_generation_prompt": True}} if template else None
    first = base.Transformer(
        str(body), transformer_task="text-generation", processing_kwargs=processing
    )
    model = st.CrossEncoder(modules=[first, LogitScore(300)], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    model.max_seq_length = 48
    llm = opened(tmp_path / "model")
    if template is None:  # there a cut text is encoded anew, and its last token may be another
        found = scores(llm, truncate_prompt_tokens=48)
        torch.testing.assert_close(found, predicted(model), **TOLERANCE)
    queries, documents = zip(*PAIRS, strict=True)
    for output in llm.score(queries, documents, truncate_prompt_tokens=48):
        text = llm.engine.tokenizer.decode(output.prompt_token_ids)
        assert len(output.prompt_token_ids) <= 48
        assert template is None or text.endswith("<answer>")
