"""Log-probabilities with the text of their tokens."""

from __future__ import annotations

from freight.outputs import Logprob, LogprobEntry, TokenLogprobs
from freight.text.tokenizer import Tokenizer


def to_logprobs(entries: tuple[LogprobEntry, ...], tokenizer: Tokenizer | None) -> TokenLogprobs:
    """(token id, logprob, rank) -> {token id: Logprob}, with the tokens' text where there is a
    tokenizer.
    """
    logprobs: TokenLogprobs = {}
    for token, logprob, rank in entries:
        text = None
        if tokenizer is not None:
            text = tokenizer.token_text(token)
        logprobs[token] = Logprob(logprob, rank, text)
    return logprobs
