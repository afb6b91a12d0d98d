"""Encoders end to end against sentence-transformers' encode() and predict(), and transformers' own
logits, of random models that these libraries save. In float32, to 1e-5.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.parity.test_pooling import TOLERANCE, expected, opened, vectors
from tests.pooling_models import ENCODERS, HIDDEN, save_embedder, save_encoder
from tests.refusals import refuses

from freight import LLM
from freight.errors import RequestError
from freight.pooling import PoolingParams, PoolingTask

st = pytest.importorskip("sentence_transformers")
pytest.importorskip("sentence_transformers.sentence_transformer.modules")
from sentence_transformers.base import modules as base  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402

TEXTS = [
    "a",
    "the quick brown fox jumps over the lazy dog.",
    "embeddings of texts are compared by their cosine. " * 4,
    "Bordeaux, 12 C",
    "def main(): return 0",
]
PAIRS = [("who is it?", text) for text in TEXTS] + [(TEXTS[1], "no")]
PROMPTS = {"query": "query: ", "passage": "passage: "}
LOGITS = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False)


def served(folder: Path, **options: Any) -> LLM:
    """The model in float32; a prompt is computed in one step."""
    return opened(folder, max_num_batched_tokens=512, **options)


def predicted(model: Any, **options: Any) -> torch.Tensor:
    """What CrossEncoder.predict gives, one pair at a time."""
    rows = [model.predict([pair], convert_to_tensor=True, **options)[0] for pair in PAIRS]
    return torch.stack(rows).float()


def scores(llm: LLM, **options: Any) -> torch.Tensor:
    queries, documents = zip(*PAIRS, strict=True)
    outputs = llm.score(queries, documents, **options)
    return torch.tensor([output.outputs.score for output in outputs])


def assert_same(found: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to 1e-5, and the rows of `theirs` are not all the same."""
    assert theirs.std(0).max() > 1e-2
    torch.testing.assert_close(found, theirs, **TOLERANCE)


@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("family", ENCODERS)
def test_embeddings(tmp_path: Path, family: str, mode: str) -> None:
    """As all-MiniLM-L6-v2 (BERT, mean), bge-m3 (XLM-RoBERTa, first token), e5 (prompts)."""
    body = save_encoder(tmp_path / "body", family)
    modules = [Pooling(HIDDEN, mode), base.Normalize()]
    model = save_embedder(tmp_path / "model", body, modules, prompts=PROMPTS)
    llm = served(tmp_path / "model")
    assert_same(vectors(llm, TEXTS), expected(model, TEXTS))
    found = vectors(llm, TEXTS, prompt_name="query")
    assert_same(found, expected(model, TEXTS, prompt_name="query"))
    # in one call and in another order
    assert torch.equal(vectors(llm, TEXTS[::-1]), vectors(llm, TEXTS).flip(0))


def test_embedding_gemma(tmp_path: Path) -> None:
    """Two Dense layers without activation between the mean and the division by the length, and
    prompts.
    """
    body = save_encoder(tmp_path / "body", "gemma3_text")
    torch.manual_seed(4)
    none = torch.nn.Identity()
    modules = [
        Pooling(HIDDEN, "mean"),
        base.Dense(HIDDEN, 96, bias=False, activation_function=none),
        base.Dense(96, HIDDEN, bias=False, activation_function=none),
        base.Normalize(),
    ]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    model = save_embedder(tmp_path / "model", body, modules, prompts=prompts)
    llm = served(tmp_path / "model")
    assert llm.engine.intake.pooling.size == HIDDEN
    for name in (None, "query", "document"):
        found = vectors(llm, TEXTS, prompt_name=name)
        assert_same(found, expected(model, TEXTS, prompt_name=name))


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert"])
def test_without_modules(tmp_path: Path, family: str) -> None:
    """A body alone, and one with a head over the vocabulary, are pooled as sentence-transformers
    does: the mean, not normalized.
    """
    for auto in (transformers.AutoModel, transformers.AutoModelForMaskedLM):
        folder = save_encoder(tmp_path / auto.__name__, family, auto)
        model = st.SentenceTransformer(str(folder), device="cpu")
        llm = served(folder)
        assert_same(vectors(llm, TEXTS), expected(model, TEXTS))


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "modernbert-cls": ("modernbert", {"classifier_pooling": "cls"}),
    "modernbert-mean": ("modernbert", {"classifier_pooling": "mean", "classifier_bias": True}),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("head", HEADS)
