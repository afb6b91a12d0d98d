"""Measure what inputs in INT8 cost beside what weights in 4 bits cost, by format and group.

    python benchmarks/activations_in_int8.py MODEL TEXT [TOKENS]

MODEL is a folder with a model in 16 or 32 bits, or "demo"; TEXT is a file of prose that the model
was not trained on. All else is float32: rows, cache, head. Prints a Markdown table with a row for
each format of weights and each number of inputs that share a scale in INT8:

    KL of weights   KL(float32 || weights in 4 bits), inputs in float32
    KL of inputs    KL(weights in 4 bits, inputs in float32 || the same weights, inputs in INT8)

both in nats per token, over the same windows of 512 tokens, with the standard error of the second.
Products of inputs in INT8 are the kernels' (`Activations.GROUPS`), in bold where the group is the one
that they take by themselves; a narrower one is theirs for weights whose scales are repeated, so that
their groups are as narrow. Where the group is wider than the weight's, inputs are rounded by the
reference and multiplied as float32, which differs by the rounding of float32 alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from freight.checkpoint.headers import Shape
from freight.checkpoint.reader import resolve_model
from freight.fp8 import mxfp4
from freight.kernels.cpu import library
from freight.kernels.cpu.cpu_set import CpuKernels
from freight.kernels.cpu.interface import FORMATS
from freight.kernels.cpu.linear import CpuWeight
from freight.kernels.interface import KernelSet
from freight.kernels.reference import LEAST_GROUP, int8_groups
from freight.lab.evaluate.divergence import Judged, Reference
from freight.lab.evaluate.documents import cut_documents
from freight.lab.evaluate.measure import mean_perplexity, rows_at_once
from freight.lab.evaluate.perplexity import Window
from freight.lab.evaluate.report import cache_run, plain_config
from freight.lab.evaluate.rounded import RoundedSource
from freight.model.decoder import LanguageModel
from freight.model.loader import build_decoder
from freight.model.open import OpenModel, open_model
from freight.operands.packed import PackedWeight, Rows
from freight.operands.weight import Activations, Codes, Groups, Weight
from freight.settings.engine import EngineArgs, EngineConfig

import torch  # isort: skip  (after freight, which sets the waiting of threads)
from torch import Tensor  # isort: skip

WINDOW = 512
NVFP4_GROUP = 16
WEIGHTS = {"int4-32": 32, "int4-64": 64, "int4": 128, "mxfp4": 32, "nvfp4": NVFP4_GROUP}
# Inputs that share a scale in INT8
INPUTS = {
    "int4-32": (32,),
    "int4-64": (32, 64),
    "int4": (32, 128),
    "mxfp4": (32, 64, 128),
    "nvfp4": (32, 64, 128),
}


class RoundingKernels(CpuKernels):
    """The compiled kernels; inputs of matrices in 4 bits are rounded to INT8 in groups of `group`
    beforehand, unless it is 0.
    """

    group = 0

    def linear(
        self, x: Rows, weight: PackedWeight, bias: Tensor | None = None, float32: bool = False
    ) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(weight, CpuWeight)
        if self.group and weight.descriptor.format != FORMATS[torch.float32]:
            codes, scale = int8_groups(x, self.group)
            x = (codes * scale[..., None]).flatten(1)[:, : x.shape[1]]
        return CpuKernels.linear(self, x, weight, bias, float32)


@dataclass(frozen=True)
class FourBitSource(RoundedSource):
    """Rounds matrices to 4 bits by `scheme`, also to NVFP4, and keeps them in `made`. With `group`
    inputs are rounded to INT8 in groups of that many, at most as many as the weight's own.
    """

    group: int = 0
    made: dict[str, Weight] = field(default_factory=dict)

    def weight(self, name: str, shape: Shape) -> Weight:
        if name not in self.made:
            self.made[name] = super().weight(name, shape)
        weight = self.made[name]
        assert weight.is_mxfp4 or weight.groups is not None
        if not self.group:
            return weight
        return replace(narrowed(weight, self.group), activations=Activations.GROUPS)

    def _rounded(self, stored: Tensor) -> Weight:
        if self.scheme == "nvfp4":
            return round_to_nvfp4(stored)
        return super()._rounded(stored)


def narrowed(weight: Weight, size: int) -> Weight:
    """Return the same matrix in groups of at most `size` inputs."""
    groups = weight.groups
    if groups is None or groups.size <= size:
        return weight
    scales = groups.scales.repeat_interleave(groups.size // size, 1)
    return replace(weight, groups=replace(groups, size=size, scales=scales))


def round_to_nvfp4(stored: Tensor) -> Weight:
    """Round to nearest: a scale in float32 for the matrix, from its amax, and one in E4M3 for each
    group, from the group's.
    """
    groups = stored.float().unflatten(1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(-1) / max(mxfp4.VALUES)
    whole = largest.amax() / torch.finfo(torch.float8_e4m3fn).max
    scales = (largest / whole).to(torch.float8_e4m3fn)
    step = (scales.float() * whole).clamp(min=torch.finfo(torch.float32).tiny)
    values = torch.tensor(mxfp4.VALUES, dtype=torch.float32)
    midpoints = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(groups.abs() / step[..., None], midpoints)
    codes += 8 * (groups < 0)
    codes = codes.flatten(1).to(torch.uint8)
    return Weight(
        codes[:, ::2] | codes[:, 1::2] << 4,
        scale=whole.repeat(len(stored)),
        groups=Groups(Codes.E2M1, NVFP4_GROUP, scales),
    )


@dataclass(frozen=True)
class Text:
    """A model that has been opened, and the windows that it is measured on."""

    opened: OpenModel
    config: EngineConfig
    windows: Sequence[Window]

    def load(
        self, scheme: str, kernels: KernelSet, made: dict[str, Weight], group: int = 0
    ) -> LanguageModel:
        """Return the model with weights in `scheme`."""
        assert self.opened.checkpoint is not None
        source = FourBitSource(
            self.opened.checkpoint,
            self.config.compute_format,
            self.opened.device.native_e4m3,  # of 8 bits: matrices are rounded
            self.config.device,
            keeps_mxfp4=True,
            scheme=scheme,
            group=group,
            made=made,
        )
        return build_decoder(self.opened.model, source, kernels, WINDOW, self.config.device)

    def states(self, model: LanguageModel) -> Tensor:
        """Return the final states of all tokens, [tokens, hidden_size]."""
        run = cache_run(self.opened, model, self.config, WINDOW)
        return torch.cat([run.hidden(window.token_ids, 0) for window in self.windows])


def states_of(text: Text, scheme: str) -> list[Tensor]:
    """Return the states with inputs in float32, then with inputs in INT8, by group."""
    loaded = library.load()
    made: dict[str, Weight] = {}
    rounding = RoundingKernels(loaded)
    model = text.load(scheme, rounding, made)
    states = [text.states(model)]
    for group in INPUTS[scheme]:
        if group <= own_group(scheme):
            states.append(text.states(text.load(scheme, CpuKernels(loaded), made, group)))
            continue
        object.__setattr__(rounding, "group", group)  # the decoder has these very kernels
        states.append(text.states(model))
    return states


def own_group(scheme: str) -> int:
    """Return the inputs that share a scale in the kernels' products with such weights."""
    return max(WEIGHTS[scheme], LEAST_GROUP)


