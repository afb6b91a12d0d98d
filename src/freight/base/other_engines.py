"""Options of other engines (vLLM, Aphrodite, SGLang, TGI, llama.cpp) and their replacements here. Data;
imports no torch.

A sentence names our options as {field}: `spell` writes them as keywords ('kv_cache_memory') or as
flags ('--kv-cache-memory'). RENAMED has the options with an equivalent of ours. TGI's launcher has a
separate table, because `freight --model-id M` reads its flags and variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

RENAMED = {  # other engines' names -> ours
    "model_id": "model",
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "torch_dtype": "dtype",
    "kv_scales_path": "quantization_param_path",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
    "mamba_ssm_cache_dtype": "state_dtype",
    "mamba_ssm_dtype": "state_dtype",
    "num_speculative_tokens": "speculate",
    "speculative_num_draft_tokens": "speculate",
    "n_threads": "threads",
    "num_threads": "threads",
    "attention_backend": "kernels",
    "random_seed": "seed",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "allowed_origins": "allow_origin",
    "api_keys": "api_key",
    "ctx_size": "max_model_len",  # llama.cpp's
    "n_ctx": "max_model_len",
    "parallel": "max_num_seqs",
    "batch_size": "max_num_batched_tokens",
    "ubatch_size": "max_num_batched_tokens",
    "draft_max": "speculate",
    "alias": "served_model_name",
    "chat_template_file": "chat_template",
}
_MEMORY = (
    "the cache takes a share of the free memory, or the size that {kv_cache_memory}='4GiB' gives"
)
_ONE_DEVICE = "a model runs on one device, or on ranks (tensor_parallel_size): omit it"
_NO_SWAP = "nothing is swapped to the CPU, a preempted request is computed again: omit it"
_STORE = "on a CPU {kv_store}='DIR' keeps prefixes in memory and on the disk; on a GPU omit it"
_GRAPHS = "decode steps are captured and replayed where that is exact: omit it"
_NO_CODE = "no code of a checkpoint is ever executed: omit it"
_TOOLS = "the model's chat template selects the form of reasoning, unless {reasoning_parser} does: omit it"
_LOGS = "each request is one line of the log, and {log_format}=json is for collectors: omit it"
_LORA = "adapters are {lora_modules}=['NAME=PATH'], with {enable_lora}"
_NO_PROMPT_ADAPTERS = "prompt adapters are not implemented, LoRA is ({enable_lora}): omit it"
_DRAFTS = (
    "draft models and heads are not implemented; {speculate} drafts from each request's own text"
)
_FILES = "safetensors are read, and the format follows from the files: omit it"
_HUB = "the hub's variables select the folder of downloads: set HF_HOME or HF_HUB_CACHE"
_ROPE = "rotary embedding follows config.json: change it there"

SENTENCES = {
    "calculate_kv_scales": "{kv_scales}='dynamic' measures a scale for each token as it is stored; a checkpoint "
    "without scales has it by default",
    "kv_cache_scheme": "{kv_cache_dtype} selects the format of the cache; its default is the checkpoint's scheme",
    "mamba_cache_dtype": "use {state_dtype} for recurrent states; inputs of convolutions are kept in the compute dtype",
    "fp8_kv_cache": "{kv_cache_dtype}='fp8' does it",
    **dict.fromkeys(
        ("gpu_memory_utilization", "mem_fraction_static", "num_gpu_blocks_override"), _MEMORY
    ),
    **dict.fromkeys(
        (
            "kv_transfer_config",
            "kv_offloading_size",
            "kv_offloading_backend",
            "enable_hierarchical_cache",
        ),
        _STORE,
    ),
    **dict.fromkeys(("swap_space", "cpu_offload_gb", "preemption_mode", "max_cpu_loras"), _NO_SWAP),
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "data_parallel_size",
            "dp_size",
            "num_gpus",
        ),
        _ONE_DEVICE,
    ),
    **dict.fromkeys(
        ("distributed_executor_backend", "worker_use_ray", "disable_custom_all_reduce"), _ONE_DEVICE
    ),
    **dict.fromkeys(("enable_expert_parallel", "max_parallel_loading_workers"), _ONE_DEVICE),
    "dist_init_addr": "write {master_addr} and {master_port}",
    **dict.fromkeys(
        (
            "enforce_eager",
            "max_seq_len_to_capture",
            "max_context_len_to_capture",
            "compilation_config",
        ),
        _GRAPHS,
    ),
    **dict.fromkeys(("trust_remote_code", "code_revision"), _NO_CODE),
    **dict.fromkeys(
        ("load_format", "use_safetensors", "config_format", "download_dir", "hf_overrides"), _FILES
    ),
    "download_dir": _HUB,
    "hf_token": "set the variable HF_TOKEN",
    "tokenizer_mode": "the tokenizer follows the model's files: omit it",
    "tokenizer_revision": "{revision} is the model's; give {tokenizer} a folder for another one",
    "enable_chunked_prefill": "prompts are always split into chunks, of {max_num_batched_tokens} tokens: omit it",
    **dict.fromkeys(
        ("long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills"),
        "{max_step_seconds} bounds how long prompts hold up requests that decode: omit it",
    ),
    "enable_mixed_chunk": "prompts and decoding share steps: omit it",
    "disable_radix_cache": "use --no-enable-prefix-caching, or enable_prefix_caching=False in Python",
    "disable_sliding_window": "layers with a window keep the tokens in it: omit it",
    "use_v2_block_manager": "there is one block manager: omit it",
    "num_scheduler_steps": "a step is one token for each request: omit it",
    "max_logprobs": "a completion may ask for the log-probabilities of any number of tokens: omit it",
    **dict.fromkeys(
        ("enable_prompt_adapter", "prompt_adapters", "max_prompt_adapters"), _NO_PROMPT_ADAPTERS
    ),
    **dict.fromkeys(("lora_paths", "lora_init_without_apply"), _LORA),
    "lora_dtype": "adapters are computed in {dtype}: omit it",
    "lora_extra_vocab_size": "adapters that add tokens are refused: omit it",
    "fully_sharded_loras": "each rank has the rows of its own outputs: omit it",
    "max_loras_per_batch": "{max_loras} are loaded at a time, and any of them share a step",
    **dict.fromkeys(
        (
            "speculative_model",
            "speculative_algorithm",
            "speculative_draft_model_path",
        ),
        _DRAFTS,
    ),
    "num_lookahead_slots": "drafts take blocks of the cache that are left over: omit it",
    **dict.fromkeys(("rope_scaling", "rope_theta", "rope_factor"), _ROPE),
    "enable_reasoning": _TOOLS,
    "response_role": "answers are the assistant's: omit it",
    **dict.fromkeys(
        ("disable_log_requests", "disable_log_stats", "uvicorn_log_level", "enable_log_requests"),
        _LOGS,
    ),
    **dict.fromkeys(
        ("guided_decoding_backend", "structured_outputs_config"),
        "grammars have one compiler, llguidance: omit it",
    ),
    **dict.fromkeys(
        ("ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh"),
        "put a proxy in front of {host} and {port} for clients' certificates, and new ones without a restart",
    ),
    "launch_kobold_api": "{port} answers OpenAI's, Anthropic's and TGI's APIs; Kobold's is not implemented",
    "gguf_file": "give the file itself as the model: FILE.gguf, or OWNER/NAME:FILE.gguf on the hub",
    **dict.fromkeys(
        ("hf_repo", "hf_file"), "name the file on the hub as the model: OWNER/NAME:FILE.gguf"
    ),
    **dict.fromkeys(
        ("n_gpu_layers", "gpu_layers", "split_mode", "tensor_split", "main_gpu"),
        "a model runs on one device, which {device} chooses: omit it",
    ),
    **dict.fromkeys(
        ("mmap", "no_mmap", "mlock"),
        "weights are packed into memory of the process, and the file is not mapped: omit it",
    ),
    **dict.fromkeys(
        ("flash_attn", "no_kv_offload", "cont_batching"), "it is always so here: omit it"
    ),
    **dict.fromkeys(
        ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "override_kv"),
        "the file's metadata decides, and nothing overrides it: change it there",
    ),
    **dict.fromkeys(
        ("cache_type_k", "cache_type_v"),
        "{kv_cache_dtype}='fp8' or 'int8' stores keys and values in 8 bits",
    ),
    "lora": _LORA,
    "mmproj": "models of text only: omit it",
    "jinja": "chat templates are always Jinja: omit it",
    "limit_mm_per_prompt": "models of text only: omit it",
    "task": "models that generate text only: omit it",
}

CALLS = {  # keywords of their `generate` and `chat`
    "use_tqdm": "use progress",
    "prompt_token_ids": "token ids are prompts: give lists of them in place of strings",
    "prompt_adapter_request": "prompt adapters are not implemented; use lora_request",
    "priority": "requests run in the order of arrival: omit it",
    "guided_options_request": "use structured_outputs of SamplingParams",
    "truncate_prompt_tokens": "use truncate_prompt_tokens of SamplingParams",
    "add_special_tokens": 'use tokenization_kwargs={"add_special_tokens": ...}',
    "chat_template": "the model's template is used: give LLM(tokenizer=...) a folder with another one",
    "chat_template_kwargs": "give its entries as keywords",
    "chat_template_content_format": "content is written as the model's chat template reads it: omit it",
    "mm_processor_kwargs": "models of text only: omit it",
}


@dataclass(frozen=True)
class TgiOption:
    """An option of TGI's launcher; its environment variable is the name in capitals.

    field    our option with the same meaning; the value is passed on
    asks     values that match Freight's behaviour, so that nothing has to be done
    instead  the replacement, or why none is needed
    harmless whether ignoring it changes neither answers nor guarantees
    switch   whether it takes no value on the command line
    """

    field: str | None = None
    asks: tuple[str, ...] = ()
    instead: str = ""
    harmless: bool = False
    switch: bool = False


_LIMITS = "Freight has different limits on requests"
_SCHEDULING = "waiting requests join at every step"

TGI_OPTIONS = {
    "model_id": TgiOption("model_id"),
    "revision": TgiOption("revision"),
    "kv_cache_dtype": TgiOption("kv_cache_dtype"),
    "dtype": TgiOption("dtype"),
    "quantize": TgiOption("quantization", ("compressed-tensors",)),
    "port": TgiOption("port"),
    "master_addr": TgiOption("master_addr"),  # without --nnodes they do nothing
    "master_port": TgiOption("master_port"),
    "hostname": TgiOption("host"),  # its flag only: every container sets the HOSTNAME variable
    "api_key": TgiOption("api_key"),
    "cors_allow_origin": TgiOption("allow_origin"),
    "max_total_tokens": TgiOption("max_model_len"),
    "max_batch_prefill_tokens": TgiOption("max_num_batched_tokens"),
    "max_batch_size": TgiOption("max_num_seqs"),
    "max_concurrent_requests": TgiOption(instead="{max_num_seqs} run at once and {max_queue} wait"),
    "json_output": TgiOption(asks=("false",), instead="{log_format}=json does it", switch=True),
    "num_shard": TgiOption("tensor_parallel_size", ("1",)),
    "sharded": TgiOption(asks=("false",), instead=_ONE_DEVICE),
    "cuda_memory_fraction": TgiOption(asks=("1", "1.0"), instead=_MEMORY),
    "rope_scaling": TgiOption(instead=_ROPE),
    "rope_factor": TgiOption(instead=_ROPE),
    "lora_adapters": TgiOption("lora_modules"),
    "tokenizer_config_path": TgiOption(instead="{chat_template} FILE takes a Jinja template"),
    "ngrok": TgiOption(
        asks=("false",),
        instead="run the tunnel as a separate program that points to {port}",
        switch=True,
    ),
    "huggingface_hub_cache": TgiOption(instead=_HUB),
    "weights_cache_override": TgiOption(instead=_HUB),
    "env": TgiOption(instead="freight env shows it", switch=True),
    "trust_remote_code": TgiOption(asks=("false",), instead=_NO_CODE, harmless=True, switch=True),
    "speculate": TgiOption("speculate"),
    "cuda_graphs": TgiOption(instead=_GRAPHS, harmless=True),
    **dict.fromkeys(
        ("max_input_tokens", "max_input_length"),
        TgiOption(instead="{max_model_len} bounds prompt and answer together", harmless=True),
    ),
    "max_batch_total_tokens": TgiOption(instead=_MEMORY, harmless=True),
    **dict.fromkeys(
        ("waiting_served_ratio", "max_waiting_tokens"),
        TgiOption(instead=_SCHEDULING, harmless=True),
    ),
    **dict.fromkeys(
        (
            "max_best_of",
            "max_stop_sequences",
            "max_top_n_tokens",
            "max_client_batch_size",
            "payload_limit",
        ),
        TgiOption(instead=_LIMITS, harmless=True),
    ),
    **dict.fromkeys(
        (
            "validation_workers",
            "shard_uds_path",
            "otlp_endpoint",
            "otlp_service_name",
        ),
        TgiOption(instead="there is nothing to set: omit it", harmless=True),
    ),
    **dict.fromkeys(
        ("ngrok_authtoken", "ngrok_edge", "usage_stats", "watermark_gamma", "watermark_delta"),
        TgiOption(instead="there is nothing to set: omit it", harmless=True),
    ),
    **dict.fromkeys(
        ("disable_custom_kernels", "disable_grammar_support", "enable_prefill_logprobs"),
        TgiOption(
            asks=("false",), instead="there is nothing to set: omit it", harmless=True, switch=True
        ),
    ),
}

OTHER_QUANTIZATIONS = {  # values of `quantization` elsewhere
    **dict.fromkeys(
        ("compressed-tensors", "modelopt", "quark", "fbgemm_fp8", "torchao", "awq", "gptq", "gguf"),
        "a checkpoint declares its own scheme, which is read without an option: omit it",
    ),
    **dict.fromkeys(
        (
            "marlin",
            "eetq",
            "exl2",
            "bitsandbytes",
            "bitsandbytes-nf4",
            "bitsandbytes-fp4",
        ),
        "weights of 16 bits become FP8 or INT4 here: use 'fp8' or 'int4' with the unquantized checkpoint",
    ),
}


def as_keyword(field: str) -> str:
    """Spell a field as a keyword of Python: 'kv_cache_memory'."""
    return field


def as_flag(field: str) -> str:
    """Spell a field as a flag of the command line: '--kv-cache-memory'."""
    return "--model-id" if field == "model" else "--" + field.replace("_", "-")


def instead_of(name: str, spell: Callable[[str], str] = as_keyword) -> str | None:
    """Return the replacement for option `name` of another engine; None for an unknown name."""
    if name in RENAMED:
        return f"use {spell(RENAMED[name])}"
    sentence = SENTENCES.get(name)
    if sentence is None and name in TGI_OPTIONS:
        option = TGI_OPTIONS[name]
        sentence = option.instead or f"use {{{option.field}}}"
    return None if sentence is None else spelled(sentence, spell)


def spelled(sentence: str, spell: Callable[[str], str]) -> str:
    """Return `sentence` with each {field} written by `spell`."""
    return re.sub(r"\{(\w+)\}", lambda field: spell(field[1]), sentence)
