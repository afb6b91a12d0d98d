"""The files that `freight batch` wrote, read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from freight.errors import ConfigError


@dataclass(frozen=True)
class Answer:
    """num_tokens: generated. finish_reason: 'stop', or 'length' where max_tokens cut it. fingerprint:
    of the model and its options, and model: its name, if the server told them.
    """

    id: str
    text: str
    num_tokens: int
    finish_reason: str
    fingerprint: str | None
    model: str | None = None


def read_answers(path: Path) -> dict[str, Answer]:
    """The answers of a file by their custom_id, without those that failed.

    An incomplete last line is left out, since the run that writes it may still go on. Raises
    ConfigError for a line that is not an answer.
    """
    answers = {}
    lines = path.read_bytes().split(b"\n")  # the incomplete line may end within a character
    for number, line in enumerate(lines[:-1], 1):  # behind the last line end is nothing, or a part
        try:
            answer = _read_line(line)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{path}: line {number} is no answer of freight batch ({type(error).__name__}: "
                f"{error}); remove the file"
            ) from None
        if answer is not None:
            answers[answer.id] = answer
    return answers


def _read_line(line: bytes) -> Answer | None:
    """None: the request failed."""
    value = json.loads(line)
    if value["error"] is not None:
        return None
    body = value["response"]["body"]
    choice = body["choices"][0]
    return Answer(
        value["custom_id"],
        choice["message"]["content"] or "",
        body["usage"]["completion_tokens"],
        choice["finish_reason"],
        body.get("system_fingerprint"),
        body.get("model"),
    )
