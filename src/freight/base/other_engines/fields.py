"""Fields of other engines' requests and of their SamplingParams, that Freight has not: what to use in
their place. Data; imports no torch.

Fields that have a value which asks for nothing are rows of `serve/openai/unread.py`.
"""

from __future__ import annotations

from freight.base.other_engines.sentences import named

_NO_STEP = (
    "it is not among the steps of sampling; use temperature, top_p, top_k, min_p or the penalties"
)
_NO_BEAMS = "there is no beam search; n gives several completions"
_NO_CODE = "no code of a request is executed; use logit_bias"
_OWN = "the engine keeps it for itself; leave it out"
_NOT_RETURNED = "answers do not have it; leave it out"
_TOKEN_IDS = "use return_token_ids"
_TEXT_ONLY = "this server reads text; leave it out"
_CHATS = "it is a field of /v1/chat/completions"

SAMPLING = {  # of SamplingParams, and of bodies
    **named("max_new_tokens n_predict", "use max_tokens"),
    "min_new_tokens": "use min_tokens",
    "sampling_seed": "use seed",
    "repeat_penalty": "use repetition_penalty",
    "repeat_last_n": "repetition_penalty counts the prompt and the whole answer; leave it out",
    "do_sample": "use temperature; 0 takes the most likely token",
    "truncate": "use truncate_prompt_tokens",
    **named("n_cmpl best_of", "use n"),
    **named("n_probs top_n_tokens", "use logprobs"),
    "logprob_token_ids": "use logprobs, which gives the most likely tokens",
    **named("prompt_logprob_start prompt_logprob_token_ids", "use prompt_logprobs"),
    "flat_logprobs": "log-probabilities are a list for each token; leave it out",
    **named("stop_regex stop_regex_strs stop_strs", "use stop, which takes strings"),
    "no_stop_trim": "use include_stop_str_in_output",
    **named("regex json_schema ebnf ebnf_full_assistant structural_tag", "use structured_outputs"),
    "grammar": "use structured_outputs with a grammar in the notation of Lark",
    **named("beam_width use_beam_search length_penalty early_stopping", _NO_BEAMS),
    **named("custom_params custom_logit_processor extra_args logits_processors", _NO_CODE),
    **named(
        "mirostat mirostat_tau mirostat_eta dynatemp_range dynatemp_exponent dry_multiplier dry_base "
        "dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold "
        "top_n_sigma typical_p adaptive_target adaptive_decay samplers min_keep backend_sampling",
        _NO_STEP,
    ),
    "repetition_detection": "use repetition_penalty",
    **named("watermark watermarking", "answers have no watermark; leave it out"),
    "spaces_between_special_tokens": "the tokenizer decides how its special tokens are written; leave it out",
    "skip_reading_prefix_cache": "use cache_salt, which shares no prefix of others",
    "stream_interval": "--max-events-per-second bounds how often a stream sends",
    "output_kind": "generate gives whole answers, and streams give what is new; leave it out",
    **named(
        "is_normalized stop_str_max_len stop_regex_max_len output_text_buffer_length skip_clone "
        "trace_decode_token_ids",
        _OWN,
    ),
    **named("routed_experts_prompt_start", _NOT_RETURNED),
}
BODIES = {
    "prompt": "use messages, or send it to /v1/completions",
    "messages": f"{_CHATS}; use prompt",
    "input_ids": "/v1/completions takes token ids as prompt",
    "max_completion_tokens": "use max_tokens",
    "top_logprobs": "use logprobs, the number of tokens",
    **named(
        "tools tool_choice parallel_tool_calls reasoning_effort chat_template_kwargs "
        "add_generation_prompt continue_final_message",
        _CHATS,
    ),
    "thinking": "use reasoning_effort, or chat_template_kwargs for the template",
    "adapter_id": "name the adapter as the model; /v1/models lists them",
    "lora": "name the adapter as the model; /v1/models lists them",
    "decoder_input_details": "use prompt_logprobs",
    **named("details return_full_text", "it is a field of TGI's /generate"),
    "include_usage": "write it into stream_options",
    **named("return_tokens return_prompt_token_ids return_input_ids_in_sglext", _TOKEN_IDS),
    "return_output_ids_in_sglext": _TOKEN_IDS,
    **named(
        "return_weight_versions return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 "
        "return_meta_info return_sampling_mask return_spec_tokens_details routed_experts_start_len "
        "sampling_logprobs_mode response_fields verbose",
        _NOT_RETURNED,
    ),
    **named(
        "images_config max_dynamic_patch min_dynamic_patch mm_payload use_audio_in_video video_config",
        _TEXT_ONLY,
    ),
    "task": "leave it out; DeepSeek's tasks are parts of its template",
    "custom_labels": "metrics have no labels of requests; use an API key for each client",
    **named("n_cache_reuse n_discard", "prefixes are found from their beginning; leave it out"),
    "n_indent": "use structured_outputs with a regex",
    **named("t_max_predict_ms t_max_prompt_ms", "--request-timeout bounds an answer; leave it out"),
    "sse_ping_interval": "a stream gets a comment after 15 seconds without a token; leave it out",
    **named(
        "grammar_lazy grammar_triggers preserved_tokens", "use tools, whose calls have a grammar"
    ),
    **named(
        "chat_format chat_parser generation_prompt parse_tool_calls reasoning_format",
        "the chat template selects the form of calls and of reasoning; leave it out",
    ),
    **named(
        "reasoning_budget_message reasoning_budget_start_tag "
        "reasoning_budget_end_tag reasoning_budget_end_tags reasoning_control",
        "a thought ends with the model's own closing tag; use thinking_token_budget",
    ),
}
