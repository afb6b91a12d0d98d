"""`freight verify`: an answer of the server, with its request, is checked in one prefill.

The request is read by the server's own parser, and its prompts are tokenized anew. The engine draws the
answer's tokens again (`engine/redraw.py`), and the reply of the API writes the answer anew from what it
drew. So all that the answer states is compared with what this model gives: tokens, log-probabilities,
text, tool calls, ends, and the tokens of the prompt.

The chat template is a program of the model, and a grammar one of the request. Both run first in a
process that is killed at a deadline, as in the server (`rendering/renderer.py`): an answer that they
do not get through cannot be judged, and the others are.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from reprlib import repr as show
from typing import TYPE_CHECKING, Any

from freight.base.fields import JsonDict, JsonObject
from freight.base.version import version
from freight.engine.adapters import LoadedAdapter
from freight.engine.verification import (
    NO_SEED,
    OTHER_KERNELS,
    Outcome,
    Verification,
    differs,
    draws_differ,
    has_no_seed,
    logprob_differs,
    unknown,
)
from freight.errors import CapacityError, RequestError, legible, shown
from freight.sampling import SamplingParams
from freight.serve.answers.answer_format import AnswerFormat, answer_format
from freight.serve.app import Parse
from freight.serve.call import (
    Conversation,
    Reply,
    ReplyHead,
    Served,
    TokenizedWork,
    Work,
)
from freight.serve.limits import ServingLimits, check_scores
from freight.serve.openai.chat_request import parse_chat
from freight.serve.openai.completion_request import parse_completion
from freight.serve.prompt_ids import read_prompt
from freight.serve.rendering.renderer import Renderer
from freight.serve.serving import read_template, with_format
from freight.serve.settings import ServerSettings
from freight.serve.transport.errors import ApiError
from freight.serve.transport.slices import json_bytes
from freight.settings.engine import EngineArgs
from freight.structured import StructuredOutputs
from freight.text.chat_text import ChatText

if TYPE_CHECKING:
    from freight.engine.engine import Engine
    from freight.engine.redraw import Redrawn

_KINDS: dict[str, Parse] = {"chat.completion": parse_chat, "text_completion": parse_completion}
AT_ONCE = 64  # answers in the engine at a time
# Values of an answer that its request does not decide: names and times.
_NAMES = frozenset({"id", "created", "model"})
_DETAILS = ("prompt_tokens_details", "completion_tokens_details")  # of its usage
_OF_ITS_RUN = frozenset(  # counts among them that depend on the cache and on drafts
    {"cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
)
_CLOCK = (
    "`prompt_token_ids` are others than those of the request's prompt now, and the chat template writes the time; send "
    "`chat_template_kwargs` with the date, such as `date_string`, with requests that are to be verified"
)
_LOGPROB = re.compile(
    r"\.choices\[(\d+)\]\.logprobs\.(?:token_logprobs\[(\d+)\]|content\[(\d+)\]\.logprob)"
)

_Path = tuple[str, object, Any]  # where two values differ, the one stated, and the one found


@dataclass(frozen=True)
class Stated:
    """A request and its answer, as they are in a file. `tokens`: those of each choice, in order."""

    request: JsonObject
    response: JsonObject
    parse: Parse
    fingerprint: str
    tokens: tuple[tuple[int, ...], ...]


def read_stated(content: object) -> Stated | Verification:
    """Read {"request": …, "response": …}: the body that was sent to /v1/completions or
    /v1/chat/completions, and the complete one that came back; or say what they lack. A Verification
    stands for what could not be read.
    """
    if isinstance(content, Verification):
        return content
    if not isinstance(content, Mapping):
        return unknown(f"{show(content)} is not an object with `request` and `response`")
    request = content.get("request")
    response = content.get("response")
    for name, value in (("request", request), ("response", response)):
        if not isinstance(value, Mapping):
            return unknown(f"`{name}` is {show(value)}; it must be the JSON body")
    assert isinstance(request, Mapping)
    assert isinstance(response, Mapping)
    kind = response.get("object")
    fingerprint = response.get("system_fingerprint")
    if not isinstance(kind, str) or kind not in _KINDS:
        return unknown(
            f"the response's `object` is {show(kind)}; answers of {', '.join(_KINDS)} can be verified, "
            "streamed ones cannot"
        )
    if not isinstance(fingerprint, str):
        return unknown("the response has no `system_fingerprint`, so its model is not known")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        return unknown("the response has no `choices`")
    tokens: list[tuple[int, ...]] = []
    for choice in choices:
        ids = _token_ids(choice)
        if ids is None:
            return unknown(
                "the response has no `token_ids`; send `return_token_ids`: true with requests that are to be verified"
            )
        tokens.append(ids)
    if any(choice.get("finish_reason") is None for choice in choices):
        return unknown(
            "a choice has no `finish_reason`: it is a part of a streamed answer, and the complete one is needed"
        )
    return Stated(request, response, _KINDS[kind], fingerprint, tuple(tokens))


def _token_ids(choice: object) -> tuple[int, ...] | None:
    ids = choice.get("token_ids") if isinstance(choice, Mapping) else None
    if isinstance(ids, list) and set(map(type, ids)) <= {int}:
        return tuple(ids)
    return None


@dataclass(frozen=True)
class _Begun:
    """An answer whose redraws are in the engine, by the names of its prompts."""

    stated: Stated
    reply: Reply  # without a token
    work: Sequence[TokenizedWork]
    names: Sequence[str]


class Verifier:
    """Checks answers with one engine, which it has alone."""

    def __init__(
        self,
        engine: Engine,
        served: Served,
        new_renderer: Callable[[], Renderer | None],
    ) -> None:
        """new_renderer: makes what renders conversations and checks grammars; it returns None
        without a tokenizer, where there are neither.
        """
        self.engine = engine
        self.served = replace(served, unknown_fields="ignore", strict_schemas=False)
        self.new_renderer = new_renderer
        self._limits = ServingLimits()
        self._num_queued = 0
        self._renderer: Renderer | None = None

    def results(self, contents: Iterable[object]) -> Iterator[Verification]:
        """Yield a result for each `read_stated` object, in order. Not for use within an event loop."""
        self._renderer = self.new_renderer()
        source = iter(contents)
        begun: list[_Begun | Verification] = []
        with asyncio.Runner() as runner:
            try:
                while batch := list(islice(source, AT_ONCE)):
                    begun = []
                    for content in batch:
                        begun.append(runner.run(self._begin(content)))
                    while self.engine.has_unfinished:
                        self.engine.step(quiet_until=math.inf)
                    for entry in begun:
                        yield self._end(entry)
            finally:
                for entry in begun:  # those that nobody read are in the engine still
                    if isinstance(entry, _Begun):
                        self._release(entry.names)
                if self._renderer is not None:
                    runner.run(self._renderer.close())

    async def _begin(self, content: object) -> _Begun | Verification:
        stated = read_stated(content)
        if isinstance(stated, Verification):
            return stated
        adapter = self._adapter_of(stated)
        fingerprint = self.served.fingerprint_of(adapter)
        if stated.fingerprint != fingerprint:
            its = "" if adapter is None else f", its adapter {shown(adapter.name)}"
            return unknown(
                f"the answer's system_fingerprint is {show(stated.fingerprint)}, and that of this model{its} with "
                f"these options and this version is {fingerprint}"
            )
        if not self.engine.is_reproducible:
            return unknown(OTHER_KERNELS)
        try:
            return await self._queue(stated)
        except (ApiError, RequestError, CapacityError) as error:
            return unknown(f"the request cannot be served here: {legible(str(error))}")

    def _adapter_of(self, stated: Stated) -> LoadedAdapter | None:
        """Return the adapter that a request names. Any other name is that of the model."""
        named = stated.request.get("model")
        return self.served.adapter(named) if isinstance(named, str) else None

    async def _queue(self, stated: Stated) -> _Begun | Verification:
        named = stated.request.get("model")
        served = self.served
        adapter = self._adapter_of(stated)
        if isinstance(named, str) and adapter is None:
            served = replace(served, names=(named,))
        call = stated.parse(dict(stated.request), served, self._limits)
        work = []
        for prompt_work in call.work:
            work.append(await self._tokenized(prompt_work))
        check_scores(work, self._limits)
        # calls of tools are named after the answer
        name = str(stated.response.get("id", "")).partition("-")[2]
        name = name.encode("utf-8", "replace").decode()
        head = ReplyHead(name, 0, call.model, served.fingerprint_of(adapter))
        reply = call.reply(head, served, work)
        if any(has_no_seed(prompt_work.params) for prompt_work in work):
            return unknown(NO_SEED)
        fault = _shape_differs(stated, work, self.served.vocab_size)
        if fault is not None:
            return fault
        fault = _prompts_differ(stated, work)
        if fault is not None:
            if any(map(self._reads_clock, call.work)):
                return unknown(_CLOCK)
            return fault
        for item in work:
            if item.params.structured_outputs is not None and self._renderer is not None:
                form = StructuredOutputs.of(item.params.structured_outputs)
                await self._renderer.check_grammar(form.given())
        names: list[str] = []
        try:
            for item, answers in zip(work, _by_prompt(stated, work), strict=True):
                prompt = self.engine.accept(item.token_ids, item.params)
                self._num_queued += 1
                names.append(str(self._num_queued))
                self.engine.redraw(names[-1], prompt, item.params, answers, adapter)
        except Exception:
            self._release(names)
            raise
        return _Begun(stated, reply, work, names)

    def _reads_clock(self, work: Work) -> bool:
        """Return whether a prompt may have been another one at another time."""
        tokenizer = self.served.tokenizer
        if tokenizer is None or not isinstance(work.prompt, Conversation):
            return False
        return "strftime_now" in tokenizer.chat_template_source

    async def _tokenized(self, work: Work) -> TokenizedWork:
        """Return what `Service.tokenize` does, without a deadline."""
        prompt = await read_prompt(work, self.engine.intake, self._render, self._encode)
        params = replace(prompt.params, timeout_s=None, priority=0)  # neither decides a token
        return TokenizedWork(prompt.text, tuple(prompt.token_ids), params)

    async def _render(self, conversation: Conversation) -> ChatText:
        tokenizer = self.served.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise RequestError("the model has no chat template")
        assert self._renderer is not None
        return await self._renderer.render(conversation)

    async def _encode(
        self, text: str | ChatText, add_special_tokens: bool, params: SamplingParams
    ) -> tuple[Sequence[int], int]:
        del params  # nothing is left out before it is cut
        tokenizer = self.served.tokenizer
        if tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer")
        token_ids = tokenizer.encode(text, add_special_tokens)
        return token_ids, len(token_ids)

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self.engine.release(name)

    def _end(self, begun: _Begun | Verification) -> Verification:
        if isinstance(begun, Verification):
            return begun
        redrawn = [self.engine.redrawn(name) for name in begun.names]
        self._release(begun.names)
        first = 0
        differences = list[Verification]()
        for redrawn_prompt, answers in zip(
            redrawn, _by_prompt(begun.stated, begun.work), strict=True
        ):
            drawn = draws_differ(redrawn_prompt, answers, first) or _goes_on(redrawn_prompt, first)
            if drawn is not None:
                differences.append(drawn)
            first += len(answers)
        # one that differs is refuted, whatever cannot be said of the others
        differences.sort(key=lambda redrawn_prompt: redrawn_prompt.outcome is not Outcome.DIFFERS)
        if differences:
            return differences[0]
        return _compare(begun, redrawn)


def _compare(begun: _Begun, redrawn: Sequence[Redrawn]) -> Verification:
    """Compare the whole answer with one that is written anew."""
    stated = begun.stated
    reply = begun.reply
    for index, redrawn_prompt in enumerate(redrawn):
        reply.advance(index, redrawn_prompt.group.delta(redrawn_prompt.group.completions, 0.0))
    body = json.loads(json_bytes(reply.body()))
    stated_body = _without(stated.response, _NAMES)
    expected = _without(body, _NAMES)
    if stated_body.get("usage") is None:
        del expected["usage"]  # one whose stream was joined may have none
    for stated_choice, choice in zip(stated_body["choices"], expected["choices"], strict=True):
        if "stop_reason" not in stated_choice:  # clients drop fields that OpenAI does not have
            del choice["stop_reason"]
    difference = _first_difference(_counted(stated_body), _counted(expected), "")
    if difference is None:
        return Verification(Outcome.EQUAL, num_tokens=sum(map(len, stated.tokens)))
    return _in_words(difference, stated)


def _without(fields: JsonObject, names: frozenset[str]) -> JsonDict:
    return {name: value for name, value in fields.items() if name not in names}


def _counted(body: JsonObject) -> JsonDict:
    """Return a body without the counts that its request does not decide."""
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return dict(body)
    counts = dict(usage)
    for name in _DETAILS:
        if isinstance(details := usage.get(name), Mapping):
            counts[name] = _without(details, _OF_ITS_RUN) or None
    return {**body, "usage": counts}


def _shape_differs(
    stated: Stated, work: Sequence[TokenizedWork], vocab_size: int
) -> Verification | None:
    """Compare what needs no computation: how many choices there are, and of which tokens."""
    count = sum(prompt_work.params.n for prompt_work in work)
    if len(stated.tokens) != count:
        return differs(f"the request asks for {count} choices, and {len(stated.tokens)} are stated")
    for index, tokens in enumerate(stated.tokens):
        for token in tokens:
            if not 0 <= token < vocab_size:
                return differs(
                    f"choice {index}: token {show(token)} is not in the vocabulary", index
                )
    return None


def _prompts_differ(stated: Stated, work: Sequence[TokenizedWork]) -> Verification | None:
    """Compare the tokens of prompts, as far as they are stated."""
    ids = stated.response.get("prompt_token_ids")
    all_stated = [ids]
    if ids is None:
        all_stated = [choice.get("prompt_token_ids") for choice in stated.response["choices"]]
    expected: list[list[int]] = []
    for prompt_work in work:
        expected += [list(prompt_work.token_ids)] * prompt_work.params.n
    for stated_ids, expected_ids in zip(all_stated, expected, strict=False):
        if stated_ids is not None and stated_ids != expected_ids:
            return differs(
                "`prompt_token_ids` are not the tokens of the request's prompt: "
                + _where_lists_differ(stated_ids, expected_ids)
            )
    return None


def _where_lists_differ(stated: object, expected: Sequence[int]) -> str:
    if not isinstance(stated, list):
        return f"0 are stated, and it has {len(expected)}"
    if len(stated) != len(expected):
        return f"{len(stated)} are stated, and it has {len(expected)}"
    at = 0
    while stated[at] == expected[at]:
        at += 1
    return f"token {at} is stated as {show(stated[at])}, and is {expected[at]}"


def _by_prompt(
    stated: Stated, work: Sequence[TokenizedWork]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the answers to each prompt: choices come prompt by prompt."""
    first = 0
    for prompt_work in work:
        yield stated.tokens[first : first + prompt_work.params.n]
        first += prompt_work.params.n


