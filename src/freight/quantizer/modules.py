"""The Linear modules of a model by name, and which of them a list of patterns ignores.

A pattern is a module's full name, or `re:` and a regular expression that is searched in it, as in
AutoFP8. Patterns are expanded to names here, so a written checkpoint does not depend on the pattern
syntax of its reader.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from freight.base.patterns import FilePattern
from freight.errors import ConfigError, nearest
from freight.model.architectures import tensor_names
from freight.model.config.layer import DenseConfig, LayerConfig
from freight.model.config.model import ModelConfig
from freight.model.config.tensor_names import TensorNames
from freight.model.mixers.spec import MixerParts, mixer_parts
from freight.model.shapes import shared_names

# Full names of modules that share their input, by the field of the part of the layer that they are
Fields = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class ExpertModules:
    """The experts of one layer, full names; `gate_up` and `down` have those of all experts, by id.

    An expert's module is `prefix` with its id: 'model.layers.0.mlp.experts.{}.' ->
    'model.layers.0.mlp.experts.3'. Where all of them are one tensor (`TensorNames.interleaved`), so
    is its name, and each side has one.
    """

    prefix: str
    count: int
    gate_up: tuple[str, ...]
    down: tuple[str, ...]

    @property
    def matrices(self) -> tuple[str, ...]:
        """The modules of all experts."""
        return (*self.gate_up, *self.down)

    @property
    def by_expert(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """The modules of each expert: (those of gate and up, that of down)."""
        parts = len(self.gate_up) // len(self.down)
        experts = []
        for expert, down in enumerate(self.down):
            experts.append((self.gate_up[expert * parts : (expert + 1) * parts], down))
        return tuple(experts)

    def named(self, expert: int) -> str:
        return self.prefix.format(expert).rstrip(".")


@dataclass(frozen=True)
class LayerModules:
    """Linear modules of one layer, full names; those of one field share their input and are
    computed together.

    mixer           of the layer's mixer: `MixerParts.module`; '' in a layer without one
    mixed           by the field of the mixer that they are (`MixerParts.projections`); empty in a
                    layer without one
    dense           by the field of `MLP`: of the feed-forward, or of the shared experts; empty in a
                    layer without these
    experts         None in a layer without experts
    latent          by the field of `Latent`: before and behind experts in a smaller space; empty
                    without one (`MoEConfig.latent_size`)
    per_layer       by the field of `PerLayerEmbedding`: of what each token has for this layer alone
                    (`LayerConfig.per_layer`); empty without it
    kept            a router, and what weighs shared experts or heads: they stay in 16 bits
    """

    mixer: str
    mixed: Fields
    dense: Fields
    experts: ExpertModules | None
    latent: Fields
    per_layer: Fields
    kept: tuple[str, ...]

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Those that share an input scale: all experts of a layer do, on each side."""
        groups = [*self.mixed.values(), *self.dense.values()]
        if self.experts is not None:
            groups += [self.experts.gate_up, self.experts.down]
        return (*groups, *self.latent.values(), *self.per_layer.values())

    @property
    def merged(self) -> tuple[tuple[str, ...], ...]:
        """Those that engines compute as one matrix, such as q, k and v: each expert by itself."""
        merged = [*self.mixed.values(), *self.dense.values()]
        if self.experts is not None:
            merged += [gate_up for gate_up, _ in self.experts.by_expert]
        return tuple(merged)

    def input_of(self, group: tuple[str, ...]) -> str:
        """Return what messages call the input that the modules of `group` share."""
        first = group[0]
        experts = self.experts
        if experts is not None and group in (experts.gate_up, experts.down):
            part = first.removeprefix(experts.prefix.format(0))
            first = experts.prefix.format("*") + part
        return f"{first}: input"


def layer_modules(config: ModelConfig) -> tuple[LayerModules, ...]:
    names = tensor_names(config)
    layers = []
    for index, layer in enumerate(config.layers):
        parts = mixer_parts(layer.mixer, config.hidden_size, names)
        layers.append(_modules(names.layer.format(index), layer, names, parts))
    return tuple(layers)


def _modules(
    prefix: str, layer: LayerConfig, names: TensorNames, parts: MixerParts
) -> LayerModules:
    """Return the modules of the layer whose names begin with `prefix`."""

    def full(*modules: str) -> tuple[str, ...]:
        return tuple(prefix + module for module in modules)

    mixed = {field: full(*group.modules) for field, group in parts.projections.items()}
    mixer = prefix + parts.module if parts.module else ""
    unquantized = full(*parts.kept)
    dense: Fields = {}
    experts = None
    latent: Fields = {}
    per_layer: Fields = {}
    if layer.per_layer is not None:
        per_layer = {"gate": full(names.per_layer_gate), "down": full(names.per_layer_down)}
    mlp = layer.feed_forward
    if isinstance(mlp, DenseConfig):
        dense = {"gate_up": full(*names.gate_up), "down": full(names.down)}
    elif mlp is not None:
        unquantized += full(names.router)
        if mlp.shared_gate:
            unquantized += full(names.shared_gate)
        if mlp.latent_size is not None:
            latent = {"inner": full(names.latent_in), "outer": full(names.latent_out)}
        if mlp.shared is not None:
            gate_up, down = shared_names(names)
            dense = {"gate_up": full(*gate_up), "down": full(down)}
        num_named = 1 if names.interleaved else mlp.num_experts
        experts = _experts(prefix + names.expert, mlp.num_experts, num_named, names)
    return LayerModules(mixer, mixed, dense, experts, latent, per_layer, unquantized)


