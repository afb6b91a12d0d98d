"""What vLLM, SGLang and TGI do with a checkpoint's KV scales: a table of rules, each with where it was read.

The table is data; `effects.py` evaluates it and knows no engine. A tensor's fate is decided by the first `NameRule`
that matches its engine, version, name, declared method, strategy and model_type; a tensor that no rule matches is
ignored. Then the `Assembly` of that engine and method says what becomes of a layer that lacks one side or both.

To add a rule: read it in the engine's source or see it in a run, write a `NameRule` above the more general ones, name
the file (or the issue) in `source`, and add a line to the table in tests/unit/audit/test_rules.py. To add a version:
put it into `READ`; rules without `until` hold for it, the others need a successor. Imports no torch.
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


# The versions whose sources were read, oldest first. A version between two is judged as the older of them.
READ: dict[Engine, tuple[str, ...]] = {
    Engine.VLLM: ("0.6.3", "0.32", "0.33"),
    Engine.SGLANG: ("0.5.23",),
    Engine.TGI: ("2.4", "3.3.7"),
}

NONE = "none"  # a checkpoint that declares no quantization
ANY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class NameRule:
    """`names` is a regular expression for the end of a tensor's name, from `self_attn` or its like on.

    Empty sets mean any. `methods` are values of quant_method, `NONE` among them; `strategies` those of a
    compressed-tensors kv_cache_scheme, `NONE` where it declares none. `sides` overrides which scale the engine takes
    the tensor for: vLLM loads `kv_scale` as K's. `until` is the last version, inclusive.
    """

    engine: Engine
    names: str
    effect: Effect
    why: str
    source: str
    methods: frozenset[str] = ANY
    strategies: frozenset[str] = ANY
    model_types: frozenset[str] = ANY
    sides: str = ""
    since: str = ""
    until: str = ""


@dataclass(frozen=True)
class Assembly:
    """How an engine completes a layer from the tensors that it loaded.

    only_k, only_v   what becomes of both sides when one tensor alone was loaded: CONVERTED (it serves both), REFUSED,
                     USED (the other side is 1.0) or IGNORED (both are 1.0)
    heads            what becomes of a scale with one number per KV head
    doubled          whether scales are doubled on GPUs whose E4M3 is FNUZ (AMD MI300), as those need
    """

    engine: Engine
    methods: frozenset[str]
    only_k: Effect
    only_v: Effect
    heads: Effect
    doubled: bool
    source: str
    since: str = ""
    until: str = ""


@dataclass(frozen=True)
class AutoRule:
    """With `--kv-cache-dtype auto` the engine stores FP8 for checkpoints of these methods that declare such a cache."""

    engine: Engine
    methods: frozenset[str]
    source: str


CT = frozenset({"compressed-tensors"})
MODELOPT = frozenset({"modelopt"})
FP8_QUARK = frozenset({"fp8", "quark"})
WITH_SCALES = CT | MODELOPT | FP8_QUARK  # methods whose attention layers have scale parameters
PLAIN = r"self_attn\.[kv]_scale"
INSIDE = r"self_attn\.attn\.[kv]_scale"
MODELOPT_NAME = r"(?:self_attn|mixer)\.([kv])_proj\.\1_scale"
OUTPUT = r"self_attn\.[kv]_proj\.output_scale"
FUSED = r"self_attn\.qk(?:qk)?v_proj\.[kv]_scale"
CACHE = r"self_attn\.[kv]_cache\.scale"
BOTH = r"self_attn\.kv_scale"

_V_REMAP = "vllm/model_executor/layers/quantization/base_config.py, get_cache_scale_mapper"
_OLD = "vllm/model_executor/model_loader/weight_utils.py, maybe_remap_kv_scale_name (0.6.3)"
_V_IGNORE = "vllm/model_executor/layers/quantization/base_config.py, _ignore_unexpected_suffixes"
_V_LOADER = "vllm/model_executor/models/utils.py, AutoWeightsLoader"
_S_REMAP = "sglang/srt/model_loader/weight_utils.py, maybe_remap_kv_scale_name"
_T_KV = "server/text_generation_server/layers/attention/kv_cache.py, get_kv_scales"
_MAPPED = "|".join((BOTH, PLAIN, INSIDE, MODELOPT_NAME, FUSED, CACHE))

# SGLang's model files that call maybe_remap_kv_scale_name, and those that do not.
_S_REMAPPED = frozenset({"llama", "mistral", "phi3", "qwen3"})
_S_GEMMA = frozenset({"gemma2", "gemma3", "gemma3_text"})
_S_DIRECT = frozenset({"qwen2", "qwen2_moe", "qwen3_moe", "mixtral"})
# Families for which TGI has a model file of its own that calls get_kv_scales.
_T_OWN = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "qwen2",
        "phi3",
        "phi",
        "cohere",
        "dbrx",
    }
)

NAME_RULES: tuple[NameRule, ...] = (
    NameRule(
        Engine.VLLM,
        BOTH,
        Effect.USED,
        "kv_scale is loaded as K's scale",
        _OLD,
        FP8_QUARK | CT,
        sides="k",
        until="0.6.3",
    ),
    NameRule(Engine.VLLM, PLAIN, Effect.USED, "", _OLD, FP8_QUARK | CT, until="0.6.3"),
    NameRule(Engine.VLLM, OUTPUT, Effect.USED, "", "get_compressed_tensors_cache_scale (0.6.3)", CT, until="0.6.3"),
    NameRule(
        Engine.VLLM,
        ".*",
        Effect.IGNORED,
        "the renamed scale finds no parameter; a warning says so",
        _OLD,
        until="0.6.3",
    ),
    NameRule(
        Engine.VLLM,
        ".*",
        Effect.REFUSED,
        "without a quantization_config it maps no scale names, and stops at a tensor that it does not know",
        _V_LOADER,
        methods=frozenset({NONE}),
    ),
    NameRule(
        Engine.VLLM,
        OUTPUT,
        Effect.USED,
        "",
        "vllm/model_executor/layers/quantization/fp8.py and quark.py, get_cache_scale_mapper",
        methods=FP8_QUARK,
    ),
    NameRule(
        Engine.VLLM,
        OUTPUT,
        Effect.REFUSED,
        "only its fp8 and quark methods map output_scale; it stops at a tensor that it does not know",
        _V_LOADER,
    ),
    NameRule(
        Engine.VLLM,
        BOTH,
        Effect.USED,
        "kv_scale is loaded as K's scale",
        _V_REMAP,
        methods=WITH_SCALES,
        sides="k",
    ),
    NameRule(Engine.VLLM, _MAPPED, Effect.USED, "", _V_REMAP, methods=WITH_SCALES),
    NameRule(
        Engine.VLLM,
        _MAPPED,
        Effect.IGNORED,
        "attention has no scales under this quantization method, and unexpected KV scales are skipped without a word",
        _V_IGNORE,
    ),
    NameRule(
        Engine.SGLANG,
        ".*",
        Effect.IGNORED,
        "its attention has scales for static FP8 caches with one scale per tensor only",
        "sglang/srt/layers/quantization/compressed_tensors/compressed_tensors.py, is_supported_scheme",
        methods=CT,
        strategies=frozenset({NONE, "attn_head", "channel", "token", "group", "block", "dynamic"}),
    ),
    NameRule(
        Engine.SGLANG,
        ".*",
        Effect.IGNORED,
        "attention has scales under the methods fp8, modelopt, quark and compressed-tensors only",
        "sglang/srt/layers/quantization, get_quant_method",
        methods=frozenset({NONE, "fbgemm_fp8", "torchao", "awq", "gptq", "gguf", "bitsandbytes", "mxfp4"}),
    ),
    NameRule(
        Engine.SGLANG,
        INSIDE,
        Effect.USED,
        "",
        "sglang/srt/models/qwen2.py, qwen3_moe.py and mixtral.py, load_weights: names are taken as they are",
        model_types=_S_DIRECT,
    ),
    NameRule(
        Engine.SGLANG,
        ".*",
        Effect.IGNORED,
        "the model file does not call maybe_remap_kv_scale_name, so KV scales find no parameter",
        "sglang#39942",
        model_types=_S_DIRECT,
    ),
    NameRule(
        Engine.SGLANG,
        INSIDE,
        Effect.IGNORED,
        "`.attn` is inserted a second time, and the name finds no parameter",
        _S_REMAP,
        model_types=_S_REMAPPED | _S_GEMMA,
    ),
    NameRule(
        Engine.SGLANG,
        BOTH,
        Effect.USED,
        "kv_scale is loaded as K's scale",
        _S_REMAP,
        model_types=_S_REMAPPED | _S_GEMMA,
        sides="k",
    ),
    NameRule(Engine.SGLANG, PLAIN, Effect.USED, "", _S_REMAP, model_types=_S_REMAPPED | _S_GEMMA),
    NameRule(Engine.SGLANG, f"{MODELOPT_NAME}|{OUTPUT}", Effect.USED, "", _S_REMAP, model_types=_S_REMAPPED),
    NameRule(
        Engine.TGI,
        ".*",
        Effect.IGNORED,
        "it has no model file of its own for this family that reads KV scales",
        "server/text_generation_server/models/custom_modeling",
        model_types=frozenset({"qwen3", "qwen3_moe", "opt", "qwen2_moe"}),
    ),
    NameRule(Engine.TGI, PLAIN, Effect.USED, "", _T_KV, model_types=_T_OWN),
    NameRule(
        Engine.TGI,
        BOTH,
        Effect.CONVERTED,
        "kv_scale is rounded to the model's dtype as it is read",
        _T_KV,
        model_types=_T_OWN,
    ),
)

# Scales of static activations: which suffixes an engine reads. All three take the largest of projections they merge.
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
    Assembly(Engine.VLLM, ANY, Effect.CONVERTED, Effect.REFUSED, Effect.REFUSED, False, _BASE_V, until="0.6.3"),
    Assembly(
        Engine.VLLM,
        CT,
        Effect.USED,
        Effect.USED,
        Effect.USED,
        False,
        "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: scales begin as 1.0",
    ),
    Assembly(Engine.VLLM, ANY, Effect.CONVERTED, Effect.REFUSED, Effect.REFUSED, True, _BASE_V),
    Assembly(
        Engine.SGLANG,
        ANY,
        Effect.CONVERTED,
        Effect.REFUSED,
        Effect.REFUSED,
        True,
        "sglang/srt/layers/quantization/kv_cache.py",
    ),
    Assembly(Engine.TGI, ANY, Effect.IGNORED, Effect.IGNORED, Effect.REFUSED, False, _T_KV),
)

AUTO_RULES: tuple[AutoRule, ...] = (
    AutoRule(Engine.VLLM, CT | MODELOPT, "vllm/utils/torch_utils.py, resolve_kv_cache_dtype_string; attention.py"),
    AutoRule(Engine.SGLANG, CT | MODELOPT, "sglang/srt/mem_cache/kv_cache_dtype.py"),
    AutoRule(Engine.TGI, CT, "server/text_generation_server/models/__init__.py, CUDA with flashinfer"),
)
