"""`SamplingParams.bad_words` as token ids, and which of them may not come next. Imports no torch.

A word is blocked as the tokenizer writes it at the start of a text and behind a space. Of these
tokens the last is barred wherever the output ends with the others; tokens of the prompt do not
count, as in vLLM. The same letters in other tokens ("w" + "ord") stay possible. vLLM leaves out the
form behind a space where it has another number of tokens than the form without; here it is blocked
too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from freight.errors import RequestError, shown
from freight.text.tokenizer import Tokenizer


class BadWords:
    """The tokens of some words. Holds no state of a completion, so that any number may share one."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """sequences: the token ids of each word, at least one."""
        forms = dict.fromkeys(map(tuple, sequences))
        self.single = sorted({form[0] for form in forms if len(form) == 1})
        # longer ones by the last token but one
        self._behind: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for form in forms:
            if len(form) > 1:
                self._behind[form[-2]].append(form)

    def barred(self, output: Sequence[int]) -> list[int]:
        """Return the ids that may not follow `output`: each would end a word."""
        if not output or output[-1] not in self._behind:
            return self.single
        longer = self._behind[output[-1]]
        barred = list(self.single)
        for form in longer:
            if tuple(output[1 - len(form) :]) == form[:-1]:
                barred.append(form[-1])
        return barred


def read_bad_words(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> BadWords | None:
    """None for no words. Raises RequestError for a word without a token.

    vocab_size: of the logits; a word with a token beyond them cannot be drawn anyway.
    """
    sequences = []
    for index, word in enumerate(words):
        start = word.lstrip()
        alone = tokenizer.encode(start, add_special_tokens=False)
        if not alone:
            raise RequestError(
                f"bad_words[{index}] is {shown(word)}, which has no token; leave it out"
            )
        sequences += [alone, tokenizer.encode(f" {start}", add_special_tokens=False)]
    if not words:
        return None
    return BadWords([form for form in sequences if form and max(form) < vocab_size])
