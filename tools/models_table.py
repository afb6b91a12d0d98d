"""Write docs/models.md: what runs, how it was compared, and how many models of a public list that are.

    python tools/models_table.py            prints the document
    python tools/models_table.py --write    writes docs/models.md

Every cell comes from `model_facts.py`. Published models are in tools/recipes.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from model_facts import (
    ROOT,
    Published,
    Tables,
    ask,
    native_types,
    of_attention,
    of_feed_forward,
    of_norms,
    read_published,
    read_tests,
    text_types,
    united,
    unreadable,
)

from freight.config.families import FAMILIES
from freight.models.architectures import ARCHITECTURES

DOCUMENT = ROOT / "docs/models.md"
AIM = 45  # models of the list that are to run natively
# well-known model types that no recipe has, for the table of what is refused
ALSO_ASKED = ("bloom", "deepseek_v2", "falcon_h1", "gemma3n", "jamba", "mamba")
TEXT = """\
# Models

`python tools/models_table.py --write` writes this page, from the rows of `config/families.py`, the tables of the
tests and what the code says when it refuses. `freight inspect MODEL` says of any config.json how it runs.

## Published models

vLLM's recipes ({source}, commit `{commit}` of {date}) name {num_published} models that generate text. Speech,
transcription, text in pictures and diffusion are left out; of models of text and pictures, the text is meant.
`tools/recipes.json` has them, with the model types of the classes that run them in transformers or vLLM; their
config.json files were not read. A model counts as native if its model type is, and a checkpoint of it is in a form
that is read. Whether the memory of one machine holds it is another question.

{counts}

{aim}

## Families with a row

These run on Freight's own decoder and kernels ([add-a-model.md](add-a-model.md)). What they have in common is not
repeated: grouped-query attention with a rope. "By config" means that some variants of the tests have it and others do
not. Numbers of experts are those of a config.json that names none.

{layers}

What was compared:

- *logits compared*: the variants of `tests/parity/variants.py`. Their float32 logits are within 1e-4 of
  transformers', with the compiled CPU kernels and with the reference; those with a * are compared in bfloat16 too.
  `mistral3` and `gemma3` are compared with their text models in `tests/parity/`; so are `glm46v`, `glmga`,
  `internvl`, `internvl_chat`, `interns1` and `phi4mm` in `tests/parity/test_wrapped.py`.
- *same bits*: the variants for which `tests/e2e/test_equivalences.py` compares chunks, batches, prefix hits and
  preemption to the bit, with a cache in 16 bits and in E4M3. `make test` has those after "always", whose layers differ;
  `make test-all` has all.
- *kernels*: both sets have every operation. Those of Triton run in its interpreter and are compiled for four GPUs. "A
  whole model" means that one was compared with transformers there.
- *FP8 files*: one code reads Linear modules, whatever the family: all {num_forms} forms of `tests/formats/forms.py`,
  compared on a Llama ([checkpoint-formats.md](checkpoint-formats.md)). Experts are stored in further ways: for
  mixtures the column has the forms of `tests/formats/experts.py` and `mixtures.py` that were compared with experts.
- *calibration*: what `freight quantize` measured of this family in a test. Every scale changes what is computed, and
  routers stay in 16 bits (`tests/unit/calibrate/test_every_family.py`). Of a model of text and pictures it is the text
  model; the tensors of its other parts are copied as they are, and named as left out.

{compared}

## Through transformers' modules

