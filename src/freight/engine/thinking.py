"""`SamplingParams.thinking_token_budget`: which token ends a thought that has used up its budget.
Imports no torch.

A thought is what is between an opening and a closing tag (text/thinking.py). Both are found in the
text of the tokens, as the reader of answers finds them, so that a tag counts in whichever tokens
the model writes it. A token that has a part of a tag belongs to the tag and is none of the thought;
but one that also has text before the closing tag is of the thought.

- Tokens of thought are those that are drawn. What a prompt has of a thought is not counted.
- The budget is that of the whole answer: a further thought has what the ones before it left.
- A prompt ends within a thought if its last opening tag has no closing tag behind it, and no
  special token, such as the one that ends a message. So tags in the message of a user count for
  nothing.
- Once as many tokens are drawn within thoughts as the budget has, the next tokens are those of the
  closing tag. Where the model has begun to write a tag of several tokens, only the rest of it
  follows. Nothing else is forced, so every token before is the one without a budget.
- An answer with a grammar has one thought at most, at its beginning: what has the same text behind
  it is a value. A tag that the grammar does not permit is not forced (`SamplingRow.forced`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from freight.errors import RequestError, shown
from freight.sampling import SamplingParams
from freight.text.thinking import Tags, model_tags, with_variants
from freight.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TagTokens:
    """Tags as the tokens of one model have them. Holds no state of a completion.

    closing_ids  the tokens of the first closing tag
    text_of      the bytes that a token stands for
    encode       the tokens of a text, without any around it
    is_special   whether a token ends what is before it, as the end of a message does
    """

    opens: tuple[bytes, ...]
    closes: tuple[bytes, ...]
    closing_ids: tuple[int, ...]
    text_of: Callable[[int], bytes]
    encode: Callable[[bytes], Sequence[int]]
    is_special: Callable[[int], bool]

    @property
    def longest(self) -> int:
        """The most tokens that have a part of one tag: one for each byte."""
        return max(map(len, (*self.opens, *self.closes)))

    def text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self.text_of, tokens))

    def closing_token(self, thought: Sequence[int]) -> int:
        """Return the next token of the closing tag behind the last tokens of a thought, which may
        have begun it.
        """
        ids = self.closing_ids
        for begun in range(min(len(ids) - 1, len(thought)), 0, -1):
            if tuple(thought[-begun:]) == ids[:begun]:
                return ids[begun]
        if len(ids) == 1:
            return ids[0]
        rest = self._rest(self.text(thought))
        if rest:
            token = self.encode(rest)[0]
            text = self.text_of(token)
            if text and rest.startswith(text):  # not with a blank before it, as some encode it
                return token
        return ids[0]

    def _rest(self, text: bytes) -> bytes:
        """Return what is missing of the closing tag that the end of `text` has begun; b"" if none is."""
        for begun in range(max(map(len, self.closes)) - 1, 0, -1):
            for tag in self.closes:
                if begun < len(tag) and text.endswith(tag[:begun]):
                    return tag[begun:]
        return b""

    def num_of_tag(self, thought: Sequence[int]) -> int:
        """Return how many of the last tokens are none of the thought that ends with them, as they
        have text of the closing tag only, or of what follows it.
        """
        text = self.text(thought)
        begin = min(place for tag in self.closes if (place := text.find(tag)) >= 0)
        count = 0
        before = len(text)
        for token in reversed(thought):
            before -= len(self.text_of(token))
            if before < begin:
                break
            count += 1
        return count


@dataclass(frozen=True)
class _State:
    """What the first `num_taken` output tokens have come to.

    num_drawn  tokens of thoughts so far; within one also those that may have begun its closing tag
    recent     the last tokens since a tag ended; where none did, also of the prompt
    is_over    no further thought counts
    """

    num_taken: int
    num_drawn: int
    is_inside: bool
    recent: tuple[int, ...]
    is_over: bool = False


class Thought:
    """The budget of one completion. Every method takes all output tokens so far, which only ever grow,
    and first takes in those that it has not seen.
    """

    def __init__(
        self, tags: TagTokens, budget: int, prompt_token_ids: Sequence[int], only_first: bool
    ) -> None:
        """only_first: a thought counts at the beginning of the answer alone."""
        self._tags = tags
        self._budget = budget
        self._only_first = only_first
        self._longest = tags.longest
        # replaced as a whole, so that an exception leaves it as it was
        self._state = self._begin(prompt_token_ids)

    def fork(self) -> Thought:
        """Return one that goes on from here on its own."""
        other = object.__new__(Thought)
        other.__dict__.update(self.__dict__)
        return other

    def forced(self, output: Sequence[int]) -> int | None:
        """Return the token that has to follow `output`; None: any may."""
        state = self._catch_up(output)
        if not state.is_inside or state.num_drawn < self._budget:
            return None
        return self._tags.closing_token(state.recent)

    def may_force_next(self, output: Sequence[int]) -> bool:
        """Return whether a token may be forced behind `output` and one more token, whatever that is."""
        state = self._catch_up(output)
        return not state.is_over and state.num_drawn + state.is_inside >= self._budget

    def _begin(self, prompt: Sequence[int]) -> _State:
        tags = self._tags
        start = len(prompt)
        while start > 0 and not tags.is_special(prompt[start - 1]):
            start -= 1
        text = tags.text(prompt[start:])
        opened = max(map(text.rfind, tags.opens))
        closed = max(map(text.rfind, tags.closes))
        if opened > closed:
            return _State(0, 0, True, ())
        recent: tuple[int, ...] = ()
        if closed < 0:
            recent = tuple(prompt[max(start, len(prompt) - self._longest) :])
        return _State(0, 0, False, recent)

    def _catch_up(self, output: Sequence[int]) -> _State:
        state = self._state
        assert state.num_taken <= len(output), "tokens of an output are never taken back"
        for token in output[state.num_taken :]:
            state = self._after(state, token)
        self._state = state
        return state

    def _after(self, state: _State, token: int) -> _State:
        """Return the state after one more token."""
        state = replace(state, num_taken=state.num_taken + 1)
        if state.is_over:
            return state
        state = replace(state, recent=(*state.recent, token)[-self._longest :])
        if state.is_inside:
            return self._within(state)
        return self._outside(state)

    def _within(self, state: _State) -> _State:
        tags = self._tags
        drawn = state.num_drawn + 1
        text = tags.text(state.recent)
        if not any(tag in text for tag in tags.closes):
            return replace(state, num_drawn=drawn)
        drawn -= min(tags.num_of_tag(state.recent), drawn)
        return replace(state, num_drawn=drawn, is_inside=False, recent=(), is_over=self._only_first)

    def _outside(self, state: _State) -> _State:
        tags = self._tags
        text = tags.text(state.recent)
        places = [place for tag in tags.opens if (place := text.find(tag)) >= 0]
        num_own = min(state.num_taken, len(state.recent))
        own = tags.text(state.recent[len(state.recent) - num_own :])
        if places:
            before = own[: max(0, min(places) - (len(text) - len(own)))]
            is_first = state.num_taken == num_own and not before.strip()
            if is_first or not self._only_first:
                return replace(state, is_inside=True, recent=())
        is_over = self._only_first and state.num_taken > self._longest
        return replace(state, is_over=is_over)


def read_tags(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> TagTokens:
    """Return the tags of `params`, else of the model. Raises RequestError where they are not known, or
    cannot be found in its tokens.
    """
    asked = f"thinking_token_budget is {params.thinking_token_budget}"
    if tokenizer is None:
        raise RequestError(
            f"{asked}, which needs a tokenizer; without one (skip_tokenizer_init) leave it out"
        )
    tags = _tags(params, tokenizer)
    if tags is None:
        raise RequestError(
            f"{asked}, and the tags of this model's thoughts are not known: its chat template has none; leave it out, "
            "or give thinking_tags"
        )
    pieces = tokenizer.pieces(skip_special_tokens=False)
    if pieces is None:
        raise RequestError(
            f"{asked}, which needs the text of single tokens, and this model's tokenizer decodes tokens together; "
            "leave it out"
        )

    def text_of(token: int) -> bytes:
        piece = pieces[token]
        if piece is None:
            return b""
        if isinstance(piece, str):
            return piece.encode(errors="surrogatepass")
        return piece

    def encode(text: bytes) -> Sequence[int]:
        return tokenizer.encode(text.decode(), add_special_tokens=False)

    every = (*tags.opens, *tags.closes)
    special = tokenizer.special_token_ids

    def is_special(token: int) -> bool:
        return token in special and not any(text_of(token).decode() in tag for tag in every)

    closing = tags.closes[0].encode()
    ids = tuple(encode(closing))
    if closing not in b"".join(map(text_of, ids)) or max(ids) >= vocab_size:
        raise RequestError(
            f"{asked}, and the tokens of this model do not write the closing tag {shown(tags.closes[0])}; leave it out"
        )
    return TagTokens(
        tuple(tag.encode() for tag in tags.opens),
        tuple(tag.encode() for tag in tags.closes),
        ids,
        text_of,
        encode,
        is_special,
    )


def _tags(params: SamplingParams, tokenizer: Tokenizer) -> Tags | None:
    if params.thinking_tags is None:
        return model_tags(tokenizer)
    opening, closing = params.thinking_tags
    return with_variants((opening, closing))
