"""For the tests of OpenAI's API: a served model, deltas as an engine gives them, and a small parser
of markup.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from dataclasses import replace
from pathlib import Path

import freight
from freight.model.config.pooling import PoolingConfig, PoolingKind
from freight.outputs import CompletionDelta, FinishReason, Logprob, RequestDelta, Scores
from freight.pooling import PoolingTask
from freight.serve.answers.pieces import Piece, PieceKind
from freight.serve.call import ReplyHead, Served, TokenizedWork
from freight.serve.limits import ServingLimits
from freight.serve.transport.slices import plain
from freight.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(freight.__file__).parent / "demo")
SERVED = Served(
    names=("demo", "other"),
    tokenizer=TOKENIZER,
    vocab_size=TOKENIZER.vocab_size,
    max_model_len=1024,
    defaults={},
    fingerprint="fp_1",
)
EMBEDS = replace(
    SERVED,
    generates=False,
    pooling=PoolingConfig(PoolingTask.EMBED, PoolingKind.LAST, 8, prompts={"query": "Query: "}),
)
SCORES = replace(EMBEDS, pooling=PoolingConfig(PoolingTask.CLASSIFY, PoolingKind.CLS, 1))
CLASSIFIES = replace(
    EMBEDS, pooling=PoolingConfig(PoolingTask.CLASSIFY, PoolingKind.CLS, 3, labels=("a", "b", "c"))
)
LIMITS = ServingLimits()
HEAD = ReplyHead("r1", 1_700_000_000, "demo", "fp_1")
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


class MarkupParser:
    """`<think>…</think>` is reasoning, `<call>{"name", "arguments"}</call>` a call; `|eot|` is left
    out.
    """

    TAGS = ("<think>", "</think>", "<call>", "</call>", "|eot|")

    def __init__(self):
        self.text, self.kind = "", PieceKind.CONTENT

    def feed(self, text):
        self.text += text
        pieces = []
        while True:
            places = [(self.text.find(tag), tag) for tag in self.TAGS if tag in self.text]
            if not places:
                break
            at, tag = min(places)
            pieces += self._say(self.text[:at])
            self.text = self.text[at + len(tag) :]
            if tag != "|eot|":
                self.kind = {"<think>": PieceKind.REASONING, "<call>": PieceKind.TOOL_CALL}.get(
                    tag, PieceKind.CONTENT
                )
        if self.kind is not PieceKind.TOOL_CALL:
            held = max(
                (n for tag in self.TAGS for n in range(1, len(tag)) if self.text.endswith(tag[:n])),
                default=0,
            )
            cut = len(self.text) - held
            pieces += self._say(self.text[:cut])
            self.text = self.text[cut:]
        return pieces

    def _say(self, text):
        if self.kind is PieceKind.TOOL_CALL:
            try:
                call = json.loads(text)
            except ValueError:
                return [Piece(PieceKind.CONTENT, f"<call>{text}</call>")]
            return [Piece(self.kind, json.dumps(call["arguments"]), call["name"])]
        return [Piece(self.kind, text)] if text else []

    def finish(self, complete):
        cut = "<call>" * (self.kind is PieceKind.TOOL_CALL) + self.text
        self.kind = PieceKind.CONTENT if self.kind is PieceKind.TOOL_CALL else self.kind
        return self._say(cut)


WITH_PARSER = replace(SERVED, parser_of=lambda prompt, tools: MarkupParser())


def split(text, cuts):
    """`text` in parts, cut at each of `cuts`."""
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(places)]


def scores(token, logprob=-0.5):
    """What an engine says of a token with one more likely beside it, one that cannot be."""
    return {9: Logprob(-0.25, 1), token: Logprob(logprob, 2), 11: Logprob(-math.inf, 3)}


def as_scores(tokens, entries, asked=3):
    """Entries {token id: Logprob} as an engine tells those of a prompt: the `asked` most likely,
    and `tokens`.
    """
    rows = []
    for token, entry in zip(tokens, entries, strict=True):
        likely = sorted((one.rank, other) for other, one in entry.items() if one.rank <= asked)
        rows.append([*(other for _, other in likely), token])
    assert all(len(row) == asked + 1 for row in rows)
    pairs = list(zip(rows, entries, strict=True))
    return Scores(
        asked + 1,
        array("i", [other for row in rows for other in row]),
        array("f", [entry[other].logprob for row, entry in pairs for other in row]),
        array("i", [entry[row[-1]].rank for row, entry in pairs]),
    )


def prompt_scores(ids):
    """Of the tokens of a prompt from the second on."""
    return as_scores(ids[1:], [scores(token) for token in ids[1:]])


def deltas(parts, reason=FinishReason.STOP, index=0, logprobs=False, cached=0):
    """One delta for each part of a text, with a token each; the last ends the completion."""
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        token = 20 + position % 50
        output = CompletionDelta(
            index,
            [token],
            part,
            [scores(token)] if logprobs else None,
            reason if last else None,
            None,
            None,
        )
        yield RequestDelta("r1", [output], last, num_cached_tokens=cached)


def tokenized(call, ids=(5, 6, 7), text="Hello"):
    return [TokenizedWork(text, tuple(ids), work.params) for work in call.work]


def answers(call, feed, served=SERVED, ids=(5, 6, 7), text="Hello"):
    """(the stream's bytes, the body) of one call, fed with (index, delta)."""
    feed = list(feed)
    stream, whole = (call.reply(HEAD, served, tokenized(call, ids, text)) for _ in range(2))
    raw = (
        stream.start()
        + b"".join(stream.advance(index, delta) for index, delta in feed)
        + stream.end()
    )
    for index, delta in feed:
        whole.advance(index, delta)
    return raw, json.loads(json.dumps(whole.body(), allow_nan=False, default=plain))


def chunks(raw):
    """The chunks of a stream that ends as it must."""
    events = raw.decode("ascii").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
