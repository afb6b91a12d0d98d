"""The report that is written beside a model that was quantized by data: what was asked for, what the
data was, what each layer became and what that costs.

`freight_quantization.json` has all of it, `freight_quantization.md` a page for people. No engine reads
them. Neither has a date or a place of this machine: a run that is repeated writes the same files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from freight.base.fields import JsonObject
from freight.base.version import version
from freight.checkpoint.writer import REPORT
from freight.model.config.model import ModelConfig
from freight.quantizer.calibration import Calibration
from freight.quantizer.candidates import SIXTEEN_BITS
from freight.quantizer.choice_words import (
    choice_content,
    choice_lines,
    least_and_most,
    runs,
    span,
)
from freight.quantizer.data import Samples
from freight.quantizer.hub_data import is_hub_id
from freight.quantizer.layer_record import GroupRecord, RoundingError
from freight.quantizer.layer_store import LayerStore
from freight.quantizer.modules import LayerModules, layer_modules
from freight.quantizer.plan import QuantizePlan, Transform, WeightScheme
from freight.quantizer.weight_budget import WeightChoice

JSON_FILE, PAGE_FILE = REPORT
IN_PYTHON = "samples given in Python"


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    weights   its numbers: a scheme, or a candidate of a budget
    num_tokens  that went through it
    groups    of modules that share an input; empty where inputs were not looked at
    experts   tokens that reached each expert, by its name
    kl        with a budget: of each candidate in this layer alone
    """

    index: int
    weights: str
    method: str
    num_tokens: int
    groups: tuple[GroupRecord, ...]
    experts: Mapping[str, int]
    kl: Mapping[str, float]

    def error(self, group: GroupRecord) -> RoundingError | None:
        """Return what rounding takes of a group's outputs; None where it was not measured."""
        return group.errors.get(self.weights)

    @property
    def errors(self) -> list[RoundingError]:
        """Those of all groups that have one."""
        return [error for group in self.groups if (error := self.error(group)) is not None]


@dataclass(frozen=True)
class Report:
    """What a run did, before its warnings are known.

    data     the name of the calibration data, without the folder of a file
    samples  all token ids of it that were used, to verify with too
    """

    name: str
    model: ModelConfig
    plan: QuantizePlan
    data: str
    samples: Samples
    calibration: Calibration
    store: LayerStore | None = None
    choice: WeightChoice | None = None

    def files(self, warnings: Sequence[str]) -> dict[str, bytes]:
        """Return the files of the report, by name."""
        layers = list(self.layers())
        page = "\n".join(self._page(layers, warnings)) + "\n"
        content = self._content(layers, warnings)
        return {
            JSON_FILE: (json.dumps(content, indent=1) + "\n").encode(),
            PAGE_FILE: page.encode(),
        }

    def layers(self) -> Iterator[LayerReport]:
        """Yield what is known of each layer."""
        quantized = self.plan.weights is not WeightScheme.NONE
        for index, modules in enumerate(layer_modules(self.model)):
            groups = () if self.store is None else tuple(self.store.groups(index))
            weights = str(self.plan.weights) if quantized else SIXTEEN_BITS
            kl: Mapping[str, float] = {}
            if self.choice is not None:
                weights = self.choice.layers[index].name
                kl = self.choice.layers[index].kl
            yield LayerReport(
                index=index,
                weights=weights,
                method=str(self.plan.method) or "nearest",
                num_tokens=self.calibration.num_tokens,
                groups=groups,
                experts=self._experts(modules, groups),
                kl=kl,
            )

    def _experts(self, modules: LayerModules, groups: Sequence[GroupRecord]) -> dict[str, int]:
        """Return the tokens of each expert of a layer, as far as they were counted."""
        experts = modules.experts
        if experts is None:
            return {}
        by_module = {name: group.num_tokens for group in groups for name in group.modules}
        tokens = {}
        for expert, (gate_up, _) in enumerate(experts.by_expert):
            name = experts.named(expert)
            count = by_module.get(gate_up[0], self.calibration.expert_tokens.get(name))
            if count is not None:
                tokens[name] = count
        return tokens

    def _content(self, layers: Sequence[LayerReport], warnings: Sequence[str]) -> JsonObject:
        of_layers = []
        for layer in layers:
            groups = []
            for group in layer.groups:
                error = layer.error(group)
                groups.append(
                    {
                        "modules": list(group.modules),
                        "num_tokens": group.num_tokens,
                        "error_nearest": None if error is None else error.nearest,
                        "error": None if error is None else error.final,
                    }
                )
            content: dict[str, object] = {
                "layer": layer.index,
                "weights": layer.weights,
                "num_tokens": layer.num_tokens,
                "groups": groups,
            }
            if layer.experts:
                content["experts"] = dict(layer.experts)
            if layer.kl:
                content["kl"] = dict(layer.kl)
            of_layers.append(content)
        calibration = self.calibration
        content = {
            "freight": version(),
            "torch": torch.__version__,
            "model": self.name,
            "options": _options(self.plan),
            "calibration": {
                "data": self.data,
                "tokens_sha256": digest(self.samples),
                "num_samples": calibration.num_samples,
                "num_tokens": calibration.num_tokens,
                "longest_sample": calibration.longest,
            },
            "layers": of_layers,
            "warnings": list(warnings),
        }
        if self.choice is not None:
            content["budget"] = choice_content(self.choice)
        return content

    def _page(self, layers: Sequence[LayerReport], warnings: Sequence[str]) -> Iterator[str]:
        yield "# How this model was quantized"
        yield ""
        yield f"By Freight {version()} from `{self.name}`."
        yield ""
        for name, value in _options(self.plan).items():
            yield f"- {name}: {value}"
        calibration = self.calibration
        yield (
            f"- calibration data: {self.data}, {calibration.num_tokens:,} tokens in "
            f"{calibration.num_samples:,} samples, the longest of {calibration.longest:,}; all token ids have the "
            f"SHA-256 {digest(self.samples)}"
        )
        if self.choice is not None:
            yield ""
            yield from choice_lines(self.choice)
        yield ""
        yield from _table(layers)
        yield ""
        yield (
            "Error: the share of the squared size of a Linear's outputs over the calibration data that rounding takes, "
            "the mean of the layer's groups. Nearest: each weight rounded by itself, with the same scales; written: as "
            "it is in this model. An empty cell was not measured."
        )
        if warnings:
            yield ""
            yield "## Warnings"
            yield ""
            for warning in warnings:
                yield f"- {warning}"


