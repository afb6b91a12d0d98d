"""`tools` and `tool_choice`: the functions of a conversation, and whether a call is forced.

Only the outer shape of the parameters' schemas is checked here. A forced call is compiled to a
grammar later, which checks them completely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as show
from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation

from freight.server.bodies import Nullable, Part, present, says
from freight.server.limits import ServingLimits
from freight.server.openai.fields import part, refuse

ToolName = Annotated[
    str,
    Field(pattern="^[A-Za-z0-9_-]{1,64}$"),
    says("must be 1 to 64 letters, digits, underscores or dashes"),
]


class Function(Nullable):
    """A function that may be called. `parameters`: the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    strict: bool | None = None
    parameters: SkipValidation[dict[str, Any] | None] = None


class _Arguments(Part):
    type: Annotated[Literal["object"], says("arguments are an 'object'")] = "object"
    properties: Annotated[dict[str, dict[str, Any] | bool], says("must map names to schemas")] = (
        Field(default={})
    )
    required: Annotated[list[str], says("must be a list of names")] = Field(default=[])


class Tool(Part):
    """A tool that a conversation offers."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    tools   as given; empty if none may be called
    forced  names of which one must be called; empty: the model decides
    named   whether `tool_choice` names the function: then there is exactly one call, whatever
            parallel_tool_calls says
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: tuple[str, ...] = ()
    named: bool = False


def tool_use(tools: object, choice: object, limits: ServingLimits) -> ToolUse:
    """Read both fields, None if absent. Raises ApiError, 400, with the path of the fault."""
    offered = _tools(tools, limits) if tools is not None else {}
    if choice is None or choice == "auto":
        return ToolUse(tuple(offered.values()))
    if choice == "none":
        return ToolUse()
    if choice == "required":
        if not offered:
            raise refuse(
                "tool_choice", "tool_choice demands a call, and there are no tools to choose from"
            )
        return ToolUse(tuple(offered.values()), tuple(offered))
    name = _chosen(choice)
    if name not in offered:
        raise refuse(
            "tool_choice",
            f"tool_choice names {name[:64]!r}; tools has {', '.join(offered) or 'none'}",
        )
    return ToolUse(tuple(offered.values()), (name,), named=True)


def _tools(tools: object, limits: ServingLimits) -> dict[str, Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise refuse("tools", f"tools is {show(tools)}; it must be a list")
    if len(tools) > limits.tools:
        raise refuse("tools", f"tools has {len(tools)} entries; at most {limits.tools} are allowed")
    offered: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        name, function = _function(f"tools[{index}]", tool)
        if name in offered:
            raise refuse(
                f"tools[{index}].function.name",
                f"tools[{index}].function.name is {name!r} once more",
            )
        offered[name] = {"type": "function", "function": function}
    return offered


def _function(where: str, tool: object) -> tuple[str, dict[str, Any]]:
    if not isinstance(tool, dict):
        raise refuse(
            where,
            f'{where} is {show(tool)}; a tool is like {{"type": "function", "function": {{…}}}}',
        )
    if tool.get("type") != "function":
        raise refuse(
            f"{where}.type", f"{where}.type is {show(tool.get('type'))}; it must be 'function'"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refuse(
            f"{where}.function",
            f"{where}.function is {show(function)}; it must have name and parameters",
        )
    where = f"{where}.function"
    known, fields = part(Function, where, function), Function.model_fields
    for field in function:
        if field not in fields:
            raise refuse(f"{where}.{field[:60]}", f"{where} has no field {field[:60]!r}")
    if known.parameters is not None:
        _check_parameters(f"{where}.parameters", known.parameters)
    return known.name, present(function)


def _check_parameters(where: str, schema: object) -> None:
    if not isinstance(schema, dict):
        raise refuse(where, f"{where} is {show(schema)}; it must be a JSON schema: an object")
    part(_Arguments, where, schema)


def _chosen(choice: object) -> str:
    function = (
        choice.get("function")
        if isinstance(choice, dict) and choice.get("type") == "function"
        else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refuse(
            "tool_choice",
            f"tool_choice is {show(choice)}; it must be 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": …}}',
        )
    return name
