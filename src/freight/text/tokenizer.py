"""Tokenizer: text to token ids and back, and conversations to token ids, from a model's folder.

If the folder has a `tokenizer.json`, ids are exactly those of the `tokenizers` library with that
file, whatever `tokenizer_class` and `model_type` the folder names: for some of them transformers
would rebuild the pipeline and give other ids. Consequences:

- BOS and EOS are placed by the post-processor of tokenizer.json. `add_bos_token` and
  `add_eos_token` of tokenizer_config.json are ignored, as transformers ignores them if there is a
  tokenizer.json; a contradiction is logged.
- Truncation and padding in tokenizer.json are ignored: a prompt is its own length.
- Tokens that tokenizer.json lacks, but tokenizer_config.json, special_tokens_map.json or
  added_tokens.json names, are added.

A tokenizer in an older form is converted by transformers, and a line at start says so. This module
imports transformers only for that, for the first conversation, or to parse answers: the import
takes a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex
from tokenizers import Encoding, models
from tokenizers import Tokenizer as Backend

from freight.base.fields import JsonDict, JsonObject
from freight.base.patterns import AnswerPattern
from freight.errors import CheckpointError, ConfigError, RequestError
from freight.text.chat_text import ChatText, ControlTokens, encode_marked, read_marked
from freight.text.harmony import is_harmony, to_harmony_messages
from freight.text.messages import check_unicode, read_messages
from freight.text.template_forms import (
    PROBE_TOOL,
    TemplateForms,
    either_content_form,
    find_forms,
    in_forms,
)
from freight.text.token_pieces import Pieces, read_decoder
from freight.text.tokenizer_files import (
    TokenizerParts,
    read_files,
    read_gguf_tokenizer,
    require_own_files,
    require_own_names,
)

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import (
        ResponseTemplate as ResponseTemplate,
    )
    from transformers.utils.chat_parsing.response_templates import (
        ResponseTemplateField as ResponseTemplateField,
    )

logger = logging.getLogger("freight")

_FILES = (  # one of these is in every folder with a tokenizer
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Characters, or token ids: the library's `encode` and `decode` hold the interpreter throughout, for 1 s
# a million characters. `encode_batch` and `decode_batch` let other threads run meanwhile.
_LONG = 1 << 12
_NO_TOKEN = 2**32  # the library's ids are 32 bits
_OURS = (  # arguments of transformers' apply_chat_template that are not template values
    "tokenize",
    "return_dict",
    "return_tensors",
    "padding",
    "truncation",
    "max_length",
    "chat_template",
    "conversation",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
)


def _token_string(backend: Backend, left_out: frozenset[int], token_id: int) -> str | None:
    if token_id in left_out or token_id >= _NO_TOKEN:
        return None
    return backend.id_to_token(token_id)


class Tokenizer:
    """A model's tokenizer. `vocab_size` counts added tokens too; ids are in [0, vocab_size)."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        response_template: JsonObject | None = None,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library; `Tokenizer.load` makes one from a folder.

        special_tokens: by their names in tokenizer_config.json, "bos_token" -> "<s>".
        chat_template: Jinja, or several templates by name. response_template: how an answer is
        divided into content, reasoning and tool calls, in transformers' format; not checked here.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        self.response_template = response_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        special = {}
        for token, value in backend.get_added_tokens_decoder().items():
            if value.special:
                special[token] = value.content
        self.special_token_ids: frozenset[int] = frozenset(special)
        self.special_texts = frozenset(special.values())
        decoder = read_decoder(backend.decoder)
        # Texts of single tokens, without and with special tokens skipped. Both are caches.
        self._pieces: list[Pieces] = []
        if decoder is not None:
            self._pieces = [
                # without a reference to this tokenizer: one that nobody uses is freed at once
                Pieces(decoder, partial(_token_string, backend, frozenset())),
                Pieces(decoder, partial(_token_string, backend, self.special_token_ids)),
            ]
        self._token_texts: dict[int, str] = {}
        self._forms_of: dict[bool, TemplateForms] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        way_out: str = "skip_tokenizer_init=True runs without one, with token ids as prompts",
    ) -> Tokenizer:
        """Read the tokenizer in `folder`, or in a GGUF file; nothing is downloaded.

        Raises CheckpointError, whose message ends with `way_out`, if there is none to read.
        """
        path = Path(folder)
        read = _convert
        if path.is_file():
            read = read_gguf_tokenizer
        elif not any(os.path.lexists(path / name) for name in _FILES):
            raise CheckpointError(
                f"{path} has no tokenizer (one of {', '.join(_FILES)}); {way_out}"
            )
        else:
            require_own_files(path)
            if os.path.lexists(path / "tokenizer.json"):
                read = read_files
        try:
            parts = read(path)
            return cls(
                parts.backend,
                parts.special_tokens,
                parts.chat_template,
                parts.response_template,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {way_out}") from error.__cause__

    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token by its text in the tokenizer's files."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def encode(self, text: str | ChatText, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the model wants around a
        text (BOS), unless disabled; of a rendered conversation by `encode_chat`.

        Raises RequestError for text that is not Unicode (a lone surrogate) or that the vocabulary
        has no tokens for.
        """
        if isinstance(text, ChatText):
            return self.encode_chat(text, add_special_tokens)
        return self._encode(text, add_special_tokens).ids

    def check_empty(self, add_special_tokens: bool = True) -> None:
        """Raise RequestError if an empty text has no token: a model needs one to go on from."""
        if not (add_special_tokens and self._writes_around):
            way_out = "give at least one character or token id"
            if self._writes_around:
                way_out = f"leave add_special_tokens true, or {way_out}"
            raise RequestError(f"an empty prompt has no tokens: none is added to it; {way_out}")

    @cached_property
    def _writes_around(self) -> bool:
        """Whether special tokens (BOS) are added to a text."""
        return bool(self.encode(""))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Ids that the tokenizer does not have (padding of the
        model's vocabulary) are empty.

        Raises RequestError for a negative id.
        """
        least = min(token_ids, default=0)
        if least < 0:
            raise RequestError(f"token id {least} is negative; token ids count from 0")
        known = [token for token in token_ids if token < _NO_TOKEN]
        if len(known) < _LONG:
            return self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, special tokens included, as log-probabilities
        show it.
        """
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._token_texts[token_id]

    def token_string(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the vocabulary's entry of a token ("▁the"); None if `decode` ignores the token."""
        left_out = self.special_token_ids if skip_special_tokens else frozenset()
        return _token_string(self.backend, left_out, token_id)

    def pieces(self, skip_special_tokens: bool) -> Pieces | None:
        """Return the texts of single tokens; None if they depend on the tokens around them."""
        if not self._pieces:
            return None
        return self._pieces[skip_special_tokens]

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> list[tuple[int, int, int]]:
        """Encode as `encode`; return each token with the first character of `text` that it stands
        for and the one after the last.

        Both are 0 for a token that stands for none (BOS).
        """
        encoding = self._encode(text, add_special_tokens)
        return [
            (token, begin, end)
            for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts as one input, with the special tokens that the model wants
        around and between them, and the token type of each. Raises RequestError like `encode`.
        """
        check_unicode(first)
        encoding = self._encode(second, True, before=first)
        return encoding.ids, encoding.type_ids

    def _encode(self, text: str, add_special_tokens: bool, before: str | None = None) -> Encoding:
        """Encode `text`, or the pair of `before` and it."""
        check_unicode(text)
        whole = text if before is None else (before, text)
        try:
            if before is None and len(text) < _LONG:
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
            return self.backend.encode_batch([whole], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # the library raises nothing more special
            raise RequestError(f"the tokenizer has no tokens for {text!r:.60}: {error}") from error

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Special tokens by their names in tokenizer_config.json, "bos_token" -> "<s>"."""
        return self._special_tokens

    @property
    def has_chat_template(self) -> bool:
        """True if the model can converse."""
        return bool(self._chat_template)

    @property
    def chat_template(self) -> str | None:
        """The template in Jinja, the one named "default" if there are several; None without."""
        if isinstance(self._chat_template, dict):
            return self._chat_template.get("default")
        return self._chat_template or None

    @property
    def chat_template_source(self) -> str:
        """The Jinja text of the chat template, all of them if there are several; "" without one."""
        if isinstance(self._chat_template, dict):
            return "\n".join(self._chat_template.values())
        return self._chat_template or ""

    def apply_chat_template(
        self,
        messages: Sequence[JsonObject],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_values: Any,
    ) -> list[int]:
        """Return the token ids of a conversation as the model was trained to see it.

        As `render_chat`, then tokenized. The template writes BOS where the model wants it, so none
        is added.
        """
        return self.encode_chat(
            self.render_chat(
                messages, add_generation_prompt, continue_final_message, **template_values
            )
        )

    def encode_chat(self, chat: ChatText, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a rendered conversation. Of control tokens in it, only the
        template's own become tokens.

        Raises RequestError like `encode`, and for a control token that the vocabulary cannot write
        as text.
        """
        encoding = self._encode(chat.text, add_special_tokens)
        if not chat.plain:
            return encoding.ids
        if add_special_tokens:
            mask = encoding.special_tokens_mask
            begin = _num_added(mask)
            end = len(mask)
            if begin < end:
                end -= _num_added(mask[::-1])
            return [*encoding.ids[:begin], *self.encode_chat(chat), *encoding.ids[end:]]
        of_text = set()
        for token in (
            self._special_tokens.get("unk_token"),
            getattr(self.backend.model, "unk_token", None),
        ):
            if token:
                of_text.add(self.backend.token_to_id(token))
        return encode_marked(self.backend, chat, encoding, self.special_token_ids - of_text)

    def render_chat(
        self,
        messages: Sequence[JsonObject],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_values: Any,
    ) -> ChatText:
        """Render a conversation with the model's template, for `encode_chat`.

        messages: mappings with `role` and `content`, a string or a list of text parts; `content`
        may be None in a message with `tool_calls`. They are given to the template in the forms that
        it reads (`template_forms`). `template_values` (`tools`, `enable_thinking`, …) reach the
        template. Raises ConfigError if the model has no template, RequestError for messages that
        are malformed, or that the template refuses or would leave out.
        """
        require_chat_template(self)
        for name in _OURS:
            if name in template_values:
                raise RequestError(
                    f"{name} is not an option of the chat template; the result is always token ids"
                )
        conversation = read_messages(messages)
        options = {
            **template_values,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        forms = self.chat_forms(bool(template_values.get("tools")))
        if not forms.shows_users:
            # The template may need this conversation's values
            forms = self._found_forms({**options, "continue_final_message": False})
        # Without messages: one prompt for all, by intention
        if forms.shows_users or "messages" not in self.chat_template_source:
            return self._render(in_forms(conversation, forms), options)
        return either_content_form(
            conversation, forms, lambda tried: self._render(tried, options), lambda chat: chat.text
        )

    def render_as_given(
        self, conversation: Sequence[JsonObject], **template_values: Any
    ) -> ChatText:
        """Render messages of any roles with the model's template as they are, for `encode_chat`; no
        generation prompt unless a value says so.

        Raises ConfigError if the model has no template, RequestError if it refuses the messages.
        """
        require_chat_template(self)
        options = {"add_generation_prompt": False, **template_values}
        return self._render(
            list(map(dict, conversation)), {**options, "continue_final_message": False}
        )

    def _render(self, conversation: list[JsonDict], values: JsonObject) -> ChatText:
        """Render messages in the template's forms. Raises RequestError."""
        from jinja2 import TemplateError

        if self._is_harmony:
            conversation = to_harmony_messages(conversation)
        conversation, values, mark = self._control_tokens.mark(conversation, values)
        try:
            text = self._rendered(conversation, {**self._special_tokens, **values})
        except Exception as error:  # a template is a program, and raises what it likes
            reason = repr(error)
            if isinstance(error, TemplateError | ValueError):
                reason = str(error)
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}"
            ) from error
        return read_marked(text, mark)

    def chat_forms(self, with_tools: bool) -> TemplateForms:
        """Return what the template reads, found at the first conversation of its kind: of several
        templates, transformers takes another one for a conversation with tools.
        """
        if with_tools not in self._forms_of:
            options: JsonDict = {"add_generation_prompt": True, "continue_final_message": False}
            if with_tools:
                options["tools"] = [PROBE_TOOL]
            self._forms_of[with_tools] = self._found_forms(options)
        return self._forms_of[with_tools]

    def _found_forms(self, options: JsonObject) -> TemplateForms:
        def render(conversation: Sequence[JsonObject]) -> str | None:
            try:
                return self._render(list(map(dict, conversation)), options).text
            except RequestError as error:
                if isinstance(error.__cause__, MemoryError):
                    raise
                return None

        forms = find_forms(render)
        if self._is_harmony:  # content beside calls is the concern of `to_harmony_messages`
            return replace(forms, calls_apart=False)
        return forms

    def prepare_chat(self) -> None:
        """Import what `render_chat` needs, which takes a second."""
        if self.has_chat_template:
            _ = self._renderer, self._control_tokens

    @cached_property
    def _is_harmony(self) -> bool:
        return is_harmony(self.chat_template_source)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.backend, self.chat_template_source)

    def _rendered(self, conversation: Sequence[JsonObject], values: JsonDict) -> str:
        """Render by the rules of transformers. Its `apply_chat_template` would leave out a content
        of None, which some templates test for. Raises what the template raises.
        """
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template

        if values["continue_final_message"] and values["add_generation_prompt"]:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        template = self._renderer.get_chat_template(None, values.get("tools"))
        rendered, _ = render(conversations=[conversation], chat_template=template, **values)
        text: str = rendered[0]
        return text

    @cached_property
    def _renderer(self) -> Any:
        """A chooser among templates by the rules of transformers. Its own tokenizer is empty."""
        from transformers import PreTrainedTokenizerFast

        make: Any = PreTrainedTokenizerFast
        return make(tokenizer_object=Backend(models.BPE()), chat_template=self._chat_template)

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return the same tokenizer with another chat template, in Jinja."""
        return Tokenizer(self.backend, self._special_tokens, template)

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        if token is None:
            return None
        return self.backend.token_to_id(token)


def _num_added(mask: Sequence[int]) -> int:
    """Return how many tokens at the beginning are special ones that were added."""
    count = 0
    while count < len(mask) and mask[count]:
        count += 1
    return count


def load_response_template(template: JsonObject) -> ResponseTemplate:
    """Load `template` as transformers' ResponseTemplate, with expressions that end when their time
    is up. Raises ValueError for one that transformers cannot read.
    """
    from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
    from transformers.utils.chat_parsing.response_templates import load_response_template as load

    loaded = load(dict(template))
    for name, parser in _TIMED_PARSERS.items():
        CONTENT_PARSERS[_timed(name)] = parser
    loaded.start_anchor_re = AnswerPattern(loaded.start_anchor_re)
    for field in loaded.fields.values():
        field.open_re = field.open_re and AnswerPattern(field.open_re)
        field.close_re = field.close_re and AnswerPattern(field.close_re)
        field.content = _timed(field.content)
        field.content_args = _with_timed(field.content_args)
    return loaded


def _timed(name: str) -> str:
    """Return the name under which transformers finds the parser that ends in time."""
    return f"{name}, timed" if name in _TIMED_PARSERS else name


def _with_timed(args: JsonObject) -> JsonDict:
    """Return the arguments of a parser with parsers of values that end in time."""
    inner = args.get("value_parser")
    if not isinstance(inner, Mapping):
        return dict(args)
    timed = {
        "name": _timed(inner.get("name", "text")),
        "args": _with_timed(inner.get("args", {})),
    }
    return {**args, "value_parser": timed}


def _read_tags(text: str, args: JsonDict) -> object:
    """Read `text` as transformers' xml-inline, if its expression ends in time in this text."""
    from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

    _try(str(args.get("tag_pattern", "")), text)
    return CONTENT_PARSERS["xml-inline"](text, args)


