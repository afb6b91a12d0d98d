"""Text to token ids and back: `Tokenizer` reads a model's folder, `Detokenizer` turns one completion into text, token
by token.

Guarantees of `Detokenizer`: the pieces it gives out, joined, are the text of all tokens; a piece holds whole characters
only (a character of several byte tokens comes with its last byte); the text stops exactly before the first stop
string, however tokens cut it, and text that may begin one is held back until that is decided. A token costs the same
wherever it stands, because only the last few are decoded again.

The only module that imports transformers, and only when a tokenizer is loaded: the import takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from freight.errors import CheckpointError, ConfigError, RequestError
from freight.sampling import SamplingParams

_UNFINISHED = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character
_LONGEST_UNFINISHED = 3  # bytes of a UTF-8 character that can be there without the last one
_WINDOW = 24  # tokens decoded again at most, and
_KEPT = 12  # how many of them stay when it is full
_PROMPT_CONTEXT = 8  # last tokens of the prompt, which decide whether the completion begins with a space

_FILES = (  # one of these is in every folder with a tokenizer
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_OURS = ("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length", "chat_template")


class Tokenizer:
    """A model's tokenizer. `vocab_size` counts added tokens too; ids are in [0, vocab_size)."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a transformers tokenizer; `Tokenizer.load` makes one from a folder."""
        self._backend = backend
        self.vocab_size: int = len(backend)
        self.bos_token_id: int | None = backend.bos_token_id
        self.eos_token_id: int | None = backend.eos_token_id
        added = backend.added_tokens_decoder.items()
        self.special_token_ids: frozenset[int] = frozenset(token for token, value in added if value.special)

    @classmethod
    def load(
        cls, folder: str | Path, way_out: str = "skip_tokenizer_init=True runs without one, with token ids as prompts"
    ) -> Tokenizer:
        """Read the tokenizer in `folder`; nothing is downloaded.

        Raises CheckpointError when there is none to read, which ends with `way_out`.
        """
        path = Path(folder)
        if not any((path / name).is_file() for name in _FILES):
            raise CheckpointError(f"{path} has no tokenizer (one of {', '.join(_FILES)}); {way_out}")
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of many kinds: the parsers' own, and bare Exception
            raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}; {way_out}") from error
        return cls(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that the model wants around a text (BOS) unless told otherwise.

        Raises RequestError for text that is not Unicode (a lone surrogate).
        """
        _check_unicode(text)
        # Not verbose: a warning about the tokenizer's own length limit, which is not what limits the context.
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids that the tokenizer does not have (padding of the model's vocabulary) are empty.

        Raises RequestError for a negative id.
        """
        if any(token < 0 for token in token_ids):
            raise RequestError(f"token id {min(token_ids)} is negative; token ids count from 0")
        # The clean-up would remove spaces before punctuation, and only once the next token is known.
        return str(
            self._backend.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def has_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at this token at all."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        return self._backend.convert_ids_to_tokens(token_id) is not None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_values: Any,
    ) -> list[int]:
        """Token ids of a conversation as the model was trained to see it.

        messages: mappings with `role` and `content`, both strings. `template_values` (`tools`, `enable_thinking`, …)
        reach the template. The template writes BOS where the model wants it, so none is added. Raises ConfigError
        when the model has no template, RequestError for messages that are malformed or that the template refuses.
        """
        require_chat_template(self)
        _check_messages(messages)
        for name in _OURS:
            if name in template_values:
                raise RequestError(f"{name} is not an option of the chat template; what chat gives is always token ids")
        from jinja2 import TemplateError

        try:
            token_ids = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                **template_values,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        return list(token_ids)


def require_chat_template(tokenizer: Tokenizer | None) -> Tokenizer:
    """`tokenizer`; raises ConfigError unless one can converse with its model."""
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


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not Unicode: {error.reason} at character {error.start}") from error


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError('messages must be a list like [{"role": "user", "content": "Hello"}], not empty')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] is {message!r:.60}; it must have role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RequestError(f"messages[{index}].role is {role!r:.60}; it must be a string like 'user'")
        if not isinstance(content, str):
            raise RequestError(f"messages[{index}].content is {content!r:.60}; it must be a string")
        _check_unicode(role + content)


