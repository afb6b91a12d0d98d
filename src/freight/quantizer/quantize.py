"""quantize: an unquantized checkpoint in, a quantized one out.

    freight.quantize("demo", "out", weights="fp8", activations="static", kv_cache="fp8")

In order: settings, headers, data; then the weights once for calibration (if anything is calibrated)
and once for writing. Everything that can be refused is refused before the first computation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from freight.base.terminal import OnStage, unseen
from freight.base.version import version
from freight.checkpoint.headers import Shape
from freight.checkpoint.mxfp4 import StoredExperts, find_experts
from freight.checkpoint.reader import Checkpoint
from freight.checkpoint.writer import require_new, require_own_files
from freight.errors import CheckpointError, ConfigError
from freight.fp8.four_bits import NVFP4_GROUP
from freight.fp8.mxfp4 import GROUP
from freight.fp8.scheme import int4_group
from freight.fp8.weights import BLOCK
from freight.kernels.select import select_kernels
from freight.model.architectures import tensor_names
from freight.model.config.layer import MoEConfig
from freight.model.config.model import ModelConfig
from freight.model.feed_forward.expert_names import separate
from freight.model.mixers.spec import mixer_parts
from freight.model.open import OpenCheckpoint, open_checkpoint, require_native, with_pooling
from freight.model.shapes import tensor_shapes
from freight.model.sources import CheckpointSource, WeightSource
from freight.model.stored import skip_tied_head
from freight.quantizer.calibration import Calibration, calibrate
from freight.quantizer.candidates import candidates
from freight.quantizer.carried import Carried, carried_by
from freight.quantizer.centers import WORTH, LayerCenters
from freight.quantizer.changed_source import ChangedSource
from freight.quantizer.data import Samples, read_samples
from freight.quantizer.kv_budget import KVChoice, as_chosen, choose, split
from freight.quantizer.layer_rounder import FEW_TOKENS, CandidateRounder, LayerRounder, few_tokens
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import (
    head_module,
    ignored_modules,
    keeps_experts,
    layer_modules,
    linear_modules,
    matched_modules,
)
from freight.quantizer.other_parts import (
    in_both_names,
    modules_beside,
    require_unquantized,
    stored_formats,
    tensors_beside,
)
from freight.quantizer.plan import (
    DTYPES,
    Layout,
    QuantizeArgs,
    QuantizePlan,
    Transform,
    WeightScheme,
    plan,
)
from freight.quantizer.report import Report, data_name, digest
from freight.quantizer.rotation import rotation
from freight.quantizer.smoothing import smooth
from freight.quantizer.transformed import Folded, Rotated, Transformed
from freight.quantizer.weight_budget import (
    ChosenMatrices,
    WeightChoice,
    WeightChooser,
    require_choosable,
)
from freight.quantizer.write import Matrices, check_disk_space, rounding_of, write_quantized
from freight.settings.device import DeviceFacts, choose_threads, probe
from freight.settings.engine import EngineArgs, names_of
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")
CANDIDATE_COPIES = 2  # the size of a model's layers in all numbers that a budget chooses from
NOTHING_CALIBRATED = Calibration(
    kv=None,
    kv_finer=None,
    input_scales={},
    num_samples=0,
    num_tokens=0,
    longest=0,
    moving={},
    zeros=(),
)


@dataclass(frozen=True)
class QuantizeResult:
    """What was written, with figures and warnings.

    centers    by layer, with their gains; empty unless requested
    warnings   sentences: scales that had not settled, values that were always zero, experts that no
               token reached, partly ignored merged groups, blocks that other engines refuse
    kv_choice  with a budget: the KV cache by layer, and what it costs
    form       of the checkpoint: a `Layout`, or 'mxfp4' of a model that keeps its experts so
    beside     the number of tensors of other parts than the text model, copied as they are, by the
               name of their dtype
    longest    tokens of the longest sample: the scales have seen no position from there on
    weight_choice  with a budget of weights: those of each layer, and what they cost
    """

    path: Path
    plan: QuantizePlan
    num_samples: int
    num_tokens: int
    bytes_before: int
    bytes_after: int
    centers: tuple[LayerCenters, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    kv_choice: KVChoice | None = None
    form: str = Layout.COMPRESSED_TENSORS
    beside: Mapping[str, int] = field(default_factory=dict)
    longest: int = 0
    weight_choice: WeightChoice | None = None


@dataclass(frozen=True)
class Unquantized:
    """An opened checkpoint with 16- or 32-bit weights, every tensor accounted for.

    carried   the KV scales that it also has; None if it has none
    packed    experts in MXFP4, by the names of their tensors in 16 bits
    transformed  what its tensors become before they are rounded; None: they stay as they are
    unties       whether the head becomes a tensor of its own with it
    """

    checkpoint: Checkpoint
    model: ModelConfig
    name: str
    carried: Carried | None = None
    packed: Mapping[str, StoredExperts] = field(default_factory=dict)
    transformed: Transformed | None = None
    unties: bool = False

    def changed(self, name: str) -> Tensor | None:
        """Return the tensor `name` in float32 if `transformed` changes it."""
        if self.transformed is None:
            return None
        return self.transformed.tensor(
            name, lambda read: self.checkpoint.take(read, self._shapes[read]).float()
        )

    @cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        return tensor_shapes(self.model)

    @property
    def modules_beside(self) -> list[str]:
        """Those of other parts than the text model, by every name: a pattern of what is ignored may
        mean them.
        """
        return in_both_names(
            self.model, modules_beside(tensors_beside(self.checkpoint, self.model))
        )

    def quantized_as(
        self, weights: WeightScheme, layout: Layout, in_16_bits: Collection[str]
    ) -> Unquantized:
        """Return it as it is quantized, with the modules `in_16_bits` left so: experts of one
        tensor for a layer become separate matrices, unless they stay in 16 bits. Raises ConfigError for what a
        model with experts in MXFP4 cannot become.
        """
        if self.packed:
            require_own_form(self, weights, layout)
        separates = weights is not WeightScheme.NONE and not keeps_experts(self.model, in_16_bits)
        if separates and tensor_names(self.model).interleaved:
            return replace(self, model=separate(self.checkpoint, self.model))
        return self

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(
            self.checkpoint.path,
            "calibrate with token ids: a .jsonl file with `input_ids` in each line",
        )

    def calibrate(
        self,
        plan: QuantizePlan,
        samples: Samples,
        ignored: tuple[str, ...],
        on_progress: OnStage = unseen,
        device: str = "auto",
        store: LayerStore | None = None,
    ) -> Calibration:
        """Run the model over `samples` on `device`, as `probe` takes it. With a method that needs
        data the layers are quantized as well, and kept in `store`.
        """
        facts = probe(device)
        kind = str(facts.kind)
        source = self._source(facts)
        kernels = select_kernels("auto", kind)
        rounder = None
        if plan.rounds_by_layer:
            assert store is not None
            rounder = self._rounder(plan, source, ignored, store, kind)
        with choose_threads(None, facts.cores):
            calibration = calibrate(
                self.model, source, kernels, plan, samples, ignored, kind, on_progress, rounder
            )
        if rounder is None:
            return calibration
        few = few_tokens(rounder.store, self.model.num_layers)
        return replace(calibration, few_tokens=few)

    def _rounder(
        self,
        plan: QuantizePlan,
        source: WeightSource,
        ignored: Collection[str],
        store: LayerStore,
        device: str,
    ) -> LayerRounder:
        rounding = rounding_of(plan, self.model)
        parts = (
            plan.method,
            rounding,
            source,
            self._shapes,
            frozenset(ignored),
            store,
            device,
        )
        if plan.budget is None:
            return LayerRounder(*parts)
        roundings = {}
        for candidate in candidates(plan):
            roundings[candidate.name] = replace(rounding, plan=candidate.plan)
        return CandidateRounder(*parts, roundings=roundings)

    def choose_weights(
        self,
        plan: QuantizePlan,
        ignored: Collection[str],
        store: LayerStore,
        halves: tuple[Samples, Samples],
        on_progress: OnStage,
        device: str,
    ) -> WeightChoice:
        """Choose each layer's numbers among those in `store`, within the budget of `plan`."""
        chooser = WeightChooser(
            self.model,
            self._source(probe(device)),
            plan,
            rounding_of(plan, self.model),
            frozenset(ignored),
            store,
            self.engine(device),
        )
        return chooser.choose(halves, on_progress)

    def engine(self, device: str) -> EngineArgs:
        """Return what opens the checkpoint for running it."""
        return EngineArgs(
            model=str(self.checkpoint.path),
            device=device,
            ignore_config_keys=self.model.ignored_keys,
        )

    def prepared(
        self,
        plan: QuantizePlan,
        samples: Samples,
        ignored: tuple[str, ...],
        on_progress: OnStage = unseen,
        device: str = "auto",
        store: LayerStore | None = None,
    ) -> tuple[Unquantized, Calibration]:
        """Return (it with the scales of AWQ or SmoothQuant, what `calibrate` measured of that).

        store   where layers are kept, for a method that needs data
        """
        opened = self
        if plan.method.smooths:
            assert store is not None
            opened = self.smoothed(plan, samples, ignored, on_progress, device, store)
        if not plan.calibrates:
            lengths = [len(ids) for ids in samples]
            measured = replace(
                NOTHING_CALIBRATED,
                num_samples=len(lengths),
                num_tokens=sum(lengths),
                longest=max(lengths),
            )
            return opened, measured
        return opened, opened.calibrate(plan, samples, ignored, on_progress, device, store)

    def smoothed(
        self,
        plan: QuantizePlan,
        samples: Samples,
        ignored: tuple[str, ...],
        on_progress: OnStage,
        device: str,
        store: LayerStore,
    ) -> Unquantized:
        """Return it with the scales that AWQ or SmoothQuant moves between its tensors."""
        facts = probe(device)
        kind = str(facts.kind)
        with choose_threads(None, facts.cores):
            places = smooth(
                self.model,
                self._source(facts),
                select_kernels("auto", kind),
                plan.method,
                rounding_of(plan, self.model),
                samples,
                frozenset(ignored),
                store,
                kind,
                on_progress,
            )
        return replace(self, transformed=Folded.of(places))

    def rotated(self) -> Unquantized:
        """Return it with its channels rotated. Raises ConfigError where nothing can be."""
        turned = rotation(self.model)
        for refusal in turned.refusals:
            logger.warning("--method rotation leaves out %s", refusal)
        model = self.model
        if turned.unties:
            model = replace(model, tie_word_embeddings=False)
        return replace(self, model=model, transformed=Rotated(turned), unties=turned.unties)

    def _source(self, facts: DeviceFacts) -> WeightSource:
        kind = str(facts.kind)
        compute = self.model.checkpoint_format
        source = CheckpointSource(self.checkpoint, compute, compute, kind)
        if self.packed:  # become E4M3 or 16 bits, exactly
            source = replace(
                source, weight_format=facts.native_e4m3, rounds=False, packed=self.packed
            )
        if self.transformed is None:
            return source
        return ChangedSource(source, self.changed, kind)


