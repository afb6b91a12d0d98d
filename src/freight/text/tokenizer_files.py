"""Readers of a tokenizer's files, if there is a tokenizer.json, in their order of precedence.

`tokenizer.py` states the rules.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from freight.base.fields import JsonDict, JsonObject
from freight.base.files import outside, read_text
from freight.base.gguf import read_gguf
from freight.base.gguf_tokenizer import tokenizer_files
from freight.base.patterns import FilePattern
from freight.errors import CheckpointError, shown

logger = logging.getLogger("freight")


@dataclass(frozen=True)
class TokenizerParts:
    """What a folder has of a tokenizer. special_tokens: by name; chat_template: one, or several by
    name.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    chat_template: str | dict[str, str] | None
    response_template: JsonObject | None


MOST_GROWTH = 64  # published normalizers write one character for one, and byte-level ones four
_GROWTH = {"ByteLevel": 4.0, "BertNormalizer": 3.0, "Precompiled": 4.0}

# Files whose text is a chat template or tokens, whatever it says. tokenizer.json and *.model have a
# form that no other file has.
_PLAIN = (
    *("*.jinja", "additional_chat_templates/*.jinja", "chat_template.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "*.tiktoken"),
)
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def require_own_files(path: Path) -> None:
    """Raise CheckpointError for a file of `path` whose text is a chat template or tokens, and that is
    a link to a place outside of the folder: clients can ask for what it holds. In JSON, every text
    under a name that ends in _token is a token, also in a file of passwords.

    A link in a snapshot of the hub's cache to its blobs is inside (`files.outside`).
    """
    for pattern in _PLAIN:
        for file in sorted(path.glob(pattern)):
            target = outside(path, file)
            if target is not None:
                raise CheckpointError(
                    f"{path}: {shown(file.name)} is a link to {shown(str(target))}, outside of the tokenizer's folder, "
                    "and clients can ask for what it holds: put a copy of the file in its place"
                )


def require_own_names(path: Path) -> None:
    """Raise CheckpointError where tokenizer_config.json in `path` names a file outside of the folder
    as its vocabulary: transformers opens whatever file is there.
    """
    for name, value in _read_json(path / "tokenizer_config.json").items():
        is_path = name in ("vocab", "merges") or name.endswith(
            ("vocab_file", "merges_file", "tokenizer_file")
        )
        if (
            is_path
            and isinstance(value, str)
            and os.path.exists(value)
            and outside(path, Path(value))
        ):
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: {shown(name)} is {shown(value)}, a file outside of the tokenizer's "
                "folder, and clients can ask for what it holds: remove the key, or put a copy of the file there"
            )


def read_files(path: Path) -> TokenizerParts:
    """Read tokenizer.json, and what the other files add to it. Raises CheckpointError for one that
    cannot be read.
    """
    file = path / "tokenizer.json"
    try:
        text = read_text(file)
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the tokenizer in {file} cannot be read: {error}") from error
    # Before the library reads it, which normalizes the added tokens
    if isinstance(content, dict):
        check_growth(content, file)
    config = _read_json(path / "tokenizer_config.json")
    template = _chat_template(path, config)
    # The older files count only without added_tokens_decoder, as in transformers
    if "added_tokens_decoder" not in config:
        config |= _read_json(path / "special_tokens_map.json")
    added = _read_json(path / "added_tokens.json")
    return _make_parts(path, _backend(text, file), config, added, template)


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer of a GGUF file. Raises CheckpointError for one that cannot be read."""
    metadata = read_gguf(path).metadata
    try:
        files = tokenizer_files(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}") from error
    config = json.loads(files["tokenizer_config.json"])
    template = _chat_template(path, config)
    return _make_parts(path, _backend(files["tokenizer.json"], path), config, {}, template)


def _backend(text: str, file: Path) -> Backend:
    """Make the library's tokenizer of the text of a tokenizer.json."""
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"the tokenizer in {file} cannot be read: {error}") from error


def _make_parts(
    path: Path,
    backend: Backend,
    config: JsonDict,
    added_tokens: JsonObject,
    template: str | dict[str, str] | None,
) -> TokenizerParts:
    """Add to `backend` the tokens that the other files name. path: for messages."""
    try:
        special_tokens = {
            name: _content(config[name]) for name in _NAMED if config.get(name) is not None
        }
        missing = _named_tokens(config, added_tokens, special_tokens)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the special tokens in {path / 'tokenizer_config.json'} or the files next to it cannot be read: {error!r}"
        ) from error
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in missing:
        if token.content not in known:
            known.add(token.content)
            backend.add_tokens([token])
    _compare_bos(backend, config, special_tokens, path)
    return TokenizerParts(backend, special_tokens, template, _response_template(config))


def check_growth(content: JsonObject, file: Path) -> None:
    """Raise CheckpointError for a tokenizer.json that makes a text, or the text of tokens, more
    than MOST_GROWTH times as long: a few replacements after each other would take all memory.
    """
    for part, growth_of in (
        ("normalizer", _growth),
        ("decoder", _growth),
        ("post_processor", _num_pieces),
    ):
        growth = growth_of(content.get(part))
        if growth > MOST_GROWTH:
            raise CheckpointError(
                f"{file}: {part} makes texts up to {growth:.3g} times as long; at most {MOST_GROWTH} times is read"
            )


