"""Engine: requests in, outputs out, one step at a time. Knows no threads and no transport.

`add` refuses what cannot be served before anything is computed; `step` schedules, runs the model, samples, and
applies the result; `output` says what a request has come to. A request leaves through `release`, finished or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from freight.cache.blocks import BlockAllocator
from freight.detokenizer import Detokenizer
from freight.engine.intake import Intake
from freight.engine.prepare import Logits, SequenceSlice
from freight.engine.progress import Completion, Group, to_logprobs
from freight.engine.request import Request
from freight.engine.runner import ModelRunner
from freight.engine.sampler import Sampled, SamplingRow, prompt_logprobs, sample, sibling_seed
from freight.engine.scheduler import ScheduledChunk, Scheduler
from freight.errors import RequestError
from freight.outputs import FinishReason, RequestOutput
from freight.sampling import SamplingParams


class Engine:
    """Continuous batching over one model and one cache."""

    def __init__(
        self,
        runner: ModelRunner,
        allocator: BlockAllocator,
        scheduler: Scheduler,
        intake: Intake,
        stop_token_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.runner = runner
        self.allocator = allocator
        self.scheduler = scheduler
        self.intake = intake
        self.tokenizer = intake.tokenizer
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self.num_computed_tokens = 0  # since the start: tokens whose keys and values were computed and stored
        self._num_added = 0
        self._groups: dict[str, Group] = {}
        self._completions: dict[str, tuple[Group, Completion]] = {}

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams) -> None:
        """Queue a prompt, text or token ids.

        Raises RequestError, or CapacityError, for one that cannot run; nothing is kept of it.
        """
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use")
        text, token_ids = self.intake.accept(prompt, params)
        seed = params.seed if params.seed is not None else sibling_seed(self._seed, self._num_added)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._stop_token_ids
        group = Group(request_id, text, token_ids, params, [], [None])
        for index in range(params.n):
            request = Request(
                request_id=f"{request_id}/{index}",
                group=request_id,
                index=index,
                prompt_token_ids=tuple(token_ids),
                params=params if index == 0 else replace(params, prompt_logprobs=None),  # one of them is enough
                seed=sibling_seed(seed, index),
                stop_token_ids=stops,
            )
            self.scheduler.add(request)  # refuses all of a group or none: they have the same size
            detokenize = self.tokenizer is not None and params.detokenize
            detokenizer = Detokenizer(self.tokenizer, params, token_ids) if self.tokenizer and detokenize else None
            completion = Completion(request, detokenizer, self.tokenizer if detokenize else None)
            group.completions.append(completion)
            self._completions[request.request_id] = (group, completion)
        self._groups[request_id] = group
        self._num_added += 1

    def step(self) -> list[str]:
        """Run one forward pass; returns the ids of the requests that have news."""
        step = self.scheduler.schedule()
        if not step.chunks:
            return []
        logits = self.runner.run([_to_slice(chunk) for chunk in step.chunks])
        self.num_computed_tokens += sum(chunk.num_tokens for chunk in step.chunks)
        for chunk, rows in zip(step.chunks, logits, strict=True):
            if _wants_prompt_logprobs(chunk):
                self._take_prompt_logprobs(chunk, rows)
        sampling = [
            (chunk.request, rows[-1:]) for chunk, rows in zip(step.chunks, logits, strict=True) if chunk.samples
        ]
        results = _sample(sampling)
        self.scheduler.apply(step, {request_id: result.token_id for request_id, result in results.items()})
        news: dict[str, None] = {}
        for request_id, result in results.items():
            group, completion = self._completions[request_id]
            stop = completion.append(result)
            if stop is not None:
                self.scheduler.finish(request_id, FinishReason.STOP, stop)
            news[group.request_id] = None
        return list(news)

    def _take_prompt_logprobs(self, chunk: ScheduledChunk, rows: Tensor) -> None:
        """rows: logits at positions start …; each is judged by the prompt token that follows it."""
        group, _ = self._completions[chunk.request.request_id]
        prompt = chunk.request.prompt_token_ids
        first = len(group.prompt_logprobs)  # entries that are there already (recomputed after a preemption)
        targets = prompt[max(first, chunk.start + 1) : chunk.start + chunk.num_tokens + 1]
        if targets:
            begin = max(first, chunk.start + 1) - 1 - chunk.start
            wanted = rows[begin : begin + len(targets)]
            ids = wanted.new_tensor(targets).long()
            for entries in prompt_logprobs(wanted, ids, chunk.request.params.prompt_logprobs or 0):
                group.prompt_logprobs.append(to_logprobs(entries, self.tokenizer))

    def output(self, request_id: str) -> RequestOutput:
        """What the request has come to so far."""
        return self._groups[request_id].output()

    def abort(self, request_id: str) -> None:
        """Stop computing a request; its output stays until `release`. Unknown or finished ids are ignored."""
        group = self._groups.get(request_id)
        for completion in group.completions if group else []:
            if not completion.request.is_finished:
                self.scheduler.abort(completion.request.request_id)
                completion.flush()

    def release(self, request_id: str) -> None:
        """Forget a request, aborting what still runs."""
        self.abort(request_id)
        group = self._groups.pop(request_id, None)
        for completion in group.completions if group else []:
            del self._completions[completion.request.request_id]


def _wants_prompt_logprobs(chunk: ScheduledChunk) -> bool:
    request = chunk.request
    return request.params.prompt_logprobs is not None and chunk.start < len(request.prompt_token_ids)


def _to_slice(chunk: ScheduledChunk) -> SequenceSlice:
    tokens = chunk.request.tokens(chunk.start, chunk.start + chunk.num_tokens)
    logits = Logits.ALL if _wants_prompt_logprobs(chunk) else Logits.LAST if chunk.samples else Logits.NONE
    return SequenceSlice(tokens, chunk.start, chunk.block_ids, logits)


def _sample(sampling: list[tuple[Request, Tensor]]) -> dict[str, Sampled]:
    """Sample one token for each (request, its logits [1, vocab_size])."""
    if not sampling:
        return {}
    rows = [
        SamplingRow(
            params=request.params,
            seed=request.seed,
            position=len(request.output_token_ids),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            stop_token_ids=request.stop_token_ids,
        )
        for request, _ in sampling
    ]
    results = sample(torch.cat([logits for _, logits in sampling]), rows)
    return {request.request_id: result for (request, _), result in zip(sampling, results, strict=True)}
