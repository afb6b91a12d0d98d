"""Structured output: `response_format` and its relatives as arguments of StructuredOutputs.

Clients use four notations: OpenAI's `response_format`, the variant of the Hugging Face hub's
client, `structured_outputs`, and the older `guided_…`. A request uses one of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any

from freight.base.fields import JsonDict, JsonObject
from freight.errors import RequestError, choices
from freight.serve.openai.fields import from_request_error, refuse
from freight.serve.transport.errors import ApiError
from freight.structured import StructuredOutputs

_FORMS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMAT_FIELDS = ("type", "json_schema", "schema", "value")


@dataclass(frozen=True)
class Form:
    """The form that a request asks of its answer.

    values   keyword arguments of StructuredOutputs; None: free text
    field    the field of the request that they come from
    ignored  keywords of a JSON schema that are not enforced, as paths of the request
    """

    values: JsonDict | None
    field: str
    ignored: tuple[str, ...] = ()


def form_of(request: Any, strict_schemas: bool) -> Form:
    """Read `response_format`, `structured_outputs` and `guided_…` of a request.

    Raises ApiError, 400, for an unknown form, for several at once, and with strict_schemas for a
    schema that can be enforced only in part.
    """
    values, field = _values(request)
    if values is None or "json" not in values:
        return Form(values, field)
    where = {
        "response_format": "response_format.schema",
        "structured_outputs": "structured_outputs.json",
    }
    schema, ignored = enforced(values["json"], field, where.get(field, field), strict_schemas)
    return Form(schema, field, ignored)


def enforced(
    schema: JsonObject | bool | str, field: str, where: str, strict_schemas: bool
) -> tuple[JsonDict, tuple[str, ...]]:
    """Return StructuredOutputs' arguments for the enforceable part of a schema, and the rest of it.

    field  the field to name in errors
    where  the path of the schema, for the keywords that are left out

    An unknown `format` is never refused: in JSON Schema it is an annotation. Raises ApiError, 400.
    """
    try:
        form, left_out = StructuredOutputs.enforceable(schema)
    except RequestError as error:
        raise from_request_error(error, {"structured_outputs": field}) from error
    constraints = [name for name in left_out if name != "format"]
    if strict_schemas and constraints:
        it, this = ("it", "this") if len(constraints) == 1 else ("them", "these")
        raise ApiError(
            400,
            f"{where} has {', '.join(constraints)}, and a grammar cannot enforce {this}; leave {it} out, or start "
            "the server without --strict-schemas",
            param=field,
            code="invalid_grammar",
        )
    arguments = form.given()
    if form.json is not None:
        arguments = {"json": json.loads(str(form.json))}
    return arguments, tuple(f"{where}.{name}" for name in left_out)


def _values(request: Any) -> tuple[JsonDict | None, str]:
    """Return keyword arguments of StructuredOutputs, and the field that they come from."""
    forms: dict[str, JsonDict] = {}
    if request.response_format is not None:
        form = _response_format(request.response_format)
        if form is not None:
            forms["response_format"] = form
    if request.structured_outputs is not None:
        forms["structured_outputs"] = _structured_outputs(request.structured_outputs)
    for name in _GUIDED:
        value = getattr(request, name)
        if value is not None:
            forms[name] = {name.removeprefix("guided_"): value}
    if len(forms) > 1:
        first, second, *_ = forms
        raise refuse(second, f"{first} and {second} are both given; an answer has one form")
    for name, form in forms.items():
        return form, name
    return None, "structured_outputs"


def _response_format(fields: object) -> JsonDict | None:
    if not isinstance(fields, dict):
        raise refuse(
            "response_format",
            f'response_format is {show(fields)}; it must be like {{"type": "json_object"}}',
        )
    for name in fields:
        if name not in _FORMAT_FIELDS:
            raise refuse(
                f"response_format.{name:.60}", f"response_format has no field {name[:60]!r}"
            )
    kind = fields.get("type")
    schema = fields.get("schema")
    if schema is None:
        schema = fields.get("value")
    if kind == "text":
        return None
    if kind == "json_schema":
        return {"json": _schema(fields, schema)}
    if kind in ("json_object", "json"):
        if schema is None:
            return {"json_object": True}
        return {"json": _checked(schema, "response_format.value")}
    if kind == "regex":
        if not isinstance(schema, str):
            raise refuse(
                "response_format.value",
                f"response_format.value is {show(schema)}; it must be a string",
            )
        return {"regex": schema}
    raise refuse(
        "response_format.type",
        f"response_format.type is {show(kind)}; it must be {choices(('text', 'json_object', 'json_schema', 'regex'))}",
    )


def _schema(fields: JsonDict, flat: object) -> object:
    """Return the schema in `json_schema`, as in OpenAI's API, or `flat`, next to `type`."""
    inside = fields.get("json_schema")
    if inside is None and flat is not None:
        return _checked(flat, "response_format.value")
    if not isinstance(inside, dict):
        raise refuse(
            "response_format.json_schema",
            f'response_format.json_schema is {show(inside)}; it must be like {{"name": "x", "schema": {{}}}}',
        )
    return _checked(inside.get("schema"), "response_format.json_schema.schema")


def _checked(schema: object, param: str) -> object:
    if not isinstance(schema, dict | bool):
        raise refuse(param, f"{param} is {show(schema)}; it must be a JSON schema: an object")
    return as_object(schema) if isinstance(schema, dict) else schema


def as_object(schema: JsonObject) -> JsonObject:
    """Add `"type": "object"` to a schema that has properties and no type.

    Strictly, such a schema allows a number too. The hub's clients and their documentation mean an
    object by it.
    """
    return (
        {"type": "object", **schema} if "properties" in schema and "type" not in schema else schema
    )


def _structured_outputs(fields: object) -> JsonDict:
    if not isinstance(fields, dict):
        raise refuse(
            "structured_outputs",
            f"structured_outputs is {show(fields)}; it must have {choices(_FORMS)}",
        )
    for name in fields:
        if name not in _FORMS:
            raise refuse(
                f"structured_outputs.{name:.60}",
                f"structured_outputs has no field {name[:60]!r}; it has {choices(_FORMS)}",
            )
    forms = {
        name: value for name, value in fields.items() if value is not None and value is not False
    }
    if "json" in fields and fields["json"] is False:
        forms["json"] = False  # a schema that nothing satisfies
    if len(forms) != 1:
        raise refuse(
            "structured_outputs",
            f"structured_outputs has {len(forms)} forms; it must have one of {choices(_FORMS)}",
        )
    return forms
