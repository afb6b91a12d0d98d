"""The house's rules, held by reading the source: who imports whom, and what stays out of where.

The order of imports is that of docs/architecture.md. Every import statement counts, also one
inside a function or under `if TYPE_CHECKING`, and so does `import_module("freight.…")`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import draw_architecture
import list_border
import list_modules
import pytest
from source_imports import (
    FACADE,
    ROOT,
    SOURCES,
    SRC,
    imported,
    module_name,
    package_imports,
    package_of,
    parsed,
)

T = TypeVar("T")
TESTS = sorted((ROOT / "tests").rglob("*.py"))

ORDER = [
    {"errors"},
    {"base"},
    {"structured", "pooling"},
    {"sampling", "outputs", "fp8"},
    {"operands", "text"},
    {"model.config"},
    {"settings"},
    {"parallel"},
    {"checkpoint", "kernels"},
    {"cache"},
    {"model"},
    {"engine", "quantizer"},
    {"serve.processes"},
    {"llm", "async_llm"},
    {FACADE},
    {"adapters"},
    {"auto_fp8", "llm_compressor", "lm_eval", "transformers", "lab", "serve"},
    {"cli"},
    {"adapters.ray", "adapters.tgi_launcher"},
    {"ray"},
    {"__main__"},
]
ROW = {package: row for row, packages in enumerate(ORDER) for package in packages}

TORCH_FREE = [
    "errors.py",
    "base/*.py",
    "structured.py",
    "sampling.py",
    "outputs.py",
    "settings/*.py",
    "model/config/*.py",
    "model/mixers/spec.py",
    "model/mixers/dividing.py",
    "model/mixers/*/spec.py",
    "engine/drafts.py",
    "checkpoint/gguf/config.py",
    "checkpoint/gguf/names.py",
    "model/config/families/*.py",
    "parallel/join.py",
    "parallel/messages.py",
    "parallel/places.py",
    "parallel/ranks.py",
    "parallel/shards.py",
    "parallel/shared.py",
    "parallel/steps.py",
    "fp8/formats.py",
    "fp8/scheme.py",
    "lab/audit/effects.py",
    "lab/audit/families.py",
    "lab/audit/rules.py",
    "lab/audit/schemes.py",
    "lab/audit/verdict.py",
    "cache/blocks.py",
    "cache/events.py",
    "cache/groups.py",
    "cache/manager.py",
    "cache/prefix.py",
    "cache/sizing.py",
    "cache/spec.py",
    "cache/store/[!p]*.py",
    "cache/store/pace.py",
    "cache/stored.py",
    "checkpoint/config_only.py",
    "checkpoint/gguf/hub.py",
    "checkpoint/gguf/ollama.py",
    "model/pooling_files.py",
    "checkpoint/stored_dtype.py",
    "model/shapes.py",
    "model/shares.py",
    "model/sizes.py",
    "lab/capacity.py",
    "lab/planned_head.py",
    "lab/evaluate/safety.py",
    "engine/grammar.py",
    "engine/intake.py",
    "engine/messages.py",
    "engine/request.py",
    "engine/prefix_fetch.py",
    "engine/recovery.py",
    "engine/scheduler.py",
    "engine/verification.py",
    "async_llm.py",
    "serve/*.py",
    "serve/*/*.py",
    # load comes from the server's own cores: it starts at once, and stays small
    "lab/bench/serving*.py",
    "cli/*.py",
    # what the front loads, but for what needs Ray
    "ray.py",
    *(
        f"adapters/ray/{name}.py"
        for name in ("cut", "front", "options", "passing", "prefixes", "prompts")
    ),
]
ONLY_IN = {  # third-party package -> the modules that may import it
    "transformers": {
        "freight.text.tokenizer",
        "freight.adapters.transformers",
        "freight.model.fallback",
        "freight.model.fallback_probe",
        "freight.model.fallback_ropes",
        "freight.model.fallback_words",
    },
    "llguidance": {"freight.engine.grammar"},
    "lm_eval": {"freight.adapters.lm_eval", "freight.lab.evaluate.tasks"},
    "zmq": {"freight.serve.observe.kv_events"},
    "msgspec": {"freight.serve.observe.kv_events"},
    "opentelemetry": {"freight.serve.observe.traces"},
}
ONLY_BELOW = {  # third-party package -> the one package whose modules may import it
    "pydantic": "serve",
    "fastapi": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "httptools": "serve",
    "prometheus_client": "serve",
    "ray": "adapters.ray",
}


def import_faults(module: str, source: str) -> list[str]:
    """What `source`, as the text of `module`, imports that it may not."""
    package, faults = package_of(module), []
    for name in imported(parsed(source)):
        third_party = name.split(".")[0]
        if name.startswith("."):
            faults.append(f"{module} imports {name}: write the full name")
        elif third_party in ONLY_IN and module not in ONLY_IN[third_party]:
            faults.append(
                f"{module} imports {name}, which belongs to {', '.join(sorted(ONLY_IN[third_party]))}"
            )
        elif third_party in ONLY_BELOW and package != ONLY_BELOW[third_party]:
            faults.append(
                f"{module} imports {name}, which belongs to freight.{ONLY_BELOW[third_party]}"
            )
        elif third_party == "freight" and package != FACADE:
            other = package_of(name)
            if other != package and ROW[other] >= ROW[package]:
                faults.append(f"{module} imports {name}, which is not in a row before {package}")
    return faults


def run_imports(tree: ast.Module) -> Iterator[str]:
    """Names of modules that a file imports when it runs: not those for types alone."""
    nodes = list(ast.walk(tree))
    typed = [
        node
        for node in nodes
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    for_types = {id(inner) for node in typed for part in node.body for inner in ast.walk(part)}
    for node in nodes:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others: all of one circle together."""
    reached = {module: {module} for module in imports}
    grown = True
    while grown:
        grown = False
        for module, names in imports.items():
            found = reached[module].union(*(reached[name] for name in names))
            grown = grown or found != reached[module]
            reached[module] = found
    around = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in imports}
    return [list(circle) for circle in sorted(around) if len(circle) > 1]


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {module_name(path): parsed(path.read_text()) for path in SOURCES}
    known = set(modules) - {FACADE}
    assert (
        circles(
            {
                m: {n for n in run_imports(tree) if n in known and n != m}
                for m, tree in modules.items()
            }
        )
        == []
    )


