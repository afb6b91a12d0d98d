"""What vLLM, SGLang and TGI do with a checkpoint's KV scales: a table of rules, each with where it
was read.

The table is data; `effects.py` evaluates it and knows no engine. A tensor's fate is decided by the
first `NameRule` that matches its engine, version, name, declared method and model_type,
else by the tables that tools/engine_rules.py has read from the engines' sources (`families.py`); if
they lack it too, it is unknown. Then the `Assembly` of that engine and method says what becomes of
a layer that lacks one side or both.

To add a rule: read it in the engine's source or see it in a run, write a `NameRule` above the more
general ones, name the file (or the issue) in `source`, and add a line to the table in
tests/unit/audit/test_rules.py. To add a version: run tools/engine_rules.py on its sources and put
it into `READ`; rules without `until` hold for it. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"


class Effect(StrEnum):
    """What becomes of a layer's scale."""

    USED = "used"
    CONVERTED = "converted"  # used, but not as stored: one side's for both, or rounded to 16 bits
    IGNORED = "ignored"  # stored, and 1.0 is used instead
    ONE = "one"  # not stored, and 1.0 is used
    REFUSED = "refused"  # the engine stops while it loads
    UNKNOWN = "unknown"  # no rule was read for this name in this family


# The versions whose sources were read, oldest first. Their patch releases have the same rules;
# others are refused.
READ: dict[Engine, tuple[str, ...]] = {
    Engine.VLLM: ("0.6.3", "0.32", "0.33"),
    Engine.SGLANG: ("0.5.23",),
    Engine.TGI: ("2.4", "3.3.7"),
}

NONE = "none"  # a checkpoint that declares no quantization
ANY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NameRule:
    """`names` is a regular expression for the end of a tensor's name, from `self_attn` or its like
    on.

    Empty sets mean any. `methods` are values of quant_method, `NONE` among them. `sides` overrides
    which scale the engine takes the tensor for: vLLM loads `kv_scale` as K's. `until` is the last
    version, inclusive.
    """

    engine: Engine
    names: str
    effect: Effect
    why: str
    source: str
    methods: frozenset[str] = ANY
    model_types: frozenset[str] = ANY
    sides: str = ""
    until: str = ""


@dataclass(frozen=True)
class Assembly:
    """How an engine completes a layer from the tensors that it loaded.

    only_k, only_v   what becomes of both sides when one tensor alone was loaded: CONVERTED (it
                     serves both), REFUSED, USED (the other side is 1.0) or IGNORED (both are 1.0)
    heads            what becomes of a scale with one number per KV head
    doubled          whether scales are doubled on GPUs whose E4M3 is FNUZ (AMD MI300), as those
                     need
    """

    engine: Engine
    methods: frozenset[str]
    only_k: Effect
    only_v: Effect
    heads: Effect
    doubled: bool
    source: str
    until: str = ""


@dataclass(frozen=True)
class AutoRule:
    """With `--kv-cache-dtype auto` the engine stores FP8 for checkpoints of these methods that
    declare such a cache.
    """

    engine: Engine
    methods: frozenset[str]
    source: str


CT = frozenset({"compressed-tensors"})
MODELOPT = frozenset({"modelopt"})
FP8_QUARK = frozenset({"fp8", "quark"})
WITH_SCALES = CT | MODELOPT | FP8_QUARK  # methods whose attention layers have scale parameters
PLAIN = r"self_attn\.[kv]_scale"
OUTPUT = r"self_attn\.[kv]_proj\.output_scale"
BOTH = r"self_attn\.kv_scale"

_OLD = "vllm/model_executor/model_loader/weight_utils.py, maybe_remap_kv_scale_name (0.6.3)"
_T_KV = "server/text_generation_server/layers/attention/kv_cache.py, get_kv_scales"
# Of 0.6.3 the loader of Llama was read, which serves Mistral as well.
_OLD_LLAMA = frozenset({"llama", "mistral"})

