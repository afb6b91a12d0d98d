"""Keywords of other engines' `generate` and `chat` in Python. Data; imports no torch."""

from __future__ import annotations

CALLS = {  # keywords of their `generate` and `chat`
    "use_tqdm": "use progress",
    "prompt_token_ids": "token ids are prompts: give lists of them in place of strings",
    "prompt_adapter_request": "prompt adapters are not implemented; use lora_request",
    "priority": "use priority of SamplingParams",
    "guided_options_request": "use structured_outputs of SamplingParams",
    "truncate_prompt_tokens": "use truncate_prompt_tokens of SamplingParams",
    "add_special_tokens": 'use tokenization_kwargs={"add_special_tokens": ...}',
    "chat_template": "the model's template is used: give LLM(tokenizer=...) a folder with another one",
    "chat_template_kwargs": "give its entries as keywords",
    "chat_template_content_format": "content is written as the model's chat template reads it: omit it",
    "mm_processor_kwargs": "models of text only: omit it",
}
