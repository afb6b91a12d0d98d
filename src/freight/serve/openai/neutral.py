"""Fields of other servers that are not implemented here, with their neutral values. Data.

Clients, routers and gateways send such fields in every request: vLLM's and SGLang's own clients,
sglang-router, vllm-router. A neutral value asks for nothing and is accepted; any other is refused,
with a way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Neutral:
    """The treatment of one field.

    values   the neutral values; none: only null is neutral
    instead  why other values are refused, or what to use instead
    """

    values: tuple[object, ...]
    instead: str

    def asks_nothing(self, value: object) -> bool:
        """Return whether `value`, of parsed JSON, is neutral. 1 equals 1.0; true is not 1."""
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.values
        )


def _all(names: Iterable[str], values: tuple[object, ...], instead: str) -> dict[str, Neutral]:
    return dict.fromkeys(names, Neutral(values, instead))


_NO_BEAMS = "there is no beam search; n gives several completions"
_NO_SPLIT = "prompts and answers are computed by one engine; leave it out"
_TEXT_ONLY = "this server reads text; leave it out"
_NOT_RETURNED = "answers do not have it; leave it out"
_ONE_COMPILER = "grammars have one compiler; leave it out"

NEUTRAL: Mapping[str, Neutral] = {
    # OpenAI's
    "audio": Neutral((), "this server answers with text"),
    "functions": Neutral((), "use tools"),
    "function_call": Neutral((), "use tool_choice"),
    "web_search_options": Neutral((), "this server fetches nothing"),
    "moderation": Neutral((), "this server does not moderate"),
    "best_of": Neutral((1,), "use n, and choose among the completions"),
    "suffix": Neutral(("",), "text is only continued at its end"),
    "echo": Neutral(
        (False,), "an answer of a chat does not repeat the prompt; use /v1/completions"
    ),
    # vLLM's
    "chat_template": Neutral((), "the model's own template is used"),
    "prompt_embeds": Neutral((), "give text or token ids"),
    "use_beam_search": Neutral((False,), _NO_BEAMS),
    "length_penalty": Neutral((1.0,), _NO_BEAMS),
    "early_stopping": Neutral((False,), _NO_BEAMS),
    "spaces_between_special_tokens": Neutral(
        (True,), "the tokenizer decides how its special tokens are written"
    ),
    "truncation_side": Neutral(
        ("left",), "truncate_prompt_tokens keeps the last tokens; cut the prompt yourself"
    ),
    "documents": Neutral(
        ([],), "give them in chat_template_kwargs, as far as the template reads them"
    ),
    "thinking_token_budget": Neutral((-1,), "reasoning has no limit of its own; use max_tokens"),
    "repetition_detection": Neutral((), "use repetition_penalty"),
    "stream_interval": Neutral((1,), "--max-events-per-second bounds how often a stream sends"),
    "logprob_token_ids": Neutral((), "use logprobs, which gives the most likely tokens"),
    "watermarking": Neutral((False,), "answers have no watermark"),
    "logits_processors": Neutral(([],), "no code of a request is executed; use logit_bias"),
    "vllm_xargs": Neutral(({},), "there are no extensions to read it"),
    "detokenize": Neutral((True,), "use return_token_ids, which returns the ids with the text"),
    **_all(("guided_decoding_backend", "guided_whitespace_pattern"), (), _ONE_COMPILER),
    **_all(("mm_processor_kwargs", "media_io_kwargs"), ({},), _TEXT_ONLY),
    **_all(("kv_transfer_params", "ec_transfer_params"), (), _NO_SPLIT),
    **_all(("return_token_offsets", "return_prompt_text"), (False,), _NOT_RETURNED),
    "return_mm_kwargs": Neutral((True,), _TEXT_ONLY),
    "routed_experts_prompt_start": Neutral((0,), _NOT_RETURNED),
    # SGLang's
    "no_stop_trim": Neutral((False,), "use include_stop_str_in_output"),
    "stop_regex": Neutral(([],), "use stop, which takes strings"),
    "regex": Neutral((), 'use structured_outputs, {"regex": ...}'),
    "ebnf": Neutral((), 'use structured_outputs, {"grammar": ...} in the notation of Lark'),
    "json_schema": Neutral((), 'use structured_outputs, {"json": ...}'),
    "sampling_seed": Neutral((), "use seed"),
    "rid": Neutral((), "use request_id"),
    "extra_key": Neutral((), "use cache_salt"),
    "lora_path": Neutral((), "LoRA adapters are not implemented; merge them into the weights"),
    "session_params": Neutral(
        (), "this server keeps no sessions; send the whole prompt, the prefix cache finds it"
    ),
    "separate_reasoning": Neutral((True,), "reasoning is always a field of its own, reasoning"),
    "stream_reasoning": Neutral((True,), "reasoning is streamed as it comes"),
    "logprob_start_len": Neutral((-1,), "use prompt_logprobs"),
    **_all(
        ("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
        (False,),
        _NOT_RETURNED,
    ),
    **_all(
        ("custom_logit_processor", "custom_params"),
        (),
        "no code of a request is executed; use logit_bias",
    ),
    **_all(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"), (), _NO_SPLIT
    ),
    **_all(
        ("data_parallel_rank", "routed_dp_rank"),
        (),
        "a server is one engine; a router chooses among several",
    ),
}
