"""Results that are published: the files of benchmarks/published/, as types.

A file has a `kind`, which says what type it holds (KINDS). Reading checks every key and its type, so
that a document is never made of a file that is damaged or of another version.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from freight.base.fields import is_integer, is_number
from freight.base.files import read_object, write_whole
from freight.errors import ConfigError, choices, shown

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "published"
Interval = tuple[float, float]  # of 95 %: low, high
_NAMES = {str: "a text of one line", int: "an integer", float: "a finite number"}
_NEVER_EMPTY = ("rows", "steps", "caches")  # tables, whose first line is the reference


@dataclass(frozen=True)
class Model:
    """What was measured. `name` is what `make real MODEL=` takes; `sha256` of the published file,
    None for a model that is no single file.
    """

    name: str
    title: str
    origin: str
    licence: str | None
    sha256: str | None


@dataclass(frozen=True)
class Text:
    """The text that was judged: `num_tokens` in windows of at most `window`, which are the
    `num_units` that intervals are over. `calibration` names the text of static scales.
    """

    name: str
    sha256: str
    num_tokens: int
    window: int
    num_units: int
    calibration: str | None
    calibration_sha256: str | None


@dataclass(frozen=True)
class Machine:
    """Where it was measured. `kernels` is the build of the kernels, as `freight env` names it."""

    processor: str
    kernels: str
    freight: str
    torch: str
    python: str

    @property
    def short_name(self) -> str:
        """For a file's name and a column: the processor and its kernels."""
        return slug(f"{self.processor} {self.kernels.removeprefix('cpu-')}")


@dataclass(frozen=True)
class Noise:
    """Mean KL in nats of a float32 run of the same weights to the 16-bit run."""

    kl: float
    num_tokens: int


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer before quantization: the largest magnitude, that of the median and of
    the smallest channel, that at position 0 and at all later ones; the shares that a scale of 1.0
    clips, and stores with fewer digits (`freight evaluate caches --json`, `magnitudes`).
    """

    max: float
    channel: float
    smallest_channel: float
    first: float
    later: float
    beyond_448: float
    below_normal: float


@dataclass(frozen=True)
class LayerMagnitudes:
    """`v` is None where values are part of keys."""

    layer: int
    k: Side
    v: Side | None


@dataclass(frozen=True)
class Clipping:
    """What static scales clip: in how many layers and channels, and by what factor at most."""

    layers: int
    channels: int
    times: float


@dataclass(frozen=True)
class Row:
    """One cache with one format of weights. KL in nats a token against the 16-bit run.

    `cache` and `weights` are names of `freight evaluate caches`; `perplexity_ratio` is to the 16-bit
    run's; `kl_without_noise` is None where the noise was not measured, `clipping` where scales are
    not static.
    """

    cache: str
    weights: str
    kv_cache_dtype: str
    granularity: str | None
    kl: float
    kl_interval: Interval | None
    kl_without_noise: float | None
    kl_p99: float
    perplexity: float
    perplexity_ratio: float
    perplexity_ratio_interval: Interval | None
    same_top: float
    same_top_interval: Interval | None
    clipped_share: float
    clipping: Clipping | None
    flushed_share: float
    bytes_per_token: int
    tokens_per_gib: int


@dataclass(frozen=True)
class Quality:
    """What caches and formats of weights cost a model over a text; the first row is the reference."""

    kind: ClassVar[str] = "quality"

    model: Model
    text: Text
    command: str
    machine: Machine
    date: str
    noise: Noise | None
    magnitudes: tuple[LayerMagnitudes, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class TaskScore:
    """One cache on one set of questions, on those that 16 bits answered as well.

    only_reference, only_cache   questions that one of both answered rightly
    difference                   of the shares of right answers, this cache's minus that of 16 bits
    differing_answers            answers whose texts differ
    ended_by_length              answers under this cache that were cut
    right_by_question            '1', '0', or '.' where there is no answer, in the order of the set
    """

    cache: str
    num_questions: int
    right: int
    reference_right: int
    only_reference: int
    only_cache: int
    difference: float
    interval_90: Interval
    interval_95: Interval
    mcnemar_p: float
    differing_answers: int
    ended_by_length: int
    generated_tokens: int
    verdict: str
    right_by_question: str


@dataclass(frozen=True)
class Task:
    """A set of questions: `total` in all, of which 16 bits have answered `answered`."""

    name: str
    total: int
    answered: int
    reference_by_question: str
    scores: tuple[TaskScore, ...]


@dataclass(frozen=True)
class Tasks:
    """Answers under several caches compared with those under 16 bits; `margin` is the difference
    that was called equivalent beforehand, and `control` the cache that differs by rounding alone.
    """

    kind: ClassVar[str] = "tasks"

    model: Model
    command: str
    machine: Machine
    date: str
    margin: float
    control: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class LadderStep:
    """One cache on published solutions. `change` is that of the log-probability of a token, in nats;
    `solution_change` that of a whole solution.
    """

    cache: str
    kl: float
    kl_interval: Interval | None
    change: float
    change_interval: Interval | None
    solution_change: float
    same_top: float


@dataclass(frozen=True)
class Ladder:
    """Published solutions after their questions, teacher-forced, under ever fewer bits."""

    kind: ClassVar[str] = "ladder"

    model: Model
    questions: str
    num_solutions: int
    num_tokens: int
    command: str
    machine: Machine
    date: str
    steps: tuple[LadderStep, ...]


@dataclass(frozen=True)
class OracleRow:
    """One cache in float32: Freight's figures, and those of transformers and ml_dtypes."""

    cache: str
    kl: float
    oracle_kl: float
    perplexity: float
    oracle_perplexity: float


