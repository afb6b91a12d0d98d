"""The Linear modules of a model by name, and which of them a list of patterns ignores.

A pattern is a module's full name, or `re:` and a regular expression that is searched in it, as in
AutoFP8. Patterns are expanded to names here, so a written checkpoint does not depend on the pattern
syntax of its reader.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from freight.base.patterns import FilePattern
from freight.errors import ConfigError, nearest
from freight.model.architectures import tensor_names
from freight.model.config.layer import DenseConfig, LayerConfig
from freight.model.config.model import ModelConfig
from freight.model.mixers.spec import mixer_parts
from freight.model.shapes import shared_names


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

    def named(self, expert: int) -> str:
        return self.prefix.format(expert).rstrip(".")


@dataclass(frozen=True)
class LayerModules:
    """Linear modules of one layer, full names; those of one field share their input and are
    computed together.

    mixer           of the layer's mixer: `MixerParts.module`; '' in a layer without one
    mixed           by the field of the mixer that they are (`MixerParts.projections`); empty in a
                    layer without one
    gate_up, down   of the feed-forward, or of the shared experts; empty in a layer without these
    experts         None in a layer without experts
    latent_in, latent_out   before and behind experts in a smaller space; empty without one
                            (`MoEConfig.latent_size`)
    per_layer_gate, per_layer_down
                    of what each token has for this layer alone (`LayerConfig.per_layer`); empty
                    without it
    kept            a router, and what weighs shared experts or heads: they stay in 16 bits
    """

    mixer: str
    mixed: Mapping[str, tuple[str, ...]]
    gate_up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    experts: ExpertModules | None = None
    kept: tuple[str, ...] = ()
    per_layer_gate: tuple[str, ...] = ()
    per_layer_down: tuple[str, ...] = ()
    latent_in: tuple[str, ...] = ()
    latent_out: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Those that share an input scale: all experts of a layer do, on each side."""
        experts = () if self.experts is None else (self.experts.gate_up, self.experts.down)
        others = (self.latent_in, self.latent_out, self.per_layer_gate, self.per_layer_down)
        return tuple(
            group
            for group in (*self.mixed.values(), self.gate_up, self.down, *experts, *others)
            if group
        )

    def input_of(self, group: tuple[str, ...]) -> str:
        """Return what messages call the input that the modules of `group` share."""
        first = group[0]
        if self.experts is not None and group in (self.experts.gate_up, self.experts.down):
            first = self.experts.prefix.format("*") + first.removeprefix(
                self.experts.prefix.format(0)
            )
        return f"{first}: input"


def layer_modules(config: ModelConfig) -> tuple[LayerModules, ...]:
    names = tensor_names(config)

    def of(index: int, layer: LayerConfig) -> LayerModules:
        mlp = layer.feed_forward
        prefix = names.layer.format(index)
        parts = mixer_parts(layer.mixer, config.hidden_size, names)
        mixed = {}
        for field, group in parts.projections.items():
            mixed[field] = tuple(prefix + one for one in group.modules)
        kept = tuple(prefix + module for module in parts.kept)
        mixer = LayerModules(prefix + parts.module if parts.module else "", mixed, kept=kept)
        if mlp is None:
            return mixer
        dense = (names.gate_up, names.down) if isinstance(mlp, DenseConfig) else shared_names(names)
        gate_up = tuple(prefix + part for part in dense[0])
        down = (prefix + dense[1],)
        if isinstance(mlp, DenseConfig):
            return replace(mixer, gate_up=gate_up, down=down)
        expert = prefix + names.expert
        every = [expert.format(i) for i in range(1 if names.interleaved else mlp.num_experts)]
        experts = ExpertModules(
            prefix=expert,
            count=mlp.num_experts,
            gate_up=tuple(one + part for one in every for part in names.expert_gate_up),
            down=tuple(one + names.expert_down for one in every),
        )
        kept += (prefix + names.router, *((prefix + names.shared_gate,) if mlp.shared_gate else ()))
        mixer = replace(mixer, experts=experts, kept=kept)
        if mlp.latent_size is not None:
            mixer = replace(
                mixer,
                latent_in=(prefix + names.latent_in,),
                latent_out=(prefix + names.latent_out,),
            )
        if mlp.shared is None:
            return mixer
        return replace(mixer, gate_up=gate_up, down=down)

    def with_own(index: int, layer: LayerConfig) -> LayerModules:
        if layer.per_layer is None:
            return of(index, layer)
        prefix = names.layer.format(index)
        return replace(
            of(index, layer),
            per_layer_gate=(prefix + names.per_layer_gate,),
            per_layer_down=(prefix + names.per_layer_down,),
        )

    return tuple(with_own(index, layer) for index, layer in enumerate(config.layers))


