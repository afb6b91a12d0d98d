"""What `freight quantize --kv-budget` chose, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from freight.base.fields import JsonObject
from freight.lab.evaluate.safety import KL_BOUND, Judgement, Verdict

if TYPE_CHECKING:
    from freight.quantizer.kv_budget import KVChoice

NOT_DECLARED = (
    "config.json declares no KV scheme, because other engines would take 1.0 for the layers without scales: they run "
    "this checkpoint with a 16-bit cache, and Freight runs the choice with --kv-cache-dtype auto"
)


def choice_judgement(choice: KVChoice) -> Judgement:
    """By the bounds of `freight evaluate`: of its figures KL alone was measured, so it can fail and
    not pass.
    """
    if not KL_BOUND.holds(choice.kl_verified):
        reason = f"mean KL is {choice.kl_verified:.3g} on the text that it was verified with, and {KL_BOUND.limit}"
        return Judgement(Verdict.NOT_SAFE, (reason,))
    return Judgement(
        Verdict.CANNOT_BE_SAID,
        ("KL alone was measured; `freight evaluate caches OUT --data FILE` says it",),
    )


def choice_facts(choice: KVChoice) -> JsonObject:
    """Return the `kv_budget` of `freight quantize --json`. A layer's `granularity` is null for 16
    bits; KL in nats per token.

    `kl` of a layer is what each granularity costs there alone.
    """
    judged = choice_judgement(choice)
    return {
        "verdict": judged.verdict,
        "reasons": list(judged.reasons),
        "kind": choice.budget.kind,
        "limit": choice.budget.limit,
        "layers": [
            {"layer": index, "granularity": chosen, "kl": alone}
            for index, (chosen, alone) in enumerate(
                zip(choice.granularities, choice.kl_by_layer, strict=True)
            )
        ],
        "bytes_per_token": choice.bytes_per_token,
        "bytes_per_token_at_16_bits": choice.bytes_unquantized,
        "bits": choice.bits,
        "predicted_kl": choice.predicted_kl,
        "kl_chosen": choice.kl_chosen,
        "kl_verified": choice.kl_verified,
        "num_tokens_chosen": choice.num_chosen,
        "num_tokens_verified": choice.num_verified,
        "declared": choice.uniform is not None,
    }


def choice_sentences(choice: KVChoice) -> Iterator[str]:
    """Yield a line for each layer, then those of the choice."""
    for index, (chosen, alone) in enumerate(
        zip(choice.granularities, choice.kl_by_layer, strict=True)
    ):
        costs = ", ".join(f"{granularity} {kl:.2g}" for granularity, kl in alone.items())
        what = "16 bits" if chosen is None else f"fp8 per {chosen}"
        yield f"layer {index}: {what} (KL of this layer alone: {costs})"
    yield (
        f"KV cache within {choice.budget}: {choice.bytes_per_token:,} bytes per token of {choice.bytes_unquantized:,}, "
        f"{choice.bits:.2f} bits per value; KL {choice.predicted_kl:.3g} predicted, {choice.kl_chosen:.3g} measured on "
        f"the {choice.num_chosen:,} tokens that it was chosen by, {choice.kl_verified:.3g} on {choice.num_verified:,} "
        "others"
    )
    judged = choice_judgement(choice)
    yield f"whether this cache is safe: {judged.verdict} ({'; '.join(judged.reasons)})"
    if choice.uniform is None:
        yield NOT_DECLARED
