"""Options of other engines that Freight is about to have: delete a row with the option's first day.
Data; imports no torch.
"""

from __future__ import annotations

from freight.base.other_engines.sentences import named

NOT_YET = {
    **named(
        "otlp_traces_endpoint enable_trace trace_modules",
        "spans are not exported; {log_format}=json has the times of each request",
    ),
    "models_dir": "{models}='DIR' serves the models of a folder: use that",
    "models_preset": "{models}='FILE' declares models and their options in TOML: use that",
    **named(
        "models_autoload no_models_autoload",
        "a model is loaded by the first request for it, or by /models/load: omit it",
    ),
    **named(
        "scheduling_policy enable_priority_scheduling schedule_low_priority_values_first "
        "priority_scheduling_preemption_threshold abort_on_priority_when_disabled default_priority_value "
        "disable_priority_preemption",
        "requests run in the order of arrival: omit it",
    ),
    **named(
        "reasoning_budget reasoning_budget_message reasoning_config",
        "reasoning has no limit of its own; a request has max_tokens: omit it",
    ),
    **named(
        "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
        "enable_memory_saver enable_weights_cpu_backup sleep_idle_seconds",
        "{enable_weight_updates} lets clients put the engine to sleep: use that",
    ),
    **named(
        "weight_transfer_config checkpoint_engine_wait_weights_before_ready",
        "weights come from folders (/update_weights_from_disk), with {enable_weight_updates}: use that",
    ),
}