@dataclass(frozen=True)
class Oracle:
    """Rows of `Quality`, in float32, recomputed by a program that shares no code with Freight."""

    kind: ClassVar[str] = "oracle"

    model: Model
    text: str
    num_tokens: int
    window: int
    commands: tuple[str, ...]
    machine: Machine
    transformers: str
    ml_dtypes: str
    date: str
    rows: tuple[OracleRow, ...]


@dataclass(frozen=True)
class DepthRow:
    """Retrieval from `depth` tokens back: share of values found, and its change against 16 bits."""

    depth: int
    num_questions: int
    found: float
    gain: float
    found_change: float
    gain_change: float
    gain_change_interval: Interval | None


@dataclass(frozen=True)
class LongCache:
    """One cache at every depth."""

    cache: str
    depths: tuple[DepthRow, ...]


@dataclass(frozen=True)
class Retrieval:
    """Records of a key and a value far back in a context; the first cache is the reference."""

    kind: ClassVar[str] = "retrieval"

    model: Model
    context: int
    num_contexts: int
    commands: tuple[str, ...]
    machine: Machine
    date: str
    caches: tuple[LongCache, ...]


@dataclass(frozen=True)
class MethodRow:
    """A checkpoint of one method: what making it took, and what it costs with a 16-bit cache and, as
    `kl_token`, with E4M3 per token. KL in nats a token against the 16-bit model.
    """

    method: str
    seconds: float
    peak_bytes: int
    bytes_after: int
    kl: float
    kl_interval: Interval | None
    kl_token: float
    perplexity: float
    perplexity_ratio: float
    perplexity_ratio_interval: Interval | None
    same_top: float


@dataclass(frozen=True)
class Methods:
    """One format of weights by every method of `freight quantize`; `group_size` 0: the format's own."""

    kind: ClassVar[str] = "methods"

    model: Model
    text: str
    num_tokens: int
    window: int
    calibration: str
    num_samples: int
    max_seq_len: int
    weights: str
    group_size: int
    perplexity: float
    command: str
    machine: Machine
    date: str
    rows: tuple[MethodRow, ...]


