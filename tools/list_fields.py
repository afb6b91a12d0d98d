"""Write the tables of fields in docs/server.md from the rows of the bodies' models.

python tools/list_fields.py            write it
python tools/list_fields.py --check    exit with 1 if it differs from what would be written
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from freight.serve.bodies import Unread, rows
from freight.serve.openai.chat_request import ChatRequest
from freight.serve.openai.completion_request import CompletionRequest
from freight.serve.openai.unread import UNREAD
from freight.serve.pooling.classify_request import ClassifyRequest, PoolingRequest
from freight.serve.pooling.embedding_request import EmbeddingRequest
from freight.serve.pooling.fields import PooledFields
from freight.serve.pooling.inputs import ConversationFields
from freight.serve.pooling.rerank_request import RerankRequest
from freight.serve.pooling.score_request import ScoreRequest
from freight.serve.pooling.tei_request import EmbedBody, PredictBody, TeiRerankBody
from freight.serve.pooling.unread import ACTIVATIONS, RANKING, VECTORS
from freight.serve.pooling.unread import UNREAD as UNREAD_OF_POOLING

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
_TABLE = re.compile(r"(?<=\| fields \| \|\n\|---\|---\|\n)(?:\|.*\n)+")
_POOLING_TABLE = re.compile(r"(?<=\| fields of models that pool \| \|\n\|---\|---\|\n)(?:\|.*\n)*")
_OTHER_NAMES = "and any other name; `--unknown-fields ignore` accepts other names without effect"


def table() -> str:
    """Return the rows of the table, in Markdown."""
    chat = _read(ChatRequest)
    completion = _read(CompletionRequest)
    both = [name for name in chat if name in completion]
    neutral = {name: row for name, row in UNREAD.items() if row.values and not row.reported}
    refused = [name for name, row in UNREAD.items() if row.values == ()]
    cells = {
        "of both": _listed(chat[name] for name in both),
        "of chat": _listed(chat[name] for name in chat if name not in both),
        "of completions": _listed(completion[name] for name in completion if name not in both),
        "accepted without effect": _listed(
            _accepted(name, row) for name, row in UNREAD.items() if row.reported
        ),
        "accepted at one value, which asks for nothing": _listed(
            f"`{name}` {_values(row)}" for name, row in neutral.items()
        ),
        "refused": _listed([*(f"`{name}`" for name in refused), _OTHER_NAMES]),
    }
    return "".join(f"| {kind} | {cell} |\n" for kind, cell in cells.items())


def pooling_table() -> str:
    """Return the rows of the table of models that pool, in Markdown."""
    shared = _read(PooledFields)
    bodies: dict[str, type[BaseModel]] = {
        "`/v1/embeddings`": EmbeddingRequest,
        "`/classify`": ClassifyRequest,
        "`/pooling`": PoolingRequest,
        "the three with `messages`": ConversationFields,
        "`/rerank`": RerankRequest,
        "`/score`": ScoreRequest,
        "TEI's `/embed`": EmbedBody,
        "TEI's `/rerank`": TeiRerankBody,
        "TEI's `/predict`": PredictBody,
    }
    cells = {"of all but TEI's": _listed(shared.values())}
    for name, body in bodies.items():
        own = {field: row for field, row in _read(body).items() if field not in shared}
        cells[f"of {name}"] = _listed(own.values())
    unread = {**UNREAD_OF_POOLING, **VECTORS, **RANKING, **ACTIVATIONS}
    cells["accepted without effect"] = _listed(
        f"`{name}`" for name, row in unread.items() if row.reported
    )
    cells["accepted at one value, which asks for nothing"] = _listed(
        f"`{name}` {_values(row)}"
        for name, row in unread.items()
        if row.values and not row.reported
    )
    return "".join(f"| {kind} | {cell} |\n" for kind, cell in cells.items())


def page() -> str:
    """Return docs/server.md with the present tables."""
    text = _TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))
    return _POOLING_TABLE.sub(lambda _: pooling_table(), text)


def _read(model: type[BaseModel]) -> dict[str, str]:
    return {name: f"`{name}` {row.note}".strip() for name, row in rows(model).items()}


def _accepted(name: str, row: Unread) -> str:
    return f"`{name}`" if row.values is None else f"`{name}` (`{_values(row)}` only)"


def _values(row: Unread) -> str:
    return " or ".join(json.dumps(value) for value in row.values or ())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def main() -> int:
    written = page()
    if "--check" in sys.argv[1:]:
        return int(written != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
