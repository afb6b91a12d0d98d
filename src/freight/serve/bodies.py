"""The table of the fields of request bodies: a pydantic model for each body, a row for each field.

A field is one row. A field that is read is an attribute of a model: its name, its JSON type, and
what becomes of it (`sampled`, `option`, `checked_later`; or the API's own code reads it). A field
that has no effect is an `Unread` of the model's `unread`. From the rows come the reading of bodies,
the arguments of SamplingParams, /openapi.json, the table in docs/server.md and the tests of all
fields. Ranges are the sampler's (`freight.sampling.RANGES`), narrowed to the server's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    SkipValidation,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError

from freight.base.fields import JsonObject
from freight.errors import nearest
from freight.sampling import LARGEST_WHOLE, RANGES
from freight.serve.limits import ServingLimits
from freight.serve.transport.errors import ApiError

M = TypeVar("M", bound=BaseModel)
B = TypeVar("B", bound="Body")
# Makes the error for a field: from its path, the words behind the path, and its value.
Refused = Callable[[str, str, object], ApiError]
MOST = ServingLimits()
_ABSENT = {"type": "null"}  # null counts as an absent field
_WORDS = {  # pydantic's type of an error -> the words behind the field's name
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is not a field of this API",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_type": "must be a string",
}

Stop = Annotated[str, Field(min_length=1, max_length=MOST.sampling.stop_length)]
Stops = Annotated[list[Stop], Field(max_length=MOST.sampling.stop)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST_WHOLE)]


class Part(BaseModel):
    """An object within a body."""

    model_config = ConfigDict(strict=True, defer_build=True)


@dataclass(frozen=True)
class Row:
    """What the table says of an attribute of a body's model, besides its name and its type.

    sampling  the field of SamplingParams that the value is given to, as it is; "": other code of
              the API reads the value
    note      words behind the name in docs/server.md
    """

    sampling: str = ""
    note: str = ""


@dataclass(frozen=True)
class Unread:
    """The row of a field that has no effect.

    values    the values that are accepted, besides null; None: every value
    instead   why other values are refused, or what to use instead
    reported  whether the header x-freight-ignored names the field
    """

    values: tuple[object, ...] | None
    instead: str = ""
    reported: bool = False

    def accepts(self, value: object) -> bool:
        """Return whether `value`, of parsed JSON, is accepted. 1 equals 1.0; true is not 1."""
        return self.values is None or any(
            value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
            for accepted in self.values
        )

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the values."""
        return {} if self.values is None else {"enum": [*self.values, None]}


class Nullable(Part):
    """An object in which null counts as an absent field."""

    @model_validator(mode="before")
    @classmethod
    def _absent_is_null(cls, body: object) -> object:
        """Give required fields null, so that the error for a missing one names the type it needs."""
        if not isinstance(body, dict):
            return body
        return _required(cls) | body


class Closed(Part):
    """An object whose unknown fields are refused, or ignored with --unknown-fields ignore.

    unread  the rows of fields that have no effect, by their names
    others  fields of other engines that it has not -> what to use in their place
    """

    unread: ClassVar[Mapping[str, Unread]] = {}
    others: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        unread = {name: row.schema() for name, row in cls.unread.items()}
        schema["properties"] = unread | schema["properties"]
        schema["additionalProperties"] = _ABSENT
        return schema


class Body(Nullable, Closed):
    """A closed object in which null counts as an absent field."""