NAME_RULES: tuple[NameRule, ...] = (
    NameRule(
        engine=Engine.VLLM,
        names=BOTH,
        effect=Effect.USED,
        why="kv_scale is loaded as K's scale",
        source=_OLD,
        methods=FP8_QUARK | CT,
        model_types=_OLD_LLAMA,
        sides="k",
        until="0.6.3",
    ),
    NameRule(
        engine=Engine.VLLM,
        names=PLAIN,
        effect=Effect.USED,
        why="",
        source=_OLD,
        methods=FP8_QUARK | CT,
        model_types=_OLD_LLAMA,
        until="0.6.3",
    ),
    NameRule(
        engine=Engine.VLLM,
        names=OUTPUT,
        effect=Effect.USED,
        why="",
        source="get_compressed_tensors_cache_scale (0.6.3)",
        methods=CT,
        model_types=_OLD_LLAMA,
        until="0.6.3",
    ),
    NameRule(
        engine=Engine.VLLM,
        names=".*",
        effect=Effect.IGNORED,
        why="the renamed scale finds no parameter; a warning says so",
        source=_OLD,
        model_types=_OLD_LLAMA,
        until="0.6.3",
    ),
    NameRule(
        engine=Engine.TGI,
        names=".*",
        effect=Effect.IGNORED,
        why="it has no model file for this family; transformers' model runs with scales of 1.0",
        source="server/text_generation_server/models/transformers_flash_causal_lm.py",
        model_types=frozenset({"qwen3", "qwen3_moe", "qwen2_moe"}),
    ),
)

# The situation of a method, by which the generated tables (`engine_families.json`) are asked.
SGLANG_WITH_SCALES = WITH_SCALES
SGLANG_WITHOUT = frozenset(
    {NONE, "fbgemm_fp8", "torchao", "awq", "gptq", "gguf", "bitsandbytes", "mxfp4"}
)
# of compressed-tensors and ModelOpt; others leave attention without scales
SGLANG_STRATEGIES = frozenset({"tensor"})

# Scales of static activations: which suffixes an engine reads. All three take the largest of
# projections they merge.
INPUT_RULES: tuple[tuple[Engine, str, Effect, str], ...] = (
    (Engine.VLLM, "input_scale", Effect.USED, "vllm/model_executor/layers/quantization/fp8.py"),
    (Engine.SGLANG, "input_scale", Effect.USED, "sglang/srt/layers/quantization/fp8.py"),
    (
        Engine.SGLANG,
        "activation_scale",
        Effect.USED,
        "sglang/srt/models/llama.py, load_weights: renamed to input_scale",
    ),
    (Engine.TGI, "input_scale", Effect.USED, "server/text_generation_server/layers/fp8.py"),
)

_BASE_V = "vllm/model_executor/layers/quantization/kv_cache.py"
ASSEMBLIES: tuple[Assembly, ...] = (
    Assembly(
        engine=Engine.VLLM,
        methods=ANY,
        only_k=Effect.CONVERTED,
        only_v=Effect.REFUSED,
        heads=Effect.REFUSED,
        doubled=False,
        source=_BASE_V,
        until="0.6.3",
    ),
    Assembly(
        engine=Engine.VLLM,
        methods=CT,
        only_k=Effect.USED,
        only_v=Effect.USED,
        heads=Effect.USED,
        doubled=False,
        source="vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: scales begin as 1.0",
    ),
    Assembly(
        engine=Engine.VLLM,
        methods=ANY,
        only_k=Effect.CONVERTED,
        only_v=Effect.REFUSED,
        heads=Effect.REFUSED,
        doubled=True,
        source=_BASE_V,
    ),
    Assembly(
        engine=Engine.SGLANG,
        methods=ANY,
        only_k=Effect.CONVERTED,
        only_v=Effect.REFUSED,
        heads=Effect.REFUSED,
        doubled=True,
        source="sglang/srt/layers/quantization/kv_cache.py",
    ),
    Assembly(
        engine=Engine.TGI,
        methods=ANY,
        only_k=Effect.IGNORED,
        only_v=Effect.IGNORED,
        heads=Effect.REFUSED,
        doubled=False,
        source=_T_KV,
    ),
)

AUTO_RULES: tuple[AutoRule, ...] = (
    AutoRule(
        Engine.VLLM,
        CT | MODELOPT,
        "vllm/utils/torch_utils.py, resolve_kv_cache_dtype_string; attention.py",
    ),
    AutoRule(Engine.SGLANG, CT | MODELOPT, "sglang/srt/mem_cache/kv_cache_dtype.py"),
    AutoRule(
        Engine.TGI, CT, "server/text_generation_server/models/__init__.py, CUDA with flashinfer"
    ),
)

# What vLLM's backends and options change from 0.32 on. The first is of scales per head alone.
VLLM_NOTES = (
    "on GPUs scales per head need FlashAttention 3 or 4 (H100 and newer); elsewhere no backend is found, and it stops "
    "(vllm/v1/attention/backends/flash_attn.py, supports_per_head_quant_scales)",
    "--kv-cache-dtype fp8_per_token_head measures scales per token and head and uses no stored one "
    "(vllm/model_executor/layers/quantization/kv_cache.py)",
    "layers of --kv-cache-dtype-skip-layers stay in 16 bits, and their scales unused "
    "(vllm/model_executor/layers/attention/attention.py)",
)
