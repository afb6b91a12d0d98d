"""Score sequences of tokens with llama.cpp on a GGUF file; gguf_perplexity.py calls it.

    echo '[[1, 2, 3]]' | PYTHON score_xllamacpp.py FILE.gguf THREADS

Sequences come as JSON on stdin. One JSON line has, for each, the log-probabilities of its tokens
after the first. Needs the wheel xllamacpp, as run_xllamacpp.py does. The cache keeps llama.cpp's
default, F16, and a sequence is computed by itself.
"""

from __future__ import annotations

import json
import sys

from llama_model import Model
from run_xllamacpp import LogCallback, check_context, library


def main() -> None:
    path = sys.argv[1]
    threads = int(sys.argv[2])
    sequences = json.load(sys.stdin)
    lib = library()
    silent = LogCallback(lambda level, text, data: None)  # called until the end
    lib.llama_log_set(silent, None)
    params = lib.llama_context_default_params()
    model = Model(lib, path, 1, max(map(len, sequences)), params)
    check_context(lib, model, params)
    lib.llama_set_n_threads(model.context, threads, threads)
    print(json.dumps([model.score(tokens) for tokens in sequences]))


if __name__ == "__main__":
    main()