def open_unquantized(
    model: str,
    revision: str | None = None,
    keep_kv: bool = False,
    ignore_keys: Collection[str] = (),
) -> Unquantized:
    """Open `model` ('demo', a folder or a hub id) for quantizing.

    Raises CheckpointError for one that is quantized already, or lacks tensors, and for one with KV
    scales, unless `keep_kv` is True and its weights are not quantized. KV scales that nothing can
    use are left out of a model whose weights are not quantized, with a line in the log. Experts in MXFP4 are no
    obstacle: so gpt-oss is published. `ignore_keys` of config.json are read over
    (`model.config.keys.check_keys`).
    """
    stored = open_checkpoint(model, revision, ignore_keys)
    require_own_files(stored.checkpoint.path)
    require_native(stored.model, model, "quantizing")
    checkpoint = stored.checkpoint
    # a head that scores is kept as it is, and so is one over the vocabulary
    config = replace(stored.model, pooling=with_pooling(checkpoint, stored.model, "auto").pooling)
    scheme = stored.scheme
    way_out = "quantize the 16-bit model that it was made from"
    invalid = stored.kv_scales.faults
    only_kv = not stored.kv_scales.empty and not _has_quantized_matrix(stored)
    keeps = only_kv and keep_kv and not invalid
    if only_kv and invalid:
        logger.warning(
            "%s: its KV scales are left out, because nothing can use them: %s%s",
            model,
            invalid[0].what,
            "; --kv-cache fp8 measures others" if keep_kv else "",
        )
    elif not keeps:
        if scheme.is_final or scheme.kv_format is not None:
            raise CheckpointError(f"{model} is quantized already ({scheme.description}); {way_out}")
        if not stored.kv_scales.empty:
            raise CheckpointError(f"{model} has KV scales already; {way_out}")
    if scheme.blocks or scheme.decoded:
        logger.warning(
            "%s: its weights are rounded already (%s), and what is quantized stands on the rounded model; the 16-bit "
            "model that it was made from gives better results",
            model,
            scheme.description,
        )
    of_others = tensors_beside(checkpoint, config)
    require_unquantized(checkpoint, of_others)
    if config.tie_word_embeddings:
        skip_tied_head(checkpoint, tensor_names(config).head)
    shapes = tensor_shapes(config)
    packed = find_experts(checkpoint, scheme, shapes)
    unpacked = {name: shape for name, shape in shapes.items() if name not in packed}
    checkpoint.check(unpacked)
    for name, shape in unpacked.items():
        checkpoint.require(name, shape)
    checkpoint.finish(pending=of_others)
    carried = carried_by(stored, model) if keeps else None
    return Unquantized(checkpoint, config, model, carried, packed)


