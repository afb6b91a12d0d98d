"""ModelRunner: one step's slices through the model, over the one cache, and on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from freight.cache.pool import KVPool
from freight.engine.decode_steps import DecodeSteps
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.engine.sampler import Draw, draw
from freight.model.decoder import Decoder, LanguageModel
from freight.parallel.stages import devices_of


class Drawn(NamedTuple):
    """What a step draws for which the host does not wait.

    tokens     int64 [rows], on the device that embeds them
    facts      int64 [2, rows], on the device that draws: see `sampler.draw`
    beginning  `RankLeader.beginning` of its launch
    ready      what a stream has to wait for before it reads `tokens`; None for the one that drew
    """

    tokens: Tensor
    facts: Tensor
    beginning: int = 0
    ready: torch.cuda.Event | None = None


class Inputs(NamedTuple):
    """The input tokens of a step: these rows of what the step before it draws, in rising order."""

    drawn: Drawn
    rows: Sequence[int]

    def tokens(self) -> Tensor:
        """int64 [rows], on the device."""
        tokens = self.drawn.tokens
        if self.drawn.ready is not None:
            stream = torch.cuda.current_stream(tokens.device)
            stream.wait_event(self.drawn.ready)
            tokens.record_stream(stream)
        if len(self.rows) == len(tokens):
            return tokens
        return torch.cat([tokens[row : row + 1] for row in self.rows])


class RankLeader(Protocol):
    """The other ranks of a model, which make the same calls as this one (`leader.py`).

    on_lost  called once, by another thread, when a rank is lost
    """

    on_lost: Callable[[], None]

    @property
    def size(self) -> int:
        """How many ranks there are, this one included."""

    @property
    def beginning(self) -> int:
        """How often all ranks began anew, with which they forget the steps before."""

    def running(self, slices: Sequence[SequenceSlice]) -> AbstractContextManager[None]:
        """Have the others run `slices`, as the body does. Raises RankError once a rank is lost."""

    def taking_logits(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Have the others compute the logits of `rows` of the last run, as the body does."""

    def launching(
        self,
        slices: Sequence[SequenceSlice],
        draws: Sequence[Draw],
        microbatch: int,
        inputs: Inputs | None,
    ) -> AbstractContextManager[None]:
        """Have the others run `slices` and draw, as the body does. Raises KernelError as well where
        they have forgotten the step that drew `inputs`.
        """

    def settle(self, beginning: int, copied: torch.cuda.Event | None) -> None:
        """Wait for an event behind a step that was launched after this beginning. Raises KernelError
        where a rank may have left the step.
        """

    def close(self) -> None:
        """End the other ranks."""


@dataclass(frozen=True)
class StepRows:
    """The rows of a step whose logits are wanted, one after another in the slices' order:
    `num_rows` of each slice.

    `hidden` has their final states [rows, hidden_size]; `captured` their logits, where the step was
    replayed. `leader` has the other ranks compute logits as well. `features` has those of all rows of
    the step, [rows, size], for a head that drafts (`DraftHead`); None without one.
    """

    model: LanguageModel
    num_rows: list[int]
    hidden: Tensor | None = None
    captured: Tensor | None = None
    leader: RankLeader | None = None
    features: Tensor | None = None

    def logits(self, rows: Sequence[int]) -> Tensor:
        """float32 [len(rows), vocab_size]: the logits of these rows, in rising order."""
        if self.leader is None or self.captured is not None:
            return self._logits(rows)
        with self.leader.taking_logits(rows):
            return self._logits(rows)

    def states(self, first: int, count: int) -> Tensor:
        """[count, hidden_size], in the compute dtype: the final states of rows from `first` on."""
        assert self.hidden is not None, "a step that is pooled is not replayed"
        return self.hidden[first : first + count]

    def _logits(self, rows: Sequence[int]) -> Tensor:
        source = self.captured
        if source is None:
            source = self.hidden
        assert source is not None
        if isinstance(rows, range) and rows.step == 1:
            source = source[rows.start : rows.stop]
        elif len(rows) < len(source):  # by slices: the host waits for no index on its way to a GPU
            source = torch.cat([source[row : row + 1] for row in rows])
        if self.captured is not None:
            return source
        return self.model.logits(source)

    def all_logits(self) -> Tensor:
        """float32 [rows, vocab_size]."""
        return self.logits(range(sum(self.num_rows)))