def test_the_core_knows_neither_lab_nor_adapters_nor_commands() -> None:
    """Facades and `__main__` lie outside of the core too: they are names for others."""
    facades = {"auto_fp8", "llm_compressor", "lm_eval", "ray", "transformers", "__main__", FACADE}
    crossing = []
    for path in SOURCES:
        module = module_name(path)
        if list_border.is_outside(module) or package_of(module) in facades:
            continue
        names = [name for name in imported(parsed(path.read_text())) if name.startswith("freight.")]
        crossing += [(module, name) for name in names if list_border.is_outside(name)]
    assert crossing == []


def test_lab_and_adapters_import_what_is_listed() -> None:
    assert list_border.PAGE.read_text() == list_border.page(), "run: python tools/list_border.py"


def test_the_check_sees_circles() -> None:
    imports: dict[str, set[str]] = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert circles(imports) == [["a", "b", "c"]]


def fp8_casts(source: str) -> list[int]:
    """Lines that name a torch float8 dtype, or cast to a dtype that is made from a format's name."""
    lines = []
    for node in ast.walk(parsed(source)):
        named = isinstance(node, ast.Attribute) and node.attr.startswith("float8")
        cast = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("to", "type")
        built = cast and re.search("float8|torch_name", ast.unparse(node))
        if named or built:
            lines.append(node.lineno)
    return lines


