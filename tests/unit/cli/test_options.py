"""Every engine option, as a flag and as an environment variable, reaches EngineArgs; bad ones are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import assert_names
from typer.main import get_command

from freight.cli.main import app
from freight.cli.options import ENGINE_FLAGS, NODES, SAMPLING_FLAGS
from freight.sampling import SamplingParams
from freight.settings.engine import EngineArgs
from freight.structured import StructuredOutputs

Run = Callable[..., Any]

GIVEN = {  # field -> (as typed, as understood)
    "tokenizer": ("other", "other"),
    "revision": ("v2", "v2"),
    "dtype": ("float32", "float32"),
    "kv_cache_dtype": ("fp8_e5m2", "fp8_e5m2"),
    "kv_scales": ("dynamic", "dynamic"),
    "quantization_param_path": ("scales.json", "scales.json"),
    "max_model_len": ("100", 100),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("200", 200),
    "max_step_seconds": ("0.25", 0.25),
    "scheduling_policy": ("priority", "priority"),
    "block_size": ("32", 32),
    "kv_cache_memory": ("64MiB", "64MiB"),
    "speculate": ("4", 4),
    "speculative_config": ('{"method": "ngram"}', '{"method": "ngram"}'),
    "kv_store": ("store", "store"),
    "device": ("cpu", "cpu"),
    "kernels": ("reference", "reference"),
    "attention_compute": ("fp8", "fp8"),
    "activations": ("bfloat16", "bfloat16"),
    "threads": ("1", 1),
    "tensor_parallel_size": ("1", 1),
    "rank_timeout": ("5", 5.0),
    "seed": ("5", 5),
}


@pytest.fixture(autouse=True)
def scales_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scales.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


def test_there_is_one_option_for_each_field() -> None:
    assert {flag.field for flag in ENGINE_FLAGS} == {field.name for field in fields(EngineArgs)} - {
        "model"
    }


def test_sampling_options_are_fields_of_sampling_params() -> None:
    left_out = {
        "n",
        "seed",
        "logprobs",
        "prompt_logprobs",
        "detokenize",
        "cache_salt",
        "prediction",
    }  # of no use at a terminal
    left_out |= {"structured_outputs"}  # generate has an option for each form
    left_out |= {"pooling"}  # of freight embed
    left_out |= {
        "allowed_token_ids",
        "bad_words",
        "include_stop_str_in_output",
        "priority",
        "thinking_tags",
        "truncate_prompt_tokens",
    }  # of clients
    assert {flag.field for flag in SAMPLING_FLAGS} == {
        field.name for field in fields(SamplingParams)
    } - left_out


def test_without_options_the_defaults_are_those_of_engine_args(freight: Run, llm: Any) -> None:
    assert freight("generate", "--prompt", "x").code == 0
    assert llm.made == vars(EngineArgs())


@pytest.mark.parametrize("field", GIVEN)
def test_a_flag_and_its_variable_mean_the_same(freight: Run, llm: Any, field: str) -> None:
    typed, understood = GIVEN[field]
    assert freight("generate", "--prompt", "x", "--" + field.replace("_", "-"), typed).code == 0
    by_flag = llm.made
    assert freight("generate", "--prompt", "x", **{f"FREIGHT_{field.upper()}": typed}).code == 0
    assert by_flag == llm.made == vars(EngineArgs(**{field: understood}))


def test_a_flag_wins_over_its_variable(freight: Run, llm: Any) -> None:
    freight(
        "generate", "--prompt", "x", "--kv-cache-dtype", "fp8", FREIGHT_KV_CACHE_DTYPE="fp8_e5m2"
    )
    assert llm.made["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize(
    ("argv", "environ", "field", "value"),
    [
        (["--speculate", "auto"], {}, "speculate", "auto"),
        ([], {"FREIGHT_SPECULATE": "auto"}, "speculate", "auto"),
        (["--no-enable-prefix-caching"], {}, "enable_prefix_caching", False),
        (
            ["--enable-prefix-caching"],
            {"FREIGHT_ENABLE_PREFIX_CACHING": "0"},
            "enable_prefix_caching",
            True,
        ),
        ([], {"FREIGHT_ENABLE_PREFIX_CACHING": "false"}, "enable_prefix_caching", False),
        (["--skip-tokenizer-init"], {}, "skip_tokenizer_init", True),
        ([], {"FREIGHT_SKIP_TOKENIZER_INIT": "1"}, "skip_tokenizer_init", True),
    ],
)
def test_switches_and_words(
    freight: Run, llm: Any, argv: list[str], environ: dict[str, str], field: str, value: object
) -> None:
    assert freight("generate", "--prompt-token-ids", "1", *argv, **environ).code == 0
    assert (type(llm.made[field]), llm.made[field]) == (type(value), value)


@pytest.mark.parametrize(
    ("argv", "environ", "model"),
    [
        ([], {}, "demo"),
        (["some/model"], {}, "some/model"),
        (["--model-id", "some/model"], {}, "some/model"),
        ([], {"FREIGHT_MODEL_ID": "some/model"}, "some/model"),
        (["typed"], {"FREIGHT_MODEL_ID": "some/model"}, "typed"),
        (["--model-id", "typed"], {"FREIGHT_MODEL_ID": "some/model"}, "typed"),
    ],
)
def test_the_model_in_every_form(
    freight: Run, llm: Any, argv: list[str], environ: dict[str, str], model: str
) -> None:
    assert freight("generate", *argv, "--prompt", "x", **environ).code == 0
    assert llm.made["model"] == model


@pytest.mark.parametrize(
    "verb",
    [
        "generate --prompt x",
        "chat",
        "serve",
        "inspect",
        "plan --memory 1GiB",
        "audit",
        "evaluate",
        "evaluate layers",
        "bench latency",
    ],
)
@pytest.mark.parametrize(
    ("argv", "environ", "what"),
    [
        ([""], {}, "MODEL is ''"),
        ([" "], {"FREIGHT_MODEL_ID": "demo"}, "MODEL is ' '"),
        (["--model-id", ""], {}, "--model-id or FREIGHT_MODEL_ID is ''"),
        ([], {"FREIGHT_MODEL_ID": ""}, "FREIGHT_MODEL_ID is ''"),
    ],
)
def test_an_empty_model_is_never_the_demo_model(
    freight: Run, verb: str, argv: list[str], environ: dict[str, str], what: str
) -> None:
    answer = freight(*verb.split(), *argv, **environ)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"error: {what}: name a model, or leave it out\n"


def test_both_forms_of_the_model_at_once_are_refused(freight: Run) -> None:
    answer = freight("generate", "a", "--model-id", "b", "--prompt", "x")
    assert answer.code == 2
    assert_names(answer.err, "error: MODEL is 'a'", "--model-id 'b'", "one of the two")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kv-cache-dtype", "fp9"], "choose auto, bfloat16"),
        (["--dtype", "fp32"], "choose auto"),
        (["--device", "gpu"], "auto, cpu or cuda"),
        (["--kernels", "fast"], "auto, reference, cpu-"),
        (["--kv-scales", "dynamc"], "did you mean dynamic?"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 "),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens 0 "),
        (["--max-model-len", "-3"], "--max-model-len -3 "),
        (["--threads", "0"], "--threads 0 "),
        (["--max-model-len", "many"], "max-model-len"),
        (["--block-size", "7"], "block-size"),
        (["--kv-cache-memory", "lots"], "kv-cache-memory"),
        (["--speculate", "many"], "--speculate 'many' must be an integer from 0 to 63 or 'auto'"),
        (["--kv-cache-dtipe", "fp8"], "--kv-cache-dtype"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "-3"], "max_tokens"),
        (["--n", "0"], "n is 0"),
        (["--logit-bias", "5"], "ID=NUMBER"),
    ],
)
def test_a_bad_value_is_refused_before_a_model_is_made(
    freight: Run, llm: Any, argv: list[str], says: str
) -> None:
    answer = freight("generate", "--prompt", "x", *argv)
    assert answer.code == 2
    assert says in answer.err
    assert answer.out == ""
    assert not hasattr(llm, "made")


def test_a_bad_variable_is_named(freight: Run) -> None:
    answer = freight("generate", "--prompt", "x", FREIGHT_MAX_NUM_SEQS="abc")
    assert answer.code == 2
    assert "FREIGHT_MAX_NUM_SEQS" in answer.err


def test_sampling_options_reach_sampling_params(freight: Run, llm: Any) -> None:
    argv = "--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --stop a --stop b"
    argv += " --stop-token-ids 3 --stop-token-ids 4 --ignore-eos --presence-penalty 0.25 --frequency-penalty 0.5"
    argv += (
        " --repetition-penalty 1.5 --logit-bias 7=-2.5 --logit-bias 8=1 --no-skip-special-tokens"
    )
    assert freight("generate", "--prompt", "x", *argv.split()).code == 0
    assert llm.params == [
        SamplingParams(
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            stop=["a", "b"],
            stop_token_ids=[3, 4],
            ignore_eos=True,
            presence_penalty=0.25,
            frequency_penalty=0.5,
            repetition_penalty=1.5,
            logit_bias={7: -2.5, 8: 1.0},
            skip_special_tokens=False,
        )
    ]


def test_help_names_every_option_and_its_variable(freight: Run) -> None:
    serve, generate = (
        " ".join(freight(verb, "--help").out.split()) for verb in ("serve", "generate")
    )
    for flag in ENGINE_FLAGS:
        for text in (serve, generate):
            named = text is serve or flag.field not in NODES
            assert (f"{flag.name} " in text) == named
            assert (flag.envvar in text) == named


def test_every_option_has_its_sentence_in_the_documentation() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = [
        (verb, option)
        for verb, command in commands.items()
        for one in (command, *getattr(command, "commands", {}).values())
        for option in one.params
    ]
    assert len(options) > 2 * len(ENGINE_FLAGS)
    for verb, option in options:
        assert f"`freight {verb}`" in documented
        if option.param_type_name == "option" and option.name != "model_id":
            assert any(
                f"`{spelling}`" in documented or f"`{spelling} " in documented
                for spelling in option.opts
            )
        if option.envvar:
            assert option.envvar in documented


def test_the_form_of_a_completion(freight: Run, llm: Any, tmp_path: Path) -> None:
    (tmp_path / "form.json").write_text('{"type": "null"}')
    for given, form in (
        (["--json-schema", "form.json"], StructuredOutputs(json={"type": "null"})),
        (["--regex", "a+"], StructuredOutputs(regex="a+")),
        (["--choice", "a", "--choice", "b"], StructuredOutputs(choice=["a", "b"])),
        ([], None),
    ):
        assert freight("generate", "--prompt", "x", *given).code == 0
        assert llm.params[0].structured_outputs == form


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--regex", "a", "--choice", "b"], "one of --json-schema"),
        (["--json-schema", "missing.json"], "missing.json cannot be read"),
        (["--json-schema", "scales.json", "--regex", "a"], "one of --json-schema"),
        (["--json-schema", "text.json"], "error: --json-schema text.json is not valid JSON"),
        (["--regex", "a" * 5000], "error: --regex has 5000 characters; at most 4096 bytes"),
    ],
)
def test_a_form_that_cannot_be_is_refused(
    freight: Run, llm: Any, given: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "text.json").write_text("no JSON")
    answer = freight("generate", "--prompt", "x", *given)
    assert answer.code == 2
    assert says in " ".join(answer.err.split())