def _has_quantized_matrix(stored: OpenCheckpoint) -> bool:
    """Return whether any matrix is stored in FP8 or INT8, or declared to be in 4 bits. A scheme of
    AutoFP8 that leaves out every matrix declares FP8 and has none.
    """
    if stored.scheme.weight_format is None:
        return False
    if stored.scheme.four_bits:
        return True
    names = tensor_shapes(stored.model).keys() & stored.checkpoint.names
    return any(stored.checkpoint.format_of(name).is_quantized for name in names)


def quantize(
    model: str = "demo",
    out: str | Path = "",
    *,
    revision: str | None = None,
    ignore_config_keys: Sequence[str] = (),
    overwrite: bool = False,
    on_progress: OnStage = unseen,
    **options: Any,
) -> QuantizeResult:
    """Quantize `model` into the new folder `out`; with `overwrite` it may be one that Freight wrote
    before.

    `revision` is a hub model's branch, tag or commit; `ignore_config_keys` names keys of its
    config.json to read over. `options` are the fields of `QuantizeArgs`, named as the flags of
    `freight quantize`. `on_progress(what, done, total)` is called as it goes on. Raises ConfigError
    for settings and data, CheckpointError for the model (NaN during calibration among them),
    CapacityError for a full disk; whatever is raised, `out` is not there, or as it was.

    A model that has KV scales and 16-bit weights keeps them, unless `kv_cache` is given.
    """
    args = QuantizeArgs.from_options(**options)
    decided = plan(args)
    if not str(out):
        raise ConfigError("quantize needs a folder to write: give out")
    require_new(Path(out), overwrite)
    # Scales that are there may stay where nothing is asked of the KV cache
    keeps_kv = (args.kv_cache, args.kv_granularity, args.kv_budget) == (None, None, None)
    keeps_kv = keeps_kv and not args.center
    opened = open_unquantized(str(model), revision, keeps_kv, names_of(ignore_config_keys))
    require_other(opened.checkpoint, Path(out))
    require_walkable(opened, decided)
    _require_dtype(args.dtype, opened)
    opened = opened.quantized_as(
        decided.weights, decided.layout, matched_modules(opened.model, decided.ignore)
    )
    ignored, divided = ignored_modules(
        opened.model, decided.ignore, decided.lm_head, opened.modules_beside
    )
    if opened.carried is None:
        require_any(opened.model, decided, ignored)
    require_blocks(opened.model, decided, ignored)
    require_groups(opened.model, decided, ignored)
    require_integers(opened, decided, ignored)
    copies = 1
    if decided.budget is not None:
        require_choosable(opened.model, decided, ignored)
        copies += CANDIDATE_COPIES
    check_disk_space(opened.checkpoint, Path(out), copies)
    calibration = NOTHING_CALIBRATED
    measured = decided
    if opened.carried is not None:
        measured = replace(decided, kv_granularity=None)
        decided = replace(decided, kv_granularity=opened.carried.granularity)
    choice = None
    device = args.device or "auto"
    if measured.method.transform is Transform.ROTATION:
        opened = opened.rotated()
    samples, halves = _data(opened, measured, args.calibration_data)
    chosen: WeightChoice | None = None
    with _layer_store(opened, measured, halves[0], ignored, Path(out), device) as store:
        if measured.needs_data:
            opened, calibration = opened.prepared(
                measured, halves[0], ignored, on_progress, device, store
            )
            require_gain(measured, calibration)
        if measured.kv_budget is not None:
            engine = opened.engine(device)
            choice = choose(engine, measured.kv_budget, calibration, halves, on_progress)
            calibration = as_chosen(calibration, choice)
            decided = replace(decided, kv_granularity=choice.uniform)
        carried = opened.carried
        if carried is not None:
            calibration = replace(calibration, kv=carried.coarse, kv_finer=carried.finer)
        layers: Matrices | None = store
        plans: Mapping[str, QuantizePlan] = {}
        if measured.budget is not None:
            assert store is not None
            chosen = opened.choose_weights(measured, ignored, store, halves, on_progress, device)
            matrices = ChosenMatrices.of(chosen, measured, store)
            layers = matrices
            plans = matrices.plans
            ignored = (*ignored, *chosen.in_16_bits)
        report = None
        if measured.needs_data:
            data = data_name(args.calibration_data or "calibration.txt")
            report = Report(
                opened.name, opened.model, decided, data, samples, calibration, store, chosen
            )
        result = write(
            opened,
            decided,
            ignored,
            divided,
            calibration,
            Path(out),
            on_progress,
            overwrite,
            layers,
            plans,
            report,
        )
    return replace(result, kv_choice=choice, weight_choice=chosen)


