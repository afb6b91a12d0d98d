"""Write the names of another engine's options and request fields, read from its sources.

    python tools/list_engine_options.py ENGINE SOURCES --version VERSION [--commit COMMIT]

ENGINE is vllm, sglang, llama_server or tgi. SOURCES is a folder with its sources: an unpacked wheel of
vLLM or SGLang (the folder with `vllm/` or `sglang/`; of a checkout of SGLang it is `python/`), a checkout
of llama.cpp or of TGI. The file, tests/fixtures/other_engines/ENGINE.json, has facts alone, no text
of theirs: the names of each option, whether it takes a value, and the names of the fields of its
requests. Nothing of the engine is imported or run. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

OUTPUT = Path(__file__).parents[1] / "tests" / "fixtures" / "other_engines"


@dataclass(frozen=True)
class Option:
    """An option of a command line.

    names    its spellings, the first the one that the engine's help shows
    negative the spellings that turn it off
    switch   whether it takes no value
    """

    names: tuple[str, ...]
    negative: tuple[str, ...] = ()
    switch: bool = False

    def row(self) -> dict[str, object]:
        """Return it for the file; what is empty or false is left out."""
        row: dict[str, object] = {"names": list(self.names)}
        if self.negative:
            row["negative"] = list(self.negative)
        if self.switch:
            row["switch"] = True
        return row


@dataclass(frozen=True)
class Names:
    """What an engine takes. `fields` are those of requests, by the class or the file that has them;
    `values` those of options whose values Freight has as well.
    """

    sources: tuple[str, ...]
    options: list[Option]
    fields: dict[str, list[str]]
    values: dict[str, list[str]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine", choices=sorted(READERS))
    parser.add_argument("sources", type=Path)
    parser.add_argument("--version", required=True)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    names = READERS[args.engine](args.sources)
    output = args.output or OUTPUT / f"{args.engine}.json"
    output.write_text(written(args.engine, args.version, args.commit, names), encoding="utf-8")
    fields = sum(map(len, names.fields.values()))
    print(f"{output.name}: {len(_merged(names.options))} options, {fields} fields")


def written(engine: str, version: str, commit: str | None, names: Names) -> str:
    """Return the file's text: one line for each option and for each list of fields."""
    options = sorted(_merged(names.options).items())
    head = {"engine": engine, "version": version, "commit": commit, "sources": list(names.sources)}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join(f"  {json.dumps(option.row())}" for _, option in options)
    body = "\n".join(lines)
    fields = _lists(names.fields)
    values = _lists(names.values)
    return f'{{\n{body}\n "options": [\n{rows}\n ],\n "fields": {{{fields}}},\n "values": {{{values}}}\n}}\n'


def _merged(options: Iterable[Option]) -> dict[str, Option]:
    """Return the options by their first name; an option that is declared twice has the names of both."""
    merged: dict[str, Option] = {}
    for option in options:
        first = merged.get(option.names[0], option)
        names = tuple(dict.fromkeys((*first.names, *option.names)))
        merged[option.names[0]] = replace(option, names=names)
    return merged


def _lists(lists: dict[str, list[str]]) -> str:
    """Return the inside of a JSON object: a line for each of the lists, in order."""
    rows = (f"\n  {json.dumps(name)}: {json.dumps(sorted(found))}" for name, found in lists.items())
    return ",".join(rows) + ("\n " if lists else "")


# --- vLLM


def vllm_names(root: Path) -> Names:
    """Read vLLM's `serve`: options that its configurations declare, and those of its front end."""
    sources = (
        "vllm/engine/arg_utils.py",
        "vllm/entrypoints/common/cli_args.py",
        "vllm/sampling_params.py",
        "vllm/entrypoints/openai/chat_completion/protocol.py",
        "vllm/entrypoints/openai/completion/protocol.py",
    )
    engine, front, sampling, chat, completion = (_parsed(root / source) for source in sources)
    booleans = _boolean_fields(
        _parsed(path) for path in sorted((root / "vllm" / "config").glob("*.py"))
    )
    options = [
        *_added(engine, lambda call: _is_boolean(call, booleans)),
        *_added(front, lambda call: _is_boolean(call, booleans)),
    ]
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        for attribute, annotation in _fields(_class(front, name)).items():
            options.append(_of_field(attribute, "bool" in annotation))
    fields = {
        "SamplingParams": list(_fields(_class(sampling, "SamplingParams"))),
        "ChatCompletionRequest": list(_fields(_class(chat, "ChatCompletionRequest"))),
        "CompletionRequest": list(_fields(_class(completion, "CompletionRequest"))),
    }
    methods = "vllm/model_executor/layers/quantization/__init__.py"
    values = {
        "kv_cache_dtype": _chosen(_parsed(root / "vllm/config/cache.py"), "CacheDType"),
        "quantization": _chosen(_parsed(root / methods), "QuantizationMethods"),
    }
    return Names((*sources, "vllm/config", methods), options, fields, values)


