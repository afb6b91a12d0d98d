"""A prompt is tokenized as the folder's tokenizer.json says: against the `tokenizers` library with
that very file.
"""

from __future__ import annotations

import json
import random

import pytest
from tests.shares import examples, one_in
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Built

from freight.text.tokenizer import Tokenizer

CLASSES = [  # tokenizer_class of tokenizer_config.json and model_type of config.json
    ("LlamaTokenizer", "llama"),
    ("LlamaTokenizerFast", "llama"),
    ("LlamaTokenizerFast", "mistral"),
    ("GPT2Tokenizer", "llama"),
    ("Qwen2Tokenizer", "qwen2"),
    ("PreTrainedTokenizerFast", "qwen2"),
    ("PreTrainedTokenizerFast", "llama"),
    ("Qwen2TokenizerFast", "qwen3"),
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
)
LLAMA_3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "the in then main thing 12345 67 890 def main():\n    return 0\n\n",
    "你好世界 hello  world, naïve café – done. 😀😃 It's they're we'll",
    "for i in range(10):\n\tprint(i)   # the\r\n",
] * 6


def byte_level(split=None, digits=False):
    built = Built(models.BPE())
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split:
        steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    built.pre_tokenizer = pre_tokenizers.Sequence(steps)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=ALPHABET, special_tokens=SPECIAL, show_progress=False
    )
    built.train_from_iterator(CORPUS, trainer)
    return built


def sentencepiece(dummy_prefix=True):
    """As Llama 2's: no pre-tokenizer, spaces become ▁ in the normalizer, bytes for what is not in
    the vocabulary.
    """
    pieces = [*SPECIAL, *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz.:()0123456789\n", "你"]
    merges = [
        ("▁", "▁"),
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("i", "n"),
        ("▁▁", "▁▁"),
        ("▁", "in"),
        ("t", "he"),
    ]
    pieces += [piece for pair in merges if (piece := "".join(pair)) not in pieces]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    built = Built(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    built.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if dummy_prefix else replace
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if dummy_prefix else steps
    )
    return built


def metaspace():
    built = Built(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    built.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    )
    return built


def unigram():
    built = Built(models.Unigram())
    built.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    built.train_from_iterator(CORPUS, trainer)
    return built


def word_piece():
    built = Built(models.WordPiece(unk_token="<unk>"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer, built.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    built.train_from_iterator(CORPUS, trainer)
    return built


def word_level():
    built = Built(models.WordLevel(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.train_from_iterator(
        CORPUS, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    )
    return built


def limited():
    """Truncation and padding in the file, which are for training."""
    built = byte_level()
    built.enable_truncation(4)
    built.enable_padding(length=32)
    return built


KINDS = {
    "byte-level of GPT-2": (byte_level, "bos"),
    "byte-level of Llama 3": (lambda: byte_level(LLAMA_3), "bos"),
    "byte-level of DeepSeek, single digits": (lambda: byte_level(digits=True), "none"),
    "SentencePiece of Llama 2": (sentencepiece, "bos"),
    "SentencePiece without dummy prefix": (lambda: sentencepiece(False), "bos and eos"),
    "metaspace": (metaspace, "none"),
    "unigram": (unigram, "eos"),
    "WordPiece": (word_piece, "bos and eos"),
    "WordLevel": (word_level, "none"),
    "truncated and padded": (limited, "bos"),
}
AROUND = {"bos": "<s> $A", "eos": "$A </s>", "bos and eos": "<s> $A </s>"}


def random_texts(count):
    draw = random.Random(7)
    parts = [
        *" \n\t.,:;()'\"#_-=/<>|",
        *"  \n",
        *["  ", "    ", " \n", "\r\n", "\n\n\n", "\u00a0", "\u3000"],
        *[
            "the",
            " the",
            "in",
            " in",
            "main():\n",
            "def ",
            "return 0",
            "hello",
            "It's",
            "THE",
            "naïve",
            "ﬁ",
        ],
        *[
            "0",
            "12345",
            "67",
            " 8",
            "3.14",
            "你好",
            "世界",
            "한국",
            "e\u0301",
            "\u0301",
            "\u200d",
            "𝄞",
            "\x00",
        ],
        *["😀", "👩\u200d👩\u200d👧", "🏳\ufe0f\u200d🌈"],
        *[*SPECIAL, "<tool>", "<s", "▁", "Ġ", "<0x41>", "[PAD]"],
    ]
    letters = "".join(chr(code) for code in range(32, 127))
    texts = ["", " ", "  the in", "the in", "12345", "main():\n", "def main():\n    return 0"]
    while len(texts) < count:
        words = draw.choices(parts, k=draw.randint(1, 12))
        texts.append(
            "".join(word if draw.random() < 0.8 else draw.choice(letters) for word in words)
        )
    return texts


TEXTS = random_texts(examples(2000))


@pytest.fixture(scope="module", params=KINDS, ids=str)
def oracle(request, tmp_path_factory):
    """The folder of a tokenizer.json, and what the library does with the file: ids with BOS,
    without, and texts.
    """
    build, around = KINDS[request.param]
    built = build()
    if around in AROUND:
        ids = [(token, built.token_to_id(token)) for token in ("<s>", "</s>")]
        built.post_processor = processors.TemplateProcessing(
            single=AROUND[around], special_tokens=ids
        )
    built.add_special_tokens(SPECIAL)
    built.add_tokens([AddedToken("<tool>", special=False, lstrip=True)])
    folder = tmp_path_factory.mktemp("kind")
    built.save(str(folder / "tokenizer.json"))
    library = Built.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    encoded = [library.encode(text).ids for text in TEXTS]
    bare = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    decoded = (
        [library.decode(ids) for ids in encoded],
        [library.decode(ids, False) for ids in encoded],
    )
    return folder, (encoded, bare, *decoded)


@pytest.mark.parametrize(("tokenizer_class", "model_type"), one_in(3, CLASSES))
def test_ids_and_text_are_those_of_the_file_whatever_the_class(oracle, tokenizer_class, model_type):
    folder, expected = oracle
    config = {
        "tokenizer_class": tokenizer_class,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer.load(folder)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    decoded = (
        [tokenizer.decode(ids) for ids in encoded],
        [tokenizer.decode(ids, False) for ids in encoded],
    )
    for mine, theirs in zip((encoded, bare, *decoded), expected, strict=True):
        assert [text for text, a, b in zip(TEXTS, mine, theirs, strict=True) if a != b] == []
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
