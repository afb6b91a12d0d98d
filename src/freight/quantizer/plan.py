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
from freight.base.other_engines.values import PER_TOKEN_HEAD
from freight.errors import ConfigError, choices
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import INT4_GROUP, INT4_GROUPS
from freight.quantizer.budget import Budget, parse_budget, parse_weight_budget


class WeightScheme(StrEnum):
    """The elements of a weight that share a scale."""

    TENSOR = "fp8"
    CHANNEL = "fp8-channel"  # one output row
    BLOCK = "fp8-block"  # 128 x 128
    INT8 = "int8"  # one output row, in INT8
    INT4 = "int4"  # a group of inputs
    MXFP4 = "mxfp4"  # 32 inputs, and it is a power of two
    NVFP4 = "nvfp4"  # 16 inputs, in E4M3, and one for all that divides
    NONE = "none"

    @property
    def in_four_bits(self) -> bool:
        return self in (WeightScheme.INT4, WeightScheme.MXFP4, WeightScheme.NVFP4)


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
    GPTQ = "gptq"  # AutoGPTQ's, of INT4
    AWQ = "awq"  # AutoAWQ's, of INT4

    @property
    def of_integers(self) -> bool:
        """Whether it has weights of INT4 alone, and no scales of the KV cache."""
        return self in (Layout.GPTQ, Layout.AWQ)


class ObserverKind(StrEnum):
    """The rule that derives a scale from the observed values."""

    ABSMAX = "absmax"
    PERCENTILE = "percentile"
    MSE = "mse"


class Transform(StrEnum):
    """What is done to the weights before they are rounded; it leaves the model's results as they were."""

    AWQ = "awq"
    SMOOTHQUANT = "smoothquant"
    ROTATION = "rotation"


class ActOrder(StrEnum):
    """The order in which GPTQ rounds the inputs of a matrix."""

    NONE = "none"  # as they come
    STATIC = "static"  # by how large they are, in groups of neighbours all the same
    GROUP = "group"  # by how large they are, and so are the groups


class DuoScaling(StrEnum):
    """Whether AWQ's candidates also depend on the weights' magnitudes (llm-compressor's
    `duo_scaling`).
    """

    ON = "on"  # all, and a scale of ones
    OFF = "off"
    BOTH = "both"  # half of them


class WeightObserver(StrEnum):
    """The rule of a weight's scale."""

    MINMAX = "minmax"  # the largest magnitude has the largest code
    MSE = "mse"  # the one of a few with the least squared error


GPTQ = "gptq"
NEAREST = "nearest"  # as a method: none of the others


@dataclass(frozen=True)
class Method:
    """What keeps the error of rounding low, beside the scales.

    gptq        whether errors are spread over the inputs that are still to be rounded
    damping     of GPTQ's Hessian: the share of the mean of its diagonal that is added to it
    smoothing   the exponent of SmoothQuant
    duo_scaling  which candidates AWQ tries
    """

    transform: Transform | None = None
    gptq: bool = False
    damping: float = 0.01
    act_order: ActOrder = ActOrder.STATIC
    smoothing: float = 0.5
    duo_scaling: DuoScaling = DuoScaling.ON

    @property
    def needs_data(self) -> bool:
        """Whether the inputs of Linear modules are looked at."""
        return self.gptq or self.smooths

    @property
    def smooths(self) -> bool:
        """Whether scales are chosen for inputs."""
        return self.transform in (Transform.AWQ, Transform.SMOOTHQUANT)

    def __str__(self) -> str:
        parts = [] if self.transform is None else [str(self.transform)]
        if self.gptq:
            parts.append(GPTQ)
        return ",".join(parts)