def _data(
    opened: Unquantized, plan: QuantizePlan, data: object
) -> tuple[Samples, tuple[Samples, Samples]]:
    """Return (all samples, those to measure and choose by and those to verify with). Without a budget
    both are all of them; nothing where no data is needed.
    """
    if not plan.needs_data:
        return [], ([], [])
    samples = load_samples(opened, plan, data)
    if plan.budget is None and plan.kv_budget is None:
        return samples, (samples, samples)
    return samples, split(samples, "--budget" if plan.budget else "--kv-budget")


def _layer_store(
    opened: Unquantized,
    plan: QuantizePlan,
    samples: Samples,
    ignored: Collection[str],
    out: Path,
    device: str,
) -> AbstractContextManager[LayerStore | None]:
    """Return where the layers of a method are kept; None for a method that needs no data."""
    if not plan.rounds_by_layer and not plan.method.smooths:
        return nullcontext()
    return LayerStore(out, run_of(opened, plan, samples, ignored, device))


def run_of(
    opened: Unquantized,
    plan: QuantizePlan,
    samples: Samples,
    ignored: Collection[str],
    device: str = "auto",
) -> dict[str, str]:
    """Return what decides the layers of a run on `device`, as `LayerStore` compares it."""
    kind = str(probe(device).kind)
    return {
        "freight": version(),
        "torch": torch.__version__,
        "kernels": f"{kind} {select_kernels('auto', kind).name}",
        "threads": str(torch.get_num_threads()),
        "model": json.dumps(opened.checkpoint.identity),
        "plan": str(plan),
        "left_out": " ".join(ignored),
        "tokens": digest(samples),
    }