@dataclass(frozen=True)
class ModelRunner:
    """A model and its cache on a device. Steps that `captured` takes are replayed. With a `leader`
    the other ranks make the same steps. `feature_layers`: of a head that drafts (`DraftHead`).
    """

    model: LanguageModel
    pool: KVPool
    device: str
    captured: DecodeSteps | None = None
    leader: RankLeader | None = None
    feature_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # captured steps write into its pages
        assert self.captured is None or self.captured.pool is self.pool

    @torch.inference_mode()
    def run(self, slices: Sequence[SequenceSlice], tokens: Tensor | None = None) -> StepRows:
        """Store the slices' K and V, and give the rows whose logits are wanted. The next step may
        overwrite them.

        `tokens`, int64 [tokens] on the device, take the place of those in the slices, which are as
        many. Raises RankError once a rank is lost.
        """
        if self.leader is None:
            return self._run(slices, tokens)
        assert tokens is None, "of several ranks each draws its own: `launch`"
        with self.leader.running(slices):
            return self._run(slices, None)

    def _run(self, slices: Sequence[SequenceSlice], tokens: Tensor | None) -> StepRows:
        num_rows = [part.num_logit_rows for part in slices]
        if self.captured is not None and self.captured.takes(slices):
            logits = self.captured.run(slices, tokens)
            return StepRows(
                self.model,
                num_rows,
                captured=logits,
                leader=self.leader,
                features=self.captured.features,
            )
        device, *further = devices_of(self.pool.stages, self.device)
        batch = prepare(slices, self.pool.spec.groups, device, further)
        if tokens is not None:
            batch = replace(batch, token_ids=tokens)
        if self.feature_layers is None:
            hidden = self.model.hidden(batch, self.pool.layers)
            return StepRows(self.model, num_rows, hidden=hidden, leader=self.leader)
        assert isinstance(self.model, Decoder), "`open_head` refuses others"
        hidden, features = self.model.hidden_with(batch, self.pool.layers, self.feature_layers)
        return StepRows(self.model, num_rows, hidden, leader=self.leader, features=features)

    @torch.inference_mode()
    def launch(
        self,
        slices: Sequence[SequenceSlice],
        draws: Sequence[Draw],
        microbatch: int = 0,
        inputs: Inputs | None = None,
    ) -> Drawn:
        """Run slices, and draw the token behind each that has logits, on every rank. The host waits for no
        device.

        `inputs` take the place of the slices' tokens, and are of the last step of the microbatch that
        was launched. Raises RankError once a rank is lost, and KernelError where the ranks began anew
        since that step.
        """
        tokens = None
        if inputs is not None:
            tokens = inputs.tokens()
        if self.leader is None:
            return self._draw(self.run(slices, tokens), draws)
        with self.leader.launching(slices, draws, microbatch, inputs):
            rows = replace(self._run(slices, tokens), leader=None)  # the others take theirs untold
            drawn = self._draw(rows, draws)
        return drawn._replace(beginning=self.leader.beginning)

    def _draw(self, rows: StepRows, draws: Sequence[Draw]) -> Drawn:
        if not draws:  # a chunk of a prompt is not the last
            none = torch.empty(2, 0, dtype=torch.int64, device="cpu")
            return Drawn(none[0], none)
        tokens, facts = draw(rows.all_logits(), draws)
        first, *further = devices_of(self.pool.stages, self.device)
        if not further or tokens.device.type == "cpu":
            return Drawn(tokens, facts)
        # Now, and by a stream of its own: behind the step of another microbatch, which is queued next, the
        # first device would have to wait for it, and before it on the first device's own stream that step
        # would wait for these tokens.
        stream = _token_stream(first)
        with torch.cuda.stream(stream):
            embedded = tokens.to(first, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(stream)
        return Drawn(embedded, facts, ready=ready)

    def settle(self, drawn: Drawn, copied: torch.cuda.Event | None) -> None:
        """Wait for an event behind what a step drew. Raises KernelError where a rank may have left the
        step: its results do not count.
        """
        if self.leader is not None:
            self.leader.settle(drawn.beginning, copied)
        elif copied is not None:
            copied.synchronize()

    @property
    def num_ranks(self) -> int:
        """How many ranks compute the steps."""
        if self.leader is None:
            return 1
        return self.leader.size

    def close(self) -> None:
        """End the other ranks: this is wanted, which they say where they were started."""
        if self.leader is not None:
            self.leader.close()

    def on_lost(self, call: Callable[[], None]) -> None:
        """Have another thread call this once another rank is lost."""
        if self.leader is not None:
            self.leader.on_lost = call

    @torch.inference_mode()
    def logits(
        self, token_ids: Sequence[int], start: int, block_ids: Sequence[Sequence[int]]
    ) -> Tensor:
        """float32 logits after each of `token_ids`, which stand at `start` of the sequence in
        `block_ids`, by group.
        """
        return self.run([SequenceSlice(token_ids, start, block_ids, Logits.ALL)]).all_logits()


@cache
def _token_stream(device: str) -> torch.cuda.Stream:
    """Return the stream of a device on which drawn tokens come to it."""
    return torch.cuda.Stream(device)
