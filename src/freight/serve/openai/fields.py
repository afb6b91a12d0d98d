"""Reading of OpenAI's requests: their fields, the types of these, and an error for the first fault.

A field takes effect, or is accepted without effect and reported to the client, or is accepted at a
value that asks for nothing (`unread.py`), or is refused. `null` counts as absent. Each failure is
one ApiError with status 400 and the path of the field, such as `messages[2].role`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import TypeVar

from pydantic import BaseModel

from freight.base.fields import JsonDict
from freight.errors import RequestError, nearest
from freight.serve.bodies import Closed, Unread, read
from freight.serve.call import Served
from freight.serve.limits import ServingLimits, check_body
from freight.serve.transport.errors import ApiError

ANY_MODEL = ("", "dummy", "tgi")  # placeholders from clients that assume a single model
_MOST_NAMED = 32  # names in `ignored`, which becomes a header
_NAME = re.compile(r"[A-Za-z0-9_.$\[\]-]{1,64}")
_PATH = re.compile(r"[A-Za-z_]\w*(?:\[\d+\]|\.\w+)*")

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Fields:
    """The fields of a body that take effect, none of them null, and the names of ignored ones."""

    values: JsonDict
    ignored: tuple[str, ...]


def refuse(param: str, message: str) -> ApiError:
    """Return the 400 for one field. `message` names the field itself."""
    return ApiError(400, message, param=param)


def read_fields(body: object, model: type[Closed], served: Served, limits: ServingLimits) -> Fields:
    """Sort the fields of `body` by their treatment. Raises ApiError for a refused one."""
    values: JsonDict = {}
    ignored: list[str] = []
    known = model.model_fields
    for name, value in check_body(body, limits).items():
        if value is None:
            continue
        row = model.unread.get(name)
        if name in known:
            values[name] = value
        elif row is not None:
            if not row.accepts(value):
                raise _unsupported(name, row, value)
            if row.reported:
                ignored.append(name)
        elif served.unknown_fields == "refuse":
            reported = (name for name, row in model.unread.items() if row.reported)
            hint = nearest(name[:60], (*known, *reported))
            if name in model.others:
                hint = f": {model.others[name]}"
            raise ApiError(
                400,
                f"there is no field {name[:60]!r}{hint}",
                param=name[:60],
                code="unknown_parameter",
            )
        else:
            ignored.append(name)
    return Fields(values, named(ignored))


def named(names: Sequence[str]) -> tuple[str, ...]:
    """Return names that are safe in a header: unsafe ones become "?", and there are 32 at most."""
    safe = [name if _NAME.fullmatch(name) else "?" for name in dict.fromkeys(names)]
    return (*safe[:_MOST_NAMED], "...") if len(safe) > _MOST_NAMED else tuple(safe)


def missing_or(value: object) -> str:
    """Return how an error shows a value: absent ones as missing."""
    return "missing" if value is None else show(value)


def _unsupported(name: str, row: Unread, value: object) -> ApiError:
    possible = " or ".join(json.dumps(accepted) for accepted in row.values or ())
    if row.reported:
        return refuse(name, f"{name} is {show(value)}; {row.instead}: {possible}")
    fault = f"{name} is not supported"
    if possible:
        fault = f"{name} is {show(value)}; only {possible} is possible"
    return ApiError(400, f"{fault}: {row.instead}", param=name, code="unsupported_parameter")


def part(model: type[M], where: str, value: object) -> M:
    """Validate `value`, at the path `where` of a body, as `model`. Raises ApiError for the first
    fault.
    """

    def refused(path: str, words: str, value: object) -> ApiError:
        path = f"{where}.{path}".strip(".")
        if not words.startswith("is "):
            missing = value is None and words == "must be a string"
            it = "it " if words.startswith("must") else ""
            value_text = "missing" if missing else show(value)
            words = f"is {value_text}; {it}{words}"
        return refuse(path, f"{path} {words}")

    return read(model, value, refused)


def served_name(model: str | None, served: Served) -> str:
    """Return the name of the model or of an adapter, for answers. Raises ApiError, 404, for one that is
    not served.
    """
    if model is None or model in ANY_MODEL:
        return served.names[0]
    if model not in served.names and not served.has_adapter(model):
        raise ApiError(
            404,
            f"the model {model[:100]!r} is not served here; {served.offered}",
            param="model",
            code="model_not_found",
        )
    return model


def from_request_error(error: RequestError, renamed: Mapping[str, str] | None = None) -> ApiError:
    """Return the 400 for an error of the engine's validators, whose messages begin with a field.

    renamed  the validators' name -> the field of this API
    """
    message = str(error)
    path = _PATH.match(message)
    if path is None or not _is_field(path[0]):
        return ApiError(400, message)
    name = re.split(r"[.\[]", path[0])[0]
    param = (renamed or {}).get(name, name)
    if param == name:
        param = path[0]
    return ApiError(400, param + message[path.end() :], param=param)


def _is_field(path: str) -> bool:
    return (
        "_" in path
        or "[" in path
        or path
        in ("n", "temperature", "seed", "stop", "logprobs", "messages", "prompt", "priority")
        or path in ("dimensions", "normalize")
    )
