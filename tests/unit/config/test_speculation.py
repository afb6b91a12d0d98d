"""--speculate and --speculative-config: how many drafts a step has, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freight.errors import ConfigError
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check
from freight.settings.speculation import DEFAULT_DRAFTS, MOST_DRAFTS, most_drafts


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
    assert most_drafts(speculate, None if config is None else json.dumps(config)) == count


@pytest.mark.parametrize(
    ("speculate", "config", "says"),
    [
        (-1, None, "--speculate -1 must be an integer from 0 to 63"),
        (64, None, "--speculate 64 must be"),
        (True, None, "--speculate True must be"),
        (1.5, None, "--speculate 1.5 must be"),
        (None, "{method}", "is not JSON"),
        (None, "[]", "is not an object"),
        (None, '{"method": "mtp"}', "method 'mtp': choose ngram or suffix; draft models, EAGLE"),
        (None, '{"model": "x"}', "'model': draft models, EAGLE and MTP heads are not implemented"),
        (None, '{"num_speculative_tokens": 3}', "method None: choose"),
        (None, '{"method": "ngram", "prompt_lookup_max": 4}', "'prompt_lookup_max': how long"),
        (None, '{"method": "ngram", "lookahead": 4}', "'lookahead' is unknown; known are method"),
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
