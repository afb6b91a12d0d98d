"""What to use in place of another engine's option: the tables of all engines, looked up by name.
Imports no torch.

A sentence names our options as {field}, which `spelled` writes as keywords ('kv_cache_memory') or as
flags ('--kv-cache-memory'). TGI's table says more, because `freight --model-id M` reads its flags and
variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from freight.base.other_engines import llama_server, sglang, vllm
from freight.base.other_engines.tgi import TGI_OPTIONS

_OURS_ELSEWHERE = {  # names of ours in other spellings
    "model_id": "use {model}",
    "max_seq_len": "use {max_model_len}",
    "tp": "use {tensor_parallel_size}",
    "api_keys": "use {api_key}",
}
# one name has one sentence: no table repeats a name of another
TABLES: Mapping[str, Mapping[str, str]] = {
    "vLLM": vllm.OPTIONS,
    "SGLang": sglang.OPTIONS,
    "llama-server": llama_server.OPTIONS,
    "ours": _OURS_ELSEWHERE,
}
# with one hyphen, by the engine that has them -> the option that it stands for
SHORT: Mapping[str, Mapping[str, str]] = {
    "vLLM": vllm.SHORT,
    "llama-server": llama_server.SHORT,
    "TGI": {"-p": "port", "-e": "env", "-g": "graceful_termination_timeout"},
}
SENTENCES: Mapping[str, str] = {
    name: sentence for table in TABLES.values() for name, sentence in table.items()
}


def as_keyword(field: str) -> str:
    """Spell a field as a keyword of Python: 'kv_cache_memory'."""
    return field


def as_flag(field: str) -> str:
    """Spell a field as a flag of the command line: '--kv-cache-memory'."""
    return "--model-id" if field == "model" else "--" + field.replace("_", "-")


def instead_of(name: str, spell: Callable[[str], str] = as_keyword) -> str | None:
    """Return the replacement for option `name` of another engine; None for an unknown name.

    `no_NAME`, which turns an option off, has the sentence of NAME unless it has one of its own, or
    NAME has something to use instead, which nobody wants who turns it off.
    """
    sentence = _sentence(name)
    if sentence is None and name.startswith("no_"):
        sentence = _sentence(name.removeprefix("no_"))
        if sentence is not None and not sentence.endswith(": omit it"):
            sentence = "there is nothing to turn off: omit it"
    return None if sentence is None else spelled(sentence, spell)


def _sentence(name: str) -> str | None:
    sentence = SENTENCES.get(name)
    if sentence is None and name in TGI_OPTIONS:
        option = TGI_OPTIONS[name]
        sentence = option.instead or f"use {{{option.field}}}"
    return sentence


def spelled(sentence: str, spell: Callable[[str], str]) -> str:
    """Return `sentence` with each {field} written by `spell`."""
    return re.sub(r"\{(\w+)\}", lambda field: spell(field[1]), sentence)
