"""docs/tutorials/: every block of every page runs, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documented import FENCE, LANGUAGES, Step, is_as_shown, run_steps, steps

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
# The others load models, start servers and calibrate. What it prints depends on no machine.
QUICK = EXACT = {"plan-a-machine"}
PAGES = sorted(path.stem for path in TUTORIALS.glob("*.md"))
NEED_RAY = {"several-machines"}  # run by tests/ray/test_examples.py


RUN = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in PAGES
    if name not in NEED_RAY
]


@pytest.mark.parametrize("name", RUN)
def test_a_page_runs_and_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    blocks = steps(TUTORIALS / f"{name}.md")
    printed = run_steps(blocks, tmp_path)
    for step, text in zip(blocks, printed, strict=True):
        if step.shown is not None:
            place = f"{name}.md:{step.line}"
            assert is_as_shown(text, step.shown, name in EXACT), f"{place} printed\n{text}"


@pytest.mark.parametrize("name", PAGES)
def test_nothing_on_a_page_is_left_out(name: str) -> None:
    """Blocks are commands that run, or what these print."""
    text = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    assert {fence[1] for fence in FENCE.finditer(text)} <= {*LANGUAGES, "text"}
    assert len(re.findall("^```", text, re.M)) == 2 * len(FENCE.findall(text))
    shown = [step for step in steps(TUTORIALS / f"{name}.md") if step.shown is not None]
    assert text.count("\n```text\n") == len(shown) >= 2


def test_blocks_share_a_folder_and_variables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nNAME=file.txt\necho 1 2 >$NAME\n```\n\n"
        "```python\nprint(open('file.txt').read())\n```\n```text\n7 8\n```\n"
        "```sh\ncat $NAME\nsleep 600 &\n```\n\nwords\n\n```text\nnot its output\n```\n"
    )
    blocks = steps(page)
    assert [step.line for step in blocks] == [2, 7, 13]
    assert [step.shown for step in blocks] == [None, "7 8\n", None]
    printed = run_steps(blocks, tmp_path, seconds=60)
    assert printed == ["", "1 2\n\n", "1 2\n"]


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="block 2 ended with status 3"):
        run_steps([Step(1, "sh", "true\n", None), Step(2, "sh", "exit 3\n", None)], tmp_path)


def test_figures_may_differ_and_words_may_not() -> None:
    for printed, shown, same in (
        ("a   12.5 %\nb\n", "a 3 %\nb", True),
        ("a 12.5 ms\n", "a 3 %", False),
        ("first\nx\ny\nlast 3", "first\n…\nlast 4", True),
        ("first\nlast 3", "first\n…\nlast 4", True),
        ("first\nx\nlast 3\nmore", "first\n…\nlast 4", False),
        ("bar ####", "bar ##", True),
        ("a b (c d) e", "a b (…) e", True),
        ("a b (c d) f", "a b (…) e", False),
    ):
        assert is_as_shown(printed, shown) is same, (printed, shown)


def test_where_no_machine_matters_figures_are_compared() -> None:
    assert is_as_shown("a   3\n", "a 3", exact=True)
    assert not is_as_shown("a 3\n", "a 4", exact=True)


README = ROOT / "README.md"
SERVED = """freight serve demo --kv-cache-dtype fp8"""


@pytest.mark.slow
def test_readme_s_blocks_run(tmp_path: Path) -> None:
    """With the server of its third command, whose answer is the one that docs/server.md shows."""
    text = README.read_text(encoding="utf-8")
    assert f"\n.venv/bin/{SERVED}\n" in text
    ready = "until curl -fs http://127.0.0.1:8000/health >health; do sleep 0.2; done\n"
    start = Step(0, "sh", f"{SERVED} 2>server.log &\n{ready}", None)
    _, answered, generated = run_steps([start, *steps(README)], tmp_path)
    assert '"text":"master=None, **options):' in answered
    assert generated.startswith("master=None, **options):")


def test_readme_s_commands_are_there() -> None:
    text = README.read_text(encoding="utf-8")
    verbs = set(re.findall(r"^freight (\w+) ", text, re.MULTILINE))
    assert len(verbs) >= 13
    known = re.findall(r"^\| `freight (\w+)` \|", (ROOT / "docs" / "cli.md").read_text(), re.M)
    assert verbs - set(known) == set()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z]+)\b(?!,)", text)) - {"such"}
    assert [name for name in targets if f"\n{name}:" not in makefile] == []