Result = Quality | Tasks | Ladder | Oracle | Retrieval | Methods
KINDS: dict[str, type[Result]] = {
    form.kind: form for form in (Quality, Tasks, Ladder, Oracle, Retrieval, Methods)
}


def file_name(result: Result) -> str:
    """The model's name, the kind of other results than quality, the context of retrieval, and the
    machine.
    """
    parts = [slug(result.model.name)]
    if not isinstance(result, Quality):
        parts.append(result.kind)
    if isinstance(result, Retrieval):
        parts[-1] += f"-{result.context}"
    if isinstance(result, Methods):
        parts[-1] += f"-{result.weights}"
    return ".".join([*parts, result.machine.short_name, "json"])


AnyResult = TypeVar("AnyResult", bound=Result)


def slug(text: str) -> str:
    """'AMD EPYC avx512' -> 'amd-epyc-avx512'; points stay."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def write(result: Result, folder: Path) -> Path:
    """Write `result` into `folder`, whole or not at all, and return the file's path. Raises
    ConfigError for a figure that is not finite, which JSON does not have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(result)
    facts = {"kind": result.kind, **dataclasses.asdict(result)}
    try:
        content = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ConfigError(f"{path} is not written: a figure is not finite ({error})") from None
    write_whole(path, content + "\n")
    return path


def read(path: Path) -> Any:
    """Return what a file holds, as the type of its kind. Raises ConfigError for a file that is not
    of that form, with the key.
    """
    try:
        facts = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    kind = facts.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{path}: kind is {shown(kind)}; known are {choices(KINDS)}")
    return _value(KINDS[kind], facts, f"{path}: ", "")


def read_all(kind: type[AnyResult], folder: Path = FOLDER) -> list[AnyResult]:
    """Return all results of one kind, by the names of their files."""
    results = [read(path) for path in sorted(folder.glob("*.json"))]
    return [result for result in results if isinstance(result, kind)]


def _value(form: Any, value: Any, file: str, key: str) -> Any:
    """Return a value of JSON as the type `form`. Raises ConfigError with the key where it is none."""
    if dataclasses.is_dataclass(form):
        return _object(form, value, file, key)
    origin = typing.get_origin(form)
    arguments = typing.get_args(form)
    if origin is types.UnionType:
        (inner,) = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else _value(inner, value, file, key)
    if origin is tuple:
        return _items(arguments, value, file, key)
    fits = {
        str: isinstance(value, str) and value.isprintable(),
        int: is_integer(value),
        float: is_number(value) and abs(value) <= sys.float_info.max,
    }
    if not fits[form]:
        raise ConfigError(f"{file}{key} is {shown(value)}; it has to be {_NAMES[form]}")
    return value


def _items(forms: tuple[Any, ...], value: Any, file: str, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{file}{key} is {shown(value)}; it has to be a list")
    if not value and key in _NEVER_EMPTY:
        raise ConfigError(f"{file}{key} is empty; write the file anew")
    if forms[-1] is Ellipsis:
        forms = forms[:1] * len(value)
    if len(value) != len(forms):
        raise ConfigError(f"{file}{key} has {len(value)} entries; it has to have {len(forms)}")
    items = []
    for index, (form, item) in enumerate(zip(forms, value, strict=True)):
        items.append(_value(form, item, file, f"{key}[{index}]"))
    return tuple(items)


def _object(form: Any, value: Any, file: str, key: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}{key} is {shown(value)}; it has to be an object")
    hints = typing.get_type_hints(form)
    names = [field.name for field in dataclasses.fields(form)]
    prefix = f"{key}." if key else ""
    for name in names:
        if name not in value:
            raise ConfigError(f"{file}{prefix}{name} is missing; write the file anew")
    for name in value:
        if name not in names:
            raise ConfigError(f"{file}{prefix}{name} is no key of this kind; write the file anew")
    return form(
        **{name: _value(hints[name], value[name], file, f"{prefix}{name}") for name in names}
    )
