"""generation_kwargs of lm-eval's own task files: taken, or refused by name before anything is
computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.models.utils import normalize_gen_kwargs

from freight.errors import RequestError
from freight.lm_eval import check_generation_kwargs, sampling_options

TASKS = Path(lm_eval.__file__).parent / "tasks"


class Loader(yaml.SafeLoader):
    """Reads lm-eval's files; what names a function becomes None."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: None)  # type: ignore[no-untyped-call]


def published() -> dict[str, dict[str, Any]]:
    """File -> generation_kwargs, of every task file of the installed lm-eval that has its own."""
    found = {}
    for path in TASKS.rglob("*"):
        if (
            path.is_file()
            and path.name.endswith(("yaml", "yml"))
            and "generation_kwargs" in (text := path.read_text())
        ):
            options = (yaml.load(text, Loader) or {}).get("generation_kwargs")
            if options:
                found[str(path.relative_to(TASKS))] = options
    return found


@pytest.mark.slow
def test_every_task_file_of_lm_eval_is_taken_or_refused_by_name() -> None:
    tasks, refused = published(), {}
    assert len(tasks) > 300
    for name, options in tasks.items():
        try:
            check_generation_kwargs(options)
        except RequestError as error:
            refused[name] = str(error)
    assert set(refused) == {
        name for name, options in tasks.items() if options.get("num_beams", 1) != 1
    }
    assert all(
        "num_beams: 10, which Freight does not compute" in error for error in refused.values()
    )
    assert any(options.get("num_beams") == 1 for options in tasks.values())


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"num_beams": 1, "do_sample": False, "temperature": 0.0}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 0.8, "top_p": 0.95},
            {"temperature": 0.8, "top_p": 0.95},
        ),
        ({"use_cache": True, "early_stopping": True, "length_penalty": 2.0, "pad_token_id": 3}, {}),
        ({"num_beams": None, "top_k": 20, "min_new_tokens": 4}, {"top_k": 20, "min_tokens": 4}),
    ],
)
def test_what_is_taken(given: dict[str, Any], fields: dict[str, Any]) -> None:
    options = normalize_gen_kwargs(given)
    assert sampling_options({name: options[name] for name in options if name in given}) == fields


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"num_beams": 4},
            "num_beams: 4, which Freight does not compute; only 1 is taken.*--gen_kwargs num_beams=1",
        ),
        ({"typical_p": 0.9}, "typical_p: 0.9"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size: 3"),
        ({"top_kk": 3}, "no field 'top_kk' .did you mean top_k"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        check_generation_kwargs(given)
