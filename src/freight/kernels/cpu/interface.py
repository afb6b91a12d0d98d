"""The C interface of csrc/ (freight.h, attention.h, states.h) in Python, through ctypes.

It has the numbers, structs and function types of the headers. Its test compares the two sides, and
fails for anything that only one of them has.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from freight.errors import CapacityError, FreightError, KernelError, RankError
from freight.fp8.blocks import BlockFormat
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import SCALE_GROUP as SCALE_GROUP  # FREIGHT_SCALE_GROUP
from freight.fp8.formats import Format
from freight.operands.activation import Activation, GatedFunction, GateFunction
from freight.operands.routing import Scoring
from freight.operands.tiles import STATE_TILE as STATE_TILE  # FREIGHT_STATE_TILE
from freight.operands.weight import Activations
from freight.parallel.shared import MAX_RANKS as MAX_RANKS  # FREIGHT_MAX_RANKS
from freight.parallel.shared import Exchange as FreightExchange  # noqa: F401
from freight.parallel.shared import FreightRanks as FreightRanks

ABI = 41  # FREIGHT_ABI; a library with another number is refused
LANES = 16  # FREIGHT_… of the headers
CACHE_LINE = 64
MAX_HEAD_DIM = 1024
MAX_WIDTH = 8
INT8_INPUTS = 131071  # FREIGHT_INT8_INPUTS

FORMAT_CODES = {
    Format.FLOAT32: 0,
    Format.FLOAT16: 1,
    Format.BFLOAT16: 2,
    Format.E4M3FN: 3,
    Format.E5M2: 4,
    Format.E4M3FNUZ: 5,
    Format.INT8: 6,
}
MXFP4 = 7  # formats of weights only
NVFP4 = 8
INT4 = 16  # likewise, plus one number of each: of INT4_PARTS and INT4_GROUPS
INTEGERS = 32  # added to these: inputs are rounded to INT8 in groups
BYTES = 64  # added to INT4 and INTEGERS: codes are INT8
BLOCKS = 128  # with INTEGERS, plus a number of BLOCK_FORMATS
INT4_PARTS = {"ZEROS": 1, "BFLOAT16": 2}
INT4_GROUPS = {32: 0, 64: 4, 128: 8}
BLOCK_FORMATS = {
    BlockFormat.Q4_0: 0,
    BlockFormat.Q4_1: 1,
    BlockFormat.Q5_0: 2,
    BlockFormat.Q5_1: 3,
    BlockFormat.Q8_0: 4,
    BlockFormat.Q4_K: 5,
    BlockFormat.Q5_K: 6,
    BlockFormat.Q6_K: 7,
    BlockFormat.IQ4_NL: 8,
    BlockFormat.IQ4_XS: 9,
    BlockFormat.MXFP4: 10,
}
FORMATS = {torch_dtype(format): code for format, code in FORMAT_CODES.items()}  # by dtype
ACTIVATIONS = {Activations.PLAIN: 0, Activations.DYNAMIC: 1, Activations.STATIC: 2}
GATED_ACTIVATIONS = {
    GatedFunction.SILU: 0,
    GatedFunction.GELU_TANH: 1,
    GatedFunction.CLAMPED_SWIGLU: 2,
    GatedFunction.CLAMPED_SILU: 3,
    GatedFunction.GEGLU: 4,
}
UNGATED_ACTIVATIONS = {Activation.RELU: 0, Activation.RELU_SQUARED: 1, Activation.GELU: 2}
GATE_FUNCTIONS = {GateFunction.SOFTPLUS: 0, GateFunction.SIGMOID: 1, GateFunction.IDENTITY: 2}
SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SIGMOID: 1, Scoring.CHOSEN: 2}
# FreightStatus
OK, OUT_OF_MEMORY, FAILED, SHORT_CONTEXT, NO_SUCH_ROW, RANK_LOST, RANK_FAILED = range(7)
INTERRUPTED = 7
BAD_SCALE = 8

_ERRORS: dict[int, tuple[type[FreightError | KeyboardInterrupt], str]] = {
    OUT_OF_MEMORY: (
        CapacityError,
        "there is no memory left for its working space; lower --max-num-batched-tokens",
    ),
    FAILED: (KernelError, "the operating system refused a thread; lower --threads"),
    SHORT_CONTEXT: (
        KernelError,
        "a sequence has more queries than keys: its context must include the tokens of this step",
    ),
    NO_SUCH_ROW: (KernelError, "a token id or position is outside the embedding"),
    RANK_LOST: (RankError, "another rank has ended, or does not answer"),
    RANK_FAILED: (KernelError, "another rank has left the step"),
    INTERRUPTED: (KeyboardInterrupt, "a signal interrupted a gather"),
    BAD_SCALE: (
        KernelError,
        "a matrix of a GGUF file has a scale or minimum that is infinite, NaN or, in MXFP4, below 2 ** -126; "
        "get the file again, or convert the matrix to bfloat16",
    ),
}

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_LONG = ctypes.c_int64
_FLOAT = ctypes.c_float


def _fields(*parts: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a struct, in order. A part: a type, and the names of its fields."""
    return [(name, kind) for kind, names in parts for name in names.split()]