def _of_field(field: str, boolean: bool) -> Option:
    name = field.replace("_", "-")
    if not boolean:
        return Option((f"--{name}",))
    return Option((f"--{name}",), (f"--no-{name}",), switch=True)


def _boolean_fields(modules: Iterable[ast.Module]) -> set[str]:
    """Return the fields of configurations that are true or false."""
    found = set()
    for module in modules:
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                for field, annotation in _fields(node).items():
                    if re.search(r"\bbool\b", annotation) and "str" not in annotation:
                        found.add(field)
    return found


def _is_boolean(call: ast.Call, booleans: set[str]) -> bool:
    """Return whether the option is one of a field in `booleans`: `**kwargs["field"]`."""
    for keyword in call.keywords:
        spread = keyword.value
        if keyword.arg is None and isinstance(spread, ast.Subscript):
            return _text(spread.slice) in booleans
    return False


# --- SGLang


def sglang_names(root: Path) -> Names:
    """Read SGLang's `launch_server`: fields of its namespaces, and what it adds by hand."""
    folder = "sglang/srt/arg_groups/fields"
    sources = (
        "sglang/srt/server_args.py",
        "sglang/srt/sampling/sampling_params.py",
        "sglang/srt/entrypoints/openai/protocol.py",
    )
    server, sampling, protocol = (_parsed(root / source) for source in sources)
    options = list(_added(server))
    for path in sorted((root / folder).glob("*.py")):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                options += _annotated(node.target.id, node.annotation)
    fields = {
        "SamplingParams": list(_fields(_class(sampling, "SamplingParams"))),
        "ChatCompletionRequest": list(_fields(_class(protocol, "ChatCompletionRequest"))),
        "CompletionRequest": list(_fields(_class(protocol, "CompletionRequest"))),
    }
    choices = "sglang/srt/arg_groups/choices.py"
    model = _fields(_class(_parsed(root / folder / "model.py"), "Model"))
    values = {
        "kv_cache_dtype": _choices(model["kv_cache_dtype"]),
        "quantization": _chosen(_parsed(root / choices), "QUANTIZATION_CHOICES"),
    }
    return Names((*sources, folder, choices), options, fields, values)


def _annotated(field: str, annotation: ast.expr) -> Iterator[Option]:
    """Yield the option of `field: A[type, Arg(...)]`; none for a field without one."""
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "A":
        return
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    given: dict[str, ast.expr] = {}
    for part in parts:
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "Arg":
            given = {keyword.arg or "": keyword.value for keyword in part.keywords}
    if "no_cli" in given:
        return
    name = _text(given["cli_name"]) if "cli_name" in given else "--" + field.replace("_", "-")
    aliases = given.get("aliases")
    names = [name, *(_texts(aliases.elts) if isinstance(aliases, ast.List) else [])]
    is_switch = bool(parts) and ast.unparse(parts[0]) in ("bool", "Optional[bool]", "bool | None")
    yield Option(tuple(names), switch=is_switch and "type_parser" not in given)


# --- llama.cpp


def llama_names(root: Path) -> Names:
    """Read the options of llama.cpp that its server takes, and the fields of /completion."""
    sources = ("common/arg.cpp", "tools/server/server-schema.cpp")
    text, schema = ((root / source).read_text(encoding="utf-8") for source in sources)
    options = []
    for start in re.finditer(r"add_opt\(", text):
        option = _llama_option(_enclosed(text, start.end() - 1))
        if option is not None:
            options.append(option)
    compiled = re.sub(r"(?ms)^#if 0$.*?^#endif$", "", schema)
    found = re.findall(r'(?:new field_\w+\(|->add_alias\()"([^"]+)"', compiled)
    return Names(sources, options, {"/completion": found})


def _llama_option(text: str) -> Option | None:
    """Return the option that `common_arg(...)` with what is set on it declares, None for one of another
    program.
    """
    lists = re.match(r"\(\s*common_arg\(\s*\{([^}]*)\}(?:\s*,\s*\{([^}]*)\})?", text)
    if lists is None or ".set_preset_only(" in text:
        return None
    examples = set(re.findall(r"LLAMA_EXAMPLE_(\w+)", "".join(_set(text, "examples"))))
    excluded = set(re.findall(r"LLAMA_EXAMPLE_(\w+)", "".join(_set(text, "excludes"))))
    if (examples and not examples & {"SERVER", "COMMON"}) or "SERVER" in excluded:
        return None
    handler = re.search(r"\[\]\(common_params &\s*\w*(.*?)\) ?\{", text)
    is_switch = handler is not None and handler[1].strip() in ("", ", bool value", ", bool")
    names = re.findall(r'"([^"]+)"', lists[1])
    longest_first = sorted(names, key=lambda name: not name.startswith("--"))
    return Option(
        tuple(longest_first), tuple(re.findall(r'"([^"]+)"', lists[2] or "")), switch=is_switch
    )


