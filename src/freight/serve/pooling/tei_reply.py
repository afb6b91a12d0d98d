"""Answers of TEI's API."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from freight.base.fields import JsonDict
from freight.serve.pooling.call import Results
from freight.serve.pooling.classify_reply import label_of
from freight.serve.pooling.numbers import Numbers, short
from freight.serve.pooling.rerank_reply import Ranking


@dataclass(frozen=True)
class TeiEmbeddings:
    """A list of embeddings, also for a single input."""

    def body(self, results: Results) -> list[Numbers]:
        return list(map(Numbers, results.vectors))


@dataclass(frozen=True)
class TeiRanking:
    """A list of scores, the best first."""

    ranking: Ranking

    def body(self, results: Results) -> list[JsonDict]:
        documents = self.ranking.documents
        found = []
        for place, score in self.ranking.ranked(results):
            entry: JsonDict = {"index": place, "score": score}
            if documents is not None:
                entry["text"] = documents[place]
            found.append(entry)
        return found


@dataclass(frozen=True)
class TeiClasses:
    """The classes of an input, the highest first; of a batch, a list of such lists."""

    labels: Sequence[str]
    is_batch: bool

    def body(self, results: Results) -> list[JsonDict] | list[list[JsonDict]]:
        found = [self._classes(vector) for vector in results.vectors]
        return found if self.is_batch else found[0]

    def _classes(self, vector: array[float]) -> list[JsonDict]:
        places = sorted(range(len(vector)), key=lambda place: -vector[place])
        return [
            {"score": short(vector[place]), "label": label_of(place, self.labels)}
            for place in places
        ]
