"""Options of SGLang's `launch_server`: what to use in their place. Data; imports no torch.

`pytest tests/unit/cli/test_names_of_others.py` compares it with SGLang's own list.
"""

from __future__ import annotations

from freight.base.other_engines import sentences as say
from freight.base.other_engines.sentences import named

_NO_EXPORT = "freight quantize writes a checkpoint first: omit it"

OPTIONS = {
    "enable_priority_scheduling": "{scheduling_policy}='priority' does it: use that",
    **named(
        "schedule_low_priority_values_first priority_scheduling_preemption_threshold "
        "abort_on_priority_when_disabled default_priority_value disable_priority_preemption",
        "{scheduling_policy}='priority' takes lower values of priority first, and 0 where there is none: omit it",
    ),
    **named("enable_memory_saver enable_weights_cpu_backup", say.SLEEP),
    "checkpoint_engine_wait_weights_before_ready": say.WEIGHTS,
    **named("enable_trace trace_modules", say.TRACES),
    # models and their files
    "model_path": "use {model}",
    "tokenizer_path": "use {tokenizer}",
    **named("tokenizer_backend", "the tokenizer follows the model's files: omit it"),
    **named(
        "json_model_override_args decrypted_config_file decrypted_draft_config_file", say.CONFIG
    ),
    **named(
        "custom_weight_loader model_config_parser startup_weight_load_mode model_checksum "
        "weight_loader_disable_mmap weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints "
        "weight_loader_prefetch_num_threads delete_ckpt_after_loading",
        say.FILES,
    ),
    **named(
        "modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path "
        "modelopt_export_path quantize_and_serve rl_quant_profile",
        _NO_EXPORT,
    ),
    **named(
        "modelexpress_config remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports "
        "remote_instance_weight_loader_start_seed_via_transfer_engine weight_cache_mode "
        "weight_cache_socket weight_cache_timeout engine_info_bootstrap_port",
        "weights come from a folder or from the hub: omit it",
    ),
    "is_embedding": say.POOLING,
    "preferred_sampling_params": say.REQUESTS,
    "sampling_defaults": say.REQUESTS,
    **named("forward_hooks enable_custom_logit_processor", say.NO_PLUGINS),
    **named("sidecar sidecar_args smg_http_sidecar_port grpc_http_sidecar_port", say.NO_PLUGINS),
    # the KV cache
    "mem_fraction_static": say.MEMORY,
    "page_size": "use {block_size}",
    "context_length": "use {max_model_len}",
    "disable_radix_cache": "use --no-enable-prefix-caching, or enable_prefix_caching=False in Python",
    **named(
        "radix_cache_backend radix_eviction_policy radix_eviction_policy_config retraction_policy "
        "disable_chunked_prefix_cache enable_session_radix_cache swa_prefix_tails strip_thinking_cache "
        "prefill_only_disable_kv_cache",
        say.PREFIXES,
    ),
    **named(
        "enable_hierarchical_cache enable_hicache hicache_host_memory_fraction hicache_host_memory_mode "
        "hicache_io_backend hicache_mem_layout hicache_ratio hicache_size hicache_storage_backend "
        "hicache_storage_backend_extra_config hicache_storage_prefetch_policy "
        "hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval "
        "hicache_write_policy enable_lmcache lmcache_config_file enable_flexkv flexkv_config_file "
        "enable_unified_cache_external_linker unified_cache_external_linker_backend "
        "unified_cache_external_linker_config",
        say.STORE,
    ),
    **named(
        "enable_hisparse hisparse_config hierarchical_sparse_attention_extra_config "
        "enable_page_major_kv_layout enable_unified_memory enable_kv_cache_sharding enable_linker_mla_dedup "
        "enable_dsa_cache_layer_split c128_page_size prefill_kv_cache_dequant_dtype qsa_indexer_dtype "
        "enable_deepseek_v4_fp4_indexer",
        "{kv_cache_dtype} selects the format of the cache, and its layout follows: omit it",
    ),
    **named("kv_canary kv_canary_real_data kv_canary_sweep_interval", say.NOT_HERE),
    **named(
        "swa_full_tokens_ratio disable_hybrid_swa_memory enable_decoder_swa_bounded_replay "
        "enable_encoder_swa_bounded_replay",
        "layers with a window have a part of the cache of their own: omit it",
    ),
    "mamba_ssm_dtype": "use {state_dtype}",
    **named("mamba_track_interval", "use {state_every}"),
    **named(
        "mamba_full_memory_ratio mamba_max_states_per_path mamba_radix_cache_strategy max_mamba_cache_size "
        "enable_int8_mamba_checkpoint int8_mamba_ckpt_size enable_linear_replayssm "
        "enable_linear_replayssm_spec linear_replayssm_cache_len",
        say.STATES,
    ),
    # steps
    "max_running_requests": "use {max_num_seqs}",
    "chunked_prefill_size": "use {max_num_batched_tokens}",
    "max_prefill_tokens": "use {max_num_batched_tokens}",
    "max_queued_requests": say.QUEUE,
    "enable_mixed_chunk": "prompts and decoding share steps: omit it",
    "enable_dynamic_chunking": say.CHUNKS,
    **named(
        "prefill_decode_interval prefill_decode_interval_min_bs enable_prefill_delayer prefill_max_requests "
        "prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms "
        "prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio "
        "prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets",
        say.PACE,
    ),
    **named(
        "schedule_conservativeness schedule_policy num_reserved_decode_tokens min_free_slots_delay "
        "num_continuous_decode_steps disable_overlap_schedule scheduler_recv_interval "
        "optimistic_prefill_attempts",
        say.ORDER,
    ),
    **named(
        "enable_deterministic_inference rl_on_policy_target",
        "answers do not depend on what shares their steps: omit it",
    ),
    "allow_auto_truncate": "a request asks for it with truncate_prompt_tokens: omit it",
    "sleep_on_idle": "the engine waits without using a processor: omit it",
    **named(
        "disable_cuda_graph disable_cuda_graph_padding disable_decode_cuda_graph disable_prefill_cuda_graph "
        "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill "
        "cuda_graph_config cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "
        "cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context debug_cuda_graph "
        "enable_profile_cuda_graph enable_cudagraph_gc enable_torch_compile enable_torch_compile_debug_mode "
        "torch_compile_max_bs",
        say.GRAPHS,
    ),
    # kernels
    **named(
        "decode_attention_backend prefill_attention_backend mm_attention_backend bf16_gemm_backend "
        "fp4_gemm_backend fp8_gemm_backend sampling_backend moe_runner_backend linear_attn_backend "
        "linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend "
        "dsa_decode_backend dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend "
        "dsa_triton_union dsv4_attn_backend dsv4_prefill_backend enable_dsa_fused_indexer "
        "disable_flashinfer_autotune flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged "
        "flashinfer_mxfp4_moe_precision enable_amd_monokernel monokernel_backend enable_fp32_lm_head "
        "enable_fused_moe_sum_all_reduce enable_fused_qk_norm_rope enable_lean_attention "
        "enable_nvidia_megakernel enable_tf32_matmul enable_scattered_sconv enable_quant_communications "
        "enable_w4a4_mxfp4_megamoe triton_attention_num_kv_splits triton_attention_reduce_in_fp32 "
        "triton_attention_split_tile_size mlx_enable_sampling",
        say.KERNELS,
    ),
    # devices and processes
    "random_seed": "use {seed}",
    "tp_size": "use {tensor_parallel_size}",
    "dist_init_addr": "write {master_addr} and {master_port}",
    "nccl_init_addr": "write {master_addr} and {master_port}",
    "dist_timeout": "use {rank_timeout}",
    **named(
        "base_gpu_id gpu_id_step pp_async_batch_depth pp_max_micro_batch_size attn_cp_size "
        "attention_context_parallel_size attn_dp_size attention_data_parallel_size cp_strategy dcp_size "
        "dcp_replicate_q_proj dwdp_size moe_dense_tp_size shared_experts_tp_size "
        "enable_prefill_cp enable_cp_decode_attn_tp enable_layernorm_sp enable_megamoe_for_layernorm_sp "
        "enable_tp_lm_head_all_to_all enable_dp_lm_head enable_dense_mlp_attn_tp "
        "enable_shared_experts_attn_tp enable_attn_tp_input_scattered disable_attn_tp_gather "
        "enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_decode "
        "disable_aiter_allreduce_fusion_in_prefill enable_flashinfer_allreduce_fusion "
        "enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_mscclpp "
        "enable_nccl_nvls enable_p2p_check enable_symm_mem enable_torch_symm_mem nccl_port pre_warm_nccl "
        "use_ray enable_mis sm_group_num enable_pdmux pdmux_config_path enable_single_batch_overlap "
        "enable_two_batch_overlap tbo_token_distribution_threshold",
        say.ONE_DEVICE,
    ),
    "numa_node": "ranks are bound to memory nodes; {rank_cpus} names processors",
    **named(
        "dp_size load_balance_method load_publish_endpoint load_snapshot_publish_interval "
        "enable_dp_attention enable_dp_attention_local_control_broadcast gated_launch_port",
        say.ONE_ENGINE,
    ),
    **named(
        "ep_size ep expert_parallel_size max_ep_size ep_dispatch_algorithm ep_num_redundant_experts "
        "moe_a2a_backend moe_dp_size moe_data_parallel_size deepep_config deepep_dispatcher_output_dtype "
        "deepep_mode deepep_v2_mode fuseep_mode flashinfer_a2a_dispatch_type "
        "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion "
        "enforce_shared_experts_fusion elastic_ep_backend elastic_ep_initial_size elastic_ep_join_mode "
        "elastic_ep_join_rank_offset elastic_ep_scale_timeout enable_elastic_expert_backup "
        "eplb_algorithm eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk "
        "eplb_rebalance_num_iterations init_expert_location expert_balancedness_report_mode "
        "expert_distribution_recorder_buffer_size expert_distribution_recorder_mode enable_waterfill "
        "enable_paged_experts paged_experts_num_resident kt_cpuinfer kt_max_deferred_experts_per_token "
        "kt_method kt_num_gpu_experts kt_threadpool_count kt_weight_path",
        say.EXPERTS,
    ),
    **named(
        "offload_mode ple_offload_backend ple_offload_dir ple_offload_embedding "
        "enable_draft_weights_cpu_backup",
        say.IN_MEMORY,
    ),
    **named(
        "disaggregation_bootstrap_port disaggregation_decode_allocation_policy "
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache "
        "disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold "
        "disaggregation_decode_polling_interval disaggregation_decode_retraction_backup "
        "disaggregation_enable_kv_checksum disaggregation_ib_device disaggregation_mode "
        "disaggregation_transfer_backend enable_pd_role_switch mooncake_ib_device",
        say.NO_SPLIT,
    ),
    **named("watchdog_timeout soft_watchdog_timeout", say.STALLS),
    **named(
        "tokenizer_worker_num detokenizer_worker_num batch_notify_size disable_tokenizer_batch_decode "
        "enable_tokenizer_batch_encode enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
        "dynamic_batch_tokenizer_batch_timeout",
        say.TOKENIZER,
    ),
    **named("gc_threshold gc_warning_threshold_secs", say.FIXED),
    **named("skip_server_warmup warmups", say.WARM),
    **named(
        "dllm_algorithm dllm_algorithm_config dllm_fdfo enable_streaming_session file_storage_path "
        "enable_response_store boundary_reduction context_bucket",
        say.NOT_HERE,
    ),
    # adapters, drafts
    **named("lora_paths", say.LORA),
    "max_loras_per_batch": "{max_loras} are loaded at a time, and any of them share a step",
    "max_loaded_loras": "use {max_loras}",
    **named(
        "lora_backend lora_drain_wait_threshold lora_eviction_policy lora_strict_loading "
        "lora_use_virtual_experts enable_lora_overlap_loading experts_shared_outer_loras "
        "max_lora_chunk_size uno_lora_path",
        say.LORA_FIXED,
    ),
    "speculative_num_draft_tokens": "use {speculate}",
    "speculative_num_steps": "use {speculate}",
    "speculative_algorithm": f"{say.DRAFT_HEADS}, in the place of STANDALONE, NEXTN and NGRAM",
    **named("speculative_draft_model_path speculative_draft_model", say.DRAFT_HEADS),
    **named(
        "speculative_draft_model_quantization speculative_draft_model_revision "
        "speculative_draft_attention_backend speculative_draft_kv_cache_dtype "
        "speculative_draft_load_format speculative_draft_sink_size speculative_draft_window_size "
        "speculative_attention_mode speculative_moe_a2a_backend speculative_moe_runner_backend "
        "speculative_token_map speculative_dsa_topk_backend speculative_enable_w4a4_mxfp4_megamoe "
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank "
        "decoupled_spec_role",
        say.DRAFTS_AS_MODEL,
    ),
    **named("speculative_eagle_topk enable_multi_layer_eagle", say.DRAFTS_LEARNED),
    **named(
        "speculative_dflash_block_size speculative_domino_candidate_pool_size "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size "
        "speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path",
        "methods are draft_model, mtp, eagle3 and ngram ({speculative_config}), which have no such part: omit it",
    ),
    "spec_trace_dir": "/metrics counts drafts by what drafted them: omit it",
    **named(
        "speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_match_type speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth "
        "speculative_ngram_min_bfs_breadth speculative_adaptive speculative_adaptive_config",
        "{speculate} is the most tokens that are drafted, and the text decides how many: omit it",
    ),
    **named(
        "speculative_accept_threshold_acc speculative_accept_threshold_single "
        "speculative_use_block_verification speculative_use_rejection_sampling",
        "drafts change no token of an answer: omit it",
    ),
    # answers
    "grammar_backend": say.ONE_GRAMMAR,
    **named(
        "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt "
        "constrained_json_whitespace_pattern disable_outlines_disk_cache",
        say.ONE_GRAMMAR,
    ),
    "completion_template": "{chat_template} is for chats, and completions have no template: omit it",
    "hf_chat_template_name": "{chat_template} FILE takes a Jinja template",
    "enable_strict_thinking": say.TOOLS,
    "enable_cache_report": "usage always has cached_tokens: omit it",
    "incremental_streaming_output": "a stream has only what is new in each event: omit it",
    "stream_response_default_include_usage": "a request asks for it with stream_options: omit it",
    **named(
        "enable_return_aux_hidden_states enable_return_hidden_states enable_return_indexer_topk "
        "return_aux_hidden_state_layer_ids return_hidden_states_mode sampling_mask_max_tokens",
        say.NOT_RETURNED,
    ),
    **named(
        "return_input_ids return_output_ids", "a request asks for it with return_token_ids: omit it"
    ),
    "enable_watermark": "answers have no watermark: omit it",
    "weight_version": "system_fingerprint of an answer names the weights: omit it",
    # the server
    "admin_api_key": "use {api_key}",
    "fastapi_root_path": say.PROXY,
    **named(
        "enable_http2 http2_initial_connection_window_size http2_max_concurrent_streams", say.PROXY
    ),
    "enable_http_worker_reuseport": say.ONE_ENGINE,
    **named(
        "grpc_mode smg_grpc_mode grpc_response_timeout_secs",
        "{port} answers HTTP; gRPC is not served",
    ),
    **named(
        "log_level_http log_requests log_requests_format log_requests_level log_requests_target "
        "uvicorn_access_log_exclude_prefixes show_time_cost decode_log_interval "
        "enable_request_time_stats_logging",
        say.LOGS,
    ),
    **named(
        "enable_metrics enable_metrics_for_all_schedulers bucket_e2e_request_latency "
        "bucket_inter_token_latency bucket_time_to_first_token generation_tokens_buckets "
        "prompt_tokens_buckets extra_metric_labels tokenizer_metrics_allowed_custom_labels "
        "tokenizer_metrics_custom_labels_header export_metrics_to_file export_metrics_to_file_dir "
        "enable_forward_pass_metrics forward_pass_metrics_ipc_name forward_pass_metrics_worker_id",
        say.METRICS,
    ),
    **named(
        "enable_layerwise_nvtx_marker crash_dump_folder debug_tensor_dump_input_file "
        "debug_tensor_dump_layers debug_tensor_dump_output_folder msprobe_dump_config",
        say.NO_TRACES,
    ),
    # pictures, sound
    **named(
        "enable_multimodal language_only asr_max_buffer_seconds asr_max_concurrent_sessions "
        "disable_fast_image_processor image_processor_backend enable_adaptive_dispatch_to_encoder "
        "enable_broadcast_mm_inputs_process enable_mm_global_cache enable_prefix_mm_cache "
        "enable_precise_embedding_interpolation encoder_bootstrap_port encoder_only encoder_register_urls "
        "encoder_transfer_backend encoder_urls limit_mm_data_per_request media_url_max_file_size_mb "
        "mm_enable_dp_encoder mm_feature_transport mm_global_cache_backend mm_io_worker_num "
        "mm_preprocess_cache_size_mb mm_process_config mm_processor_worker_num trust_mm_content_hashes",
        say.TEXT_ONLY,
    ),
}

SHORT: dict[str, str] = {}