def require_other(checkpoint: Checkpoint, out: Path) -> None:
    """Raise ConfigError if the output is the folder of the model itself."""
    if out.is_dir() and out.samefile(checkpoint.path):
        raise ConfigError(f"the output {out} is the model itself; name another")


def require_walkable(opened: Unquantized, plan: QuantizePlan) -> None:
    """Raise ConfigError for what is measured on prompts of a model that does not generate: its inputs
    where tokens see those after them, and the probabilities of tokens where it gives none.
    """
    if opened.model.attends_both_ways and (plan.needs_data or plan.method.transform is not None):
        what = plan.needed_by or f"--method {plan.method}"
        raise ConfigError(
            f"{what}: tokens of {opened.name} see those after them ({opened.model.architecture}), and calibration is "
            "implemented for models whose tokens see those before them; omit it: weights are rounded to nearest"
        )
    budget = "--budget" if plan.budget else "--kv-budget"
    if not opened.model.has_head and (plan.budget or plan.kv_budget):
        raise ConfigError(
            f"{budget} compares probabilities of tokens, and {opened.name} has no matrix of the vocabulary; omit it"
        )


def require_own_form(opened: Unquantized, weights: WeightScheme, layout: Layout) -> None:
    """Raise ConfigError for anything but KV scales of a model with experts in MXFP4:
    `quant_method` mxfp4, by which engines know them, says that all else is in 16 bits, and no other
    declaration has these tensors together with FP8.
    """
    if weights is not WeightScheme.NONE:
        raise ConfigError(
            f"--weights {weights}: the experts of {opened.name} are in MXFP4, and beside them no declaration has FP8 "
            "weights; calibrate the KV cache alone (--weights none --kv-cache fp8), or quantize a copy in 16 bits: "
            "transformers loads it with Mxfp4Config(dequantize=True), and save_pretrained(…, "
            "save_original_format=False) writes it"
        )
    if layout is not Layout.COMPRESSED_TENSORS:
        raise ConfigError(
            f"--format {layout}: {opened.name} keeps the form of its experts in MXFP4 (quant_method mxfp4), and KV "
            "scales are added to it; omit --format"
        )


