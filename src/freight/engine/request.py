"""Request: one sequence on its way through the engine. Only the Scheduler writes it; everyone else
reads.

Its known tokens are the prompt followed by what was generated. The keys and values of the first
`num_computed_tokens` of them are in the cache, in the blocks `held`, where a layer still reads
them. Tokens are only ever appended, also across preemption, so `block_keys` stays valid once
computed. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from freight.cache.manager import NOTHING, SequenceBlocks
from freight.engine.adapters import LoadedAdapter
from freight.engine.bad_words import BadWords
from freight.engine.drafts import Drafts
from freight.engine.grammar import Matcher
from freight.engine.guesses import Guesses
from freight.engine.thinking import Thought
from freight.errors import RequestError
from freight.outputs import FinishReason
from freight.sampling import SamplingParams


class RequestState(StrEnum):
    """WAITING holds no blocks; RUNNING takes part in every step; FINISHED is final and holds no
    blocks.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def check_length(num_prompt: int, max_tokens: int | None, max_model_len: int) -> None:
    """Raises RequestError for a prompt that leaves no room for a token, or, with max_tokens=0, is
    itself too long.
    """
    new = int(max_tokens != 0)
    if num_prompt + new > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and max_model_len {max_model_len} leaves room for "
            f"{max_model_len - new}{' besides one new token' * new}; shorten it or raise max_model_len"
        )


@dataclass(eq=False, slots=True)
class Request:
    """One of the `n` completions of one prompt.

    group           the caller's request; its completions share it
    index           which of the `n` completions, from 0
    seed            resolved: what the sampler draws from for this completion
    stop_token_ids  params.stop_token_ids and, unless ignore_eos, the model's own stop ids
    named_stop_ids  those of them that are not the model's own: an answer that ends by one was cut
    grammar         how far its output is in the grammar of params.structured_outputs; None without
                    one
    bad_words       the tokens of params.bad_words; None without any
    thought         the budget of its thoughts; None without one
    drafter         guesses its next tokens from its own text; None: nothing is drafted so
    guesses         the drafts of a head; None: there is none
    adapter         the adapter that computes it; None: the model alone
    needed_from     position from which on every row has to be computed, 0 for all of them; None: that
                    of the last known token

    The rest belongs to the Scheduler.

    held               its blocks, by cache group
    block_keys         prefix keys of the leading full blocks, as far as they were needed
    num_cached_tokens  prompt tokens found in the prefix cache when first admitted
    num_counted_tokens leading prompt tokens that were computed or found, as far as they are in the
                       Scheduler's totals
    num_drafted        tokens drafted for it so far, and how many of them were drawn
    drafted_by         what drafted for it last, as `ScheduledChunk.drafted_by`
    microbatch         the one that it runs in
    num_kept_tokens    leading tokens of a pooled prompt whose blocks are indexed: another had them
    was_admitted       whether it was ever admitted
    asked_store        whether all that the store may have for it was brought in
    arrival            counts up from 0 over all requests added to the Scheduler
    token_limit        known tokens at which it ends with LENGTH
    stop_reason        the stop string or the id from named_stop_ids that ended it; None where the
                       model ended it by itself
    error              why a request with finish reason ERROR failed
    """

    request_id: str
    group: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    named_stop_ids: frozenset[int] = frozenset()
    grammar: Matcher | None = None
    bad_words: BadWords | None = None
    thought: Thought | None = None
    drafter: Drafts | None = None
    guesses: Guesses | None = None
    adapter: LoadedAdapter | None = None
    needed_from: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    held: SequenceBlocks = NOTHING
    block_keys: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_counted_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by: str = ""
    microbatch: int = 0
    num_kept_tokens: int = 0
    was_admitted: bool = False
    asked_store: bool = False
    arrival: int = -1
    token_limit: int = 0
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def adapter_slot(self) -> int | None:
        """Return the slot of its adapter."""
        return None if self.adapter is None else self.adapter.slot

    @property
    def order(self) -> tuple[int, int]:
        """What is lower comes first, where requests wait, and is preempted last."""
        return self.params.priority, self.arrival

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated ones."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def ending(self) -> tuple[FinishReason, int | None] | None:
        """Return what its last output token ends it by, the reason and the stop reason; None: it
        goes on.

        A stop id ends it once min_tokens are generated, and a complete text of its grammar at any
        time. Both win over a limit that the same token reached.
        """
        params = self.params
        token = self.output_token_ids[-1]
        if token in self.stop_token_ids and len(self.output_token_ids) >= params.min_tokens:
            if token in self.named_stop_ids:
                return FinishReason.STOP, token
            return FinishReason.STOP, None
        if self.grammar is not None and self.grammar.ended(self.output_token_ids):
            return FinishReason.STOP, None
        if self.num_tokens >= self.token_limit:
            return FinishReason.LENGTH, None
        return None

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the known tokens at positions start … stop - 1, in O(stop - start)."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        generated = self.output_token_ids[max(start - num_prompt, 0) : stop - num_prompt]
        return (*self.prompt_token_ids[start:], *generated)
