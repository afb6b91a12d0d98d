"""Answers of `/rerank` and `/score`: a number for each pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freight.base.fields import JsonDict
from freight.serve.openai.stream import common_fields
from freight.serve.pooling.call import Results
from freight.serve.pooling.numbers import short
from freight.text.prompts import cosine


@dataclass(frozen=True)
class Pairs:
    """How scores come of the vectors of a call.

    places  of two embeddings, for each pair; None: each vector is the score of a pair
    """

    places: Sequence[tuple[int, int]] | None

    def scores(self, results: Results) -> list[float]:
        """Return the score of each pair."""
        vectors = results.vectors
        if self.places is None:
            return [short(vector[0]) for vector in vectors]
        return [cosine(vectors[left], vectors[right]) for left, right in self.places]


@dataclass(frozen=True)
class Ranking:
    """The object that clients of Cohere, Jina and vLLM read: scores, the best first.

    documents  their texts, if they are returned; None: not
    most       results at most; None: all
    """

    pairs: Pairs
    documents: Sequence[str] | None
    most: int | None = None

    def ranked(self, results: Results) -> list[tuple[int, float]]:
        """Return places and scores of the documents, the best first; of equal ones in order."""
        scores = self.pairs.scores(results)
        places = sorted(range(len(scores)), key=lambda place: -scores[place])
        return [(place, scores[place]) for place in places[: self.most]]

    def body(self, results: Results) -> JsonDict:
        head = results.head
        found = []
        for place, score in self.ranked(results):
            entry: JsonDict = {"index": place, "relevance_score": score}
            if self.documents is not None:
                entry["document"] = {"text": self.documents[place]}
            found.append(entry)
        return {
            "id": f"rerank-{head.request_id}",
            "model": head.model,
            "results": found,
            "usage": results.usage(),
            "meta": {"tokens": {"input_tokens": results.prompt_tokens, "output_tokens": 0}},
        }


@dataclass(frozen=True)
class Scores:
    """The object of vLLM's /score: a number for each pair, in order."""

    pairs: Pairs

    def body(self, results: Results) -> JsonDict:
        body = common_fields(results.head, "score", "list")
        body["data"] = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(self.pairs.scores(results))
        ]
        body["usage"] = results.usage()
        return body
