"""Measure llama.cpp, through llama-cpp-python, on a GGUF file; one JSON line.

Uses the C functions, because the Python class decodes one sequence only. Tokens are chosen greedily
from the logits of each sequence, as in a server; llama.cpp splits a prefill into micro batches of
512 tokens.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time

import llama_cpp as lib
import numpy as np
from common import Steps, measure, parser, random_prompts, report

CACHE_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}
MICRO_BATCH = 512  # tokens; the default of llama.cpp
# GCC 12's amxtileintrin.h declares that _tile_loadconfig reads 8 bytes; the instruction reads 64.
# So GCC removes most stores of ggml_tile_config_init (ggml-cpu/amx/mmq.cpp) as dead, and
# `ldtilecfg` faults on what the stack holds.
AMX_HINT = "llama.cpp's AMX kernels crash in ggml_tile_config_init unless it is compiled with README.md's CMAKE_ARGS"


class Model:
    """One loaded model and its context; sequences are numbered from 0."""

    def __init__(
        self, path: str, num_sequences: int, tokens: int, threads: int, cache_type: str
    ) -> None:
        """Load the model. `tokens`: the longest that a sequence gets."""
        silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent  # kept alive: the library calls it until the end
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        room = -(-tokens // 256) * 256  # each sequence's part of the cache, a multiple of 256
        params.n_ctx = num_sequences * room
        params.n_seq_max = num_sequences
        params.n_batch = num_sequences * tokens
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = CACHE_TYPES[cache_type]
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            sys.exit(f"llama.cpp makes no context of {params.n_ctx} tokens for {path}")
        self._batch = lib.llama_batch_init(num_sequences * tokens, 0, 1)
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def forget(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)

    def step(self, fresh: list[list[int]], start: int) -> list[int]:
        """Run the new tokens of every sequence, which has `start` already; the most likely next
        token of each.
        """
        batch = self._batch
        count = 0
        last = []
        for sequence, tokens in enumerate(fresh):
            for offset, token in enumerate(tokens):
                batch.token[count] = token
                batch.pos[count] = start + offset
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        code = lib.llama_decode(self._context, batch)
        if code != 0:
            sys.exit(f"llama_decode returned {code}")
        logits = (lib.llama_get_logits_ith(self._context, row) for row in last)
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in logits]


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_TYPES,
        default="f16",
        help="llama.cpp's own default is f16",
    )
    args = made.parse_args()
    length = args.input_len + args.output_len
    system = lib.llama_print_system_info().decode().strip(" |")
    if "AMX_INT8 = 1" in system:
        print(AMX_HINT, file=sys.stderr, flush=True)  # the last line of output if it crashes
    model = Model(str(args.model), args.batch_size, length, args.threads, args.kv_cache_dtype)
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

    ran = {
        "weights": args.model.stem,
        "kv_cache": args.kv_cache_dtype,
        "system": system,
    }
    report(args, "llama.cpp", f"llama-cpp-python {lib.__version__}", ran, measure(args, run))


if __name__ == "__main__":
    main()