class FreightWeight(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "data scale block_scale order"),
        (_LONG, "out_features in_features"),
        (_INT, "format activations"),
        (_FLOAT, "input_scale"),
    )


class FreightLinear(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "weight x bias y"),
        (_LONG, "rows"),
        (_INT, "format wide threads"),
    )


class FreightByHead(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "weights x y"),
        (_LONG, "rows x_stride head_stride"),
        (_INT, "heads format threads"),
    )


class FreightAdapters(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x a b adapters ranks scalings ends index y"),
        (_LONG, "rows in_features out_features x_stride"),
        (_INT, "num_slots num_parts max_rank format threads"),
    )


class FreightNorm(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x delta weight delta_weight sum out"),
        (_LONG, "rows size"),
        (_INT, "format weight_format delta_weight_format"),
        (_FLOAT, "eps"),
        (_INT, "threads"),
    )


class FreightGated(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "gate_up out"),
        (_LONG, "rows size"),
        (_INT, "format activation"),
        (_FLOAT, "limit"),
        (_INT, "threads"),
    )


class FreightLayerNorm(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x delta weight bias sum out"),
        (_LONG, "rows size"),
        (_INT, "format"),
        (_FLOAT, "eps"),
        (_INT, "threads"),
    )


class FreightActivated(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x out"),
        (_LONG, "rows size"),
        (_INT, "format activation threads"),
    )


class FreightGate(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x logits out"),
        (_LONG, "rows size groups x_stride logits_stride"),
        (_INT, "format function threads"),
    )


class FreightPart(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x weight out"),
        (_LONG, "rows size x_stride out_stride group"),
        (_INT, "format weight_format"),
        (_FLOAT, "eps"),
        (_INT, "threads"),
    )


class FreightDecays(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "a b a_log dt_bias beta log_decay"),
        (_LONG, "rows heads k_dim a_stride b_stride"),
        (_FLOAT, "least most bound"),
        (_INT, "format threads"),
    )


class FreightGatedNorm(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x gate weight out"),
        (_LONG, "rows size group weight_size x_stride gate_stride"),
        (_INT, "format weight_format"),
        (_FLOAT, "eps"),
        (_INT, "norm_first threads"),
    )


class FreightLookup(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "table ids base out"),
        (_LONG, "rows size table_rows table_stride"),
        (_INT, "table_format format"),
        (_FLOAT, "multiplier factor"),
        (_INT, "threads"),
    )


class FreightBlockRows(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "table ids base out"),
        (_LONG, "rows"),
        (_INT, "format"),
        (_FLOAT, "multiplier factor"),
        (_INT, "threads"),
    )


class FreightRoute(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "router x bias choice_bias expert_scale ids weights"),
        (_LONG, "rows"),
        (_INT, "format top_k scoring normed num_groups top_groups group_best"),
        (_FLOAT, "factor"),
        (_INT, "threads"),
    )


class FreightExperts(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "gate_up down gate_up_bias down_bias x base ids weights out ranks"),
        (_LONG, "rows"),
        (_INT, "num_experts top_k format gated activation"),
        (_FLOAT, "limit"),
        (_INT, "threads"),
        (_POINTER, "adapters"),
        (FreightAdapters, "gate_up_bank down_bank"),
    )


class FreightPages(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "data scale"),
        (_LONG, "block token head scale_block scale_token scale_head"),
    )


class FreightAttention(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "q out"),
        (FreightPages, "k v rotated"),
        (
            _POINTER,
            "query_starts context_lens block_tables center_pairs center_parts center_cos center_sin sinks",
        ),
        (_LONG, "q_stride"),
        (
            _INT,
            "q_type kv_format scales num_seqs max_blocks num_heads num_kv_heads k_dim v_dim "
            "block_size window both_ways center_size rotary_dim",
        ),
        (_FLOAT, "softmax_scale soft_cap"),
        (_INT, "threads"),
    )


