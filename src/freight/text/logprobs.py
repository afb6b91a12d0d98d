"""Log-probabilities with the text of their tokens."""

from __future__ import annotations

from freight.outputs import Logprob, LogprobEntry, TokenLogprobs
from freight.text.tokenizer import Tokenizer


def to_logprobs(entries: tuple[LogprobEntry, ...], tokenizer: Tokenizer | None) -> TokenLogprobs:
    """(token id, logprob, rank) -> {token id: Logprob}, with the tokens' text where there is a
    tokenizer.
    """
    return {
        token: Logprob(logprob, rank, tokenizer.token_text(token) if tokenizer else None)
        for token, logprob, rank in entries
    }
