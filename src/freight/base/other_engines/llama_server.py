"""Options of llama.cpp's `llama-server`: what to use in their place. Data; imports no torch.

`pytest tests/unit/cli/test_names_of_others.py` compares it with its own list.
"""

from __future__ import annotations

from freight.base.other_engines import sentences as say
from freight.base.other_engines.sentences import named

_PRESET = "name a model of the hub: OWNER/NAME, or OWNER/NAME:FILE.gguf"
_METADATA = "the file's metadata decides, and nothing overrides it: change it there"
_PROCESSORS = "{threads} threads compute, and {rank_cpus} names the processors of ranks: omit it"
_SAMPLER = "not among the steps of sampling; a request has temperature, top_p, top_k, min_p and penalties: omit it"
_NO_PAGE_TOOLS = "the page has no tools: omit it"
_SLOTS = "a conversation is found by its prefix, not by a slot: omit it"

OPTIONS = {
    "models_dir": "{models}='DIR' serves the models of a folder: use that",
    "models_preset": "{models}='FILE' declares models and their options in TOML: use that",
    "models_autoload": "a model is loaded by the first request for it, or by /models/load: omit it",
    "reasoning_budget_message": "a thought ends with the closing tag of the chat template alone: omit it",
    "sleep_idle_seconds": "{models} unloads models that others need the room of: omit it",
    # models and their files
    **named("hf_repo hf_file", "name the file on the hub as the model: OWNER/NAME:FILE.gguf"),
    "gguf_file": "give the file itself as the model: FILE.gguf, or OWNER/NAME:FILE.gguf on the hub",
    **named("model_url docker_repo", _PRESET),
    **named(
        "embd_gemma_default fim_qwen_1.5b_default fim_qwen_3b_default fim_qwen_7b_default "
        "fim_qwen_7b_spec fim_qwen_14b_spec fim_qwen_30b_default gpt_oss_20b_default gpt_oss_120b_default "
        "vision_gemma_4b_default vision_gemma_12b_default",
        _PRESET,
    ),
    "offline": "set the variable HF_HUB_OFFLINE=1",
    "cache_list": "hf cache ls lists what was downloaded: omit it",
    "alias": "use {served_model_name}",
    "tags": "{served_model_name} is what clients call the model: omit it",
    "override_kv": _METADATA,
    **named("rope_freq_base rope_freq_scale rope_scale", _METADATA),
    **named(
        "yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow yarn_orig_ctx", _METADATA
    ),
    "check_tensors": "freight inspect MODEL reads a file's tensors: omit it",
    **named(
        "mmap no_mmap mlock load_mode lazy_mode",
        "weights are packed into memory of the process, and the file is not mapped: omit it",
    ),
    **named("repack no_repack", "weights are always packed for the processor: omit it"),
    "special": "a request has skip_special_tokens: omit it",
    "spm_infill": "there is no infill: omit it",
    # the context and the cache
    **named("ctx_size n_ctx", "use {max_model_len}"),
    **named("parallel", "use {max_num_seqs}"),
    **named("batch_size ubatch_size", "use {max_num_batched_tokens}"),
    **named(
        "cache_type_k cache_type_v",
        "{kv_cache_dtype}='fp8' or 'int8' stores keys and values in 8 bits",
    ),
    **named(
        "flash_attn cont_batching kv_unified kv_offload no_kv_offload op_offload",
        "it is always so here: omit it",
    ),
    "no_cont_batching": "requests always share steps: omit it",
    **named(
        "no_kv_unified kv_unified_per_slot",
        "requests share the cache's blocks, as they need them: omit it",
    ),
    "no_op_offload": "all of a model is on the device that {device} chooses: omit it",
    **named("fit fit_ctx fit_target", say.MEMORY),
    "cache_prompt": "prefixes are always cached: omit it",
    "no_cache_prompt": "use --no-enable-prefix-caching, or enable_prefix_caching=False in Python",
    **named("cache_reuse keep", "prefixes are found from their beginning: omit it"),
    **named(
        "context_shift", "a context is not shifted: an answer ends with length at {max_model_len}"
    ),
    "no_context_shift": "a context is never shifted: omit it",
    "swa_full": "layers with a window keep the tokens in it: omit it",
    **named(
        "cache_ram",
        "{kv_cache_memory} is the cache's memory, and on a CPU {kv_store} keeps prefixes beyond it",
    ),
    **named("slot_save_path cache_idle_slots no_cache_idle_slots", say.STORE),
    "slot_prompt_similarity": _SLOTS,
    **named(
        "ctx_checkpoints swa_checkpoints checkpoint_min_step",
        "{state_every} says how often the states of recurrent layers are kept: omit it",
    ),
    "defrag_thold": "blocks need no defragmentation: omit it",
    # devices and threads
    **named("n_threads num_threads", "use {threads}"),
    **named("threads_batch threads_http poll poll_batch", "use {threads}"),
    **named(
        "prio prio_batch cpu_mask cpu_mask_batch cpu_range cpu_range_batch cpu_strict cpu_strict_batch",
        _PROCESSORS,
    ),
    "numa": "ranks, {tensor_parallel_size} of them, are each bound to a memory node",
    **named(
        "n_gpu_layers gpu_layers cpu_moe n_cpu_moe n_cpu_ffn override_tensor rpc",
        "all of a model is on the device that {device} chooses, or on the GPUs of {pipeline_parallel_size}: omit it",
    ),
    "split_mode": "{pipeline_parallel_size} divides layers over GPUs ('layer'), {tensor_parallel_size} matrices "
    "('row'): use one of them",
    "tensor_split": "use {pp_layers}, the layers of each of the GPUs of {pipeline_parallel_size}",
    "main_gpu": "the first of the GPUs that CUDA_VISIBLE_DEVICES names has all, unless {pipeline_parallel_size} "
    "says how many: set it",
    "list_devices": "freight env lists them",
    **named("no_host", "{device} chooses where a model runs: omit it"),
    # adapters, drafts
    **named("lora lora_scaled lora_init_without_apply", say.LORA),
    **named(
        "control_vector control_vector_layer_range control_vector_scaled",
        "control vectors are not implemented, LoRA is ({enable_lora}): omit it",
    ),
    **named("draft draft_n draft_max spec_draft_n_max", "use {speculate}"),
    **named(
        "draft_min draft_n_min spec_draft_n_min spec_default spec_ngram_simple_size_n "
        "spec_ngram_simple_size_m spec_ngram_simple_min_hits spec_ngram_size_n spec_ngram_size_m "
        "spec_ngram_min_hits spec_ngram_mod_n_match spec_ngram_mod_n_max spec_ngram_mod_n_min "
        "spec_ngram_map_k_size_n spec_ngram_map_k_size_m spec_ngram_map_k_min_hits "
        "spec_ngram_map_k4v_size_n spec_ngram_map_k4v_size_m spec_ngram_map_k4v_min_hits "
        "lookup_cache_static lookup_cache_dynamic spec_synth_len spec_synth_rates",
        "{speculate} is the most tokens that are drafted from a request's own text: omit it",
    ),
    "spec_type": say.DRAFT_HEADS,
    **named("spec_draft_model model_draft spec_draft_hf hf_repo_draft", say.DRAFT_MODEL),
    **named(
        "spec_draft_p_min draft_p_min spec_draft_p_split draft_p_split",
        say.DRAFTS_LEARNED,
    ),
    **named(
        "spec_draft_ngl gpu_layers_draft n_gpu_layers_draft "
        "spec_draft_device device_draft spec_draft_threads threads_draft spec_draft_threads_batch "
        "threads_batch_draft spec_draft_cpu_mask cpu_mask_draft spec_draft_cpu_mask_batch "
        "cpu_mask_batch_draft spec_draft_cpu_range cpu_range_draft spec_draft_cpu_strict cpu_strict_draft "
        "spec_draft_cpu_strict_batch cpu_strict_batch_draft spec_draft_poll poll_draft "
        "spec_draft_poll_batch poll_batch_draft spec_draft_prio prio_draft spec_draft_prio_batch "
        "prio_batch_draft spec_draft_type_k cache_type_k_draft spec_draft_type_v cache_type_v_draft "
        "spec_draft_cpu_moe cpu_moe_draft spec_draft_n_cpu_moe spec_draft_ncmoe n_cpu_moe_draft "
        "spec_draft_override_tensor override_tensor_draft spec_draft_backend_sampling "
        "no_spec_draft_backend_sampling",
        say.DRAFTS_AS_MODEL,
    ),
    # answers
    **named(
        "temp temperature top_k top_p min_p frequency_penalty presence_penalty repeat_penalty logit_bias "
        "ignore_eos predict n_predict reverse_prompt",
        say.REQUESTS,
    ),
    **named(
        "adaptive_decay adaptive_target dry_allowed_length dry_base dry_multiplier dry_penalty_last_n "
        "dry_sequence_breaker dynatemp_exp dynatemp_range mirostat mirostat_ent mirostat_lr repeat_last_n "
        "samplers sampler_seq sampling_seq top_nsigma top_n_sigma typical typical_p xtc_probability "
        "xtc_threshold backend_sampling",
        _SAMPLER,
    ),
    **named(
        "grammar grammar_file json_schema json_schema_file",
        "a request has structured_outputs or response_format: omit it",
    ),
    **named("escape no_escape", "a prompt is taken as it is: omit it"),
    "chat_template_file": "use {chat_template}",
    "chat_template_kwargs": say.TEMPLATE,
    **named("jinja", "chat templates are always Jinja: omit it"),
    "no_jinja": "chat templates are always Jinja, and {chat_template} takes one: omit it",
    **named(
        "skip_chat_parsing no_skip_chat_parsing",
        "calls and reasoning are read out of answers to chats; /v1/completions has the text as it comes: omit it",
    ),
    **named("reasoning_format", say.TOOLS),
    **named(
        "reasoning reasoning_effort reasoning_preserve no_reasoning_preserve",
        "a request has reasoning_effort, and chat_template_kwargs for the template: omit it",
    ),
    **named(
        "prefill_assistant no_prefill_assistant", "a request has continue_final_message: omit it"
    ),
    **named("embedding embeddings rerank reranking", say.POOLING),
    "embd_normalize": "the model declares whether its vectors have length 1, and a request may say so: omit it",
    # the server
    **named("metrics", say.METRICS),
    **named("slots no_slots props", "/info and /metrics say what runs: omit it"),
    **named(
        "ui webui ui_config webui_config ui_config_file webui_config_file",
        "the page at / is always there: omit it",
    ),
    **named("no_ui no_webui", "the page at / is always there, and a proxy may hide it: omit it"),
    **named("path media_path", "the server gives no files but its page: omit it"),
    **named(
        "ui_mcp_proxy webui_mcp_proxy no_ui_mcp_proxy no_webui_mcp_proxy tools tools_runtime agent "
        "no_agent mcp_servers_config mcp_servers_json",
        _NO_PAGE_TOOLS,
    ),
    **named("api_prefix reuse_port", say.PROXY),
    **named("cors_origins", "use {allow_origin}"),
    **named("cors_credentials no_cors_credentials cors_headers cors_methods", say.CORS),
    "ssl_cert_file": "use {ssl_certfile}",
    "ssl_key_file": "use {ssl_keyfile}",
    **named("timeout", "use {write_timeout}, or {request_timeout} for a whole answer"),
    "sse_ping_interval": "a stream gets a comment after 15 seconds without a token: omit it",
    **named(
        "log_colors log_disable log_file log_jsonl no_log_jsonl log_prefix no_log_prefix log_prompts_dir "
        "log_timestamps no_log_timestamps log_verbose log_verbosity verbose verbosity perf no_perf",
        say.LOGS,
    ),
    **named("warmup no_warmup", say.WARM),
    "usage": "write --help",
    "version": "write freight --version",
    "completion_bash": "shells complete no options of it: omit it",
    # pictures
    **named(
        "mmproj mmproj_url mmproj_auto no_mmproj no_mmproj_auto mmproj_offload no_mmproj_offload "
        "image_max_tokens image_min_tokens mtmd_batch_max_tokens video_ffmpeg_dir video_fps "
        "video_timestamp_interval",
        say.TEXT_ONLY,
    ),
}