class Detokenizer:
    """The text of one completion, as its tokens come. `stop_reason` is the stop string that ended it, if one did."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        """With `prompt_token_ids`, the text continues the prompt's: "▁world" after "Hello" is " world".

        Without them it is as if the completion began a text, where some tokenizers drop the first space.
        """
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._stops = _StopStrings(params.stop)
        # Tokens decoded together, the first `_context` of them only because the text of the rest depends on what
        # precedes it, and the beginning of their text that is out already.
        self._window = self._end_of(prompt_token_ids)
        self._context = len(self._window)
        self._shown = self._decode(self._window)

    def append(self, token_ids: Sequence[int]) -> str:
        """Take in tokens and give out the text that is now certain. Nothing comes after a stop string."""
        released = []
        for token in token_ids:
            if self.stop_reason is not None:
                break
            self._num_tokens += 1
            text = self._advance(token) if self._has_text(token) else ""
            released.append(self._release(text))
        return "".join(released)

    def finish(self) -> str:
        """No more tokens come: give out what was held back, U+FFFD for bytes that never became a character."""
        if self.stop_reason is not None:
            return ""
        text, self._shown = self._decode(self._window)[len(self._shown) :], ""
        self._window, self._context = [], 0
        return self._release(text) + self._stops.flush()

    def _end_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, beginning and ending with whole characters; none if that cannot be had."""
        last = [token for token in prompt_token_ids[-_PROMPT_CONTEXT:] if self._has_text(token)]
        starts = range(min(len(last), _LONGEST_UNFINISHED + 1))
        return next((last[start:] for start in starts if _UNFINISHED not in self._decode(last[start:])), [])

    def _release(self, text: str) -> str:
        released, self.stop_reason = self._stops.feed(text, self._num_tokens > self._min_tokens)
        return released

    def _has_text(self, token: int) -> bool:
        return self._tokenizer.has_text(token, self._skip_special)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special)

    def _advance(self, token: int) -> str:
        """The text that becomes certain with `token`."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # A byte that begins no character makes some decoders give up the whole run of bytes before it, which is
            # out already. Bytes need no context.
            del self._window[: self._context]
            self._context, self._shown = 0, ""
            text = self._decode(self._window)
        certain = max(len(text.rstrip(_UNFINISHED)), len(text) - _LONGEST_UNFINISHED)
        new = text[len(self._shown) : certain]
        if new:
            self._shown = text[:certain]
        if new and certain == len(text):
            del self._window[: self._context]
            self._context, self._shown = len(self._window), self._decode(self._window)
        elif len(self._window) > _WINDOW:
            held = len(text) - len(self._shown)
            del self._window[:-_KEPT]
            kept = self._decode(self._window)
            self._context, self._shown = 0, kept[: max(0, len(kept) - held)]
        return new


class _StopStrings:
    """Finds the first of several strings in a text that comes in pieces, and holds back what may begin one.

    First is the one that ends first and, of those that end together, the longest: what reading character by
    character finds, so that pieces cut elsewhere give the same text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str, checked: bool) -> tuple[str, str | None]:
        """The text that is certain, and the stop string found. `checked` False: none may end within this piece."""
        settled = len(self._held)  # a stop string has to end behind this
        text = self._held + text
        self._held = ""
        if checked:
            found = [
                (begin + len(stop), begin, stop)
                for stop in self._stops
                if (begin := text.find(stop, max(0, settled + 1 - len(stop)))) >= 0
            ]
            if found:
                _, begin, stop = min(found)
                return text[:begin], stop
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`, without being all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
