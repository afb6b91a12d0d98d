"""One pass over a text: every setting side by side, compared with the first one token by token.

The model goes through each chunk once per setting. The head is then applied to a few rows at a
time, in turns, so that memory holds the logits of `LOGITS` bytes at most for the first setting and
as many for one other, whatever the vocabulary. What is kept is a log-probability, a KL and a
comparison per token, in float32 and bool. Rows that are not scored (a prompt's) do not go through the
head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freight.base.terminal import OnProgress
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import ModelRunner
from freight.lab.evaluate.divergence import Reference
from freight.lab.evaluate.perplexity import Window
from freight.lab.evaluate.stored_error import Probe
from freight.settings.engine import EngineConfig

LOGITS = 64 * 2**20  # bytes of logits in float32 that are held at a time, for each of two settings
TILE = 32  # rows that a matrix product computes together


@dataclass
class SettingRun:
    """One setting, with what has been measured of it so far; per scored token, in the text's order,
    on the CPU.

    `seconds` are those of the forward passes alone.
    """

    config: EngineConfig
    runner: ModelRunner
    probe: Probe | None = None
    name: str = ""
    weights: str = ""
    judged: list[Sequence[Tensor]] = field(default_factory=list)
    num_stored: int = 0
    clipped: int = 0
    num_passes: int = 0
    seconds: float = 0.0

    @property
    def token_logprobs(self) -> Tensor:
        """Log-probability of each scored token, in order, float32 [num_tokens]."""
        return torch.cat([logprobs for logprobs, _, _ in self.judged])

    @property
    def token_kl(self) -> Tensor:
        """KL of the first setting's distribution to this one's after each token, nats, float32
        [num_tokens].
        """
        return torch.cat([kl for _, kl, _ in self.judged])

    @property
    def token_same(self) -> Tensor:
        """Whether both rank the same token first, bool [num_tokens]."""
        return torch.cat([same for _, _, same in self.judged])

    @property
    def mean_kl(self) -> float:
        """Nats per token."""
        return float(self.token_kl.double().mean())

    @property
    def clipped_share(self) -> float:
        """Share of the stored keys and values that lay beyond the range of their scales."""
        return self.clipped / max(1, self.num_stored * self.runner.pool.values_per_token)

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int], start: int) -> Tensor:
        """Final states of these tokens, [rows, hidden_size]."""
        runner = self.runner
        if self.probe is not None:
            self.probe.begin(len(token_ids), runner.device)
            self.seconds += self.probe.seconds
        begin = now(runner.device)
        states = runner.run([SequenceSlice(token_ids, start, runner.pool.whole, Logits.ALL)]).hidden
        self.seconds += now(runner.device) - begin
        if self.probe is not None:  # without what it took
            self.seconds -= self.probe.seconds
        self.num_stored += len(token_ids)
        self.num_passes += 1
        assert states is not None  # this runner captures no steps
        return states

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """float32 logits [rows, vocab_size]."""
        begin = now(self.runner.device)
        logits = self.runner.model.logits(hidden)
        self.seconds += now(self.runner.device) - begin
        return logits


def now(device: str) -> float:
    """Return the seconds of a clock, once the device has done what it was asked for."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def rows_at_once(vocab_size: int) -> int:
    """Return rows of logits that are computed together: full tiles within LOGITS bytes, at least
    one.
    """
    return max(TILE, LOGITS // (4 * vocab_size) // TILE * TILE)


@torch.inference_mode()
def measure(runs: Sequence[SettingRun], windows: Sequence[Window], on_progress: OnProgress) -> None:
    """Judge every window under each of `runs`, the first being the one that the others are compared
    with. `on_progress(done, total)` counts the tokens of every run, chunk by chunk.
    """
    done = 0
    total = len(runs) * sum(len(window.token_ids) for window in windows)
    on_progress(done, total)
    chunk = runs[0].config.max_num_batched_tokens
    rows = rows_at_once(runs[0].runner.model.config.vocab_size)
    for window in windows:
        for start in range(0, len(window.token_ids), chunk):
            part = window.token_ids[start : start + chunk]
            num_context = max(0, window.first_scored - start)
            targets = torch.tensor(
                window.targets[start : start + chunk][num_context:],
                dtype=torch.int64,
                device=runs[0].runner.device,
            ).split(rows)
            states = []
            for run in runs:
                states.append(_states(run, runs[0], part, start)[num_context:].split(rows))
                done += len(part)
                on_progress(done, total)
            if num_context >= len(part):  # a chunk of a prompt
                continue
            for tokens, *hidden in zip(targets, *states, strict=True):
                _judge(runs, hidden, tokens)
    for run in runs:
        run.clipped = run.runner.pool.counters()[1]


def _states(run: SettingRun, first: SettingRun, token_ids: Sequence[int], start: int) -> Tensor:
    """`hidden` of one setting. What its probe has seen is compared at once, so two settings'
    outputs are held.
    """
    states = run.hidden(token_ids, start)
    if first.probe is not None and first.probe.rows is not None:
        assert run.probe is not None
        run.probe.compare(first.probe.outputs)
        if run is not first:
            run.probe.outputs.clear()
    return states


def _judge(runs: Sequence[SettingRun], states: Sequence[Tensor], targets: Tensor) -> None:
    """Log-probabilities, KL and top tokens of a few rows."""
    reference = Reference.of(runs[0].head(states[0]))
    for run, hidden in zip(runs, states, strict=True):
        if run is runs[0]:
            judged = reference.itself(targets)
        else:
            judged = reference.judge(run.head(hidden), targets)
        run.judged.append([values.cpu() for values in judged])


def mean_perplexity(logprobs: Tensor) -> float:
    """exp of the mean negative log-probability; infinite where a token is impossible, or nearly."""
    try:
        return math.exp(-float(logprobs.double().mean()))
    except OverflowError:
        return math.inf
