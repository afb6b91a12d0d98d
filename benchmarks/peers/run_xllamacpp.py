"""Measure llama.cpp as the wheel xllamacpp has it, compiled for AVX2, on a GGUF file; one JSON line.

The wheel's Python interface is a server only. Its extension module exports llama.cpp's C functions,
which are declared here and called without the server (llama_model.py). Of the context's parameters
only the first four are named, which come first in every version; the cache keeps its default, F16.
What the library made of them is read back and compared.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_bool, c_byte, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from importlib.metadata import version

import xllamacpp.xllamacpp as extension
from common import measure, parser, report
from llama_model import Model, steps_of_a_run

LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class ModelParams(ctypes.Structure):
    """The default parameters of a model, passed on as they come; larger than the library's."""

    _fields_ = (("all", c_byte * 1024),)


class ContextParams(ctypes.Structure):
    """The first parameters of a context; the rest is passed on as it comes."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("others", c_byte * 1008),
    )


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


FUNCTIONS = {  # name: (what it returns, its arguments)
    "llama_backend_init": (None, ()),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_context_default_params": (ContextParams, ()),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_log_set": (None, (LogCallback, c_void_p)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
}


def library() -> ctypes.CDLL:
    """Return the extension module as a library of C functions, with their types."""
    lib = ctypes.CDLL(extension.__file__)
    for name, (returned, arguments) in FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype = returned
        function.argtypes = arguments
    return lib


def check_context(lib: ctypes.CDLL, model: Model, params: ContextParams) -> None:
    """Exit if the context is not of the sizes that were set: the library's struct is another one."""
    for name in ("n_ctx", "n_batch", "n_seq_max"):
        asked = getattr(params, name)
        reported = getattr(lib, f"llama_{name}")(model.context)
        if reported != asked:
            sys.exit(f"llama.cpp has {name} {reported}, not {asked}: its parameters have changed")


def main() -> None:
    args = parser(__doc__).parse_args()
    length = args.input_len + args.output_len
    lib = library()
    silent = LogCallback(lambda level, text, data: None)  # called until the end
    lib.llama_log_set(silent, None)
    params = lib.llama_context_default_params()
    model = Model(lib, str(args.model), args.batch_size, length, params)
    check_context(lib, model, params)
    lib.llama_set_n_threads(model.context, args.threads, args.threads)
    ran = {
        "weights": args.model.stem,
        "kv_cache": "f16",
        "system": lib.llama_print_system_info().decode().strip(" |"),
    }
    result = measure(args, steps_of_a_run(args, model))
    report(args, "llama.cpp", f"xllamacpp {version('xllamacpp')}", ran, result)


if __name__ == "__main__":
    main()