def _require_dtype(dtype: str | None, opened: Unquantized) -> None:
    """Raise ConfigError for a dtype other than the model's: quantizing converts nothing but what
    becomes FP8.
    """
    stored = opened.model.checkpoint_format
    if dtype is not None and DTYPES.get(dtype, stored) is not stored:
        raise ConfigError(
            f"--dtype {dtype}: {opened.name} is stored in {stored}, and what is not quantized stays in it; omit --dtype"
        )


def require_any(model: ModelConfig, plan: QuantizePlan, ignored: Collection[str]) -> None:
    """Raise ConfigError if every module is ignored and nothing else is to be quantized."""
    quantized = {*linear_modules(model), head_module(model)}.difference(ignored)
    if plan.kv_granularity is None and not quantized:
        raise ConfigError(
            f"--ignore {' '.join(plan.ignore)} leaves no module to quantize; ignore fewer"
        )


def require_blocks(model: ModelConfig, plan: QuantizePlan, ignored: Collection[str]) -> None:
    """Raise ConfigError for experts whose blocks of scales would span gate and up, which engines
    compute as one matrix with one scale for a block; and for matrices that engines take apart by
    head, where blocks would span heads.
    """
    if plan.weights is not WeightScheme.BLOCK:
        return
    left_out = frozenset(ignored)
    _require_whole_heads(model, left_out)
    for layer, modules in zip(model.layers, layer_modules(model), strict=True):
        mlp = layer.feed_forward
        experts = modules.experts
        if not isinstance(mlp, MoEConfig) or experts is None:
            continue
        merged = len(mlp.up_sizes) > 1 and not left_out.issuperset(experts.gate_up)
        if merged and mlp.intermediate_size % BLOCK:
            raise ConfigError(
                f"--weights fp8-block: {experts.named(0)} has an intermediate size of {mlp.intermediate_size}, no "
                f"multiple of {BLOCK}, so that a block would span gate and up; use --weights fp8-channel"
            )


