"""The C interface of csrc/ (freight.h, attention.h, states.h) in Python: numbers, structs, and
types of functions.

The test of this file compares all of it with the headers, and fails for what one of them has alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from freight.errors import CapacityError, FreightError, KernelError
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import SCALE_GROUP as SCALE_GROUP  # FREIGHT_SCALE_GROUP
from freight.fp8.formats import Format
from freight.operands.activation import Activation, GatedFunction, GateFunction
from freight.operands.routing import Scoring
from freight.operands.tiles import STATE_TILE as STATE_TILE  # FREIGHT_STATE_TILE
from freight.operands.weight import Activations

ABI = 26
LANES, CACHE_LINE, MAX_HEAD_DIM, MAX_WIDTH = 16, 64, 1024, 8

FORMAT_CODES = {
    Format.FLOAT32: 0,
    Format.FLOAT16: 1,
    Format.BFLOAT16: 2,
    Format.E4M3FN: 3,
    Format.E5M2: 4,
    Format.E4M3FNUZ: 5,
    Format.INT8: 6,
}
MXFP4 = 7  # of weights alone
FORMATS = {torch_dtype(format): code for format, code in FORMAT_CODES.items()}  # by dtype
ACTIVATIONS = {Activations.PLAIN: 0, Activations.DYNAMIC: 1, Activations.STATIC: 2}
GATED_ACTIVATIONS = {
    GatedFunction.SILU: 0,
    GatedFunction.GELU_TANH: 1,
    GatedFunction.CLAMPED_SWIGLU: 2,
    GatedFunction.CLAMPED_SILU: 3,
}
UNGATED_ACTIVATIONS = {Activation.RELU: 0, Activation.RELU_SQUARED: 1}
GATE_FUNCTIONS = {GateFunction.SOFTPLUS: 0, GateFunction.SIGMOID: 1, GateFunction.IDENTITY: 2}
SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: 1, Scoring.CHOSEN: 2}
OK, OUT_OF_MEMORY, FAILED, SHORT_CONTEXT, NO_SUCH_ROW = range(5)  # FreightStatus
# By FreightFunction: those that can be replayed.
FUNCTIONS = (
    *("linear", "add_rms_norm", "gated", "attention", "rotate_store", "experts", "route"),
    *("add_layer_norm", "activated", "gate", "part"),
    *("decays", "gated_norm", "convolution", "recurrence", "lookup", "by_head"),
)

_ERRORS: dict[int, tuple[type[FreightError], str]] = {
    OUT_OF_MEMORY: (
        CapacityError,
        "there is no memory left for its working space; lower --max-num-batched-tokens",
    ),
    FAILED: (KernelError, "the system gave it no thread; lower --threads"),
    SHORT_CONTEXT: (
        KernelError,
        "a sequence has more queries than keys: its context must include the tokens of this step",
    ),
    NO_SUCH_ROW: (KernelError, "a token id or position lies outside of the embedding"),
}

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class FreightWeight(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("data", "scale", "block_scale")),
        *((name, _LONG) for name in ("out_features", "in_features")),
        *((name, _INT) for name in ("format", "activations")),
        ("input_scale", _FLOAT),
    )


class FreightLinear(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "x", "bias", "y")),
        ("rows", _LONG),
        *((name, _INT) for name in ("format", "wide", "threads")),
    )


class FreightByHead(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weights", "x", "y")),
        *((name, _LONG) for name in ("rows", "x_stride", "head_stride")),
        *((name, _INT) for name in ("heads", "format", "threads")),
    )


class FreightNorm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "delta", "weight", "delta_weight", "sum", "out")),
        *((name, _LONG) for name in ("rows", "size")),
        *((name, _INT) for name in ("format", "weight_format", "delta_weight_format")),
        ("eps", _FLOAT),
        ("threads", _INT),
    )


class FreightGated(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("gate_up", "out")),
        *((name, _LONG) for name in ("rows", "size")),
        *((name, _INT) for name in ("format", "activation")),
        ("limit", _FLOAT),
        ("threads", _INT),
    )


class FreightLayerNorm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "delta", "weight", "bias", "sum", "out")),
        *((name, _LONG) for name in ("rows", "size")),
        ("format", _INT),
        ("eps", _FLOAT),
        ("threads", _INT),
    )


class FreightActivated(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "out")),
        *((name, _LONG) for name in ("rows", "size")),
        *((name, _INT) for name in ("format", "activation", "threads")),
    )


class FreightGate(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "logits", "out")),
        *((name, _LONG) for name in ("rows", "size", "groups", "x_stride", "logits_stride")),
        *((name, _INT) for name in ("format", "function", "threads")),
    )


class FreightPart(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "weight", "out")),
        *((name, _LONG) for name in ("rows", "size", "x_stride", "out_stride", "group")),
        *((name, _INT) for name in ("format", "weight_format")),
        ("eps", _FLOAT),
        ("threads", _INT),
    )


class FreightDecays(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("a", "b", "a_log", "dt_bias", "beta", "log_decay")),
        *((name, _LONG) for name in ("rows", "heads", "k_dim", "a_stride", "b_stride")),
        *((name, _FLOAT) for name in ("least", "most", "bound")),
        *((name, _INT) for name in ("format", "threads")),
    )


class FreightGatedNorm(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "gate", "weight", "out")),
        *(
            (name, _LONG)
            for name in ("rows", "size", "group", "weight_size", "x_stride", "gate_stride")
        ),
        *((name, _INT) for name in ("format", "weight_format")),
        ("eps", _FLOAT),
        *((name, _INT) for name in ("norm_first", "threads")),
    )


class FreightLookup(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("table", "ids", "base", "out")),
        *((name, _LONG) for name in ("rows", "size", "table_rows", "table_stride")),
        *((name, _INT) for name in ("table_format", "format")),
        *((name, _FLOAT) for name in ("multiplier", "factor")),
        ("threads", _INT),
    )


class FreightRoute(ctypes.Structure):
    _fields_ = (
        *(
            (name, _POINTER)
            for name in ("router", "x", "bias", "choice_bias", "expert_scale", "ids", "weights")
        ),
        ("rows", _LONG),
        *((name, _INT) for name in ("format", "top_k", "scoring", "normed")),
        *((name, _INT) for name in ("num_groups", "top_groups", "group_best")),
        ("factor", _FLOAT),
        ("threads", _INT),
    )


class FreightExperts(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, _POINTER) for name in ("x", "base", "ids", "weights", "out")),
        ("rows", _LONG),
        *((name, _INT) for name in ("num_experts", "top_k", "format", "gated", "activation")),
        ("limit", _FLOAT),
        ("threads", _INT),
    )


class FreightPages(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("data", "scale")),
        *(
            (name, _LONG)
            for name in ("block", "token", "head", "scale_block", "scale_token", "scale_head")
        ),
    )


class FreightAttention(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("q", "out")),
        *((name, FreightPages) for name in ("k", "v", "rotated")),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "block_tables")),
        *(
            (name, _POINTER)
            for name in ("center_pairs", "center_parts", "center_cos", "center_sin", "sinks")
        ),
        ("q_stride", _LONG),
        *((name, _INT) for name in ("q_type", "kv_format", "scales")),
        *((name, _INT) for name in ("num_seqs", "max_blocks", "num_heads", "num_kv_heads")),
        *(
            (name, _INT)
            for name in ("k_dim", "v_dim", "block_size", "window", "center_size", "rotary_dim")
        ),
        *((name, _FLOAT) for name in ("softmax_scale", "soft_cap")),
        ("threads", _INT),
    )


class FreightStore(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "q")),
        *((name, FreightPages) for name in ("k", "v", "rotated")),
        *((name, _POINTER) for name in ("positions", "slots", "cos", "sin", "q_factor", "q_norm")),
        *((name, _POINTER) for name in ("k_norm", "k_center", "counters")),
        ("rows", _LONG),
        *(
            (name, _INT)
            for name in ("num_heads", "num_kv_heads", "num_v_heads", "k_dim", "v_dim", "block_size")
        ),
        ("rotary_dim", _INT),
        *((name, _INT) for name in ("type", "kv_format", "scales", "q_norm_type", "k_norm_type")),
        ("eps", _FLOAT),
        ("threads", _INT),
    )


class FreightConvolution(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "weight", "bias", "out", "columns")),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "block_tables")),
        ("x_stride", _LONG),
        *((name, _INT) for name in ("num_seqs", "max_blocks", "every", "channels", "width")),
        *((name, _INT) for name in ("format", "silu", "threads")),
    )


class FreightRecurrence(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "beta", "log_decay", "skip", "out")),
        *((name, _POINTER) for name in ("state", "scale", "kept_k", "kept_u", "kept_decay")),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, _LONG) for name in ("q_stride", "k_stride", "v_stride")),
        *(
            (name, _INT)
            for name in ("num_seqs", "max_blocks", "every", "key_heads", "heads", "k_dim", "v_dim")
        ),
        *((name, _INT) for name in ("format", "state_format", "delta", "norm", "by_channel")),
        ("q_factor", _FLOAT),
        ("threads", _INT),
    )


class FreightCall(ctypes.Structure):
    _fields_ = (("arguments", _POINTER), ("function", _INT))


# Functions that compute, by name: their arguments. They return a FreightStatus.
COMPUTE: dict[str, tuple[Any, ...]] = {
    "freight_pack": (_POINTER, _INT, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "freight_linear": (ctypes.POINTER(FreightLinear),),
    "freight_by_head": (ctypes.POINTER(FreightByHead),),
    "freight_add_rms_norm": (ctypes.POINTER(FreightNorm),),
    "freight_gated": (ctypes.POINTER(FreightGated),),
    "freight_add_layer_norm": (ctypes.POINTER(FreightLayerNorm),),
    "freight_activated": (ctypes.POINTER(FreightActivated),),
    "freight_gate": (ctypes.POINTER(FreightGate),),
    "freight_part": (ctypes.POINTER(FreightPart),),
    "freight_lookup": (ctypes.POINTER(FreightLookup),),
    "freight_route": (ctypes.POINTER(FreightRoute),),
    "freight_experts": (ctypes.POINTER(FreightExperts),),
    "freight_attention": (ctypes.POINTER(FreightAttention),),
    "freight_rotate_store": (ctypes.POINTER(FreightStore),),
    "freight_decays": (ctypes.POINTER(FreightDecays),),
    "freight_gated_norm": (ctypes.POINTER(FreightGatedNorm),),
    "freight_convolution": (ctypes.POINTER(FreightConvolution),),
    "freight_recurrence": (ctypes.POINTER(FreightRecurrence),),
    "freight_replay": (ctypes.POINTER(FreightCall), _LONG, ctypes.POINTER(_LONG)),
}
# The others: what they return, then their arguments.
OTHERS: dict[str, tuple[Any, ...]] = {
    "freight_abi": (_INT,),
    "freight_init": (None, _POINTER),
    "freight_bind": (None, ctypes.POINTER(ctypes.c_int32), _INT, _INT),
    "freight_set_prefetch": (None, _INT),
    "freight_evict": (_INT, _POINTER, _LONG),
    "freight_packed_bytes": (_LONG, _INT, _LONG, _LONG),
}


def open_library(path: Path) -> ctypes.CDLL:
    """The functions of a compiled library. Those that compute raise CapacityError if memory cannot
    be allocated, and KernelError for other failures.

    Raises OSError if `path` is not a library, AttributeError if it lacks a function.
    """
    functions = ctypes.CDLL(str(path))
    for name, (result, *arguments) in OTHERS.items():
        function: Any = functions[name]
        function.argtypes, function.restype = arguments, result
        setattr(functions, name, function)
    for name, types in COMPUTE.items():
        function = functions[name]
        function.argtypes, function.restype, function.errcheck = types, _INT, _require_success
        setattr(functions, name, function)
    return functions


def replay(functions: Any, calls: ctypes.Array[FreightCall]) -> None:
    """Make the calls in order, up to the first that fails. Raises as the function that failed."""
    functions.freight_replay(calls, len(calls), ctypes.byref(_LONG()))


def _require_success(status: int, function: Any, arguments: tuple[Any, ...]) -> None:
    if status:
        name = function.__name__
        if name == "freight_replay":
            calls, _, failed = arguments
            name = f"freight_{FUNCTIONS[calls[failed._obj.value].function]}"
        kind, reason = _ERRORS[status]
        raise kind(f"{name} failed: {reason}")
