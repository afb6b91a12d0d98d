"""Content, reasoning and tool calls from a model's text, and grammars for forced calls.

A response template defines the markup: the checkpoint's, else a built-in one for the family that
its chat template belongs to (`call_families.py`). `parsing.py` reads answers by it: nothing raises,
no text is lost, chunks of any size give the same pieces, and the cost is linear.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from freight.base.fields import JsonObject
from freight.errors import RequestError
from freight.serve.answers.argument_types import arguments_schema, function_of
from freight.serve.answers.call_families import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    form_of,
    response_template,
)
from freight.serve.answers.listed_calls import ListedCalls
from freight.serve.answers.parsing import Markup, markup_of
from freight.serve.answers.pieces import MessageParser
from freight.serve.answers.response_templates import CallForm
from freight.serve.transport.errors import ApiError
from freight.structured import StructuredOutputs
from freight.text.thinking import tags_of, written_tags
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")
T = TypeVar("T")


class MessageFormat:
    """The `AnswerFormat` of a model with a response template.

    reads_calls, reads_reasoning   whether the response template has fields for them
    thinking_tags                  what is written before and after reasoning; None: not known
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        markup: Markup,
        form: CallForm | None,
        reasoning: tuple[str, str] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self.markup = markup
        self._form = form
        self._markers: Sequence[str] = () if form is None else form.markers
        self._reasoning = reasoning
        self.thinking_tags = reasoning
        self.reads_calls = markup.with_calls is not None
        self.reads_reasoning = markup.reasoning is not None

    def parser(self, prompt_text: str | None, tools: Sequence[JsonObject]) -> MessageParser:
        """Return the parser of one answer; a `ParserOf`. Without tools, calls are content."""
        return self.markup.parser(prompt_text, tools)

    def call_to(
        self,
        tools: Sequence[JsonObject],
        names: Sequence[str],
        parallel: bool,
        prompt_text: str | None = None,
    ) -> JsonObject:
        """Return keyword arguments of StructuredOutputs for an answer that calls one of `names`; a
        `ForcedCall`.

        tools        as in OpenAI's API; arguments satisfy `parameters`
        parallel     whether several calls are allowed
        prompt_text  if it ends within reasoning, the answer begins with the rest of that

        Raises ApiError 400 if the form of this model's calls is not known, or for a name that is
        not in `tools`.
        """
        if self._form is None:
            raise ApiError(
                400,
                "tool_choice can only be 'auto' or 'none': the form of this model's tool calls is not known, so that "
                "a call cannot be forced",
                param="tool_choice",
            )
        chosen = forced_functions(tools, names)
        parts = {
            f"arguments_{index}": self._arguments(self._form, function)
            for index, function in enumerate(chosen)
        }
        grammar = self._grammar(self._form, chosen, parallel, prompt_text or "")
        return {"grammar": grammar, "parts": parts}

    def _arguments(self, form: CallForm, function: JsonObject) -> JsonObject:
        """Return the form of the arguments of `function`. Raises ApiError 400 for a schema without
        a possible grammar.
        """
        schema = arguments_schema(function)
        if form.syntax is None:
            return {"json": schema}
        try:
            StructuredOutputs(json=schema)  # checks the limits, which the parts do not
            return form.syntax.part(function, self._literal, self._token_in)
        except (RequestError, ValueError) as error:
            raise ApiError(
                400, f"tools: {function.get('name')!r:.80}: {error}", param="tools"
            ) from None

    def form_to(self, form: JsonObject, prompt_text: str) -> JsonObject:
        """Return keyword arguments of StructuredOutputs for reasoning and then `form`, which is
        without parts; an `AfterReasoning`. The reasoning is optional unless the prompt ends in it.
        """
        if self._reasoning is None:
            return form
        think, rules = self._think(self._reasoning, prompt_text)
        return {
            "grammar": "\n".join([f"start: {think} @answer", *rules]),
            "parts": {"answer": form},
        }

    def _think(self, tags: tuple[str, str], prompt_text: str) -> tuple[str, tuple[str, str]]:
        """Return the expression of the reasoning at the beginning of an answer, and the rules that
        it needs.
        """
        think = "think"
        if not self.markup.begins_in_reasoning(prompt_text):
            think = f"({self._literal(tags[0])} think)?"
        return think, self._reasoning_rules(tags[1])

    def _grammar(
        self,
        form: CallForm,
        functions: Sequence[JsonObject],
        parallel: bool,
        prompt_text: str,
    ) -> str:
        """Return the grammar, in llguidance's Lark dialect, with the parts `@arguments_0`,
        `@arguments_1`, ...
        """
        body = [self._literal(form.opening), "call"]
        if parallel and form.most_calls > 1:
            body.append(f"({self._literal(form.between)} call){{0,{form.most_calls - 1}}}")
        body.append(self._literal(form.closing))
        rules = [_words(body)]
        if self._reasoning is not None:
            think, more_rules = self._think(self._reasoning, prompt_text)
            rules[0] = f"{think} {rules[0]}"
            rules += more_rules
        rules[0] = f"start: {rules[0]}"
        before = self._literal(form.before_name)
        after = self._literal(form.after_arguments)
        rules.append(f"call: {before} function {after}".rstrip())
        choices = []
        for index, function in enumerate(functions):
            name = str(function["name"])
            if form.quoted:
                name = json.dumps(function["name"], ensure_ascii=False)
            head = self._literal(name + form.before_arguments)
            if form.numbered:
                head = f"{self._literal(f'{name}:')} /[0-9]{{1,3}}/ {self._literal(form.before_arguments)}"
            choices.append(f"function_{index}: {head} @arguments_{index}")
        names = " | ".join(choice.partition(":")[0] for choice in choices)
        return "\n".join(filter(None, [*rules, f"function: {names}", *choices]))

    def _reasoning_rules(self, closing: str) -> tuple[str, str]:
        """Return the rule `think` (the rest of the reasoning, its closing tag and a blank line),
        and `BLANK`.
        """
        blank = r"BLANK: /[ \n]{0,4}/"
        think = f"think: (thought{self._as_token(closing)}) BLANK\nthought[suffix={json.dumps(closing)}]: /(?s:.*)/"
        if self._token_of(closing) is not None:
            think += "\nTHOUGHT: /(?s:.)*/"
        return think, blank

    def _as_token(self, closing: str) -> str:
        """Return the alternative end of a thought, as one token. A special token matches no text of
        the grammar.
        """
        token = self._token_of(closing)
        if token is None:
            return ""
        return f" | THOUGHT <[{token}]>"

    def _literal(self, text: str) -> str:
        """Return `text` as an expression of the grammar; "" for "".

        A marker that is one token may also come as that token: llguidance never matches a string
        against a special token, and it treats every added token like `<tool_call>` as special.
        """
        if not text:
            return ""
        markers = (*self._markers, *(self._reasoning or ()))
        marker, token = next(self._tokens_in(text, markers), ("", -1))
        if not marker:
            return json.dumps(text, ensure_ascii=False)
        before, after = text.split(marker, 1)
        either = f"(<[{token}]> | {json.dumps(marker)})"
        return _words((self._literal(before), either, self._literal(after)))

    def _tokens_in(self, text: str, markers: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield those of `markers` that are in `text` and one token, with that token."""
        for marker in markers:
            if marker in text:
                token = self._token_of(marker)
                if token is not None:
                    yield marker, token

    def _token_in(self, text: str) -> tuple[str, int, str] | None:
        """Return the first marker in `text` that is one token: the text before it, the token, the
        text behind it.
        """
        places: list[tuple[int, str, int]] = []
        for marker, token in self._tokens_in(text, self._markers):
            places.append((text.index(marker), marker, token))
        if not places:
            return None
        at, marker, token = min(places)
        return text[:at], token, text[at + len(marker) :]

    def _token_of(self, marker: str) -> int | None:
        ids = self._tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) != 1:
            return None
        return ids[0]


def _words(parts: Iterable[str]) -> str:
    return " ".join(filter(None, parts))


def parser_for(
    tokenizer: Tokenizer, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> MessageFormat | None:
    """Return the format of a model's answers, or None if they have no known markup.

    tool_call_parser, reasoning_parser   names of `call_families`, which override the checkpoint
    """
    form = form_of(tokenizer.chat_template_source)
    tags = tags_of(tokenizer.chat_template_source)
    template = None
    if tool_call_parser is None and reasoning_parser is None:
        template = tokenizer.response_template
    form = _chosen(TOOL_CALL_PARSERS.get(tool_call_parser or ""), form)
    tags = _chosen(REASONING_PARSERS.get(reasoning_parser or ""), tags)
    pair = None if tags is None else (tags.opens[0], tags.closes[0])
    if template is not None:
        try:
            markup = markup_of(tokenizer, template)
        except Exception as error:  # ValueError, and others for values of a wrong type
            logger.warning(
                "the checkpoint's response_template cannot be read, and is not used: %s", error
            )
        else:
            pair = written_tags(template["fields"].get(markup.reasoning)) or pair
            if not _reads(markup, form):
                form = None
            return MessageFormat(tokenizer, markup, form, pair)
    if form is None and tags is None:
        return None
    return MessageFormat(
        tokenizer, markup_of(tokenizer, response_template(form, tags), form), form, pair
    )


def _chosen(offered: Sequence[Any] | None, value: T) -> T:
    """Return `value` if the name offers it, or if no name was given; else the first form that the
    name offers.
    """
    if offered is None or value in offered:
        return value
    chosen: T = offered[0]
    return chosen


def _reads(markup: Markup, form: CallForm | None) -> bool:
    """Return whether `markup` finds a call that is written in `form`. Only forms with JSON after a
    name.
    """
    if form is None or markup.with_calls is None or not isinstance(form.syntax, ListedCalls | None):
        return False
    name = '"f"' if form.quoted else "f"
    call = form.before_name + name + form.before_arguments + '{"a": 1}' + form.after_arguments
    parser = markup.parser("", [{"type": "function", "function": {"name": "f"}}])
    pieces = parser.feed(form.opening + call + form.closing) + parser.finish(True)
    return [(piece.name, piece.text) for piece in pieces] == [("f", '{"a": 1}')]


def forced_functions(tools: Sequence[JsonObject], names: Sequence[str]) -> list[JsonObject]:
    """Return the functions of `names`, each once; `tools` as in OpenAI's API.

    Raises ApiError 400 for a name that is not in `tools`, and for no names.
    """
    functions = {function.get("name"): function for function in map(function_of, tools)}
    for name in names:
        if name not in functions:
            raise ApiError(
                400, f"tool_choice names {name!r:.80}, which is not in tools", param="tool_choice"
            )
    if not names:
        raise ApiError(400, "tool_choice forces a call, and tools is empty", param="tool_choice")
    return [functions[name] for name in dict.fromkeys(names)]
