"""The Linear modules of a model by name, and which of them a list of patterns ignores.

A pattern is a module's full name, or `re:` and a regular expression that is searched in it, as in AutoFP8. Patterns
are expanded to names here, so a written checkpoint does not depend on the pattern syntax of its reader.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from freight.config.layer import MoEConfig
from freight.config.model import ModelConfig
from freight.errors import ConfigError, nearest
from freight.models.architectures import tensor_names


@dataclass(frozen=True)
class LayerModules:
    """Linear modules of one layer, full names; those of one field share their input and are computed together."""

    attention: str
    qkv: tuple[str, ...]
    o: tuple[str, ...]
    gate_up: tuple[str, ...]
    down: tuple[str, ...]

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        return (self.qkv, self.o, self.gate_up, self.down)


def layer_modules(config: ModelConfig) -> tuple[LayerModules, ...]:
    names = tensor_names(config)
    if any(isinstance(layer.feed_forward, MoEConfig) for layer in config.layers):
        raise ConfigError(f"models with experts ({config.model_type}) cannot be quantized or calibrated yet")

    def of(index: int) -> LayerModules:
        prefix = names.layer.format(index)
        qkv, gate_up = (tuple(prefix + part for part in parts) for parts in (names.qkv, names.gate_up))
        attention = qkv[0].rpartition(".")[0]
        return LayerModules(attention, qkv, (prefix + names.o,), gate_up, (prefix + names.down,))

    return tuple(map(of, range(config.num_layers)))


def head_module(config: ModelConfig) -> str:
    """The output head's name, also where it is tied to the embedding and has no tensor."""
    return tensor_names(config).head.removesuffix(".weight")


def _outer_modules(config: ModelConfig) -> tuple[str, ...]:
    """Linear modules outside of the layers beside the head: they stay in 16 bits."""
    names = tensor_names(config)
    return () if config.embedding_size is None else (names.project_in, names.project_out)


def ignored_modules(
    config: ModelConfig, patterns: Sequence[str], lm_head: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of ignored modules, names of quantized modules whose group is partly ignored).

    Ignored are the modules that `patterns` match, the projections beside embedding and head, and the output head unless
    `lm_head` is True. `lm_head` raises ConfigError if the head is tied to the embedding. The second list matters to
    engines that merge q, k, v or gate, up: they need one scheme for the whole group. Raises ConfigError for a pattern
    that matches no module.
    """
    layers = layer_modules(config)
    head = head_module(config)
    if lm_head and config.tie_word_embeddings:
        raise ConfigError(f"--lm-head: {head} is this model's embedding, which stays in 16 bits; omit --lm-head")
    outer = _outer_modules(config)
    known = [name for layer in layers for group in layer.groups for name in group] + [*outer, head]
    ignored = {*outer} if lm_head else {*outer, head}
    for pattern in patterns:
        regular = pattern.startswith("re:")
        matched = _matches(pattern, known)
        if not matched:
            ends = any(name.endswith(f".{pattern}") for name in known)
            hint = f" (did you mean 're:{pattern}$'?)" if ends else nearest(pattern, () if regular else known)
            raise ConfigError(
                f"--ignore {pattern!r} matches no Linear module{hint}; give a full name such as {known[0]!r}, or "
                "re: and a regular expression, as in 're:.*down_proj'"
            )
        ignored.update(matched)
    groups = [group for layer in layers for group in layer.groups]
    torn = [name for group in groups if ignored & set(group) for name in group if name not in ignored]
    return tuple(name for name in known if name in ignored), tuple(torn)


def _matches(pattern: str, known: Sequence[str]) -> list[str]:
    if not pattern.startswith("re:"):
        return [name for name in known if name == pattern]
    try:
        expression = re.compile(pattern[3:])
    except re.error as error:
        raise ConfigError(f"--ignore {pattern!r} is not a regular expression: {error}") from None
    return [name for name in known if expression.search(name)]
