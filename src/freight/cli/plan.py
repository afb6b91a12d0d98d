"""`freight plan`: what fits into a memory, before anything is downloaded: a table with bars, or
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from freight.base import terminal
from freight.base.tables import aligned
from freight.cli.options import (
    IgnoredKeys,
    MaxLoraRank,
    MaxLoras,
    OneJson,
    RankCount,
    Revision,
    SkippedLayers,
    Speculate,
    SpeculativeConfig,
    StageCount,
    StageLayers,
    StateDtype,
    StateEvery,
    option,
    takes_model,
)
from freight.settings.engine import names_of
from freight.settings.lora import planned_lora
from freight.settings.skip_layers import layer_names

if TYPE_CHECKING:
    from freight.lab.capacity import Plan, Setting, Wish

_BAR = 24  # characters of the longest bar
_REST = 68  # of the columns before it


@takes_model
def plan(
    model: str,
    memory: Annotated[
        str,
        option("BYTES|24GiB", "Memory of the device, or of all together, weights included."),
    ],
    context: Annotated[
        int | None,
        option(
            "TOKENS",
            "Tokens of each request; default: the model's context.",
            "--context",
            "--max-model-len",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        option("COUNT", "Requests of that length in the cache at once."),
    ] = None,
    device: Annotated[
        str,
        option("auto|cpu|cuda", "What it will run on; auto: a GPU if there is one here."),
    ] = "auto",
    dtype: Annotated[
        str, option("DTYPE", "What is computed in; auto: the checkpoint's own.")
    ] = "auto",
    revision: Revision = None,
    kv_cache_dtype_skip_layers: SkippedLayers = None,
    state_every: StateEvery = None,
    state_dtype: StateDtype = "auto",
    tensor_parallel_size: RankCount = 1,
    pipeline_parallel_size: StageCount = 1,
    pp_layers: StageLayers = None,
    ignore_config_keys: IgnoredKeys = None,
    speculate: Speculate = None,
    speculative_config: SpeculativeConfig = None,
    max_loras: MaxLoras = None,
    max_lora_rank: MaxLoraRank = None,
    as_json: OneJson = False,
) -> None:
    """Count how many tokens and requests fit into a memory.

    With each format of cache and weights, and which to take; from config.json alone.
    """
    from freight.base.options import choose
    from freight.checkpoint.config_only import (
        gguf_model,
        read_config_only,
        tensor_dtypes,
        tensors_dtype,
    )
    from freight.lab.capacity import Wish, make_plan, read_memory
    from freight.lab.capacity import as_json as plan_json
    from freight.model.sizes import Layout
    from freight.settings.device import DEVICES, cpu_features, gpu_present

    if choose("--device", device, DEVICES) == "auto":
        device = "cuda" if gpu_present() else "cpu"
    packed = Layout.TILES if {"amx_tile", "amx_bf16"} <= set(cpu_features()) else Layout.PACKED
    layout = packed if device == "cpu" else Layout.PLAIN
    skipped = layer_names(kv_cache_dtype_skip_layers or ())
    wish = Wish(
        memory=read_memory(memory),
        context=context,
        concurrency=concurrency,
        device=device,
        layout=layout,
        dtype=dtype,
        skip_layers=skipped,
        state_every=state_every,
        state_dtype=state_dtype,
        ranks=tensor_parallel_size,
        stages=pipeline_parallel_size,
        pp_layers=pp_layers,
        lora=planned_lora(max_loras, max_lora_rank),
        speculate=speculate,
        speculative_config=speculative_config,
    )
    ignored = names_of(ignore_config_keys or ())
    gguf = gguf_model(model, revision)
    if gguf is not None:
        described = gguf.described.config
        tensors = dict.fromkeys(gguf.places.placed, "")  # their types are in the scheme
        made = make_plan(described, wish, None, gguf.stored, ignored, gguf.scheme, tensors, model)
    else:
        config, hf_quant_config = read_config_only(model, revision)
        stored = tensors_dtype(model, config, revision) if dtype == "auto" else None
        dtypes = tensor_dtypes(model) if wish.asks_for_head else None
        made = make_plan(config, wish, hf_quant_config, stored, ignored, None, dtypes, model)
    if as_json:
        print(json.dumps({"model": model, **plan_json(made)}))
    else:
        _print(model, made)


def _print(model: str, made: Plan) -> None:
    from rich.text import Text

    from freight.cache.sizing import MEMORY_SHARE
    from freight.lab.capacity import size, verdict
    from freight.model.config.dtype import describe_dtype
    from freight.settings.engine import listed_layers

    console = terminal.console(soft_wrap=True)
    wish = made.wish
    share = f"{MEMORY_SHARE[wish.device]:.0%}"
    console.print(
        f"{model} on {wish.device} with {size(wish.memory)}, requests of {made.context:,} tokens"
    )
    line = _divided(wish)
    if line:
        console.print(line)
    console.print(f"dtype: {describe_dtype(made.dtype, made.dtype_source)}")
    kv = made.settings[-1].kv
    if kv.layers is not None:
        unquantized = [index for index, layer in enumerate(kv.layers) if layer.granularity is None]
        console.print(f"8-bit caches: {listed_layers(unquantized, len(kv.layers))} in {made.dtype}")
    mark = "#"
    longest = _BAR
    if console.is_terminal and console.encoding.lower().startswith("utf"):
        mark = "█"
        longest = max(4, min(_BAR, console.width - _REST))
    rows: list[tuple[str, ...]] = [("weights", "", "KV cache", "", "tokens", "requests", "")]
    rows += [_row(setting, made, mark, longest) for setting in made.settings]
    for index, cells in enumerate(aligned(rows, "lrlrrrl"), -1):
        mark = " "
        style = "bold" if index < 0 else ""
        if index == made.choice:
            mark = "*"
            style = "bold green"
        console.print(Text(f"{mark} {'  '.join(cells)}".rstrip(), style))
    for line in _devices(made):
        console.print(line)
    console.print(
        f"KV cache: {share} of what weights and rotary tables leave, as the engine takes by itself. Not counted: "
        "activations, logits, torch and its kernels; they have the rest."
    )
    if wish.lora is not None:
        adapters = size(made.settings[0].loaded.adapters)
        console.print(
            f"Sizes of weights include {adapters} for {wish.lora.num_slots:,} adapters of rank {wish.lora.max_rank}."
        )
    if made.settings[0].spec.bytes_per_state:
        console.print(_states(made))
    if wish.device == "cpu":
        console.print(_stored(made))
        console.print(_head(made))
        for line in _products(made):
            console.print(line)
    if made.through_transformers:
        console.print(
            "It runs through transformers' modules: all weights are read in 16 bits before any is rounded, and experts "
            "that are stacked tensors, routers, embedding and head stay so."
        )
    console.print(Text(verdict(made), "bold"))


def _divided(wish: Wish) -> str:
    """Say which part of the memory ranks and stages have; '' without any."""
    from freight.lab.capacity import size

    memory = size(wish.device_memory)
    if wish.devices == 1 and wish.ranks == 1:
        return ""
    if wish.devices == 1:
        return f"{wish.ranks} ranks, each with {memory} of it; sizes are those of each rank"
    if wish.ranks == 1:
        return f"{wish.stages} devices, each with {memory} of it and a part of the layers"
    return (
        f"{wish.ranks} ranks, each with {wish.stages} devices that have a part of the layers and {memory} of it; "
        "sizes are those of each rank"
    )


def _devices(made: Plan) -> Iterator[str]:
    """Say what each device has in the setting that the verdict names."""
    from freight.lab.capacity import named_setting, size
    from freight.lab.columns import plural

    setting = named_setting(made)
    if not setting.devices:
        if made.wish.stages > 1:
            yield "On a CPU all stages are in its memory, and gain nothing."
        return
    yield f"With {setting.weights} weights and a cache in {setting.cache_name}:"
    for index, part in enumerate(setting.devices):
        yield (
            f"  {made.wish.device}:{index}  {plural(part.layers, 'layer')}, weights {size(part.weight_bytes)}, "
            f"KV cache up to {size(part.cache_bytes)}"
        )


def _states(made: Plan) -> str:
    """Say what a request's states take: with a cache of 16 bits, with one of 8 where that differs,
    and in float32.
    """
    from freight.lab.capacity import size

    plain = made.settings[0].spec
    eight = made.settings[-1].spec
    line = f"A part of it is for states: {size(plain.bytes_per_state)} for each request"
    if plain.state_format is not None:
        line += f" in {plain.state_format}"
    if eight.state_format is not plain.state_format:
        line += f", {size(eight.bytes_per_state)} in {eight.state_format} beside 8-bit caches"
    if eight.bytes_per_state < eight.float32_bytes_per_state:
        line += f" (in float32 {size(eight.float32_bytes_per_state)})"
    return (
        f"{line}, and as much again for those that stay behind every {plain.state_every:,} tokens."
    )


def _head(made: Plan) -> str:
    """Say what a head takes that drafts, in the setting that the verdict names."""
    from freight.lab.capacity import named_setting, size

    if made.head is None and made.wish.asks_for_head:
        return "No head drafts: the model has no layers for it that run here."
    if made.head is None:
        return (
            "What drafts besides a request's text is counted where it is named: --speculative-config, or "
            "--speculate auto."
        )
    setting = named_setting(made)
    of_weights = size(setting.loaded.head)
    of_cache = setting.head_bytes_per_token
    return (
        f"What drafts is counted, {made.head.describe()}: {of_weights} of the {setting.weights} weights, and "
        f"{of_cache:,} of the {setting.spec.bytes_per_token:,} bytes that a token takes in {setting.cache_name}."
    )


def _products(made: Plan) -> Iterator[str]:
    """Say what products on this CPU do with their inputs, and which weights are slow."""
    from freight.settings.cpu_builds import FP8_IS_SLOW, multiplies_bfloat16, runnable

    if any(setting.in_four_bits for setting in made.settings):
        yield "Products with weights in groups round their inputs to INT8 (--activations bfloat16: not)."
    best = runnable()[:1]
    if best and not multiplies_bfloat16(best[0]):
        yield f"{FP8_IS_SLOW[0].upper()}{FP8_IS_SLOW[1:]}."


def _stored(made: Plan) -> str:
    """Say what a GiB of disk holds, by cache."""
    counts: dict[str, list[str]] = {}
    for setting in made.settings:
        names = counts.setdefault(f"{setting.stored_tokens:,}", [])
        if setting.cache_name not in names:
            names.append(setting.cache_name)
    parts = [f"{count} tokens of {' or '.join(names)}" for count, names in counts.items()]
    return f"A GiB of --kv-store holds {'; '.join(parts)}."


def _row(setting: Setting, made: Plan, mark: str, longest: int) -> tuple[str, ...]:
    from freight.lab.capacity import size

    most = max(other.capacity_tokens for other in made.settings)
    length = -(-setting.capacity_tokens * longest // most) if most else 0
    return (
        setting.weights,
        size(setting.loaded.total),
        setting.cache_name,
        size(setting.cache_bytes) if setting.cache_bytes else "no room",
        f"{setting.capacity_tokens:,}",
        f"{setting.requests:,}",
        mark * length,
    )
