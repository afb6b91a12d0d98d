"""freight evaluate tasks at the terminal: what is refused before a weight is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names

Run = Callable[..., Any]


def test_without_lm_eval_it_says_what_to_install(freight: Run, monkeypatch: pytest.MonkeyPatch):
    for name in [
        name for name in sys.modules if name.startswith(("lm_eval.", "freight.adapters.lm_eval"))
    ]:
        monkeypatch.delitem(sys.modules, name)  # another test may have loaded them
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    answer = freight("evaluate", "tasks", "demo", "--tasks", "arc_easy")
    assert answer.code == 2
    assert "pip install '.[eval]'" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"), [("--include-path", "folder"), ("--limit", "3"), ("--num-fewshot", "0")]
)
def test_options_of_tasks_need_tasks(freight: Run, option: str, value: str):
    answer = freight("evaluate", "demo", option, value)
    assert answer.code == 2
    assert_names(answer.err, option, "freight evaluate tasks")


def test_task_files_come_from_a_folder(freight: Run, tmp_path: Path):
    from freight.errors import ConfigError
    from freight.lab.evaluate.tasks import _find

    with pytest.raises(ConfigError, match=f"--include-path {tmp_path}/none is not a folder"):
        _find(lambda **options: None, ["arc_easy"], str(tmp_path / "none"))
