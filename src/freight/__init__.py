"""Freight: run and quantize large language models with an FP8 KV cache.

The names listed in `__all__` are public; everything else may change. They are loaded at first use
(PEP 562), so that `import freight`, and with it the command line, costs nothing and loads no torch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

# GNU OpenMP, which torch brings, reads this variable when torch is loaded. By default its threads
# spin for milliseconds when they wait for each other, which stalls steps on cores that other
# programs use too. A spin takes some 30 to 50 ns on x86-64. 3000 spins bridge what Python does
# between two steps of a small model; with 1000 these took a seventh longer. Others spin faster.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "3000" if os.uname().machine.lower() in ("x86_64", "amd64") else "10000"
    )

if TYPE_CHECKING:
    from freight.async_llm import AsyncLLM
    from freight.engine.adapters import LoRARequest
    from freight.engine.verification import Outcome, Verification
    from freight.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineError,
        FreightError,
        GenerationError,
        KernelError,
        RequestError,
    )
    from freight.llm import LLM
    from freight.outputs import (
        CompletionOutput,
        EngineStats,
        FinishReason,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
    )
    from freight.pooling import PoolingParams
    from freight.quantizer.quantize import QuantizeResult, quantize
    from freight.sampling import SamplingParams
    from freight.structured import StructuredOutputs

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "FreightError",
    "GenerationError",
    "KernelError",
    "LoRARequest",
    "Logprob",
    "Outcome",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuantizeResult",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "Verification",
    "__version__",
    "quantize",
]

_HOMES = {"LLM": "llm", "AsyncLLM": "async_llm"}
_HOMES |= {"SamplingParams": "sampling", "StructuredOutputs": "structured"}
_HOMES |= dict.fromkeys(("CompletionOutput", "EngineStats", "FinishReason"), "outputs")
_HOMES["PoolingParams"] = "pooling"
_HOMES["LoRARequest"] = "engine.adapters"
_HOMES |= dict.fromkeys(("Logprob", "PoolingRequestOutput", "RequestOutput"), "outputs")
_HOMES |= dict.fromkeys(("Outcome", "Verification"), "engine.verification")
_HOMES |= dict.fromkeys(("QuantizeResult", "quantize"), "quantizer.quantize")  # the rest are errors

if not TYPE_CHECKING:  # type checkers see the imports above, and so report a misspelt name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        from freight.errors import nearest

        if name == "__version__":
            from freight.base.version import version

            return version()
        if name not in __all__:
            raise AttributeError(
                f"module 'freight' has no attribute {name!r}{nearest(name, __all__)}"
            )
        return getattr(import_module(f"freight.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