def _growth(step: object) -> float:
    """Return how many times as long a normalizer or a decoder makes a text, at most."""
    if not isinstance(step, Mapping):
        return 1.0
    kind = step.get("type")
    if kind == "Sequence":
        steps = step.get("normalizers", step.get("decoders"))
        if not isinstance(steps, list):
            return 1.0
        return math.prod(map(_growth, steps))
    if kind == "Replace":
        return _growth_of_replace(step.get("pattern"), str(step.get("content", "")))
    if kind == "Prepend":
        return max(1.0, len(str(step.get("prepend", ""))) / 16)
    return _GROWTH.get(str(kind), 1.0)


def _growth_of_replace(pattern: object, content: str) -> float:
    """Return the growth by a replacement: of a text, or of all that an expression matches, which
    may be nothing at all before each character.
    """
    if not isinstance(pattern, Mapping):
        return 1.0
    text = pattern.get("String")
    if text == "":
        return len(content) + 1.0
    if isinstance(text, str):
        return max(1.0, len(content) / len(text))
    expression = str(pattern.get("Regex", ""))
    try:
        matches_nothing = FilePattern(expression, "tokenizer.json").search("")
    except CheckpointError:  # the library has a syntax of its own
        matches_nothing = True
    return max(1.0, float(len(content) + matches_nothing))


def _num_pieces(step: object) -> float:
    """Return how many times a post-processor repeats the tokens of a text, at most; single special
    tokens count too.
    """
    if not isinstance(step, Mapping):
        return 1.0
    steps = step.get("processors")
    if isinstance(steps, list):
        return math.prod(map(_num_pieces, steps))
    single = step.get("single")
    if not isinstance(single, list):
        return 1.0
    return max(1.0, float(len(single)))


def _named_tokens(
    config: JsonObject, older: JsonObject, special_tokens: Mapping[str, str]
) -> list[AddedToken]:
    """Return all tokens that the other files name, in the order in which transformers adds them."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        extra = extra.values()
    special = [*special_tokens.values()]
    for name, value in config.items():
        if name.endswith("_token") and isinstance(value, str):
            special.append(value)
    special += map(_content, extra)
    declared = config.get("added_tokens_decoder")
    tokens: list[AddedToken] = []
    if declared is None:
        for name in sorted(older, key=lambda name: int(older[name])):
            tokens.append(_added(name, {"special": name in special}))
    else:
        for key in sorted(declared, key=int):
            tokens.append(_added(declared[key]["content"], declared[key]))
    for content in special:
        tokens.append(_added(content, {"special": True}))
    return tokens


def _added(content: str, flags: JsonObject) -> AddedToken:
    special = bool(flags.get("special", False))
    return AddedToken(
        content,
        special=special,
        single_word=bool(flags.get("single_word", False)),
        lstrip=bool(flags.get("lstrip", False)),
        rstrip=bool(flags.get("rstrip", False)),
        normalized=bool(flags.get("normalized", not special)),
    )


def _content(token: object) -> str:
    """Return the text of a special token, which files give as a string or as {"content": …}."""
    content = token["content"] if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TypeError(f"{token!r:.60} is not a token")
    return content


def _compare_bos(
    backend: Backend, config: JsonObject, special_tokens: Mapping[str, str], path: Path
) -> None:
    """Log where `add_bos_token` or `add_eos_token` contradicts tokenizer.json."""
    for option, name, index in (
        ("add_bos_token", "bos_token", 0),
        ("add_eos_token", "eos_token", -1),
    ):
        declared = config.get(option)
        if name not in special_tokens or not isinstance(declared, bool):
            continue
        try:
            around = backend.encode("a", add_special_tokens=True).ids
        except Exception:  # a vocabulary without "a" and without a token for the unknown
            return
        token = special_tokens[name]
        added = bool(around) and around[index] == backend.token_to_id(token)
        if added != declared:
            logger.warning(
                "%s: tokenizer_config.json says %s %s, tokenizer.json %s; Freight follows tokenizer.json",
                path,
                option,
                str(declared).lower(),
                f"adds {token}" if added else "adds none",
            )


def _chat_template(path: Path, config: JsonObject) -> str | dict[str, str] | None:
    """Read the chat template: separate files come before tokenizer_config.json, and that before
    chat_template.json.
    """
    named: dict[str, str] = {}
    try:
        for file in path.glob("additional_chat_templates/*.jinja"):
            named[file.stem] = read_text(file)
        if (path / "chat_template.jinja").is_file():
            named["default"] = read_text(path / "chat_template.jinja")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"a chat template in {path} cannot be read: {error}") from error
    if named.keys() == {"default"}:
        return named["default"]
    if named:
        return named
    templates = config.get("chat_template")
    if not templates:
        templates = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(templates, list) and set(map(type, templates)) <= {dict}:
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    texts = [templates or ""]
    if isinstance(templates, dict):
        texts = [*templates, *templates.values()]
    if not set(map(type, texts)) <= {str}:
        raise CheckpointError(
            f"the chat_template of {path} is {templates!r:.60}; it must be a string, or several with names"
        )
    return templates


def _response_template(config: JsonObject) -> JsonObject | None:
    """Return the response template; None for anything but an object.

    The commands that use it report a fault: a tokenizer is usable without it.
    """
    template = config.get("response_template")
    if isinstance(template, dict):
        return template
    return None


def _read_json(file: Path) -> JsonDict:
    """Read the object in `file`; empty if there is no file."""
    if not os.path.lexists(file):
        return {}
    try:
        value = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is {value!r:.60}; it must be a JSON object")
    return value
