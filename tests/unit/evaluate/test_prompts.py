"""`freight evaluate caches --prompt-field`: log-probabilities of answers after their prompts, against
what the engine and transformers give for the same tokens, and that prompts cost no more than their
forward pass.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.demo_chat import demo_with_chat_template
from tests.refusals import refuses
from transformers import AutoModelForCausalLM

from freight import LLM, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.errors import ConfigError
from freight.lab.evaluate.documents import Part, PromptedText, cut_prompted, read_prompted
from freight.lab.evaluate.figures import Evaluation
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.layer_kl import TOKENS, first_windows
from freight.lab.evaluate.perplexity import Window
from freight.lab.evaluate.report_page import write_report
from freight.model.decoder import Decoder
from freight.model.open import open_model
from freight.settings.engine import EngineArgs
from freight.text.tokenizer import Tokenizer

TEXT = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")
# A raw prompt with a space at its end, none at all (BOS alone), a special token's text, an emoji, more
# than one chunk of 512 tokens, and a conversation
LINES: list[dict[str, Any]] = [
    {"prompt": "The harbour was ", "text": "quiet in the morning."},
    {"prompt": "", "text": "One day the ship came back."},
    {"prompt": "<s>Once", "text": " upon"},
    {"prompt": "🚢 The ship", "text": " sailed 🌊 to the north, and nobody saw it."},
    {"prompt": TEXT[:2500], "text": TEXT[2500:2600]},
    {"prompt": [{"role": "user", "content": "Where is it?"}], "text": "It is here."},
]
QUICK = GridArgs(caches=("token",), speed=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(demo_with_chat_template(tmp_path_factory.mktemp("model") / "chat"))


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "documents.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def prompted(lines: list[dict[str, Any]]) -> list[PromptedText]:
    return [PromptedText(**line, where=f"line {i}") for i, line in enumerate(lines, 1)]


@pytest.fixture(scope="module")
def measured(model: str, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    path = written(tmp_path_factory.mktemp("data"), LINES)
    documents = read_prompted(path, "text", "prompt")
    return evaluate_grid(EngineArgs(model, dtype="float32"), documents, QUICK)


@pytest.fixture(scope="module")
def token_ids(model: str) -> list[tuple[list[int], list[int]]]:
    """Prompt and text of each of LINES, as a request would have them."""
    tokenizer = Tokenizer.load(model)
    pairs = []
    for line in LINES:
        prompt = line["prompt"]
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        else:
            ids = tokenizer.apply_chat_template(prompt)
        pairs.append((ids, tokenizer.encode(line["text"], add_special_tokens=False)))
    assert max(len(ids) for ids, _ in pairs) > 512
    return pairs


def test_log_probabilities_are_those_of_the_engine(
    model: str, measured: Evaluation, token_ids: list[tuple[list[int], list[int]]]
):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = LLM(model, dtype="float32").generate([p + t for p, t in token_ids], params)
    totals = []
    for output, (prompt, text) in zip(outputs, token_ids, strict=True):
        assert output.prompt_logprobs is not None
        scored = zip(text, output.prompt_logprobs[len(prompt) :], strict=True)
        totals.append(sum(entry[token].logprob for token, entry in scored if entry))
    assert measured.runs[0].document_logprobs == pytest.approx(totals, rel=1e-5)
    assert measured.document_tokens == tuple(len(text) for _, text in token_ids)
    assert measured.sample.num_tokens == sum(measured.document_tokens)
    assert measured.sample.units == "documents"
    mean = -sum(totals) / measured.sample.num_tokens
    assert measured.runs[0].perplexity == pytest.approx(torch.tensor(mean).exp().item(), rel=1e-5)
    other = measured.runs[1].document_logprobs
    assert other is not None
    assert other != measured.runs[0].document_logprobs
    assert other == pytest.approx(totals, rel=0.05)


def test_log_probabilities_are_those_of_transformers(
    measured: Evaluation, token_ids: list[tuple[list[int], list[int]]]
):
    theirs = AutoModelForCausalLM.from_pretrained(resolve_model("demo"), dtype=torch.float32)
    totals = []
    with torch.inference_mode():
        for prompt, text in token_ids:
            logits = theirs(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.double().log_softmax(-1)
            totals.append(float(logprobs.gather(-1, torch.tensor(text)[:, None]).sum()))
    assert measured.runs[0].document_logprobs == pytest.approx(totals, rel=1e-4)


def test_a_single_document_has_its_sum(model: str):
    (line,) = LINES[:1]
    evaluation = evaluate_grid(EngineArgs(model), prompted([line]), QUICK)
    assert evaluation.sample.units == "documents"
    assert evaluation.document_tokens == (evaluation.sample.num_tokens,)
    assert len(evaluation.as_json()["runs"][1]["document_logprobs"]) == 1


def test_windows_of_one_text_have_no_document(model: str):
    evaluation = evaluate_grid(EngineArgs(model), [TEXT[:500]], QUICK)
    assert evaluation.document_tokens is None
    assert evaluation.runs[0].document_logprobs is None


def test_documents_without_prompts_have_their_sums_too():
    texts = [TEXT[:300], "", TEXT[1000:1400]]
    evaluation = evaluate_grid(EngineArgs("demo"), texts, QUICK)
    sums = evaluation.runs[0].document_logprobs
    assert evaluation.document_tokens is not None
    assert evaluation.document_tokens[1] == 0
    assert sums is not None
    assert sums[1] == 0.0 > sums[0] > sums[2]
    mean = sum(sums) / sum(evaluation.document_tokens)
    assert evaluation.runs[0].perplexity == pytest.approx(torch.tensor(-mean).exp().item())


def test_rows_of_prompts_do_not_go_through_the_head(
    model: str,
    token_ids: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
):
    rows = []
    logits = Decoder.logits

    def counted(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Decoder, "logits", counted)
    evaluate_grid(EngineArgs(model), prompted(LINES), QUICK)
    assert sum(rows) == 2 * sum(len(text) for _, text in token_ids)
    assert min(rows) > 0


def test_positions_are_those_in_the_context(measured: Evaluation):
    """No answer but that of the long prompt goes beyond position 64."""
    edges = list(pairwise(measured.position_edges))
    by_position = dict(zip(edges, measured.runs[1].kl_by_position, strict=True))
    assert by_position[0, 16] is not None
    assert by_position[64, 128] is by_position[128, 256] is None
    assert measured.runs[0].perplexity_by_position[-1] is not None


def test_an_answer_that_many_prompts_share_is_no_repeat(model: str):
    shots = TEXT[:600]
    lines = [{"prompt": f"{shots} Question {i}:", "text": " yes"} for i in range(20)]
    evaluation = evaluate_grid(EngineArgs(model), prompted(lines), QUICK)
    assert (evaluation.sample.num_units, evaluation.sample.num_repeats) == (20, 0)
    again = evaluate_grid(EngineArgs(model), prompted([*lines, *lines[:5]]), QUICK)
    assert again.sample.num_repeats == 5


def test_max_tokens_counts_what_is_scored(model: str):
    opened = open_model(EngineArgs(model))
    whole = cut_prompted(opened, prompted(LINES), None, 1024)
    first = whole[0].window.num_scored
    parts = cut_prompted(opened, prompted(LINES), None, 1024, first + 3)
    assert [part.window.num_scored for part in parts] == [first, 3]
    assert parts[1].window.targets == whole[1].window.targets[:3]
    exact = cut_prompted(opened, prompted(LINES), None, 1024, first)
    assert exact == whole[:1]


def test_window_of_two_holds_one_token_after_another(model: str):
    lines = [{"prompt": "", "text": "a"}] * 2
    grid = GridArgs(caches=("token",), speed=False, window=2)
    evaluation = evaluate_grid(EngineArgs(model), prompted(lines), grid)
    assert evaluation.document_tokens == (1, 1)
    assert evaluation.overview.window == 2


def test_the_window_is_that_of_the_longest_document(
    measured: Evaluation, token_ids: list[tuple[list[int], list[int]]]
):
    assert measured.overview.window == max(len(p) + len(t) for p, t in token_ids)


def test_first_windows_keep_prompts_whole():
    long = Part(Window([0] * 2 * TOKENS, [0] * 2 * TOKENS, 2 * TOKENS - 1), 0)
    short = Part(Window([0] * 500, [0] * 500, 400), 1)
    assert first_windows([long, short]) == [long.window]
    assert first_windows([short] * 5) == [short.window] * 2
    plain = Part(Window([0] * 500, [0] * 500), 1)
    assert [len(window.targets) for window in first_windows([plain] * 5)] == [500, 500]


def test_the_report_with_everything_has_sums_in_its_json_alone(tmp_path: Path):
    """The first prompt alone is longer than what noise and the KL by layer look at."""
    model = str(demo_with_chat_template(tmp_path / "model", positions=2048))
    long = {"prompt": TEXT[:3500], "text": TEXT[3500:3540]}
    grid = GridArgs(caches=("token",), weights=("fp8-a16",), noise=True, per_layer=True)
    evaluation = evaluate_grid(EngineArgs(model), prompted([long, *LINES[:2]]), grid)
    assert evaluation.overview.window > TOKENS
    write_report(evaluation, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    sums = [run["document_logprobs"] for run in report["runs"]]
    assert len(sums) == 4
    assert all(len(values) == len(report["document_tokens"]) == 3 for values in sums)
    assert report["noise"]["num_tokens"] == report["document_tokens"][0]
    assert all(kl > 0 for kl in report["runs"][1]["layer_kl"])
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert str(sums[1][0]) not in text
        assert "not scored" in text


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("a.txt", {"prompt": "a", "text": "b"}, ("--prompt-field", "a.txt", ".jsonl")),
        ("a.jsonl", {"text": "b"}, ("line 2", "--prompt-field", "'prompt'", "text")),
        ("a.jsonl", {"prompt": 3, "text": "b"}, ("line 2", "'prompt'", "int")),
        ("a.jsonl", {"prompt": None, "text": "b"}, ("line 2", "'prompt'", "NoneType")),
        ("a.jsonl", {"prompt": "a"}, ("line 2", "'text'", "--field")),
        ("a.jsonl", ["a"], ("line 2", "list", "--field")),
    ],
)
def test_lines_without_a_prompt_are_refused(
    name: str, line: object, says: tuple[str, ...], tmp_path: Path
):
    path = tmp_path / name
    path.write_text(f'{{"prompt": "a", "text": "b"}}\n{json.dumps(line)}\n')
    with refuses(ConfigError, *says):
        read_prompted(path, "text", "prompt")


def test_a_file_without_lines_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n")
    with refuses(ConfigError, "a.jsonl", "empty"):
        read_prompted(tmp_path / "a.jsonl", "text", "prompt")


@pytest.mark.parametrize(
    ("args", "line", "window", "says"),
    [
        ({}, {"prompt": "a b c", "text": ""}, None, ("line 2", "text", "token")),
        ({}, {"prompt": [], "text": "b"}, None, ("line 2", "messages", "empty")),
        ({}, {"prompt": ["a"], "text": "b"}, None, ("line 2", "messages[0]")),
        ({}, {"prompt": [{"role": "user"}], "text": "b"}, None, ("line 2", "messages[0]")),
        ({}, {"prompt": "a\ud800", "text": "b"}, None, ("line 2", "Unicode")),
        ({}, {"prompt": "a " * 30, "text": "b"}, 8, ("line 2", "--window 8", "prompt")),
        ({}, {"prompt": "a", "text": "b " * 9}, 8, ("line 2", "--window 8", "text")),
        ({}, {"prompt": TEXT[:9000], "text": "b"}, None, ("line 2", "1,024", "context")),
        ({"max_model_len": 8}, {"prompt": TEXT[:90], "text": "b"}, None, ("line 2", "8")),
        ({}, {"prompt": "a", "text": "b"}, 2000, ("--window 2000", "1024")),
        (
            {"model": "demo"},
            {"prompt": [{"role": "user", "content": "a"}], "text": "b"},
            None,
            ("line 2", "messages", "chat template"),
        ),
    ],
)
def test_what_cannot_be_scored_is_refused_before_weights_are_read(
    model: str,
    args: dict[str, Any],
    line: dict[str, Any],
    window: int | None,
    says: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "freight.model.open.OpenModel.load", lambda *_: pytest.fail("weights were read")
    )
    grid = GridArgs(caches=("token",), speed=False, window=window)
    documents = prompted([{"prompt": "a", "text": "b"}, line])
    with refuses(ConfigError, *says):
        evaluate_grid(EngineArgs(**{"model": model, **args}), documents, grid)
