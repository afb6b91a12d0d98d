"""The public names of other tools' interfaces: scripts and pickles import them as `freight.NAME`,
wherever the code lies.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

PUBLIC = {
    "auto_fp8": {"AutoFP8ForCausalLM", "BaseQuantizeConfig"},
    "llm_compressor": {"OneshotModel", "QuantizationArgs", "QuantizationModifier", "oneshot"},
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


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_without_lm_eval_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "lm_eval").mkdir()  # hides the installed one
    (tmp_path / "lm_eval" / "__init__.py").write_text("")
    done = run("-m", "freight.lm_eval", "--help", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: lm-eval is needed (")
    assert done.stderr.count("\n") == 1
