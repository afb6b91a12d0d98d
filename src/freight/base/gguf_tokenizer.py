"""The tokenizer of a GGUF file: its metadata as the contents of tokenizer.json and
tokenizer_config.json, so that texts get llama.cpp's token ids.

- 'gpt2' is byte-level BPE: `tokenizer.ggml.pre` says how a text is divided before (`gguf_splits`).
- 'llama' is SentencePiece: two neighbours are joined when the result is a token, the best score
  first. In tokenizer.json that is BPE with a merge for every way to make a token of two.
- 'gemma4' is BPE on UTF-8, with ▁ for a space.

Control tokens and those for the unknown are special tokens. Tokens of the type user-defined are
found in texts too, but are ordinary text of an answer.

What `tokenizers` does otherwise than llama.cpp, in vocabularies that are not trained but made up:
tokens in texts that overlap (llama.cpp takes the longest first, here the first one counts), merges
of equal score (llama.cpp joins at the left first), and SentencePiece tokens of characters that are
no tokens themselves (they are never joined here).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from freight.base.fields import JsonDict
from freight.base.gguf_splits import DEFAULT, SplitRule, split_rule
from freight.errors import CheckpointError, shown

logger = logging.getLogger("freight")

# Types of tokens, in tokenizer.ggml.token_type
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4

_SPACE = "▁"
_WAY_OUT = "--tokenizer FOLDER takes a tokenizer.json"

# The names of special tokens in tokenizer_config.json, and their keys
_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
# What llama.cpp takes where the file does not say
_DEFAULT_IDS = {
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "gpt2": {"bos_token": 11, "eos_token": 11},
    "gemma4": {},
}
# What llama.cpp takes for a special token by its text, where the file does not name one: the keys, and the
# texts. Such a token is a control token, whatever its type.
_BY_TEXT = (
    (
        ("tokenizer.ggml.eot_token_id",),
        (
            *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
            *("<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>"),
            "<end_of_utterance>",
        ),
    ),
    (("tokenizer.ggml.eom_token_id",), ("<|eom_id|>",)),
    (
        ("tokenizer.ggml.prefix_token_id", "tokenizer.ggml.fim_pre_token_id"),
        (
            *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>"),
            *("▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
        ),
    ),
    (
        ("tokenizer.ggml.suffix_token_id", "tokenizer.ggml.fim_suf_token_id"),
        (
            *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>"),
            *("▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
        ),
    ),
    (
        ("tokenizer.ggml.middle_token_id", "tokenizer.ggml.fim_mid_token_id"),
        (
            *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>"),
            *("▁<MID>", "<|code_middle|>", "<|middle|>"),
        ),
    ),
    (
        ("tokenizer.ggml.fim_pad_token_id",),
        ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ),
    (
        ("tokenizer.ggml.fim_rep_token_id",),
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ),
    (("tokenizer.ggml.fim_sep_token_id",), ("<|file_sep|>",)),
)
# Of these keys, the tokens end an answer
_ENDS = (
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
)
# Tokens that end an answer by their text. They are control tokens, whatever their type.
_ENDS_BY_TEXT = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "[e~["),
)


def tokenizer_files(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the contents of tokenizer.json and tokenizer_config.json, by file name.

    metadata: of a GGUF file, arrays as lists. Raises CheckpointError for a tokenizer that Freight
    does not know, and for values that contradict each other.
    """
    vocabulary = _Vocabulary(metadata)
    return {
        "tokenizer.json": json.dumps(_tokenizer(vocabulary), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_config(vocabulary), ensure_ascii=False),
    }


def end_of_generation(metadata: Mapping[str, object]) -> list[int]:
    """Return the ids of the tokens that end an answer, as llama.cpp has them: EOS first, then by
    number. Raises CheckpointError as `tokenizer_files`.
    """
    vocabulary = _Vocabulary(metadata)
    eos = vocabulary.special["eos_token"]
    return sorted(vocabulary.ends, key=lambda token: (token != eos, token))


