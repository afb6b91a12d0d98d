"""The questions as requests of `freight batch`: one user message each, greedy.

GSM8K's prompt is the one that Qwen publishes for mathematics, HumanEval's the one that EvalPlus (Liu et
al. 2023) gives chat models. GSM8K comes in several files, so that a comparison can be made before all of
it is answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from questions.sources import CodeProblem, MathProblem

FILE_SIZE = 220  # questions of GSM8K in a file
MATH_TOKENS = 512  # of an answer at most
CODE_TOKENS = 768
_ANNOTATION = re.compile("<<[^>]*>>")  # of a calculator, within the solutions of GSM8K


def math_prompt(problem: MathProblem) -> str:
    return (
        f"{problem.question}\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )


def code_prompt(problem: CodeProblem) -> str:
    return (
        "Please provide a self-contained Python script that solves the following problem in a "
        f"markdown code block:\n```\n{problem.prompt.strip()}\n```\n"
    )


def request_line(custom_id: str, prompt: str, model: str, max_tokens: int) -> str:
    """A line of OpenAI's batch format, without its end."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line, ensure_ascii=False)


def solution_line(custom_id: str, prompt: str, solution: str) -> str:
    """A published solution after its prompt, for `freight evaluate caches --prompt-field prompt --field
    solution`.
    """
    messages = [{"role": "user", "content": prompt}]
    line = {"id": custom_id, "prompt": messages, "solution": solution}
    return json.dumps(line, ensure_ascii=False)


def solution_files(math: Sequence[MathProblem], code: Sequence[CodeProblem]) -> dict[str, str]:
    """The content of gsm8k.solutions and humaneval.solutions: as the prompts ask for them."""
    of_math = []
    for problem in math:
        text = f"{_ANNOTATION.sub('', problem.solution)}\n\\boxed{{{problem.reference}}}"
        of_math.append(solution_line(problem.id, math_prompt(problem), text))
    of_code = []
    for task in code:
        text = f"```python\n{task.prompt}{task.solution}```"
        of_code.append(solution_line(task.id, code_prompt(task), text))
    files = {"gsm8k.solutions": of_math, "humaneval.solutions": of_code}
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in files.items()}


def request_files(
    math: Sequence[MathProblem], code: Sequence[CodeProblem], model: str
) -> dict[str, str]:
    """The content of each file, by its name without the ending: humaneval, gsm8k-0, gsm8k-1, …"""
    lines = [request_line(item.id, code_prompt(item), model, CODE_TOKENS) for item in code]
    files = {"humaneval": lines}
    for start in range(0, len(math), FILE_SIZE):
        files[f"gsm8k-{start // FILE_SIZE}"] = [
            request_line(item.id, math_prompt(item), model, MATH_TOKENS)
            for item in math[start : start + FILE_SIZE]
        ]
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in files.items()}


def write_requests(files: dict[str, str], folder: Path) -> list[Path]:
    """Write NAME.jsonl for each; a file that has this content already is left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in files.items():
        path = folder / f"{name}.jsonl"
        if not path.exists() or path.read_bytes() != content.encode():
            path.write_bytes(content.encode())
        paths.append(path)
    return paths
