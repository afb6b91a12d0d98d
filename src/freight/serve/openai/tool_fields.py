"""`tools` and `tool_choice`: the functions of a conversation, and whether a call is forced.

Only the outer shape of the parameters' schemas is checked here. A forced call is compiled to a
grammar later, which checks them completely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from reprlib import repr as show
from typing import Annotated, Literal

from pydantic import Field

from freight.base.fields import JsonDict, JsonObject
from freight.serve.bodies import Nullable, Part, checked_later, present, says
from freight.serve.limits import ServingLimits
from freight.serve.openai.fields import part, refuse

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
    parameters: JsonDict | None = checked_later()


class _Arguments(Part):
    type: Annotated[Literal["object"], says("arguments are an 'object'")] = "object"
    properties: Annotated[dict[str, JsonDict | bool], says("must map names to schemas")] = Field(
        default={}
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
    places  for each of `tools`, its index in the request
    forced  names of which one must be called; empty: the model decides
    named   whether `tool_choice` names the function: then there is exactly one call, whatever
            parallel_tool_calls says
    """

    tools: tuple[JsonObject, ...] = ()
    places: tuple[int, ...] = ()
    forced: tuple[str, ...] = ()
    named: bool = False


def tool_use(tools: object, choice: object, limits: ServingLimits) -> ToolUse:
    """Read both fields, None if absent. Raises ApiError, 400, with the path of the fault."""
    offered = _tools(tools, limits) if tools is not None else {}
    use = ToolUse(tuple(offered.values()), tuple(range(len(offered))))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        use, choice = _allowed(use, choice, limits)
    if choice is None or choice == "auto":
        return use
    if choice == "none":
        return ToolUse()
    names = tuple(tool["function"]["name"] for tool in use.tools)
    if choice == "required":
        if not names:
            raise refuse(
                "tool_choice", "tool_choice demands a call, and there are no tools to choose from"
            )
        return replace(use, forced=names)
    name = _chosen(choice)
    if name not in offered:
        raise refuse(
            "tool_choice",
            f"tool_choice names {name[:64]!r}; tools has {', '.join(offered) or 'none'}",
        )
    return replace(use, forced=(name,), named=True)


def _allowed(use: ToolUse, choice: JsonObject, limits: ServingLimits) -> tuple[ToolUse, object]:
    """Keep only the tools that may be called; returns them, and the `tool_choice` among them."""
    where = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise refuse(where, f'{where} is {show(allowed)}; it must be {{"mode": …, "tools": […]}}')
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise refuse(f"{where}.mode", f"{where}.mode is {show(mode)}; it must be auto or required")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or len(listed) > limits.tools:
        raise refuse(
            f"{where}.tools",
            f"{where}.tools is {show(listed)}; it must be a list of at most {limits.tools} tools",
        )
    offered = {tool["function"]["name"] for tool in use.tools}
    names = set()
    for index, tool in enumerate(listed):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in offered:
            path = f"{where}.tools[{index}]"
            raise refuse(
                path,
                f"{path} is {show(tool)}; it must name one of tools, like "
                '{"type": "function", "function": {"name": …}}',
            )
        names.add(name)
    places = [at for at, tool in enumerate(use.tools) if tool["function"]["name"] in names]
    return ToolUse(tuple(use.tools[at] for at in places), tuple(places)), mode


def _tools(tools: object, limits: ServingLimits) -> dict[str, JsonObject]:
    if not isinstance(tools, list):
        raise refuse("tools", f"tools is {show(tools)}; it must be a list")
    if len(tools) > limits.tools:
        raise refuse("tools", f"tools has {len(tools)} entries; at most {limits.tools} are allowed")
    offered: dict[str, JsonObject] = {}
    for index, tool in enumerate(tools):
        name, function = _function(f"tools[{index}]", tool)
        if name in offered:
            raise refuse(
                f"tools[{index}].function.name",
                f"tools[{index}].function.name is {name!r} once more",
            )
        offered[name] = {"type": "function", "function": function}
    return offered


def _function(where: str, tool: object) -> tuple[str, JsonDict]:
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
    known = part(Function, where, function)
    fields = Function.model_fields
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
            f"tool_choice is {show(choice)}; it must be 'none', 'auto', 'required', "
            '{"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}',
        )
    return name