class _Vocabulary:
    """The tokens of a GGUF, and what llama.cpp takes them for."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.metadata = metadata
        self.model = _model(metadata)
        self.tokens = _tokens(metadata)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.tokens has {len(self.tokens) - len(self.ids)} texts twice; {_WAY_OUT}"
            )
        self.types = _numbers(metadata, "tokenizer.ggml.token_type", len(self.tokens))
        self.special = self._special_ids()
        by_key = self._ids_by_text()
        self.ends = self._ends(by_key)
        self.control = self._control_ids(by_key)

    @cached_property
    def rule(self) -> SplitRule:
        """How texts are divided. Raises CheckpointError for an unknown one: what the model computes
        and where it ends do not depend on it, so another tokenizer can be used.
        """
        return _rule(self.metadata, self.model)

    @cached_property
    def user_defined(self) -> frozenset[int]:
        """Tokens that are found in texts, and are no control tokens."""
        return frozenset(self._of_type(_USER_DEFINED)) - self.control

    def _special_ids(self) -> dict[str, int | None]:
        """Return the ids of special tokens by their names in tokenizer_config.json."""
        defaults = _DEFAULT_IDS[self.model]
        special: dict[str, int | None] = {}
        for name, key in _NAMED.items():
            special[name] = self._id(key)
            default = defaults.get(name)
            if special[name] is None and default is not None and default < len(self.tokens):
                special[name] = default
        if not self.rule.has_bos:
            special["bos_token"] = self._id(_NAMED["bos_token"])
        return special

    def _id(self, key: str) -> int | None:
        """Return a token id of the metadata; None without one, and for one that no token has, such
        as 2**32 - 1.
        """
        value = self.metadata.get(key)
        if isinstance(value, int) and 0 <= value < len(self.tokens):
            return value
        return None

    def _ids_by_text(self) -> dict[str, int]:
        """Return the token of each key of _BY_TEXT that has one, first by the key, then by its
        texts: the lowest id.
        """
        ids = {}
        for keys, texts in _BY_TEXT:
            declared = [token for key in keys if (token := self._id(key)) is not None]
            present = [self.ids[text] for text in texts if text in self.ids]
            if declared:
                ids[keys[0]] = declared[0]
            elif present:
                ids[keys[0]] = min(present)
        return ids

    def _ends(self, by_key: Mapping[str, int]) -> frozenset[int]:
        """Return the tokens that end an answer."""
        ends = {self.ids[text] for text in _ENDS_BY_TEXT if text in self.ids}
        ends.update(by_key[key] for key in _ENDS if key in by_key)
        eos = self.special["eos_token"]
        if eos is not None:
            ends.add(eos)
        texts = {self.tokens[token] for token in ends}
        calls = not texts.isdisjoint(("<|call|>", "<|calls|>"))
        if calls and not texts.isdisjoint(("<|return|>", "<|flush|>")):
            # In gpt-oss and Solar, it ends one message of several
            ends.discard(self.ids.get("<|end|>", -1))
        if "<|tool_response>" in texts:
            # In Gemma 4, it is the tag of HTML
            ends.discard(self.ids.get("</s>", -1))
        return frozenset(ends)

    def _control_ids(self, by_key: Mapping[str, int]) -> frozenset[int]:
        """Return the special tokens: by type, and by text."""
        control = {*self._of_type(_CONTROL), *self._of_type(_UNKNOWN)}
        for keys, texts in _BY_TEXT:
            token = by_key.get(keys[0], -1)
            if token >= 0 and self.tokens[token] in texts and self._id(keys[-1]) is None:
                control.add(token)
        control.update(self.ids[text] for text in _ENDS_BY_TEXT if text in self.ids)
        if "<|tool_response>" in self.ids:
            control.discard(self.ids.get("</s>", -1))
        return frozenset(control)

    def _of_type(self, wanted: int) -> list[int]:
        return [token for token, kind in enumerate(self.types) if kind == wanted]


def _model(metadata: Mapping[str, object]) -> str:
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise CheckpointError(f"the file has no tokenizer (tokenizer.ggml.model); {_WAY_OUT}")
    if not isinstance(model, str) or model not in _DEFAULT_IDS:
        raise CheckpointError(
            f"tokenizer.ggml.model is {shown(model)}; Freight knows {', '.join(_DEFAULT_IDS)}; {_WAY_OUT}"
        )
    return model


def _rule(metadata: Mapping[str, object], model: str) -> SplitRule:
    if model == "llama":
        return SplitRule((), add_bos=True, raw=True)
    pre = metadata.get("tokenizer.ggml.pre", "")
    if model == "gemma4":
        pre = "gemma4"
    if pre == "":
        logger.warning(
            "the file does not say how texts are divided before tokenization (tokenizer.ggml.pre): the rule 'default' "
            "is taken, as in llama.cpp, and answers may be worse"
        )
        return DEFAULT
    return split_rule(str(pre))


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    """Return the texts of all tokens. llama.cpp gives a name to one without text."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if "" in tokens:
        return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    return tokens


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not set(map(type, values)) <= {str}:
        raise CheckpointError(f"{key} is {shown(values)}; it must be a list of texts; {_WAY_OUT}")
    return values