def _set(text: str, what: str) -> list[str]:
    return re.findall(rf"\.set_{what}\(([^)]*)\)", text)


def _enclosed(text: str, start: int) -> str:
    """Return `text` from the parenthesis at `start` to the one that closes it; strings are passed over."""
    depth = 0
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|//[^\n]*|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return text[start : start + token.end()]
    raise SystemExit(f"a parenthesis is not closed: {text[start : start + 60]!r}")


# --- TGI


def tgi_names(root: Path) -> Names:
    """Read the options of TGI's launcher, and the parameters of its /generate."""
    sources = ("launcher/src/main.rs", "router/src/lib.rs")
    launcher, router = ((root / source).read_text(encoding="utf-8") for source in sources)
    options: list[Option] = []
    for attributes, name, kind in _rust_fields(_rust_struct(launcher, "Args")):
        options += _clap(attributes, name, kind)
    parameters = [name for _, name, _ in _rust_fields(_rust_struct(router, "GenerateParameters"))]
    return Names(sources, options, {"GenerateParameters": parameters})


def _clap(attributes: str, field: str, kind: str) -> Iterator[Option]:
    long = re.search(r'\blong(?:\s*=\s*"([^"]+)")?', attributes)
    if long is None:
        return
    names = ["--" + (long[1] or field.replace("_", "-"))]
    if re.search(r"\bshort\b", attributes):
        names.append("-" + field[0])
    yield Option(tuple(names), switch=kind == "bool")


def _rust_struct(text: str, name: str) -> str:
    start = text.index(f"struct {name} {{")
    return text[start : text.index("\n}", start)]


def _rust_fields(body: str) -> Iterator[tuple[str, str, str]]:
    """Yield the attributes, the name and the type of each field."""
    plain = re.sub(r"//[^\n]*", "", body.split("{", 1)[1])
    for match in re.finditer(
        r"((?:#\[(?:[^\]\"]|\"[^\"]*\")*\]\s*)*)(?:pub(?:\([^)]*\))?\s+)?(\w+)\s*:\s*([^\n]+?),\s*\n",
        plain + "\n",
    ):
        yield match[1], match[2], match[3]


# --- Python's sources


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class(module: ast.Module, name: str) -> ast.ClassDef:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise SystemExit(f"there is no class {name}")


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """Return the public fields of a class, and the text of their types."""
    found = {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            annotation = ast.unparse(line.annotation)
            if not line.target.id.startswith("_") and not annotation.startswith("ClassVar"):
                found[line.target.id] = annotation
    return found


def _added(
    module: ast.Module, boolean: Callable[[ast.Call], bool] = lambda call: False
) -> Iterator[Option]:
    """Yield the option of each `add_argument`, of an argument without hyphens none."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        names = [text for text in _texts(node.args) if text.startswith("-")]
        if node.func.attr != "add_argument" or not names:
            continue
        names.sort(key=lambda name: not name.startswith("--"))
        actions = [ast.unparse(k.value) for k in node.keywords if k.arg == "action"]
        both = boolean(node) or "argparse.BooleanOptionalAction" in actions
        negative = []
        if both:
            negative = [f"--no-{name[2:]}" for name in names if name.startswith("--")]
        alone = any("store_true" in action or "StoreTrue" in action for action in actions)
        yield Option(tuple(names), tuple(negative), switch=both or alone)


def _chosen(module: ast.Module, name: str) -> list[str]:
    """Return the texts in the value of the module's `name`, a Literal or a list."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return _texts(ast.walk(node.value))
    raise SystemExit(f"there is no {name}")


def _choices(annotation: str) -> list[str]:
    """Return the texts of `choices=[...]` in an annotation."""
    for node in ast.walk(ast.parse(annotation)):
        if isinstance(node, ast.keyword) and node.arg == "choices":
            return _texts(ast.walk(node.value))
    raise SystemExit(f"there are no choices: {annotation[:60]}")


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _texts(nodes: Iterable[ast.AST]) -> list[str]:
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


READERS: dict[str, Callable[[Path], Names]] = {
    "vllm": vllm_names,
    "sglang": sglang_names,
    "llama_server": llama_names,
    "tgi": tgi_names,
}

if __name__ == "__main__":
    main()
