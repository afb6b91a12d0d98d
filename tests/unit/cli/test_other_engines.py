"""Options of other engines: each gets the sentence that helps, as keyword and as flag."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names, refuses

from freight.base.other_engines.instead import SENTENCES, as_flag, instead_of
from freight.base.other_engines.tgi import TGI_OPTIONS
from freight.base.other_engines.values import OTHER_QUANTIZATIONS
from freight.cli.options import ENGINE_FLAGS
from freight.cli.serve import MODELS_FLAGS, SERVER_FLAGS
from freight.errors import ConfigError
from freight.settings.engine import EngineArgs
from freight.settings.resolve import check

OURS = (
    {field.name for field in fields(EngineArgs)}
    | {flag.field for flag in (*SERVER_FLAGS, *MODELS_FLAGS)}
    | {"model_id"}
)
ASKED = {  # option -> what the answer must name
    "gpu_memory_utilization": "kv_cache_memory",
    "swap_space": "nothing is swapped",
    "calculate_kv_scales": "kv_scales='dynamic'",
    "data_parallel_size": "a server is one engine",
    "split_mode": "pipeline_parallel_size divides layers over GPUs",
    "tensor_split": "use pp_layers",
    "main_gpu": "CUDA_VISIBLE_DEVICES",
    "tp_size": "use tensor_parallel_size",
    "enforce_eager": "captured and replayed",
    "trust_remote_code": "no code of a checkpoint",
    "max_seq_len": "use max_model_len",
    "max_total_tokens": "use max_model_len",
    "quantize": "use quantization",
    "num_shard": "use tensor_parallel_size",
    "enable_chunked_prefill": "max_num_batched_tokens",
    "long_prefill_token_threshold": "max_step_seconds bounds",
    "model_id": "use model",
    "speculative_model": 'write speculative_config=\'{"method": "draft_model", "model": "FOLDER"}\'',
    "speculative_algorithm": "in the place of STANDALONE, NEXTN and NGRAM",
    "speculative_draft_model_path": 'write speculative_config=\'{"method": "eagle3"',
    "model_draft": 'write speculative_config=\'{"method": "draft_model"',
    "draft_p_min": "how often they came true: omit it",
    "num_speculative_tokens": "use speculate",
}


@pytest.mark.parametrize("name", ASKED)
def test_an_option_of_another_engine_in_python(name: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"unknown option {name!r}: ") + ".*" + re.escape(ASKED[name])
    ):
        EngineArgs.from_options(**{name: 1})


@pytest.mark.parametrize("verb", ["generate", "serve", "run", "chat", "evaluate", "evaluate long"])
def test_the_same_on_the_command_line(freight: Callable[..., Any], verb: str) -> None:
    for given, says in (
        ("--gpu-memory-utilization 0.9", "--kv-cache-memory='4GiB'"),
        ("--gpu_memory_utilization=0.9", "--kv-cache-memory='4GiB'"),
        ("--decode-context-parallel-size 2", "a model runs on one device"),
        ("-pcp 2", "a model runs on one device"),
        ("--calculate-kv-scales", "--kv-scales='dynamic'"),
        ("--swap-space 4", "nothing is swapped"),
        ("--enforce-eager", "omit it"),
        ("--max-total-tokens 5", "use --max-model-len"),
    ):
        answer = freight(*verb.split(), "demo", *given.split())
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("error: no such option: --")
        assert says in answer.err


@pytest.mark.parametrize("verb", ["generate", "chat", "evaluate"])
@pytest.mark.parametrize("given", ["--nnodes 2", "--node-rank 1", "--master-addr host"])
def test_several_machines_are_for_the_server(
    freight: Callable[..., Any], verb: str, given: str
) -> None:
    answer = freight(verb, "demo", *given.split())
    assert answer.code == 2
    assert_names(answer.err, "several machines", "freight serve", "omit it")


def test_the_address_of_several_machines_is_two_options(freight: Callable[..., Any]) -> None:
    answer = freight("serve", "demo", "--dist-init-addr", "host:1")
    assert answer.code == 2
    assert "write --master-addr and --master-port" in answer.err


def test_a_sentence_names_no_option_that_the_verb_lacks(freight: Callable[..., Any]) -> None:
    answer = freight("inspect", "demo", "--gpu-memory-utilization", "0.9")
    assert answer.code == 2
    assert "No such option" in answer.err
    assert "--kv-cache-memory" not in answer.err


def test_an_unknown_option_of_nobody_names_the_nearest() -> None:
    with refuses(ConfigError, "'kv_cache_dtipe'", "did you mean kv_cache_dtype"):
        EngineArgs.from_options(kv_cache_dtipe="fp8")


@pytest.mark.parametrize("name", [*SENTENCES, *TGI_OPTIONS])
def test_a_sentence_names_options_that_exist(name: str) -> None:
    option = TGI_OPTIONS.get(name)
    named = re.findall(r"\{(\w+)\}", SENTENCES.get(name, option.instead if option else ""))
    named += [option.field] if option and option.field else []
    assert set(named) <= OURS
    sentence = instead_of(name, as_flag)
    assert sentence
    assert not re.search(r"\{\w+\}", sentence)


def test_no_option_of_ours_is_taken_for_another_engines() -> None:
    assert not {flag.field for flag in ENGINE_FLAGS} & set(SENTENCES)
    assert not {flag.field for flag in SERVER_FLAGS} & set(SENTENCES)


@pytest.mark.parametrize("method", OTHER_QUANTIZATIONS)
def test_a_quantization_of_another_engine_says_what_to_do(method: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--quantization '{method}': .*(omit it|use '(fp8|int8)')"
    ):
        check(EngineArgs(quantization=method))


def test_the_reference_of_options_says_where_they_go() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    read = [
        name
        for name, option in TGI_OPTIONS.items()
        if option.field or name == "max_concurrent_requests"
    ]
    assert [name for name in read if f"`{name.upper()}`" not in text] == []