class FreightStore(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "qkv q"),
        (FreightPages, "k v rotated"),
        (_POINTER, "positions slots cos sin q_factor q_norm k_norm k_center counters row_counters"),
        (_LONG, "rows"),
        (_INT, "num_heads num_kv_heads num_v_heads k_dim v_dim block_size"),
        (_INT, "rotary_dim"),
        (_INT, "type kv_format scales q_norm_type k_norm_type"),
        (_FLOAT, "eps"),
        (_INT, "threads"),
    )


class FreightConvolution(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "x weight bias out columns query_starts context_lens block_tables"),
        (_LONG, "x_stride"),
        (_INT, "num_seqs max_blocks every channels width kept format silu threads"),
    )


class FreightRecurrence(ctypes.Structure):
    _fields_ = _fields(
        (
            _POINTER,
            "q k v beta log_decay skip out state scale kept_k kept_u kept_decay query_starts context_lens block_tables",
        ),
        (_LONG, "q_stride k_stride v_stride"),
        (
            _INT,
            "num_seqs max_blocks every key_heads heads k_dim v_dim format state_format delta norm by_channel",
        ),
        (_FLOAT, "q_factor"),
        (_INT, "threads"),
    )


class FreightGather(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "ranks part out"),
        (_LONG, "rows part_bytes"),
        (_INT, "only threads"),
    )


class FreightSharedLinear(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "ranks weight x bias y"),
        (_LONG, "rows"),
        (_INT, "format whole threads"),
    )


class FreightCall(ctypes.Structure):
    _fields_ = _fields((_POINTER, "arguments"), (_INT, "function"))


# Functions that take one struct and can be replayed, in the order of the enum FreightFunction.
_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "linear": FreightLinear,
    "add_rms_norm": FreightNorm,
    "gated": FreightGated,
    "attention": FreightAttention,
    "rotate_store": FreightStore,
    "experts": FreightExperts,
    "route": FreightRoute,
    "add_layer_norm": FreightLayerNorm,
    "activated": FreightActivated,
    "gate": FreightGate,
    "part": FreightPart,
    "decays": FreightDecays,
    "gated_norm": FreightGatedNorm,
    "convolution": FreightConvolution,
    "recurrence": FreightRecurrence,
    "lookup": FreightLookup,
    "by_head": FreightByHead,
    "gather": FreightGather,
    "shared_linear": FreightSharedLinear,
    "block_rows": FreightBlockRows,
    "add_adapters": FreightAdapters,
}
FUNCTIONS = tuple(_STRUCTS)
# Argument types of the functions that compute, by name. They return a FreightStatus.
COMPUTE: dict[str, tuple[Any, ...]] = {
    **{f"freight_{name}": (ctypes.POINTER(struct),) for name, struct in _STRUCTS.items()},
    "freight_pack": (_POINTER, _INT, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "freight_replay": (ctypes.POINTER(FreightCall), _LONG, ctypes.POINTER(_LONG)),
}
# Types of the other functions, by name: the result, then the arguments.
OTHERS: dict[str, tuple[Any, ...]] = {
    "freight_abi": (_INT,),
    "freight_init": (None, _POINTER),
    "freight_bind": (None, ctypes.POINTER(ctypes.c_int32), _INT, _INT),
    "freight_set_prefetch": (None, _INT),
    "freight_evict": (_INT, _POINTER, _LONG),
    "freight_packed_bytes": (_LONG, _INT, _LONG, _LONG),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library and declare the types of its functions.

    Functions that compute raise CapacityError if memory cannot be allocated, and KernelError for
    other failures. Raises OSError if `path` is not a library, AttributeError if it lacks a
    function.
    """
    functions = ctypes.CDLL(str(path))
    for name, (result, *arguments) in OTHERS.items():
        function: Any = functions[name]
        function.argtypes = arguments
        function.restype = result
        setattr(functions, name, function)
    for name, types in COMPUTE.items():
        function = functions[name]
        function.argtypes = types
        function.restype = _INT
        function.errcheck = _require_success
        setattr(functions, name, function)
    return functions


def replay(functions: Any, calls: ctypes.Array[FreightCall]) -> None:
    """Make the calls in order, up to the first that fails; raise the error of that function."""
    functions.freight_replay(calls, len(calls), ctypes.byref(_LONG()))


def _require_success(status: int, function: Any, arguments: tuple[Any, ...]) -> None:
    if status:
        name = function.__name__
        if name == "freight_replay":
            calls, _, failed = arguments
            name = f"freight_{FUNCTIONS[calls[failed._obj.value].function]}"
        kind, reason = _ERRORS[status]
        raise kind(f"{name} failed: {reason}")
