"""The tokens of a pair of texts, of which the document may be cut."""

from __future__ import annotations

from freight.model.config.pooling import PoolingConfig
from freight.serve.call import Pair
from freight.text.pooling_inputs import PairTokens, pair_tokens
from freight.text.tokenizer import Tokenizer

_CHARACTERS = 16  # per token that is kept: what is behind them is read only where tokens are longer


def read_pair(
    tokenizer: Tokenizer, pooling: PoolingConfig, pair: Pair, most: int | None
) -> PairTokens:
    """Return the tokens of a pair, at most `most` of them (None: all). Raises RequestError for a
    query that leaves nothing to the document, and a model that cannot read the pair.
    """
    document = pair.document
    limits = [limit for limit in (pair.document_tokens, most) if limit is not None]
    if limits:
        document = cut_text(tokenizer, document, min(limits))
    return pair_tokens(tokenizer, pooling, pair.query, document, pair.instruction, most)


def cut_text(tokenizer: Tokenizer, text: str, most: int) -> str:
    """Return the beginning of a text that has `most` tokens, or all of it."""
    for part in (text[: _CHARACTERS * most], text):
        begins = [begin for _, begin, _ in tokenizer.encode_with_offsets(part, False)]
        if len(begins) > most:
            return text[: begins[most]]
        if len(part) == len(text):
            break
    return text
