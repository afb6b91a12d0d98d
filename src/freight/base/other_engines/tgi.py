"""Options of TGI's launcher, whose flags and variables `freight --model-id M` reads. Data; imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.base.other_engines import sentences as say


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
    "graceful_termination_timeout": TgiOption("drain_timeout"),
    "prometheus_port": TgiOption(instead="metrics are at /metrics of {port}: omit it"),
    "max_concurrent_requests": TgiOption(instead="{max_num_seqs} run at once and {max_queue} wait"),
    "json_output": TgiOption(asks=("false",), instead="{log_format}=json does it", switch=True),
    "num_shard": TgiOption("tensor_parallel_size", ("1",)),
    "sharded": TgiOption(asks=("false",), instead=say.ONE_DEVICE),
    "cuda_memory_fraction": TgiOption(asks=("1", "1.0"), instead=say.MEMORY),
    "rope_scaling": TgiOption(instead=say.ROPE),
    "rope_factor": TgiOption(instead=say.ROPE),
    "lora_adapters": TgiOption("lora_modules"),
    "tokenizer_config_path": TgiOption(instead="{chat_template} FILE takes a Jinja template"),
    "ngrok": TgiOption(
        asks=("false",),
        instead="run the tunnel as a separate program that points to {port}",
        switch=True,
    ),
    "huggingface_hub_cache": TgiOption(instead=say.HUB),
    "weights_cache_override": TgiOption(instead=say.HUB),
    "env": TgiOption(instead="freight env shows it", switch=True),
    "trust_remote_code": TgiOption(
        asks=("false",), instead=say.NO_CODE, harmless=True, switch=True
    ),
    "speculate": TgiOption("speculate"),
    "cuda_graphs": TgiOption(instead=say.GRAPHS, harmless=True),
    **dict.fromkeys(
        ("max_input_tokens", "max_input_length"),
        TgiOption(instead="{max_model_len} bounds prompt and answer together", harmless=True),
    ),
    "max_batch_total_tokens": TgiOption(instead=say.MEMORY, harmless=True),
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
        ),
        TgiOption(instead="there is nothing to set: omit it", harmless=True),
    ),
    "otlp_endpoint": TgiOption(
        instead="{otlp_traces_endpoint} sends spans, over HTTP and not gRPC", harmless=True
    ),
    "otlp_service_name": TgiOption(
        instead="the variable OTEL_SERVICE_NAME names the service", harmless=True
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
