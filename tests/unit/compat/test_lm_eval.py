"""generation_kwargs of lm-eval's own task files: taken, or refused by name before anything is
computed.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.models.utils import normalize_gen_kwargs
from tests.refusals import assert_names, refuses

from freight.errors import ConfigError, RequestError
from freight.lm_eval import FreightLM, check_generation_kwargs, sampling_options

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
    for error in refused.values():
        assert_names(error, "num_beams: 10")
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


class Unnamed(SimpleNamespace):
    """A tokenizer without BOS and EOS."""

    bos_token_id = eos_token_id = None


def stand_in(tokenizer: object) -> Any:
    """An LLM of 64 positions, for what is decided before anything is computed."""
    return SimpleNamespace(
        engine=SimpleNamespace(tokenizer=tokenizer),
        config=SimpleNamespace(device="cpu", max_model_len=64),
    )


@pytest.mark.parametrize(
    ("tokenizer", "options", "says"),
    [
        (None, {}, "skip_tokenizer_init leaves no tokenizer"),
        (Unnamed(), {}, "neither BOS nor EOS: give prefix_token_id"),
        (Unnamed(), {"max_length": 1}, "max_length is 1; it must be 2 to 64"),
        (Unnamed(), {"max_length": 65}, "max_length is 65; it must be 2 to 64"),
    ],
)
def test_a_model_that_lm_eval_cannot_use(
    tokenizer: object, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        FreightLM(llm=stand_in(tokenizer), **options)


def test_a_request_longer_than_the_context_is_refused() -> None:
    model = FreightLM(llm=stand_in(Unnamed()), prefix_token_id=7, max_length=8)
    assert (model.prefix_token_id, model.max_length) == (7, 8)
    with pytest.raises(RequestError, match="a continuation has 8 tokens"):
        model._loglikelihood_tokens([(("", "x"), [1], list(range(8)))])
    request = SimpleNamespace(args=("text", {"max_gen_toks": 8, "until": ["."]}))
    with refuses(RequestError, "max_gen_toks", "8"):
        model.generate_until([request])