def present(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of an object that are not null."""
    return {name: value for name, value in (fields or {}).items() if value is not None}


def field_row(sampling: str = "", note: str = "", checked: bool = True, **schema: JsonValue) -> Any:
    """Return the default of a model's attribute, absent, with its row in the table.

    checked  whether the attribute's type is checked; without, only /openapi.json shows it, and the
             code that reads the value checks it with a better error
    schema   entries that the JSON schema has in addition
    """
    field = FieldInfo(default=None, json_schema_extra=schema or None)
    field.metadata.append(Row(sampling, note))
    if not checked:
        field.metadata.append(SkipValidation())  # type: ignore[type-arg]  # for mypy it is a type
    return field


def sampled(name: str, checked: bool = True, note: str = "", **bounds: float) -> Any:
    """Return the row of a number for SamplingParams' `name`; the JSON schema has its range."""
    within = RANGES[name]
    low = "exclusiveMinimum" if within.above else "minimum"
    high = getattr(MOST.sampling, name, within.high)
    return field_row(name, note, checked, **({low: within.low, "maximum": high} | bounds))


def option(name: str, checked: bool = False, note: str = "", **schema: JsonValue) -> Any:
    """Return the row of a value for SamplingParams' `name`, which checks it."""
    return field_row(name, note, checked, **schema)


def checked_later(note: str = "") -> Any:
    """Return the row of a value that the API's own code reads and checks."""
    return field_row(note=note, checked=False)


@cache
def rows(model: type[BaseModel]) -> Mapping[str, Row]:
    """Return the rows of a model's attributes, by the names of the fields."""
    table = {}
    for name, field in model.model_fields.items():
        marks = (mark for mark in field.metadata if isinstance(mark, Row))
        table[field.alias or name] = next(marks, Row())
    return table


@cache
def sampling_names(model: type[BaseModel]) -> Mapping[str, str]:
    """Return field -> the field of SamplingParams that its value is given to, as it is."""
    return {name: row.sampling for name, row in rows(model).items() if row.sampling}


@cache
def _required(model: type[BaseModel]) -> dict[str, None]:
    fields = model.model_fields.items()
    return {field.alias or name: None for name, field in fields if field.is_required()}


def says(words: str) -> WrapValidator:
    """Replace every error about a field's value by `words`, which follow the field's name."""

    def check(value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("says", "{words}", {"words": words}) from None

    return WrapValidator(check)


def read(model: type[M], body: object, refused: Refused) -> M:
    """Validate `body` as `model`. Raises what `refused` makes of the first fault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{at[:60]}" for at in first["loc"])
        words = _WORDS.get(first["type"], first["msg"].replace("Input should", "must"))
        raise refused(path.lstrip("."), words, first["input"]) from None


def read_closed(model: type[B], body: JsonObject, unknown_fields: str = "refuse") -> B:
    """Validate `body` as `model`. Raises ApiError (400) also for fields that the model does not have,
    unless `unknown_fields` is "ignore", and for values that its unread fields do not accept.
    """
    fields = present(body)
    known = (*model.model_fields, *model.unread)
    for name, value in fields.items():
        row = model.unread.get(name)
        if row is not None and not row.accepts(value):
            raise invalid(f"{name} is {value!r:.60}: {row.instead}", name)
        if name not in known and unknown_fields != "ignore":
            raise invalid(f"{name:.60} is not a field here{nearest(name[:60], known)}", name[:60])
    return read(model, fields, lambda path, words, _: invalid(f"{path} {words}", path))


def invalid(message: str, param: str) -> ApiError:
    """The error for a field."""
    return ApiError(400, message, param=param)


@cache
def schema_of(body: Any, unknown_fields: str = "refuse") -> dict[str, Any]:
    """Return the JSON schema of a model, or of one of several (`A | B`). Every reference is
    replaced by its target, so that the schema can stand anywhere.
    """
    if kinds := get_args(body):
        return {"anyOf": [schema_of(kind, unknown_fields) for kind in kinds]}
    schema = body.model_json_schema()
    parts = schema.pop("$defs", {})

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return replaced(parts[value["$ref"].removeprefix("#/$defs/")])
        copy = {key: replaced(item) for key, item in value.items()}
        if unknown_fields == "ignore" and copy.get("additionalProperties") == _ABSENT:
            copy["additionalProperties"] = True
        return copy

    result: dict[str, Any] = replaced(schema)
    return result
