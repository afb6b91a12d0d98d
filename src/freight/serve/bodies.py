"""The pydantic models that request bodies are built from; /openapi.json takes its schemas from
them.

A model declares the type of a field. `SkipValidation` marks a value that other code checks with a
better error: the sampler, or the reader of a field with several formats. Ranges are the sampler's
(`freight.sampling.RANGES`), narrowed to the server's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from freight.sampling import LARGEST_WHOLE, RANGES
from freight.serve.limits import ServingLimits
from freight.serve.openai.neutral import Neutral
from freight.serve.transport.errors import ApiError

M = TypeVar("M", bound=BaseModel)
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


class Nullable(Part):
    """An object in which null counts as an absent field."""


class Closed(Part):
    """An object whose unknown fields are refused, or ignored with --unknown-fields ignore.

    neutral   fields that are not implemented, with the values at which they ask for nothing
    accepted  fields that have no effect, whatever their value
    """

    neutral: ClassVar[Mapping[str, Neutral]] = {}
    accepted: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        neutral = {name: {"enum": [*known.values, None]} for name, known in cls.neutral.items()}
        accepted: dict[str, Any] = {name: {} for name in cls.accepted}
        schema["properties"] = accepted | neutral | schema["properties"]
        schema["additionalProperties"] = _ABSENT
        return schema


class Body(Nullable, Closed):
    """A closed object in which null counts as an absent field."""


def present(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of an object that are not null."""
    return {name: value for name, value in (fields or {}).items() if value is not None}


def sampled(name: str, **bounds: float) -> Any:
    """Return the Field for SamplingParams' `name`, absent by default; the schema has its range."""
    within = RANGES[name]
    low = "exclusiveMinimum" if within.above else "minimum"
    high = getattr(MOST.sampling, name, within.high)
    return Field(default=None, json_schema_extra={low: within.low, "maximum": high} | bounds)


def says(words: str) -> WrapValidator:
    """Replace every error about a field's value by `words`, which follow the field's name."""

    def check(value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("says", "{words}", {"words": words}) from None

    return WrapValidator(check)


def read(model: type[M], body: object, refused: Refused) -> M:
    """Validate `given` as `model`. Raises what `refused` makes of the first fault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "missing" and issubclass(model, Nullable):
            first["input"][first["loc"][-1]] = None  # so that the error names the type it needs
            return read(model, body, refused)
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        words = _WORDS.get(first["type"], first["msg"].replace("Input should", "must"))
        raise refused(path.lstrip("."), words, first["input"]) from None


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
        schema = {key: replaced(item) for key, item in value.items()}
        if unknown_fields == "ignore" and schema.get("additionalProperties") == _ABSENT:
            schema["additionalProperties"] = True
        return schema

    result: dict[str, Any] = replaced(schema)
    return result
