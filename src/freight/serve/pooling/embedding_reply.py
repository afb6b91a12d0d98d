"""The answer of `/v1/embeddings`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from freight.base.fields import JsonDict
from freight.serve.openai.stream import common_fields
from freight.serve.pooling.call import Results
from freight.serve.pooling.numbers import Numbers, as_base64


@dataclass(frozen=True)
class Embeddings:
    """OpenAI's object: an embedding for each input, in order."""

    is_base64: bool

    def body(self, results: Results) -> JsonDict:
        body = common_fields(results.head, "embd", "list")
        body["data"] = [
            {"object": "embedding", "index": index, "embedding": written(vector, self.is_base64)}
            for index, vector in enumerate(results.vectors)
        ]
        body["usage"] = results.usage()
        return body


def written(vector: array[float], is_base64: bool) -> Numbers | str:
    """Return a vector as an answer has it."""
    return as_base64(vector) if is_base64 else Numbers(vector)
