"""How llama.cpp divides a text before byte-pair encoding, by a GGUF's `tokenizer.ggml.pre`.

A rule is a list of expressions. Each divides the pieces that the one before it left: a match is a
piece, and so is what lies between two matches. The expressions here are written for the library
`tokenizers` (Oniguruma) and divide as llama.cpp does, also where the published tokenizer of a model
divides otherwise. Two causes of that:

- llama.cpp sees all letters as one class: of upper and lower case, only A-Z and a-z are left.
- An expression with a list of characters finds no white space beyond ASCII, even if it is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from freight.errors import CheckpointError, shown


@dataclass(frozen=True)
class SplitRule:
    """The rule of one `pre`."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token stays whole
    add_bos: bool = False  # where the file does not say add_bos_token
    has_bos: bool = True  # a model without bos_token_id has llama.cpp's default, 11
    raw: bool = False  # tokens are UTF-8 with ▁ for a space, instead of characters for bytes


_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_UPPER = r"[\p{L}&&[^a-z]]"
_LOWER = r"[\p{L}&&[^A-Z]]"
_MARKED_UPPER = r"[\p{L}\p{M}&&[^a-z]]"
_MARKED_LOWER = r"[\p{L}\p{M}&&[^A-Z]]"
_HAN = (
    "一-鿿㐀-䶿\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_OF_DEEPSEEK = r"[一-龥ࠀ-一가-\ud7ff&&[^\s]]+"
_LETTERS_OF_DEEPSEEK = (
    r"\s?["
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-"
    "ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-"
    "\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00-\ufb06\ufb13-\ufb17Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲"
    "𑢠-𑣟𞤀-𞥃"
    "]+"
)
# Groups of three digits from the right. llama.cpp leaves what is before a number with its first group.
# The lookbehinds keep the time linear: only a first group looks ahead, and no search begins elsewhere.
_DIGITS_FROM_RIGHT = (
    r"(?<=\p{N})\p{N}{3}|(?:\A|(?<=\p{N}))\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))"
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_SPACES}"
_DEEPSEEK3 = rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_NEWLINES = r"[^\n]+|\n+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _cased(upper: str, lower: str, ending: str) -> str:
    """Return the expression of words in which lower case does not come before upper case."""
    prefix = r"[^\r\n\p{L}\p{N}]?"
    return f"{prefix}{upper}*{lower}+{ending}|{prefix}{upper}+{lower}*{ending}"


_GPT4O_REST = rf"\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_LINES}|{_SPACES}"
_MARKED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?"

_RULE_OF_GPT2 = SplitRule((_GPT2,))
_RULE_OF_STARCODER = SplitRule((r"\p{N}", _GPT2))
_RULE_OF_LLAMA3 = SplitRule((_LLAMA3,), ignore_merges=True, add_bos=True)
_RULE_OF_SMAUG = SplitRule((_LLAMA3,))
_RULE_OF_QWEN2 = SplitRule((_QWEN2,))
_RULE_OF_BLOOM = SplitRule((_BLOOM,))
_RULE_OF_GPT4O = SplitRule((f"{_cased(_UPPER, _LOWER, f'{_CONTRACTION}?')}|{_GPT4O_REST}",))
_RULE_OF_TINY_AYA = SplitRule((_DIGITS_FROM_RIGHT, f"{_MARKED_WORD}|{_GPT4O_REST}"))
_RULE_OF_GLM4 = SplitRule((_LLAMA3,), ignore_merges=True, has_bos=False)
_RULE_OF_DEEPSEEK3 = SplitRule(
    (r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}")
)
_RULE_OF_BAILING = SplitRule(
    (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|{_SPACES}",)
)
_RULE_OF_GEMMA4 = SplitRule((_NEWLINES,), add_bos=True, raw=True)

DEFAULT = SplitRule(
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
)
RULES: Mapping[str, SplitRule] = {
    "default": DEFAULT,
    "a.x-4.0": _RULE_OF_GPT2,
    "afmoe": SplitRule(
        (
            _DIGITS_FROM_RIGHT,
            "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
            rf"{_DEEPSEEK3}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}",
        )
    ),
    "bailingmoe": _RULE_OF_BAILING,
    "bailingmoe2": _RULE_OF_BAILING,
    "bloom": _RULE_OF_BLOOM,
    "chameleon": SplitRule(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "chatglm-bpe": SplitRule((_LLAMA3,), has_bos=False),
    "codeshell": _RULE_OF_STARCODER,
    "cohere2moe": _RULE_OF_TINY_AYA,
    "command-r": _RULE_OF_STARCODER,
    "dbrx": _RULE_OF_SMAUG,
    "deepseek-coder": SplitRule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OF_DEEPSEEK, r"\p{N}")
    ),
    "deepseek-llm": SplitRule(
        (
            r"[\r\n]",
            _LETTERS_OF_DEEPSEEK,
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+\z",
            _CJK_OF_DEEPSEEK,
            r"\p{N}+",
        )
    ),
    "deepseek-r1-qwen": _RULE_OF_QWEN2,
    "deepseek-v3": _RULE_OF_DEEPSEEK3,
    "exaone": _RULE_OF_STARCODER,
    "exaone-moe": SplitRule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
        )
    ),
    "exaone4": _RULE_OF_GPT2,
    "f2llmv2": _RULE_OF_QWEN2,
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "falcon-h1": _RULE_OF_LLAMA3,
    "falcon3": _RULE_OF_LLAMA3,
    "gemma4": _RULE_OF_GEMMA4,
    "gigachat": _RULE_OF_GPT2,
    "glm4": _RULE_OF_GLM4,
    "glm5": _RULE_OF_GLM4,
    "gpt-2": _RULE_OF_GPT2,
    "gpt-4o": _RULE_OF_GPT4O,
    "gpt3-finnish": _RULE_OF_BLOOM,
    "granite-docling": _RULE_OF_GPT2,
    "granite-embed-multi-311m": _RULE_OF_GEMMA4,
    "granite-embed-multi-97m": SplitRule(
        (f"{_cased(_MARKED_UPPER, _MARKED_LOWER, f'{_CONTRACTION}?')}|{_GPT4O_REST}",),
        ignore_merges=True,
    ),
    "grok-2": _RULE_OF_QWEN2,
    "hunyuan": _RULE_OF_QWEN2,
    "hunyuan-dense": _RULE_OF_DEEPSEEK3,
    "hy_v4": _RULE_OF_DEEPSEEK3,
    "jais": _RULE_OF_GPT2,
    "jais-2": SplitRule(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|\s{{512}}(?!\S)|\s{{256}}(?!\S)"
            r"|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
            r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "jina-de": _RULE_OF_GPT2,
    "jina-es": _RULE_OF_GPT2,
    "jina-v1-en": _RULE_OF_GPT2,
    "jina-v2-code": _RULE_OF_GPT2,
    "jina-v2-de": _RULE_OF_GPT2,
    "jina-v2-es": _RULE_OF_GPT2,
    "jina-v5-nano": _RULE_OF_LLAMA3,
    "joyai-llm": _RULE_OF_DEEPSEEK3,
    "kanana2": _RULE_OF_GPT4O,
    "kimi-k2": SplitRule(
        (
            rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}"
            rf"|{_SIGNS}|{_LINES}|{_SPACES}",
        )
    ),
    "kormo": _RULE_OF_QWEN2,
    "laguna": SplitRule((_NEWLINES, _QWEN2)),
    "lfm2": _RULE_OF_LLAMA3,
    "llada-moe": _RULE_OF_BAILING,
    "llama-bpe": _RULE_OF_LLAMA3,
    "llama-v3": _RULE_OF_LLAMA3,
    "llama3": _RULE_OF_LLAMA3,
    "llama4": _RULE_OF_GPT4O,
    "megrez": _RULE_OF_QWEN2,
    "mellum": _RULE_OF_GPT2,
    "mellum2": _RULE_OF_STARCODER,
    "midm-2.0": _RULE_OF_LLAMA3,
    "minerva-7b": _RULE_OF_STARCODER,
    "minicpm5": SplitRule(
        (
            r"\p{N}{1,3}",
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_LINES}|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    "minimax-m2": _RULE_OF_GPT4O,
    "modern-bert": _RULE_OF_GPT2,
    "mpt": _RULE_OF_GPT2,
    "olmo": _RULE_OF_GPT2,
    "phi-2": _RULE_OF_GPT2,
    "pixtral": _RULE_OF_LLAMA3,
    "poro-chat": _RULE_OF_BLOOM,
    "qwen2": _RULE_OF_QWEN2,
    "qwen35": SplitRule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}",
        )
    ),
    "refact": _RULE_OF_STARCODER,
    "roberta-bpe": _RULE_OF_GPT2,
    "sarvam-moe": SplitRule((_NEWLINES,), raw=True),
    "seed-coder": SplitRule(
        (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}",)
    ),
    "smaug-bpe": _RULE_OF_SMAUG,
    "smollm": _RULE_OF_STARCODER,
    "solar-open": _RULE_OF_QWEN2,
    "spark2_5": SplitRule(
        (
            r"\p{N}{1,3}",
            _CJK,
            rf"{_DEEPSEEK3}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
            r"\p{N}",
        )
    ),
    "stablelm2": _RULE_OF_QWEN2,
    "starcoder": _RULE_OF_STARCODER,
    "superbpe": SplitRule((r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))")),
    "talkie": _RULE_OF_GPT4O,
    "tekken": SplitRule(
        (rf"{_cased(_UPPER, _LOWER, '')}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_LINES}|{_SPACES}",),
        ignore_merges=True,
        add_bos=True,
    ),
    "tiny_aya": _RULE_OF_TINY_AYA,
    "trillion": _RULE_OF_GPT2,
    "ufakzeka": SplitRule((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_SPACES}",)),
    "viking": SplitRule((_BLOOM, r"\p{N}")),
    "youtu": SplitRule(
        (
            rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|{_CJK}",
            rf"{_MARKED_WORD}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_LINES}|{_SPACES}",
        ),
        ignore_merges=True,
    ),
}


def split_rule(pre: str) -> SplitRule:
    """Return the rule of `tokenizer.ggml.pre`. Raises CheckpointError for one that is not known."""
    rule = RULES.get(pre)
    if rule is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {shown(pre)}, which Freight does not know, and any other rule would divide texts "
            "otherwise than the model learned; --tokenizer FOLDER takes a tokenizer.json"
        )
    return rule
