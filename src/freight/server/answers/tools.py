"""Content, reasoning and tool calls out of a model's text, and the grammar of an answer that must
be a call.

What a text means is defined by a response template: the checkpoint's own, else one of ours for the
family that its chat template belongs to (`call_families.py`). transformers' ResponseParser finds
the regions of the text. Around it, `parsing.py` guarantees what clients need and that parser does
not give: nothing raises, no text is lost, chunks of any size give the same pieces, and the cost is
linear.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from freight.errors import RequestError
from freight.server.answers.argument_types import arguments_schema
from freight.server.answers.call_families import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    form_of,
    response_template,
    tags_of,
)
from freight.server.answers.listed_calls import ListedCalls
from freight.server.answers.parsing import Markup, markup_of
from freight.server.answers.pieces import MessageParser
from freight.server.answers.response_templates import CallForm
from freight.server.transport.errors import ApiError
from freight.structured import StructuredOutputs
from freight.text.tokenizer import Tokenizer

logger = logging.getLogger("freight")


class MessageFormat:
    """How the answers of one model are read, and how calls are forced.

    reads_calls, reads_reasoning   what the response template has fields for
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        markup: Markup,
        form: CallForm | None,
        reasoning: tuple[str, str] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._markup = markup
        self._form = form
        self._reasoning = reasoning
        self.reads_calls = markup.with_calls is not None
        self.reads_reasoning = markup.reasoning is not None

    def parser(self, prompt_text: str | None, tools: Sequence[Mapping[str, Any]]) -> MessageParser:
        """Reads one answer. A `ParserOf`: without tools, markup of calls is content."""
        return self._markup.parser(prompt_text, tools)

    def ends_in_reasoning(self, prompt_text: str) -> bool:
        """Whether an answer to this prompt begins within reasoning, because the prompt has the
        opening tag.
        """
        return self._markup.begins_in_reasoning(prompt_text)

    def forced_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        parallel: bool,
        *,
        in_reasoning: bool = False,
    ) -> Mapping[str, object]:
        """Keyword arguments of StructuredOutputs: an answer that is one call of one of `names`, or
        several.

        tools         as OpenAI's API has them; arguments fit `parameters`
        parallel      whether there may be more than one call
        in_reasoning  what `ends_in_reasoning` says of the prompt; the answer then begins with the
                      rest of the reasoning

        Raises ApiError 400 where the form of this model's calls is not known, or a name is none of
        `tools`.
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
            f"arguments_{index}": self._arguments(self._form, one)
            for index, one in enumerate(chosen)
        }
        return {
            "grammar": self._grammar(self._form, chosen, parallel, in_reasoning),
            "parts": parts,
        }

    def _arguments(self, form: CallForm, function: Mapping[str, Any]) -> Mapping[str, Any]:
        """The form of the arguments of `function`. Raises ApiError 400 for a schema of which no
        grammar can be made.
        """
        schema = arguments_schema(function)
        if form.syntax is None:
            return {"json": schema}
        try:
            StructuredOutputs(json=schema)  # its limits; a schema in pieces has none
            return form.syntax.part(function, self._literal, self._token_in)
        except (RequestError, ValueError) as error:
            raise ApiError(
                400, f"tools: {function.get('name')!r:.80}: {error}", param="tools"
            ) from None

    def after_reasoning(self, form: Mapping[str, Any], in_reasoning: bool) -> Mapping[str, Any]:
        """Keyword arguments of StructuredOutputs: reasoning first, as the model writes it, and then
        `form`.

        form          keyword arguments of StructuredOutputs, without parts
        in_reasoning  what `ends_in_reasoning` says of the prompt; if not, the answer may begin with
                      reasoning
        """
        if self._reasoning is None:
            return form
        think, rules = self._think(self._reasoning, in_reasoning)
        return {
            "grammar": "\n".join([f"start: {think} @answer", *rules]),
            "parts": {"answer": form},
        }

    def call_to(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        parallel: bool,
        prompt_text: str | None,
    ) -> Mapping[str, Any]:
        """A `ForcedCall`: `forced_call` for an answer to this prompt."""
        in_reasoning = prompt_text is not None and self.ends_in_reasoning(prompt_text)
        return self.forced_call(tools, names, parallel, in_reasoning=in_reasoning)

    def form_to(self, form: Mapping[str, Any], prompt_text: str) -> Mapping[str, Any]:
        """An `AfterReasoning`: `after_reasoning` for an answer to this prompt."""
        return self.after_reasoning(form, self.ends_in_reasoning(prompt_text))

    def _think(self, tags: tuple[str, str], in_reasoning: bool) -> tuple[str, tuple[str, str]]:
        """The reasoning at the beginning of an answer, and the rules that it needs."""
        return (
            "think" if in_reasoning else f"({self._literal(tags[0])} think)?",
            self._reasoning_rules(tags[1]),
        )

    def _grammar(
        self,
        form: CallForm,
        functions: Sequence[Mapping[str, Any]],
        parallel: bool,
        in_reasoning: bool,
    ) -> str:
        """Lark in llguidance's dialect, with the parts `@arguments_0`, `@arguments_1`, ..."""
        more = form.most_calls - 1 if parallel else 0
        body = [self._literal(form.opening), "call"]
        if more:
            body.append(f"({self._literal(form.between)} call){{0,{more}}}")
        body.append(self._literal(form.closing))
        rules = [" ".join(part for part in body if part)]
        if self._reasoning is not None:
            think, more_rules = self._think(self._reasoning, in_reasoning)
            rules[0] = f"{think} {rules[0]}"
            rules += more_rules
        rules[0] = f"start: {rules[0]}"
        before, after = self._literal(form.before_name), self._literal(form.after_arguments)
        rules.append(f"call: {before} function {after}".rstrip())
        rules.append(
            "function: " + " | ".join(f"function_{index}" for index in range(len(functions)))
        )
        for index, function in enumerate(functions):
            name = (
                json.dumps(function["name"], ensure_ascii=False)
                if form.quoted
                else str(function["name"])
            )
            head = self._literal(name + form.before_arguments)
            if form.numbered:
                head = f"{self._literal(f'{name}:')} /[0-9]{{1,3}}/ {self._literal(form.before_arguments)}"
            rules.append(f"function_{index}: {head} @arguments_{index}")
        return "\n".join(rule for rule in rules if rule)

    def _reasoning_rules(self, closing: str) -> tuple[str, str]:
        """`think`: the rest of the reasoning, its closing tag, and the blank line that models write
        there.
        """
        blank = r"BLANK: /[ \n]{0,4}/"
        think = f"think: (thought{self._as_token(closing)}) BLANK\nthought[suffix={json.dumps(closing)}]: /(?s:.*)/"
        if self._token_of(closing) is not None:
            think += "\nTHOUGHT: /(?s:.)*/"
        return think, blank

    def _as_token(self, closing: str) -> str:
        """The other way to end a thought: as one token. A special one matches no text of the
        grammar.
        """
        token = self._token_of(closing)
        return "" if token is None else f" | THOUGHT <[{token}]>"

    def _literal(self, text: str) -> str:
        """`text` as an expression of the grammar; "" for "". Markers that are one token may come as
        that token.

        llguidance matches no string with a special token, and takes every added token like
        `<tool_call>` for one.
        """
        for marker in [*(self._form.markers if self._form else ()), *(self._reasoning or ())]:
            token = self._token_of(marker) if marker in text else None
            if token is not None:
                before, after = text.split(marker, 1)
                either = f"(<[{token}]> | {json.dumps(marker)})"
                return " ".join(
                    part for part in (self._literal(before), either, self._literal(after)) if part
                )
        return json.dumps(text, ensure_ascii=False) if text else ""

    def _token_in(self, text: str) -> tuple[str, int, str] | None:
        """The first marker in `text` that is one token: what stands before it, the token, what
        stands behind it.
        """
        found = [
            (text.index(marker), marker, token)
            for marker in (self._form.markers if self._form else ())
            if marker in text and (token := self._token_of(marker)) is not None
        ]
        if not found:
            return None
        at, marker, token = min(found)
        return text[:at], token, text[at + len(marker) :]

    def _token_of(self, marker: str) -> int | None:
        ids = self._tokenizer.encode(marker, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None


def parser_for(
    tokenizer: Tokenizer, tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> MessageFormat | None:
    """How answers of the model with this tokenizer are read; None where no markup is known in them.

    tool_call_parser, reasoning_parser   names of `call_families` that come before what the
                                         checkpoint says
    """
    form, tags = form_of(tokenizer.chat_template_source), tags_of(tokenizer.chat_template_source)
    own = (
        tokenizer.response_template
        if tool_call_parser is None and reasoning_parser is None
        else None
    )
    form = _chosen(TOOL_CALL_PARSERS.get(tool_call_parser or ""), form)
    tags = _chosen(REASONING_PARSERS.get(reasoning_parser or ""), tags)
    pair = None if tags is None else (tags.opens[0], tags.closes[0])
    if own is not None:
        try:
            markup = markup_of(tokenizer, own)
        except (
            Exception
        ) as error:  # transformers raises ValueError, and less exact ones for wrong types
            logger.warning(
                "the checkpoint's response_template cannot be read, and is not used: %s", error
            )
        else:
            pair = _tags(own["fields"].get(markup.reasoning)) or pair
            return MessageFormat(tokenizer, markup, form if _reads(markup, form) else None, pair)
    if form is None and tags is None:
        return None
    return MessageFormat(
        tokenizer, markup_of(tokenizer, response_template(form, tags), form), form, pair
    )


def _chosen(offered: Sequence[Any] | None, found: Any) -> Any:
    """What a name offers, and of several that which the chat template shows; without a name, the
    latter.
    """
    return found if offered is None or found in offered else offered[0]


def _tags(field: object) -> tuple[str, str] | None:
    """What a field of a response template stands between, where that are two texts."""
    if not isinstance(field, Mapping):
        return None
    tags = field.get("open"), field.get("close")
    return (tags[0], tags[1]) if isinstance(tags[0], str) and isinstance(tags[1], str) else None


def _reads(markup: Markup, form: CallForm | None) -> bool:
    """Whether `markup` finds a call that is written in `form`, which is one of JSON after a name."""
    if form is None or markup.with_calls is None or not isinstance(form.syntax, ListedCalls | None):
        return False
    name = '"f"' if form.quoted else "f"
    call = form.before_name + name + form.before_arguments + '{"a": 1}' + form.after_arguments
    parser = markup.parser("", [{"type": "function", "function": {"name": "f"}}])
    pieces = parser.feed(form.opening + call + form.closing) + parser.finish(True)
    return [(piece.name, piece.text) for piece in pieces] == [("f", '{"a": 1}')]


def forced_functions(
    tools: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The functions in `tools`, as OpenAI's API has them, of which one has to be called: `names`,
    each once.

    Raises ApiError 400 for a name that is none of `tools`, and for no names.
    """
    functions = {function.get("name"): function for function in map(_function, tools)}
    for name in names:
        if name not in functions:
            raise ApiError(
                400, f"tool_choice names {name!r:.80}, which is not in tools", param="tool_choice"
            )
    if not names:
        raise ApiError(400, "tool_choice forces a call, and tools is empty", param="tool_choice")
    return [functions[name] for name in dict.fromkeys(names)]


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool
