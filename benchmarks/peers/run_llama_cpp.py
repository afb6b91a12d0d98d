"""Measure llama.cpp, through llama-cpp-python, on a GGUF file; one JSON line.

Uses the C functions, because the Python class decodes one sequence only (llama_model.py).
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as lib
from common import measure, parser, report
from llama_model import Model, steps_of_a_run

CACHE_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}
# GCC 12's amxtileintrin.h declares that _tile_loadconfig reads 8 bytes; the instruction reads 64.
# So GCC removes most stores of ggml_tile_config_init (ggml-cpu/amx/mmq.cpp) as dead, and
# `ldtilecfg` faults on what the stack holds.
AMX_HINT = "llama.cpp's AMX kernels crash in ggml_tile_config_init unless it is compiled with README.md's CMAKE_ARGS"


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
    silent = lib.llama_log_callback(lambda level, text, data: None)  # called until the end
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    params = lib.llama_context_default_params()
    params.n_threads = params.n_threads_batch = args.threads
    params.type_k = params.type_v = CACHE_TYPES[args.kv_cache_dtype]
    model = Model(lib, str(args.model), args.batch_size, length, params)
    ran = {
        "weights": args.model.stem,
        "kv_cache": args.kv_cache_dtype,
        "system": system,
    }
    result = measure(args, steps_of_a_run(args, model))
    report(args, "llama.cpp", f"llama-cpp-python {lib.__version__}", ran, result)


if __name__ == "__main__":
    main()
