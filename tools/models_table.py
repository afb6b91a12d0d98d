"""Write docs/models.md: what runs, how it was compared, and its share of a public list of models.

    python tools/models_table.py            prints the document
    python tools/models_table.py --write    writes docs/models.md, and the count in README.md

Every cell comes from `model_facts.py` and `published_models.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model_facts import (
    ROOT,
    Tables,
    native_types,
    of_attention,
    of_feed_forward,
    of_norms,
    read_tests,
    united,
)
from published_models import (
    FOREIGN,
    Published,
    ask,
    published_files,
    read_file,
    read_others,
    read_recipes,
    unreadable,
)

from freight.model.architectures import ARCHITECTURES
from freight.model.config.mechanisms import MECHANISMS
from freight.model.config.model import ModelConfig
from freight.model.config.parse import parse_model_config
from freight.model.config.registry import FAMILIES

DOCUMENT = ROOT / "docs/models.md"
README = ROOT / "README.md"
MARKERS = ("<!-- models:begin -->\n", "<!-- models:end -->")
# Well-known model types without a recipe, for the table of refused ones
ALSO_ASKED = ("bloom", "falcon", "falcon_h1", "gemma3n", "granite_swa", "jamba", "llava", "t5")
_OWN_CODE = {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"}
# Changes of a Llama's config.json, each of which is refused
ASKED_FORMS: Mapping[str, Mapping[str, Any]] = {
    "a rope that changes with the length of the text": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}
    },
    "code in the checkpoint, for a model type without a row": {
        "model_type": "baichuan",
        "auto_map": _OWN_CODE,
    },
    "a key that changes what is computed, and that the row does not have": {"use_logn_attn": True},
    "GPTQ in 8 bits": {"quantization_config": {"quant_method": "gptq", "bits": 8}},
    "AWQ's GEMV form": {
        "quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}
    },
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "OpenAI's MXFP4, except gpt-oss's": {"quantization_config": {"quant_method": "mxfp4"}},
}
TEXT = """\
# Models

`python tools/models_table.py --write` writes this page from the rows of `model/config/families/`, the tables of the
tests and the errors of the code. `freight inspect MODEL` says for any config.json how it runs.

## Published models

