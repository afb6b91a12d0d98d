"""Scheduler: what runs in the next step. The only writer of requests, and of what they hold.

Prefill and decode are one thing: a request has known tokens, some of them computed, and each step
computes a chunk of the rest within a budget of `max_num_batched_tokens`. A chunk that reaches the
end of the known tokens samples one more.

- Requests have an order: by priority, lower ones first, then by arrival. `Intake` refuses any priority
  but 0 unless the engine is asked to have them, and then the order is that of arrival.
- Every running request advances in every step: one token of the budget is kept back for each that
  is still to come, so no decode waits behind a long prefill. The rest of the budget goes in
  order, then to waiting requests, in order, while fewer than `max_num_seqs` run. One that waits
  preempts nobody, whatever its priority.
- Before a chunk is computed, its request gives back the blocks that no window reaches any more
  (cache/manager.py).
- When blocks run out, the running request that is last in order gives back its blocks and waits at
  its place in the queue; it keeps its tokens and computes them again later. The first that runs is never
  preempted, and `add` refuses what the whole cache could not hold, so every request comes to an
  end, as long as not always others come that are before it.
- A waiting request is admitted only if the blocks for all its known tokens are there, and one more
  for each running request, so that it is not preempted right after.
- After a step that was lost (`lose`, recovery.py) its requests compute their tokens again, each in steps of its
  own until it is past that step: one that fails again has failed alone. The last in order goes first,
  so those that are past it, which pause, are behind it, and lose their blocks first if they run
  out. Nobody new is admitted meanwhile.
- Drafts ride behind requests that decode, where a step has few rows and no prompt (`_draft`). They
  take only blocks that are left over, and the next `schedule` gives back what was not needed: so
  they preempt nobody and keep nobody waiting. A draft counts as computed once the token that was
  drawn equals it (`extend`), so no block is indexed before.
- Prefix hits leave at least the last known token to compute, so a shared block is never written.
  The completions of one prompt wait for the first of them to compute the prompt, and then share its
  blocks.
- Nothing follows a prompt that is pooled, so its blocks are not indexed, but for a prefix that another
  such prompt had before: of an instruction, or of a query that is compared with many texts.
- Where several steps are under way at once, because devices divide the layers, requests are divided
  into as many microbatches when they are admitted, evenly. A step is of one of them, and each has one
  that is not applied yet. One may preempt a request of another, whose step under way then has a
  chunk that nobody wants.
- With a store below the cache (prefix_fetch.py) a waiting request waits for what comes from there,
  and others may overtake it meanwhile. Blocks that come are given up before anybody is preempted.

`schedule` and `apply` alternate, in one thread; `follow` gives one more step before the first is
applied, unless a request may be admitted, or blocks are short. It trims nothing: a step that is
computed again may need it. `abort` and `finish` may come at any time between; what an already
scheduled step still computes for such a request is dropped. Freed blocks are not handed out before
the next `schedule` or `follow`, and steps run in their order, so none spoils a block of another. A
step that is never applied changes nothing: the next `schedule` gives its chunks again. When an
exception interrupts one of these methods, `rebuild` starts over from the tokens of the requests.
Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from freight.cache.events import SequenceContent
from freight.cache.manager import NOTHING, CacheManager
from freight.cache.prefix import RecentKeys, extend_keys
from freight.cache.stored import StoredPrefixes
from freight.engine.accounts import Totals
from freight.engine.prefix_fetch import PrefixFetch
from freight.engine.recovery import Recovery
from freight.engine.request import Request, RequestState, check_length
from freight.engine.step import ScheduledChunk, Step
from freight.errors import CapacityError, RequestError
from freight.outputs import FinishReason

# keys of blocks of pooled prompts that are remembered: of 262,144 tokens, with 16 in a block
POOLED_KEYS = 1 << 14

_order = attrgetter("order")


def _remove(queue: list[Request], request: Request) -> None:
    """Take `request` out of a queue that is sorted by order."""
    position = bisect_left(queue, request.order, key=_order)
    assert queue[position] is request, (
        f"request {request.request_id} is not in the queue of its state"
    )
    del queue[position]


class Scheduler:
    """Continuous batching over one cache. Limits: sequences, tokens a step, tokens a request."""

    def __init__(
        self,
        cache: CacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        most_drafts: int = 0,
        store: StoredPrefixes | None = None,
        whole_prompts: bool = False,
        num_microbatches: int = 1,
        draft_tile: int | None = None,
    ) -> None:
        """`most_drafts`: of a step of one request without a prompt; with more there are fewer
        (`drafts_beside`). `store`: what `cache` has below it. `whole_prompts`: a prompt is one chunk,
        because its tokens see those after them. `num_microbatches`: steps that are under way at once.
        `draft_tile`: drafts lie in the tile of so many positions of the token before them, in which
        states take them back; None: anywhere.
        """
        assert min(max_num_seqs, max_num_batched_tokens, max_model_len) > 0
        assert max_num_batched_tokens >= max_model_len or not whole_prompts
        self._whole_prompts = whole_prompts
        self.num_microbatches = num_microbatches
        self._pooled_keys = RecentKeys(POOLED_KEYS)
        self._cache = cache
        self._block_size = cache.block_size
        self._caching = cache.enable_prefix_caching
        self._gives_back = cache.gives_back
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self.most_drafts = most_drafts
        self._draft_tile = draft_tile
        self.asks_head = True  # whether a head drafts, where there is one
        self._drafted: list[Request] = []  # those that had drafts in the last step
        self._requests: dict[str, Request] = {}  # every unfinished request
        self._leaders: dict[str, Request] = {}  # group -> its unfinished completion 0
        self._waiting: list[Request] = []  # both queues by order
        self._running: list[Request] = []
        self._recovery = Recovery()
        self._fetches = PrefixFetch(store, self._caching)
        self._num_arrived = 0
        self.totals = Totals()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def adapters_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the adapters that running sequences have, and waiting ones."""
        return _adapter_names(self._running), _adapter_names(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        """Running requests of whose known tokens one is left to compute."""
        count = 0
        for request in self._running:
            count += request.num_tokens - request.num_computed_tokens == 1
        return count

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def token_limit(self, num_prompt: int, max_tokens: int | None) -> int:
        """Known tokens at which a request with a prompt of `num_prompt` tokens ends. Changes
        nothing.

        Raises RequestError for an empty or too long prompt, and CapacityError when the whole cache
        is smaller than the request may become.
        """
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token")
        check_length(num_prompt, max_tokens, self._max_model_len)
        limit = self._max_model_len
        if max_tokens is not None:
            limit = min(num_prompt + max_tokens, limit)
        short = self._cache.shortfall(limit)
        if short is not None:
            raise CapacityError(
                f"the request may grow to {limit} tokens ({num_prompt} of prompt), and the KV cache holds "
                f"{short.describe(limit)}; lower max_tokens, shorten the prompt or raise kv_cache_memory"
            )
        return limit

    def add(self, request: Request) -> None:
        """Queue a fresh request; completion 0 of a group comes first. Raises, and changes nothing,
        as `token_limit`.
        """
        assert request.arrival < 0, f"request {request.request_id} was added before"
        name = request.request_id
        if name in self._requests:
            raise RequestError(
                f"request id {name!r} is in use by an unfinished request; choose another id"
            )
        request.token_limit = self.token_limit(request.num_prompt_tokens, request.params.max_tokens)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[name] = request
        if request.index == 0:
            self._leaders[request.group] = request
        insort(self._waiting, request, key=_order)

    def schedule(self, max_tokens: int | None = None, microbatch: int = 0) -> Step:
        """Return the next step of a microbatch; of all of them without chunks only if no request is
        unfinished, or all that are wait for blocks from the store. Takes blocks, and preempts for
        them.

        With fewer than max_num_batched_tokens, if `max_tokens` is less; but one for each running
        request in any case.
        """
        self._give_back_drafts()
        if (suspect := self._recovery.suspect(self._requests)) is not None:
            return self._schedule_alone(suspect)
        chunks: list[ScheduledChunk] = []
        preempted: list[Request] = []
        running = self._running
        if self.num_microbatches > 1:
            running = self._members(microbatch)
        budget = self._max_num_batched_tokens
        if not self._whole_prompts:
            budget = min(budget, max(max_tokens or budget, len(running)))
        for position, request in enumerate(running):  # preemption shortens it from the end
            reserved = len(running) - position - 1
            start = request.num_computed_tokens
            count = min(request.num_tokens - start, budget - reserved)
            assert count > 0, f"no token of the budget is left for request {request.request_id}"
            # in most steps, neither
            changes = self._gives_back or start + count > request.held.room
            if changes:
                grown = self._grow(request, start, start + count, preempted)
                while running and running[-1].state is not RequestState.RUNNING:
                    running.pop()
                if not grown:
                    break  # it preempted itself, being the last
            chunks.append(ScheduledChunk.of(request, start, count))
            budget -= count
        num_continuing = len(chunks)
        if not preempted:
            self._admit_waiting(chunks, budget, microbatch)
        fresh = []
        for chunk in chunks[num_continuing:]:
            if not chunk.request.was_admitted:
                fresh.append(chunk.request)
                self._count_admitted(chunk.request)
        if self.most_drafts:
            self._draft(chunks)
        return Step(tuple(chunks), tuple(preempted), tuple(fresh), microbatch=microbatch)

    def _members(self, microbatch: int) -> list[Request]:
        """Return the running requests of a microbatch, in order."""
        return [request for request in self._running if request.microbatch == microbatch]

    def _may_admit(self, num_running: int, num_members: int) -> bool:
        """Return whether one that waits may join a microbatch of `num_members`, of `num_running` that
        run: none gets more than its part.
        """
        if not self._waiting or num_running >= self._max_num_seqs:
            return False
        return num_members * self.num_microbatches < num_running + len(self._waiting)

    def follow(self, step: Step) -> Step | None:
        """Return the step after `step`, which is not applied yet. None: not before it is, as one of a
        prompt's chunks is its last.
        """
        going = []
        num_running = len(self._running)
        for chunk in step.chunks:
            start = chunk.start + chunk.num_tokens
            if not chunk.is_wanted:
                continue
            if start < chunk.request.num_tokens:
                return None  # a prompt goes on
            if start + 1 < chunk.request.token_limit:
                going.append((chunk.request, start))
            else:
                num_running -= 1
        if not going or self._may_admit(num_running, len(going)):
            return None
        chunks = []
        for request, start in going:
            if (grown := self._cache.grow(request.held, start + 1)) is None:
                return None
            request.held = grown
            chunk = ScheduledChunk(
                request,
                start,
                1,
                grown.block_ids,
                samples=True,
                num_preemptions=request.num_preemptions,
            )
            chunks.append(chunk)
        return Step(tuple(chunks), (), microbatch=step.microbatch)

    def apply(self, step: Step, tokens: Mapping[str, Sequence[int]]) -> list[Request]:
        """Take note that `step` was computed, with the new tokens of each chunk that samples, by
        request id.

        Returns the requests that got a token, in the step's order; some may have finished by it,
        and tokens behind the one that ended a request are dropped. Requests that ended since the
        step was scheduled are left alone.
        """
        advanced = []
        num_drawn = 0
        for chunk in step.chunks:
            request = chunk.request
            if chunk.drafts:
                request.num_drafted += len(chunk.drafts)
                request.drafted_by = chunk.drafted_by
                self.totals.count_drafted(chunk.drafted_by, len(chunk.drafts))
            if not chunk.is_wanted:
                continue
            assert request.num_computed_tokens == chunk.start, (
                f"request {request.request_id}: step applied out of turn"
            )
            request.num_computed_tokens += chunk.num_tokens
            if request.num_counted_tokens < len(request.prompt_token_ids):
                self._count_prompt(request)
            self._register_full_blocks(request, chunk.start)
            if chunk.samples:
                advanced.append(request)
                for token in tokens[request.request_id]:
                    request.output_token_ids.append(token)
                    num_drawn += 1
                    self._finish_if_done(request)
                    if request.is_finished:
                        break
            elif request.num_computed_tokens >= request.token_limit:
                # max_tokens is 0: the prompt was all
                self._finish(request, FinishReason.LENGTH, None)
        self.totals.generated += num_drawn
        return advanced

    def extend(self, request: Request, token: int) -> None:
        """Append the next token to a running request whose last one was a draft in the step that was
        applied. So the last one is computed.
        """
        assert request.state is RequestState.RUNNING
        computed = request.num_computed_tokens
        request.num_computed_tokens = computed + 1
        self._register_full_blocks(request, computed)
        request.output_token_ids.append(token)
        request.num_accepted += 1
        self.totals.count_accepted(request.drafted_by)
        self.totals.generated += 1
        self._finish_if_done(request)

    def lose(self, step: Step) -> None:
        """Take note that `step` failed as a whole, and left blocks that are not full in any state.

        What was full before it is sound, and found again if prefixes are cached.
        """
        self._recovery.begin(step.chunks)
        while self._running:
            self.preempt_latest()

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """End a request from outside, e.g. at a stop string. An unknown or finished id changes
        nothing.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)

    def fail(self, request_id: str, error: str) -> None:
        """End a request that cannot be computed further. Nobody takes up the blocks it computed.

        An unknown or finished id changes nothing.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.error = error
            self._finish(request, FinishReason.ERROR, None)

    def abort(self, request_id: str) -> None:
        """End a request whose caller went away. An unknown or finished id changes nothing."""
        self.finish(request_id, FinishReason.ABORT)

    def change_store(self, store: StoredPrefixes | None) -> None:
        """Have another store below the cache; `rebuild` follows."""
        self._fetches = PrefixFetch(store, self._caching)
        self._pooled_keys = RecentKeys(POOLED_KEYS)

    def offer_running(self) -> None:
        """Let the store have the full blocks of requests that still run: the engine ends."""
        for request in self._running:
            self._fetches.offer(request, request.held)

    def rebuild(self, requests: Iterable[Request]) -> None:
        """Start over from the tokens of `requests`, which are all there are, after an exception in
        another method.

        Unfinished ones wait and compute their tokens again, to the same bits; every block is free
        and no content is indexed. What their last token decides is decided anew. May be
        interrupted, and then has to be called again.
        """
        self._fetches.reset()
        self._cache.reset()
        self._requests = {}
        self._leaders = {}
        self._waiting = []
        self._running = []
        self._recovery.reset()
        self._drafted = []
        for request in sorted(requests, key=_order):
            request.held = NOTHING
            if request.is_finished:
                continue
            request.asked_store = False
            if request.num_computed_tokens:
                request.num_computed_tokens = 0
                request.num_preemptions += 1
                self.totals.preemptions += 1
            request.state = RequestState.WAITING
            request.finish_reason = request.stop_reason = request.error = None
            self._requests[request.request_id] = request
            if request.index == 0:
                self._leaders[request.group] = request
            self._waiting.append(request)
        for request in list(self._waiting):
            if request.output_token_ids:
                self._finish_if_done(request)

    def drafts_beside(self, num_requests: int) -> int:
        """Return the most drafts of a step of so many requests, all together."""
        left = min(self.most_drafts + 1, self._max_num_batched_tokens) - num_requests
        if 2 * left < num_requests:  # one draft for 8 requests took more time than it saved
            return 0
        return left

    def _draft(self, chunks: list[ScheduledChunk]) -> None:
        """Give drafts to the chunks of a step in which every request has one token."""
        # a chunk of a prompt costs more than drafts gain
        if any(chunk.num_tokens > 1 for chunk in chunks):
            return
        left = self.drafts_beside(len(chunks))
        for index, chunk in enumerate(chunks):
            if left <= 0:
                return
            drafted = self._with_drafts(chunk, -(-left // (len(chunks) - index)))
            count = len(drafted.drafts) + drafted.most_drafts
            if count:
                left -= count
                self._drafted.append(chunk.request)
                chunks[index] = drafted

    def _with_drafts(self, chunk: ScheduledChunk, most: int) -> ScheduledChunk:
        """Return a chunk with up to `most` drafts of its request's own text, or with room for those of a
        head, and take the blocks for them.
        """
        request = chunk.request
        known = chunk.start + 1
        if not chunk.samples or not request.output_token_ids:
            return chunk
        # each draft that comes true is followed by a token that is drawn
        most = min(most, request.token_limit - known - 1)
        if self._draft_tile is not None:
            most = min(most, -known % self._draft_tile)
        if most <= 0:
            return chunk
        drafts: tuple[int, ...] = ()
        source = ""
        if request.drafter is not None:
            drafts = request.drafter.propose(request.output_token_ids, most)
            source = request.drafter.source
        wanted = len(drafts)
        guesses = request.guesses
        if guesses is not None and not drafts and self.asks_head:
            wanted = most * guesses.wants(len(request.output_token_ids))
        if not wanted:
            return chunk
        grown = self._cache.grow(request.held, known + wanted)
        if grown is None:
            wanted = min(wanted, request.held.room - known)
        else:
            request.held = grown
        if drafts:
            drafts = drafts[:wanted]
            wanted = 0
        return chunk._replace(
            drafts=drafts,
            most_drafts=wanted,
            drafted_by=source if drafts else "",
            block_ids=request.held.block_ids,
        )

    def _give_back_drafts(self) -> None:
        """Give back the blocks that drafts took and that their requests do not need yet."""
        for request in self._drafted:
            if request.state is RequestState.RUNNING:
                request.held = self._cache.shrink(request.held, request.num_computed_tokens)
        self._drafted = []

    def _schedule_alone(self, request: Request) -> Step:
        """Return the next step of `request`, of all that run the first in order; it has the whole
        budget.
        """
        preempted: list[Request] = []
        budget = self._max_num_batched_tokens
        start = request.num_computed_tokens
        if request.state is RequestState.RUNNING:
            count = min(request.num_tokens - start, budget)
            grown = self._grow(request, start, start + count, preempted)
            assert grown, f"request {request.request_id} does not fit alone"
            return Step((ScheduledChunk.of(request, start, count),), tuple(preempted), alone=True)
        while (chunk := self._admit(request, budget)) is None:
            if not self._fetches.drop_latest():
                preempted.append(self.preempt_latest())
        _remove(self._waiting, request)
        insort(self._running, request, key=_order)
        return Step((chunk,), tuple(preempted), alone=True)

    def _grow(
        self, request: Request, start: int, num_tokens: int, preempted: list[Request]
    ) -> bool:
        """Give a running request what a chunk from `start` to `num_tokens` needs, and take back
        what it does not.

        False if it was itself the last to preempt.
        """
        before = request.held
        held = request.held = self._cache.trim(before, start)
        if held is not before:
            self._fetches.offer(request, before, held.given_back)
        while (grown := self._cache.grow(held, num_tokens)) is None:
            if self._fetches.drop_latest():
                continue
            preempted.append(self.preempt_latest())
            if preempted[-1] is request:
                return False
        request.held = grown
        return True

    def preempt_latest(self) -> Request:
        victim = self._running.pop()
        self._cache.release(victim.held)
        self._fetches.offer(victim, victim.held)
        victim.held = NOTHING
        victim.state = RequestState.WAITING
        victim.num_computed_tokens = 0
        victim.num_preemptions = victim.num_preemptions + 1
        victim.asked_store = False
        if victim.guesses is not None:
            victim.guesses.kept = []  # its rows are computed again, or found
        self.totals.preemptions += 1
        insort(self._waiting, victim, key=_order)
        return victim

    def _admit_waiting(self, chunks: list[ScheduledChunk], budget: int, microbatch: int) -> None:
        """Append a first chunk for each waiting request that budget, max_num_seqs and blocks admit,
        in order.
        """
        position = 0
        is_coming = False
        while (
            position < len(self._waiting)
            and budget > 0
            and self._may_admit(len(self._running), len(chunks))
        ):
            request = self._waiting[position]
            if self._waits_for_sibling(request):
                position += 1
                continue
            if self._waits_for_store(request):
                # what waits for its turn frees no block
                is_coming = is_coming or self._fetches.has(request)
                position += 1
                continue
            chunk = self._admit(request, budget)
            if chunk is None:
                # where nothing else will free blocks, those that come for a later request do
                if self._running or is_coming or not self._fetches.drop_latest():
                    return
                continue
            del self._waiting[position]
            request.microbatch = microbatch
            insort(self._running, request, key=_order)
            chunks.append(chunk)
            budget -= chunk.num_tokens

    def _admit(self, request: Request, budget: int) -> ScheduledChunk | None:
        """Start a waiting request with its prefix hits and a first chunk; None, and no change, if
        it does not fit.
        """
        num_tokens = request.num_tokens
        if self._whole_prompts and num_tokens > budget:
            return None
        admitted = self._cache.admit(
            self._hit_keys(request), num_tokens, reserve=len(self._running)
        )
        if admitted is None:
            return None
        held, start = admitted
        count = min(num_tokens - start, budget)
        grown = self._cache.grow(held, start + count)
        assert grown is not None, (
            f"request {request.request_id} was admitted without blocks for its first chunk"
        )
        request.held = grown
        request.num_computed_tokens = start
        if request.num_preemptions == 0:
            request.num_cached_tokens = start
        request.state = RequestState.RUNNING
        return ScheduledChunk.of(request, start, count)

    def _count_admitted(self, request: Request) -> None:
        """Count what a request looked up and found in the prefix cache when it was first admitted."""
        request.was_admitted = True
        if request.params.pooling is not None and self._takes_hits(request):
            self._extend_keys(request, request.num_prompt_tokens // self._block_size)
            known = self._pooled_keys.note(request.block_keys)
            request.num_kept_tokens = known * self._block_size
        if self._takes_hits(request):
            self.totals.prefix_queries += request.num_prompt_tokens
            self.totals.prefix_hits += request.num_computed_tokens

    def _count_prompt(self, request: Request) -> None:
        """Count the prompt tokens that are done for the first time."""
        done = (
            min(request.num_computed_tokens, request.num_prompt_tokens) - request.num_counted_tokens
        )
        if done > 0:
            request.num_counted_tokens += done
            self.totals.prompt += done

    def _waits_for_sibling(self, request: Request) -> bool:
        """Return whether completion 0 of its group is about to compute blocks that this request
        will share.
        """
        leader = self._leaders.get(request.group)
        return (
            leader is not None
            and leader is not request
            and leader.num_computed_tokens < leader.num_prompt_tokens
            and self._takes_hits(request)
            and request.num_prompt_tokens > self._block_size
        )

    def _waits_for_store(self, request: Request) -> bool:
        """Return whether blocks of this request come from the store, or will. What came is
        indexed.
        """
        if self._fetches.is_under_way(request):
            return True
        if not self._fetches.may_begin(request) or not self._takes_hits(request):
            return False
        return self._fetches.begin(request, self._hit_keys(request), len(self._running))

    def _takes_hits(self, request: Request) -> bool:
        return self._caching and request.needed_from != 0

    def _hit_keys(self, request: Request) -> list[bytes]:
        """Keys of the blocks that may be hits: full ones, leaving the rows that are needed to compute."""
        if not self._takes_hits(request):
            return []
        needed = request.needed_from
        if needed is None:
            needed = request.num_tokens - 1
        count = needed // self._block_size
        self._extend_keys(request, count)
        return request.block_keys[:count]

    def _extend_keys(self, request: Request, count: int) -> None:
        digest = None
        if request.adapter is not None:
            digest = request.adapter.digest
        extend_keys(
            request.block_keys,
            count,
            self._block_size,
            request.params.cache_salt,
            request.tokens,
            digest,
        )

    def _register_full_blocks(self, request: Request, previously_computed: int) -> None:
        """Index the blocks that became full since `previously_computed` tokens were computed."""
        size = self._block_size
        computed = request.num_computed_tokens
        if previously_computed // size < computed // size and self._caching:
            self._extend_keys(request, computed // size)
            if request.params.pooling is not None:
                computed = min(computed, request.num_kept_tokens)
            if previously_computed < computed:
                content = None
                if self._cache.events is not None:
                    content = _content(request)
                self._cache.register(
                    request.held, request.block_keys, previously_computed, computed, content
                )

    def _finish_if_done(self, request: Request) -> None:
        """End the request if its last token does."""
        if (ending := request.ending()) is not None:
            self._finish(request, *ending)

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: str | int | None
    ) -> None:
        if request.state is RequestState.RUNNING:
            _remove(self._running, request)
        else:
            _remove(self._waiting, request)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        # after its reasons, so that `rebuild` finds all of them or none
        request.state = RequestState.FINISHED
        self._fetches.end(request)
        if reason is FinishReason.ERROR:
            self.totals.failed += 1
            self._cache.forget(request.held, request.block_keys)
            self._fetches.forget(request)
        else:
            self._cache.release(request.held)
            if request.params.pooling is None:
                self._fetches.offer(request, request.held)
        request.held = NOTHING
        # its tables may take 11 MiB, and the request is kept until its answer is read
        request.drafter = None
        request.guesses = None
        del self._requests[request.request_id]
        if self._leaders.get(request.group) is request:
            del self._leaders[request.group]


def _content(request: Request) -> SequenceContent:
    adapter = None if request.adapter is None else request.adapter.name
    return SequenceContent(request.tokens, request.params.cache_salt, adapter)


def _adapter_names(requests: Sequence[Request]) -> tuple[str, ...]:
    names = {request.adapter.name for request in requests if request.adapter is not None}
    return tuple(sorted(names))