Decoders without a row, over the same cache ([add-a-model.md](add-a-model.md#without-a-row-transformers-modules)).
`tests/e2e/test_fallback.py` compares the greedy tokens of {num_fallback} model types with those of transformers.
Others are tried, and the check at load decides.

{fallback}

## Refused by name

What the error says of the model type, for those of the list that do not run, and some others.

{refused}
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join((first, f"|{'---|' * len(header)}", *others))


def layers_table(tests: Tables) -> str:
    rows = []
    for model_type, wrappers in native_types().items():
        models = [tests.models[name] for name in tests.of(model_type)]
        moe = FAMILIES[model_type].moe
        experts = ""
        if moe is not None:
            defaults = FAMILIES[model_type].defaults
            chosen = next((defaults[key] for key in moe.top_k_keys if key in defaults), "?")
            experts = "" if moe.count is None else f"{chosen} of {moe.count} experts: "
        rows.append(
            (
                ", ".join(f"`{name}`" for name in (model_type, *wrappers)),
                united([of_attention(model) for model in models]),
                experts + united([of_feed_forward(model) for model in models]),
                united([of_norms(model) for model in models]),
            )
        )
    return table(("model types", "attention", "feed-forward", "norms, multipliers"), rows)


def compared_table(tests: Tables, published: Sequence[Published]) -> str:
    rows = []
    for model_type in native_types():
        variants = tests.of(model_type)
        native = [one for one in published if one.verdict.runs == "natively"]
        types = {one.name: one.text_type or text_types(one.model_type)[0] for one in native}
        kernels = "CPU, Triton" + (" (a whole model)" if model_type in tests.triton else "")
        rows.append(
            (
                f"`{model_type}`",
                ", ".join(name + ("*" if name in tests.bfloat16 else "") for name in variants),
                same_bits(variants, tests),
                kernels,
                fp8_forms(model_type, tests),
                ", ".join(calibrations(variants, tests)),
                ", ".join(one.short_name for one in native if types[one.name] == model_type),
            )
        )
    header = ("model type", "logits compared", "same bits", "kernels", "FP8 files", "calibration", "published models")
    return table(header, rows)


def same_bits(variants: Sequence[str], tests: Tables) -> str:
    """The variants that are compared to the bit; 'all' if that is so of every one."""
    compared = [name for name in variants if name in tests.equivalences]
    often = [name for name in variants if name in tests.fast_equivalences]
    named = "all" if compared == list(variants) else ", ".join(compared) or "not compared"
    return f"{named}; always: {', '.join(often)}" if often else named


def fp8_forms(model_type: str, tests: Tables) -> str:
    family = FAMILIES[model_type]
    if family.moe is None:
        return "all"
    if ARCHITECTURES[family.architecture].interleaved:
        return "experts: what `freight quantize` writes" + ("" if unreadable("mxfp4", model_type) else ", MXFP4")
    return "; ".join(tests.expert_forms.get(model_type, ["experts not compared"]))


def calibrations(variants: Sequence[str], tests: Tables) -> list[str]:
    found = []
    if tests.quantized & set(variants):
        pictures = any(hasattr(tests.variants[name], "vision_config") for name in variants)
        found.append("weights, inputs, cache" + (" (of the text)" if pictures else ""))
    elif tests.calibrated & set(variants):
        found.append("cache")
    return found or ["not compared"]


def refused_table(tests: Tables, published: Sequence[Published]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in published:
        if one.verdict.runs == "refused":
            reasons.setdefault((one.model_type, one.verdict.reason), []).append(one.short_name)
    for model_type in sorted(set(ALSO_ASKED) - {one.model_type for one in published}):
        verdict = ask(model_type, tests)
        if verdict.runs == "refused":
            reasons[model_type, verdict.reason] = []
    most_first = sorted(reasons.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    rows = [(f"`{name}`", reason, str(len(models)), ", ".join(models)) for (name, reason), models in most_first]
    return table(("model type", "reason", "number", "of the list"), rows)


def count_table(published: Sequence[Published]) -> str:
    groups = {
        "all": published,
        "with FP8 weights (FP8, MXFP8)": [one for one in published if one.is_fp8],
        "mixtures of experts": [one for one in published if one.moe],
    }
    ways = ("natively", "through transformers", "refused")
    rows = [
        (name, str(len(models)), *(str(sum(one.verdict.runs == way for one in models)) for way in ways))
        for name, models in groups.items()
    ]
    return table(("models", "number", *ways), rows)


def fallback_table(tests: Tables, published: Sequence[Published]) -> str:
    through = [one for one in published if one.verdict.runs == "through transformers"]
    types = sorted({one.model_type for one in through} | tests.fast | tests.slow)
    rows = []
    for model_type in types:
        names = [one.short_name for one in through if one.model_type == model_type]
        checked = "tokens compared" if model_type in tests.fast | tests.slow else "not compared"
        rows.append((f"`{model_type}`", checked, ", ".join(names)))
    return table(("model type", "state", "of the list"), rows)


def document() -> str:
    """docs/models.md, whole."""
    tests = read_tests()
    file, published = read_published(tests)
    native = sum(one.verdict.runs == "natively" for one in published)
    return TEXT.format(
        source=file["source"],
        commit=file["commit"][:12],
        date=file["date"],
        num_published=len(published),
        aim=f"The aim is {AIM} natively: " + ("reached." if native >= AIM else f"{AIM - native} more are needed."),
        counts=count_table(published),
        layers=layers_table(tests),
        compared=compared_table(tests, published),
        fallback=fallback_table(tests, published),
        refused=refused_table(tests, published),
        num_forms=tests.num_forms,
        num_fallback=len(tests.fast | tests.slow),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints docs/models.md.")
    parser.add_argument("--write", action="store_true", help="write docs/models.md instead")
    if parser.parse_args().write:
        DOCUMENT.write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
