"""The public names of other tools' interfaces: scripts and pickles import them as `freight.NAME`,
wherever the code lies.
"""

from __future__ import annotations

import ast
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

PUBLIC = {
    "auto_fp8": {"AutoFP8ForCausalLM", "BaseQuantizeConfig"},
    "llm_compressor": {
        "AWQModifier",
        "GPTQModifier",
        "OneshotModel",
        "QuantizationArgs",
        "QuantizationModifier",
        "SmoothQuantModifier",
        "SpinQuantModifier",
        "oneshot",
    },
    "lm_eval": {
        "AT_ONCE",
        "COMMAND_DEVICE",
        "SCORED",
        "SEED",
        "FreightLM",
        "check_generation_kwargs",
        "main",
        "sampling_options",
    },
    "transformers": {"KV_DTYPES", "FP8Cache", "FP8Layer", "FP8SlidingLayer", "Sides"},
}


def defined(path: Path) -> set[str]:
    """The public names that a file defines itself."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")} - {"logger"}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_module_has_every_name_of_the_code(name: str) -> None:
    public, code = import_module(f"freight.{name}"), import_module(f"freight.adapters.{name}")
    assert set(public.__all__) == PUBLIC[name]
    assert defined(Path(code.__file__ or "")) <= PUBLIC[name]
    for one in PUBLIC[name]:
        assert getattr(public, one) is getattr(code, one)


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lm_eval.", "freight.lm_eval", "freight.adapters.lm_eval")
    for name in [name for name in sys.modules if name.startswith(names)]:
        monkeypatch.delitem(sys.modules, name)  # another test may have loaded them
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("freight.lm_eval", run_name="__main__")
    said = str(ended.value.code)  # is printed, and the status is 1
    assert said.startswith("error: lm-eval is needed (")
    assert "\n" not in said
