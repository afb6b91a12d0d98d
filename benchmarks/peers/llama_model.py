"""One model in llama.cpp's C functions, for the drivers of its two packages.

The Python classes of both packages decode one sequence only, or through a server, so their drivers
call the library itself. `lib` has its functions under their own names: the module `llama_cpp`, or
what run_xllamacpp.py declares. Tokens are chosen greedily from the logits of each sequence, as in a
server; llama.cpp splits a prefill into micro batches of 512 tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
from common import Steps, random_prompts

MICRO_BATCH = 512  # tokens; the default of llama.cpp


class Model:
    """One loaded model and its context; sequences are numbered from 0."""

    def __init__(self, lib: Any, path: str, num_sequences: int, tokens: int, params: Any) -> None:
        """Load the model. `tokens`: the longest that a sequence gets; `params`: of the context, in
        which sizes are set here.
        """
        self._lib = lib
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        room = -(-tokens // 256) * 256  # each sequence's part of the cache, a multiple of 256
        params.n_ctx = num_sequences * room
        params.n_seq_max = num_sequences
        params.n_batch = num_sequences * tokens
        params.n_ubatch = MICRO_BATCH
        self.context = lib.llama_init_from_model(self._model, params)
        if not self.context:
            sys.exit(f"llama.cpp makes no context of {params.n_ctx} tokens for {path}")
        self._batch = lib.llama_batch_init(num_sequences * tokens, 0, 1)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self.context), False)

    def step(self, fresh: list[list[int]], start: int) -> list[int]:
        """Run the new tokens of every sequence, which has `start` already; the most likely next
        token of each.
        """
        self._decode(fresh, start, every=False)
        last = (row - 1 for row in accumulate(map(len, fresh)))
        return [int(self._logits(row).argmax()) for row in last]

    def score(self, tokens: list[int]) -> list[float]:
        """Run one sequence from its start; the log-probabilities of its tokens after the first."""
        self.forget()
        self._decode([tokens], 0, every=True)
        scores = []
        for row, token in enumerate(tokens[1:]):
            logits = self._logits(row).astype(np.float64)
            logits -= logits.max()
            scores.append(float(logits[token] - np.log(np.exp(logits).sum())))
        return scores

    def _decode(self, fresh: list[list[int]], start: int, every: bool) -> None:
        """Run the new tokens of every sequence, with logits of every one or of each sequence's
        last.
        """
        batch = self._batch
        count = 0
        for sequence, tokens in enumerate(fresh):
            for offset, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = start + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = every or offset == len(tokens) - 1
                count += 1
        batch.n_tokens = count
        code = self._lib.llama_decode(self.context, batch)
        if code != 0:
            sys.exit(f"llama_decode returned {code}")

    def _logits(self, row: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The logits of a row of the last batch [vocabulary], in the library's memory."""
        logits = self._lib.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(logits, (self.vocab_size,))


def steps_of_a_run(args: argparse.Namespace, model: Model) -> Callable[[], Steps]:
    """Return what runs one batch of new prompts, for `common.measure`."""
    numbers = random.Random(0)

    def run() -> Steps:
        model.forget()
        fresh = random_prompts(args, model.vocab_size, numbers)
        steps = []
        start = 0
        for _ in range(args.output_len):
            begin = time.perf_counter()
            chosen = model.step(fresh, start)
            steps.append((time.perf_counter() - begin, args.batch_size))
            start += len(fresh[0])
            fresh = [[token] for token in chosen]
        return steps

    return run
