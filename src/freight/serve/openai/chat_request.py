"""`POST /v1/chat/completions`: a body becomes a ChatCall.

Everything that a client asks for is done, or reported as ignored, or refused with the field's path.
`freight.text.messages` converts messages to the form that templates read, so a conversation means
the same here and in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from reprlib import repr as show
from typing import Annotated, Literal

from pydantic import ConfigDict, FailFast, Field

from freight.base.fields import JsonDict, JsonObject
from freight.errors import RequestError
from freight.sampling import SamplingParams
from freight.serve.answers.pieces import AfterReasoning
from freight.serve.bodies import MOST, Part, checked_later, sampled
from freight.serve.call import Conversation, Reply, ReplyHead, Served, TokenizedWork, Work
from freight.serve.limits import ServingLimits, check_context, check_template_values
from freight.serve.openai.chat_reply import ChatReply
from freight.serve.openai.fields import (
    from_request_error,
    missing_or,
    named,
    part,
    read_fields,
    refuse,
    served_name,
)
from freight.serve.openai.sampling_fields import SharedFields, check_shared, sampling_from
from freight.serve.openai.stream import AnswerOptions
from freight.serve.openai.structure import enforced, form_of
from freight.serve.openai.tool_fields import Tool, ToolUse, tool_use
from freight.serve.transport.errors import ApiError
from freight.text.messages import read_messages

_WITH_CONTENT: JsonDict = {  # content, or what an answer has instead
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        *(
            {"required": [name], "properties": {name: {"type": "string", "minLength": 1}}}
            for name in ("refusal", "reasoning", "reasoning_content")
        ),
        {
            "required": ["tool_calls"],
            "properties": {"tool_calls": {"type": "array", "minItems": 1}},
        },
    ]
}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolChoice = Literal["none", "auto", "required"]
_REFUSED_IN_MESSAGES = {"audio": "only text can be read", "function_call": "use tool_calls"}


class TextPart(Part):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Part):
    """The part of an answer that says why there is none."""

    type: Literal["refusal"]
    refusal: str


class CalledFunction(Part):
    """The function of a call. `arguments`: the JSON of an object, or the object itself; "" and null
    are {}.
    """

    name: str
    arguments: str | JsonDict | None = None


class ToolCall(Part):
    """A call in an earlier answer."""

    function: CalledFunction


class Message(Part):
    """One message. Unknown fields are reported as ignored: clients send answers back unchanged."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_WITH_CONTENT)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = checked_later()
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = checked_later()
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Prediction(Part):
    """What the answer may be like. It changes no token."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        content = self.content
        if isinstance(content, str):
            return content
        return "".join(text_part.text for text_part in content)


class ChatRequest(SharedFields):
    """The body of a chat completion."""

    messages: Annotated[list[Message], FailFast()] = Field(
        json_schema_extra={"minItems": 1, "maxItems": MOST.messages}
    )
    max_tokens: int | None = sampled("max_tokens", minimum=1)
    max_completion_tokens: int | None = sampled(
        "max_tokens", note="(wins over `max_tokens`)", minimum=1
    )
    logprobs: bool | None = None
    top_logprobs: int | None = sampled("logprobs")
    tools: Annotated[list[Tool], Field(max_length=MOST.tools)] | None = checked_later()
    tool_choice: ToolChoice | JsonDict | None = checked_later()
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonDict | None = None
    prediction: Prediction | None = None


@dataclass(frozen=True)
class ChatCall:
    """A parsed chat completion. `request_id`: the client's, if it sent one."""

    stream: bool
    model: str
    work: tuple[Work, ...]
    ignored: tuple[str, ...]
    options: AnswerOptions
    tools: ToolUse
    parallel: bool
    max_tokens: int | None
    request_id: str | None = None

    def reply(self, head: ReplyHead, served: Served, work: Sequence[TokenizedWork]) -> Reply:
        """Return the empty reply. Raises ApiError if prompt and max_tokens exceed the context."""
        check_context(len(work[0].token_ids), self.max_tokens, served.max_model_len, "messages")
        return ChatReply(head, served, work[0], self.options, self.tools.tools, self.parallel)

    def failure_body(self, error: ApiError) -> object:
        return error.openai_body()


def parse_chat(body: object, served: Served, limits: ServingLimits) -> ChatCall:
    """Build the call from `body`, decoded JSON.

    Raises ApiError: 400 with `param` for the first field at fault, 404 for a model that is not
    served.
    """
    fields = read_fields(body, ChatRequest, served, limits)
    check_messages(fields.values.get("messages"), limits)
    request = part(ChatRequest, "", fields.values)
    model = served_name(request.model, served)
    check_shared(request, served, limits)
    messages, ignored = chat_messages(fields.values["messages"])
    tools = tool_use(request.tools, request.tool_choice, limits)
    parallel = request.parallel_tool_calls is not False
    form = form_of(request, served.strict_schemas)
    forcing, unheld = _forcing(tools, served.strict_schemas)
    if tools.forced:  # a call is not the answer yet: the form is for the answer after it
        unheld += () if form.values is None else (form.field,)
    else:
        unheld += form.ignored
    conversation = _conversation(request, messages, tools, limits)
    api_values = _api_values(request, served)
    if request.prediction is not None and not served.drafts:
        unheld += ("prediction",)

    def params_of(prompt_text: str | None) -> SamplingParams:
        forced = None
        around = None
        if tools.forced:
            forced = _forced_call(served, forcing, parallel and not tools.named, prompt_text)
        after = served.after_reasoning
        if after is not None and prompt_text is not None:
            around = partial(_reasoned, after, prompt_text)
        return sampling_from(request, served, limits, api_values, form, forced, around)

    depends = bool(tools.forced) or (served.after_reasoning is not None and form.values is not None)
    work = Work(
        conversation,
        params_of(None),
        add_special_tokens=request.add_special_tokens,
        params_of=params_of if depends else None,
        form_from="tool_choice" if tools.forced else form.field,
    )
    return ChatCall(
        stream=bool(request.stream),
        model=model,
        work=(work,),
        ignored=(*fields.ignored, *named((*ignored, *unheld))),
        options=request.answer_options(),
        tools=tools,
        parallel=parallel,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        request_id=request.request_id,
    )