@dataclass(frozen=True)
class QuantizePlan:
    """A resolved quantizer run.

    kv_granularity   None if the KV cache is not quantized; with `kv_budget`, the finest granularity
                     to choose from
    center           whether keys are centered; requires `kv_granularity`
    lm_head          whether the output head is quantized like the other Linear modules
    kv_budget        a limit within which each layer's granularity is chosen (`quantizer.kv_budget`)
    group_size       inputs that share a scale; only with INT4
    asymmetric       whether groups have zero points; only with INT4
    method           what keeps the error of rounding low
    weight_observer  the rule of a weight's scale
    budget           a limit within which each layer's numbers are chosen (`quantizer.weight_budget`);
                     `weights` and `group_size` are then those of the coarsest to choose from
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
    kv_budget: Budget | None = None
    group_size: int = INT4_GROUP
    method: Method = Method()
    asymmetric: bool = False
    weight_observer: WeightObserver = WeightObserver.MSE
    budget: Budget | None = None

    @property
    def needs_data(self) -> bool:
        """Whether calibration data is read."""
        return self.calibrates or self.method.needs_data

    @property
    def calibrates(self) -> bool:
        """Whether static scales are measured, or layers rounded by their inputs."""
        is_static = self.activations is ActivationScheme.STATIC or self.kv_granularity is not None
        return is_static or self.rounds_by_layer

    @property
    def rounds_by_layer(self) -> bool:
        """Whether layers are rounded one after the other, by their inputs."""
        return self.method.gptq or self.budget is not None

    @property
    def ordered(self) -> bool:
        """Whether groups may be of inputs in an order of their own."""
        return self.method.gptq and self.method.act_order is ActOrder.GROUP

    @property
    def weight_format(self) -> Format:
        """The format of the weights that are quantized."""
        return Format.INT8 if self.weights is WeightScheme.INT8 else Format.E4M3FN

    @property
    def needed_by(self) -> str:
        """Settings that need calibration data, for messages."""
        settings = []
        if self.budget:
            settings.append("--budget")
        elif self.method.needs_data:
            settings.append(f"--method {self.method}")
        if self.activations is ActivationScheme.STATIC:
            settings.append("--activations static")
        if self.kv_budget:
            settings.append("--kv-budget")
        elif self.kv_granularity is not None:
            settings.append("--kv-cache fp8")
        return " and ".join(settings)


WEIGHT_ONLY = "fp8-weight-only"  # fp8-channel, and activations stay in 16 bits
WEIGHTS = (*WeightScheme, WEIGHT_ONLY)
_WEIGHTS_OF = {  # unless given
    Layout.FP8: WeightScheme.TENSOR,
    Layout.TGI: WeightScheme.NONE,
    Layout.GPTQ: WeightScheme.INT4,
    Layout.AWQ: WeightScheme.INT4,
}
# Those that have scales of the KV cache
KV_LAYOUTS = tuple(layout for layout in Layout if not layout.of_integers)
KV_CACHES = ("fp8", "none")
KV_GRANULARITIES = (Granularity.TENSOR, Granularity.HEAD, Granularity.CHANNEL)
NUM_SAMPLES = 512  # the default of llm-compressor's oneshot
MAX_SEQ_LEN = 2048  # tokens of a sample at most
# The defaults with a method: on SmolLM2-135M 65,000 tokens have the same KL as 33,000
METHOD_SAMPLES = 128
METHOD_SEQ_LEN = 512
_METHODS = {  # of llm-compressor's and ModelOpt's names of formats -> --weights and --method
    "awq": "--weights int4 --method awq",
    "int4_awq": "--weights int4 --method awq",
    "gptq": "--weights int4 --method gptq",
    "autoround": "--weights int4 --method gptq",
}
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
    budget: str | None = None  # of weights: 'kl=0.01' or 'bits=4.5'
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
    method: str | None = (
        None  # 'nearest', 'gptq', 'awq', 'smoothquant', 'rotation', or a list with commas
    )
    damping: float | None = None  # of GPTQ
    act_order: str | None = None  # of GPTQ
    smoothing: float | None = None  # of SmoothQuant
    asymmetric: bool = False  # zero points, with int4
    weight_observer: str | None = None  # 'minmax' or 'mse', the rule of a weight's scale
    duo_scaling: str | None = None  # of AWQ: 'on', 'off' or 'both'

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


def _kv_cache(name: str) -> str:
    if name in PER_TOKEN_HEAD:
        raise ConfigError(
            f"--kv-cache {name}: scales of tokens are measured as they are stored, and no checkpoint has any; use "
            f"--kv-cache none here, and --kv-cache-dtype {name} where the model runs"
        )
    return choose("--kv-cache", name, KV_CACHES)


def plan(args: QuantizeArgs) -> QuantizePlan:
    """Fill in the defaults. Raises ConfigError for options that contradict each other or would have
    no effect.
    """
    if args.dtype not in (None, "auto"):
        choose("--dtype", args.dtype, ("auto", *DTYPES))
    layout = Layout(choose("--format", args.format, tuple(Layout)))
    default = _WEIGHTS_OF.get(layout, WeightScheme.CHANNEL)
    if args.weights in _METHODS:
        raise ConfigError(
            f"--weights {args.weights}: a method is chosen beside the numbers; give {_METHODS[args.weights]}"
        )
    weight_budget = None
    if args.budget is not None:
        weight_budget = _weight_budget(args, args.budget)
        default = WeightScheme.INT4
    weights, activations = _schemes(args, choose("--weights", args.weights or default, WEIGHTS))
    budget = None if args.kv_budget is None else _budget(args, args.kv_budget, layout)
    default_cache = "fp8" if layout is Layout.TGI or budget else "none"
    kv_cache = _kv_cache(args.kv_cache or default_cache)
    coarsest = Granularity.CHANNEL if budget else Granularity.TENSOR
    requested = args.kv_granularity or coarsest
    granularity = choose("--kv-granularity", requested, tuple(map(str, KV_GRANULARITIES)))
    observer = choose("--observer", args.observer or ObserverKind.ABSMAX, tuple(ObserverKind))
    method = _method(args, weights)
    num_samples = NUM_SAMPLES
    max_seq_len = MAX_SEQ_LEN
    if method.needs_data:
        num_samples = METHOD_SAMPLES
        if kv_cache == "none":  # scales of the cache have to see late positions
            max_seq_len = METHOD_SEQ_LEN
    decided = QuantizePlan(
        weights=weights,
        activations=activations,
        kv_granularity=Granularity(granularity) if kv_cache == "fp8" else None,
        ignore=args.ignore,
        num_samples=_count("--num-samples", args.num_samples, num_samples, 1),
        max_seq_len=_count("--max-seq-len", args.max_seq_len, max_seq_len, 2),
        observer=ObserverKind(observer),
        layout=layout,
        center=args.center,
        lm_head=args.lm_head,
        kv_budget=budget,
        group_size=_group_size(args, weights),
        method=method,
        asymmetric=args.asymmetric,
        weight_observer=_weight_observer(args, weights),
        budget=weight_budget,
    )
    _check_scheme(decided)
    _check_layout(decided)
    _check_nothing_is_idle(args, decided)
    return decided


def _schemes(args: QuantizeArgs, name: str) -> tuple[WeightScheme, ActivationScheme]:
    """Return the schemes of weights and activations for a name of `WEIGHTS`."""
    if args.activations:
        choose("--activations", args.activations, tuple(ActivationScheme))
    if name == WEIGHT_ONLY:
        if args.activations not in (None, ActivationScheme.NONE):
            raise ConfigError(
                f"--activations {args.activations} with --weights {name}: it means fp8-channel with activations in 16 "
                "bits; omit --activations, or choose --weights fp8-channel"
            )
        return WeightScheme.CHANNEL, ActivationScheme.NONE
    weights = WeightScheme(name)
    if args.activations:
        return weights, ActivationScheme(args.activations)
    if weights is WeightScheme.NONE or weights.in_four_bits:
        return weights, ActivationScheme.NONE
    return weights, ActivationScheme.DYNAMIC


def _budget(args: QuantizeArgs, text: str, layout: Layout) -> Budget:
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


def _weight_budget(args: QuantizeArgs, text: str) -> Budget:
    """Parse a budget of weights. Raises ConfigError if it is given with a choice that it makes itself,
    or one that it cannot be made with.
    """
    budget = parse_weight_budget(text)
    options = {
        f"--weights {args.weights}": args.weights is not None,
        f"--group-size {args.group_size}": args.group_size is not None,
        f"--activations {args.activations}": args.activations not in (None, "none"),
        "--asymmetric": args.asymmetric,
        "--lm-head": args.lm_head,
    }
    for option, is_set in options.items():
        if is_set:
            raise ConfigError(
                f"--budget {budget} with {option}: the budget chooses the numbers of each layer's weights; omit one"
            )
    if args.format != Layout.COMPRESSED_TENSORS:
        raise ConfigError(
            f"--budget {budget} with --format {args.format}: that format has one kind of numbers for all layers; omit "
            "--format"
        )
    if args.kv_budget is not None:
        raise ConfigError(
            f"--budget {budget} with --kv-budget {args.kv_budget}: one budget a run; give --kv-cache fp8 here, or "
            "--kv-budget in a run of its own"
        )
    for name in str(args.method or GPTQ).split(","):
        if name in (Transform.AWQ, Transform.SMOOTHQUANT):
            raise ConfigError(
                f"--budget {budget} with --method {args.method}: the scales of {name} are chosen for one kind of "
                "numbers, and the budget chooses among several; use --method gptq, rotation,gptq or nearest"
            )
    return budget


def _method(args: QuantizeArgs, weights: WeightScheme) -> Method:
    """Return the method. Raises ConfigError for one that is unknown, or would have no effect."""
    default = None if args.budget is None else GPTQ
    requested = args.method or default
    names = [] if requested in (None, NEAREST) else str(requested).split(",")
    known = (*map(str, Transform), GPTQ, NEAREST)
    for name in names:
        choose("--method", name, known)
    if NEAREST in names:
        raise ConfigError(f"--method {args.method}: {NEAREST} is no method beside another; omit it")
    transforms = [Transform(name) for name in names if name != GPTQ]
    if len(set(names)) < len(names) or len(transforms) > 1:
        raise ConfigError(
            f"--method {args.method}: give one of {choices(map(str, Transform))}, and {GPTQ} beside it if wanted"
        )
    has_gptq = GPTQ in names
    method = Method(
        transform=transforms[0] if transforms else None,
        gptq=has_gptq,
        damping=_share("--damping", args.damping, Method.damping),
        act_order=ActOrder(
            choose("--act-order", args.act_order or Method.act_order, tuple(ActOrder))
        ),
        smoothing=_share("--smoothing", args.smoothing, Method.smoothing),
        duo_scaling=DuoScaling(
            choose("--duo-scaling", args.duo_scaling or Method.duo_scaling, tuple(DuoScaling))
        ),
    )
    if names and weights is WeightScheme.NONE:
        raise ConfigError(f"--method {method} changes nothing with --weights none; omit it")
    settings = {
        "--damping": (args.damping, GPTQ),
        "--act-order": (args.act_order, GPTQ),
        "--smoothing": (args.smoothing, str(Transform.SMOOTHQUANT)),
        "--duo-scaling": (args.duo_scaling, str(Transform.AWQ)),
    }
    for flag, (value, name) in settings.items():
        if value is not None and name not in names:
            raise ConfigError(f"{flag} {value} is of --method {name}; add it, or omit {flag}")
    if args.act_order == ActOrder.GROUP and weights is not WeightScheme.INT4:
        raise ConfigError(
            f"--act-order group with --weights {weights}: groups are of int4; choose --act-order static"
        )
    return method


def _weight_observer(args: QuantizeArgs, weights: WeightScheme) -> WeightObserver:
    searched = WeightObserver.MSE if weights.in_four_bits else WeightObserver.MINMAX
    name = choose("--weight-observer", args.weight_observer or searched, tuple(WeightObserver))
    if name == WeightObserver.MSE and not weights.in_four_bits:
        raise ConfigError(
            f"--weight-observer mse with --weights {weights}: scales are searched in 4 bits only; omit it"
        )
    return WeightObserver(name)


def _share(flag: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{flag} {value!r} must be a number above 0, at most 1")
    return float(value)


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
    if plan.method.transform is Transform.SMOOTHQUANT and plan.activations is ActivationScheme.NONE:
        raise ConfigError(
            f"--method smoothquant with --weights {plan.weights} and inputs in 16 bits: it makes inputs easier to "
            "round, and weights harder; use --method awq, or --weights int8 or fp8-channel with dynamic activations"
        )
    if plan.ordered and plan.layout is Layout.AWQ:
        raise ConfigError(
            "--act-order group with --format awq: groups are of neighbours there; choose --act-order static"
        )
    if plan.weights.in_four_bits and plan.activations is not ActivationScheme.NONE:
        raise ConfigError(
            f"--activations {plan.activations} with --weights {plan.weights}: beside weights in 4 bits they stay in 16 "
            "bits; omit it"
        )
    if plan.weights.in_four_bits and plan.layout in (Layout.FP8, Layout.TGI):
        raise ConfigError(
            f"--weights {plan.weights} with --format {plan.layout}: weights in 4 bits are written in the form of "
            "compressed-tensors; omit --format"
        )
    if plan.asymmetric and plan.weights is not WeightScheme.INT4:
        raise ConfigError(
            f"--asymmetric with --weights {plan.weights}: zero points are for integers of 4 bits; omit it, or choose "
            "--weights int4"
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
    if plan.layout.of_integers:
        _check_integers(plan)
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


def _check_integers(plan: QuantizePlan) -> None:
    """Raise ConfigError for what the formats of INT4 alone cannot express."""
    if plan.weights is not WeightScheme.INT4:
        raise ConfigError(
            f"--format {plan.layout} with --weights {plan.weights}: that format has integers of 4 bits; choose "
            "--weights int4, or --format compressed-tensors"
        )
    if plan.kv_granularity is not None:
        raise ConfigError(
            f"--format {plan.layout} with scales of the KV cache: that format has none; omit --kv-cache and "
            "--kv-budget, or choose --format compressed-tensors"
        )
    if plan.lm_head and plan.layout is Layout.AWQ:
        raise ConfigError(
            "--lm-head with --format awq: engines read that format's head in 16 bits; omit it, or choose --format "
            "compressed-tensors"
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
                f"--{name.replace('_', '-')} is given, but nothing is calibrated: choose --activations static, "
                "--kv-cache fp8 or --method gptq, or omit it"
            )


def _count(flag: str, value: int | None, default: int, least: int) -> int:
    if value is None:
        return default
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{flag} {value!r} must be an integer ≥ {least}")
    return int(value)
