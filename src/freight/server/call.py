"""What an API makes of a request body, and how its answer grows: the two halves between which the
server works.

Every API (OpenAI's chat and completions, TGI, ...) turns a body into a `Call`, or raises ApiError.
The server turns the call's prompts into token ids, runs them, and feeds what comes to the call's
`Reply`, streamed or not. Both are plain values and functions: no transport, no clock, no engine.
Because a streamed answer and a whole one come from the same `advance`, they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from freight.outputs import RequestDelta
from freight.sampling import SamplingParams
from freight.server.answers.pieces import AfterReasoning, ForcedCall, ParserOf
from freight.server.transport.errors import ApiError
from freight.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, as `Tokenizer.apply_chat_template` takes them.

    template_values  `tools`, `enable_thinking`, ...: what the template may read besides
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | Sequence[int] | Conversation


@dataclass(frozen=True)
class Work:
    """One prompt with its sampling parameters: one request of the engine.

    add_special_tokens  what the tokenizer adds to a text, such as BOS; None: as the kind of prompt
                        wants it, which is to a text, and not to a conversation, where the template
                        writes them
    params_of  the parameters once the conversation is rendered, from its text; None: `params` hold
               for any text
    form_from  the field of the request that `params.structured_outputs` come from, for errors
    """

    prompt: Prompt
    params: SamplingParams
    add_special_tokens: bool | None = None
    params_of: Callable[[str], SamplingParams] | None = None
    form_from: str = "structured_outputs"


@dataclass(frozen=True)
class TokenizedWork:
    """A `Work` as the engine takes it. `text` is the prompt as text: as given, or the rendered
    conversation.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Served:
    """The model that is served, as far as requests need to know it.

    names           what clients may call it; the first is shown
    vocab_size      rows of the embedding: token ids are in [0, vocab_size)
    defaults        sampling parameters of generation_config.json, by SamplingParams' names
    unknown_fields  "refuse" or "ignore": what happens to a field that no API of ours knows
    strict_schemas  whether a JSON schema is refused that a grammar cannot enforce whole
    fingerprint     `system_fingerprint` of answers
    stop_token_ids  the model's own
    parser_of       makes the parser of reasoning and tool calls; None: this model's text has no
                    known markup for them
    forced_call     makes the form of an answer that has to call a tool; None: it is not known for
                    this model
    after_reasoning  lets a form that an answer must have begin after the model's reasoning; None:
                     it has no reasoning
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    defaults: Mapping[str, Any]
    fingerprint: str
    stop_token_ids: frozenset[int] = frozenset()
    unknown_fields: str = "refuse"
    strict_schemas: bool = False
    created: int = 0  # seconds since 1970: when the model was loaded
    parser_of: ParserOf | None = None
    forced_call: ForcedCall | None = None
    after_reasoning: AfterReasoning | None = None


@dataclass(frozen=True)
class ReplyHead:
    """What is known when an answer begins. `created` in seconds since 1970."""

    request_id: str  # without a prefix such as "chatcmpl-"
    created: int
    model: str
    fingerprint: str


class Reply(Protocol):
    """One answer while it grows.

    Streaming: `start`, then `advance` for every delta, then `end`. All return bytes of the stream
    as they are sent, which may be empty. Not streaming: `advance` for every delta, then `body`.
    """

    def start(self) -> bytes:
        """What is sent before any token."""

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        """Take what is new of the index-th Work. Raises ApiError for a completion that ended by
        error or timeout.
        """

    def end(self) -> bytes:
        """What is sent after the last token of all."""

    def body(self) -> object:
        """The whole answer, for `slices.json_bytes`; after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """The last bytes of a stream that fails after it began, its terminator included."""


class Call(Protocol):
    """A request that was understood.

    stream    whether the answer is a stream
    model     the name that the client used, for the answer; the served model's where it gave none
    work      the prompts, in order, with their parameters
    request_id  the client's own id for the answer, if it gave one
    ignored   fields that were accepted and change nothing: named in the header x-freight-ignored
    """

    @property
    def stream(self) -> bool: ...
    @property
    def model(self) -> str: ...
    @property
    def work(self) -> Sequence[Work]: ...
    @property
    def request_id(self) -> str | None: ...
    @property
    def ignored(self) -> Sequence[str]: ...

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Reply:
        """The answer to come, once the prompts are token ids."""

    def failure_body(self, error: ApiError) -> object:
        """The body of an answer that fails before it began, in this API's shape."""
