"""--speculate and --speculative-config: how many drafts a step has, what drafts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freight.errors import ConfigError
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check
from freight.settings.speculation import (
    DEFAULT_DRAFTS,
    MOST_DRAFTS,
    HeadKind,
    HeadSource,
    Speculation,
    speculation,
    written,
)


@pytest.mark.parametrize(
    ("speculate", "config", "count"),
    [
        (None, None, DEFAULT_DRAFTS),
        (0, None, 0),
        (5, None, 5),
        (None, {"method": "ngram", "num_speculative_tokens": 4}, 4),
        (None, {"method": "suffix"}, DEFAULT_DRAFTS),
        (None, {"method": "ngram", "num_speculative_tokens": 0}, 0),
        (4, {"method": "suffix", "num_speculative_tokens": 4}, 4),
        (MOST_DRAFTS, None, MOST_DRAFTS),
    ],
)
def test_drafts_of_a_step(speculate: Any, config: Any, count: int) -> None:
    read = speculation(speculate, None if config is None else json.dumps(config))
    assert read == Speculation(count)


SECOND = HeadSource(HeadKind.MODEL, "./small")


@pytest.mark.parametrize(
    ("speculate", "config", "drafts"),
    [
        ("auto", None, Speculation(DEFAULT_DRAFTS, finds_head=True)),
        ("6", None, Speculation(6)),
        (None, {"model": "./small"}, Speculation(DEFAULT_DRAFTS, False, SECOND)),
        (
            None,
            {"method": "draft_model", "model": "./small", "draft_tensor_parallel_size": 2},
            Speculation(DEFAULT_DRAFTS, False, SECOND, ranks=2),
        ),
        (
            "auto",
            {"method": "draft_model", "model": "./small", "num_speculative_tokens": 3},
            Speculation(3, True, SECOND),
        ),
        (3, {"model": "./small"}, Speculation(3, False, SECOND)),
        (
            None,
            {"method": "eagle3", "model": "./head"},
            Speculation(DEFAULT_DRAFTS, False, HeadSource(HeadKind.EAGLE3, "./head")),
        ),
        (None, {"method": "mtp"}, Speculation(DEFAULT_DRAFTS, False, HeadSource(HeadKind.MTP))),
        (None, {"method": "deepseek_mtp"}, Speculation(8, False, HeadSource(HeadKind.MTP))),
        ("auto", {"method": "ngram"}, Speculation(DEFAULT_DRAFTS, finds_head=True)),
    ],
)
def test_what_drafts(speculate: Any, config: Any, drafts: Speculation) -> None:
    assert speculation(speculate, None if config is None else json.dumps(config)) == drafts


@pytest.mark.parametrize(
    ("speculate", "config", "says"),
    [
        (-1, None, "--speculate -1 must be an integer from 0 to 63"),
        (64, None, "--speculate 64 must be"),
        (True, None, "--speculate True must be"),
        (1.5, None, "--speculate 1.5 must be"),
        (None, "{method}", "is not JSON"),
        (None, "[]", "is not an object"),
        ("--5", None, "--speculate '--5' must be an integer"),
        ("9" * 5000, None, "must be an integer from 0 to 63"),
        ("twelve", None, "--speculate 'twelve' must be an integer from 0 to 63 or 'auto'"),
        (
            None,
            '{"method": "medusa"}',
            "method 'medusa': choose ngram, suffix, draft_model, mtp or",
        ),
        (None, '{"method": "draft_model"}', "'draft_model' needs the folder of what drafts; write"),
        (None, '{"method": "eagle3", "model": 5}', "'eagle3' needs the folder"),
        (None, '{"method": "mtp", "model": "x"}', "'mtp' takes the layers of the model's own"),
        (None, '{"method": "ngram", "model": "x"}', "own text, and takes no model"),
        (
            None,
            '{"model": "x", "draft_tensor_parallel_size": 2}',
            "is 2, and --tensor-parallel-size is 1",
        ),
        (None, '{"model": "x", "quantization": "fp8"}', "loaded as the model is: omit it"),
        (None, '{"num_speculative_tokens": 3}', "method None: choose"),
        (None, '{"method": "ngram", "prompt_lookup_max": 4}', "'prompt_lookup_max': how long"),
        (
            None,
            '{"method": "ngram", "lookahead": 4}',
            "'lookahead' is unknown; known are method, model",
        ),
        (None, '{"method": "ngram", "num_speculative_tokens": "5"}', "num_speculative_tokens '5'"),
        (5, '{"method": "ngram", "num_speculative_tokens": 4}', "--speculate is 5 and"),
    ],
)
def test_what_is_refused(speculate: Any, config: str | None, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(EngineArgs(speculate=speculate, speculative_config=config))
    assert says in str(error.value)


def test_a_dictionary_in_python() -> None:
    args = EngineArgs.from_options(speculative_config={"method": "ngram"})
    assert args.speculative_config == '{"method": "ngram"}'
    assert EngineArgs.from_options(speculative_config=None).speculative_config is None
    with pytest.raises(ConfigError, match="give a dictionary"):
        EngineArgs.from_options(speculative_config=5)


def test_a_path_of_python_is_the_folder() -> None:
    read = speculation(None, written({"model": Path("small")}))
    assert read.head == HeadSource(HeadKind.MODEL, "small")