def linear_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the Linear modules that are quantized unless they are ignored: all of the layers but
    `LayerModules.kept`.
    """
    groups = [group for layer in layer_modules(config) for group in layer.groups]
    return tuple(name for group in groups for name in group)


def head_module(config: ModelConfig) -> str:
    """Return the output head's name, also where it is tied to the embedding and has no tensor."""
    return tensor_names(config).head.removesuffix(".weight")


def kept_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the Linear modules, the head aside, that always stay in 16 bits: routers, gates of
    shared experts and of heads, and those outside of the layers.
    """
    names = tensor_names(config)
    outer = () if config.embedding_size is None else (names.project_in, names.project_out)
    own = () if config.per_layer_vocab_size is None else (names.per_layer_projection,)
    return (*(name for layer in layer_modules(config) for name in layer.kept), *outer, *own)


def ignored_modules(
    config: ModelConfig,
    patterns: Sequence[str],
    lm_head: bool = False,
    others: Collection[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of ignored modules, names of quantized modules whose group is partly ignored).

    Ignored are the modules that `patterns` match, `kept_modules`, and the output head unless
    `lm_head` is True. `lm_head` raises ConfigError if the head is tied to the embedding. The second
    list matters to engines that merge q, k, v or gate, up: they need one scheme for the whole
    group. Raises ConfigError for a pattern that matches no module, and for patterns that match some
    experts of a layer: no engine computes those together. `others` are modules that are never
    quantized, so a pattern may match them alone.
    """
    layers = layer_modules(config)
    head = head_module(config)
    kept = kept_modules(config)
    if lm_head and config.tie_word_embeddings:
        raise ConfigError(
            f"--lm-head: {head} is this model's embedding, which stays in 16 bits; omit --lm-head"
        )
    known = [*linear_modules(config), *kept, head]
    names = frozenset(known)
    ignored = {*kept} if lm_head else {*kept, head}
    never = tuple(others)
    for pattern in patterns:
        regular = pattern.startswith("re:")
        matched = _matches(pattern, known, names)
        if not matched and not _matches(pattern, never, frozenset(never)):
            ends = any(name.endswith(f".{pattern}") for name in known)
            if ends:
                hint = f" (did you mean 're:{pattern}$'?)"
            else:
                hint = nearest(pattern, () if regular else known)
            raise ConfigError(
                f"--ignore {pattern!r} matches no Linear module{hint}; give a full name such as {known[0]!r}, or "
                "re: and a regular expression, as in 're:.*down_proj'"
            )
        ignored.update(matched)
    _require_whole_experts(layers, ignored)
    groups = [group for layer in layers for group in layer.groups]
    divided: list[str] = []
    for group in groups:
        left = [name for name in group if name not in ignored]
        if len(left) < len(group):
            divided += left
    return tuple(name for name in known if name in ignored), tuple(divided)


def keeps_experts(config: ModelConfig, kept: Collection[str]) -> bool:
    """Return whether `kept` has every module of the experts."""
    experts = (layer.experts for layer in layer_modules(config) if layer.experts is not None)
    return all(name in kept for one in experts for name in (*one.gate_up, *one.down))


def matched_modules(config: ModelConfig, patterns: Sequence[str]) -> frozenset[str]:
    """Return the modules of layers that `patterns` mean, which may be none."""
    known = linear_modules(config)
    names = frozenset(known)
    return frozenset(name for pattern in patterns for name in _matches(pattern, known, names))


def _require_whole_experts(layers: Sequence[LayerModules], ignored: Set[str]) -> None:
    """Raise ConfigError where some modules of a layer's experts are ignored and others are not."""
    for experts in (layer.experts for layer in layers if layer.experts is not None):
        every = (*experts.gate_up, *experts.down)
        left_out = sum(name in ignored for name in every)
        if 0 < left_out < len(every):
            one = next(name for name in every if name in ignored)
            parent = re.escape(experts.prefix.partition("{")[0])
            raise ConfigError(
                f"--ignore leaves out {one} and {left_out - 1} others of the {len(every)} matrices of this layer's "
                f"experts, which engines compute together; ignore all of them ('re:{parent}') or none"
            )


def _matches(pattern: str, known: Sequence[str], names: Set[str]) -> list[str]:
    """Return those of `known` that `pattern` means; `names` are the same as a set, for a model of
    many experts has many.
    """
    if not pattern.startswith("re:"):
        return [pattern] if pattern in names else []
    expression = FilePattern(pattern[3:], "--ignore", ConfigError)
    return [name for name in known if expression.search(name)]
