"""Verifications: whether an answer is what its request gives, token for token.

`engine/redraw.py` draws the tokens of an answer again. Here what came of it is compared with what is
stated, and put into words. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from freight.base.json_schema import Json
from freight.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from freight.sampling import SamplingParams

if TYPE_CHECKING:
    from freight.engine.redraw import Redrawn
    from freight.engine.stated import Mismatch

# how an answer ends that its tokens do not decide
_FROM_OUTSIDE = (FinishReason.ABORT, FinishReason.TIMEOUT)
NO_SEED = (
    "it was sampled without a seed, so its draws cannot be repeated; send `seed` with requests that "
    "are to be verified"
)
OTHER_KERNELS = (
    "here the bits of a row depend on the rows beside it; only the compiled CPU kernels, with a model "
    "of Freight's own families, promise that they do not"
)


class Outcome(StrEnum):
    """What can be said about an answer."""

    EQUAL = "equal"  # every token was drawn again, and all that is stated about it is so
    DIFFERS = "differs"  # something is stated that its request does not give
    UNKNOWN = "unknown"  # it cannot be said


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    reason           a sentence: what differs, or why it cannot be said; "" if all is equal
    num_tokens       tokens of the answer, all completions together, that were drawn again as stated
    completion       index of the completion that differs
    position         of its first token that differs, from 0
    stated_token     the token that is stated there
    drawn_token      the token that is drawn there; None where none can be
    stated_logprob   log-probability that is stated for `stated_token`; where another token is drawn,
                     the one that the model gives it
    drawn_logprob    log-probability that the model gives to `drawn_token`

    What does not apply is None.
    """

    outcome: Outcome
    reason: str = ""
    num_tokens: int = 0
    completion: int | None = None
    position: int | None = None
    stated_token: int | None = None
    drawn_token: int | None = None
    stated_logprob: float | None = None
    drawn_logprob: float | None = None

    def as_object(self) -> dict[str, Json]:
        """Return the fields that apply, by name. Numbers that JSON does not have are left out."""
        values = {}
        for name, value in asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                continue
            if value not in (None, ""):
                values[name] = value
        return values


def unknown(reason: str) -> Verification:
    return Verification(Outcome.UNKNOWN, reason)


def differs(reason: str, completion: int | None = None) -> Verification:
    return Verification(Outcome.DIFFERS, reason, completion=completion)


def has_no_seed(params: SamplingParams) -> bool:
    """Return whether tokens are drawn with a seed that the engine chose."""
    return params.seed is None and not params.greedy and params.max_tokens != 0


def draws_differ(
    redrawn: Redrawn, answers: Sequence[Sequence[int]], first: int = 0
) -> Verification | None:
    """Compare the draws of a redraw with the tokens stated; None: they are the same, and each
    completion ends with its last token, or has not ended.

    One that differs comes before one that cannot be computed. first: index that is shown for the
    first completion.
    """
    rows = zip(redrawn.group.completions, redrawn.mismatches, redrawn.errors, answers, strict=True)
    failed: Verification | None = None
    for index, (completion, mismatch, error, answer) in enumerate(rows, first):
        if mismatch is not None:
            return _mismatch_differs(index, mismatch)
        if error is not None:
            failed = failed or unknown(f"completion {index} cannot be computed: {error}")
            continue
        count = len(completion.request.output_token_ids)
        if count < len(answer):
            return differs(
                f"completion {index} ends after {count} tokens ({completion.output().finish_reason}), and has "
                f"{len(answer)}",
                index,
            )
    return failed


def _mismatch_differs(index: int, mismatch: Mismatch) -> Verification:
    drawn_token: int | None = mismatch.drawn
    drawn_logprob: float | None = mismatch.drawn_logprob
    drawn = f"{mismatch.drawn} ({mismatch.drawn_logprob:.6g}) is drawn"
    if mismatch.error is not None:
        drawn_token = None
        drawn_logprob = None
        drawn = f"no token can be drawn: {mismatch.error}"
    return Verification(
        Outcome.DIFFERS,
        f"completion {index}, token {mismatch.position}: {mismatch.stated} is stated (log-probability "
        f"{mismatch.stated_logprob:.6g}), and {drawn}",
        completion=index,
        position=mismatch.position,
        stated_token=mismatch.stated,
        drawn_token=drawn_token,
        stated_logprob=mismatch.stated_logprob,
        drawn_logprob=drawn_logprob,
    )


