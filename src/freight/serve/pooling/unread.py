"""Fields of OpenAI's, Cohere's, Jina's, vLLM's and SGLang's requests that have no effect here. Data."""

from __future__ import annotations

from collections.abc import Mapping

from freight.serve.bodies import Unread

_IGNORED = Unread(None, reported=True)  # changes no number of an answer
_TEXT_ONLY = Unread(({},), "this server reads text; leave it out")

UNREAD: Mapping[str, Unread] = {  # of all
    "user": _IGNORED,
    "safety_identifier": _IGNORED,
    "truncation_side": Unread(("right",), "truncate_prompt_tokens keeps the first tokens"),
    "mm_processor_kwargs": _TEXT_ONLY,
    "rid": Unread((), "use request_id"),
}
VECTORS: Mapping[str, Unread] = {  # of embeddings and /pooling
    "embed_dtype": Unread(("float32",), "numbers are float32"),
    "endianness": Unread(("native", "little"), "base64 has little-endian numbers"),
}
ACTIVATIONS: Mapping[str, Unread] = {  # of scores and classes: older names of one field
    name: Unread((), "use use_activation") for name in ("activation", "softmax")
}
RANKING: Mapping[str, Unread] = {  # of /rerank
    "rank_fields": Unread((), "a document is a string, or an object with text"),
    "max_chunks_per_doc": Unread((), "documents are not split; use max_tokens_per_doc"),
    "return_embeddings": Unread((False,), "use /v1/embeddings"),
    "truncation": Unread((), "use truncate_prompt_tokens"),
}
CHAT: Mapping[str, Unread] = {  # of a conversation as an input
    "input": Unread((), "give input or messages, not both"),
    "prompt_name": Unread((), "it is for input: the chat template writes the whole text"),
    "chat_template": Unread((), "the model's own template is used"),
}
