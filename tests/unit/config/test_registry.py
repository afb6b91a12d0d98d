"""FAMILIES: every file of model/config/families/ is found, and what few families have is theirs alone."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import freight.model.config
from freight.model.config.family import Family
from freight.model.config.registry import FAMILIES, read_rows

CONFIG = Path(freight.model.config.__path__[0])
FILES = sorted(path.stem for path in (CONFIG / "families").glob("[a-z]*.py"))
# fields of few rows that say which keys there are, and where: `check_keys` needs them before
# anything is derived
OF_FEW = {"text_key", "flat"}


def test_every_file_of_families_has_rows():
    assert read_rows(FILES) == dict(FAMILIES)
    for name in FILES:
        assert read_rows([name]), name
    assert next(iter(FAMILIES)) == "llama"  # lists of model types begin with the best known


def test_two_files_with_one_model_type_are_an_error():
    with pytest.raises(AssertionError, match="qwen"):
        read_rows(["qwen", "llama", "qwen"])


def test_what_at_most_three_rows_set_is_derived():
    few = set()
    for field in fields(Family):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if (
            default is not MISSING
            and sum(getattr(row, field.name) != default for row in FAMILIES.values()) <= 3
        ):
            few.add(field.name)
    assert few == OF_FEW, "give the row `translate` or `derive` in its file"


@pytest.mark.parametrize("name", ["attention", "model", "rope"])
def test_the_common_reading_asks_for_no_name_of_a_key(name):
    """`"rotary_dim" in family.keys` would be a family's own meaning of a key in common code."""
    compared = [
        node
        for node in ast.walk(ast.parse((CONFIG / f"{name}.py").read_text()))
        if isinstance(node, ast.Compare)
    ]
    assert not [ast.unparse(node) for node in compared if "family.keys" in ast.unparse(node)]
