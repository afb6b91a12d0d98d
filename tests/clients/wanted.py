"""What clients are asked for, and how a script tells what held. Imported by the scripts of this
folder.

The demo model knows no language, so every field that could go on for ever has an upper bound.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, SecretStr

PROMPT = "import os"
MESSAGES = [{"role": "user", "content": PROMPT}]
LENGTH = 700  # tokens of an answer that has to reach the end of its schema


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or the model writes further fields for ever


class Card(Model):
    kind: Literal["card"]
    number: int = Field(ge=0, le=9999)


class Cash(Model):
    kind: Literal["cash"]
    coins: list[Literal[1, 2, 5]] = Field(max_length=2)


class Order(Model):
    """An order with one field of each kind that pydantic's users have."""

    name: str = Field(max_length=8)
    secret: SecretStr = Field(max_length=6)
    tags: set[Literal["new", "old"]] = Field(max_length=2)
    file: Annotated[Path, Field(json_schema_extra={"maxLength": 8})]
    rows: Annotated[list[Annotated[list[Literal[0, 1]], Field(max_length=2)]], Field(max_length=2)]
    note: Optional[Literal["yes", "no"]]  # noqa: UP045 — as users write it
    size: Literal["s", "m", "l"]
    payment: Union[Card, Cash] = Field(discriminator="kind")  # noqa: UP007


class Plain(Model):
    """A name and a size."""

    name: str = Field(max_length=8)
    size: Literal["s", "m", "l"]


class Weather(Model):
    """The weather of a city."""

    city: str = Field(max_length=8)
    unit: Literal["C", "F"]


def is_order(order: Any) -> None:
    """Every field has its type, not merely its name."""
    assert isinstance(order, Order), order
    assert isinstance(order.secret, SecretStr)
    assert isinstance(order.tags, set)
    assert isinstance(order.file, Path)
    assert isinstance(order.payment, Card | Cash)


def raises(kind: type[Exception], call: Callable[[], Any], *words: str) -> Exception:
    """The exception of this kind that `call` ends with; its text has all words."""
    raised: Exception | None = None
    try:
        answer = call()
    except Exception as error:
        raised = error
    assert raised is not None, f"no {kind.__name__}: {answer!r}"
    assert isinstance(raised, kind), (
        f"{type(raised).__name__} in place of {kind.__name__}: {raised}"
    )
    assert all(word in str(raised) for word in words), raised
    return raised


def tell(cases: list[Callable[[], None]]) -> None:
    """Print a line of JSON for each case: its name, and "held" or the traceback."""
    for case in cases:
        try:
            case()
            ending = "held"
        except Exception:
            ending = traceback.format_exc()[-2500:]
        print(json.dumps([case.__name__, ending]), flush=True)
