"""Options of `freight quantize` -> QuantizePlan. Reads no file, imports no torch.

`QuantizeArgs` holds the options as given, None meaning "not given"; `plan` resolves them once into
a `QuantizePlan`. An option that would have no effect, such as an observer where nothing is
calibrated, is an error, as is a scheme that the output format cannot express.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from numbers import Integral
from typing import Any

from freight.base.options import choose, require_known
from freight.errors import ConfigError, choices
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import INT4_GROUP, INT4_GROUPS
from freight.quantizer.budget import KVBudget, parse_budget


class WeightScheme(StrEnum):
    """The elements of a weight that share a scale."""

    TENSOR = "fp8"
    CHANNEL = "fp8-channel"  # one output row
    BLOCK = "fp8-block"  # 128 x 128
    INT8 = "int8"  # one output row, in INT8
    INT4 = "int4"  # a group of inputs
    MXFP4 = "mxfp4"  # 32 inputs, and it is a power of two
    NONE = "none"

    @property
    def in_four_bits(self) -> bool:
        return self in (WeightScheme.INT4, WeightScheme.MXFP4)


class ActivationScheme(StrEnum):
    """The scheme that the checkpoint declares for the inputs of quantized Linear modules."""

    DYNAMIC = "dynamic"
    STATIC = "static"
    NONE = "none"


class Layout(StrEnum):
    """The checkpoint layout that is written."""

    COMPRESSED_TENSORS = "compressed-tensors"
    FP8 = "fp8"  # AutoFP8's; with fp8-block, DeepSeek's
    TGI = "tgi"


class ObserverKind(StrEnum):
    """The rule that derives a scale from the observed values."""

    ABSMAX = "absmax"
    PERCENTILE = "percentile"
    MSE = "mse"


@dataclass(frozen=True)
class QuantizePlan:
    """A resolved quantizer run.

    kv_granularity   None if the KV cache is not quantized; with `kv_budget`, the finest granularity
                     to choose from
    center           whether keys are centered; requires `kv_granularity`
    lm_head          whether the output head is quantized like the other Linear modules
    kv_budget        a limit within which each layer's granularity is chosen (`quantizer.kv_budget`)
    group_size       inputs that share a scale; only with INT4
    """

    weights: WeightScheme
    activations: ActivationScheme
    kv_granularity: Granularity | None
    layout: Layout
    ignore: tuple[str, ...] = ()
    num_samples: int = 0
    max_seq_len: int = 0
    observer: ObserverKind = ObserverKind.ABSMAX
    center: bool = False
    lm_head: bool = False
    kv_budget: KVBudget | None = None
    group_size: int = INT4_GROUP

    @property
    def needs_data(self) -> bool:
        """True if anything is calibrated."""
        return self.activations is ActivationScheme.STATIC or self.kv_granularity is not None

    @property
    def weight_format(self) -> Format:
        """The format of the weights that are quantized."""
        return Format.INT8 if self.weights is WeightScheme.INT8 else Format.E4M3FN

    @property
    def needed_by(self) -> str:
        """Settings that need calibration data, for messages."""
        settings = []
        if self.activations is ActivationScheme.STATIC:
            settings.append("--activations static")
        if self.kv_budget:
            settings.append("--kv-budget")
        elif self.kv_granularity is not None:
            settings.append("--kv-cache fp8")
        return " and ".join(settings)


KV_CACHES = ("fp8", "none")
KV_GRANULARITIES = (Granularity.TENSOR, Granularity.HEAD, Granularity.CHANNEL)
NUM_SAMPLES = 512  # the default of llm-compressor's oneshot
MAX_SEQ_LEN = 2048  # tokens of a sample at most
_OTHER_METHODS = dict.fromkeys(  # of rounding to 4 bits
    ("awq", "gptq", "int4_awq", "autoround"),
    "what moves the error of rounding by calibration is not implemented",
)
_SYNONYMS = {  # other tools' names -> ours
    "quantization": "weights",
    "activation_scheme": "activations",
    "kv_cache_scheme": "kv_cache",
    "kv_cache_dtype": "kv_cache",
    "dataset": "calibration_data",
    "num_calibration_samples": "num_samples",
    "max_seq_length": "max_seq_len",
    "ignore_patterns": "ignore",
    "calib_size": "num_samples",
}
DTYPES = {
    "fp16": Format.FLOAT16,
    "float16": Format.FLOAT16,
    "bf16": Format.BFLOAT16,
    "bfloat16": Format.BFLOAT16,
    "fp32": Format.FLOAT32,
    "float32": Format.FLOAT32,
}


@dataclass(frozen=True)
class QuantizeArgs:
    """Options as given. Defaults that depend on other options are None here and resolved by `plan`."""

    weights: str | None = None
    activations: str | None = None
    kv_cache: str | None = None
    kv_granularity: str | None = None
    kv_budget: str | None = None  # 'kl=0.002' or 'bits=9'
    center: bool = False
    lm_head: bool = False
    ignore: tuple[str, ...] = ()
    calibration_data: object = None  # a path, or samples: strings or lists of token ids
    num_samples: int | None = None
    max_seq_len: int | None = None
    observer: str | None = None
    format: str = Layout.COMPRESSED_TENSORS
    dtype: str | None = None  # as in other tools; refused if it differs from the model's
    device: str | None = None  # device on which the model is calibrated
    group_size: int | None = None  # inputs that share a scale, with int4

    @staticmethod
    def from_options(**options: Any) -> QuantizeArgs:
        """Build QuantizeArgs from keyword options. Raises ConfigError for an unknown name, with the
        nearest known one.
        """
        require_known(options, [f.name for f in fields(QuantizeArgs)], _SYNONYMS)
        ignore = options.get("ignore", ())
        if isinstance(ignore, str):
            raise ConfigError(f"ignore is {ignore!r}; give a list of patterns, [{ignore!r}]")
        return QuantizeArgs(**options | {"ignore": tuple(ignore)})


def plan(args: QuantizeArgs) -> QuantizePlan:
    """Fill in the defaults. Raises ConfigError for options that contradict each other or would have
    no effect.
    """
    if args.dtype not in (None, "auto"):
        choose("--dtype", args.dtype, ("auto", *DTYPES))
    layout = Layout(choose("--format", args.format, tuple(Layout)))
    default = {Layout.FP8: WeightScheme.TENSOR, Layout.TGI: WeightScheme.NONE}.get(
        layout, WeightScheme.CHANNEL
    )
    if args.weights in _OTHER_METHODS:
        raise ConfigError(
            f"--weights {args.weights}: {_OTHER_METHODS[args.weights]}; llm-compressor writes such checkpoints in a "
            "form that Freight reads, and --weights int4 rounds to nearest"
        )
    weights = WeightScheme(choose("--weights", args.weights or default, tuple(WeightScheme)))
    plain = weights is WeightScheme.NONE or weights.in_four_bits
    activations = ActivationScheme.NONE if plain else ActivationScheme.DYNAMIC
    if args.activations:
        choose("--activations", args.activations, tuple(ActivationScheme))
        activations = ActivationScheme(args.activations)
    budget = None if args.kv_budget is None else _budget(args, args.kv_budget, layout)
    default_cache = "fp8" if layout is Layout.TGI or budget else "none"
    kv_cache = choose("--kv-cache", args.kv_cache or default_cache, KV_CACHES)
    coarsest = Granularity.CHANNEL if budget else Granularity.TENSOR
    requested = args.kv_granularity or coarsest
    granularity = choose("--kv-granularity", requested, tuple(map(str, KV_GRANULARITIES)))
    observer = choose("--observer", args.observer or ObserverKind.ABSMAX, tuple(ObserverKind))
    decided = QuantizePlan(
        weights=weights,
        activations=activations,
        kv_granularity=Granularity(granularity) if kv_cache == "fp8" else None,
        ignore=args.ignore,
        num_samples=_count("--num-samples", args.num_samples, NUM_SAMPLES, 1),
        max_seq_len=_count("--max-seq-len", args.max_seq_len, MAX_SEQ_LEN, 2),
        observer=ObserverKind(observer),
        layout=layout,
        center=args.center,
        lm_head=args.lm_head,
        kv_budget=budget,
        group_size=_group_size(args, weights),
    )
    _check_scheme(decided)
    _check_layout(decided)
    _check_nothing_is_idle(args, decided)
    return decided


def _budget(args: QuantizeArgs, text: str, layout: Layout) -> KVBudget:
    """Parse a budget. Raises ConfigError if it is given with a choice that it makes itself."""
    budget = parse_budget(text)
    options = {
        "--kv-cache none": args.kv_cache == "none",
        f"--kv-granularity {args.kv_granularity}": args.kv_granularity is not None,
        "--center": args.center,
    }
    for option, is_set in options.items():
        if is_set:
            raise ConfigError(
                f"--kv-budget {budget} with {option}: the budget chooses the cache by layer; omit one"
            )
    if layout is Layout.TGI:
        raise ConfigError(
            f"--kv-budget {budget} with --format tgi: that format has one KV scale in every layer; "
            "choose --format compressed-tensors"
        )
    return budget


def _group_size(args: QuantizeArgs, weights: WeightScheme) -> int:
    if args.group_size is None:
        return INT4_GROUP
    if weights is not WeightScheme.INT4:
        raise ConfigError(
            f"--group-size {args.group_size} with --weights {weights}: it is for int4; omit it"
        )
    if args.group_size not in INT4_GROUPS or isinstance(args.group_size, bool):
        raise ConfigError(
            f"--group-size {args.group_size!r}: choose {choices(map(str, INT4_GROUPS))} inputs"
        )
    return args.group_size


def _check_scheme(plan: QuantizePlan) -> None:
    if plan.weights.in_four_bits and plan.activations is not ActivationScheme.NONE:
        raise ConfigError(
            f"--activations {plan.activations} with --weights {plan.weights}: beside weights in 4 bits they stay in 16 "
            "bits; omit it"
        )
    if plan.weights.in_four_bits and plan.layout is not Layout.COMPRESSED_TENSORS:
        raise ConfigError(
            f"--weights {plan.weights} with --format {plan.layout}: weights in 4 bits are written in the form of "
            "compressed-tensors; omit --format"
        )
    if plan.weights is WeightScheme.NONE and plan.activations is not ActivationScheme.NONE:
        raise ConfigError(
            f"--activations {plan.activations} with --weights none: activations are rounded for FP8 weights only; "
            "choose --activations none, or --weights fp8"
        )
    if plan.weights is WeightScheme.BLOCK and plan.activations is ActivationScheme.STATIC:
        raise ConfigError(
            "--activations static with --weights fp8-block: block-scaled products take activations in dynamic groups "
            "of 128; choose --activations dynamic, or --weights fp8 or fp8-channel"
        )
    if plan.weights is WeightScheme.INT8 and plan.activations is not ActivationScheme.DYNAMIC:
        raise ConfigError(
            f"--activations {plan.activations} with --weights int8: products in INT8 round both sides, and calibration "
            "makes scales for FP8; choose --activations dynamic, or --weights fp8 or fp8-channel"
        )
    if plan.lm_head and plan.activations is ActivationScheme.STATIC:
        raise ConfigError(
            "--lm-head with --activations static: the head's input is not calibrated; choose --activations dynamic"
        )
    if plan.weights is WeightScheme.NONE and plan.kv_granularity is None:
        raise ConfigError(
            "--weights none and --kv-cache none leave nothing to do; choose --kv-cache fp8, or weights"
        )


def _check_layout(plan: QuantizePlan) -> None:
    """Raise ConfigError for a scheme that the output format cannot express."""
    if plan.layout is Layout.FP8:
        if plan.weights not in (WeightScheme.TENSOR, WeightScheme.BLOCK):
            raise ConfigError(
                f"--format fp8 with --weights {plan.weights}: that format has weights with a scale per tensor or per "
                "block; choose --weights fp8 or fp8-block, or --format compressed-tensors"
            )
        if plan.activations is ActivationScheme.NONE:
            raise ConfigError(
                "--format fp8 with --activations none: that format has static and dynamic activations only; "
                "choose one, or --format compressed-tensors"
            )
    if plan.layout is Layout.TGI:
        if plan.weights is not WeightScheme.NONE:
            raise ConfigError(
                f"--format tgi with --weights {plan.weights}: that format adds KV scales to 16-bit weights; "
                "choose --weights none, or --format compressed-tensors"
            )
        if plan.kv_granularity is None:
            raise ConfigError(
                "--format tgi with --kv-cache none: that format stores KV scales only"
            )


def _check_nothing_is_idle(args: QuantizeArgs, plan: QuantizePlan) -> None:
    if args.kv_granularity is not None and plan.kv_granularity is None:
        raise ConfigError(
            f"--kv-granularity {args.kv_granularity} changes nothing with --kv-cache none; add --kv-cache fp8"
        )
    if args.center and plan.kv_granularity is None:
        raise ConfigError("--center changes nothing with --kv-cache none; add --kv-cache fp8")
    if args.lm_head and plan.weights is WeightScheme.NONE:
        raise ConfigError("--lm-head changes nothing with --weights none; omit it")
    if args.ignore and plan.weights is WeightScheme.NONE:
        raise ConfigError(f"--ignore {args.ignore[0]} changes nothing with --weights none; omit it")
    for name in ("calibration_data", "num_samples", "max_seq_len", "observer", "device"):
        if getattr(args, name) is not None and not plan.needs_data:
            raise ConfigError(
                f"--{name.replace('_', '-')} is given, but nothing is calibrated: choose --activations static or "
                "--kv-cache fp8, or omit it"
            )


def _count(flag: str, value: int | None, default: int, least: int) -> int:
    if value is None:
        return default
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{flag} {value!r} must be an integer ≥ {least}")
    return int(value)