def _experts(prefix: str, count: int, num_named: int, names: TensorNames) -> ExpertModules:
    gate_up: list[str] = []
    down: list[str] = []
    for index in range(num_named):
        expert = prefix.format(index)
        gate_up += [expert + part for part in names.expert_gate_up]
        down.append(expert + names.expert_down)
    return ExpertModules(prefix, count, tuple(gate_up), tuple(down))


def linear_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the Linear modules that are quantized unless they are ignored: all of the layers but
    `LayerModules.kept`.
    """
    modules: list[str] = []
    for layer in layer_modules(config):
        modules += chain.from_iterable(layer.groups)
    return tuple(modules)


def head_module(config: ModelConfig) -> str:
    """Return the output head's name, also where it is tied to the embedding and has no tensor."""
    return tensor_names(config).head.removesuffix(".weight")


def kept_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the Linear modules, the head aside, that always stay in 16 bits: routers, gates of
    shared experts and of heads, and those outside of the layers, such as layers after pooling.
    """
    names = tensor_names(config)
    modules: list[str] = []
    for layer in layer_modules(config):
        modules += layer.kept
    if config.embedding_size is not None:
        modules += (names.project_in, names.project_out)
    if config.per_layer_vocab_size is not None:
        modules.append(names.per_layer_projection)
    if config.pooling is not None:
        modules += [
            layer.weight.removesuffix(".weight")
            for layer in config.pooling.layers
            if not layer.folder
        ]
    return tuple(modules)


def ignored_modules(
    config: ModelConfig,
    patterns: Sequence[str],
    lm_head: bool = False,
    never: Collection[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of ignored modules, names of quantized modules whose group is partly ignored).

    Ignored are the modules that `patterns` match, `kept_modules`, and the output head unless
    `lm_head` is True. `lm_head` raises ConfigError if the head is tied to the embedding. The second
    list matters to engines that merge q, k, v or gate, up: they need one scheme for the whole
    group. Raises ConfigError for a pattern that matches no module, and for patterns that match some
    experts of a layer: no engine computes those together. `never` are modules that are never
    quantized, so a pattern may match them alone.
    """
    layers = layer_modules(config)
    head = head_module(config)
    always_kept = kept_modules(config)
    if lm_head and config.tie_word_embeddings:
        raise ConfigError(
            f"--lm-head: {head} is this model's embedding, which stays in 16 bits; omit --lm-head"
        )
    known = [*linear_modules(config), *always_kept, head]
    names = frozenset(known)
    ignored = {*always_kept, head}
    if lm_head:
        ignored.discard(head)
    for pattern in patterns:
        matched = _matches(pattern, known, names)
        if not matched and not _matches(pattern, never, frozenset(never)):
            raise ConfigError(
                f"--ignore {pattern!r} matches no Linear module{_hint(pattern, known)}; give a full name such as "
                f"{known[0]!r}, or re: and a regular expression, as in 're:.*down_proj'"
            )
        ignored.update(matched)
    _require_whole_experts(layers, ignored)
    divided: list[str] = []
    for layer in layers:
        for group in layer.groups:
            left = [name for name in group if name not in ignored]
            if len(left) < len(group):
                divided += left
    return tuple(name for name in known if name in ignored), tuple(divided)


def _hint(pattern: str, known: Sequence[str]) -> str:
    """Return the name that a pattern without a match may mean, for a message."""
    if any(name.endswith(f".{pattern}") for name in known):
        return f" (did you mean 're:{pattern}$'?)"
    return "" if pattern.startswith("re:") else nearest(pattern, known)


def keeps_experts(config: ModelConfig, modules: Collection[str]) -> bool:
    """Return whether `modules` has every module of the experts."""
    for layer in layer_modules(config):
        if layer.experts is not None and not set(layer.experts.matrices).issubset(modules):
            return False
    return True


def matched_modules(config: ModelConfig, patterns: Sequence[str]) -> frozenset[str]:
    """Return the modules of layers that `patterns` mean, which may be none."""
    known = linear_modules(config)
    names = frozenset(known)
    return frozenset[str]().union(*(_matches(pattern, known, names) for pattern in patterns))


def _require_whole_experts(layers: Sequence[LayerModules], ignored: Set[str]) -> None:
    """Raise ConfigError where some modules of a layer's experts are ignored and others are not."""
    for layer in layers:
        if layer.experts is None:
            continue
        matrices = layer.experts.matrices
        left_out = [name for name in matrices if name in ignored]
        if 0 < len(left_out) < len(matrices):
            parent = re.escape(layer.experts.prefix.partition("{")[0])
            raise ConfigError(
                f"--ignore leaves out {left_out[0]} and {len(left_out) - 1} others of the {len(matrices)} matrices of "
                f"this layer's experts, which engines compute together; ignore all of them ('re:{parent}') or none"
            )


def _matches(pattern: str, known: Collection[str], names: Set[str]) -> list[str]:
    """Return those of `known` that `pattern` means; `names` are the same as a set, for a model of
    many experts has many.
    """
    if not pattern.startswith("re:"):
        return [pattern] if pattern in names else []
    expression = FilePattern(pattern[3:], "--ignore", ConfigError)
    return [name for name in known if expression.search(name)]