def digest(samples: Samples) -> str:
    """Return the SHA-256 of token ids, as a list of lists in JSON."""
    return hashlib.sha256(json.dumps([list(ids) for ids in samples]).encode()).hexdigest()


def data_name(data: object) -> str:
    """Return what a report calls calibration data: a data set of the hub as it is, a file without its
    folder.
    """
    if not isinstance(data, str | Path):
        return IN_PYTHON
    return str(data) if is_hub_id(str(data)) else Path(data).name


def _table(layers: Sequence[LayerReport]) -> Iterator[str]:
    """Yield the layers as a table in Markdown, those with the same numbers in one row."""
    has_experts = any(layer.experts for layer in layers)
    has_kl = any(layer.kl for layer in layers)
    heads = ["layers", "weights"]
    if has_kl:
        heads.append("KL alone")
    heads += ["error, nearest", "error, written", "tokens"]
    if has_experts:
        heads.append("tokens of an expert")
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for indices in runs([layer.weights for layer in layers]):
        members = [layers[index] for index in indices]
        cells = [span(indices), members[0].weights]
        if has_kl:
            cells.append(least_and_most([member.kl.get(member.weights, 0.0) for member in members]))
        for end in ("nearest", "final"):
            means = []
            for member in members:
                errors = [getattr(error, end) for error in member.errors]
                if errors:
                    means.append(sum(errors) / len(errors))
            cells.append(least_and_most(means))
        cells.append(f"{members[0].num_tokens:,}")
        if has_experts:
            counts = [count for member in members for count in member.experts.values()]
            cells.append(least_and_most(counts, ","))
        yield f"| {' | '.join(cells)} |"


def _options(plan: QuantizePlan) -> JsonObject:
    """Return the options of a plan that mean something in it."""
    options: dict[str, object] = {}
    if plan.budget is None:
        options["weights"] = str(plan.weights)
        if plan.weights is WeightScheme.INT4:
            options["group_size"] = plan.group_size
            options["asymmetric"] = plan.asymmetric
    else:
        options["budget"] = str(plan.budget)
    options |= {
        "method": str(plan.method) or "nearest",
        "activations": str(plan.activations),
        "kv_cache": "none" if plan.kv_granularity is None else f"fp8 per {plan.kv_granularity}",
        "format": str(plan.layout),
        "weight_observer": str(plan.weight_observer),
    }
    if plan.method.gptq:
        options["damping"] = plan.method.damping
        options["act_order"] = str(plan.method.act_order)
    if plan.method.transform is Transform.AWQ:
        options["duo_scaling"] = str(plan.method.duo_scaling)
    if plan.method.transform is Transform.SMOOTHQUANT:
        options["smoothing"] = plan.method.smoothing
    if plan.kv_budget is not None:
        options["kv_budget"] = str(plan.kv_budget)
    if plan.ignore:
        options["ignore"] = list(plan.ignore)
    return options
