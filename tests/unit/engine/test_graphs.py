"""What a captured step is told: the buffers say what `prepare` would, padded. Capturing itself
needs a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from freight.cache.groups import Pages
from freight.engine import build
from freight.engine import graphs as graphs_module
from freight.engine.block_tables import BlockTables
from freight.engine.decode_steps import Buffers, DecodeSteps
from freight.engine.graphs import CudaGraphs, bucket_of
from freight.engine.prepare import Logits, SequenceSlice, prepare
from freight.model.decoder import Decoder, Residual
from freight.operands.adapters import NO_ADAPTER
from freight.operands.batch import ForwardBatch
from freight.parallel.distributed import Distributed
from freight.parallel.push import Pushed
from freight.parallel.stages import stages_of

SLICES = [
    SequenceSlice([7], 10, ((3, 1, 4), (5, 0)), Logits.LAST),
    SequenceSlice([9], 0, ((2,), (3, 1)), Logits.ALL),
    SequenceSlice([8], 31, ((5, 6, 9, 8), (0, 0, 4, 7)), Logits.LAST),
]
GROUPS = [Pages((0,), 0, None, 8), Pages((1,), 0, 16, 8)]


def test_buckets_waste_little():
    assert [bucket_of(n) for n in (1, 2, 3, 5, 8, 9, 17, 64, 65, 100, 129)] == [
        1,
        2,
        4,
        8,
        8,
        16,
        24,
        64,
        96,
        128,
        160,
    ]
    assert all(bucket_of(n) >= n for n in range(1, 300))
    assert bucket_of(bucket_of(77)) == bucket_of(77)


@pytest.mark.parametrize("before", [[], SLICES, SLICES[::-1] + SLICES[:1]])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_is_told_what_prepare_tells_and_padding(before, count):
    buffers = Buffers(4, BlockTables(4, (6, 6), "cpu"), GROUPS, "cpu")
    buffers.fill(before)
    buffers.fill(SLICES[:count])
    told, expected = buffers.batch, prepare(SLICES[:count], GROUPS)
    for name in ("token_ids", "positions", "context_lens", "logit_rows"):
        assert torch.equal(getattr(told, name)[:count], getattr(expected, name)), name
        assert getattr(told, name).dtype == getattr(expected, name).dtype
    for group, (slots, tables) in enumerate(zip(told.slots, told.block_tables, strict=True)):
        assert torch.equal(slots[:count], expected.slots[group])
        assert slots[count:].eq(-1).all()
        for row, part in enumerate(SLICES[:count]):
            assert tables[row, : len(part.block_ids[group])].tolist() == list(part.block_ids[group])
    assert told.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert told.context_lens[count:].eq(0).all()
    assert told.num_tokens == told.num_seqs == 4


def test_rows_without_an_adapter_and_padding_have_none():
    """Also where a step before had other adapters there."""
    buffers = Buffers(4, BlockTables(4, (6, 6), "cpu"), GROUPS, "cpu", adapted=True)
    for slots in ([2, 1, 0], [None, 3], [1]):
        slices = [part._replace(adapter=slot) for part, slot in zip(SLICES, slots, strict=False)]
        buffers.fill(slices)
        assert buffers.batch.adapters is not None
        expected = prepare(slices, GROUPS).adapters
        assert expected is not None
        assert torch.equal(buffers.batch.adapters[: len(slots)], expected)
        assert buffers.batch.adapters[len(slots) :].eq(NO_ADAPTER).all()
    assert prepare(SLICES, GROUPS).adapters is None
    assert Buffers(4, BlockTables(4, (6, 6), "cpu"), GROUPS, "cpu").batch.adapters is None


@pytest.mark.parametrize("needed", [1, 20])
def test_the_largest_bucket_is_captured_first(needed, monkeypatch):
    """Graphs share a pool whose pieces do not grow: by rising size each would take memory of its
    own.
    """
    captured: list[int] = []

    def capture(_, batch):
        captured.append(batch.num_seqs)
        return lambda: torch.zeros(batch.num_seqs, 5)

    monkeypatch.setattr(CudaGraphs, "capture", capture)
    pool = SimpleNamespace(
        spec=SimpleNamespace(groups=GROUPS, blocks_of=lambda num_tokens: (num_tokens // 8,) * 2),
        stages=(),
    )
    steps = DecodeSteps(CudaGraphs(None, pool, 20), pool, 64, "cpu")
    for count in (needed, 3, needed):
        assert len(steps.run((SLICES * 7)[:count])) == count
    assert captured == [24, *([1] if needed == 1 else []), 4]


class FakeCuda:
    """What CUDA graphs are to several devices: a stream is of one, to use it makes that the current
    device, and only what is launched on the stream that is captured is in a graph.
    """

    def __init__(self) -> None:
        self.device = "cuda:0"
        self.current: dict[str, Any] = {}  # the stream of each device; none: its main one
        self.capturing: Any = None
        self.default: Any = None  # torch makes it at the first capture, and keeps it
        self.ran: list[str] = []
        self.shared: list[Any] = []  # the graph whose memory each one takes

    def launch(self, name: str) -> None:
        where = f"{name} on {self.device}"
        stream = self.current.get(self.device)
        if stream is not None and stream is self.capturing:
            stream.graph.launches.append(where)
        else:
            self.ran.append(where)

    def Stream(self) -> Any:
        return SimpleNamespace(device=self.device, wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return self.current.get(self.device) or self.Stream()

    @contextmanager
    def computing_on(self, device: str | None) -> Iterator[None]:
        before = self.device
        self.device = device or before
        yield
        self.device = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        with self.computing_on(stream.device):
            before = self.current.get(stream.device)
            self.current[stream.device] = stream
            yield
            self.current[stream.device] = before

    def CUDAGraph(self) -> Any:
        graph = SimpleNamespace(launches=[])
        graph.pool = lambda: graph
        graph.replay = lambda: self.ran.extend(graph.launches)
        return graph

    @contextmanager
    def graph(
        self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> Iterator[None]:
        if stream is None:
            self.default = stream = self.default or self.Stream()
        stream.graph = graph
        self.shared.append(pool)
        with self.stream(stream):
            self.capturing = stream
            yield
            self.capturing = None


def test_each_stage_is_captured_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(graphs_module, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(graphs_module, "computing_on", cuda.computing_on)
    stages = stages_of((1, 2, 1), ("cuda:0", "cuda:1", "cuda:2"))

    def launched(name: str, device: str, value: Any) -> Any:
        with cuda.computing_on(device):
            cuda.launch(name)
        return value

    row = torch.zeros(1, 2)
    model: Any = SimpleNamespace(
        stages=stages,
        begin=lambda batch: launched("begin", "cuda:0", Residual(row)),
        run_stage=lambda stage, stream, *_: launched(f"{stage.first}", stage.device, stream),
        end=lambda stream, batch: launched("end", "cuda:2", row),
        logits=lambda states: launched("head", "cuda:2", row),
    )

    def moved(stream: Residual, device: str) -> Residual:
        cuda.ran.append(f"new on {device}")
        return Residual(stream.x + 1)  # of its own memory

    def take(target: Residual, source: Residual) -> None:
        cuda.ran.append(f"copy {source.x.max():g} to {target.x.max():g}")

    monkeypatch.setattr(Residual, "on", moved)
    monkeypatch.setattr(Residual, "take", take)
    graphs = CudaGraphs(model, SimpleNamespace(layers=()), 4)  # type: ignore[arg-type]
    batch: Any = SimpleNamespace(on=lambda device: batch)
    for _ in range(2):  # also where torch has made its stream before
        replay = graphs.capture(batch)
        assert [line for line in cuda.ran if "new" in line] == ["new on cuda:1", "new on cuda:2"]
        cuda.ran.clear()
        replay()
        assert cuda.ran == [
            *("begin on cuda:0", "0 on cuda:0", "copy 0 to 1", "1 on cuda:1", "copy 1 to 2"),
            *("3 on cuda:2", "end on cuda:2", "head on cuda:2"),
        ]
        cuda.ran.clear()
    first = cuda.shared[:3]
    assert first == [None, None, None]  # a device's first graph has memory of its own
    assert [graph.launches[0] for graph in cuda.shared[3:]] == [
        *("begin on cuda:0", "1 on cuda:1", "3 on cuda:2")
    ]
    assert {device for device, stream in cuda.current.items() if stream} == set()


def test_a_stream_takes_all_parts_of_another() -> None:
    given = Residual(*(torch.zeros(2, 3) for _ in range(4)))
    source = Residual(*(torch.full((2, 3), float(index)) for index in range(1, 5)))
    given.take(source)
    assert [int(part.max()) for part in given if part is not None] == [1, 2, 3, 4]


def test_a_batch_on_another_device_says_the_same() -> None:
    """With its own block tables, and adapters, once it has taken what the first one says."""
    buffers = Buffers(4, BlockTables(4, (6, 6), "cpu"), GROUPS, "cpu", True, ("cpu:1",))
    slices = [part._replace(adapter=index) for index, part in enumerate(SLICES)]
    buffers.fill(slices)
    ours, theirs = buffers.batch, buffers.batch.on("cpu:1")
    assert theirs is not ours
    theirs.take(ours)
    assert theirs.block_tables[0].data_ptr() != ours.block_tables[0].data_ptr()
    for group in range(2):
        assert torch.equal(theirs.block_tables[group][:3], ours.block_tables[group][:3])
        assert ours.block_tables[group][:3].any()
    assert theirs.adapters is not None
    assert theirs.adapters[:3].tolist() == [0, 1, 2]


def test_a_prepared_batch_has_all_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # for a GPU alone
    slices = [SequenceSlice([7, 8, 9], 0, ((3,), (5,)), Logits.LAST, adapter=2, second_text=1)]
    batch = prepare(slices, GROUPS, "cpu", ("cpu:1",))
    theirs = batch.on("cpu:1")
    assert theirs is not batch
    assert theirs.adapters is not None
    assert theirs.token_types is not None
    assert theirs.adapters.tolist() == [2, 2, 2]
    assert theirs.token_types.tolist() == [0, 1, 1]
    assert theirs.token_ids.tolist() == [7, 8, 9]


class Model:
    """Gathers as many times by the group as there are rows above 4."""

    stages = ()

    def __init__(self, ranks):
        self.ranks, self.runs = ranks, 0

    def forward(self, batch, _):
        self.runs += 1
        self.ranks.grouped += max(0, batch.num_seqs - 4)
        return torch.full((batch.num_seqs, 5), float(self.runs))


def test_ranks_capture_what_they_push_and_capture_anew_after_a_step_that_was_left(monkeypatch):
    """A bucket whose gathers are the group's is launched; every rank finds the same, by running it."""
    ranks: Any = SimpleNamespace(grouped=0, times=0, finished=0)

    def finish():
        ranks.finished += 1

    ranks.finish = finish
    captured = []

    def capture(graphs, device, compute):
        logits = compute()
        captured.append(len(logits))
        return SimpleNamespace(replay=lambda: None), logits

    monkeypatch.setattr(CudaGraphs, "_captured", capture)
    pool: Any = SimpleNamespace(
        spec=SimpleNamespace(groups=GROUPS, blocks_of=lambda num_tokens: (num_tokens // 8,) * 2),
        stages=(),
        layers=(),
    )
    model: Any = Model(ranks)
    steps = DecodeSteps(CudaGraphs(model, pool, 8, ranks), pool, 64, "cpu")
    assert len(steps.run(SLICES)) == 3
    assert captured == [4]  # the largest, of 8 rows, was run and left as it is
    assert ranks.finished == 2
    runs = model.runs
    steps.run(SLICES)
    assert model.runs == runs
    steps.run(SLICES * 2)
    assert model.runs == runs + 1
    ranks.times = 1
    steps.run(SLICES)
    assert captured == [4, 4]
    assert {bucket for bucket, _ in steps.steps} == {8, 4}


@pytest.mark.parametrize("kind", ["pushed", "refused", "group", "alone"])
def test_steps_of_ranks_are_captured_where_they_push(kind, monkeypatch, caplog):
    ranks: Any = None
    if kind == "group":
        ranks = object.__new__(Distributed)
    elif kind != "alone":
        ranks = object.__new__(Pushed)
        ranks.refused, ranks._peers = "rank 1: no NVLink", None
        if kind == "pushed":
            ranks.refused, ranks._peers = "", object()
    made = []
    monkeypatch.setattr(build, "CudaGraphs", lambda *given: made.append(given[-1]) or "graphs")
    monkeypatch.setattr(build, "DecodeSteps", lambda *given: given[0])
    decoder = object.__new__(Decoder)
    object.__setattr__(decoder, "config", SimpleNamespace(is_sparse=False))
    kernels: Any = SimpleNamespace(name="triton", ranks=SimpleNamespace(transport=ranks))
    config: Any = SimpleNamespace(device="cuda", max_num_seqs=4, max_model_len=64)
    caplog.set_level(logging.INFO, "freight")
    steps = build.captured_steps(decoder, None, kernels, config)
    if kind in ("refused", "group"):
        assert steps is None
        assert caplog.messages == ["steps are not captured: NCCL gathers"]
        return
    assert steps == "graphs"
    assert made == [ranks if kind == "pushed" else None]


def test_a_copy_of_a_batch_takes_all_of_it_and_shares_nothing() -> None:
    """Whatever a layer of a later stage reads. Choices of sparse attention, which has no stages, are not
    of a batch but of its step.
    """
    made = ("some_decode", "copies", "choices")

    def filled(value: int) -> ForwardBatch:
        parts = {}
        for field in fields(ForwardBatch):
            if field.name in ("slots", "block_tables"):
                parts[field.name] = (torch.full((2,), value), torch.full((3,), value))
            elif field.name not in made:
                parts[field.name] = torch.full((4,), value)
        return ForwardBatch(**parts)  # type: ignore[arg-type]

    batch = filled(1)
    copy = batch.copied_to("cpu")
    copy.take(filled(2))
    for changed, value in ((copy, 2), (batch, 1)):
        tensors = [tensor for tensor in tree_leaves(vars(changed)) if isinstance(tensor, Tensor)]
        assert len(tensors) == len(fields(ForwardBatch)) - len(made) + 2
        assert all(bool((tensor == value).all()) for tensor in tensors)
