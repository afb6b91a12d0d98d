"""The Python side of the C interface against the headers themselves: numbers, the order and types
of fields, arguments.

A field's offset follows from the order and the types, for a C compiler and for ctypes alike.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from freight.fp8.formats import ScaleKind
from freight.kernels.cpu import interface

CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = ("freight.h", "attention.h", "states.h")
SOURCE = re.sub(r"//[^\n]*", "", "".join((CSRC / name).read_text() for name in HEADERS))
TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "void": None,
}
STRUCTS = dict(re.findall(r"struct (\w+) \{(.*?)\};", SOURCE, re.DOTALL))
FUNCTIONS = {name: (result, arguments) for result, name, arguments in re.findall(
    r"FREIGHT_API (\w+) (\w+)\(([^)]*)\);", SOURCE)}  # fmt: skip
STATUSES = (
    *("OK", "OUT_OF_MEMORY", "FAILED", "SHORT_CONTEXT", "NO_SUCH_ROW", "RANK_LOST", "RANK_FAILED"),
    *("INTERRUPTED", "BAD_SCALE"),
)
NUMBERS = {
    "FreightFormat": {format.name: code for format, code in interface.FORMAT_CODES.items()}
    | {
        "MXFP4": interface.MXFP4,
        "NVFP4": interface.NVFP4,
        "INT4": interface.INT4,
        "INTEGERS": interface.INTEGERS,
        "BYTES": interface.BYTES,
        "BLOCKS": interface.BLOCKS,
    },
    "FreightBlocks": {
        f"BLOCKS_{format.name}": number for format, number in interface.BLOCK_FORMATS.items()
    },
    "FreightInt4": {
        f"INT4_{name}": number
        for name, number in (interface.INT4_PARTS | interface.INT4_GROUPS).items()
        if number
    },
    "FreightActivations": {kind.name: code for kind, code in interface.ACTIVATIONS.items()},
    "FreightGatedActivation": {
        kind.name: code for kind, code in interface.GATED_ACTIVATIONS.items()
    },
    "FreightUngated": {kind.name: code for kind, code in interface.UNGATED_ACTIVATIONS.items()},
    "FreightGateFunction": {
        f"BY_{kind.name}": code for kind, code in interface.GATE_FUNCTIONS.items()
    },
    "FreightScoring": {kind.name: code for kind, code in interface.SCORINGS.items()},
    "FreightFunction": {name.upper(): code for code, name in enumerate(interface.FUNCTIONS)},
    "FreightStatus": {name: getattr(interface, name) for name in STATUSES},
    "FreightKvScales": {
        f"{'NO' if kind is ScaleKind.NONE else kind.name}_SCALES": int(kind) for kind in ScaleKind
    },
}


def declared(kind: str, argument: str) -> object:
    """The ctypes type of a declaration: of a base type and what stands behind it."""
    if "*" in argument or kind == "FreightGompParallel":
        return ctypes.c_void_p
    return TYPES[kind] if kind in TYPES else getattr(interface, kind)


def fields_of(body: str) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = []
    for line in body.split(";"):
        if declaration := re.fullmatch(r"\s*(?:const )?(\w+)(.*)", line, re.DOTALL):
            kind, names = declaration.groups()
            fields += [(name.strip(" *\n"), declared(kind, name)) for name in names.split(",")]
    return fields


def test_every_number_is_the_headers() -> None:
    enums = dict(re.findall(r"enum (\w+) : int32_t \{(.*?)\};", SOURCE, re.DOTALL))
    in_c = {
        name: {key: int(number) for key, number in re.findall(r"FREIGHT_(\w+) = (\d+)", body)}
        for name, body in enums.items()
    }
    assert in_c == NUMBERS
    constants = re.findall(r"constexpr int32_t FREIGHT_(\w+) = (\d+);", SOURCE)
    names = ("ABI", "LANES", "CACHE_LINE", "MAX_HEAD_DIM", "STATE_TILE", "MAX_WIDTH", "SCALE_GROUP")
    names += ("MAX_RANKS", "INT8_INPUTS")
    assert {name: int(number) for name, number in constants} == {
        name: getattr(interface, name) for name in names
    }


def test_every_struct_is_the_headers() -> None:
    in_python = {
        name for name, value in vars(interface).items() if isinstance(value, type(ctypes.Structure))
    }
    assert set(STRUCTS) == in_python
    for name, body in STRUCTS.items():
        assert list(getattr(interface, name)._fields_) == fields_of(body), name


def test_every_function_is_the_headers() -> None:
    assert set(FUNCTIONS) == set(interface.COMPUTE) | set(interface.OTHERS)
    for name, (result, arguments) in FUNCTIONS.items():
        expected = [
            declared(*re.match(r"(?:const )?(\w+)(.*)", text.strip()).groups())
            for text in arguments.split(",")
            if text
        ]
        computes = name in interface.COMPUTE
        assert (result == "FreightStatus") == computes, name
        given = interface.COMPUTE[name] if computes else interface.OTHERS[name][1:]
        assert [
            ctypes.c_void_p if issubclass(kind, ctypes._Pointer) else kind for kind in given
        ] == expected, name
        if not computes:
            assert interface.OTHERS[name][0] is TYPES[result], name


@pytest.mark.parametrize("status", STATUSES[1:])
def test_every_failure_has_its_words(status: str) -> None:
    assert interface._ERRORS[getattr(interface, status)][1]