def _goes_on(redrawn: Redrawn, first: int) -> Verification | None:
    for index, completion in enumerate(redrawn.group.completions, first):
        if not completion.request.is_finished:
            count = len(completion.request.output_token_ids)
            return differs(f"completion {index} goes on after its {count} tokens", index)
    return None


def _first_difference(stated: object, expected: Any, path: str) -> _Path | None:
    """Return where two JSON values differ first; null and an absent key are the same."""
    if isinstance(stated, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*expected, *stated)):
            name = key if key.isidentifier() else show(key)
            inner = _first_difference(stated.get(key), expected.get(key), f"{path}.{name}")
            if inner is not None:
                return inner
        return None
    if isinstance(stated, list) and isinstance(expected, list) and len(stated) == len(expected):
        for index, pair in enumerate(zip(stated, expected, strict=True)):
            inner = _first_difference(*pair, f"{path}[{index}]")
            if inner is not None:
                return inner
        return None
    # 1 is not true, and 1.0 is 1
    if stated == expected and isinstance(stated, bool) == isinstance(expected, bool):
        return None
    return path, stated, expected


def _in_words(difference: _Path, stated: Stated) -> Verification:
    path, stated_value, expected = difference
    at = _LOGPROB.fullmatch(path)
    if at is None or not isinstance(stated_value, float):
        return differs(f"{path}: {show(stated_value)} is stated, and it is {show(expected)}")
    index = int(at[1])
    position = int(at[2] or at[3])
    tokens = stated.tokens[index]
    # an echo begins with the prompt
    entries = stated.response["choices"][index]["logprobs"].get("token_logprobs", tokens)
    echoed = len(entries) - len(tokens)
    if position < echoed:
        return differs(f"{path}: {show(stated_value)} is stated, and it is {expected!r}")
    token = tokens[position - echoed]
    return logprob_differs(index, position - echoed, token, stated_value, expected)