def joined(pieces: Sequence[Judged]) -> Judged:
    """Return what was judged piece by piece as one."""
    logprobs, kl, same = map(torch.cat, zip(*pieces, strict=True))
    return logprobs, kl, same


@torch.inference_mode()
def judge(
    model: LanguageModel, exact: Tensor, schemes: Sequence[Sequence[Tensor]], targets: Tensor
) -> list[list[Judged]]:
    """Judge the distributions after `exact`; and, for each scheme, after its first states beside
    those, and after its other ones beside its first. The head, `model`'s, is in float32 for all.
    """
    groups = [[exact], *schemes]
    pieces: list[list[list[Judged]]] = [[[] for _ in group] for group in groups]
    size = rows_at_once(model.config.vocab_size)
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        tokens = targets[part]
        whole = Reference.of(model.logits(exact[part]))
        pieces[0][0].append(whole.itself(tokens))
        for (plain, *others), (into, *into_others) in zip(schemes, pieces[1:], strict=True):
            logits = model.logits(plain[part])
            into.append(whole.judge(logits, tokens))
            reference = Reference.of(logits)
            for states, into_one in zip(others, into_others, strict=True):
                into_one.append(reference.judge(model.logits(states[part]), tokens))
    return [[joined(of_one) for of_one in group] for group in pieces]


def standard_error(values: Tensor, windows: int) -> float:
    """Return the standard error of the mean; tokens of one window are not independent."""
    means = torch.stack([part.double().mean() for part in values.tensor_split(windows)])
    return float(means.std() / windows**0.5)


def table(text: Text, name: str) -> None:
    """Measure every format and print the table."""
    targets = torch.tensor([token for window in text.windows for token in window.targets])
    exact = text.opened.load(text.config, WINDOW)
    schemes = [states_of(text, scheme) for scheme in WEIGHTS]
    ((whole,), *judged) = judge(exact, text.states(exact), schemes, targets)
    print(
        f"{name}, {len(targets):,} tokens, perplexity in float32 {mean_perplexity(whole[0]):.3f}\n\n"
        "| weights | perplexity | KL of weights | inputs of a group in INT8 | perplexity | KL of inputs | "
        "of that of weights | same top |\n|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for scheme, ((before, weights, _), *others) in zip(WEIGHTS, judged, strict=True):
        for group, (after, kl, same) in zip(INPUTS[scheme], others, strict=True):
            size = f"**{group}**" if group == own_group(scheme) else str(group)
            print(
                f"| `{scheme}` | {mean_perplexity(before):.3f} | {weights.mean():.4f} | {size} | "
                f"{mean_perplexity(after):.3f} | "
                f"{kl.mean():.5f} ± {standard_error(kl, len(text.windows)):.5f} | "
                f"{kl.mean() / weights.mean():.1%} | {same.double().mean():.1%} |"
            )


def main(model: str, text: str, tokens: str = "4096") -> None:
    args = EngineArgs(model, dtype="float32", kv_cache_dtype="float32", max_model_len=WINDOW)
    opened = open_model(args)
    document = Path(text).read_text(encoding="utf-8")
    parts = cut_documents(opened, [document], WINDOW, int(tokens))
    config = plain_config(opened)
    with opened.threads(config):
        table(Text(opened, config, [part.window for part in parts]), resolve_model(model).name)


if __name__ == "__main__":
    main(*sys.argv[1:])
