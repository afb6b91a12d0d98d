"""Log-probabilities in the shapes of chat and of completions. JSON has no infinity: -inf becomes
-9999.0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from freight.base.fields import JsonDict
from freight.outputs import Logprob, Scores, TokenLogprobs
from freight.sampling import SamplingParams
from freight.text.detokenizer import Detokenizer
from freight.text.tokenizer import Tokenizer

LOWEST = -9999.0
_ROWS_OF_SLICE = 64


def finite(logprob: float) -> float:
    """Return `logprob`, or -9999.0 for one that JSON does not have."""
    return logprob if math.isfinite(logprob) else LOWEST


def name_of(token: int) -> str:
    """Return a token by its id, as vLLM writes it."""
    return f"token_id:{token}"


def text_of(token: int, entry: Logprob, tokenizer: Tokenizer | None) -> str:
    """Return the text of a token by itself; its id without a tokenizer."""
    return plain_text(token, tokenizer) if entry.decoded_token is None else entry.decoded_token


def plain_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Return `text_of` a token whose text the engine did not send."""
    return tokenizer.token_text(token) if tokenizer else name_of(token)


def _bytes_of(token: int, text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return the bytes that a token adds to a text. `text`, of the token by itself, lacks them where
    it is part of a character, and where decoders drop the space that a text begins with.
    """
    pieces = tokenizer.pieces(False) if tokenizer else None
    piece = text if pieces is None else pieces[token] or text
    return list(piece if isinstance(piece, bytes) else piece.encode())


def chat_entries(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    asked: int,
    tokenizer: Tokenizer | None,
    as_ids: bool = False,
) -> list[JsonDict]:
    """Return an entry of `logprobs.content` per token, with the `asked` most likely tokens.

    as_ids: `token` is "token_id:42"; `bytes` are still those of its text.
    """
    result = []
    for token, candidates in zip(token_ids, entries, strict=True):
        described = {
            other: {
                "token": name_of(other) if as_ids else text_of(other, entry, tokenizer),
                "logprob": finite(entry.logprob),
                "bytes": _bytes_of(other, text_of(other, entry, tokenizer), tokenizer),
            }
            for other, entry in sorted(candidates.items(), key=lambda item: item[1].rank)
        }
        top = [described[other] for other in described if candidates[other].rank <= asked][:asked]
        result.append({**described[token], "top_logprobs": top})
    return result


class PromptLogprobs:
    """`prompt_logprobs`: for each token of the prompt its candidates by id; None for the first.

    There may be millions. Iterating gives them as values; `json_slices` writes them as text, a
    slice at a time.
    """

    def __init__(self, scores: Sequence[Scores], tokenizer: Tokenizer | None) -> None:
        """Keep the scores of the prompt's tokens, from the second token on, in parts."""
        self._scores = scores
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[Any]:
        yield None
        for part in self._scores:
            for entries in part:
                yield {
                    str(token): {
                        "logprob": finite(logprob),
                        "rank": rank,
                        "decoded_token": plain_text(token, self._tokenizer),
                    }
                    for token, logprob, rank in entries
                }

    def json_slices(self) -> Iterator[str]:
        """Yield the same as JSON, without white space. Twice as fast as building dictionaries and
        dumping them.
        """
        # The JSON of each token before its log-probability, and behind its rank.
        around: dict[int, tuple[str, str]] = {}
        yield "[null"
        for part in self._scores:
            rows: list[str] = []
            for entries in part:
                texts = []
                for token, logprob, rank in entries:
                    known = around.get(token)
                    if known is None:
                        text = json.dumps(plain_text(token, self._tokenizer), ensure_ascii=False)
                        known = around[token] = (
                            f'"{token}":{{"logprob":',
                            f',"decoded_token":{text}}}',
                        )
                    texts.append(f'{known[0]}{finite(logprob)!r},"rank":{rank}{known[1]}')
                rows.append(f",{{{','.join(texts)}}}")
                if len(rows) == _ROWS_OF_SLICE:
                    yield "".join(rows)
                    rows.clear()
            yield "".join(rows)
        yield "]"


class _Positions:
    """Where tokens begin in the text that they make together, in characters. Tokens that are parts
    of one character all have its position.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        params = SamplingParams(skip_special_tokens=skip_special)
        self._pieces = tokenizer.pieces(skip_special)
        self._text = Detokenizer(tokenizer, params, prompt_token_ids)
        self._length = 0

    def of(self, token: int) -> int:
        """Return the position of the next token."""
        begin = self._length
        self._length += len(self._text.append([token]))
        piece = None if self._pieces is None else self._pieces[token]
        if isinstance(piece, str):  # behind bytes that never became a character
            return max(begin, self._length - len(piece))
        return begin


def _prompt_offsets(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, skip_special: bool
) -> list[int]:
    """Return where the tokens of a prompt begin in `text`: the tokens' own, or the one that was
    tokenized, which lacks a BOS and has what was truncated.
    """
    prompt = tokenizer.decode(token_ids, skip_special)
    if prompt != text:
        skip_special = False
        prompt = tokenizer.decode(token_ids, skip_special)
    is_part = prompt.endswith(text) or text.endswith(prompt)
    before = len(prompt) - len(text) if is_part else 0
    positions = _Positions(tokenizer, skip_special)
    return [min(max(0, positions.of(token) - before), len(text)) for token in token_ids]


class TextLogprobs:
    """`logprobs` of one choice of a completion, as four lists of equal length.

    `text_offset` counts characters of the choice's text. A token that a stop string took out of it
    has the text's end. as_ids: tokens are "token_id:42"; offsets are still those of their text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        skip_special: bool = True,
        as_ids: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._as_ids = as_ids
        self._begin = 0  # of the answer, in characters of the choice's text
        self._positions = None
        if tokenizer is not None:
            self._positions = _Positions(tokenizer, skip_special, prompt_token_ids)
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._taken = 0

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """Append tokens of the answer."""
        for token, candidates in zip(token_ids, entries, strict=True):
            texts = {
                other: text_of(other, entry, self._tokenizer) for other, entry in candidates.items()
            }
            logprobs = ((other, entry.logprob) for other, entry in candidates.items())
            offset = self._begin + (0 if self._positions is None else self._positions.of(token))
            top = self._by_text(logprobs, texts)
            self._add(token, texts[token], candidates[token].logprob, top, offset)

    def add_prompt(self, token_ids: Sequence[int], scores: Sequence[Scores], text: str) -> None:
        """Append the tokens of a prompt with their scores, in parts; the first has no score.

        text: of the prompt, with which the choice's text begins
        """
        texts = _PlainTexts(self._tokenizer)
        offsets = [0] * len(token_ids)
        if self._tokenizer is not None:
            offsets = _prompt_offsets(self._tokenizer, token_ids, text, self._skip_special)
        self._begin = len(text)
        self._add(token_ids[0], texts[token_ids[0]], None, None, offsets[0])
        scored = (entries for part in scores for entries in part)
        for token, offset, entries in zip(token_ids[1:], offsets[1:], scored, strict=True):
            token_logprob = next(logprob for other, logprob, _ in entries if other == token)
            top = self._by_text((entry[:2] for entry in entries), texts)
            self._add(token, texts[token], token_logprob, top, offset)

    def _add(
        self,
        token: int,
        text: str,
        logprob: float | None,
        top: dict[str, float] | None,
        offset: int,
    ) -> None:
        self._tokens.append(name_of(token) if self._as_ids else text)
        self._logprobs.append(None if logprob is None else finite(logprob))
        self._top.append(top)
        self._offsets.append(offset)

    def _by_text(
        self, candidates: Iterable[tuple[int, float]], texts: Mapping[int, str]
    ) -> dict[str, float]:
        """Return candidates by text. Of tokens with the same text only the most likely one is kept:
        a reader cannot tell them apart.
        """
        best: dict[str, float] = {}
        for token, logprob in candidates:
            text = name_of(token) if self._as_ids else texts[token]
            value = finite(logprob)
            best[text] = max(value, best.get(text, value))
        return best

    @property
    def has_more(self) -> bool:
        """True while `take` has not returned everything."""
        return self._taken < len(self._tokens)

    def take(self, length: int, ended: bool, most: int | None = None) -> JsonDict:
        """Return the entries since the last call, of `most` tokens at most.

        length  characters of the choice's text so far; a token behind them waits until it is known
                whether a stop string takes it out
        ended   no more text comes
        """
        first = self._taken
        end = len(self._tokens)
        if most is not None:
            end = min(end, first + most)
        while not ended and end > first and self._offsets[end - 1] > length:
            end -= 1
        self._taken = end
        return self._body(first, end, length)

    def body(self, length: int) -> JsonDict:
        """Return all entries. length: characters of the choice's text."""
        return self._body(0, len(self._tokens), length)

    def _body(self, first: int, end: int, length: int) -> JsonDict:
        return {
            "tokens": self._tokens[first:end],
            "token_logprobs": self._logprobs[first:end],
            "top_logprobs": self._top[first:end],
            "text_offset": [min(offset, length) for offset in self._offsets[first:end]],
        }


class _PlainTexts(dict[int, str]):
    """A cache of `plain_text` by token."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text = self[token] = plain_text(token, self._tokenizer)
        return text
