"""Weights chosen by layer within a budget: INT4 in one of its groups, E4M3, or 16 bits.

The samples are split, as for a cache's budget (`quantizer.kv_budget`). On one half every layer is
rounded in each of the candidates by the same Hessians, and each is measured with that layer alone
rounded (`quantizer.weight_sensitivity`). A choice is predicted to cost the sum of its layers. Choices
begin with the fewest bytes, and each next one improves the layer that gains most per byte. The first
is taken that measures within the budget as a whole on that half; where it does not on the other,
which nothing was chosen by, predictions are scaled by what was measured, and the search goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from freight.base.terminal import OnStage
from freight.cache.pool import allocate_pool
from freight.checkpoint.headers import Shape
from freight.errors import CheckpointError, ConfigError
from freight.fp8.cast import torch_dtype
from freight.model.config.model import ModelConfig
from freight.model.decoder import DecoderLayer
from freight.model.layers.rope import build_ropes
from freight.model.loader import build_decoder, model_builder
from freight.model.open import OpenModel, open_model
from freight.model.shapes import tensor_shapes
from freight.model.sources import WeightSource
from freight.quantizer.budget import Budget, BudgetKind
from freight.quantizer.candidates import SIXTEEN_BITS, Candidate, candidates, fitting, named_in
from freight.quantizer.changed_source import ChangedSource
from freight.quantizer.declare import stored_tensors
from freight.quantizer.kv_budget import Option, cheapest
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import layer_modules
from freight.quantizer.plan import QuantizePlan, WeightScheme
from freight.quantizer.rounding import RoundedMatrix, Rounding
from freight.quantizer.sensitivity import Meter, Samples, at_most
from freight.quantizer.walk import kv_sources
from freight.quantizer.weight_sensitivity import Text, WeightMeter
from freight.settings.engine import EngineArgs, EngineConfig

MEASURED = 2048  # tokens, at most, with which each layer is measured in each candidate
VERIFIED = 8192  # tokens of each half, at most, with which choices are


@dataclass(frozen=True)
class ChosenLayer:
    """What one layer became.

    name      of the candidate, or `SIXTEEN_BITS`
    modules   its Linear modules that are not ignored
    num_bytes  of their matrices, scales included
    kl        by candidate, of this layer alone
    """

    name: str
    modules: tuple[str, ...]
    num_bytes: int
    kl: Mapping[str, float]


@dataclass(frozen=True)
class WeightChoice:
    """What was chosen and measured. KL in nats per token, against the model in 16 bits.

    bits               of a weight of the Linear modules, scales included
    bytes_unquantized  of these modules in 16 bits
    kl_chosen          measured as a whole on the text by which was chosen
    kl_verified        on the other text
    num_measured       tokens with which layers were measured alone
    """

    budget: Budget
    layers: tuple[ChosenLayer, ...]
    bits: float
    num_bytes: int
    bytes_unquantized: int
    predicted_kl: float
    kl_chosen: float
    kl_verified: float
    num_measured: int
    num_chosen: int
    num_verified: int

    @property
    def in_16_bits(self) -> tuple[str, ...]:
        """The modules that stay in 16 bits."""
        left: list[str] = []
        for layer in self.layers:
            if layer.name == SIXTEEN_BITS:
                left += layer.modules
        return tuple(left)


@dataclass(frozen=True)
class ChosenMatrices:
    """The matrices of a choice, and the plan of each, by module."""

    store: LayerStore
    names: Mapping[str, str]
    plans: Mapping[str, QuantizePlan]

    def matrix(self, module: str) -> RoundedMatrix | None:
        """Return the matrix of a module; None if it stays in 16 bits."""
        name = self.names.get(module)
        return None if name is None else self.store.matrix(named_in(name, module))

    @staticmethod
    def of(choice: WeightChoice, plan: QuantizePlan, store: LayerStore) -> ChosenMatrices:
        """Return those of `choice`, made by `plan`, which has the budget."""
        by_name = {candidate.name: candidate.plan for candidate in candidates(plan)}
        names: dict[str, str] = {}
        for layer in choice.layers:
            if layer.name != SIXTEEN_BITS:
                names |= dict.fromkeys(layer.modules, layer.name)
        plans = {module: by_name[name] for module, name in names.items()}
        return ChosenMatrices(store, names, plans)


def upgrades(kl: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]]) -> list[Option]:
    """Return choices from the fewest bytes to the last candidate everywhere, each with one layer better
    than the one before: that which lowers the sum most per byte.

    kl, sizes: [layers][candidates], the divergence and bytes of one layer; infinity where it cannot
    be had. Of the choices of their sizes these have the least sum (each layer's candidates on its
    lower convex hull, in the order of their slopes). The last candidate costs 0 and can always be had.
    """
    choice = []
    steps = []  # (gain per byte, layer, place in its hull)
    hulls = []
    for index, (costs, of_layer) in enumerate(zip(kl, sizes, strict=True)):
        hull = _hull(costs, of_layer)
        hulls.append(hull)
        choice.append(hull[0])
        for place in range(1, len(hull)):
            before = hull[place - 1]
            after = hull[place]
            gain = (costs[before] - costs[after]) / (of_layer[after] - of_layer[before])
            steps.append((-gain, index, place))
    front = [_option(choice, kl, sizes)]
    for _, index, place in sorted(steps):
        choice[index] = hulls[index][place]
        front.append(_option(choice, kl, sizes))
    return front


def _hull(costs: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Return the candidates that are worth their bytes for some price of a byte, by rising bytes."""
    hull: list[int] = []
    for index in sorted(range(len(costs)), key=lambda i: (sizes[i], costs[i])):
        if costs[index] == float("inf") or (hull and costs[index] >= costs[hull[-1]]):
            continue
        while len(hull) > 1:
            first = hull[-2]
            middle = hull[-1]
            through = (costs[first] - costs[index]) / (sizes[index] - sizes[first])
            so_far = (costs[first] - costs[middle]) / (sizes[middle] - sizes[first])
            if so_far > through:
                break
            hull.pop()
        hull.append(index)
    return hull


