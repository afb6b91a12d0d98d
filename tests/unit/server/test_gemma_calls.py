"""Arguments of Gemma 4's calls: what is not of their form is refused, and never read as another."""

from __future__ import annotations

import json

import pytest

from freight.serve.answers.gemma_calls import _DEEPEST, GemmaValues

VALUES = GemmaValues("call:", '<|"|>')


def read(arguments: str) -> tuple[str, object]:
    ((name, found),) = VALUES.read("", f"call:f{arguments}", ())
    return name, json.loads(found)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", {}),
        ('{ city : <|"|>Rome, "I"<|"|> , days:2}', {"city": 'Rome, "I"', "days": 2}),
        (
            '{<|"|>a key<|"|>:[1,[true,none]],b:{c:null}}',
            {"a key": [1, [True, None]], "b": {"c": None}},
        ),
        ('{a:"plain \\" quotes"}', {"a": 'plain " quotes'}),
        ("{a:1 b:2}", {"a": "1 b:2"}),  # a bare value goes on up to a comma
        ("{a:" + "[" * (_DEEPEST - 1) + "]" * (_DEEPEST - 1) + "}", None),
    ],
)
def test_values(arguments: str, expected: object) -> None:
    name, found = read(arguments)
    assert name == "f"
    assert expected is None or found == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{a:<|"|>x<|"|> b:2}', "no comma between values"),
        ("{a:[[1] [2]]}", "no comma between values"),
        ("{:1}", "no key"),
        ("{a}", "no colon after a key"),
        ("{a:}", "no value"),
        ("{a:1} more", "text after the arguments"),
        ('{a:<|"|>never closed}', "substring not found"),
        ("{a:" + "[" * 1000 + "]" * 1000 + "}", "nested too deeply"),
    ],
)
def test_what_is_no_value_is_refused(arguments: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(arguments)
