"""The process of every rank but rank 0: `python -m freight.engine.follower FD…`, with the
descriptors of a socket to rank 0 and of the shared memory. On another machine than rank 0 the second
is a pipe, which hangs up when the command of that machine ends.

It opens the same model, reads its share of the weights, allocates its part of the cache, and makes
the calls that rank 0 tells it. It ends when the socket closes, and the kernel ends it with the process
that started it, also while it is stopped (`descent.py`). It writes nothing but errors.
"""

from __future__ import annotations

from freight.base.descent import ENDING, end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before imports that take long

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from freight.base.start_log import log_to_stderr
from freight.base.version import version
from freight.cache.arena import Arena, mapped
from freight.cache.pool import KVPool, allocate_pool
from freight.cache.spec import KVCacheSpec
from freight.checkpoint.lora import AdapterModules, LoraAdapter
from freight.engine.build import captured_steps, opened_head, share_for_cache
from freight.engine.fingerprint import fingerprint
from freight.engine.head_runner import HeadRunner
from freight.engine.heads import head_runner, kv_with_head, with_head
from freight.engine.leader import HANG_UP, opened_as, pulse
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.rank_check import rank_check
from freight.engine.runner import Drawn, Inputs, ModelRunner, StepRows
from freight.engine.sampler import Draw
from freight.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    FreightError,
    RankError,
    shown,
)
from freight.model.adapter_modules import adapter_modules
from freight.model.decoder import Decoder, LanguageModel
from freight.model.draft_head import DraftHead
from freight.model.open import OpenModel, open_model, open_random
from freight.parallel import messages
from freight.parallel.messages import Kind, Start, integers_of
from freight.parallel.places import Place
from freight.parallel.ranks import Ranks, Transport
from freight.parallel.shared import SharedMemory, passed_files
from freight.parallel.steps import LaunchNumbers, SliceNumbers, StepReader
from freight.settings.engine import EngineConfig

_LOGITS = tuple(Logits)

logger = logging.getLogger("freight")


def main() -> None:
    for stop in ENDING:
        signal.signal(stop, signal.SIG_IGN)  # rank 0 handles them, and its end is this one's
    number, *files = map(int, sys.argv[1:])
    connection = socket.socket(fileno=number)
    watched = [number]
    gone = 0
    if not is_near(connection):
        watched += files
        gone = 1  # over a network it says STOP when it means to go
    threading.Thread(target=_leave_with, args=(watched, gone), daemon=True).start()
    try:
        status = follow(connection, files)
    except (EOFError, ConnectionError, TimeoutError):  # rank 0 is gone
        status = gone
    except RankError:  # rank 0 sees which rank was lost, and names it
        status = 1
    leave(status)


def is_near(connection: socket.socket) -> bool:
    """Say whether rank 0 is on this machine."""
    return connection.family == socket.AF_UNIX


def _leave_with(watched: Sequence[int], status: int) -> None:
    """End the process once one of these hangs up, also while it reads weights, which may take
    minutes.
    """
    end = select.poll()
    for number in watched:
        end.register(number, HANG_UP)
    end.poll()
    leave(status)


def leave(status: int) -> None:
    """End the process at once: threads of kernels need not be waited for."""
    os._exit(status)


def follow(connection: socket.socket, files: Sequence[int]) -> int:
    """Start, and follow rank 0 until it says STOP, or its socket closes; return the exit status.

    Raises EOFError, ConnectionError or TimeoutError where it closes, and RankError if another rank
    is lost.
    """
    start = Start.decode(messages.expect(connection, Kind.START))
    log_to_stderr()
    logger.setLevel(max(start.log_level, logging.ERROR))  # rank 0 warns of the same
    pages = None
    if start.args.kv_store is not None:  # rank 0 reads and writes this rank's pages as well
        *files, pages = files
    try:
        opened, memory = _open(start, connection, files)
        config = opened.resolve(opened.args)
        kernels = opened.kernels(config)
        spec = opened.cache_spec(config)  # as rank 0: before the context is made to fit
        opened_to_draft = opened_head(opened, config, spec)
        spec = with_head(spec, opened_to_draft, config.compute_format, opened.ranks.size)
        of_model = fingerprint(opened, config, kernels, version())
        identity = opened_as(of_model, kernels.name, opened_to_draft)
        messages.send(connection, Kind.OPENED, identity.encode())
        max_len, positions = integers_of(messages.expect(connection, Kind.LOAD))
        model = opened.load(replace(config, max_model_len=max_len), positions)
        head = None if opened_to_draft is None else opened_to_draft.load(model)
        messages.send(connection, Kind.LOADED, _free_bytes(opened, config, spec))
        max_len, *num_blocks = integers_of(messages.expect(connection, Kind.POOL))
        config = replace(config, max_model_len=max_len)
        pool = _pool(opened, config, model, head, spec, num_blocks, pages)
        messages.send(connection, Kind.READY)
        memory.meet()
        runners = _runners(opened, config, model, head, pool)
        _check(connection, opened, config, memory)
    except FreightError as error:
        messages.send(connection, Kind.FAILED, f"{type(error).__name__}\n{error}".encode())
        raise RankError from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        what = f"out of memory: {error}".partition("\n")[0]
        messages.send(connection, Kind.FAILED, f"{CapacityError.__name__}\n{what}".encode())
        raise RankError from error
    with opened.threads(config), torch.inference_mode():
        modules = None
        if config.lora is not None:
            modules = adapter_modules(opened.model)
        return _serve(connection, *runners, memory, modules)


