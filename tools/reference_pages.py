"""The reference pages of the site that are read from the source: Python, options, HTTP.

`python_page` has the public names with their signatures and docstrings, `options_page` every verb
and option of the command line, `http_page` the routes and fields of /openapi.json. Each returns
Markdown. `build_docs.py` puts them into the site; nothing keeps them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

import typer

Schema = Mapping[str, Any]
Message = MutableMapping[str, Any]  # of ASGI

MODULES = ("freight", "freight.transformers", "freight.auto_fp8", "freight.llm_compressor")
_LONG = 88  # characters: a longer signature has a line for each parameter
_STARS: Mapping[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_CODE = re.compile(r"(`[^`]*`)")
_COLUMNS = re.compile(r"\S.*?\S {2,}\S|\S {2,}\S")


# --- Python


def python_page() -> str:
    """Return every name of `MODULES`' `__all__`, and the options of LLM. Imports torch."""
    from freight.settings.engine import EngineArgs

    parts = [
        "# Python",
        "The public names, with their docstrings. Everything else may change between versions. "
        "[](../scale-out.md#ray-serve) describes `freight.ray`, [](../cli.md) `freight.lm_eval`.",
    ]
    for name in MODULES:
        module = importlib.import_module(name)
        parts += [f"## {name}", as_markdown(module.__doc__ or "")]
        for item in module.__all__:
            parts += _described(item, getattr(module, item))
        if name == "freight":
            parts.append("### Options of LLM and AsyncLLM")
            parts.append("They are keywords, and options of the command line with `-` for `_`.")
            parts += _described("EngineArgs", EngineArgs)[1:]
    return "\n\n".join(part for part in parts if part) + "\n"


def _described(name: str, result: Any) -> list[str]:
    """Return the heading, the signature and the docstring of a name, and those of its methods."""
    parts = [f"### {name}"]
    if not callable(result):
        kind = f"A {type(result).__name__}"
        return [*parts, f"{kind}: `{result!r}`." if isinstance(result, tuple) else f"{kind}."]
    is_error = isinstance(result, type) and issubclass(result, BaseException)
    if not is_error and not (isinstance(result, type) and issubclass(result, Enum)):
        parts.append(_signature(name, result))
    parts.append(as_markdown(inspect.getdoc(result) or ""))
    if not isinstance(result, type):
        return parts
    if issubclass(result, Enum):
        members = "\n".join(f"{item.name} = {item.value!r}" for item in result)
        parts.append(f"```python\n{members}\n```")
    for method, defined in vars(result).items():
        if not method.startswith("_") and not dataclasses.is_dataclass(defined):
            parts += _method(f"{name}.{method}", defined)
    return parts


def _method(name: str, defined: Any) -> list[str]:
    """Return what `_described` does for a method or a property; nothing for data."""
    function = getattr(defined, "__func__", defined)
    if isinstance(defined, property):
        return [f"#### {name}", as_markdown(inspect.getdoc(defined) or "")]
    if not inspect.isfunction(function):
        return []
    return [f"#### {name}", _signature(name, function), as_markdown(inspect.getdoc(function) or "")]


def _signature(name: str, result: Any) -> str:
    signature = inspect.signature(result)
    given = [item for item in signature.parameters.values() if item.name not in ("self", "cls")]
    parameters = []
    is_keyword = False
    for item in given:
        if item.kind is item.KEYWORD_ONLY and not is_keyword:
            parameters.append("*")
        is_keyword = item.kind is not item.POSITIONAL_OR_KEYWORD  # behind *args there is no other *
        parameters.append(_parameter(item))
    returns = signature.return_annotation
    is_class = isinstance(result, type) or returns is signature.empty
    end = ")" if is_class else f") -> {_annotation(returns)}"
    text = f"{name}({', '.join(parameters)}{end}"
    if len(text) > _LONG:
        text = "\n".join([f"{name}(", *(f"    {item}," for item in parameters), end])
    return f"```python\n{text}\n```"


def _parameter(item: inspect.Parameter) -> str:
    stars = _STARS.get(item.kind, "")
    kind = "" if item.annotation is item.empty else f": {_annotation(item.annotation)}"
    if item.default is item.empty:
        return f"{stars}{item.name}{kind}"
    default = "<factory>" if "factory" in repr(item.default) else repr(item.default)
    return f"{item.name}{kind} = {default}"


def _annotation(result: Any) -> str:
    """Return an annotation as it is written; the source's are text."""
    return result if isinstance(result, str) else inspect.formatannotation(result)


