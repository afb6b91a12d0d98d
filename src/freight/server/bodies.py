"""What request bodies are described with: pydantic models, of which /openapi.json has its schemas.

A model says what a field may be. `SkipValidation` stands where somebody else checks the value, with
an error that says more: the sampler, or the reader of a field with forms of its own. Ranges are the
sampler's (`freight.sampling.RANGES`), as far as a server's limits allow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from freight.sampling import LARGEST_WHOLE, RANGES
from freight.server.limits import ServingLimits
from freight.server.openai.neutral import Neutral
from freight.server.transport.errors import ApiError

M = TypeVar("M", bound=BaseModel)
MOST = ServingLimits()
_ABSENT = {"type": "null"}  # the same as no such field
_MUST = {  # pydantic's type of an error -> what the field must be
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "string_type": "must be a string",
}

Stop = Annotated[str, Field(min_length=1, max_length=MOST.sampling.stop_length)]
Stops = Annotated[list[Stop], Field(max_length=MOST.sampling.stop)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST_WHOLE)]


class Part(BaseModel):
    """An object within a body."""

    model_config = ConfigDict(strict=True)


class Body(Part):
    """An object in which null is the same as no such field, and whose unknown fields are refused, or
    ignored if the server was started so.

    neutral   fields that it does not act on, with the values at which they ask for nothing
    accepted  fields that have no effect, whatever their value
    """

    neutral: ClassVar[Mapping[str, Neutral]] = {}
    accepted: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None
            or (name in cls.model_fields and cls.model_fields[name].is_required())
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        properties = schema["properties"]
        for name, field in cls.model_fields.items():
            if not field.is_required() and field.default is not None:
                properties[name] = {"anyOf": [properties[name], _ABSENT]}
        neutral = {name: {"enum": [*known.values, None]} for name, known in cls.neutral.items()}
        accepted: dict[str, Any] = {name: {} for name in cls.accepted}
        schema["properties"] = accepted | neutral | properties
        schema["additionalProperties"] = _ABSENT
        return schema


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


def read(model: type[M], given: Mapping[str, object], refused: Callable[[str, str], ApiError]) -> M:
    """`given` as `model`. Raises what `refused` makes of the first fault, from its field's path and
    what errors say behind it.
    """
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    try:
        return model.model_validate({**dict.fromkeys(required), **given})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise refused(path_of(first["loc"]), _MUST.get(first["type"], first["msg"])) from None


def path_of(loc: Sequence[int | str]) -> str:
    """A field's place in a body, such as `messages[2].role`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return "".join(parts).lstrip(".")


def schema_of(body: Any, unknown_fields: str = "refuse") -> dict[str, Any]:
    """The JSON schema of a model, or of one of several (`A | B`), with every reference replaced by
    what it refers to, so that it can stand anywhere.
    """
    schema = TypeAdapter(body).json_schema()
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