def _no_renderer() -> None:
    return None


def verifier_of(args: EngineArgs, settings: ServerSettings | None = None) -> Verifier:
    """Load a model; returns what checks answers of a server of it with these settings.

    Raises ConfigError, CheckpointError or CapacityError as the server does.
    """
    from freight.engine.build import start_engine
    from freight.engine.fingerprint import fingerprint
    from freight.model.config.parse import sampling_defaults
    from freight.model.open import open_model

    settings = settings or ServerSettings()
    template = read_template(settings.chat_template)
    opened = open_model(args)
    engine, config = start_engine(opened)
    tokenizer = engine.tokenizer
    form: AnswerFormat | None = None
    new_renderer: Callable[[], Renderer | None] = _no_renderer
    if tokenizer is not None:
        if template is not None:
            tokenizer = tokenizer.with_chat_template(template)
        form = answer_format(tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        folder = opened.tokenizer_folder()
        assert folder is not None
        new_renderer = partial(
            Renderer,
            folder,
            opened.model.vocab_size,
            opened.stop_token_ids(),
            deadline_s=settings.template_timeout,
            chat_template=template,
        )
    generation = opened.checkpoint.generation_config if opened.checkpoint else None
    served = Served(
        names=(args.model,),
        tokenizer=tokenizer,
        vocab_size=opened.model.vocab_size,
        max_model_len=config.max_model_len,
        defaults=sampling_defaults(generation),
        fingerprint=fingerprint(opened, config, opened.kernels(config), version()),
        stop_token_ids=opened.stop_token_ids(),
        adapters=engine.adapters.loaded,
        pooling=opened.model.pooling,
        generates=opened.model.generates,
        priorities=True,
    )
    served = with_format(served, form, settings.reasoning_budget)
    return Verifier(engine, served, new_renderer)