def logprob_differs(
    completion: int, position: int, token: int, stated: float | None, model: float | None
) -> Verification:
    """Make the result for a token that was drawn again, with another log-probability than stated."""
    return Verification(
        Outcome.DIFFERS,
        f"completion {completion}, token {position}: the log-probability {stated!r} is stated, and the model "
        f"gives {model!r}",
        completion=completion,
        position=position,
        stated_token=token,
        drawn_token=token,
        stated_logprob=stated,
        drawn_logprob=model,
    )


def compare_output(stated: RequestOutput, redrawn: Redrawn) -> Verification:
    """Compare an output of `LLM.generate` with what came of its redraw."""
    answers = [output.token_ids for output in stated.outputs]
    difference = draws_differ(redrawn, answers)
    if difference is not None:
        return difference
    drawn = redrawn.group.output()
    for stated_output, drawn_output in zip(stated.outputs, drawn.outputs, strict=True):
        difference = _completion_differs(stated_output, drawn_output)
        if difference is not None:
            return difference
    if stated.prompt_logprobs != drawn.prompt_logprobs:
        return differs("the log-probabilities of the prompt are others than stated")
    return Verification(Outcome.EQUAL, num_tokens=sum(map(len, answers)))


def _completion_differs(stated: CompletionOutput, drawn: CompletionOutput) -> Verification | None:
    index = drawn.index
    pairs = zip(stated.logprobs or (), drawn.logprobs or (), drawn.token_ids, strict=False)
    for position, (stated_entries, entries, token) in enumerate(pairs):
        if stated_entries != entries:
            return _entries_differ(index, position, token, stated_entries, entries)
    if (stated.logprobs is None) != (drawn.logprobs is None) or (
        len(stated.logprobs or ()) != len(drawn.logprobs or ())
    ):
        return differs(f"completion {index}: not every token has log-probabilities", index)
    if (stated.index, stated.error) != (index, drawn.error):
        return differs(
            f"completion {index}: index {stated.index!r} and error {stated.error!r} are stated",
            index,
        )
    if stated.text != drawn.text:
        return differs(f"completion {index}: its tokens are another text than stated", index)
    ends = drawn.finish_reason, drawn.stop_reason
    if drawn.finish_reason is None and stated.finish_reason in _FROM_OUTSIDE:
        return None
    if (stated.finish_reason, stated.stop_reason) != ends:
        ending = f"ends by {ends[0]} ({ends[1]!r})"
        if ends[0] is None:
            ending = "goes on"
        return differs(
            f"completion {index}: {stated.finish_reason} ({stated.stop_reason!r}) is stated as its end, and after its "
            f"last token it {ending}",
            index,
        )
    return None


def _entries_differ(
    index: int, position: int, token: int, stated: TokenLogprobs, model: TokenLogprobs
) -> Verification:
    """stated, model: what is stated for one token, and what the model gives; they differ."""
    # the token itself first
    differing = [
        candidate
        for candidate in sorted(set(stated) | set(model), key=lambda candidate: candidate != token)
        if stated.get(candidate) != model.get(candidate)
    ]
    other = differing[0]
    stated_entry = stated.get(other)
    entry = model.get(other)
    if other == token:
        return logprob_differs(index, position, token, _value(stated_entry), _value(entry))
    return Verification(
        Outcome.DIFFERS,
        f"completion {index}, token {position}: {stated_entry} is stated for token {other}, and the model "
        f"gives {entry}",
        completion=index,
        position=position,
        stated_token=token,
        drawn_token=token,
    )


def _value(entry: Logprob | None) -> float | None:
    return None if entry is None else entry.logprob