def _option(
    choice: Sequence[int], kl: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]]
) -> Option:
    num_bytes = sum(of_layer[i] for of_layer, i in zip(sizes, choice, strict=True))
    cost = sum(costs[i] for costs, i in zip(kl, choice, strict=True))
    return Option(num_bytes, cost, tuple(choice))


def within(
    front: Sequence[Option], limit: float, measures: Sequence[Callable[[Option], float]]
) -> int:
    """Find the index of an option that every one of `measures` says costs at most `limit`: the cheapest
    by the first of them, or a dearer one.

    Where another measures more, the next option is the first whose prediction, times what was
    measured over what was predicted, keeps within the limit. The last one is taken unmeasured.
    """
    index = cheapest(front, limit, measures[0])
    while index < len(front) - 1:
        option = front[index]
        worst = max(measure(option) for measure in measures)
        if worst <= limit:
            break
        target = option.predicted_kl * limit / worst
        index += 1
        while index < len(front) - 1 and front[index].predicted_kl > target:
            index += 1
    return index


def require_choosable(config: ModelConfig, plan: QuantizePlan, ignored: Collection[str]) -> None:
    """Raise CheckpointError for a model of which layers cannot be measured alone, ConfigError for fewer
    bits than the fewest that its matrices can have.
    """
    for index, source in enumerate(kv_sources(config)):
        if source != index:
            raise CheckpointError(
                f"layer {index} reads the keys and values of layer {source} (num_kv_shared_layers): a budget measures "
                "each layer alone, which is not implemented for it; omit --budget and choose --weights"
            )
    budget = plan.budget
    assert budget is not None
    if budget.kind is BudgetKind.BITS:
        least = _least_bits(config, plan, ignored)
        if least > budget.limit:
            raise _too_few(budget, least)