def require_groups(model: ModelConfig, plan: QuantizePlan, ignored: Collection[str]) -> None:
    """Raise ConfigError for a matrix whose inputs groups do not divide."""
    if not plan.weights.in_four_bits or plan.budget is not None:
        return  # a budget chooses among the groups that divide
    is_int4 = plan.weights is WeightScheme.INT4
    sizes = {WeightScheme.INT4: plan.group_size, WeightScheme.NVFP4: NVFP4_GROUP}
    size = sizes.get(plan.weights, GROUP)
    for name, shape in _quantized_shapes(model, ignored):
        columns = shape[-1]
        if columns % size == 0:
            continue
        way_out = f"leave it out (--ignore {name})"
        smaller = int4_group(columns, size)
        if is_int4 and smaller:
            way_out = f"use --group-size {smaller}"
        raise ConfigError(
            f"--weights {plan.weights}: {name} has {columns} inputs, which groups of {size} do not divide; {way_out}"
        )


def require_integers(opened: Unquantized, plan: QuantizePlan, ignored: Collection[str]) -> None:
    """Raise ConfigError for what AutoGPTQ's and AutoAWQ's layouts cannot have: KV scales, matrices
    whose outputs int32 do not divide, and in AWQ a module that the name of one in 16 bits is part of.
    """
    if not plan.layout.of_integers:
        return
    way_out = "choose --format compressed-tensors"
    if opened.carried is not None:
        raise ConfigError(
            f"--format {plan.layout}: {opened.name} has KV scales, which that format has no place for; {way_out}"
        )
    for name, shape in _quantized_shapes(opened.model, ignored):
        if shape[0] % 8:
            raise ConfigError(
                f"--format {plan.layout}: {name} has {shape[0]} outputs, no multiple of 8, of which an int32 has the "
                f"zero points; leave it out (--ignore {name}), or {way_out}"
            )
        if plan.layout is Layout.AWQ:
            for other in ignored:
                if other in name:
                    raise ConfigError(
                        f"--format awq: {other} stays in 16 bits, and engines then leave out {name} too, whose name "
                        f"has it in it; leave out both, or {way_out}"
                    )


def _require_whole_heads(model: ModelConfig, ignored: Collection[str]) -> None:
    """Raise ConfigError for a matrix whose rows are brought into another order at load
    (`MixerParts.whole`).
    """
    names = tensor_names(model)
    for index, layer in enumerate(model.layers):
        for module, sizes in mixer_parts(layer.mixer, model.hidden_size, names).whole.items():
            name = names.layer.format(index) + module
            uneven = [size for size in sizes if size % BLOCK]
            if uneven and name not in ignored:
                raise ConfigError(
                    f"--weights fp8-block: {name} has parts of {uneven[0]} rows for each head, no multiple of {BLOCK}, "
                    "so that a block would span parts that engines take apart; use --weights fp8-channel"
                )


def require_gain(plan: QuantizePlan, calibration: Calibration) -> None:
    """Raise ConfigError if centers were requested and no layer gains enough from one."""
    centers = calibration.centers
    if plan.center and all(layer.k is None for layer in centers):
        most = max(layer.k_gain for layer in centers)
        raise ConfigError(
            f"--center gains nothing on this model: in the layer where it gains most, it would divide the mean squared "
            f"error of scores by {most:.2f}; at least {WORTH} is required; omit it"
        )


def load_samples(opened: Unquantized, plan: QuantizePlan, data: object) -> Samples:
    """Read the calibration samples; for 'demo' from the text that ships for this. Raises ConfigError
    where there is none.
    """
    if data is None:
        if opened.name != "demo":
            raise ConfigError(
                f"{plan.needed_by} needs --calibration-data FILE: text, .jsonl, .parquet or a data set of the hub "
                "(owner/name), like what the model will be used for"
            )
        data = opened.checkpoint.path / "calibration.txt"
    length = min(plan.max_seq_len, opened.model.max_position_embeddings)
    return read_samples(
        data, plan.num_samples, length, opened.model.vocab_size, opened.load_tokenizer
    )


