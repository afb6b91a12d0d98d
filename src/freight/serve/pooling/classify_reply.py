"""Answers of `/classify` and `/pooling`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freight.base.fields import JsonDict
from freight.serve.openai.stream import common_fields
from freight.serve.pooling.call import Results
from freight.serve.pooling.embedding_reply import written
from freight.serve.pooling.numbers import Numbers


@dataclass(frozen=True)
class Classes:
    """vLLM's object: for each input the numbers of all classes, and the name of the highest."""

    labels: Sequence[str]

    def body(self, results: Results) -> JsonDict:
        body = common_fields(results.head, "classify", "list")
        body["data"] = [
            {
                "index": index,
                "label": label_of(max(range(len(vector)), key=vector.__getitem__), self.labels),
                "probs": Numbers(vector),
                "num_classes": len(vector),
            }
            for index, vector in enumerate(results.vectors)
        ]
        body["usage"] = results.usage()
        return body


def label_of(place: int, labels: Sequence[str]) -> str:
    """Return the name of a class: that of transformers where the model has none."""
    return labels[place] if place < len(labels) else f"LABEL_{place}"


@dataclass(frozen=True)
class Vectors:
    """The object of vLLM's /pooling: what the model gives for each input."""

    is_base64: bool

    def body(self, results: Results) -> JsonDict:
        body = common_fields(results.head, "pool", "list")
        body["data"] = [
            {"index": index, "object": "pooling", "data": written(vector, self.is_base64)}
            for index, vector in enumerate(results.vectors)
        ]
        body["usage"] = results.usage()
        return body