def _forced_call(
    served: Served, tools: ToolUse, parallel: bool, prompt_text: str | None
) -> JsonObject:
    if served.forced_call is None:
        raise refuse(
            "tool_choice",
            "tool_choice demands a call, and the form of this model's calls is not known",
        )
    return served.forced_call(tools.tools, tools.forced, parallel, prompt_text)


def _forcing(tools: ToolUse, strict_schemas: bool) -> tuple[ToolUse, tuple[str, ...]]:
    """Return `tools` with parameters that a grammar can enforce, if a call is forced, and the
    keywords that it cannot.
    """
    if not tools.forced:
        return tools, ()
    enforceable = []
    left_out = []
    for index, tool in enumerate(tools.tools):
        function = tool["function"]
        if function["name"] in tools.forced and "parameters" in function:
            place = tools.places[index]
            path = f"tools[{place}].function.parameters"
            form, names = enforced(function["parameters"], path, path, strict_schemas)
            left_out += [name.replace(f"[{place}]", "[]", 1) for name in names]
            if names:
                function = {**function, "parameters": form.get("json", {})}
        enforceable.append({**tool, "function": function})
    return replace(tools, tools=tuple(enforceable)), tuple(left_out)


def _reasoned(after: AfterReasoning, prompt_text: str, form: JsonObject) -> JsonObject:
    return after(form, prompt_text)


def _api_values(request: ChatRequest, served: Served) -> dict[str, object]:
    """Return the values that SamplingParams gets and no field has as it is."""
    if request.top_logprobs is not None and not request.logprobs:
        raise refuse("top_logprobs", "top_logprobs needs logprobs: true")
    for name in ("max_tokens", "max_completion_tokens"):
        if (value := getattr(request, name)) is not None and value < 1:
            raise refuse(
                name,
                f"{name} is {show(value)}; it must be 1 or more, or left out for the rest of the context",
            )
    values: dict[str, object] = {}
    if request.logprobs and request.top_logprobs is None:
        values["logprobs"] = 0
    if request.prediction is not None and served.drafts:
        values["prediction"] = request.prediction.text
    if served.parser_of is not None:
        # The parser needs special tokens, and always removes them from its output.
        values["skip_special_tokens"] = False
    return values


def check_messages(messages: object, limits: ServingLimits) -> None:
    """Raise ApiError, 400, for what is no list of messages, or a list that is too long."""
    if not isinstance(messages, list) or not messages:
        raise refuse(
            "messages",
            f'messages is {missing_or(messages)}; it must be a list like [{{"role": "user", "content": "Hello"}}]',
        )
    if len(messages) > limits.messages:
        raise refuse(
            "messages",
            f"messages has {len(messages)} entries; at most {limits.messages} are allowed",
        )


def chat_messages(entries: Sequence[JsonObject]) -> tuple[list[JsonDict], list[str]]:
    """Return the messages for the template, and the names of fields that are left out. Raises
    ApiError, 400.
    """
    messages = []
    ignored = []
    fields = Message.model_fields  # looked up once: it is slow in pydantic
    for index, message in enumerate(entries):
        for name, value in message.items():
            if value is None or name in fields:
                continue
            if name in _REFUSED_IN_MESSAGES:
                path = f"messages[{index}].{name}"
                raise refuse(path, f"{path} is not supported: {_REFUSED_IN_MESSAGES[name]}")
            ignored.append(f"messages[].{name}")
        messages.append({name: message[name] for name in fields if message.get(name) is not None})
    try:
        return read_messages(messages), ignored
    except RequestError as error:
        raise from_request_error(error) from error


def _conversation(
    request: ChatRequest,
    messages: Sequence[JsonObject],
    tools: ToolUse,
    limits: ServingLimits,
) -> Conversation:
    values: JsonDict = {}
    if tools.tools:
        values["tools"] = list(tools.tools)
    if request.reasoning_effort == "none":
        values["enable_thinking"] = False
    elif request.reasoning_effort is not None:
        values["reasoning_effort"] = request.reasoning_effort
    template_values = request.chat_template_kwargs or {}
    check_template_values(template_values, limits)
    values |= template_values
    continued = bool(request.continue_final_message)
    check_continued(continued, bool(request.add_generation_prompt), messages)
    prompted = request.add_generation_prompt
    if prompted is None:
        prompted = not continued
    return Conversation(messages, prompted, continued, values)


def check_continued(continued: bool, prompted: bool, messages: Sequence[JsonObject]) -> None:
    """Raise ApiError, 400, if the last message cannot be continued."""
    if continued and prompted:
        raise refuse(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; give one",
        )
    if continued and messages[-1]["role"] != "assistant":
        raise refuse(
            "continue_final_message",
            "continue_final_message needs a last message of role 'assistant'",
        )