[vLLM's recipes]({source}) (commit `{commit}` of {date}) name {num_published} models that generate text, which
`tools/recipes.json` lists. Models of speech, transcription, text in pictures and diffusion are left out. Models of
text and pictures count with their text. Each model is in one of three groups. Those of the first two run:

- *file read*: its published config.json is in `tests/fixtures/published/`, and Freight reads the model and the form
  of the weights in it. [aiconfigurator](https://github.com/ai-dynamo/aiconfigurator) collected the files; those of
  four encoders were written down by hand. Excerpts
  do not count: an excerpt has neither `transformers_version` nor `auto_map`.
- *file not seen*: Freight runs the model type and reads one of the forms of weights that the recipe names (BF16,
  FP8, MXFP4). A key in the file may still be refused. The model types are those of the classes that run the models
  in transformers or vLLM.
- *refused*: by its published file, or an excerpt of it, where there is one ({refused_seen} models); else by model
  type, or by the form of the weights. [Refused, and why](#refused-and-why) has the reasons.

{counts}

{foreign}
This is about config.json: the weights of these models were not loaded, and may be too large for one machine.

{running}

Other published files that were read:

{others}

## Refused, and why

The reasons are those of the errors. A model that needs several things is in several rows, so the numbers add up to
more than the {num_refused} that are refused. *Others* are published files of models that are not on the list, and
some `model types` with the defaults of transformers.

{refused}

A model type that runs is not enough. These are refused too:

{forms}

## Families with a row

These run on Freight's own decoder and kernels ([add-a-model.md](add-a-model.md)). All of them have grouped-query
attention with a rope, unless the table says otherwise. "By config" means that some variants of the tests have it
and others do not. Numbers of experts are those of a config.json that names none.

{layers}

What was compared:

- *logits compared*: the variants of `tests/parity/variants.py`. Their float32 logits are within 1e-4 of
  transformers', with the compiled CPU kernels and with the reference. Those with a * are compared in bfloat16 too.
  `mistral3` and `gemma3` are compared with their text models in `tests/parity/`. So are `glm46v`, `glmga`,
  `internvl`, `internvl_chat`, `interns1`, `kimi_k25` and `phi4mm` in `tests/parity/test_wrapped.py`. "As" another
  type: transformers does not know this one. There a small checkpoint of it is compared with transformers' model of
  the other type and the same weights.
- *same bits*: the variants for which `tests/e2e/test_equivalences.py` compares chunks, batches, prefix hits and
  preemption to the bit, with a cache in 16 bits and in E4M3. `make test` has those after "always", whose layers
  differ. `make test-all` has all.
- *kernels*: the CPU kernels and the Triton kernels both have every operation. Those of Triton run in its interpreter,
  and `make test-all` compiles them for {num_targets} GPUs ({targets}).
  Compared in the interpreter: {triton}.
- *steps of Nemotron-H* are bounded by `time_step_limit`, as in NVIDIA's code. transformers 5.23 bounds them from below
  by `time_step_min` instead (transformers#48989), so the models compared with it have a `time_step_min` of 1e-30.
- *norms of latents* (MLA) have an eps of 1e-6, as in transformers 5.23, whatever `rms_norm_eps` is (1e-5 in
  GLM-4.7-Flash).
- *sparse attention of DeepSeek-V3.2 and GLM-5* (DSA) runs in contexts of up to `index_topk` tokens, 2,048 in
  published files, where the indexer chooses all tokens and its tensors are not read. With `--kernels reference` and
  a larger `--max-model-len` they run beyond it, slowly ([internals/steps.md](internals/steps.md#sparse-attention)).
- *norm_topk_prob of DeepSeek-V2*, false in its files, is ignored, as in transformers 5.23. In DeepSeek's own code,
  true means weights that are divided by their sum and not multiplied by `routed_scaling_factor`.
- *limits of Ling 3.0's experts* (`expert_swiglu_limit_list`, `share_expert_swiglu_limit_list`) bound activations of
  late layers in the publisher's models. transformers 5.23 ignores them, so there is nothing to compare with, and a
  file with a limit is refused. `--ignore-config-keys` with both names computes what transformers does.
- *FP8 files*: the same code reads Linear modules of every family, in all {num_forms} forms of
  `tests/formats/forms.py`, compared on a Llama ([checkpoint-formats.md](checkpoint-formats.md)). Experts are stored
  in further ways. For mixtures the column has the forms of `tests/formats/experts.py` and `mixtures.py` that were
  compared with experts.
- *calibration*: `freight quantize` measures weights, inputs and cache of every family in a test{uncalibrated}.
  Every scale changes what is computed, and routers stay in 16 bits (`tests/unit/calibrate/test_every_family.py`).
  Of a model of text and pictures the text model is measured. The tensors of its other parts are copied unchanged,
  and named as left out.

{compared}

## Through transformers' modules

Decoders without a row, over the same cache ([add-a-model.md](add-a-model.md#without-a-row-transformers-modules)).
`tests/e2e/test_fallback.py` compares the greedy tokens of {num_fallback} model types with those of transformers:
{fallback}.

Freight tries others too, and the check at load decides.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join((first, f"|{'---|' * len(header)}", *others))


def layers_table(tests: Tables) -> str:
    rows = []
    for model_type, wrappers in native_types().items():
        models = models_of(model_type, tests)
        moe = FAMILIES[model_type].moe
        experts = ""
        if moe is not None:
            defaults = FAMILIES[model_type].defaults
            chosen = "".join(f"{defaults[key]} of " for key in moe.top_k_keys if key in defaults)
            experts = "" if moe.count is None else f"{chosen}{moe.count} experts: "
        rows.append(
            (
                quoted((model_type, *wrappers)),
                united([of_attention(model) for model in models]),
                experts + united([of_feed_forward(model) for model in models]),
                united([of_norms(model) for model in models]),
            )
        )
    return table(("model types", "attention", "feed-forward", "norms, multipliers"), rows)


def models_of(model_type: str, tests: Tables) -> list[ModelConfig]:
    """Return the variants of a model type; for one that transformers does not know, its published
    files.
    """
    names = tests.of(model_type) or tests.states_of(model_type)
    variants = [tests.models[name] for name in names]
    files = [config for config in published_files().values() if config["model_type"] == model_type]
    return variants or [parse_model_config(config) for config in files]


def compared_table(tests: Tables) -> str:
    rows = []
    for model_type in native_types():
        variants = tests.of(model_type)
        names = [name + ("*" if name in tests.bfloat16 else "") for name in variants]
        rows.append(
            (
                f"`{model_type}`",
                compared_words(model_type, names, tests),
                same_bits(variants, tests),
                fp8_forms(model_type, tests),
            )
        )
    return table(("model type", "logits compared", "same bits", "FP8 files"), rows)


def compared_words(model_type: str, variants: Sequence[str], tests: Tables) -> str:
    """Return the variants of a model type, or what is compared in their place."""
    if variants:
        return ", ".join(variants)
    states = tests.states_of(model_type)
    if states:
        return f"final states: {', '.join(states)}"
    return f"as `{tests.same_weights[model_type]}`"


def same_bits(variants: Sequence[str], tests: Tables) -> str:
    """Return the variants that are compared to the bit; 'all' if all of them are."""
    compared = [name for name in variants if name in tests.equivalences]
    often = [name for name in variants if name in tests.fast_equivalences]
    named = ", ".join(compared) or "not compared"
    if compared and compared == list(variants):
        named = "all"
    return f"{named}; always: {', '.join(often)}" if often else named


def fp8_forms(model_type: str, tests: Tables) -> str:
    family = FAMILIES[model_type]
    if family.moe is None:
        return "all"
    if ARCHITECTURES[family.architecture].interleaved:
        return "experts: what `freight quantize` writes" + (
            "" if unreadable("mxfp4", model_type) else ", MXFP4"
        )
    return "; ".join(tests.expert_forms.get(model_type, ["experts not compared"]))


def uncalibrated(tests: Tables) -> str:
    """Return the exceptions: model types without a variant whose weights, inputs and cache were
    calibrated.
    """
    results = [name for name in native_types() if tests.quantized.isdisjoint(tests.of(name))]
    return f", except {quoted(results)}" if results else ""


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def count_table(recipes: Sequence[Published]) -> str:
    groups = {
        "all": recipes,
        "with FP8 weights (FP8, MXFP8)": [recipe for recipe in recipes if recipe.is_fp8],
        "mixtures of experts": [recipe for recipe in recipes if recipe.moe],
    }
    rows = [(name, str(len(models)), *map(str, counted(models))) for name, models in groups.items()]
    return table(("models", "number", "file read", "file not seen", "refused"), rows)


def counted(models: Sequence[Published]) -> tuple[int, int, int]:
    """Count the models that run and whose file was read, that run by model type, and that are
    refused.
    """
    running = [model.seen for model in models if model.runs]
    return sum(running), len(running) - sum(running), len(models) - len(running)


def running_table(recipes: Sequence[Published]) -> str:
    """Format the models that run, by model type."""
    running = [item for item in recipes if item.runs]
    foreign = sorted({item.family for item in running if item.verdict.runs == FOREIGN})
    rows = []
    for family in (*native_types(), *foreign):
        models = [item for item in running if item.family == family]
        read = ", ".join(item.short_name for item in models if item.seen)
        unread = ", ".join(item.short_name for item in models if not item.seen)
        if models:
            rows.append((f"`{family}`", read, unread))
    return table(("model type", "file read", "file not seen"), rows)


def others_table(others: Sequence[Published]) -> str:
    read = [item for item in others if item.runs and item.seen]
    families = sorted({item.family for item in read})
    rows = []
    for family in families:
        names = [item.short_name for item in read if item.family == family]
        rows.append((f"`{family}`", ", ".join(names)))
    return table(("model type", "files"), rows)


def refused_table(tests: Tables, recipes: Sequence[Published], others: Sequence[Published]) -> str:
    """Format a row for each reason, those of most models first. Every mechanism has a row."""
    results: dict[str, tuple[list[str], list[str]]] = {
        mechanism.name: ([], []) for mechanism in MECHANISMS
    }
    for column, models in enumerate((recipes, others)):
        for item in models:
            for reason in item.verdict.reasons:
                results.setdefault(reason, ([], []))[column].append(item.short_name)
    for model_type in sorted(set(ALSO_ASKED) - {item.model_type for item in recipes}):
        for reason in ask(model_type, tests).reasons:
            results.setdefault(reason, ([], []))[1].append(f"`{model_type}`")

    def by_number(row: tuple[str, tuple[list[str], list[str]]]) -> tuple[int, int, str]:
        reason, (models, rest) = row
        return -len(models), -len(rest), reason

    most_first = sorted(results.items(), key=by_number)
    rows = [
        (reason, str(len(models)), ", ".join(models), ", ".join(rest))
        for reason, (models, rest) in most_first
    ]
    return table(("what is missing, or why", "number", "of the list", "others"), rows)


def forms_table() -> str:
    """Format the errors about ASKED_FORMS."""
    llama = published_files()["meta-llama/Llama-2-7b-hf"]
    verdicts = {what: read_file({**llama, **config}) for what, config in ASKED_FORMS.items()}
    return table(
        ("in config.json", "reason"),
        [(what, "; ".join(result.reasons)) for what, result in verdicts.items()],
    )


def document() -> str:
    """Return all of docs/models.md."""
    tests = read_tests()
    content, recipes = read_recipes(tests)
    others = read_others(recipes)
    refused = [item for item in recipes if not item.runs]
    return TEXT.format(
        source=content["source"],
        commit=content["commit"][:12],
        date=content["date"],
        num_published=len(recipes),
        num_refused=len(refused),
        refused_seen=sum(item.name in published_files() for item in refused),
        counts=count_table(recipes),
        foreign=through_transformers(recipes),
        running=running_table(recipes),
        others=others_table(others),
        refused=refused_table(tests, recipes, others),
        forms=forms_table(),
        layers=layers_table(tests),
        compared=compared_table(tests),
        num_targets=len(tests.targets),
        targets=", ".join(tests.targets),
        num_forms=tests.num_forms,
        num_fallback=len(tests.fast | tests.slow),
        fallback=quoted(sorted(tests.fast | tests.slow)),
        triton=quoted(name for name in native_types() if name in tests.triton),
        uncalibrated=uncalibrated(tests),
    )


def through_transformers(recipes: Sequence[Published]) -> str:
    names = [recipe.short_name for recipe in recipes if recipe.verdict.runs == FOREIGN]
    if not names:
        return "All that run have a row of Freight's."
    return f"Through transformers' modules: {', '.join(names)}; all others that run have a row of Freight's."


def readme(content: str) -> str:
    """Return README.md with the current count of models between its markers in `content`."""
    _, recipes = read_recipes(read_tests())
    read, by_type, refused = counted(recipes)
    count = (
        f"Of the {len(recipes)} text models in vLLM's recipes, {read} run by their published config.json and "
        f"{by_type} by model type, their files not\nseen; {refused} are refused, and the error names what is missing.\n"
    )
    before, begin, rest = content.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    assert end, f"README.md lacks {MARKERS}"
    return before + begin + count + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description="Print docs/models.md.")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/models.md and the count in README.md instead",
    )
    if parser.parse_args().write:
        DOCUMENT.write_text(document(), encoding="utf-8")
        README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