def test_sequence_classification(tmp_path: Path, head: str, count: int) -> None:
    """transformers' own head: logits, and probabilities."""
    family, keys = HEADS[head]
    auto = transformers.AutoModelForSequenceClassification
    folder = save_encoder(tmp_path, family, auto, num_labels=count, **keys)
    model = auto.from_pretrained(folder)
    llm = served(folder)
    rows = []
    for text in TEXTS:
        ids = torch.tensor([llm.engine.tokenizer.encode(text)])
        with torch.no_grad():
            rows.append(model(ids).logits[0])
    logits = torch.stack(rows)
    found = [output.outputs.probs for output in llm.classify(TEXTS, pooling_params=LOGITS)]
    assert_same(torch.tensor(found), logits)
    found = [output.outputs.probs for output in llm.classify(TEXTS)]
    probabilities = logits.sigmoid() if count == 1 else logits.softmax(-1)
    assert_same(torch.tensor(found), probabilities)


@pytest.mark.parametrize("head", HEADS)
def test_pairs(tmp_path: Path, head: str) -> None:
    """As bge-reranker-v2-m3 (XLM-RoBERTa) and ms-marco-MiniLM (BERT, whose second text has the other
    token type).
    """
    family, keys = HEADS[head]
    auto = transformers.AutoModelForSequenceClassification
    body = save_encoder(tmp_path / "body", family, auto, num_labels=1, **keys)
    model = st.CrossEncoder(str(body), device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    for folder in (body, tmp_path / "model"):
        llm = served(folder)
        logits = predicted(model, activation_fn=torch.nn.Identity())
        assert_same(scores(llm, pooling_params=LOGITS), logits)
    assert_same(scores(llm), predicted(model))
    # each alone, and all in one step, have the same bits
    alone = [llm.score(*pair)[0].outputs.score for pair in PAIRS]
    assert scores(llm).tolist() == alone
    # texts alone beside pairs
    assert llm.classify(TEXTS[0])[0].outputs.probs != alone[:1]


def test_a_tokenizer_may_leave_token_types_out(tmp_path: Path) -> None:
    """`model_input_names` says so: transformers gives all tokens type 0 then."""
    auto = transformers.AutoModelForSequenceClassification
    body = save_encoder(tmp_path, "bert", auto, num_labels=1)
    file = tmp_path / "tokenizer_config.json"
    content = json.loads(file.read_text())
    with_types = scores(served(body))
    content["model_input_names"].remove("token_type_ids")
    file.write_text(json.dumps(content))
    found = scores(served(body))
    assert_same(found, predicted(st.CrossEncoder(str(body), device="cpu")))
    assert not torch.allclose(found, with_types, atol=1e-3)
    params = PoolingParams(task=PoolingTask.CLASSIFY, first_segment=2)
    with refuses(RequestError, "first_segment is 2", "token type"):
        served(body).classify([[2, 5, 3, 6, 3]], pooling_params=params)


def test_token_ids_of_a_pair_are_classified(tmp_path: Path) -> None:
    """Three classes of two texts, as models of entailment have them."""
    auto = transformers.AutoModelForSequenceClassification
    body = save_encoder(tmp_path, "bert", auto, num_labels=3)
    model = auto.from_pretrained(body)
    ids = [2, 10, 11, 12, 3, 13, 14, 3]
    types = [[0] * 5 + [1] * 3]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), token_type_ids=torch.tensor(types)).logits
    params = replace(LOGITS, first_segment=5)
    (output,) = served(body).classify([ids], pooling_params=params)
    torch.testing.assert_close(torch.tensor([output.outputs.probs]), logits, **TOLERANCE)
