"""The grid: which caches and weights are measured, and their figures against the unquantized run of
the model, in 16 bits or what else it is computed in.

Without options: a 16-bit cache, E4M3 with every source of scales, E5M2, and centered keys where a
layer gains from them. Static scales are those of the checkpoint, or else measured on calibration
text before the pass (`static_scales`). Where layers keep states, each format of theirs is a separate
setting, with keys and values as in the first: what pages cost and what states cost is measured
apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from freight.base.terminal import OnProgress, OnStage, unseen
from freight.checkpoint.reader import resolve_model
from freight.errors import ConfigError
from freight.fp8.formats import Format, Granularity, ScaleSource
from freight.fp8.scheme import KVScales
from freight.lab.columns import scales_name
from freight.lab.evaluate.documents import (
    Document,
    Part,
    PromptedText,
    cut_documents,
    cut_prompted,
    window_length,
)
from freight.lab.evaluate.figures import CalibrationText, Evaluation, Noise, Overview, summarize
from freight.lab.evaluate.layer_kl import first_windows, layer_kl
from freight.lab.evaluate.magnitudes import Magnitudes
from freight.lab.evaluate.measure import SettingRun, measure
from freight.lab.evaluate.report import cache_run, load_for, plain_config, pool_for
from freight.lab.evaluate.rounded import (
    check_schemes,
    load_rounded,
    open_other,
    require_names,
)
from freight.lab.evaluate.speed import contexts_of, time_settings
from freight.lab.evaluate.static_scales import Measured, measure_scales
from freight.lab.evaluate.stored_error import Probe
from freight.model.decoder import Decoder, LanguageModel
from freight.model.open import OpenModel, open_model, require_native
from freight.model.weight_bytes import WeightBytes, weight_bytes
from freight.quantizer.data import read_samples
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig, listed_layers
from freight.settings.hardware import takes_groups
from freight.settings.resolve import for_variant
from freight.text.tokenizer import Tokenizer

CACHES = ("unit", "tensor", "head", "channel", "token", "group", "e5m2", "centered")
OTHERS = ("int8",)  # measured when asked for
STATIC = ("tensor", "head", "channel", "centered")
STATES = ("float32", "bfloat16", "int8", "fp8")
SAMPLES = 32  # calibration text, at most
CALIBRATION_TOKENS = 16384
# bytes of all weights in float32: up to there the noise of 16 bits is measured unasked
NOISE_WEIGHTS = 2**32
_SHIPPED = resolve_model("demo") / "calibration.txt"

logger = logging.getLogger("freight")
Setting = tuple[str, EngineConfig]  # with its name


@dataclass(frozen=True)
class GridArgs:
    """What is measured, apart from the engine's options.

    caches            names of CACHES and OTHERS; None: those of CACHES (`group` for latents on a
                      CPU alone), or the one that the engine's options name
    states            names of STATES; None: where layers keep states, those that the engine's
                      options choose, or else those of at most 16 bits
    weights           schemes of weights (`rounded`), or folders of other checkpoints of the model
                      (with a `/`), each measured with a 16-bit and with a `token` cache
    calibration_data  for static scales that the checkpoint does not have; None: text that ships
                      with Freight
    window            tokens scored together; None: those of the longest document with its prompt, or
                      without prompts the context, at most 1024
    max_tokens        of the documents, this many are scored
    speed             whether prefill and decoding are timed
    per_layer         whether the KL of each layer alone is measured too
    noise             whether a float32 run of the same weights tells what computing in 16 bits
                      costs by itself; None: where its weights take at most NOISE_WEIGHTS
    """

    caches: tuple[str, ...] | None = None
    weights: tuple[str, ...] = ()
    calibration_data: str | None = None
    window: int | None = None
    max_tokens: int | None = None
    speed: bool = True
    per_layer: bool = False
    states: tuple[str, ...] | None = None
    noise: bool | None = False

    @property
    def folders(self) -> list[str]:
        """Other checkpoints, of `weights`."""
        return [name for name in self.weights if "/" in name]

    @property
    def schemes(self) -> tuple[str, ...]:
        """Schemes of weights, of `weights`."""
        return tuple(name for name in self.weights if "/" not in name)


def evaluate_grid(
    args: EngineArgs,
    documents: Sequence[Document] | Sequence[PromptedText],
    grid: GridArgs,
    on_progress: OnStage = unseen,
    source: str = "text",
) -> Evaluation:
    """Measure every setting of `grid` over `documents`; the first run is the unquantized one.

    `source` names the documents, for reports. `on_progress(what, done, total)` counts tokens, of
    all settings, by kind of work. Raises
    ConfigError for bad options and documents before weights are read, CheckpointError for the
    model.
    """
    begin = time.perf_counter()
    opened = open_model(args)
    plain = plain_config(opened)
    prompted = any(isinstance(document, PromptedText) for document in documents)
    names = _names(args, grid, opened)
    check_schemes(opened, grid.schemes, args.quantization)
    others = [open_other(opened, folder) for folder in grid.folders]
    chosen = None if names else opened.resolve(args)
    states = _states(opened, plain, chosen, grid)
    parts, length = _cut(opened, documents, grid, plain.max_model_len)
    static: list[str] = []  # whose scales have to be measured
    if not opened.kv_scales.usable:
        static = [name for name in names if name in STATIC]
    if static or grid.weights:
        require_native(opened.model, args.model, "measuring its static scales, or other weights,")
    samples = _samples(opened, grid, length) if static else []
    longest = length
    if grid.speed:
        longest = max(length, *contexts_of(opened, plain))
    with opened.threads(plain):
        eight = plain
        if names and names != ("e5m2",):
            eight = _resolved(opened, kv_cache_dtype="fp8", kv_scales="dynamic")
        decoder = load_for(opened, [plain, chosen or eight], longest)
        calibrated = Measured()
        if static:
            assert isinstance(decoder, Decoder), "others are refused above"
            pool = pool_for(opened, decoder, plain, max(map(len, samples)))
            calibrated = measure_scales(decoder, pool, samples, static, on_progress)
        caches = _caches(opened, plain, eight, names, calibrated.scales)
        if chosen:
            caches = [(_named(chosen.kv), chosen)]
        caches = _apart(plain, caches, states, chosen)
        runs = _runs(opened, decoder, caches, length)
        assert runs[0].probe is not None
        runs[0].probe.magnitudes = Magnitudes(length)
        size = weight_bytes(decoder)
        noise = None
        # Before other weights are loaded, so that they and those in float32 are not held together
        if _measures_noise(opened, plain, size, grid):
            noise = _noise(opened, decoder, plain, parts, partial(on_progress, "measuring noise"))
        by_token = KVCacheConfig(
            opened.device.native_e4m3, Granularity.TOKEN, ScaleSource.DYNAMIC, None
        )
        sixteen = (caches[0][0], plain)
        for scheme in grid.schemes:
            pair = [sixteen, ("token", opened.skipping(replace(plain, kv=by_token)))]
            rounded = load_rounded(opened, plain, scheme, longest)
            runs += _runs(opened, rounded, pair, length, scheme)
        for folder, other in zip(grid.folders, others, strict=True):
            pair = [sixteen, ("token", other.skipping(replace(plain, kv=by_token)))]
            stored = replace(plain, weight_format=other.resolve(other.args).weight_format)
            runs += _runs(
                other, load_for(other, [stored], longest), pair, length, Path(folder).name
            )
        measure(runs, [part.window for part in parts], partial(on_progress, "evaluating"))
        speeds = None
        if grid.speed:
            speeds = time_settings(opened, runs, partial(on_progress, "timing"))
        worst = None
        if grid.per_layer:
            worst = layer_kl(runs, parts, partial(on_progress, "evaluating layer by layer"))
    overview = Overview(
        args=args,
        source=source,
        weight_dtype=opened.weight_dtype(plain),
        weight_bytes=size.layers,
        embedding_bytes=size.embeddings,
        window=length,
        notes=(
            *_note_of_prompts(parts, prompted),
            *_notes(opened, plain, grid, calibrated.scales, samples, length),
        ),
        calibration=_calibration_text(grid, args, samples, length),
        chosen_by_layer=bool(opened.kv_scales.mixed),
        quantized=opened.scheme.weight_format is not None,
        prompted=prompted,
    )
    evaluation = summarize(overview, runs, parts, speeds, worst)
    return replace(
        evaluation,
        noise=noise,
        seconds=time.perf_counter() - begin,
        calibration_seconds=calibrated.forward_seconds,
    )


def _calibration_text(
    grid: GridArgs, args: EngineArgs, samples: Sequence[object], length: int
) -> CalibrationText | None:
    if not samples:
        return None
    data = grid.calibration_data
    if data is None and args.model != "demo":
        data = str(_SHIPPED)
    return CalibrationText(data, len(samples), length)


def _cut(
    opened: OpenModel,
    documents: Sequence[Document] | Sequence[PromptedText],
    grid: GridArgs,
    max_model_len: int,
) -> tuple[list[Part], int]:
    """Return the windows, and the number of tokens that are scored together."""
    prompted = []
    plain = []
    for document in documents:
        if isinstance(document, PromptedText):
            prompted.append(document)
        else:
            plain.append(document)
    if prompted:
        assert not plain, "either all documents have prompts, or none"
        parts = cut_prompted(opened, prompted, grid.window, max_model_len, grid.max_tokens)
        longest = max(1 + len(part.window.token_ids) for part in parts)
        return parts, grid.window or longest
    length = window_length(grid.window, max_model_len)
    return cut_documents(opened, plain, length, grid.max_tokens), length


def _note_of_prompts(parts: Sequence[Part], prompted: bool) -> Iterator[str]:
    if prompted:
        total = sum(part.window.first_scored + 1 for part in parts)
        yield (
            f"Each text follows its prompt: the {total:,} tokens of prompts are context, and not scored."
        )


def _runs(
    opened: OpenModel,
    model: LanguageModel,
    settings: Sequence[Setting],
    length: int,
    weights: str = "as stored",
) -> list[SettingRun]:
    """Return a run of each of `settings` with the weights of `model`, which are called `weights`."""
    runs: list[SettingRun] = []
    for name, config in settings:
        run = cache_run(opened, model, config, length, Probe(opened.model.num_layers))
        runs.append(replace(run, name=name, weights=weights))
    return runs


def _measures_noise(
    opened: OpenModel, plain: EngineConfig, size: WeightBytes, grid: GridArgs
) -> bool:
    """Whether there is noise of 16 bits to measure, and it is asked for or cheap enough."""
    if plain.compute_format is Format.FLOAT32 or opened.model.foreign is not None:
        return False
    in_float32 = size.total * Format.FLOAT32.bytes // plain.compute_format.bytes
    if grid.noise is None:
        return in_float32 <= NOISE_WEIGHTS
    return grid.noise


def _noise(
    opened: OpenModel,
    decoder: LanguageModel,
    plain: EngineConfig,
    parts: Sequence[Part],
    on_progress: OnProgress,
) -> Noise:
    """Compare the unquantized run with a float32 run of the same weights, over `first_windows`."""
    logger.info("what 16 bits cost by themselves: a float32 run of the same weights")
    precise = open_model(replace(opened.args.with_plain_cache(), dtype=str(Format.FLOAT32)))
    config = plain_config(precise)
    windows = first_windows(parts)
    length = max(len(window.token_ids) for window in windows)
    model = load_for(precise, [config], length)
    run = cache_run(opened, decoder, plain, length)
    measure([cache_run(precise, model, config, length), run], windows, on_progress)
    return Noise(run.mean_kl, len(run.token_kl))


def _states(
    opened: OpenModel, plain: EngineConfig, chosen: EngineConfig | None, grid: GridArgs
) -> list[Setting]:
    """Settings that differ from `plain` in the format of states alone."""
    names = grid.states or ()
    require_names("--states", names, STATES)
    if names and opened.args.state_dtype != "auto":
        raise ConfigError("--states with --state-dtype: both name what is measured; omit one")
    if not opened.model.recurrent:
        if names:
            raise ConfigError(
                f"--states {','.join(names)}: no layer of this model ({opened.model.model_type}) keeps a recurrent "
                "state; omit --states"
            )
        return []
    formats: list[Format | None] = []
    if grid.states is not None:
        for name in names:
            formats.append(opened.device.native_e4m3 if name == "fp8" else Format(name))
    elif chosen is not None or opened.args.state_dtype != "auto":
        formats = [(chosen or opened.resolve(opened.args)).kv.state]
    else:
        formats = [Format.BFLOAT16, Format.INT8, opened.device.native_e4m3]
    settings = []
    for format in formats:
        if format is not plain.kv.state:
            kv = replace(plain.kv, state=format)
            settings.append((f"states {format}", replace(plain, kv=kv)))
    return settings


def _apart(
    plain: EngineConfig,
    caches: Sequence[Setting],
    states: Sequence[Setting],
    chosen: EngineConfig | None,
) -> list[Setting]:
    """`plain`, whose cache is in the compute dtype, the pages of `caches` with its states, and
    `states`; then `chosen` if it is none of these.
    """
    settings = [("float32" if plain.kv.format is Format.FLOAT32 else "16 bits", plain)]
    for name, config in caches:
        if config.kv.format is not plain.kv.format:
            settings.append((name, replace(config, kv=replace(config.kv, state=plain.kv.state))))
    settings += states
    if chosen is not None and all(config.kv.stores != chosen.kv.stores for _, config in settings):
        settings.append((f"{_named(chosen.kv)}, states {chosen.kv.state}", chosen))
    return settings


def _names(args: EngineArgs, grid: GridArgs, opened: OpenModel) -> tuple[str, ...]:
    """Return the caches by name; empty where the engine's options name one."""
    model = opened.model
    names = CACHES if grid.caches is None else grid.caches
    require_names("--caches", names, (*CACHES, *OTHERS))
    if args.names_cache and grid.caches is not None:
        raise ConfigError(
            "--caches with --kv-cache-dtype or --kv-scales: both name what is measured; omit one"
        )
    if args.names_cache:
        return ()
    if grid.caches is None:
        stored = {i: mixer for i, mixer in model.paged.items() if i not in opened.skipped_layers()}
        if not takes_groups(stored, opened.args, opened.device):
            names = tuple(name for name in names if name != "group")
    if names and not model.paged:
        raise ConfigError(
            f"caches of keys and values are compared ({', '.join(names)}), and no layer of this model "
            f"({model.model_type}) stores any; freight bench latency times it"
        )
    if model.foreign is not None and grid.caches is None:
        names = tuple(name for name in names if name not in STATIC)
    return names


