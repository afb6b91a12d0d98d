"""`freight bench serving`: load on a server that speaks OpenAI's API, ours or another's, or on
several in turns.

Guarantees: before anything is measured each server is asked once, so a wrong address, key or model
is one error, and what it does not accept is known and reported. Servers that are compared get the
same requests, and take turns within each round, the first one changing from round to round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from freight.base.fields import JsonObject
from freight.base.terminal import OnProgress, unseen
from freight.errors import ConfigError, FreightError
from freight.lab.bench.http_stream import StreamError
from freight.lab.bench.load import Amount, Level, Target, fetch, find_accepted, run_level
from freight.lab.bench.prompts import Ask, Ids, Lengths, Listed, Prompts, Text, piece, read_prompts
from freight.lab.bench.serving_figures import Run, answers_of, figures, ratios

HELD_OUT = Path(__file__).parents[2] / "demo" / "heldout.txt"
PROMPT_KINDS = ("text", "ids")
PROBE_CHARACTERS = 400  # of the text by which a server's characters per token are found at first
# pieces of the length asked for, by which they are found then; the shorter, the more they differ
PROBES = (16, 64)
PROBE_TOKENS = 2560  # so many tokens in all, within these numbers of pieces


@dataclass(frozen=True)
class ServingArgs:
    """What to measure. `model` None: the first that the first server lists.

    warmup         requests before each server's first run, which do not count
    shared_prefix  tokens with which every prompt begins, besides its own
    """

    targets: Sequence[Target]
    model: str | None
    levels: Sequence[Level]
    amount: Amount
    prompt_kind: str
    prompt: Lengths
    output: Lengths
    prompts_file: Path | None
    shared_prefix: int
    vocab_size: int | None
    warmup: int
    rounds: int
    seed: int


def check(args: ServingArgs) -> None:
    """Raises ConfigError for what cannot be measured, before a server is asked."""
    if args.prompt_kind not in PROMPT_KINDS:
        raise ConfigError(f"--prompt {args.prompt_kind!r} is unknown: choose text or ids")
    if args.prompt_kind == "ids" and args.targets[0].endpoint == "chat":
        raise ConfigError("--prompt ids needs --endpoint completions: a chat is text")
    if args.prompts_file is not None and args.shared_prefix:
        raise ConfigError("--prompts has its own prompts: leave --shared-prefix out")
    if len({target.address.url for target in args.targets}) < len(args.targets):
        raise ConfigError("--url is given twice with the same address: give each server once")


def measure_serving(args: ServingArgs, on_progress: OnProgress = unseen) -> tuple[list[Run], Any]:
    """Return all runs, and what --json prints. Raises FreightError for a server that does not
    answer, or answers nothing.
    """
    check(args)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_measure(args, on_progress))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: less of the cores that the server may need."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _measure(args: ServingArgs, on_progress: OnProgress) -> tuple[list[Run], JsonObject]:
    targets, prompts = await _prepare(args)
    per_run = args.amount.requests or 0
    total = per_run * len(args.levels) * len(targets) * args.rounds
    done = 0

    def count(answer: object) -> None:
        nonlocal done
        done += 1
        on_progress(min(done, total) if total else done, total)

    runs = []
    for number, level in enumerate(args.levels):
        for turn in range(args.rounds):
            first = turn % len(targets)
            # the same requests for all servers, others in each round
            seed = args.seed + 1000 * number + turn
            for target in [*targets[first:], *targets[:first]]:
                if turn == 0 and args.warmup:
                    warm = Level(concurrency=level.concurrency or args.warmup)
                    # no run's seed, so that no run finds a prompt in a prefix cache
                    below = args.seed - 1 - number
                    await run_level(target, prompts, warm, Amount(requests=args.warmup), below)
                answers = await run_level(target, prompts, level, args.amount, seed, count)
                runs.append(Run(target.address.url, level, turn, answers))
    answers = answers_of(runs)
    if not answers:
        raise ConfigError(
            f"no request was due within --duration {args.amount.seconds:g}: raise it, or --rate"
        )
    if all(answer.error for answer in answers):
        run = next(run for run in runs if run.answers)
        raise FreightError(
            f"{run.url}: no request was answered; the first failed so: {run.answers[0].message}"
        )
    return runs, describe(args, targets, runs)


def describe(args: ServingArgs, targets: Sequence[Target], runs: Sequence[Run]) -> JsonObject:
    """Return what --json prints: the settings, a row for each server and load, and ratios where
    there are several servers.
    """
    rows = []
    for level, target in product(args.levels, targets):
        url = target.address.url
        mine = [run for run in runs if run.url == url and run.level == level]
        rows.append(
            {
                "url": url,
                "model": target.model,
                "concurrency": level.concurrency,
                "rate": level.rate,
                "ignore_eos": target.ignore_eos,
                "usage_in_every_event": target.continuous_usage,
                **figures(mine),
            }
        )
    return {
        "endpoint": targets[0].endpoint,
        "prompts": str(args.prompts_file) if args.prompts_file else args.prompt_kind,
        "prompt_tokens_wanted": str(args.prompt),
        "output_tokens_wanted": str(args.output),
        "shared_prefix": args.shared_prefix,
        "requests_per_run": args.amount.requests,
        "seconds_per_run": args.amount.seconds,
        "warmup": args.warmup,
        "rounds": args.rounds,
        "seed": args.seed,
        "rows": rows,
        "ratios": ratios(runs),
    }


async def _prepare(args: ServingArgs) -> tuple[list[Target], Prompts]:
    """Return the servers, each asked once, and the prompts for all of them."""
    text = HELD_OUT.read_text(encoding="utf-8")
    # the server may have no tokenizer
    by_ids = args.prompt_kind == "ids" and args.prompts_file is None
    probe = Ask([0] * 8 if by_ids else text[:PROBE_CHARACTERS], 2)
    targets = []
    answers = []
    for target in args.targets:
        try:
            model = args.model or await _first_model(target)
            asked, answer = await find_accepted(replace(target, model=model), probe)
        except StreamError as error:
            raise FreightError(_way_out(target, error)) from None
        targets.append(asked)
        answers.append(answer)
    per_token = PROBE_CHARACTERS / (answers[0].num_prompt or 100)
    return targets, await _prompts(args, targets[0], text, per_token)


def _way_out(target: Target, error: StreamError) -> str:
    url = target.address.url
    if error.kind == "connection":
        return f"{error}: start a server there, or name another with --url"
    if error.kind in ("http_401", "http_403"):
        return f"{url} wants a key ({error}): give it with --api-key or FREIGHT_API_KEY"
    if error.kind == "http_404":
        return f"{url} has no such endpoint or model ({error}): see --endpoint and --model"
    if error.kind == "no_usage":
        return f"{url}: {error}; it must take stream_options.include_usage"
    return f"{url}: {error}"


async def _first_model(target: Target) -> str:
    listed = await fetch(target, "/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError):
        raise StreamError("malformed", "/v1/models lists no model: name one with --model") from None


async def _prompts(args: ServingArgs, target: Target, text: str, per_token: float) -> Prompts:
    if args.prompts_file is not None:
        asks = read_prompts(args.prompts_file, args.output, args.seed)
        for ask in asks:
            if ask.is_messages and target.endpoint != "chat":
                raise ConfigError(
                    f"--prompts {args.prompts_file} has messages: add --endpoint chat"
                )
            if ask.is_token_ids and target.endpoint == "chat":
                raise ConfigError(
                    f"--prompts {args.prompts_file} has token ids: leave --endpoint chat out"
                )
        return Listed(asks)
    if args.prompt_kind == "text":
        per_token = await _characters_per_token(target, text, args.prompt, per_token)
        return Text(text, per_token, args.prompt, args.output, args.shared_prefix)
    size = args.vocab_size or await _vocab_size(target)
    return Ids(size, args.prompt, args.output, args.shared_prefix)


async def _characters_per_token(target: Target, text: str, lengths: Lengths, guess: float) -> float:
    """Measure it as the server counts them in pieces of the length asked for, its chat template and
    BOS included.

    The pieces begin at even distances, where those of a load, which begin at random, will hardly
    begin. `guess` where the server does not answer them; the load itself then says why.
    """
    mean = (lengths.low + lengths.high) / 2
    length = max(1, round(mean * guess))
    count = round(min(max(PROBES[0], PROBE_TOKENS / mean), PROBES[1]))
    num_tokens = 0
    for index in range(count):
        ask = Ask(piece(text, len(text) * index // count, length), 1)
        try:
            _, answer = await find_accepted(target, ask)
        except StreamError:
            return guess
        num_tokens += answer.num_prompt
    return count * length / num_tokens if num_tokens else guess


async def _vocab_size(target: Target) -> int:
    for path in ("/tokenizer_info", "/info"):
        try:
            size = (await fetch(target, path)).get("vocab_size")
        except (StreamError, AttributeError):
            continue
        if isinstance(size, int) and size > 0:
            return size
    raise ConfigError(
        f"{target.address.url} does not say the size of its vocabulary: give it with --vocab-size"
    )