def _read_json(text: str, args: JsonDict) -> object:
    """Read `text` as transformers' json, if its strings are found in time in this text."""
    from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

    for opening, closing in args.get("string_delims", ()):
        _try(f"{regex.escape(opening)}(.*?){regex.escape(closing)}", text)
    return CONTENT_PARSERS["json"](text, args)


def _try(expression: str, text: str) -> None:
    """Find all matches. Raises CheckpointError when the time is up: the same library needs the
    same time to look again.
    """
    for _ in AnswerPattern(regex.compile(expression, regex.DOTALL)).finditer(text):
        pass


_TIMED_PARSERS = {"xml-inline": _read_tags, "json": _read_json}


def parse_response(text: str, template: ResponseTemplate, tools: Sequence[JsonObject]) -> JsonDict:
    """Parse `text` into a message by `template`, with arguments converted to the types of `tools`.
    Raises ValueError for text that the content parsers of `template` cannot read.
    """
    from transformers.utils.chat_parsing import parse_response as parse

    return parse(text, template, prefix="", tools=list(map(dict, tools)))


def require_chat_template(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return `tokenizer`. Raises ConfigError if there is none, or it has no chat template."""
    if tokenizer is None:
        raise ConfigError(
            "chat needs a tokenizer, and skip_tokenizer_init leaves it out; use freight generate with token ids"
        )
    if not tokenizer.has_chat_template:
        raise ConfigError(
            "this model has no chat template: it was not trained to converse; use generate with a plain prompt "
            "(freight generate, LLM.generate)"
        )
    return tokenizer


def _convert(path: Path) -> TokenizerParts:
    """Read the parts as `read_files`, from a folder whose tokenizer is in an older form."""
    require_own_names(path)
    logger.info("%s has no tokenizer.json: its tokenizer is converted by transformers", path)
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        template = getattr(converted, "response_template", None)
        return TokenizerParts(
            converted.backend_tokenizer,
            converted.special_tokens_map,
            converted.chat_template,
            template,
        )
    except Exception as error:  # of many kinds: the parsers' own, and bare Exception
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}") from error
