"""What request bodies are described with: pydantic models, of which /openapi.json has its schemas.

A model says what a field may be. `SkipValidation` stands where somebody else checks the value, with
an error that says more: the sampler, or the reader of a field with forms of its own. Ranges are the
sampler's (`freight.sampling.RANGES`), as far as a server's limits allow them.
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
from freight.server.limits import ServingLimits
from freight.server.openai.neutral import Neutral
from freight.server.transport.errors import ApiError

M = TypeVar("M", bound=BaseModel)
Refused = Callable[
    [str, str, object], ApiError
]  # of a field's path, what errors say, and its value
MOST = ServingLimits()
_ABSENT = {"type": "null"}  # the same as no such field
_WORDS = {  # pydantic's type of an error -> what errors say of the field
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
    """An object in which null is the same as no such field."""


class Closed(Part):
    """An object whose unknown fields are refused, or ignored if the server was started so.

    neutral   fields that it does not act on, with the values at which they ask for nothing
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
    """A closed object in which null is the same as no such field."""


def present(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is not null of an object."""
    return {name: value for name, value in (given or {}).items() if value is not None}


def sampled(name: str, **bounds: float) -> Any:
    """A field for SamplingParams' `name`, absent by default. The schema shows its range."""
    within = RANGES[name]
    low = "exclusiveMinimum" if within.above else "minimum"
    high = getattr(MOST.sampling, name, within.high)
    return Field(default=None, json_schema_extra={low: within.low, "maximum": high} | bounds)


def says(words: str) -> WrapValidator:
    """What errors say of a field's value behind its name, whatever is wrong with it."""

    def check(value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("says", "{words}", {"words": words}) from None

    return WrapValidator(check)


def read(model: type[M], given: object, refused: Refused) -> M:
    """`given` as `model`. Raises what `refused` makes of the first fault."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "missing" and issubclass(model, Nullable):
            first["input"][first["loc"][-1]] = None  # errors then say what it must be
            return read(model, given, refused)
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        words = _WORDS.get(first["type"], first["msg"].replace("Input should", "must"))
        raise refused(path.lstrip("."), words, first["input"]) from None


@cache
def schema_of(body: Any, unknown_fields: str = "refuse") -> dict[str, Any]:
    """The JSON schema of a model, or of one of several (`A | B`), with every reference replaced by
    what it refers to, so that it can stand anywhere.
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
        found = {key: replaced(item) for key, item in value.items()}
        if unknown_fields == "ignore" and found.get("additionalProperties") == _ABSENT:
            found["additionalProperties"] = True
        return found

    result: dict[str, Any] = replaced(schema)
    return result
