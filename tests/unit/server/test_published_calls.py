"""Answers that vLLM's tests hold its parsers to, with what these tests say is in them; and the
types of values.

From vllm 0.33.0 (Apache-2.0),
tests/tool_parsers/test_{glm4_moe,glm47_moe,qwen3coder,minimax_m2,deepseekv3,
hunyuan_a13b,hy_v3,gemma4,granite,phi4mini}_tool_parser.py; of `BROKEN` those of DeepSeek and Gemma.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.server.call_form_cases import named_format
from tests.unit.server.joined_pieces import joined

from freight.serve.answers.argument_types import types_of, value_text
from freight.serve.answers.pieces import PieceKind

TYPES = {  # of the tools' parameters
    "get_current_weather": {"city": "string", "state": "string", "unit": "string"},
    "calculate": {"operation": "string", "a": "number", "b": "number", "enabled": "boolean"},
    "calculate_area": {"shape": "string", "dimensions": "object", "precision": "integer"},
    "get_weather": {"city": "string", "days": "integer"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in types.items()},
            },
        },
    }
    for name, types in TYPES.items()
]
GLM = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"
QWEN = """<tool_call>
<function=get_current_weather>
<parameter=city>
Dallas
</parameter>
<parameter=state>
TX
</parameter>
<parameter=unit>
fahrenheit
</parameter>
</function>
</tool_call>"""
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
JOHN = {
    "name": "John Doe",
    "age": 37,
    "address": {"city": "San Francisco", "state": "CA"},
    "role": None,
    "passed_test": True,
    "aliases": ["John", "Johnny"],
}
# form, answer, content, calls
PUBLISHED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "GLM45",
        "I'll check it. <tool_call>get_current_weather\n<arg_key>city</arg_key>\n<arg_value>Dallas</arg_value>\n"
        "<arg_key>state</arg_key>\n<arg_value>TX</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>fahrenheit</arg_value>\n</tool_call>",
        "I'll check it.",
        [("get_current_weather", DALLAS)],
    ),
    (
        "GLM45",
        "<tool_call>get_current_weather\n<arg_key>city</arg_key><arg_value>Dallas</arg_value>\n</tool_call>\n"
        "<tool_call>get_current_weather\n<arg_key>city</arg_key><arg_value>Orlando</arg_value>\n</tool_call>",
        "",
        [("get_current_weather", {"city": "Dallas"}), ("get_current_weather", {"city": "Orlando"})],
    ),
    (
        "GLM45",
        "<tool_call>calculate\n<arg_key>operation</arg_key><arg_value>add</arg_value>\n<arg_key>a</arg_key>"
        "<arg_value>42</arg_value>\n<arg_key>b</arg_key><arg_value>3.14</arg_value>\n<arg_key>enabled</arg_key>"
        "<arg_value>true</arg_value>\n</tool_call>",
        "",
        [("calculate", {"operation": "add", "a": 42, "b": 3.14, "enabled": True})],
    ),
    ("GLM45", "<tool_call>get_time\n</tool_call>", "", [("get_time", {})]),
    (
        "GLM47",
        "Checking.<tool_call>get_current_date</tool_call>",
        "Checking.",
        [("get_current_date", {})],
    ),
    (
        "GLM47",
        f"{GLM}  Beijing  </arg_value></tool_call>",
        "",
        [("get_weather", {"city": "  Beijing  "})],
    ),
    (
        "GLM47",
        f"{GLM}Beijing</arg_value></tool_call>{GLM}Shanghai</arg_value></tool_call>",
        "",
        [("get_weather", {"city": "Beijing"}), ("get_weather", {"city": "Shanghai"})],
    ),
    (
        "QWEN3_CODER",
        f"Sure! Let me check.{QWEN}",
        "Sure! Let me check.",
        [("get_current_weather", DALLAS)],
    ),
    (
        "QWEN3_CODER",
        "<tool_call>\n<function=calculate_area>\n<parameter=shape>\nrectangle\n</parameter>\n<parameter=dimensions>\n"
        '{"width": 10, \n "height": 20}\n</parameter>\n<parameter=precision>\n2\n</parameter>\n</function>\n'
        "</tool_call>",
        "",
        [
            (
                "calculate_area",
                {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2},
            )
        ],
    ),
    (
        "MINIMAX_M2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Seattle</parameter>'
        '<parameter name="days">5</parameter></invoke></minimax:tool_call>',
        "",
        [("get_weather", {"city": "Seattle", "days": 5})],
    ),
    (
        "DEEPSEEK_V3",
        f'Let me check the weather for you.{DEEPSEEK}{{"city": "Paris"}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Let me check the weather for you.",
        [("get_weather", {"city": "Paris"})],
    ),
    (
        "HUNYUAN",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "San Francisco", "metric": "celsius"}}, '
        '{"name": "register_user", "arguments": ' + json.dumps(JOHN) + "}]</tool_calls>",
        "",
        [("get_weather", {"city": "San Francisco", "metric": "celsius"}), ("register_user", JOHN)],
    ),
    (
        "HUNYUAN",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Seattle"}}]</tool_calls>\nThank you!',
        "Thank you!",
        [("get_weather", {"city": "Seattle"})],
    ),
    (
        "HY3_PLAIN",
        "Checking.<tool_calls>\n<tool_call>get_current_date<tool_sep>\n</tool_call>\n</tool_calls>",
        "Checking.",
        [("get_current_date", {})],
    ),
    (
        "GEMMA4",
        '<|tool_call>call:complex_function{nested:{inner:<|"|>value<|"|>},list:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>',
        "",
        [("complex_function", {"nested": {"inner": "value"}, "list": ["a", "b"]})],
    ),
    (
        "GEMMA4",
        "<|tool_call>call:set_status{is_active:true,count:42,score:3.14}<tool_call|>",
        "",
        [("set_status", {"is_active": True, "count": 42, "score": 3.14})],
    ),
    (
        "GEMMA4",
        '<|tool_call>call:weather.get{location:<|"|>London<|"|>}<tool_call|><|tool_call>call:get_status{}<tool_call|>',
        "",
        [("weather.get", {"location": "London"}), ("get_status", {})],
    ),
    (
        "GRANITE",
        '<|tool_call|> [\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}},\n'
        '  {"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]',
        "",
        [("get_weather", {"city": "Tokyo"}), ("get_time", {"timezone": "Asia/Tokyo"})],
    ),
    (
        "GRANITE",
        '<tool_call> [{"name": "refresh", "arguments": {}}]',
        "",
        [("refresh", {})],
    ),
    (
        "PHI4",
        'functools[\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}},\n'
        '  {"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]',
        "",
        [("get_weather", {"city": "Tokyo"}), ("get_time", {"timezone": "Asia/Tokyo"})],
    ),
]
# vllm's test_extract_tool_calls_missing_closing_parameter_tag
FORGETFUL = "Let me check the weather for you:\n" + QWEN.replace("Dallas\n</parameter>", "Dallas")
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name='
DSML_END = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
MENDED: list[
    tuple[str, str, str, list[tuple[str, Any]]]
] = [  # closing tags forgotten, text behind, types not declared
    (
        "QWEN3_CODER",
        FORGETFUL,
        "Let me check the weather for you:",
        [("get_current_weather", DALLAS)],
    ),
    (
        # neither an argument of the tool, nor one at the beginning of a line, nor one that is there
        "QWEN3_CODER",
        "<function=get_weather>\n<parameter=city>\na\n<parameter=b>\n <parameter=days>\n<parameter=city>\n"
        "</parameter>\n</function>",
        "",
        [("get_weather", {"city": "a\n<parameter=b>\n <parameter=days>\n<parameter=city>"})],
    ),
    (
        "SEED_OSS",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [("get_weather", {"city": "Rome", "days": 3})],
    ),
    (
        "MINIMAX_M2",
        '<invoke name="get_weather">\n<parameter name="city">Rome\n<parameter name="days">3</parameter>\n</invoke>',
        "",
        [("get_weather", {"city": "Rome", "days": 3})],
    ),
    (
        "GLM47",
        f"{GLM}a<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        "",
        [("get_weather", {"city": "a", "days": 2})],
    ),
    (
        "QWEN3_CODER",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\nSo it is.",
        "So it is.",
        [("get_weather", {"city": "Rome"})],
    ),
    (
        "DEEPSEEK_V32",
        f'{DSML}"at" string="false">{{"a": [1]}}{DSML_END}',
        "",
        [("get_weather", {"at": {"a": [1]}})],
    ),
    (
        "DEEPSEEK_V32",
        f'{DSML}"at" string="false">so{DSML_END}',
        "",
        [("get_weather", {"at": "so"})],
    ),
    ("DEEPSEEK_V32", f'{DSML}"at">3{DSML_END}', "", [("get_weather", {"at": "3"})]),
    (
        "DEEPSEEK_V32",
        f'{DSML}"city" string="true">Rome\n<｜DSML｜parameter name="days" string="false">3{DSML_END}',
        "",
        [("get_weather", {"city": "Rome", "days": 3})],
    ),
]
KIMI = '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>'
HALF = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n"  # of Qwen3-Coder's
ROME = ("get_weather", {"city": "Rome"})
MENDED += [  # vllm's tests of llama3_json, gemma4, deepseekv32, mistral, kimi_k2
    ("LLAMA3", '{"name": "get_weather", "arguments": {"city": "Rome"}}', "", [ROME]),
    (
        "LLAMA3",
        '{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "calculate", "parameters": {}} ;'
        '\n{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Rome"}}}',
        "",
        [ROME, ("calculate", {}), ROME],
    ),
    (
        "LLAMA3",
        'So.<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}; {"name": "f", "parameters": {}}',
        "So.",
        [ROME, ("f", {})],
    ),
    (
        "HERMES",
        '<tool_call>{"name": "get_weather", "parameters": {"city": "Rome"}}</tool_call>',
        "",
        [ROME],
    ),
    ("HERMES", '<tool_call>\n{"name": "get_weather"}\n</tool_call>', "", [("get_weather", {})]),
    ("QWEN3_CODER", f"{HALF}</parameter>\n</tool_call>", "", [ROME]),
    (
        "QWEN3_CODER",
        f"{HALF}</parameter>\n</tool_call>\n{HALF}</parameter>\n</function>\n</tool_call>",
        "",
        [ROME, ROME],
    ),
    (
        "QWEN3_CODER",
        f"{HALF}</parameter>\n</tool_call>\n{HALF}</parameter>\n</tool_call>",
        "",
        [ROME, ROME],
    ),
    ("QWEN3_CODER", f"{HALF}</function>\n</tool_call>", "", [ROME]),
    ("MINIMAX_M2", '<invoke name="get_weather">\n<parameter name="city">Rome</invoke>', "", [ROME]),
    ("DEEPSEEK_V32", f'{DSML}"days" string="true">3{DSML_END}', "", [("get_weather", {"days": 3})]),
    (
        "DEEPSEEK_V32",
        f'{DSML}"days" string="true">three{DSML_END}',
        "",
        [("get_weather", {"days": "three"})],
    ),
    (
        "DEEPSEEK_V32",
        f'{DSML}"city" string="false">null{DSML_END}',
        "",
        [("get_weather", {"city": "null"})],
    ),
    (
        "MISTRAL_ARGS",
        '[TOOL_CALLS]get_weather{"city": "Rome"}[TOOL_CALLS]f{}',
        "",
        [ROME, ("f", {})],
    ),
    ("KIMI_K2", f"<|tool_call_begin|>functions.get_weather:0 {KIMI}", "", [ROME]),
    ("GEMMA4", '<|tool_call>:get_weather{city:<|"|>Rome<|"|>}<tool_call|>', "", [ROME]),
    ("GEMMA4", '<|tool_call>call:get_weather{city:"Rome"}<tool_call|>', "", [ROME]),
    (
        "GEMMA4",
        "<|tool_call>call:f{left:108.,right:-22.8,a:New York ,b:NaN,c:007,d:[1e999,none],e:a:b}<tool_call|>",
        "",
        [
            (
                "f",
                {
                    "left": 108,
                    "right": -22.8,
                    "a": "New York",
                    "b": "NaN",
                    "c": "007",
                    "d": ["1e999", None],
                    "e": "a:b",
                },
            )
        ],
    ),
]
BROKEN = [  # malformed, or without an end
    ("DEEPSEEK_V3", f'{DEEPSEEK}{{"city": "Tokyo"\n```<｜tool▁call▁end｜>'),
    ("GEMMA4", "<|tool_call>call:bad_func no brace<tool_call|>"),
    ("GEMMA4", '<|tool_call>call:get_weather{location:<|"|>London'),
    ("PHI4", 'functools[{"name": "get_weather", "arguments": {"city": "Tokyo"}'),
    ("MINIMAX_M2", '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Seattle'),
    ("QWEN3_CODER", "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</function>\n</tool_call>"),
    (
        "QWEN3_CODER",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>\nand <function=f>\n</function>",
    ),
    ("LLAMA3", '{"name": "get_weather"}'),
    ("LLAMA3", '{"name": "get_weather", "parameters": {}} and text'),
    ("LLAMA3", '{"name": "get_weather", "parameters": {}}; {"name": "other", "parameters": {}}'),
    ("HERMES", '<tool_call>{"name": "get_weather", "inputs": {"city": "Rome"}}</tool_call>'),
    ("KIMI_K2", f"<|tool_call_begin|>0 {KIMI}"),
    ("GEMMA4", "<|tool_call>call:get_weather{city:}<tool_call|>"),
    ("GEMMA4", "<|tool_call>call:get_weather{days:1} and more<tool_call|>"),
    ("QWEN3_CODER", "<function=f>\n</function>\nand <function=f>\n</function>"),
    ("GLM47", "<tool_call>two words<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
    ("KIMI_K2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]<|tool_call_end|>"),
]


@pytest.mark.parametrize(("form", "answer", "said", "calls"), PUBLISHED + MENDED)
def test_published_answers(form: str, answer: str, said: str, calls: list[tuple[str, Any]]) -> None:
    for chunks in ([answer], list(answer)):
        found = joined(named_format(form).parser("", TOOLS), chunks, True)
        assert "".join(piece.text for piece in found if piece.kind is PieceKind.CONTENT) == said
        assert [
            (p.name, json.loads(p.text)) for p in found if p.kind is PieceKind.TOOL_CALL
        ] == calls


@pytest.mark.parametrize(("form", "answer"), BROKEN)
def test_broken_calls_are_text(form: str, answer: str) -> None:
    for complete in (True, False):
        found = joined(named_format(form).parser("", TOOLS), list(answer), complete)
        assert [(piece.kind, piece.text) for piece in found] == [(PieceKind.CONTENT, answer)]


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "integer"}, " 12 ", "12"),
        ({"type": "integer"}, "3.0", "3.0"),
        ({"type": "integer"}, "3.5", '"3.5"'),
        ({"type": "integer"}, "true", '"true"'),
        ({"type": "number"}, "1e3", "1e3"),
        ({"type": "number"}, "1e999", '"1e999"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "1", '"1"'),
        ({"type": "float"}, "3.14", "3.14"),
        ({"type": "int"}, "7", "7"),
        ({"type": "bool"}, "true", "true"),
        ({"type": ["dict", "null"]}, "{}", "{}"),
        ({"type": "list"}, "[1]", "[1]"),
        ({"type": "str"}, "5", '"5"'),
        ({"type": "object"}, '{"a": 1.50}', '{"a": 1.50}'),
        ({"type": "object"}, "{'a': [True, None]}", '{"a": [true, null]}'),
        ({"type": "object"}, "[1]", '"[1]"'),
        ({"type": "array"}, "[" * 5_000, json.dumps("[" * 5_000)),
        ({"type": "array"}, "{1, 2}", '"{1, 2}"'),
        ({"type": "array"}, "open('x')", "\"open('x')\""),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "nul", '"nul"'),
        ({"type": "integer", "nullable": True}, "None", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, "5", "5"),
        ({"$ref": "#/$defs/loop"}, "5", '"5"'),
        ({"allOf": [{"type": "number"}]}, "5", "5"),
        ({"enum": [1, "a"]}, "1", "1"),
        ({"enum": [1, "a"]}, "a", '"a"'),
        ({"const": True}, "true", "true"),
        ({}, "5", '"5"'),
        (None, "[1]", '"[1]"'),
        ("no schema", "5", '"5"'),
        ({"type": {"a": 1}, "anyOf": 3, "enum": 4}, "5", '"5"'),
    ],
)
def test_values_take_the_types_of_the_schema(schema: Any, text: str, expected: str) -> None:
    root = {"$defs": {"n": {"type": "number"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert value_text(text, types_of(schema, root)) == expected