def found_in(paths: list[Path], check: Callable[[str], list[T]]) -> dict[str, list[T]]:
    """What `check` finds in the text of each file, where it finds something."""
    found = {str(path.relative_to(ROOT)): check(path.read_text()) for path in paths}
    return {name: faults for name, faults in found.items() if faults}


def test_imports_follow_the_order() -> None:
    modules = {module_name(path): path.read_text() for path in SOURCES}
    assert [module for module in modules if package_of(module) not in ROW] == [], (
        "no row in the import order"
    )
    assert [
        fault for module, source in modules.items() for fault in import_faults(module, source)
    ] == []


def test_the_page_has_the_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    written = next(part for part in page.split("\n\n") if part.startswith("`errors`"))
    rows = [set(row.split()) for row in written.replace("`", "").split("·")]
    assert rows == [row for row in ORDER if row not in ({FACADE}, {"__main__"})]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("freight.errors", "from freight.fp8.formats import Format"),
        ("freight.cache.pool", "def f():\n    import freight.model.layers.attention"),
        (
            "freight.model.decoder",
            "if TYPE_CHECKING:\n    from freight.engine.runner import Runner",
        ),
        ("freight.kernels.select", "from freight.checkpoint.reader import Checkpoint"),
        ("freight.engine.loop", "from freight import llm"),
        ("freight.engine.loop", "from freight import LLM"),
        ("freight.model.layers.linear", "import_module('freight.cli.main')"),
        ("freight.cache.pool", "from . import blocks"),
        ("freight.engine.loop", "import pydantic.types"),
        ("freight.lab.evaluate.report", "from transformers import AutoTokenizer"),
    ],
)
def test_the_check_sees_every_kind_of_import(module: str, source: str) -> None:
    assert len(import_faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "freight.cli.generate",
            "def f():\n    from freight.llm import LLM\n    from freight import __version__",
        ),
        (
            "freight.cache.pool",
            "import torch\nfrom freight.cache.spec import X\nfrom freight import fp8",
        ),
        ("freight.text.tokenizer", "from transformers import AutoTokenizer"),
        ("freight.adapters.transformers", "from transformers import Cache"),
    ],
)
def test_the_check_allows_what_is_in_order(module: str, source: str) -> None:
    assert import_faults(module, source) == []


def test_the_list_of_modules_is_current() -> None:
    assert list_modules.PAGE.read_text() == list_modules.page(), "run: python tools/list_modules.py"


def test_the_picture_is_current() -> None:
    drawn = draw_architecture.picture(package_imports())
    assert draw_architecture.PICTURE.read_text() == drawn, "run: python tools/draw_architecture.py"


def test_the_picture_leaves_out_what_follows() -> None:
    """An import that other arrows show has none of its own, also where a module beside packages is between."""
    imports = {name: set() for name in package_imports()} | {
        "cli": {"llm", "fp8", "sampling"},
        "llm": {"outputs"},
        "outputs": {"fp8"},
    }
    assert draw_architecture.arrows(imports) == [("cli", "llm"), ("llm", "fp8")]


def test_the_picture_says_what_it_cannot_draw() -> None:
    imports = package_imports()
    with pytest.raises(ValueError, match="no COLUMNS"):
        draw_architecture.picture(imports | {"tests": set()})
    with pytest.raises(ValueError, match=r"imports|need one place"):
        draw_architecture.picture(imports | {"text": {"kernels"}})


def test_fp8_is_cast_in_one_file() -> None:
    assert (
        found_in([path for path in SOURCES if module_name(path) != "freight.fp8.cast"], fp8_casts)
        == {}
    )


@pytest.mark.parametrize(
    "source",
    [
        "x.to(torch.float8_e4m3fn)",
        "x.to(getattr(torch, format.torch_name))",
        "x.type('float8_e5m2')",
    ],
)
def test_the_check_sees_a_cast(source: str) -> None:
    assert fp8_casts(source)