def _resolved(opened: OpenModel, **changes: Any) -> EngineConfig:
    """Return the configuration of the engine's options with `changes`."""
    return opened.resolve(replace(opened.args, **changes))


def _caches(
    opened: OpenModel,
    plain: EngineConfig,
    eight: EngineConfig,
    names: Sequence[str],
    scales: dict[str, KVScales | None],
) -> list[Setting]:
    """Return a configuration for each name. A checkpoint's static scales are one, in the place of
    all static names.
    """
    settings: list[Setting] = []
    e4m3 = opened.device.native_e4m3
    unit = KVCacheConfig(e4m3, Granularity.TENSOR, ScaleSource.UNIT, None)
    for name in names:
        if name == "token":
            config = eight
        elif name == "group":
            config = _resolved(opened, kv_cache_dtype="fp8", kv_scales="group")
        elif name == "unit":
            config = replace(eight, kv=unit)
        elif name == "e5m2":
            config = replace(plain, kv=replace(unit, format=Format.E5M2))
        elif name == "int8":
            config = _resolved(opened, kv_cache_dtype="int8", attention_compute="auto")
        elif opened.kv_scales.usable:
            if any(setting == "checkpoint" for setting, _ in settings):
                continue
            name = "checkpoint"
            # a choice by layer has no dtype to ask for
            dtype = "auto" if opened.kv_scales.mixed else "fp8"
            config = _resolved(opened, kv_cache_dtype=dtype, kv_scales="auto")
        elif (measured := scales[name]) is not None:
            granularity = Granularity.CHANNEL if name == "centered" else Granularity(name)
            static = for_variant(measured, e4m3)
            kv = KVCacheConfig(e4m3, granularity, ScaleSource.CALIBRATED, static)
            config = replace(eight, kv=kv)
        else:
            continue
        settings.append((name, opened.skipping(config)))
    return settings


