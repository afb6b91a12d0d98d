"""Engine: requests in, what is new of them out, one step at a time. Knows no threads and no
transport.

`accept` refuses what cannot be served before anything is computed; `add` queues it; `step`
schedules, runs the model, samples, applies the result and returns deltas; `output` says all that a
request has come to. A request leaves through `release`, finished or not.

A request fails alone: what cannot be computed further ends with finish reason ERROR, and the others
go on with the same bits. An exception may interrupt any method (Ctrl-C raises one anywhere). While
requests and blocks are being changed `_dirty` is set; where it is found set, the next method first
rebuilds everything from what never is half done, the prompts and the tokens so far. So a caller
that is interrupted has only to release its own requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from freight.cache.manager import CacheManager
from freight.cache.stored import StoredPrefixes
from freight.engine.accounts import Stamps
from freight.engine.adapters import Adapters, AdapterSlots, LoadedAdapter
from freight.engine.ahead import Launched, Lookahead
from freight.engine.compute import ChunkResult, ChunkWork, StepResult, compute, compute_alone
from freight.engine.drafting import Drafting
from freight.engine.drafts import Drafter, Drafts, Forced
from freight.engine.grammar import Grammars, Matcher
from freight.engine.guesses import Guesses
from freight.engine.intake import AcceptedPrompt, Intake
from freight.engine.pace import Pace
from freight.engine.pooled import PooledPrompt
from freight.engine.progress import Completion, Group
from freight.engine.redraw import RedrawGroup, Redrawn
from freight.engine.request import Request
from freight.engine.runner import ModelRunner
from freight.engine.sampler import Sampled, sibling_seed
from freight.engine.scheduler import Scheduler
from freight.engine.stated import StatedAnswer
from freight.engine.step import Mode, ScheduledChunk, Step
from freight.engine.thinking import TagTokens, Thought
from freight.errors import RequestError
from freight.model.decoder import LanguageModel
from freight.outputs import (
    EngineStats,
    FinishReason,
    RequestDelta,
    RequestOutput,
    RequestTimes,
)
from freight.sampling import SamplingParams
from freight.text.detokenizer import Detokenizer
from freight.text.logprobs import to_logprobs

SECONDS_BETWEEN_READS = 1.0  # of the pool's counters
CLOSE_SECONDS = 4.0  # for what is to be stored yet: a server gives its engine five

Entry = tuple[Group, Completion]  # a completion, with its request


@dataclass(frozen=True)
class Parts:
    """What of an engine depends on the weights."""

    runner: ModelRunner
    store: StoredPrefixes | None
    adapter_slots: AdapterSlots | None


class Engine:
    """Continuous batching over one model and one cache.

    Every step is computed inside of `threads`; `clock` gives seconds that never run backwards, for
    `timeout_s` and for the times of requests.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: CacheManager,
        scheduler: Scheduler,
        intake: Intake,
        stop_token_ids: frozenset[int],
        seed: int,
        threads: AbstractContextManager[object],
        clock: Callable[[], float] = time.monotonic,
        mode: Mode = Mode.REPEATABLE,
        pace: Pace | None = None,
        store: StoredPrefixes | None = None,
        reproducible: bool = False,
        adapter_slots: AdapterSlots | None = None,
        drafting: Drafting | None = None,
        drafts_from_text: bool = True,
    ) -> None:
        """`pace`: how many tokens a step has, by the clock; None: as many as there are. `store`:
        what `cache` has below it. `reproducible`: whether a row has the same bits in any step.
        `adapter_slots`: None: the engine takes no adapters. `drafting`: a head that drafts; None without
        one. `drafts_from_text`: whether the text of requests drafts, where `scheduler` has drafts.
        """
        self.runner = runner
        self.cache = cache
        self.scheduler = scheduler
        self.intake = intake
        self.tokenizer = intake.tokenizer
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        tokenizer = intake.tokenizer
        self.grammars: Grammars | None = None
        if tokenizer is not None:
            self.grammars = Grammars(tokenizer, intake.vocab_size, stop_token_ids)
        self._threads = threads
        self._drafting = drafting
        self._drafts = scheduler.most_drafts > 0
        self._drafts_from_text = drafts_from_text
        self.clock = clock
        # since the start: tokens whose keys and values were computed and stored
        self.num_computed_tokens = 0
        self._num_added = 0
        # the requests that there are: a group is put in last and taken out last
        self.groups: dict[str, Group] = {}
        self._completions: dict[str, tuple[Group, Completion]] = {}
        self._unreported: dict[Entry, None] = {}  # what advanced since its last delta, in order
        self._deadlines: dict[str, float] = {}  # of groups with timeout_s, in seconds of the clock
        self._dirty = False
        # a partial of `groups`, and no bound method: an engine that is dropped ends at once
        self.adapters = Adapters(adapter_slots, partial(_slots_in_use, self.groups))
        self.mode = mode
        self.is_reproducible = reproducible
        # the errors of steps that were computed alone, since one was lost
        self._logged: set[str] = set()
        self.pace = pace
        self.store = store
        self._renewed: Parts | None = None  # they are about to take the place of the others
        # of each microbatch; one step is of the microbatch whose turn it is
        self._lookaheads = self._new_lookaheads()
        self._turn = 0
        # when the pool's counters were read, NaNs, clipped values
        self._stored: tuple[float, int, int] | None = None
        self._nans_before = 0  # of caches that it had before
        self._clipped_before = 0
        self.sleep_level = 0  # above 0 it cannot compute (`renewal.Sleep`)

    @property
    def model(self) -> LanguageModel:
        """The weights of now, also after `renew` was interrupted."""
        self._repair()
        return self.runner.model

    @property
    def has_store(self) -> bool:
        """Whether prefixes are stored; its threads also work while no request runs."""
        return self.store is not None

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def has_unreported(self) -> bool:
        """Whether there is something new of a request since its last delta."""
        return bool(self._unreported)

    def on_lost(self, call: Callable[[], None]) -> None:
        """Have another thread call this once a rank of the model is lost, for which no step waits."""
        self.runner.on_lost(call)

    @property
    def _draft_sources(self) -> tuple[str, ...]:
        """What may draft here, as `ScheduledChunk.drafted_by`."""
        if not self._drafts:
            return ()
        sources: tuple[str, ...] = ()
        if self._drafts_from_text:
            sources += (Drafter.source,)
        if self.grammars is not None:
            sources += (Forced.source,)
        if self._drafting is not None:
            sources += (self._drafting.method,)
        return sources

    @property
    def has_head(self) -> bool:
        """Whether something drafts besides the text of requests."""
        return self._drafting is not None

    def accept(
        self, prompt: str | Sequence[int], params: SamplingParams, add_special_tokens: bool = True
    ) -> AcceptedPrompt:
        """Tokenize and check a prompt, text or token ids. Changes nothing.

        add_special_tokens: to a text what the tokenizer adds, such as BOS.

        Raises RequestError for one that cannot be served with `params`, or structured outputs that
        cannot be compiled, and CapacityError for one that may outgrow the whole cache.
        """
        accepted = self.intake.accept(prompt, params, add_special_tokens)
        if self.grammars is not None and params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)
        self.scheduler.token_limit(len(accepted.token_ids), params.max_tokens)
        return accepted

    def add(
        self,
        request_id: str,
        prompt: AcceptedPrompt,
        params: SamplingParams,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        """Queue a prompt that was accepted with `params`, for the model with `adapter`. Raises
        RequestError for an id in use.

        Structured outputs that `accept` did not compile lately are compiled now.
        """
        self._repair()
        self._check_new(request_id)
        self._queue(self._new_group(request_id, prompt, params, adapter))

    def _check_new(self, request_id: str) -> None:
        if self.sleep_level:
            raise RequestError(f"the model sleeps at level {self.sleep_level}: wake it up first")
        if request_id in self.groups:
            raise RequestError(f"request id {request_id!r} is in use")

    def _queue(self, group: Group) -> None:
        timeout = group.params.timeout_s
        request_id = group.request_id
        self._dirty = True
        self._num_added += 1
        if timeout is not None:
            self._deadlines[request_id] = self.clock() + timeout
        for completion in group.completions:
            self.scheduler.add(completion.request)
            self._completions[completion.request.request_id] = (group, completion)
        self.groups[request_id] = group
        self._dirty = False

    def redraw(
        self,
        request_id: str,
        prompt: AcceptedPrompt,
        params: SamplingParams,
        answers: Sequence[Sequence[int]],
        adapter: LoadedAdapter | None = None,
    ) -> None:
        """Queue the answers to an accepted prompt, one for each of its completions, to be checked:
        every token is drawn again, from one prefill of prompt and answer (`stated.py`).

        Raises RequestError for an id in use, another number of answers, a token outside the
        vocabulary, and an answer that the context has no room for; CapacityError for one that the
        cache has none for. Ends as other requests do; `redrawn` has what came of it.
        """
        self._repair()
        self._check_new(request_id)
        group = self._new_redraws(request_id, prompt, params, answers, adapter)
        for completion in group.completions:
            self.scheduler.token_limit(completion.request.num_prompt_tokens, 0)
        self._queue(group)

    def redrawn(self, request_id: str) -> Redrawn:
        """Return what came of a redraw that is finished. To be called once."""
        group = self.groups[request_id]
        assert isinstance(group, RedrawGroup)
        return group.result()

    def step(self, quiet_until: float = -math.inf) -> list[RequestDelta]:
        """Run one forward pass; returns what is new of each request that advanced or ended.

        Before `quiet_until`, in seconds of the clock, only a request that has its first token or of
        which a completion has ended has a delta. What is new of the others is in a later one, or in
        `report`: `has_unreported`. If a request waits to be admitted, it may begin now, and its
        prompt may take a long step: then all have a delta as soon as one has.
        """
        self._repair()
        started = 0.0
        if self._is_timed:
            started = self.clock()
        self._dirty = True
        expired = self._expire()
        step, launched = self._next_step()
        if self.store is not None:
            self.store.step(self.scheduler.num_decoding > 0, idle=not step.chunks)
        self._dirty = not self.mode.repeats  # a pass that is interrupted may have changed states
        with self._threads:
            if self._drafting is not None and self.scheduler.asks_head:
                step = self._with_drafts(step, self._drafting)
            step, result = self._compute(step, launched)
        self._dirty = True
        advanced: list[Entry] = []
        if result.lost:
            self.scheduler.lose(step)
        else:
            advanced = self._apply(step, result.chunks)
        if self._drafts and not result.repeated:
            self._leave_out_rejected(step)
        self._lookahead.confirm()
        # the time of a repeated step is not that of one
        if self._is_timed and step.chunks and not result.repeated:
            self._note_time(step, self.clock() - started)
        changed = [*expired, *advanced]
        self._unreported.update(dict.fromkeys(changed))
        deltas = self._report(self._due(changed, quiet_until))
        self._dirty = False
        return deltas

    def report(self) -> list[RequestDelta]:
        """Return what is new of each request since its last delta, where steps were quiet."""
        self._repair()
        self._dirty = True
        deltas = self._report(self._unreported)
        self._dirty = False
        return deltas

    def output(self, request_id: str) -> RequestOutput:
        """Return all that the request has come to so far."""
        self._repair()
        return self.groups[request_id].output()

    def is_finished(self, request_id: str) -> bool:
        return self.groups[request_id].finished

    def num_deltas(self, request_id: str) -> int:
        """Return how many deltas the request has had; one more means that there is something new."""
        return self.groups[request_id].num_deltas

    def times(self, request_id: str) -> RequestTimes:
        """Return what the request has taken so far, or until its end; also when aborted, which
        gives no last delta.
        """
        self._repair()
        return self.groups[request_id].times(self.clock())

    def stats(self) -> EngineStats:
        """Return what the engine does now, and its totals. The pool's counters, a wait on a GPU,
        are read once a second.
        """
        self._repair()
        now = self.clock()
        if self._stored is None or now - self._stored[0] >= SECONDS_BETWEEN_READS:
            self._stored = (now, *self.runner.pool.counters())
        _, nans, clipped = self._stored
        nans += self._nans_before
        clipped += self._clipped_before
        num_held, reusable = self.cache.usage()
        totals = self.scheduler.totals
        store = None
        if self.store is not None:
            store = self.store.stats()
        running, waiting = self.scheduler.adapters_in_use()
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            capacity_tokens=self.cache.capacity_tokens,
            held_tokens=num_held,
            reusable_tokens=reusable,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            prompt=totals.prompt,
            generated=totals.generated,
            preemptions=totals.preemptions,
            failed=totals.failed,
            drafted=totals.drafted,
            accepted=totals.accepted,
            drafted_by={source: totals.drafted_by[source] for source in self._draft_sources},
            accepted_by={source: totals.accepted_by[source] for source in self._draft_sources},
            nans=nans,
            clipped=clipped,
            store=store,
            running_adapters=running,
            waiting_adapters=waiting,
        )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the store have what it wants of the cache, for `seconds` at most, and end its threads;
        then end the other ranks. An engine with neither has nothing to close.
        """
        if self.store is not None:
            self._repair()
            self.scheduler.offer_running()
            self.store.close(seconds)
        self.runner.close()

    def renew(self, parts: Parts) -> None:
        """Go on with other weights, once no request is unfinished: nothing of the cache is found
        again, and no adapter is loaded. What stands for the store of before is closed already.
        """
        self._repair()
        assert not self.has_unfinished, "a request would have tokens of two versions"
        self._dirty = True
        self._renewed = parts
        self._repair()

    def forget_prefixes(self) -> None:
        """Index no block of the cache any longer. Running requests keep theirs."""
        self._repair()
        self._dirty = True
        self.cache.forget_all()
        self._dirty = False

    def end_all(self) -> None:
        """End every request with finish reason ABORT: it is in the next deltas."""
        self._repair()
        self._dirty = True
        for group in self.groups.values():
            for completion in self._end(group, FinishReason.ABORT):
                self._unreported[group, completion] = None
        self._dirty = False

    def abort(self, request_id: str) -> None:
        """Stop computing a request; its output stays until `release`. Unknown or finished ids are
        ignored.
        """
        self._repair()
        self._dirty = True
        self._end(self.groups.get(request_id), FinishReason.ABORT)
        self._dirty = False

    def release(self, request_id: str) -> None:
        """Forget a request, aborting what still runs. An unknown id changes nothing."""
        self._repair()
        group = self.groups.get(request_id)
        if group is None:
            return
        self._dirty = True
        self._end(group, FinishReason.ABORT)
        for completion in group.completions:
            self._completions.pop(completion.request.request_id, None)
        self._deadlines.pop(request_id, None)
        for completion in group.completions:
            self._unreported.pop((group, completion), None)
        self.groups.pop(request_id)
        self._dirty = False

    @property
    def _is_timed(self) -> bool:
        return self.pace is not None or self.store is not None

    def _note_time(self, step: Step, seconds: float) -> None:
        prompt = 0
        for chunk in step.chunks:
            if chunk.num_tokens > 1:
                prompt += chunk.num_tokens
        if self.pace is not None:
            self.pace.note(seconds, prompt)
        if self.store is not None:
            self.store.note_computed(prompt, seconds)

    def _new_lookaheads(self) -> list[Lookahead]:
        return [Lookahead(self.runner) for _ in range(self.scheduler.num_microbatches)]

    @property
    def _lookahead(self) -> Lookahead:
        """That of the microbatch whose turn it is."""
        return self._lookaheads[self._turn]

    def _next_step(self) -> tuple[Step, Launched | None]:
        """Return the step of the microbatch that comes next and has one, and that step under way if it
        was launched ahead. Of several microbatches all that can be launched are, before one is waited
        for.
        """
        several = len(self._lookaheads) > 1
        for _ in range(2 * len(self._lookaheads)):  # each may be launched, and then read
            self._turn = (self._turn + 1) % len(self._lookaheads)
            launched = self._lookahead.take()
            if launched is not None:
                return launched.step, launched
            step = self._schedule()
            if step.admitted:
                self._stamp_scheduled(step)
            if several and step.chunks:
                launched = self._begin(step, prompts=self.pace is None)
            if launched is not None:
                self._lookahead.keep(launched)
            elif step.chunks:
                break
        return step, None

    def _begin(self, step: Step, prompts: bool = False) -> Launched | None:
        """Launch a step that was just scheduled, if nothing in it needs the host."""
        if self.mode is not Mode.OVERLAPPED:
            return None
        with self._threads:
            work = [self._to_work(chunk) for chunk in step.chunks]
            return self._lookahead.begin(step, work, prompts)

    def _schedule(self) -> Step:
        tokens = None
        if self.pace is not None:
            tokens = self.pace.tokens(self.scheduler.num_decoding)
        return self.scheduler.schedule(tokens, self._turn)

    def _due(self, changed: Sequence[Entry], quiet_until: float) -> Iterable[Entry]:
        """Return what of `_unreported` is to be told after a step in which `changed` did."""
        if self.clock() >= quiet_until:
            return self._unreported
        urgent = set()
        for group, completion in changed:
            if completion.request.is_finished or group.stamps.first_token is None:
                urgent.add(group.request_id)
        if urgent and self.scheduler.num_waiting:
            return self._unreported
        if not urgent:
            return []
        return [entry for entry in self._unreported if entry[0].request_id in urgent]

    def _report(self, entries: Iterable[Entry]) -> list[RequestDelta]:
        now = self.clock()
        groups: dict[str, tuple[Group, list[Completion]]] = {}
        for group, completion in entries:
            groups.setdefault(group.request_id, (group, []))[1].append(completion)
        deltas = [group.delta(completions, now) for group, completions in groups.values()]
        self._unreported = {
            entry: None for entry in self._unreported if entry[0].request_id not in groups
        }
        return deltas

    def _new_group(
        self,
        request_id: str,
        prompt: AcceptedPrompt,
        params: SamplingParams,
        adapter: LoadedAdapter | None,
    ) -> Group:
        seed = params.seed
        if seed is None:
            seed = sibling_seed(self._seed, self._num_added)
        own_stops = self._stop_token_ids
        if params.ignore_eos:
            own_stops = frozenset()
        named_stops = frozenset(params.stop_token_ids) - own_stops
        tokenizer = None
        if params.detokenize:
            tokenizer = self.tokenizer
        text_of = None
        if tokenizer is not None:
            text_of = partial(Detokenizer, tokenizer, params, prompt.token_ids)
        group = Group(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=list(prompt.token_ids),
            params=params,
            completions=[],
            stamps=Stamps(self.clock()),
            tokenizer=self.tokenizer,
            adapter=adapter,
        )
        bad_words = self.intake.bad_words(params)
        tags = self.intake.thinking_tags(params)
        for index, drafter in enumerate(self.drafters(prompt, params)):
            its_params = params
            if index:  # one completion with the prompt's log-probabilities is enough
                its_params = replace(params, prompt_logprobs=None)
            pooled = self._pooled_prompt(prompt, params)
            needed_from = None
            if its_params.prompt_logprobs is not None:
                needed_from = 0
            if pooled is not None and pooled.needs_all_rows:
                needed_from = 0
            grammar = self._matcher(params)
            if grammar is not None and self._drafts:
                drafter = Forced(grammar)
            request = Request(
                request_id=f"{request_id}/{index}",
                group=request_id,
                index=index,
                prompt_token_ids=prompt.token_ids,
                params=its_params,
                seed=sibling_seed(seed, index),
                stop_token_ids=own_stops | named_stops,
                named_stop_ids=named_stops,
                grammar=grammar,
                bad_words=bad_words,
                thought=_thought(tags, prompt.token_ids, params),
                drafter=drafter,
                guesses=self._guesses(params),
                adapter=adapter,
                needed_from=needed_from,
            )
            group.completions.append(Completion(request, text_of, tokenizer, pooled=pooled))
        return group

    def _guesses(self, params: SamplingParams) -> Guesses | None:
        if self._drafting is None or params.pooling is not None or params.max_tokens == 0:
            return None
        return self._drafting.guesses()

    def _pooled_prompt(self, prompt: AcceptedPrompt, params: SamplingParams) -> PooledPrompt | None:
        if params.pooling is None:
            return None
        pooler = self.runner.model.pooler
        assert pooler is not None, "Intake refuses what is not pooled"
        return PooledPrompt(pooler, params.pooling, len(prompt.token_ids))

    def _new_redraws(
        self,
        request_id: str,
        prompt: AcceptedPrompt,
        params: SamplingParams,
        answers: Sequence[Sequence[int]],
        adapter: LoadedAdapter | None,
    ) -> RedrawGroup:
        """Return a group that computes prompt and answer of each completion as its prompt, and draws
        nothing.
        """
        answers_to = self._new_group(request_id, prompt, params, adapter)
        if len(answers) != params.n:
            raise RequestError(
                f"{len(answers)} answers for n={params.n}; give one for each completion"
            )
        completions = []
        for completion, answer in zip(answers_to.completions, answers, strict=True):
            completions.append(self._new_redraw(completion, answer))
        return RedrawGroup(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=answers_to.prompt_token_ids,
            params=replace(params, timeout_s=None),
            completions=completions,
            stamps=answers_to.stamps,
            tokenizer=self.tokenizer,
            answers=answers_to,
        )

    def _new_redraw(self, completion: Completion, answer: Sequence[int]) -> Completion:
        """Return a completion that draws the tokens of `answer` again, as `completion` would have."""
        request = completion.request
        params = request.params
        num_prompt = request.num_prompt_tokens
        request.token_limit = self.scheduler.token_limit(num_prompt, params.max_tokens)
        # what is stated beyond the limit is not drawn
        tokens = self.intake.checked(answer, "answer")[: request.token_limit - num_prompt]
        needed_from = num_prompt - 1
        if request.needed_from == 0:
            needed_from = 0
        computed = Request(
            request_id=request.request_id,
            group=request.group,
            index=request.index,
            prompt_token_ids=request.prompt_token_ids + tokens[:-1],  # nothing follows the last one
            params=SamplingParams(
                max_tokens=0,
                prompt_logprobs=params.prompt_logprobs or 0,
                cache_salt=params.cache_salt,
            ),
            seed=request.seed,
            stop_token_ids=frozenset(),
            adapter=request.adapter,
            needed_from=needed_from,
        )
        stated = StatedAnswer(tokens, num_prompt, completion.row)
        return Completion(computed, None, None, stated=stated)

    def drafters(self, prompt: AcceptedPrompt, params: SamplingParams) -> list[Drafts | None]:
        """Return one for each completion, None where nothing is drafted from its own text."""
        # few guesses would be permitted
        if not self._drafts or not self._drafts_from_text or params.structured_outputs is not None:
            return [None] * params.n
        predicted = self.intake.predicted(params)
        return [Drafter(prompt.token_ids, predicted) for _ in range(params.n)]

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        if params.structured_outputs is None:
            return None
        assert self.grammars is not None, "structured_outputs was accepted without a tokenizer"
        return self.grammars.matcher(params.structured_outputs)

    def _repair(self) -> None:
        """After an exception in the middle of a change: everything anew from the requests' tokens."""
        if not self._dirty:
            return
        if self._renewed is not None:
            self._take(self._renewed)
        groups = list(self.groups.values())
        requests = []
        for group in groups:
            requests += [completion.request for completion in group.completions]
        self.scheduler.rebuild(requests)
        self._completions = {}
        for group in groups:
            for completion in group.completions:
                self._completions[completion.request.request_id] = (group, completion)
                self._read(completion, completion.rebuild)
            group.stamp(self.clock())
        for lookahead in self._lookaheads:
            lookahead.forget()
        for entry in list(self._unreported):
            if entry[0].request_id not in self.groups:
                del self._unreported[entry]
        for name in self._deadlines.keys() - self.groups.keys():
            del self._deadlines[name]
        self._dirty = False

    def _take(self, parts: Parts) -> None:
        nans, clipped = self.runner.pool.counters()
        self._nans_before += nans
        self._clipped_before += clipped
        self._stored = None
        self.runner = parts.runner
        self.store = parts.store
        self.scheduler.change_store(parts.store)
        self.adapters = Adapters(parts.adapter_slots, partial(_slots_in_use, self.groups))
        self._lookaheads = self._new_lookaheads()
        self._renewed = None

    def _stamp_scheduled(self, step: Step) -> None:
        now = self.clock()
        for request in step.admitted:
            stamps = self.groups[request.group].stamps
            if stamps.scheduled is None:
                stamps.scheduled = now

    def _to_work(self, chunk: ScheduledChunk) -> ChunkWork:
        group, completion = self._completions[chunk.request.request_id]
        num_scored = None
        if chunk.request.index == 0:
            num_scored = group.num_scored
        return ChunkWork(chunk, completion.row, num_scored, completion.stated, completion.pooled)

    def _with_drafts(self, step: Step, drafting: Drafting) -> Step:
        """Return a step with what a head drafts for it."""
        are_few = self.scheduler.drafts_beside(len(step.chunks)) > 0
        places = []
        work = []
        for place, chunk in enumerate(step.chunks):
            if drafting.takes(chunk, are_few):
                places.append(place)
                work.append(self._to_work(chunk))
        if not work:
            return step
        chunks = list(step.chunks)
        for place, drafts in zip(places, drafting.propose(work), strict=True):
            if drafts:
                chunks[place] = chunks[place]._replace(drafts=drafts, drafted_by=drafting.method)
        return replace(step, chunks=tuple(chunks))

    def _compute(self, step: Step, launched: Launched | None) -> tuple[Step, StepResult]:
        """Return what is still wanted of `step`, and a result for each chunk of it.

        `launched` is the step itself, if it was launched ahead.
        """
        if launched is None:
            if not step.alone:
                launched = self._begin(step)
            if launched is None:
                work = [self._to_work(chunk) for chunk in step.chunks]
                if step.alone:
                    return step, compute_alone(self.runner, work[0], self._logged)
                self._logged = set()
                return step, compute(self.runner, work, self.mode.repeats)
        return self._read_launched(step, launched)

    def _read_launched(self, step: Step, launched: Launched) -> tuple[Step, StepResult]:
        """`_compute` for a step under way: launch the one that follows it, and wait for its tokens."""
        self._dirty = True
        after = None
        if all(self._may_follow(chunk) for chunk in step.chunks):
            after = self.scheduler.follow(step)
        self._dirty = False
        if after is not None:
            self._lookahead.follow(after, launched)
        tokens = launched.read()
        chunks = []
        results = []
        row = -1
        for chunk in step.chunks:
            row += chunk.samples
            if not chunk.is_wanted:
                continue
            chunks.append(chunk)
            sampled = []
            if tokens is not None and chunk.samples:
                sampled = [Sampled(tokens[row], None)]
            results.append(ChunkResult(sampled))
        step = replace(step, chunks=tuple(chunks))
        if tokens is not None:
            return step, StepResult(results)
        self._lookahead.forget()  # it has had a wrong token
        return step, compute(self.runner, [self._to_work(chunk) for chunk in chunks])

    def _may_follow(self, chunk: ScheduledChunk) -> bool:
        """Return whether what follows a chunk's token needs nothing of the host."""
        if not chunk.is_wanted:
            return True
        return self._completions[chunk.request.request_id][1].row.may_follow

    def _expire(self) -> list[Entry]:
        """End the requests whose deadline has passed; returns what ended by it."""
        if not self._deadlines:
            return []
        now = self.clock()
        ended = []
        for name, deadline in list(self._deadlines.items()):
            if now >= deadline:
                group = self.groups[name]
                for completion in self._end(group, FinishReason.TIMEOUT):
                    ended.append((group, completion))
                del self._deadlines[name]
        return ended

    def _end(self, group: Group | None, reason: FinishReason) -> list[Completion]:
        """End what still runs of a group, and give out the text that was held back."""
        if group is None:
            return []
        running = [item for item in group.completions if not item.request.is_finished]
        for completion in running:
            self.scheduler.finish(completion.request.request_id, reason)
            completion.flush()
        group.stamp(self.clock())
        return running

    def _apply(self, step: Step, results: Sequence[ChunkResult]) -> list[Entry]:
        """Take in what was computed; returns the completions that advanced or ended."""
        tokens: dict[str, list[int]] = {}
        advanced = []
        computed = []
        for chunk, result in zip(step.chunks, results, strict=True):
            request_id = chunk.request.request_id
            entry = self._completions[request_id]
            group, completion = entry
            if result.error is not None:
                self.scheduler.fail(request_id, result.error)
                completion.flush()
                advanced.append(entry)
                continue
            if result.scored is not None:
                group.scores.append(result.scored)
            if completion.stated is not None and result.redrawn is not None:
                completion.stated.take(result.redrawn)
            if completion.pooled is not None and result.pooled is not None:
                completion.pooled.take(result.pooled)
            if result.features is not None and chunk.request.guesses is not None:
                chunk.request.guesses.keep(chunk.start, result.features)
            if result.sampled:
                self._keep_logprobs(completion, result.sampled[0])
                tokens[request_id] = [result.sampled[0].token_id]
            computed.append((entry, result.sampled[1:]))
        self.num_computed_tokens += step.num_tokens
        self.scheduler.apply(step, tokens)
        for entry, drafted in computed:
            completion = entry[1]
            if completion.is_refuted:
                self.scheduler.finish(completion.request.request_id, FinishReason.STOP)
            if completion.request.request_id in tokens or completion.request.is_finished:
                advanced.append(entry)
                self._read(completion, completion.advance)
                self._extend(completion, drafted)
        return advanced

    def _leave_out_rejected(self, step: Step) -> None:
        """Take what drafts stored that were not to be computed out of the pool's counters."""
        rejected: list[int] = []
        first = 0  # row of the step
        for chunk in step.chunks:
            last = first + chunk.num_tokens + len(chunk.drafts)
            if chunk.drafts:
                num_true = max(1, chunk.request.num_computed_tokens - chunk.start)
                rejected += range(first + num_true, last)
            first = last
        if rejected:
            self.runner.pool.leave_out(rejected)

    def _extend(self, completion: Completion, drawn: Sequence[Sampled]) -> None:
        """Take in the tokens behind drafts that came true, one by one, as far as nothing ends the
        request.
        """
        for sampled in drawn:
            if completion.request.is_finished:
                return
            self._keep_logprobs(completion, sampled)
            self.num_computed_tokens += 1
            self.scheduler.extend(completion.request, sampled.token_id)
            self._read(completion, completion.advance)

    @staticmethod
    def _keep_logprobs(completion: Completion, sampled: Sampled) -> None:
        # before the token: a rebuild drops what is too many
        if sampled.logprobs is not None:
            completion.logprobs.append(to_logprobs(sampled.logprobs, completion.tokenizer))

    def _read(self, completion: Completion, text_of_tokens: Callable[[], str | None]) -> None:
        """Turn tokens into text, and end a completion that reached a stop string or whose text
        cannot be had.
        """
        request_id = completion.request.request_id
        try:
            stop = text_of_tokens()
        except Exception as error:
            self.scheduler.fail(request_id, f"its tokens cannot be turned into text: {error}")
        else:
            if stop is not None:
                self.scheduler.finish(request_id, FinishReason.STOP, stop)


def _thought(
    tags: TagTokens | None, prompt: Sequence[int], params: SamplingParams
) -> Thought | None:
    """Return the budget of one completion's thoughts; None without one."""
    if tags is None or params.thinking_token_budget is None:
        return None
    only_first = params.structured_outputs is not None
    return Thought(tags, params.thinking_token_budget, prompt, only_first)


def _slots_in_use(groups: Mapping[str, Group]) -> set[int]:
    """Return the slots of adapters whose requests have not ended."""
    slots = set()
    for group in groups.values():
        if group.adapter is not None and not group.finished:
            slots.add(group.adapter.slot)
    return slots
