"""Fields of OpenAI's API and of other servers that have no effect here, one row each. Data.

Clients, routers and gateways send such fields in every request: vLLM's and SGLang's own clients,
sglang-router, vllm-router. Some are ignored, and the header x-freight-ignored names them. Of the
others a neutral value asks for nothing and is accepted; any other is refused, with a way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from freight.base.other_engines.fields import SAMPLING
from freight.serve.bodies import Unread


def _all(names: Iterable[str], row: Unread) -> dict[str, Unread]:
    return dict.fromkeys(names, row)


_IGNORED = Unread(None, reported=True)  # changes no token of an answer
_NO_BEAMS = "there is no beam search; n gives several completions"
_NO_SPLIT = "prompts and answers are computed by one engine; leave it out"
_TEXT_ONLY = "this server reads text; leave it out"
_NOT_RETURNED = "answers do not have it; leave it out"
_ONE_COMPILER = "grammars have one compiler; leave it out"

UNREAD: Mapping[str, Unread] = {
    # OpenAI's
    **_all(
        (
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "verbosity",
        ),
        _IGNORED,
    ),
    "modalities": Unread((["text"],), "this server answers with text", reported=True),
    "audio": Unread((), "this server answers with text"),
    "functions": Unread((), "use tools"),
    "function_call": Unread((), "use tool_choice"),
    "web_search_options": Unread((), "this server fetches nothing"),
    "moderation": Unread((), "this server does not moderate"),
    "best_of": Unread((1,), "use n, and choose among the completions"),
    "suffix": Unread(("",), "text is only continued at its end"),
    "echo": Unread((False,), "an answer of a chat does not repeat the prompt; use /v1/completions"),
    # vLLM's
    "include_reasoning": _IGNORED,
    "chat_template": Unread((), "the model's own template is used"),
    "prompt_embeds": Unread((), "give text or token ids"),
    "use_beam_search": Unread((False,), _NO_BEAMS),
    "length_penalty": Unread((1.0,), _NO_BEAMS),
    "early_stopping": Unread((False,), _NO_BEAMS),
    "spaces_between_special_tokens": Unread(
        (True,), "the tokenizer decides how its special tokens are written"
    ),
    "truncation_side": Unread(
        ("left",), "truncate_prompt_tokens keeps the last tokens; cut the prompt yourself"
    ),
    "documents": Unread(
        ([],), "give them in chat_template_kwargs, as far as the template reads them"
    ),
    "repetition_detection": Unread((), "use repetition_penalty"),
    "stream_interval": Unread((1,), "--max-events-per-second bounds how often a stream sends"),
    "logprob_token_ids": Unread((), "use logprobs, which gives the most likely tokens"),
    "watermarking": Unread((False,), "answers have no watermark"),
    "logits_processors": Unread(([],), "no code of a request is executed; use logit_bias"),
    "vllm_xargs": Unread(({},), "there are no extensions to read it"),
    "detokenize": Unread((True,), "use return_token_ids, which returns the ids with the text"),
    **_all(("guided_decoding_backend", "guided_whitespace_pattern"), Unread((), _ONE_COMPILER)),
    **_all(("mm_processor_kwargs", "media_io_kwargs"), Unread(({},), _TEXT_ONLY)),
    **_all(("kv_transfer_params", "ec_transfer_params"), Unread((), _NO_SPLIT)),
    **_all(("return_token_offsets", "return_prompt_text"), Unread((False,), _NOT_RETURNED)),
    "return_mm_kwargs": Unread((True,), _TEXT_ONLY),
    "routed_experts_prompt_start": Unread((0,), _NOT_RETURNED),
    # SGLang's
    "session_id": _IGNORED,
    "no_stop_trim": Unread((False,), "use include_stop_str_in_output"),
    "stop_regex": Unread(([],), "use stop, which takes strings"),
    "regex": Unread((), 'use structured_outputs, {"regex": ...}'),
    "ebnf": Unread((), 'use structured_outputs, {"grammar": ...} in the notation of Lark'),
    "json_schema": Unread((), 'use structured_outputs, {"json": ...}'),
    "sampling_seed": Unread((), "use seed"),
    "rid": Unread((), "use request_id"),
    "extra_key": Unread((), "use cache_salt"),
    "lora_path": Unread((), "name the adapter as the model; /v1/models lists them"),
    "session_params": Unread(
        (), "this server keeps no sessions; send the whole prompt, the prefix cache finds it"
    ),
    "separate_reasoning": Unread((True,), "reasoning is always a field of its own, reasoning"),
    "stream_reasoning": Unread((True,), "reasoning is streamed as it comes"),
    "logprob_start_len": Unread((-1,), "use prompt_logprobs"),
    **_all(
        ("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"),
        Unread((False,), _NOT_RETURNED),
    ),
    **_all(
        ("custom_logit_processor", "custom_params"),
        Unread((), "no code of a request is executed; use logit_bias"),
    ),
    **_all(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        Unread((), _NO_SPLIT),
    ),
    **_all(
        ("data_parallel_rank", "routed_dp_rank"),
        Unread((), "a server is one engine; a router chooses among several"),
    ),
    # llama.cpp's
    "cache_prompt": Unread((True,), "prefixes are always cached; use cache_salt to share none"),
    "id_slot": Unread((-1,), "a conversation is found by its prefix; leave it out"),
    "n_keep": Unread(
        (0,), "a prompt that is too long is refused, or cut by truncate_prompt_tokens"
    ),
    "repeat_penalty": Unread((1.0,), SAMPLING["repeat_penalty"]),
    **{
        name: Unread((off,), SAMPLING[name])
        for name, off in (
            *(("mirostat", 0), ("typical_p", 1.0), ("xtc_probability", 0), ("dry_multiplier", 0)),
            *(("dynatemp_range", 0), ("top_n_sigma", -1), ("min_keep", 0)),
        )
    },
    **_all(
        ("timings_per_token", "return_progress", "post_sampling_probs"),
        Unread((False,), _NOT_RETURNED),
    ),
}