def write(
    opened: Unquantized,
    plan: QuantizePlan,
    ignored: tuple[str, ...],
    divided: tuple[str, ...],
    calibration: Calibration,
    out: Path,
    on_progress: OnStage = unseen,
    overwrite: bool = False,
    layers: Matrices | None = None,
    plans: Mapping[str, QuantizePlan] = MappingProxyType({}),
    report: Report | None = None,
) -> QuantizeResult:
    """Write the checkpoint and its report, and collect the warnings. plans: of modules that have others
    than `plan`.
    """
    warnings = _warnings(opened.model, plan, ignored, divided, calibration)
    before, after = write_quantized(
        opened.checkpoint,
        opened.model,
        plan,
        ignored,
        calibration,
        out,
        on_progress,
        opened.packed,
        overwrite=overwrite,
        layers=layers,
        change=opened.changed,
        unties=opened.unties,
        plans=plans,
        report={} if report is None else report.files(warnings),
    )
    return QuantizeResult(
        out,
        plan,
        calibration.num_samples,
        calibration.num_tokens,
        before,
        after,
        calibration.centers,
        tuple(warnings),
        form="mxfp4" if opened.packed else str(plan.layout),
        beside=stored_formats(opened.checkpoint, opened.model),
        longest=calibration.longest,
    )


def _warnings(
    model: ModelConfig,
    plan: QuantizePlan,
    ignored: Collection[str],
    divided: Sequence[str],
    calibration: Calibration,
) -> list[str]:
    warnings = []
    for name, growth in calibration.moving.items():
        warnings.append(
            f"{name}: the scale still grew by {growth - 1:.0%} in the last quarter of the data; use more of it"
        )
    for name in calibration.zeros:
        warnings.append(f"{name}: only zeros were seen, so its scale is 1.0")
    by_layer: dict[str, list[str]] = {}
    for name in calibration.unseen:
        by_layer.setdefault(name.rpartition(".")[0], []).append(name)
    for experts in by_layer.values():
        warnings.append(
            f"no token of the calibration data reached {', '.join(experts)}: input scales are those of the layer's "
            "other experts; use more data, or more like what the model will be used for"
        )
    if calibration.few_tokens:
        worst = min(calibration.few_tokens.values())
        warnings.append(
            f"fewer than {FEW_TOKENS} tokens of the calibration data reached {len(calibration.few_tokens)} inputs of "
            f"modules (the least: {worst}), such as {next(iter(calibration.few_tokens))}: their rounding stands on "
            "little; use more data, or more like what the model will be used for"
        )
    if plan.lm_head and plan.method.gptq:
        warnings.append(
            f"--method {plan.method} is for the matrices of layers: {head_module(model)} is rounded to nearest"
        )
    if divided:
        warnings.append(
            f"{divided[0]} is quantized although --ignore leaves out a module that engines merge it with; those that "
            "do may refuse the checkpoint: ignore all of q, k, v or gate, up"
        )
    return warnings + _ragged_blocks(model, plan, ignored)


def _ragged_blocks(model: ModelConfig, plan: QuantizePlan, ignored: Collection[str]) -> list[str]:
    """Return a sentence about the first module that blocks do not cover evenly, if there is one."""
    if plan.weights is not WeightScheme.BLOCK:
        return []
    for name, shape in _quantized_shapes(model, ignored):
        if any(size % BLOCK for size in shape):
            return [
                f"{name} is {list(shape)}, which blocks of {BLOCK} do not divide: transformers may fail to load such "
                "a matrix, and vLLM refuses it among q, k, v and gate, up; --weights fp8-channel has no such limit"
            ]
    return []


def _quantized_shapes(model: ModelConfig, ignored: Collection[str]) -> Iterator[tuple[str, Shape]]:
    """Yield the modules that are quantized and have a matrix, with its shape."""
    shapes = tensor_shapes(model)
    left_out = frozenset(ignored)
    for name in (*linear_modules(model), head_module(model)):
        shape = shapes.get(f"{name}.weight")
        if name not in left_out and shape is not None:
            yield name, shape