SHORT = {  # one hyphen -> the option
    "-ag": "agent",
    "-no-ag": "no_agent",
    "-a": "alias",
    "-b": "batch_size",
    "-bs": "backend_sampling",
    "-c": "ctx_size",
    "-C": "cpu_mask",
    "-Cb": "cpu_mask_batch",
    "-Cbd": "cpu_mask_batch_draft",
    "-Cd": "cpu_mask_draft",
    "-cb": "cont_batching",
    "-nocb": "no_cont_batching",
    "-cl": "cache_list",
    "-cmoe": "cpu_moe",
    "-cmoed": "cpu_moe_draft",
    "-cms": "checkpoint_min_step",
    "-Cr": "cpu_range",
    "-Crb": "cpu_range_batch",
    "-Crd": "cpu_range_draft",
    "-cram": "cache_ram",
    "-ctk": "cache_type_k",
    "-ctkd": "cache_type_k_draft",
    "-ctv": "cache_type_v",
    "-ctvd": "cache_type_v_draft",
    "-ctxcp": "ctx_checkpoints",
    "-dev": "device",
    "-devd": "device_draft",
    "-dr": "docker_repo",
    "-dt": "defrag_thold",
    "-e": "escape",
    "-fa": "flash_attn",
    "-fit": "fit",
    "-fitc": "fit_ctx",
    "-fitt": "fit_target",
    "-hf": "hf_repo",
    "-hfd": "hf_repo_draft",
    "-hff": "hf_file",
    "-hfr": "hf_repo",
    "-hfrd": "hf_repo_draft",
    "-hft": "hf_token",
    "-j": "json_schema",
    "-jf": "json_schema_file",
    "-kvo": "kv_offload",
    "-nkvo": "no_kv_offload",
    "-kvu": "kv_unified",
    "-no-kvu": "no_kv_unified",
    "-l": "logit_bias",
    "-lcd": "lookup_cache_dynamic",
    "-lcs": "lookup_cache_static",
    "-lm": "load_mode",
    "-lv": "verbosity",
    "-lzm": "lazy_mode",
    "-m": "model",
    "-md": "model_draft",
    "-mg": "main_gpu",
    "-mm": "mmproj",
    "-mmu": "mmproj_url",
    "-mu": "model_url",
    "-n": "n_predict",
    "-ncffn": "n_cpu_ffn",
    "-ncmoe": "n_cpu_moe",
    "-ncmoed": "n_cpu_moe_draft",
    "-ngl": "n_gpu_layers",
    "-ngld": "n_gpu_layers_draft",
    "-np": "parallel",
    "-nr": "no_repack",
    "-ot": "override_tensor",
    "-otd": "override_tensor_draft",
    "-r": "reverse_prompt",
    "-rea": "reasoning",
    "-s": "seed",
    "-sm": "split_mode",
    "-sp": "special",
    "-sps": "slot_prompt_similarity",
    "-t": "threads",
    "-tb": "threads_batch",
    "-tbd": "threads_batch_draft",
    "-td": "threads_draft",
    "-to": "timeout",
    "-ts": "tensor_split",
    "-ub": "ubatch_size",
    "-v": "verbose",
}