def _open(
    start: Start, connection: socket.socket, files: Sequence[int]
) -> tuple[OpenModel, Transport]:
    """Open the model as rank 0 has it."""
    rank = start.rank
    size = start.size
    if start.processors is not None:
        Place(frozenset(start.processors), start.cores).take()
        if "OMP_NUM_THREADS" not in os.environ:
            # torch was imported while bound as rank 0, maybe to fewer
            torch.set_num_threads(start.cores)
    if start.backend == "nccl":
        _take_gpu(start)
    memory = _transport(start, connection, files)
    if isinstance(memory, SharedMemory):
        threading.Thread(target=memory.show_life, args=(pulse(start.timeout),), daemon=True).start()
    if start.random_shape is None:
        opened = open_model(start.args)
    else:
        opened = open_random(start.args, start.random_shape)
    return opened.as_rank(Ranks(rank, size, memory), start.cores), memory


def _take_gpu(start: Start) -> None:
    """Make the GPU of this rank the process's own, the first of several where it has stages. Raises
    ConfigError if the machine has too few.
    """
    stages = start.args.pipeline_parallel_size
    first = start.rank % (start.size // start.args.nnodes) * stages
    count = torch.cuda.device_count()
    if first + stages > count:
        raise ConfigError(
            f"needs GPU {first + stages - 1} of its machine, counted from 0, and there are {count}"
        )
    torch.cuda.set_device(first)


def _transport(start: Start, connection: socket.socket, files: Sequence[int]) -> Transport:
    """Return the way to the other ranks."""
    rank = start.rank
    size = start.size
    if start.store is None and start.shares_memory:
        return SharedMemory(passed_files(size, rank, files), rank, start.timeout)
    from freight.engine.transports import transport
    from freight.parallel.distributed import LOOPBACK, private_store, reach_store

    if start.store is None:
        store = private_store(files[0])
        way = (start.timeout, LOOPBACK, start.backend, start.slot_bytes)
        return transport(store, rank, size, *way)
    host, port = start.store
    # of the network by which this machine reaches rank 0
    address = host
    if not is_near(connection):
        address = connection.getsockname()[0]
    store = reach_store(host, port)
    return transport(store, rank, size, start.timeout, address, start.backend, start.slot_bytes)


def _free_bytes(opened: OpenModel, config: EngineConfig, spec: KVCacheSpec) -> bytes:
    """Return what this rank has for its cache, on GPUs of its own, as LOADED says it; b'' on a CPU,
    whose memory rank 0 knows.
    """
    if config.device == "cpu":
        return b""
    return str(share_for_cache(opened, config, spec)).encode()


def _check(
    connection: socket.socket, opened: OpenModel, config: EngineConfig, memory: Transport
) -> None:
    """Compute what rank 0 checks ranks by, and say so. Raises KernelError where this one differs from
    one alone.
    """
    check = rank_check(opened, config)
    if check is None:
        return
    try:
        check()
    except FreightError:
        memory.fail()
        raise
    messages.send(connection, Kind.CHECKED)


def _pool(
    opened: OpenModel,
    config: EngineConfig,
    model: LanguageModel,
    head: DraftHead | None,
    spec: KVCacheSpec,
    num_blocks: list[int],
    pages: int | None,
) -> KVPool:
    """Allocate this rank's part of the cache, in the memory `pages` if rank 0 maps it as well."""
    kernels = opened.kernels(config)
    kv = kv_with_head(opened.with_rank_scales(config).kv, len(spec.layers))
    rotaries = model.rotaries
    if head is not None:
        rotaries += head.rotaries
    empty = None
    if pages is not None:
        empty = Arena(mapped(pages, Arena.bytes_for(spec, tuple(num_blocks)))).empty
        os.close(pages)
    parts = (kernels, config.device, rotaries, empty, model.stages)
    return allocate_pool(spec, kv, num_blocks, *parts)


def _runners(
    opened: OpenModel,
    config: EngineConfig,
    model: LanguageModel,
    head: DraftHead | None,
    pool: KVPool,
) -> tuple[ModelRunner, HeadRunner | None]:
    """Return what runs the model, and what runs a head that drafts, over their layers of `pool`. The
    features that a head takes come from rank 0.
    """
    kernels = opened.kernels(config)
    of_head = None
    if head is not None:
        num_layers = opened.model.num_layers
        layers = range(num_layers, len(pool.layers))
        of_head = head_runner(head, pool.of_layers(layers), kernels, config)
        pool = pool.of_layers(range(num_layers))
    captured = captured_steps(model, pool, kernels, config)
    runner = ModelRunner(model, pool, config.device, captured)
    return runner, of_head


def _serve(
    connection: socket.socket,
    runner: ModelRunner,
    head: HeadRunner | None,
    memory: Transport,
    modules: AdapterModules | None,
) -> int:
    """Compute what rank 0 tells, until it says STOP; return the exit status. modules: those of
    the whole model that adapters may change; None: it takes none.
    """
    reader = StepReader()
    failed = ""
    rows: StepRows | None = None
    drawn: dict[int, Drawn] = {}  # by microbatch, of the last step that was launched
    while True:
        kind, data = messages.receive(connection)
        if kind is Kind.STOP:
            return int(bool(data))
        if kind is Kind.RESTART:
            (times,) = integers_of(data)
            memory.restart(times)
            messages.send(connection, Kind.LEFT, f"{times} {failed}".encode())
            reader.clear()
            drawn.clear()
            failed = ""
            continue
        if failed:
            continue  # gathers would take part in those of the step that is left
        try:
            if kind is Kind.RUN:
                rows = runner.run(_slices(reader.decode(data)))
            elif kind is Kind.DRAFT:
                assert head is not None
                _draft(head, *reader.decode_draft(data))
            elif kind is Kind.LAUNCH:
                _launch(runner, reader.decode_launch(data), drawn)
            elif kind is Kind.ADAPTER:
                assert modules is not None
                _load_adapter(connection, runner, modules, data.decode())
            else:
                assert kind is Kind.LOGITS
                assert rows is not None
                rows.logits(integers_of(data))
            if kind is not Kind.LAUNCH:  # rank 0 waits for it when it reads the tokens
                memory.finish()
        except RankError:
            raise
        except Exception as error:
            memory.fail()
            failed = f"{type(error).__name__}: {error}"


def _draft(runner: HeadRunner, parts: Sequence[SliceNumbers], features: bytes) -> None:
    """Run a pass of a head, with the features that rank 0 has of its rows; b'': it takes none."""
    slices = _slices(parts)
    given = None
    if features:
        num_rows = sum(len(part.token_ids) for part in slices)
        words = torch.frombuffer(bytearray(features), dtype=runner.dtype)
        given = words.reshape(num_rows, -1)
    runner.run(slices, given)


def _launch(runner: ModelRunner, launch: LaunchNumbers, drawn: dict[int, Drawn]) -> None:
    """Run a step and draw its tokens, which the next one of its microbatch may take from `drawn`."""
    inputs = None
    if launch.rows is not None:
        inputs = Inputs(drawn[launch.microbatch], launch.rows)
    draws = [Draw(one.params, one.seed, one.position) for one in launch.draws]
    slices = _slices(launch.slices)
    drawn[launch.microbatch] = runner.launch(slices, draws, launch.microbatch, inputs)


def _slices(parts: Sequence[SliceNumbers]) -> list[SequenceSlice]:
    """Return slices as rank 0 has them."""
    return [
        SequenceSlice(
            part.token_ids,
            part.start,
            part.block_ids,
            _LOGITS[part.logits],
            part.adapter,
            part.second_text,
        )
        for part in parts
    ]


def _load_adapter(
    connection: socket.socket, runner: ModelRunner, modules: AdapterModules, text: str
) -> None:
    """Load an adapter of the whole model, which has `modules`, into this rank's banks, and say so; or
    say why not.
    """
    slot, digest, path = text.split(" ", 2)
    model = runner.model
    assert isinstance(model, Decoder)
    assert model.banks is not None
    try:
        adapter = LoraAdapter.open(path, modules, model.banks.max_rank)
        if adapter.digest != digest:
            raise CheckpointError(f"{path}: rank 0 has another adapter in its file of this name")
        model.banks.load(int(slot), adapter)
    except FreightError as error:
        messages.send(connection, Kind.FAILED, f"{type(error).__name__}\n{error}".encode())
    except Exception as error:  # of a file that cannot be read, or of memory: rank 0 waits
        what = f"adapter {shown(path)} cannot be loaded: {type(error).__name__}: {error}"
        messages.send(connection, Kind.FAILED, f"{CheckpointError.__name__}\n{what}".encode())
    else:
        messages.send(connection, Kind.LOADED)


if __name__ == "__main__":
    main()
