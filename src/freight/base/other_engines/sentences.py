"""What to use in place of options that several engines have. Data; imports no torch.

A sentence names our options as {field}: `spelled` writes them as keywords ('kv_cache_memory') or as
flags ('--kv-cache-memory').
"""

from __future__ import annotations

MEMORY = (
    "the cache takes a share of the free memory, or the size that {kv_cache_memory}='4GiB' gives"
)
ONE_DEVICE = (
    "a model runs on one device, on ranks (tensor_parallel_size) or on several GPUs "
    "(pipeline_parallel_size): omit it"
)
ONE_ENGINE = "a server is one engine; start one for each replica behind a router: omit it"
NO_SPLIT = "prompts and answers are computed by one engine: omit it"
NO_SWAP = "nothing is swapped to the CPU, a preempted request is computed again: omit it"
IN_MEMORY = "weights stay in the memory of the device: omit it"
STORE = "on a CPU {kv_store}='DIR' keeps prefixes in memory and on the disk; on a GPU omit it"
GRAPHS = "decode steps are captured and replayed where that is exact: omit it"
KERNELS = "{kernels}='auto' takes the best kernels that this machine has: omit it"
EXPERTS = "experts are computed where the rest of the model is: omit it"
NO_CODE = "no code of a checkpoint is ever executed: omit it"
NO_PLUGINS = "no code of others is loaded: omit it"
TOOLS = "the model's chat template selects the form of reasoning, unless {reasoning_parser} does: omit it"
LOGS = "each request is one line of the log, and {log_format}=json is for collectors: omit it"
METRICS = "/metrics is always there, and what it has is fixed: omit it"
NO_TRACES = "there is no profiler in the server; freight bench measures a model: omit it"
LORA = "adapters are {lora_modules}=['NAME=PATH'], with {enable_lora}"
LORA_FIXED = "adapters are computed beside the model, without a choice: omit it"
# how what drafts besides a request's own text is written
DRAFT_MODEL = 'write {speculative_config}=\'{"method": "draft_model", "model": "FOLDER"}\''
DRAFT_HEADS = (
    'write {speculative_config}=\'{"method": "eagle3", "model": "FOLDER"}\'; other methods are '
    "draft_model, mtp and ngram"
)
DRAFTS_AS_MODEL = (
    "what drafts ({speculative_config}) is loaded and computed as the model is: omit it"
)
DRAFTS_LEARNED = (
    "how many drafts there are, one behind another, follows from how often they came true: omit it"
)
FILES = "safetensors are read, and the format follows from the files: omit it"
HUB = "the hub's variables select the folder of downloads: set HF_HOME or HF_HUB_CACHE"
ROPE = "rotary embedding follows config.json: change it there"
CONFIG = "config.json decides, and {ignore_config_keys} reads over keys of it: change it there"
TEXT_ONLY = "models of text only: omit it"
ONE_GRAMMAR = "grammars have one compiler, llguidance: omit it"
REQUESTS = "a request says it, and generation_config.json of the model has the defaults: omit it"
TEMPLATE = "requests give chat_template_kwargs to the template: omit it"
PROXY = "put a proxy in front of {host} and {port}, which does it"
CORS = "pages of {allow_origin} may send any method and header, and no cookies: omit it"
TLS = "put a proxy in front of {host} and {port} for clients' certificates, and new ones without a restart"
STATES = (
    "{state_dtype} selects the format of recurrent states, {state_every} how many are kept: omit it"
)
ORDER = "requests run in the order of arrival, and waiting ones join at every step: omit it"
QUEUE = "use {max_queue}, the completions that may wait"
CHUNKS = "prompts are always split into chunks, of {max_num_batched_tokens} tokens: omit it"
PACE = "{max_step_seconds} bounds how long prompts hold up requests that decode: omit it"
PREFIXES = "cached prefixes go when their memory is needed, the oldest first: omit it"
STALLS = "use {stall_timeout}, the silence after which the engine counts as stalled"
TOKENIZER = "the first process tokenizes, beside the engine's: omit it"
POOLING = "a model that pools is served as one; {pooling} says how"
NOT_RETURNED = "answers do not have it: omit it"
NOT_HERE = "Freight has no such part: omit it"
FIXED = "there is nothing to set: omit it"
WARM = "the server is ready once the model has answered: omit it"


def named(names: str, sentence: str) -> dict[str, str]:
    """Return a table that has `sentence` for each of the names, which spaces separate."""
    return dict.fromkeys(names.split(), sentence)


SLEEP = "{enable_weight_updates} lets clients put the engine to sleep: use that"
WEIGHTS = (
    "weights come from folders (/update_weights_from_disk), with {enable_weight_updates}: use that"
)
TRACES = "{otlp_traces_endpoint} sends a span for each request: use that"