def _least_bits(config: ModelConfig, plan: QuantizePlan, ignored: Collection[str]) -> float:
    """Return the bits of a weight with every layer in its first candidate, but for the few that a matrix
    has for all of its weights.
    """
    shapes = tensor_shapes(config)
    num_bits = 0.0
    num_weights = 0
    for modules in chosen_modules(config, ignored):
        if not modules:
            continue
        first = fitting(candidates(plan), shapes, modules)[0].plan
        bits = 8.0
        if first.weights is WeightScheme.INT4:
            bits = 4 + 16 / first.group_size
        count = sum(math.prod(shapes[f"{module}.weight"]) for module in modules)
        num_weights += count
        num_bits += bits * count
    return num_bits / num_weights


def _too_few(budget: Budget, least: float) -> ConfigError:
    return ConfigError(
        f"--budget {budget}: the fewest bits that this model's matrices can have is {least:.3f} a weight (a layer "
        "has INT4 only where a group divides the inputs of all of its matrices); give more"
    )


def chosen_modules(config: ModelConfig, ignored: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the modules of each layer that are not ignored."""
    by_layer = []
    for layer in layer_modules(config):
        modules: list[str] = []
        for group in layer.groups:
            modules += [module for module in group if module not in ignored]
        by_layer.append(tuple(modules))
    return tuple(by_layer)


@dataclass(frozen=True)
class WeightChooser:
    """A model whose layers are rounded in every candidate.

    source     of its unquantized weights
    rounding   of `plan`, which has the budget
    ignored    modules that stay in 16 bits whatever the budget
    engine     what opens the checkpoint
    """

    model: ModelConfig
    source: WeightSource
    plan: QuantizePlan
    rounding: Rounding
    ignored: Collection[str]
    store: LayerStore
    engine: EngineArgs

    @property
    def offered(self) -> tuple[Candidate, ...]:
        """The candidates beside 16 bits."""
        return candidates(self.plan)

    def choose(self, halves: tuple[Samples, Samples], say: OnStage) -> WeightChoice:
        """Measure and choose. Raises ConfigError for fewer bits than the fewest that can be had, and
        where every layer would stay in 16 bits.
        """
        longest = max(len(ids) for half in halves for ids in half)
        opened = open_model(replace(self.engine, max_model_len=longest))
        config = opened.resolve(opened.args)
        with opened.threads(config):
            return self._measured(self._meter(opened, config, longest), halves, say)

    def _meter(self, opened: OpenModel, config: EngineConfig, longest: int) -> WeightMeter:
        """Load the model in 16 bits, for samples of at most `longest`."""
        kernels = opened.kernels(config)
        device = config.device
        decoder = build_decoder(self.model, self.source, kernels, longest, device)
        spec = opened.cache_spec(config)
        num_blocks = spec.blocks_of(longest)
        pool = allocate_pool(spec, config.kv, num_blocks, kernels, device, decoder.rotaries)
        ropes = build_ropes(self.model.ropes, longest, device)

        def build(index: int, candidate: int) -> DecoderLayer | None:
            source = self._rounded(index, candidate, device)
            if source is None:
                return None
            return model_builder(self.model, source, kernels).layer(index, ropes)

        return WeightMeter(Meter(decoder, pool, (), device), build)

    def _measured(
        self, meter: WeightMeter, halves: tuple[Samples, Samples], say: OnStage
    ) -> WeightChoice:
        budget = self.plan.budget
        assert budget is not None
        num_candidates = len(self.offered)
        measured = meter.text(at_most(halves[0], MEASURED))
        alone = meter.by_layer(
            measured, num_candidates, lambda done, total: say("measuring layers", done, total)
        )
        chosen = meter.text(at_most(halves[0], VERIFIED))
        other = meter.text(at_most(halves[1], VERIFIED))
        sizes = self._sizes()
        front = upgrades([[*costs, 0.0] for costs in alone], sizes)

        expected = len(front).bit_length() + 2  # by halves, and both texts at the end
        tried: list[Option] = []

        @cache
        def kl(option: Option, text: Text) -> float:
            say("measuring choices", min(len(tried), expected - 1), expected)
            tried.append(option)
            choice = [None if i == num_candidates else i for i in option.choice]
            return meter.whole(choice, text)

        if budget.kind is BudgetKind.BITS:
            option = self._in_bits(front, budget)
        else:
            measures = (lambda option: kl(option, chosen), lambda option: kl(option, other))
            option = front[within(front, budget.limit, measures)]
        if all(i == num_candidates for i in option.choice):
            raise ConfigError(
                f"--budget {budget}: every layer would stay in 16 bits; give a larger one"
            )
        choice = WeightChoice(
            budget=budget,
            layers=self._layers(option, alone, sizes),
            bits=option.num_bytes * 8 / self._num_weights,
            num_bytes=option.num_bytes,
            bytes_unquantized=sum(size[-1] for size in sizes),
            predicted_kl=option.predicted_kl,
            kl_chosen=kl(option, chosen),
            kl_verified=kl(option, other),
            num_measured=measured.num_tokens,
            num_chosen=chosen.num_tokens,
            num_verified=other.num_tokens,
        )
        say("measuring choices", expected, expected)
        return choice

    def _in_bits(self, front: Sequence[Option], budget: Budget) -> Option:
        """Return the last option of at most so many bits a weight."""
        limit = budget.limit * self._num_weights
        fitting_options = [option for option in front if option.num_bytes * 8 <= limit]
        if not fitting_options:
            raise _too_few(budget, front[0].num_bytes * 8 / self._num_weights)
        return fitting_options[-1]

    def _layers(
        self, option: Option, alone: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]]
    ) -> tuple[ChosenLayer, ...]:
        names = [candidate.name for candidate in self.offered]
        layers = []
        for index, candidate in enumerate(option.choice):
            costs = {}
            for name, cost in zip(names, alone[index], strict=True):
                if cost != float("inf"):
                    costs[name] = cost
            name = [*names, SIXTEEN_BITS][candidate]
            layers.append(ChosenLayer(name, self._modules[index], sizes[index][candidate], costs))
        return tuple(layers)

    @cached_property
    def _modules(self) -> tuple[tuple[str, ...], ...]:
        return chosen_modules(self.model, self.ignored)

    @cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        return tensor_shapes(self.model)

    @cached_property
    def _num_weights(self) -> int:
        total = 0
        for modules in self._modules:
            for module in modules:
                total += math.prod(self._shapes[f"{module}.weight"])
        return total

    def _rounded(self, index: int, candidate: int, device: str) -> WeightSource | None:
        """Return the source in which layer `index` has a candidate's numbers; None if it has none."""
        if not self._modules[index]:
            return None
        chosen = self.offered[candidate]
        rounding = replace(self.rounding, plan=chosen.plan)
        tensors = {}
        for module in self._modules[index]:
            matrix = self.store.matrix(named_in(chosen.name, module))
            if matrix is None:
                return None
            tensors[f"{module}.weight"] = rounding.grid(matrix).values(matrix.codes)
        return ChangedSource(self.source, tensors.get, device)

    def _sizes(self) -> list[list[int]]:
        """Return the bytes of each layer's matrices: [layers][candidates and 16 bits]."""
        width = torch_dtype(self.model.checkpoint_format).itemsize
        sizes = []
        for index in range(self.model.num_layers):
            of_layer = [0] * (len(self.offered) + 1)
            for module in self._modules[index]:
                of_layer[-1] += math.prod(self._shapes[f"{module}.weight"]) * width
                for place, candidate in enumerate(self.offered):
                    matrix = self.store.matrix(named_in(candidate.name, module))
                    if matrix is not None:
                        of_layer[place] += self._num_bytes(candidate, module, matrix)
            sizes.append(of_layer)
        return sizes

    def _num_bytes(self, candidate: Candidate, module: str, matrix: RoundedMatrix) -> int:
        format = self.rounding.scale_format
        stored = stored_tensors(candidate.plan, module, matrix, None, format)
        return sum(tensor.nbytes for tensor in stored.values())
