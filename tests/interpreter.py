"""Triton's interpreter as tests use it: with the numbers of a GPU, and in less than half of its time.

A process of its own, as another rank is, enters both as the tests' process does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def numbers_as_on_a_gpu() -> Iterator[None]:
    """Mend Triton's interpreter, which keeps bfloat16 as whole numbers of 16 bits.

    It cuts a float32 off to make a bfloat16, where every GPU rounds to nearest even, and multiplies
    matrices of bfloat16 as if they were whole numbers. Products are summed in float64: the bits of
    numpy's float32 products depend on where a row lies, with some of the kernels that its BLAS
    chooses by processor.
    """
    from triton.language import bfloat16, float32, float64
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: np.ndarray, have: Any, want: Any, mode: Any) -> np.ndarray:
        if have != float32 or want != bfloat16:
            return convert(data, have, want, mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
        return values.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    def widened(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.dtype.scalar == bfloat16:
            a, b = (builder.cast_impl(one, float32) for one in (a, b))
        if d.dtype.scalar != float32:
            return dot(builder, a, b, d, *rest)
        wide = dot(
            builder, a, b, interpreter.TensorHandle(d.data.astype(np.float64), float64), *rest
        )
        return interpreter.TensorHandle(wide.data.astype(np.float32), float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)
        yield


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Save more than half of the interpreter's time.

    What it replaces in `triton.language` is replaced once, not again at every call of a device
    function, numpy's types are looked up by name, and sums of whole numbers are not made a second
    time in 64 bits to see whether they overflow.
    """
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:  # on a GPU, and where launches are recorded (launched.py)
        yield
        return
    everything = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    scope, numpy_type = interpreter._patch_lang(everything), interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def numpy_type_of(dtype: Any) -> np.dtype[Any]:
        if dtype.name not in known:
            known[dtype.name] = numpy_type(dtype)
        return known[dtype.name]

    with pytest.MonkeyPatch.context() as patch:
        replaced = SimpleNamespace(restore=lambda: None)
        patch.setattr(interpreter, "_patch_lang", lambda function: replaced)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_of)
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
    if scope is not None:  # Triton 3.5 leaves it replaced
        scope.restore()
