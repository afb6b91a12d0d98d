"""The next decode step is launched while this one runs: on a device that works on its own, the host
is one step behind.

What is known when. A decode step's work follows from lengths and blocks, and they are known before
it has run: each of its requests has one token more. Only the tokens' values are missing, and they
are where the next step needs them, on the device. So `Engine.step`

1. takes the step that was launched ahead, or schedules and launches one;
2. asks the scheduler for the step that follows (`Scheduler.follow`) and launches it, with the
   tokens that the step under way draws as its input; requests that are known to end by `max_tokens`
   are not in it;
3. waits for the tokens of the first of the two and applies them, while the device computes the
   second.

A request that turns out to have ended (a stop id, a deadline, an abort, a failure) is dropped from
the second when that is applied. Its row stored one token behind all that is indexed for prefix
hits, in a block that nobody else writes before: what is scheduled later also runs later.

With layers on several devices there are as many steps under way, each of a microbatch
(`Scheduler.schedule`). There prompts are launched as well, so that they do not keep the other devices
waiting; what follows a prompt's last chunk is launched before its token is known.

Steps that need the host run as without this: on one device chunks of prefill; grammars, penalties,
biases, barred stop ids, stop strings, log-probabilities. So do all repairs. A step with a row that has no token,
or none yet (NaN, a nucleus wider than what was looked at), or that raised, is computed again by
`compute`, and what was launched on top of it is forgotten. It is scheduled again and stores the
same slots again. So results and errors are those of `compute`.

Of several ranks each draws the tokens itself, from the same logits by the same parameters, so that
they are on its device for the next step. The host of rank 0 alone reads them. Where a rank leaves a
step, all forget what was launched, and the step whose tokens are read then is computed again, too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freight.engine.compute import ChunkWork
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.runner import Drawn, Inputs, ModelRunner
from freight.engine.sampler import Draw
from freight.engine.step import Step

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class Launched:
    """A step under way, and what it draws.

    `facts` [2, chunks that sample] are the tokens and whether each is usable, on the host once
    `copied` has happened. `runner` computes it.
    """

    step: Step
    drawn: Drawn
    facts: Tensor
    copied: torch.cuda.Event | None
    runner: ModelRunner

    @property
    def is_wanted(self) -> bool:
        return any(chunk.is_wanted for chunk in self.step.chunks)

    def read(self) -> list[int] | None:
        """Return the tokens, for which the host waits; None if some row has none that can be used."""
        try:
            self.runner.settle(self.drawn, self.copied)
        except Exception as error:
            logger.warning("a step that was launched failed and is computed again: %s", error)
            return None
        tokens: list[int]
        tokens, usable = self.facts.tolist()
        if not all(usable):
            return None
        return tokens


def can_launch(work: Sequence[ChunkWork], prompts: bool = False) -> bool:
    """Return whether no chunk needs anything of the host, and every one is a token that is followed
    by a drawn one, or with `prompts` of a prompt.
    """
    return bool(work) and all(_draws_alone(item, prompts) for item in work)


def _draws_alone(work: ChunkWork, prompts: bool) -> bool:
    chunk = work.chunk
    params = work.chunk.request.params
    if work.scores or work.redraws or work.pooled is not None:
        return False
    if not chunk.samples:
        return prompts
    if params.logprobs is not None or params.stop or work.row.changes_logits:
        return False
    if chunk.num_tokens == 1:
        return True
    # a prompt is not to be computed twice because its nucleus was wider than what was looked at
    return prompts and (params.temperature == 0 or params.top_p >= 1)


def launch(runner: ModelRunner, step: Step, before: Launched | None = None) -> Launched | None:
    """Queue a step that `can_launch`, or one that follows `before`; None if it cannot be queued."""
    try:
        return _launch(runner, step, before)
    except Exception as error:  # `compute` makes it anew, and says what is wrong with which request
        logger.debug("a step could not be launched: %s", error)
        return None


@torch.inference_mode()
def _launch(runner: ModelRunner, step: Step, before: Launched | None) -> Launched:
    inputs = None
    if before is not None:
        inputs = _inputs(step, before)
    slices = []
    rows = []
    for chunk in step.chunks:
        request = chunk.request
        end = chunk.start + chunk.num_tokens
        token_ids: tuple[int, ...] = (0,)  # where `inputs` take its place
        if inputs is None:
            token_ids = request.tokens(chunk.start, end)
        logits = Logits.NONE
        if chunk.samples:
            logits = Logits.LAST
            rows.append(Draw(request.params, request.seed, end - request.num_prompt_tokens))
        slot = request.adapter_slot
        slices.append(SequenceSlice(token_ids, chunk.start, chunk.block_ids, logits, slot))
    drawn = runner.launch(slices, rows, step.microbatch, inputs)
    facts = drawn.facts
    if facts.device.type != "cuda":
        return Launched(step, drawn, facts, None, runner)
    on_host = torch.empty(facts.shape, dtype=facts.dtype, device="cpu", pin_memory=True)
    on_host.copy_(facts, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(facts.device))
    return Launched(step, drawn, on_host, copied, runner)


def _inputs(step: Step, before: Launched) -> Inputs:
    """What `before` draws for the requests of `step`, which are in the same order."""
    drawn = [chunk for chunk in before.step.chunks if chunk.samples]
    row_of = {id(chunk.request): row for row, chunk in enumerate(drawn)}
    rows = [row_of[id(chunk.request)] for chunk in step.chunks]
    return Inputs(before.drawn, rows)


class Lookahead:
    """The step after the one that was applied last, where it was launched while that one ran."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._launched: Launched | None = None
        self._unconfirmed: Launched | None = None  # on top of a step that is not applied yet

    def forget(self) -> None:
        """Forget what was launched: its requests are scheduled again."""
        self._launched = None
        self._unconfirmed = None

    def take(self) -> Launched | None:
        """Return the step, once; None if there is none, or none of its requests still runs."""
        launched = self._launched
        self.forget()
        if launched is None or not launched.is_wanted:
            return None
        return launched

    def begin(
        self, step: Step, work: Sequence[ChunkWork], prompts: bool = False
    ) -> Launched | None:
        """Launch a step that was just scheduled; None if it needs the host, or cannot be queued.
        prompts: it may have chunks of these.
        """
        if not can_launch(work, prompts):
            return None
        return launch(self._runner, step)

    def keep(self, launched: Launched) -> None:
        """Keep a step under way for `take`: other microbatches come first."""
        self._launched = launched

    def follow(self, step: Step, before: Launched) -> None:
        """Launch the step that follows `before`, which is under way."""
        self._unconfirmed = launch(self._runner, step, before)

    def confirm(self) -> None:
        """Take note that the step before was applied: what was launched on top of it is the next."""
        self._launched = self._unconfirmed
        self._unconfirmed = None
