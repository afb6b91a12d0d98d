"""`freight audit`: what vLLM, SGLang and TGI do with a checkpoint's KV scales, what that costs, and
what repairs it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from freight.base import terminal
from freight.base.terminal import progress
from freight.cli.evaluate import read_text
from freight.cli.options import LORA, NODES, RANKS, Json, option, takes_engine_options
from freight.lab.audit.effects import EngineView, parse_engine
from freight.lab.audit.rules import Engine
from freight.lab.columns import row_of
from freight.settings.engine import EngineArgs

if TYPE_CHECKING:
    from freight.lab.audit.run import AuditReport


# The caches are those that other engines would have.
_CACHE = ("kv_cache_dtype", "kv_cache_dtype_skip_layers", "kv_scales", "quantization_param_path")


@partial(takes_engine_options, without=(*_CACHE, *RANKS, *NODES, *LORA))
def audit(
    args: EngineArgs,
    engine: Annotated[
        list[str] | None,
        option("NAME[=VERSION]", "vllm, sglang or tgi; may be repeated. Default: all."),
    ] = None,
    data: Annotated[
        Path | None,
        option("FILE", "Text to measure on; for 'demo', its held-out text by default."),
    ] = None,
    calibration_data: Annotated[
        Path | None,
        option("FILE", "Text that --fix measures missing scales on; default: --data."),
    ] = None,
    fix: Annotated[
        Path | None,
        option("OUT", "Write a checkpoint whose scales the first engine loads."),
    ] = None,
    window: Annotated[int | None, option("TOKENS", "Tokens judged together.", min=2)] = None,
    max_tokens: Annotated[
        int, option("COUNT", "Tokens measured at most.", "--max-tokens", "--tokens", min=2)
    ] = 8192,
    layer_tokens: Annotated[int, option("COUNT", "Tokens to rank layers by.", min=2)] = 1024,
    as_json: Json = False,
) -> None:
    """Say what other engines do with a checkpoint's KV scales.

    Which scales vLLM, SGLang and TGI load, drop or take as 1.0, what that costs on a text, and what
    repairs it.
    """
    engines = [parse_engine(name) for name in engine or map(str, Engine)]
    text = read_text(args.model, data) if data is not None or args.model == "demo" else None
    calibration = read_text(args.model, calibration_data) if calibration_data is not None else None

    from freight.lab.audit.run import as_json as to_json
    from freight.lab.audit.run import audit as run

    with progress("auditing") as move:
        report = run(
            args,
            engines,
            text,
            window=window,
            max_tokens=max_tokens,
            layer_tokens=layer_tokens,
            fix=fix,
            calibration=calibration,
            on_progress=lambda what, done, total: move(done, total),
        )
    if as_json:
        print(json.dumps(to_json(args.model, report)))
    else:
        _print(report)
        if fix is not None and report.fixed is not None:
            named = " and ".join(map(str, report.fixed.engines))
            count = report.facts.num_layers - len(report.facts.without_keys)
            terminal.say(
                f"{fix}: KV scales of {count} layer{'s' * (count > 1)}, as {named} load them"
            )


_COLUMNS = {
    "perplexity": "{0.perplexity:.3f}",
    "mean KL": "{0.kl_mean:.5f}",
    "same top": "{0.same_top:.2%}",
}


def _print(report: AuditReport) -> None:
    from freight.base.tables import markdown
    from freight.lab.audit.verdict import Cost

    if report.weights is not None:
        first, *more = report.weights.lines()
        terminal.say("\n  ".join((first, *more)))
    for engine in report.engines:
        terminal.say(engine.verdict)
        for line in _details(engine.view):
            terminal.say(f"  {line}")
        if engine.worst:
            ranked = ", ".join(f"{cost.layer} ({cost.added_kl:+.5f})" for cost in engine.worst[:5])
            terminal.say(f"  worst layers, by what each alone adds to the KL: {ranked}")
    rows: list[tuple[str, Cost | None]] = [
        ("16 bits", report.plain),
        ("a scale per token", report.dynamic),
        ("as stored", report.stored),
    ]
    for engine in report.engines:
        rows += [
            (f"as {engine.view.title}", engine.cost),
            (f"as {engine.view.title} on a CPU", engine.cpu_cost),
        ]
    table = [["KV cache", *_COLUMNS]]
    for name, cost in rows:
        if cost is not None:
            table.append([name, *row_of(_COLUMNS, cost)])
    if len(table) > 1:
        terminal.say(markdown(table, num_left=1))
        terminal.say(
            f"{report.num_tokens:,} tokens. KL (nats) and top token are against the first row."
        )
        if any(engine.cpu_cost for engine in report.engines):
            terminal.say(
                "Values are rounded to nearest, as GPU kernels do; on a CPU vLLM rounds them towards zero."
            )
    else:
        terminal.say(f"Not measured: {report.unmeasured}.")


def _details(view: EngineView) -> list[str]:
    lines = []
    if view.rules_of != view.version:
        lines.append(f"by the rules of {view.rules_of}, of which it is a patch release")
    if not view.refusal:
        reasons = {}
        for side in view.sides:
            if side.why and side.source:
                reasons[side.why, side.source] = side.name
        for (why, source), name in reasons.items():
            lines.append(f"{name}: {why} ({source})")
        lines += view.notes
    for name, count, effect in view.input_scales:
        lines.append(f"{count} tensors named {name}: {effect}")
    if not view.auto_fp8 and not view.refusal:
        lines.append("stores FP8 only when it is asked to (--kv-cache-dtype)")
    return lines