def _named(kv: KVCacheConfig) -> str:
    return scales_name(kv.granularity, kv.scale_source, none=str(kv.format))


def _samples(opened: OpenModel, grid: GridArgs, length: int) -> list[list[int]]:
    data = grid.calibration_data or _SHIPPED

    def tokenizer() -> Tokenizer:
        loaded = opened.load_tokenizer()
        if loaded is None:
            raise ConfigError(
                "calibration text needs a tokenizer; give --calibration-data FILE.jsonl with `input_ids`"
            )
        return loaded

    # As long as what is judged: at positions that no sample has, static scales may clip
    count = max(1, min(SAMPLES, CALIBRATION_TOKENS // length))
    return read_samples(data, count, length, opened.model.vocab_size, tokenizer)


def _notes(
    opened: OpenModel,
    plain: EngineConfig,
    grid: GridArgs,
    scales: dict[str, KVScales | None],
    samples: Sequence[Sequence[int]],
    length: int,
) -> Iterator[str]:
    if samples:
        text = "the calibration text that ships with Freight"
        if grid.calibration_data:
            text = Path(grid.calibration_data).name
        longest = max(map(len, samples))
        yield (
            f"Static scales were measured on {sum(map(len, samples)):,} tokens of {text}, positions 0 to "
            f"{longest - 1:,}."
        )
        if longest < length:
            yield (
                f"The text that is judged also has positions {longest:,} to {length - 1:,}, at which static scales may "
                "clip: give longer samples."
            )
        if grid.calibration_data is None and opened.args.model != "demo":
            yield "For scales that fit your texts, give some of them with --calibration-data FILE."
    if "centered" in scales and scales["centered"] is None:
        yield "Centered keys were not measured: no layer of this model gains from them."
    skipped = sorted(opened.skipped_layers())
    if skipped:
        stay = "stays" if len(skipped) == 1 else "stay"
        layers = listed_layers(skipped, opened.model.num_layers)
        yield f"In every 8-bit cache {layers} {stay} in {plain.kv.format}."