def as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: code and columns keep their lines, the rest flows."""
    results = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        lines = paragraph.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            results.append(f"```python\n{textwrap.dedent(paragraph)}\n```")
        elif lines and _COLUMNS.match(lines[0]):
            results.append(f"```text\n{paragraph}\n```")
        else:
            results.append(plain(paragraph))
    return "\n\n".join(results)


def plain(text: str) -> str:
    """Return text in which no character but a backtick means anything to Markdown."""
    parts = _CODE.split(text)
    parts[::2] = [re.sub(r"([*<\[\]])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


# --- the command line


def options_page() -> str:
    """Return every verb with its arguments and options. Imports no torch."""
    from freight.cli.main import app

    parts = [
        "# Options",
        "Every verb and option, as `--help` has them. [](../cli.md) says when to use which. "
        "Options with a variable can be set in the environment.",
    ]
    for name, command in _commands("freight", typer.main.get_command(app)):
        parts += [f"## {name}", plain((command.help or "").strip()), *_tables(command)]
    return "\n\n".join(parts) + "\n"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    for verb, item in sorted(getattr(command, "commands", {}).items()):
        if not item.hidden:
            yield f"{name} {verb}", item
            yield from _commands(f"{name} {verb}", item)


def _tables(command: Any) -> Iterator[str]:
    given = [item for item in command.params if not getattr(item, "hidden", False)]
    arguments = [item for item in given if item.param_type_name == "argument"]
    if arguments:
        named = [(code(item.metavar or item.name), cell(item.help or "")) for item in arguments]
        yield table(("argument", "meaning"), named)
    options = [item for item in given if item.param_type_name == "option"]
    if options:
        rows = []
        for item in options:
            names = ", ".join(code(name) for name in (*item.opts, *item.secondary_opts))
            value = "" if item.is_flag else f" {code(item.metavar or item.type.name.upper())}"
            default = "" if item.default in (None, [], (), False, True) else code(item.default)
            variable = code(item.envvar) if item.envvar else ""
            rows.append((names + value, cell(item.help or ""), default, variable))
        yield table(("option", "meaning", "default", "variable"), rows)


# --- HTTP


def openapi() -> dict[str, Any]:
    """Return the document that a server without keys has at /openapi.json. Starts no engine."""
    from freight.serve.app import make_app
    from freight.serve.observe.metrics import Metrics
    from freight.serve.settings import ServerSettings
    from freight.serve.transport.auth import Keys
    from freight.serve.transport.http_limits import HttpLimits

    service = SimpleNamespace(max_sequences=0, keys=Keys(()), metrics=Metrics("model"))
    app = make_app(cast(Any, service), cast(Any, None), ServerSettings(max_queue=0), HttpLimits())
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        await app(scope, receive, send)

    path = "/openapi.json"
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "GET"}
    scope |= {
        "asgi": {"version": "3.0"},
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    scope |= {"scheme": "http", "root_path": "", "state": {}}
    scope |= {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1)}
    asyncio.run(ask())
    result: dict[str, Any] = json.loads(b"".join(item.get("body", b"") for item in sent))
    return result


def http_page(document: Schema) -> str:
    """Return the routes and the fields of their bodies, as /openapi.json has them."""
    parts = [
        "# HTTP",
        "The routes and fields of [/openapi.json](openapi.json), which every server has. "
        "[](../server.md) says what they do. Fields that are not listed are refused, unless the "
        "server has `--unknown-fields ignore`.",
    ]
    seen: list[tuple[str, Schema]] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = f"{method.upper()} {path}"
            parts += [f"## {name}", plain(operation["summary"]) + "."]
            body = operation.get("requestBody")
            if body is None:
                continue
            schema = body["content"]["application/json"]["schema"]
            same = next((other for other, item in seen if item == schema), None)
            parts += [f"The body is that of {same}."] if same else _bodies(schema)
            seen.append((name, schema))
    return "\n\n".join(parts) + "\n"


def _bodies(schema: Schema) -> Iterator[str]:
    several = schema.get("anyOf", [schema])
    for item in several:
        if len(several) > 1:
            yield f"One of {len(several)} bodies, `{item.get('title', 'object')}`:"
        required = item.get("required", ())
        own = {name: field for name, field in item["properties"].items() if "title" in field}
        rows = []
        for name, field in own.items():
            need = "required" if name in required else _default(field)
            rows.append((code(name), cell(kind(field)), need, cell(bounds(field))))
        yield table(("field", "type", "default", "bounds"), rows)
        others = [
            f"{code(name)} ({', '.join(code(json.dumps(value)) for value in field['enum'])})"
            for name, field in item["properties"].items()
            if name not in own and "enum" in field
        ]
        if others:
            yield (
                "Fields of other servers, which are taken at the values in brackets, since these ask for nothing: "
                + ", ".join(others)
                + "."
            )


def kind(schema: Schema) -> str:
    """Return the type of a field in words; null, which stands for the default, is left out."""
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"] if value is not None)
    for name in ("anyOf", "oneOf"):
        if name in schema and "properties" not in schema:
            kinds = [kind(item) for item in schema[name]]
            return " or ".join(dict.fromkeys(item for item in kinds if item and item != "null"))
    types = schema.get("type", "anything")
    if types == "array":
        return f"array of {kind(schema.get('items', {}))}"
    if types == "object" and schema.get("properties"):
        return f"object with {', '.join(schema['properties'])}"
    return types if isinstance(types, str) else " or ".join(t for t in types if t != "null")


_ENDLESS = 2**62  # bounds of whole numbers beyond it are those of their type, and say nothing
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "maxLength": "at most {} characters",
    "maxItems": "at most {} entries",
    "maxProperties": "at most {} entries",
}


def bounds(schema: Schema) -> str:
    """Return the bounds of a field, and those of its one type besides null."""
    given = {key: schema[key] for key in _BOUNDS if abs(schema.get(key, _ENDLESS)) < _ENDLESS}
    own = [_BOUNDS[key].format(f"{value:,}") for key, value in given.items()]
    inner = [item for item in schema.get("anyOf", ()) if item.get("type") != "null"]
    if not own and len(inner) == 1:
        return bounds(inner[0])
    return ", ".join(own)


def _default(field: Schema) -> str:
    default = field.get("default")
    return "" if default is None else code(json.dumps(default))


# --- Markdown


def code(value: object) -> str:
    """Return `value` as code in a cell of a table."""
    return f"`{str(value).replace('|', chr(92) + '|')}`"


def cell(text: str) -> str:
    return plain(" ".join(text.split())).replace("|", r"\|")


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose cells are Markdown already."""
    head = list(names)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
