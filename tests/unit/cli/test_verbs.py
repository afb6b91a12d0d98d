"""generate, chat and env at the terminal: what is printed where, and how they end."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import assert_names, line_naming

from freight.errors import CapacityError, CheckpointError, ConfigError, KernelError, RequestError
from freight.kernels import select
from freight.kernels.cpu import library, tuning
from freight.kernels.select import select_kernels
from freight.settings import device
from freight.settings.cpu_builds import obstacles
from freight.settings.device import Card

Run = Callable[..., Any]


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


@pytest.mark.usefixtures("llm")
def test_one_prompt_prints_its_text_and_nothing_else(freight: Run) -> None:
    answer = freight("generate", "--prompt", "x")
    assert (answer.code, answer.out, answer.err) == (0, "one two three\n", "")


def test_several_prompts_are_computed_together(freight: Run, llm: Any) -> None:
    answer = freight("generate", "--prompt", "a", "--prompt", "b")
    assert answer.out == "--- 'a'\none two three\n--- 'b'\none two three\n"
    assert llm.asked == ["a", "b"]


@pytest.mark.usefixtures("llm")
def test_several_completions_are_numbered(freight: Run) -> None:
    answer = freight("generate", "--prompt", "a" * 80, "-n", "2")
    assert answer.out.count("one two three\n") == 2
    assert f"--- '{'a' * 57}...' [2/2]" in answer.out


def test_json_is_one_object_and_nothing_else(freight: Run, llm: Any) -> None:
    answer = freight("generate", "--prompt", "a", "--prompt", "b", "-n", "2", "--json")
    got = json.loads(answer.out)
    one = {
        "text": "one two three",
        "token_ids": [0, 1, 2],
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert got["outputs"] == [{"prompt": prompt, **one} for prompt in "aabb"]
    assert got["kv_cache"] == llm.kv_cache_info(None)
    assert set(got) == {"outputs", "kv_cache"}


def test_token_ids_in_token_ids_out(freight: Run, llm: Any) -> None:
    answer = freight("generate", "--skip-tokenizer-init", "--prompt-token-ids", "1, 2,3")
    assert answer.out == "0 1 2\n"
    assert llm.asked == [[1, 2, 3]]
    assert not llm.params[0].detokenize
    answer = freight("generate", "--skip-tokenizer-init", "--prompt-token-ids", "5", "--json")
    assert json.loads(answer.out)["outputs"][0]["prompt"] is None


def test_a_prompt_from_a_file_and_from_standard_input(
    freight: Run, llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\n")
    assert freight("generate", "--prompt-file", str(tmp_path / "prompt.txt")).code == 0
    assert llm.asked == ["from a file\n"]
    type_in(monkeypatch, "typed")
    assert freight("generate", "--prompt-file", "-").code == 0
    assert llm.asked == ["typed"]


def test_an_empty_prompt_is_the_models_to_judge(freight: Run, llm: Any, tmp_path: Path) -> None:
    assert freight("generate", "--prompt", "").code == 0
    assert llm.asked == [""]
    (tmp_path / "empty.txt").write_text("")
    assert freight("generate", "--prompt-file", str(tmp_path / "empty.txt")).code == 0
    assert llm.asked == [""]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "there is no prompt; give it in one way"),
        (["--prompt", "a", "--prompt-token-ids", "1"], "in more than one way"),
        (["--prompt-token-ids", ""], "whole numbers"),
        (["--prompt-token-ids", "1,x"], "whole numbers"),
        (["--prompt-file", "/nowhere/at/all"], "cannot be read"),
    ],
)
def test_a_bad_prompt_is_refused_before_a_model_is_made(
    freight: Run, llm: Any, argv: list[str], says: str
) -> None:
    answer = freight("generate", *argv)
    assert answer.code == 2
    assert says in answer.err
    assert not hasattr(llm, "made")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such thing"), 2),
        (RequestError("no such thing"), 2),
        (CheckpointError("no such thing"), 1),
        (CapacityError("no such thing"), 1),
    ],
)
def test_an_error_is_one_line_and_a_status(
    freight: Run, llm: Any, error: Exception, code: int
) -> None:
    llm.fails = error
    answer = freight("generate", "--prompt", "x")
    assert (answer.code, answer.out, answer.err) == (code, "", "error: no such thing\n")


def test_an_error_in_brackets_is_not_markup(freight: Run, llm: Any) -> None:
    llm.fails = ConfigError("[red] is not in [1, 2]" + " and so on" * 30)
    assert freight("generate", "--prompt", "x").err == f"error: {llm.fails}\n"


def test_a_bug_of_ours_is_not_hidden(freight: Run, llm: Any) -> None:
    llm.fails = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        freight("generate", "--prompt", "x")


def test_ctrl_c_is_130(freight: Run, llm: Any) -> None:
    llm.fails = KeyboardInterrupt
    answer = freight("generate", "--prompt", "x")
    assert answer.code == 130
    assert "Traceback" not in answer.err


def test_chat_keeps_the_conversation_until_it_is_reset(
    freight: Run, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "hi\n\nhow are you\n/reset\nbye\n")
    answer = freight("chat", "--system", "be brief")
    assert (answer.code, answer.out) == (0, "one two three\n" * 3)
    assert "/clear" in answer.err
    said = len("one two three")
    assert llm.asked == [
        [8, 2],
        [8, 2, said, 11],
        [8, 3],
    ]  # the fake prompt is the length of each message


def test_a_message_that_begins_with_two_slashes_is_sent_with_one(
    freight: Run, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "//hi\n/clear \n/etc\na//b\n /x\n/exit\nnever\n")
    answer = freight("chat")
    assert answer.err.count("no such command") == 1
    assert llm.asked == [
        [3],
        [4],
        [4, 13, 3],
    ]  # lengths of "/hi", of "a//b" and " /x"; only /etc is no command


def test_chat_goes_on_after_a_message_that_does_not_fit(
    freight: Run, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.fails = RequestError("the prompt is too long")
    type_in(monkeypatch, "hi\nhello\n")
    answer = freight("chat")
    assert answer.code == 0
    errors = [line for line in answer.err.splitlines() if "error:" in line]
    assert len(errors) == 2
    for line in errors:
        assert_names(line, "the prompt is too long", "/clear")
    assert llm.asked == [[2], [5]]


def test_ctrl_c_stops_an_answer_but_not_the_chat(
    freight: Run, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.fails = KeyboardInterrupt
    type_in(monkeypatch, "hi\nhello\n")
    assert freight("chat").code == 0
    assert llm.asked == [[2], [5]]


def test_chat_without_a_template_is_refused_before_anything_is_read(
    freight: Run, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.template = False
    type_in(monkeypatch, "hi\n")
    answer = freight("chat")
    assert (answer.code, answer.out) == (2, "")
    assert "freight generate" in answer.err
    assert not hasattr(llm, "made")


def test_chat_needs_a_tokenizer(freight: Run, llm: Any) -> None:
    answer = freight("chat", "--skip-tokenizer-init")
    assert answer.code == 2
    assert "freight generate" in answer.err
    assert not hasattr(llm, "made")


def test_env_says_the_same_to_people_and_to_programs(freight: Run) -> None:
    facts = json.loads(freight("env", "--json").out)
    assert facts["versions"]["torch"]
    assert facts["cores"] >= 1
    assert 0 < facts["memory_free"] <= facts["memory_total"]
    assert facts["device"] in ("cpu", "cuda")
    assert facts["kernels"] == select_kernels("auto").name
    assert facts["kernels_because"]
    assert facts["cpu_builds"] == {build: why or None for build, why in obstacles().items()}
    assert facts["prefetch"] in ("past the caches", "into the caches", None)
    text = freight("env").out
    assert facts["versions"]["torch"] in text
    assert f"{facts['memory_total'] / 2**30:.1f} GiB" in text
    assert len(text.splitlines()) == len(facts)


def test_env_lists_the_gpus(freight: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    both = (Card("NVIDIA H100", 80 * gib, 70 * gib), Card("NVIDIA H100", 80 * gib, 8 * gib))
    monkeypatch.setattr(device, "cards", lambda: both)
    facts = json.loads(freight("env", "--json").out)
    assert facts["gpus"][1] == {
        "name": "NVIDIA H100",
        "memory_total": 80 * gib,
        "memory_free": 8 * gib,
    }
    text = freight("env").out
    (line,) = [line for line in text.splitlines() if line.startswith("gpus")]
    assert_names(line, "70.0 GiB of 80.0 GiB", "8.0 GiB of 80.0 GiB")
    assert len(text.splitlines()) == len(facts)


def test_no_gpu_is_said_to_be_none(freight: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert json.loads(freight("env", "--json").out)["gpus"] == []
    assert line_naming(freight("env").out, "gpus").split() == ["gpus", "none"]


@pytest.mark.skipif(not library.runnable(), reason="there are no compiled kernels")
def test_env_lists_the_builds_and_what_was_measured(
    freight: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = library.runnable()[-1]
    variable = {"FREIGHT_KERNELS": f"cpu-{build}"}
    monkeypatch.setattr(tuning, "tune", lambda loaded: loaded.build == build)
    facts = json.loads(freight("env", "--json", **variable).out)
    assert (facts["kernels"], facts["device"]) == (f"cpu-{build}", "cpu")
    assert facts["kernels_because"] == f"{build} (--kernels)"
    assert facts["prefetch"] == "past the caches"
    lines = freight("env").out.splitlines()
    (line,) = [line for line in lines if line.startswith("cpu builds")]
    assert f"{build}: can run" in line
    for other, why in obstacles().items():
        assert f"{other}: {why or 'can run'}" in line


def test_env_without_compiled_kernels_measures_nothing(freight: Run) -> None:
    facts = json.loads(freight("env", "--kernels", "reference", "--json").out)
    assert (facts["kernels"], facts["prefetch"]) == ("reference", None)
    assert facts["kernels_because"] == "reference (--kernels)"


def test_env_reports_where_no_kernels_can_run(
    freight: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise KernelError("no C compiler")

    monkeypatch.setattr(select, "select_kernels", refuse)
    facts = json.loads(freight("env", "--json").out)
    assert (facts["kernels"], facts["note"]) == (None, "no C compiler")
    assert "no C compiler" in freight("env").out


@pytest.mark.parametrize("argv", [["demo"], ["--model-id", "demo"], []])
def test_inspect_takes_the_model_in_both_forms(freight: Run, argv: list[str]) -> None:
    answer = freight("inspect", *argv, "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["model"] == "demo"


def test_inspect_of_nothing_is_an_error(freight: Run) -> None:
    answer = freight("inspect", FREIGHT_MODEL_ID="/nowhere/at/all")
    assert answer.code in (1, 2)
    assert "/nowhere/at/all" in answer.err


def test_version(freight: Run) -> None:
    answer = freight("--version")
    assert (answer.code, answer.out.count(".")) == (0, 2)


def test_an_unknown_verb_suggests_the_nearest(freight: Run) -> None:
    answer = freight("generat")
    assert answer.code == 2
    assert "generate" in answer.err


def test_no_verb_shows_help(freight: Run) -> None:
    answer = freight()
    assert answer.code == 2
    assert "generate" in answer.out + answer.err
