"""The contract between an API and the server: a `Call` parsed from a body, and its growing `Reply`.

Every API (OpenAI's chat and completions, TGI, ...) turns a body into a `Call`, or raises ApiError.
The server turns the call's prompts into token ids, runs them, and feeds the deltas to the call's
`Reply`, streamed or not. Both are plain values and functions: no transport, no clock, no engine.
Streamed and complete answers come from the same `advance`, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from freight.base.fields import JsonObject
from freight.engine.adapters import LoadedAdapter
from freight.engine.intake import Intake
from freight.errors import listed
from freight.model.config.pooling import PoolingConfig
from freight.outputs import RequestDelta
from freight.sampling import SamplingParams
from freight.serve.answers.pieces import AfterReasoning, ForcedCall, ParserOf
from freight.serve.transport.errors import ApiError
from freight.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, as `Tokenizer.apply_chat_template` takes them.

    template_values  further values that the template may read: `tools`, `enable_thinking`, ...
    """

    messages: Sequence[JsonObject]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_values: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Two texts that are one input of a model that scores pairs.

    instruction     what the score is about, for a model that reads one; None: the model's own
    document_tokens  the most tokens of the document that are read; None: all
    """

    query: str
    document: str
    instruction: str | None = None
    document_tokens: int | None = None


Prompt = str | Sequence[int] | Conversation | Pair


@dataclass(frozen=True)
class Work:
    """One prompt with its sampling parameters: one request of the engine.

    add_special_tokens  whether the tokenizer adds special tokens such as BOS; None: to a text, but
                        not to a conversation, whose template writes them
    params_of  maps the rendered conversation to its parameters; None: `params` hold for any text
    form_from  the request's field behind `params.structured_outputs`, for errors
    prompt_from  the request's field that has the prompt, for errors
    """

    prompt: Prompt
    params: SamplingParams
    add_special_tokens: bool | None = None
    params_of: Callable[[str], SamplingParams] | None = None
    form_from: str = "structured_outputs"
    prompt_from: str = "prompt"


@dataclass(frozen=True)
class TokenizedWork:
    """A `Work` with token ids, as the engine takes it. `text` is the prompt as given, or the
    rendered conversation.
    """

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Served:
    """The model that is served: the part of it that requests need.

    names           names that clients may use; the first is shown
    vocab_size      rows of the embedding: token ids are in [0, vocab_size)
    defaults        sampling parameters of generation_config.json, by SamplingParams' names
    unknown_fields  "refuse" or "ignore": the treatment of a field that no API of this server has
    strict_schemas  refuse a JSON schema that a grammar can enforce only in part
    fingerprint     `system_fingerprint` of answers
    stop_token_ids  stop tokens of the model itself
    drafts          whether steps have drafts, so that a prediction has an effect
    parser_of       makes the parser of reasoning and tool calls; None: the model has no known
                    markup for them
    forced_call     makes the grammar of an answer that must call a tool; None: the format of the
                    model's calls is not known
    after_reasoning  lets a grammar start after the model's reasoning; None: it has no reasoning
    thinking_tags   the texts before and after the model's reasoning; None: not known
    max_adapters    adapters that can be loaded at a time; 0: there can be none
    adapters        those that are loaded, which requests name as their model
    changing        names of adapters that are being loaded or unloaded; requests for them wait
    pooling         how the model makes a vector of a prompt; None: it only generates
    generates       whether text may be asked of it
    priorities      whether requests may have a priority
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    defaults: JsonObject
    fingerprint: str
    stop_token_ids: frozenset[int] = frozenset()
    unknown_fields: str = "refuse"
    strict_schemas: bool = False
    created: int = 0  # seconds since 1970: when the model was loaded
    drafts: bool = False
    parser_of: ParserOf | None = None
    forced_call: ForcedCall | None = None
    after_reasoning: AfterReasoning | None = None
    thinking_tags: tuple[str, str] | None = None
    max_adapters: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()
    changing: frozenset[str] = frozenset()
    pooling: PoolingConfig | None = None
    generates: bool = True
    priorities: bool = False

    @property
    def intake(self) -> Intake:
        """What a prompt must be to be served."""
        return Intake(
            self.tokenizer,
            self.vocab_size,
            self.max_model_len,
            self.pooling,
            self.generates,
            self.priorities,
        )

    def adapter(self, name: str) -> LoadedAdapter | None:
        """Return the adapter that is loaded under a name."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def has_adapter(self, name: str) -> bool:
        """Return whether a request may name an adapter: it is loaded, or may be so in a moment."""
        return name in self.changing or self.adapter(name) is not None

    @property
    def offered(self) -> str:
        """What requests can name, for errors."""
        names = [*self.names, *(adapter.name for adapter in self.adapters)]
        return f"this server has {listed(names)}"

    def fingerprint_of(self, adapter: LoadedAdapter | None) -> str:
        """Return the `system_fingerprint` of answers: of the model alone, or with an adapter."""
        if adapter is None:
            return self.fingerprint
        return f"{self.fingerprint}-{adapter.digest[:8]}"


@dataclass(frozen=True)
class ReplyHead:
    """The fields known before the first token. `created` is in seconds since 1970."""

    request_id: str  # without a prefix such as "chatcmpl-"
    created: int
    model: str
    fingerprint: str


class Reply(Protocol):
    """One answer in progress.

    Streaming: `start`, then `advance` for every delta, then `end`. Each returns bytes of the
    stream, which may be empty. Not streaming: `advance` for every delta, then `body`.
    """

    def start(self) -> bytes:
        """Return the bytes that come before any token."""

    def advance(self, index: int, delta: RequestDelta) -> bytes:
        """Take a delta of the index-th Work; returns its bytes. Raises ApiError for a completion
        that ended by error or timeout.
        """

    def end(self) -> bytes:
        """Return the bytes that come after the last token."""

    def body(self) -> object:
        """Return the complete answer, for `slices.json_bytes`; called after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last bytes of a stream that fails after it began, its terminator included."""


class Call(Protocol):
    """A parsed and checked request.

    stream    whether the answer is a stream
    model     the name to show in the answer: the client's, else the served model's. One that is not
              the model's own is that of its adapter
    work      the prompts, in order, with their parameters
    request_id  the client's id for the answer, if it sent one
    ignored   fields accepted without effect; the header x-freight-ignored lists them
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
        """Return the empty reply, once the prompts are token ids."""

    def failure_body(self, error: ApiError) -> object:
        """Return the body of an answer that fails before it began, in this API's shape."""
