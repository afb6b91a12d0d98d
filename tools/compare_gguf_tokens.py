"""Compare the token ids of texts with llama.cpp's, for a GGUF file.

    python tools/compare_gguf_tokens.py FILE.gguf --python PYTHON TEXT_FILE ...

PYTHON is an interpreter that has the package xllamacpp, whose extension module exports llama.cpp's
C functions. It runs this file too, and gets the texts on its standard input. Each text file is cut
into pieces of 2,000 characters.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path

PIECE = 2000  # characters
LLAMA_CPP = "--llama-cpp"  # the first argument of the process with xllamacpp


class ModelParams(ctypes.Structure):
    """Parameters of a model: only `vocab_only` is named, the rest is passed on as it comes."""

    _fields_ = (
        ("before", ctypes.c_byte * 72),
        ("vocab_only", ctypes.c_bool),
        ("after", ctypes.c_byte * 951),
    )


def print_ids_of_llama_cpp(file: str) -> None:
    """Print llama.cpp's ids of each of the texts on standard input, as JSON."""
    import xllamacpp.xllamacpp as extension  # type: ignore[import-not-found,unused-ignore]

    lib = ctypes.CDLL(extension.__file__)
    lib.llama_model_default_params.restype = ModelParams
    lib.llama_model_load_from_file.restype = ctypes.c_void_p
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
    lib.llama_model_get_vocab.restype = ctypes.c_void_p
    lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(file.encode(), params)
    if not model:
        sys.exit(f"llama.cpp cannot load {file}")
    vocabulary = ctypes.c_void_p(lib.llama_model_get_vocab(model))
    ids = []
    for text in json.load(sys.stdin):
        data = text.encode()
        room = len(data) + 16
        buffer = (ctypes.c_int32 * room)()
        # With BOS, and with control tokens in the text
        count = lib.llama_tokenize(vocabulary, data, len(data), buffer, room, True, True)
        ids.append(buffer[:count])
    json.dump(ids, sys.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", required=True, help="an interpreter with xllamacpp")
    parser.add_argument("texts", type=Path, nargs="+")
    args = parser.parse_args()
    from freight.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.file)
    pieces: list[str] = []
    for path in args.texts:
        text = path.read_text(encoding="utf-8")
        pieces.extend(text[begin : begin + PIECE] for begin in range(0, len(text), PIECE))
    command = [args.python, __file__, LLAMA_CPP, str(args.file)]
    output = subprocess.run(
        command, input=json.dumps(pieces), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    expected = json.loads(output)
    differ = 0
    for piece, ids in zip(pieces, expected, strict=True):
        if tokenizer.encode(piece) != ids:
            differ += 1
            print(f"differs: {piece[:60]!r}")
    print(f"{len(pieces)} texts, {sum(map(len, expected))} ids of llama.cpp; {differ} texts differ")
    sys.exit(differ > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == [LLAMA_CPP]:
        print_ids_of_llama_cpp(sys.argv[2])
    else:
        main()