def faults_of_form(source: str) -> list[str]:
    """What the text of a file lacks, and globals that change."""
    faults = []
    if source and not source.startswith('"""'):
        faults.append("no docstring: a module opens by saying what it is")
    if re.search(r"\bglobal\b", source):  # else there is nothing to parse for
        nodes = ast.walk(parsed(source))
        faults += [
            f"line {node.lineno}: a global that changes"
            for node in nodes
            if isinstance(node, ast.Global)
        ]
    return faults


def test_a_file_says_what_it_is() -> None:
    assert found_in(SOURCES + TESTS, faults_of_form) == {}
    inits = [
        path for path in SOURCES if path.name == "__init__.py" and path.parent != SRC / "freight"
    ]
    longer = [path for path in inits if len(ast.parse(path.read_text()).body) != 1]
    assert longer == [], "the __init__ of a subpackage is a docstring, and nothing else"
    assert [path for path in SOURCES if not path.read_text()] == []


def test_the_check_of_form_sees_what_is_wrong() -> None:
    assert len(faults_of_form("x = 1\n")) == 1
    assert len(faults_of_form('"""A."""\ndef f():\n    global x\n')) == 1


def python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


FACTORIES = {
    *(
        "empty",
        "empty_strided",
        "zeros",
        "ones",
        "full",
        "eye",
        "tensor",
        "as_tensor",
        "asarray",
        "scalar_tensor",
    ),
    *("arange", "range", "linspace", "logspace", "rand", "randn", "randint", "randperm", "normal"),
}


def open_factories(source: str) -> list[str]:
    """Calls of a torch factory that leave the dtype or the device to the defaults of the process."""
    calls = (node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call))
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and ast.unparse(call.func.value) == "torch"
        and not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]


def test_no_tensor_has_the_default_dtype_or_device() -> None:
    """Both belong to the user's process: torch.set_default_dtype and set_default_device change no
    result.
    """
    assert found_in(SOURCES, open_factories) == {}


@pytest.mark.parametrize(
    "call", ["torch.ones(3)", "torch.ones(3, dtype=d)", "torch.tensor([1], device=d)"]
)
def test_the_check_sees_an_open_factory(call: str) -> None:
    assert open_factories(f"x = {call} + 1")


def test_torch_free_modules_import_without_torch() -> None:
    files = {pattern: sorted((SRC / "freight").glob(pattern)) for pattern in TORCH_FREE}
    assert [pattern for pattern, found in files.items() if not found] == [], (
        "a listed module does not exist"
    )
    names = [module_name(path) for found in files.values() for path in found]
    code = (
        "import importlib, json, sys; seen = {}\n"
        "for name in sys.argv[1:]:\n    importlib.import_module(name); seen[name] = 'torch' in sys.modules\n"
        "print(json.dumps(seen))"
    )
    answer = python(code, *names)
    assert answer.returncode == 0, answer.stderr
    assert [name for name, torch in json.loads(answer.stdout).items() if torch] == []


ANSWERED = [  # command line, exit status, what is said
    ("--help", 0, "generate"),
    ("--version", 0, "0."),
    ("generate --help", 0, "--kv-cache-dtype"),
    ("generate --kv-cache-dtipe fp8", 2, "--kv-cache-dtype"),
    ("generate --prompt x --kv-cache-dtype fp9", 2, "fp8_e5m2"),
    ("generate demo --model-id demo --prompt x", 2, "--model-id"),
    ("generate --prompt x --temperature -1", 2, "temperature"),
]
RUN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from freight.cli.main import main
answers = []
for line in sys.argv[1:]:
    sys.argv, said, code = ["freight", *line.split()], io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    answers.append((code, said.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""


def test_the_command_line_answers_without_torch() -> None:
    ran = python(RUN, *(line for line, _, _ in ANSWERED))
    assert ran.returncode == 0, ran.stderr
    for (line, status, says), (code, said, loaded) in zip(
        ANSWERED, json.loads(ran.stdout), strict=True
    ):
        assert (code, loaded) == (status, False), line
        assert says in said, line
        assert "Traceback" not in said, line