def _numbers(metadata: Mapping[str, object], key: str, count: int) -> Sequence[float]:
    """Return a number for each token; none at all if the file has none."""
    values = metadata.get(key)
    if values is None:
        return ()
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        raise CheckpointError(f"{key} is {shown(values)}; it must be a list of numbers")
    if len(values) < count:
        raise CheckpointError(f"{key} has {len(values)} numbers for {count} tokens")
    return values


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is {shown(value)}; it must be true or false")
    return value


def _adds(vocabulary: _Vocabulary) -> dict[str, bool]:
    """Return whether BOS and EOS are put around a text."""
    metadata = vocabulary.metadata
    adds = {
        "bos_token": _flag(metadata, "tokenizer.ggml.add_bos_token", vocabulary.rule.add_bos),
        "eos_token": _flag(metadata, "tokenizer.ggml.add_eos_token", False),
    }
    # Published files of Gemma 4 say false, and its answers are broken without
    if vocabulary.rule is split_rule("gemma4"):
        adds["bos_token"] = True
    for name, added in adds.items():
        if added and vocabulary.special[name] is None:
            raise CheckpointError(
                f"tokenizer.ggml.add_{name} is true, but there is no token {_NAMED[name]}; {_WAY_OUT}"
            )
    return adds


def _config(vocabulary: _Vocabulary) -> JsonDict:
    """Return the content of tokenizer_config.json."""
    config: JsonDict = {"clean_up_tokenization_spaces": False}
    for name, token in vocabulary.special.items():
        # A name here would make an ordinary token special
        if token is not None and (token in vocabulary.control or token in vocabulary.user_defined):
            config[name] = vocabulary.tokens[token]
    for name, added in _adds(vocabulary).items():
        config[f"add_{name}"] = added
    templates = _templates(vocabulary.metadata)
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return config


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name."""
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        name = "default"
        if key != prefix:
            name = key.removeprefix(f"{prefix}.")
            if name == key:
                continue
        if not isinstance(value, str):
            raise CheckpointError(f"{key} is {shown(value)}; it must be a text")
        if value:
            templates[name] = value
    return templates


def _tokenizer(vocabulary: _Vocabulary) -> JsonDict:
    """Return the content of tokenizer.json."""
    rule = vocabulary.rule
    pre_tokenizer: JsonDict | None = None
    normalizer: JsonDict | None = None
    decoder: JsonDict = _BYTE_LEVEL
    if rule.raw:
        prefix = vocabulary.model == "llama" and _flag(
            vocabulary.metadata, "tokenizer.ggml.add_space_prefix", True
        )
        normalizer = _spaces_to_marks(prefix)
        decoder = _marks_to_spaces(prefix)
    if rule.expressions:
        pre_tokenizer = _pre_tokenizer(rule)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(vocabulary),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": rule.raw,
            "ignore_merges": rule.ignore_merges,
            "vocab": vocabulary.ids,
            "merges": _merges(vocabulary),
        },
    }


_BYTE_LEVEL: JsonDict = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


def _pre_tokenizer(rule: SplitRule) -> JsonDict:
    steps: list[JsonDict] = []
    for expression in rule.expressions:
        steps.append(
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    if not rule.raw:
        steps.append(_BYTE_LEVEL)
    return {"type": "Sequence", "pretokenizers": steps}


def _spaces_to_marks(prefix: bool) -> JsonDict:
    steps: list[JsonDict] = []
    if prefix:  # at the beginning of a text, and after each token that was found in it
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _marks_to_spaces(prefix: bool) -> JsonDict:
    steps: list[JsonDict] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _post_processor(vocabulary: _Vocabulary) -> JsonDict | None:
    """Return what puts BOS and EOS around a text."""
    adds = _adds(vocabulary)
    if not any(adds.values()):
        return None
    special: JsonDict = {}
    around: dict[str, list[JsonDict]] = {"bos_token": [], "eos_token": []}
    for name, added in adds.items():
        token = vocabulary.special[name]
        if added and token is not None:
            text = vocabulary.tokens[token]
            around[name] = [{"SpecialToken": {"id": text, "type_id": 0}}]
            special[text] = {"id": text, "ids": [token], "tokens": [text]}
    single: list[JsonDict] = [
        *around["bos_token"],
        {"Sequence": {"id": "A", "type_id": 0}},
        *around["eos_token"],
    ]
    second: list[JsonDict] = [
        *around["bos_token"],
        {"Sequence": {"id": "B", "type_id": 0}},
        *around["eos_token"],
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single + second,
        "special_tokens": special,
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[JsonDict]:
    """Return the tokens that are found in texts before anything else."""
    takes_left = _takes_left(vocabulary.metadata)
    added: list[JsonDict] = []
    for token in sorted(vocabulary.control | vocabulary.user_defined):
        text = vocabulary.tokens[token]
        added.append(
            {
                "id": token,
                "content": text,
                "single_word": False,
                "lstrip": text in takes_left,
                "rstrip": _takes_right(vocabulary.metadata, text),
                "normalized": False,
                "special": token in vocabulary.control,
            }
        )
    return added


def _takes_left(metadata: Mapping[str, object]) -> Collection[str]:
    """Return the tokens that take the spaces before them. No GGUF says so: llama.cpp goes by the
    names of models, here and below.
    """
    if metadata.get("tokenizer.ggml.pre") in ("jina-v2-de", "jina-v2-es", "jina-v2-code"):
        return ("<mask>",)
    if "modern-bert" in str(metadata.get("general.name", "")).lower():
        return ("[MASK]",)
    return ()


def _takes_right(metadata: Mapping[str, object], text: str) -> bool:
    """Return whether an added token takes the spaces after it."""
    name = str(metadata.get("general.name", "")).lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    return is_phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")


def _merges(vocabulary: _Vocabulary) -> list[str] | list[list[str]]:
    """Return the pairs that are joined, the first ones first: "▁t he"."""
    if vocabulary.model == "llama":
        merges = _merges_of_scores(vocabulary)
    else:
        merges = _merges_of_file(vocabulary)
    # The library takes such a text for the head line of a file, but not a list of two
    if any(token.startswith("#version") for token in vocabulary.tokens):
        return [merge.split(" ") for merge in merges]
    return merges


def _merges_of_file(vocabulary: _Vocabulary) -> list[str]:
    metadata = vocabulary.metadata
    key = "tokenizer.ggml.merges"
    if key not in metadata and metadata.get("tokenizer.ggml.pre") == "kimi-k2":
        return []
    ids = vocabulary.ids
    merges: dict[str, None] = {}  # the first of equal ones counts
    for merge in _strings(metadata, key):
        left, _, right = merge.partition(" ")
        # llama.cpp would join a pair that makes no token too, and lose its text. Of two, none has a space:
        # the texts to join have none.
        if left in ids and right in ids and left + right in ids and " " not in right:
            merges[merge] = None
    return list(merges)


def _merges_of_scores(vocabulary: _Vocabulary) -> list[str]:
    """Return each pair of tokens that makes a token, in the order of its scores.

    Of the pairs that make the same token, the one with the longer left part is first: of "aa", "a"
    and "aa", llama.cpp joins the left two.
    """
    ids = vocabulary.ids
    tokens = vocabulary.tokens
    scores = _numbers(vocabulary.metadata, "tokenizer.ggml.scores", len(tokens))
    order: Sequence[int] = range(len(tokens))
    if scores:
        order = sorted(order, key=lambda token: -scores[token])
    # Half a million merges of a million pairs in Gemma: one comprehension, and texts instead of tuples,
    # take half the time
    return [
        f"{left} {right}"
        for text in map(tokens.__getitem__, order)
        if " " not in text  # a text that is tokenized has ▁ instead
        for end in range(len(text) - 1, 0, -1)
        if (left := text[:end]) in ids and (right := text[end:]) in ids
    ]
