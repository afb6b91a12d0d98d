"""Options of vLLM's `serve` and `LLM`, of Aphrodite, which is made from it, and of its older versions:
what to use in their place. Data; imports no torch.

`pytest tests/unit/cli/test_names_of_others.py` compares it with vLLM's own list.
"""

from __future__ import annotations

from freight.base.other_engines import sentences as say
from freight.base.other_engines.sentences import named

OPTIONS = {
    "reasoning_config": "{reasoning_budget} limits thoughts, whose tags are those of the chat template: use that",
    **named(
        "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
        say.SLEEP,
    ),
    "weight_transfer_config": say.WEIGHTS,
    # models and their files
    **named("torch_dtype", "use {dtype}"),
    **named("trust_remote_code code_revision", say.NO_CODE),
    **named(
        "load_format use_safetensors config_format safetensors_load_strategy "
        "safetensors_prefetch_block_size safetensors_prefetch_num_threads ignore_patterns "
        "model_loader_extra_config pt_load_map_location use_tqdm_on_load model_impl "
        "allow_deprecated_quantization",
        say.FILES,
    ),
    **named("hf_overrides hf_config_path", say.CONFIG),
    **named("rope_scaling rope_theta", say.ROPE),
    **named("download_dir", say.HUB),
    "hf_token": "set the variable HF_TOKEN",
    "tokenizer_mode": "the tokenizer follows the model's files: omit it",
    "tokenizer_revision": "{revision} is the model's; give {tokenizer} a folder for another one",
    "config": "write the options on the command line, or as variables FREIGHT_…",
    **named("generation_config override_generation_config", say.REQUESTS),
    "quantization_config": "{quantization} is a name, 'fp8' or 'int4'; a checkpoint declares the rest itself",
    **named("model_class_overrides io_processor_plugin additional_config", say.NO_PLUGINS),
    **named("worker_cls worker_extension_cls scheduler_cls logits_processors", say.NO_PLUGINS),
    "middleware": say.PROXY,
    **named("task runner convert", "the model decides whether it generates or pools: omit it"),
    "pooler_config": say.POOLING,
    # the KV cache
    "kv_cache_memory_bytes": "use {kv_cache_memory}",
    **named("gpu_memory_utilization device_memory_utilization num_gpu_blocks_override", say.MEMORY),
    "calculate_kv_scales": "{kv_scales}='dynamic' measures a scale for each token as it is stored; a checkpoint "
    "without scales has it by default",
    "kv_scales_path": "use {quantization_param_path}",
    "fp8_kv_cache": "{kv_cache_dtype}='fp8' does it",
    "kv_cache_scheme": "{kv_cache_dtype} selects the format of the cache; its default is the checkpoint's scheme",
    **named(
        "kv_transfer_config kv_offloading_size kv_offloading_backend",
        say.STORE,
    ),
    **named("swap_space cpu_offload_gb preemption_mode max_cpu_loras", say.NO_SWAP),
    **named(
        "cpu_offload_params offload_backend offload_group_size offload_num_in_group "
        "offload_params offload_prefetch_step",
        say.IN_MEMORY,
    ),
    **named(
        "prefix_caching_hash_algo prefix_match_unit prefix_cache_retention_interval", say.PREFIXES
    ),
    "disable_hybrid_kv_cache_manager": "layers of one kind share block tables: omit it",
    "kv_sharing_fast_prefill": "layers that share keys and values store them once: omit it",
    **named(
        "disable_sliding_window swa_bounded_replay",
        "layers with a window keep the tokens in it: omit it",
    ),
    "use_v2_block_manager": "there is one block manager: omit it",
    "mamba_ssm_cache_dtype": "use {state_dtype}",
    "mamba_cache_dtype": "use {state_dtype} for recurrent states; inputs of convolutions are kept in the compute dtype",
    "mamba_block_size": "use {state_every}",
    **named(
        "mamba_cache_mode mamba_cache_philox_rounds enable_mamba_cache_stochastic_rounding "
        "enable_mamba_shared_prefix_checkpoint use_replayssm replayssm_buffer_len",
        say.STATES,
    ),
    # steps
    "max_num_active_seqs": "use {max_num_seqs}",
    "max_num_scheduled_tokens": "use {max_num_batched_tokens}",
    **named("max_num_queued_reqs", say.QUEUE),
    "max_num_queued_tokens": "{max_queue} bounds the completions that wait, not their tokens",
    "enable_chunked_prefill": say.CHUNKS,
    **named(
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_partial_prefills "
        "max_long_partial_prefills prefill_schedule_interval",
        say.PACE,
    ),
    **named("scheduler_reserve_full_isl async_scheduling performance_mode", say.ORDER),
    "num_scheduler_steps": "a step is one token for each request: omit it",
    "stream_interval": "{max_events_per_second} bounds how often a stream sends",
    **named(
        "enforce_eager max_seq_len_to_capture max_context_len_to_capture compilation_config "
        "cudagraph_capture_sizes max_cudagraph_capture_size optimization_level",
        say.GRAPHS,
    ),
    # kernels
    "attention_backend": "use {kernels}",
    **named(
        "attention_config linear_backend moe_backend mamba_backend mamba_ssu_algorithm gdn_prefill_backend "
        "kda_decode_backend kda_prefill_backend sparse_indexer_topk_backend kernel_config ir_op_priority "
        "disable_cascade_attn enable_flashinfer_autotune monokernel use_fp64_gumbel jit_monitor_mode "
        "jit_monitor_verbose enable_flash_late_interaction",
        say.KERNELS,
    ),
    # devices and processes
    **named(
        "prefill_context_parallel_size decode_context_parallel_size "
        "dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_q_replicate "
        "num_gpus distributed_executor_backend worker_use_ray ray_workers_use_nsight "
        "enable_nccl_comm_suspend disable_nccl_for_dp_synchronization "
        "max_parallel_loading_workers enable_hc_sp enable_batch_sharded_sampling device_ids",
        say.ONE_DEVICE,
    ),
    **named("distributed_timeout_seconds cpu_distributed_timeout_seconds", "use {rank_timeout}"),
    "headless": "a machine with a {node_rank} above 0 computes and does not serve: omit it",
    **named(
        "numa_bind numa_bind_cpus numa_bind_nodes",
        "ranks are bound to memory nodes; {rank_cpus} names processors",
    ),
    **named(
        "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_start_rank "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_supervisor_port "
        "dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_sync_interval api_server_count enable_scale_out",
        say.ONE_ENGINE,
    ),
    **named(
        "enable_expert_parallel all2all_backend enable_eplb eplb_config expert_placement_strategy "
        "enable_ep_weight_filter enable_elastic_ep elastic_ep_max_dp_size enable_dbo "
        "dbo_decode_token_threshold dbo_prefill_token_threshold",
        say.EXPERTS,
    ),
    **named("ec_transfer_config ec_manager_config aux_output_config", say.NO_SPLIT),
    **named("enable_fault_tolerance fault_tolerance_config", "use {restart_engine}"),
    "watchdog_config": say.STALLS,
    "shutdown_timeout": "use {drain_timeout}",
    "renderer_num_workers": say.TOKENIZER,
    **named(
        "engram_config diffusion_config enable_shm_tensor_arena enable_cumem_allocator "
        "fail_on_environ_validation enable_trace_replay",
        say.NOT_HERE,
    ),
    # adapters, drafts
    **named("lora_dtype", "adapters are computed in {dtype}: omit it"),
    "lora_extra_vocab_size": "adapters that add tokens are refused: omit it",
    "fully_sharded_loras": "each rank has the rows of its own outputs: omit it",
    "lora_target_modules": "an adapter's files say what it changes: omit it",
    **named(
        "specialize_active_lora enable_moe_shared_loras enable_mixed_moe_lora_format "
        "enable_tower_connector_lora max_lora_cls_labels",
        say.LORA_FIXED,
    ),
    "default_mm_loras": say.TEXT_ONLY,
    **named(
        "enable_prompt_adapter prompt_adapters max_prompt_adapters",
        "prompt adapters are not implemented, LoRA is ({enable_lora}): omit it",
    ),
    "num_speculative_tokens": "use {speculate}",
    "spec_tokens": "use {speculate}",
    **named("speculative_model spec_model", say.DRAFT_MODEL),
    "spec_method": say.DRAFT_HEADS,
    "num_lookahead_slots": "drafts take blocks of the cache that are left over: omit it",
    # answers
    **named(
        "max_logprobs",
        "a completion may ask for the log-probabilities of any number of tokens: omit it",
    ),
    "logprobs_mode": "log-probabilities are those of the model's logits: omit it",
    **named(
        "return_sampling_mask enable_return_routed_experts per_request_spec_decode_metrics",
        say.NOT_RETURNED,
    ),
    "return_tokens_as_token_ids": "a request asks for it with return_tokens_as_token_ids: omit it",
    **named("guided_decoding_backend structured_outputs_config", say.ONE_GRAMMAR),
    **named("enable_reasoning reasoning_parser_plugin", say.TOOLS),
    **named(
        "tool_parser_plugin tool_strict_level",
        "{tool_call_parser} names a form, else the chat template decides: omit it",
    ),
    "no_enable_auto_tool_choice": "a request without tools, or with tool_choice 'none', gets no calls: omit it",
    "tool_server": "clients run the tools: omit it",
    "exclude_tools_when_tool_choice_none": "leave tools out of a request that wants no calls: omit it",
    "reasoning_effort_map": "a request's reasoning_effort goes to the chat template as it is: omit it",
    **named("default_chat_template_kwargs", say.TEMPLATE),
    **named(
        "trust_request_chat_template",
        "{chat_template} is the only template beside the model's own: omit it",
    ),
    "chat_template_content_format": "content is written as the model's chat template reads it: omit it",
    "response_role": "answers are the assistant's: omit it",
    **named("cohere_format cohere_is_reasoning_model", "Cohere's API is not served: omit it"),
    "anthropic_disabled_thinking_effort": "the chat template gets enable_thinking of the request's thinking: omit it",
    "enable_prompt_tokens_details": "usage always has prompt_tokens_details: omit it",
    "enable_force_include_usage": "a request asks for it with stream_options: omit it",
    "enable_prompt_embeds": "prompts are text or token ids: omit it",
    "tokens_only": "{skip_tokenizer_init} runs without a tokenizer",
    **named(
        "fingerprint_mode fingerprint_value",
        "system_fingerprint is a hash of weights, kernels and settings: omit it",
    ),
    "watermark": "answers have no watermark: omit it",
    "watermark_config": "answers have no watermark: omit it",
    # the server
    "allowed_origins": "use {allow_origin}",
    **named("allow_credentials allowed_headers allowed_methods", say.CORS),
    **named("ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh", say.TLS),
    **named("root_path uds", say.PROXY),
    **named("grpc grpc_port", "{port} answers HTTP; gRPC is not served"),
    "launch_kobold_api": "{port} answers OpenAI's, Anthropic's and TGI's APIs; Kobold's is not implemented",
    **named(
        "h11_max_header_count h11_max_incomplete_event_size",
        "the limits of a head are fixed (docs/server.md): omit it",
    ),
    "sse_keep_alive_interval": "a stream gets a comment after 15 seconds without a token: omit it",
    **named("disable_fastapi_docs enable_offline_docs", "/openapi.json describes the API: omit it"),
    "enable_request_id_headers": "every answer has x-request-id: omit it",
    **named(
        "disable_log_requests enable_log_requests disable_log_stats uvicorn_log_level "
        "aggregate_engine_logging disable_uvicorn_access_log disable_access_log_for_endpoints "
        "enable_log_deltas enable_log_outputs enable_logging_iteration_details log_config_file "
        "log_error_stack log_level logging_config max_log_len",
        say.LOGS,
    ),
    **named(
        "cudagraph_metrics enable_mfu_metrics enable_per_request_metrics enable_server_load_tracking "
        "kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets",
        say.METRICS,
    ),
    "show_hidden_metrics_for_version": "use {old_metrics} for the names that older dashboards read",
    **named("profiler_config enable_layerwise_nvtx_tracing collect_detailed_traces", say.NO_TRACES),
    # pictures, sound
    **named(
        "limit_mm_per_prompt allowed_local_media_path allowed_media_domains disable_chunked_mm_input "
        "enable_mm_embeds interleave_mm_strings language_model_only media_io_kwargs "
        "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only "
        "mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb "
        "mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb "
        "mm_tensor_ipc skip_mm_profiling trust_request_mm_kwargs video_pruning_method video_pruning_rate",
        say.TEXT_ONLY,
    ),
}

SHORT = {  # one hyphen -> the option
    "-ac": "attention_config",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-O": "optimization_level",
    "-dc": "diffusion_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpl": "data_parallel_size_local",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-dpn": "data_parallel_rank",
    "-tp": "tensor_parallel_size",  # of verbs without ranks
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",  # of verbs without stages
    "-q": "quantization",
    "-r": "node_rank",
    "-sc": "speculative_config",
}
