"""Measure recurrences over states of each format on a CPU: decoding with states in memory, prefill.

    python benchmarks/state_speed.py [--batch-size 16] [--rows 1024] [--rounds 20] [--threads 2] [--mamba2] [--cpu-time]

The shape is that of a gated delta net of Qwen3.5 (16 key heads, 32 heads of 128 × 128), or with
--mamba2 that of Nemotron 3 Nano (8 groups, 64 heads of 128 × 64), computed in bfloat16. A step
decodes one token of each sequence in so many layers that the states of each have left the caches. A
round is 16 tokens, so it rounds each state once; the formats alternate for every token. Ratios are
taken within a round, and their interval is that of order statistics, of at least 95 %. Prefill is
the rows of one sequence in one layer. The other operations of a layer are listed as well. With
--cpu-time one thread runs, and its processor time counts instead of the clock: for a shared
machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from freight.cache.spec import LayerStateSpec, layer_spec
from freight.fp8.cast import torch_dtype
from freight.fp8.formats import Format
from freight.kernels.interface import KernelSet
from freight.kernels.select import select_kernels
from freight.lab.bench.serving_figures import interval
from freight.lab.bench.timing import bytes_beyond_caches
from freight.model.mixers.delta_net.spec import DeltaNetConfig
from freight.model.mixers.mamba2.spec import Mamba2Config
from freight.operands.batch import Sequences
from freight.operands.recurrence import Convolution, DecayParameters, GatedNorm, RecurrenceRule
from freight.operands.states import States
from freight.operands.tiles import STATE_TILE
from freight.settings.device import cpu_name
from freight.settings.engine import LayerKVFormat

COMPUTE = Format.BFLOAT16
FORMATS = (Format.INT8, Format.E4M3FN, Format.BFLOAT16, Format.FLOAT32)  # ratios are to the first
BEFORE = 4 * STATE_TILE  # tokens of each sequence when a round begins
EVERY = 2048  # tokens of a block
DELTA_NET = DeltaNetConfig(key_heads=16, heads=32, k_dim=128, v_dim=128, width=4)
MAMBA2 = Mamba2Config(groups=8, heads=64, head_dim=64, state_size=128, width=4, norm_groups=8)

Call = Callable[[], object]
Clock = Callable[[], float]  # seconds
Times = dict[str, list[float]]


def seconds_of(call: Call, clock: Clock) -> float:
    begin = clock()
    call()
    return clock() - begin


def states_of(mixer: DeltaNetConfig | Mamba2Config, format: Format, blocks: int) -> States:
    """Make one layer's blocks, for sequences whose tokens left every state at zero."""
    spec = layer_spec(mixer, LayerKVFormat(COMPUTE, None), COMPUTE, format)
    assert isinstance(spec, LayerStateSpec)
    parts = {}
    for part in spec.parts:
        parts[part.name] = torch.zeros(blocks, *part.shape, dtype=torch_dtype(part.format))
    return States(parts, EVERY)


@dataclass(frozen=True)
class Inputs:
    """Inputs of the four operations, for some rows: columns of one projection, as in a layer."""

    projected: Tensor
    conv: Convolution
    gate: Tensor
    a: Tensor
    b: Tensor | None
    decays: DecayParameters
    rule: RecurrenceRule
    norm: GatedNorm
    sizes: tuple[int, int, int]

    @staticmethod
    def random(mixer: DeltaNetConfig | Mamba2Config, rows: int) -> Inputs:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch_dtype(COMPUTE))

        delta = isinstance(mixer, DeltaNetConfig)
        if isinstance(mixer, DeltaNetConfig):
            keys = mixer.key_heads * mixer.k_dim
            values = mixer.heads * mixer.v_dim
            group = mixer.v_dim
        else:
            keys = mixer.groups * mixer.state_size
            values = mixer.heads * mixer.head_dim
            group = values // mixer.norm_groups
        heads = (mixer.heads,)
        return Inputs(
            projected=normal(rows, mixer.channels + values)[:, : mixer.channels],
            conv=Convolution(normal(mixer.channels, mixer.width), None, silu=True),
            gate=normal(rows, values),
            a=normal(rows, mixer.heads),
            b=normal(rows, mixer.heads) if delta else None,
            decays=DecayParameters(torch.zeros(heads), torch.full(heads, -3.0)),
            rule=RecurrenceRule(delta, delta, None if delta else torch.ones(heads)),
            norm=GatedNorm(normal(group if delta else values), 1e-6, group, norm_first=delta),
            sizes=(keys, keys, values),
        )

    def others(
        self, kernels: KernelSet, states: States, sequences: Sequences
    ) -> Mapping[str, Call]:
        """Return the operations other than the recurrence, by name."""
        values = self.projected[:, -self.gate.shape[1] :]
        return {
            "convolve": partial(kernels.convolve, self.projected, self.conv, states, sequences),
            "decays": partial(kernels.decays, self.a, self.b, self.decays),
            "gated_norm": partial(kernels.gated_norm, values, self.gate, self.norm),
        }

    def recurrence(self, kernels: KernelSet, states: States, sequences: Sequences) -> Call:
        q, k, v = self.projected.split(self.sizes, 1)
        beta, log_decay = kernels.decays(self.a, self.b, self.decays)
        return partial(kernels.recurrence, q, k, v, beta, log_decay, self.rule, states, sequences)


def in_turns(calls: Mapping[str, Call], turn: int, clock: Clock) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each call; each turn begins with another call."""
    names = list(calls)
    first = turn % len(names)
    for name in names[first:] + names[:first]:
        yield name, seconds_of(calls[name], clock)


def rounds(steps: Mapping[str, Call], count: int, lengths: Tensor, clock: Clock) -> Times:
    """Return the seconds of each step by round, the mean over the tokens of a tile; a first round
    is left out.
    """
    times: Times = {name: [] for name in steps}
    for number in range(count + 1):
        totals = dict.fromkeys(steps, 0.0)
        for token in range(STATE_TILE):
            lengths.fill_(BEFORE + token + 1)
            for name, seconds in in_turns(steps, number * STATE_TILE + token, clock):
                totals[name] += seconds
        for name, total in totals.items():
            if number:
                times[name].append(total / STATE_TILE)
    return times


def table(times: Times, per: int, extra: Mapping[str, str] | None = None) -> None:
    """Print medians of `per` calls each, and their ratios to the first row's."""
    first = next(iter(times.values()))
    for name, taken in times.items():
        ratios = [item / other for item, other in zip(taken, first, strict=True)]
        low, high, _ = interval(ratios)
        ratio = f"{statistics.median(ratios):6.2f} ({low:.2f} to {high:.2f})"
        print(
            f"  {name:14}{statistics.median(taken) / per * 1e6:10.0f} µs  {ratio}  {(extra or {}).get(name, '')}"
        )


def decode(
    kernels: KernelSet, mixer: DeltaNetConfig | Mamba2Config, batch: int, count: int, clock: Clock
) -> None:
    inputs = Inputs.random(mixer, batch)
    lengths = torch.full((batch,), BEFORE + 1, dtype=torch.int32)
    tables = torch.arange(batch, dtype=torch.int32)[:, None].contiguous()
    sequences = Sequences(torch.arange(batch + 1, dtype=torch.int32), lengths, tables)
    steps: dict[str, Call] = {}
    sizes: dict[str, int] = {}
    least = sum(part[0].nbytes for part in states_of(mixer, FORMATS[0], 1).parts.values()) * batch
    layers = 1 + bytes_beyond_caches() // least
    for format in FORMATS:
        own = [states_of(mixer, format, batch) for _ in range(layers)]
        sizes[str(format)] = own[0].parts["state"].nbytes * layers
        calls = [inputs.recurrence(kernels, item, sequences) for item in own]
        steps[str(format)] = partial(_all, calls)
    buffer = torch.ones(bytes_beyond_caches() // 2)  # float32
    readings = [seconds_of(buffer.sum, clock) for _ in range(5)]
    times = rounds(steps, count, lengths, clock)
    readings += [seconds_of(buffer.sum, clock) for _ in range(5)]
    speed = buffer.nbytes / statistics.median(readings)
    shares = {}
    for name, size in sizes.items():
        rate = size / statistics.median(times[name])
        shares[name] = f"states at {rate / 1e9:5.1f} GB/s, {rate / speed:.2f} of reading memory"
    print(f"decode, batch {batch}, {layers} layers; of a layer, memory at {speed / 1e9:.1f} GB/s:")
    table(times, layers, shares)
    others = inputs.others(kernels, states_of(mixer, FORMATS[0], batch), sequences)
    table(_repeated(others, 20 * count, clock), 1)


def prefill(
    kernels: KernelSet, mixer: DeltaNetConfig | Mamba2Config, rows: int, count: int, clock: Clock
) -> None:
    inputs = Inputs.random(mixer, rows)
    numbers = ([0, rows], [rows], [[0] * (1 + rows // EVERY)])
    sequences = Sequences(*(torch.tensor(number, dtype=torch.int32) for number in numbers))
    calls = {
        str(format): inputs.recurrence(kernels, states_of(mixer, format, 1), sequences)
        for format in FORMATS
    }
    print(f"prefill of {rows} rows, of a layer:")
    table(_repeated(calls, count, clock), 1)
    table(
        _repeated(inputs.others(kernels, states_of(mixer, FORMATS[0], 1), sequences), count, clock),
        1,
    )


def _all(calls: list[Call]) -> None:
    for call in calls:
        call()


def _repeated(calls: Mapping[str, Call], count: int, clock: Clock) -> Times:
    times: Times = {name: [] for name in calls}
    for turn in range(count + 1):
        for name, seconds in in_turns(calls, turn, clock):
            if turn:
                times[name].append(seconds)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--mamba2", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(1 if args.cpu_time else args.threads)
    kernels = select_kernels("auto", "cpu")
    mixer = MAMBA2 if args.mamba2 else DELTA_NET
    print(f"{cpu_name()}, {kernels.name}, {torch.get_num_threads()} threads, {mixer}")
    decode(kernels, mixer, args.batch_size, args.rounds, clock)
    prefill(kernels, mixer, args.rows, args.rounds, clock)


if __name__ == "__main__":
    main()
