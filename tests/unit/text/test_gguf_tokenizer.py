"""Tokenizers of GGUF files: the ids that llama.cpp gives, in vocabularies of a few tokens."""

from __future__ import annotations

import json
import logging
import struct

import pytest
from tests.refusals import assert_names
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from freight.base.gguf_splits import RULES
from freight.base.gguf_tokenizer import end_of_generation, tokenizer_files
from freight.errors import CheckpointError
from freight.sampling import SamplingParams
from freight.text.detokenizer import Detokenizer
from freight.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6

TEXT = "I'LL x=<y>~ 1234567,9 fooBAR a\u0301b ÉTé 中文カ…。\r\n\n\t  end's  12  "
# The pieces of TEXT, as llama.cpp divides it: the values of `pre`
SPLITS = {
    "I|'|LL| x|=<|y|>~| 1234567|,|9| fooBAR| a|\u0301|b| ÉTé| 中文カ|…。|\r\n\n\t | end|'s| | 12|  ": (
        "a.x-4.0 exaone4 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v1-en jina-v2-code jina-v2-de "
        "jina-v2-es mellum modern-bert mpt olmo phi-2 roberta-bpe trillion"
    ),
    "I|'LL| x|=<|y|>~| |1|234|567|,|9| fooBAR| a\u0301b| ÉTé| |中文カ|…。\r\n\n|\t | end|'s| | |12|  ": "afmoe",
    "I|'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR| a|\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end|'s| | |1|2|  ": (
        "bailingmoe bailingmoe2 deepseek-r1-qwen f2llmv2 grok-2 hunyuan kormo llada-moe megrez qwen2 solar-open "
        "stablelm2 ufakzeka"
    ),
    "I'LL| x=<y>~| 1234567|,|9| fooBAR| a\u0301b| ÉTé| 中文カ|…。\r\n\n\t | end's| | 12|  ": (
        "bloom gpt3-finnish poro-chat"
    ),
    (
        "I|'|LL| x|=|<|y|>|~| |1|2|3|4|5|6|7|,|9| fooBAR| a|\u0301|b| ÉTé| 中文カ|…|。|\r|\n|\n|\t|  |end|'|s"
        "|  |1|2|  "
    ): "chameleon",
    "I|'LL| x|=<|y|>~| |123|456|7|,|9| fooBAR| a|\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end|'s| | |12|  ": (
        "chatglm-bpe dbrx falcon-h1 falcon3 glm4 glm5 jais-2 jina-v5-nano lfm2 llama-bpe llama-v3 llama3 midm-2.0 "
        "pixtral smaug-bpe"
    ),
    "I|'|LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR| a|\u0301|b| ÉTé| 中文カ|…。|\r\n\n\t | end|'s|  |1|2|  ": (
        "codeshell command-r exaone mellum2 minerva-7b refact smollm starcoder"
    ),
    "I'LL| x|=<|y|>~| |1|234|567|,|9| fooBAR| a\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end's| | |12|  ": (
        "cohere2moe tiny_aya"
    ),
    (
        "I|'|LL| x|=<|y|>~ |1|2|3|4|5|6|7|,|9| fooBAR| a|\u0301|b| ÉTé| |中文カ|…。|\r|\n|\n|\t | end|'|s"
        "|  |1|2|  "
    ): "deepseek-coder",
    (
        "I|'|LL| x|=<|y|>~| |1234567|,|9| fooBAR| a|\u0301|b| É|T|é| |中文カ…|。|\r|\n|\n|\t | end|'|s|  |12|  "
    ): "deepseek-llm",
    "I|'LL| x|=<|y|>~| |123|456|7|,|9| fooBAR| a\u0301b| ÉTé| |中文カ|…。\r\n\n|\t | end|'s|  |12|  ": (
        "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"
    ),
    (
        "I|'|LL| x|=<|y|>~| |123|456|7|,|9| fooBAR| a|\u0301|b| ÉTé| 中文カ|…。|\r\n\n\t | end|'|s| | |12|  "
    ): "default",
    "I|'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR a\u0301b ÉTé 中文カ|…。\r|\n\n|\t | end|'s| | |1|2|  ": (
        "exaone-moe"
    ),
    (
        "I|'|LL| x|=<|y|>~| |123|456|7|,|9| fooBAR| a|\u0301|b| ÉTé| 中文カ|…。|\r\n\n\t | end|'|s| | 12|  "
    ): "falcon",
    "I'LL x=<y>~ 1234567,9 fooBAR a\u0301b ÉTé 中文カ…。\r|\n\n|\t  end's  12  ": (
        "gemma4 granite-embed-multi-311m sarvam-moe"
    ),
    "I'LL| x|=<|y|>~| |123|456|7|,|9| foo|BAR| a|\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end's| | |12|  ": (
        "gpt-4o kanana2 llama4 minimax-m2 talkie"
    ),
    "I'LL| x|=<|y|>~| |123|456|7|,|9| foo|BAR| a\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end's| | |12|  ": (
        "granite-embed-multi-97m"
    ),
    "I'LL| x|=<|y|>~| |123|456|7|,|9| fooBAR| a|\u0301b| ÉTé| |中文|カ|…。\r\n\n|\t | end's| | |12|  ": "kimi-k2",
    "I|'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR| a|\u0301b| ÉTé| 中文カ|…。\r|\n\n|\t | end|'s| | |1|2|  ": (
        "laguna"
    ),
    "I|'LL| x|=<|y|>~| |123|456|7|,|9| fooBAR| a|\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end|'s|  |12|  ": "minicpm5",
    "I|'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR| a\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end|'s| | |1|2|  ": "qwen35",
    "I|'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR| a|\u0301b| ÉTé| 中文カ|…。|\r\n\n|\t | end|'s| | |1|2|  ": (
        "seed-coder"
    ),
    (
        "I|'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR| a\u0301b| ÉTé| |中文カ|…。|\r|\n|\n|\t | end|'s|  |1|2|  "
    ): "spark2_5",
    "I'LL x=<y>~ |1|234|567|,|9| fooBAR a\u0301b ÉTé 中文カ…。\r\n\n\t  end's  |12|  ": "superbpe",
    "I|'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| foo|BAR| a|\u0301b| ÉTé| 中文カ|…。\r\n\n|\t | end|'s| | |1|2|  ": (
        "tekken"
    ),
    "I'LL| x=<y>~| |1|2|3|4|5|6|7|,|9| fooBAR| a\u0301b| ÉTé| 中文カ|…。\r\n\n\t | end's| | |1|2|  ": "viking",
    "I'LL| x|=<|y|>~| |1|2|3|4|5|6|7|,|9| fooBAR| a\u0301b| ÉTé| |中文カ|…。|\r\n\n|\t | end's| | |1|2|  ": "youtu",
}


def byte_level(*more, pre="gpt-2", merges=(), **keys):
    """Metadata of byte-level BPE: 256 bytes, then the products of `merges`, then `more` tokens, each
    with its type.
    """
    products = [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*ALPHABET, *products, *(text for text, _ in more)],
        "tokenizer.ggml.token_type": [
            *[NORMAL] * (len(ALPHABET) + len(products)),
            *(kind for _, kind in more),
        ],
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def sentencepiece(*more, model="llama", **keys):
    """Metadata of SentencePiece: <unk>, <s>, </s>, the 256 bytes at 3, then `more` tokens, each with
    its score and, if it is not ordinary, its type.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [*tokens, *(token[0] for token in more)],
        "tokenizer.ggml.token_type": [
            *types,
            *(dict(enumerate(token)).get(2, NORMAL) for token in more),
        ],
        "tokenizer.ggml.scores": [*[0.0] * 259, *(token[1] for token in more)],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def load(folder, metadata):
    for name, content in tokenizer_files(metadata).items():
        (folder / name).write_text(content)
    return Tokenizer.load(folder)


def texts(tokenizer, text, **options):
    """The vocabulary's entries of a text's tokens."""
    return [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text, **options)]


def test_every_rule_has_its_literal_split():
    assert sorted(" ".join(SPLITS.values()).split()) == sorted(RULES)


@pytest.mark.parametrize("pieces", SPLITS, ids=lambda pieces: SPLITS[pieces].split()[0])
def test_text_is_divided_as_llama_cpp_divides_it(pieces):
    for pre in SPLITS[pieces].split():
        backend = Backend.from_str(
            tokenizer_files(byte_level(("<s>", CONTROL), pre=pre, bos_token_id=256))[
                "tokenizer.json"
            ]
        )
        spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(TEXT)]
        assert "|".join(TEXT[begin:end] for begin, end in spans) == pieces, pre


def test_long_number_and_text_without_numbers_take_linear_time():
    backend = Backend.from_str(tokenizer_files(byte_level(pre="afmoe"))["tokenizer.json"])
    assert len(backend.pre_tokenizer.pre_tokenize_str("x-" * 50_000)) == 50_001
    assert len(backend.pre_tokenizer.pre_tokenize_str("7" * 90_001)) == 30_001


def test_unknown_pre_is_refused_with_the_way_out():
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files(byte_level(pre="novel-bpe"))
    assert_names(str(caught.value), "tokenizer.ggml.pre", "novel-bpe", "--tokenizer FOLDER")


@pytest.mark.parametrize(
    "model", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace", "no_vocab", 3]
)
def test_other_models_are_refused_by_name(model):
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files({**byte_level(), "tokenizer.ggml.model": model})
    assert_names(str(caught.value), "tokenizer.ggml.model", str(model), "--tokenizer FOLDER")


def test_file_without_tokenizer_is_refused():
    with pytest.raises(CheckpointError, match=r"no tokenizer .*--tokenizer FOLDER"):
        tokenizer_files({})


def test_missing_pre_is_default_with_a_warning(tmp_path, caplog):
    metadata = byte_level(merges=["1 2"])
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING, "freight"):
        tokenizer = load(tmp_path, metadata)
    assert "tokenizer.ggml.pre" in caplog.text
    assert texts(tokenizer, "1212") == ["12", "1", "2"]  # three digits, then the rest


def test_merges_join_in_their_order_and_an_equal_one_counts_once(tmp_path):
    tokenizer = load(tmp_path, byte_level(merges=["b c", "Ġ a", "a b", "a bc"]))
    assert texts(tokenizer, "abc ab") == ["abc", "Ġa", "b"]
    metadata = byte_level(merges=["a b", "b c"])
    metadata["tokenizer.ggml.merges"] += ["a b", "q r", "a  b", " a b", "", "ab"]
    assert texts(load(tmp_path, metadata), "abc") == ["ab", "c"]


def test_token_named_as_a_head_line_is_joined(tmp_path):
    merges = ["# v", "#v e", "#ve r", "#ver s", "#vers i", "#versi o", "#versio n", "#version 3"]
    tokenizer = load(tmp_path, byte_level(merges=merges, pre="superbpe"))
    assert texts(tokenizer, "#version") == ["#version"]
    metadata = byte_level(merges=merges, pre="bloom")
    assert texts(load(tmp_path, metadata), "#version3") == ["#version3"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("gpt-2", ["ab", "c"])])
def test_piece_that_is_a_token_stays_whole_where_merges_are_ignored(tmp_path, pre, expected):
    metadata = byte_level(
        ("abc", NORMAL), ("<s>", CONTROL), pre=pre, merges=["a b"], bos_token_id=258
    )
    assert texts(load(tmp_path, metadata), "abc", add_special_tokens=False) == expected


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    metadata = byte_level(
        ("<|a|>", CONTROL), ("<b>", USER_DEFINED), ("<u>", UNKNOWN), ("<n>", NORMAL)
    )
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.special_token_ids == {256, 258}
    assert tokenizer.encode("<|a|><b>x<u>") == [256, 257, ALPHABET.index("x"), 258]
    assert texts(tokenizer, "<n>") == ["<", "n", ">"]
    assert tokenizer.decode([256, 257, 259]) == "<b><n>"
    tokenizer.backend.encode_special_tokens = True  # no control tokens from texts
    assert texts(tokenizer, "<|a|><b>") == [*"<|a|>", "<b>"]


@pytest.mark.parametrize(
    ("pre", "declared", "expected"),
    [
        ("gpt-2", None, [1]),
        ("llama-bpe", None, [256, 1]),
        ("tekken", None, [256, 1]),
        ("chameleon", None, [256, 1]),
        ("llama-bpe", False, [1]),
        ("gpt-2", True, [256, 1]),
    ],
)
def test_bos_is_added_as_the_file_says_or_else_by_the_rule(tmp_path, pre, declared, expected):
    metadata = byte_level(("<s>", CONTROL), pre=pre, bos_token_id=256)
    if declared is not None:
        metadata["tokenizer.ggml.add_bos_token"] = declared
    assert load(tmp_path, metadata).encode(ALPHABET[1]) == expected


def test_eos_is_added_where_the_file_says_so(tmp_path):
    metadata = byte_level(("</s>", CONTROL), eos_token_id=256, add_eos_token=True)
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.encode("!") == [ALPHABET.index("!"), 256]
    assert tokenizer.eos_token_id == 256


def test_bos_that_no_token_has_is_refused():
    metadata = byte_level(pre="glm4", add_bos_token=True)
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files(metadata)
    assert_names(str(caught.value), "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id")


def test_default_id_of_llama_cpp_makes_no_ordinary_token_special(tmp_path):
    tokenizer = load(tmp_path, byte_level())  # 11 is a sign
    assert tokenizer.special_token_ids == frozenset()
    assert tokenizer.eos_token_id is None
    assert end_of_generation(byte_level()) == [11]


def test_byte_level_text_comes_back(tmp_path):
    tokenizer = load(tmp_path, byte_level(("    ", USER_DEFINED), merges=["Ġ t", "Ã ©"]))
    text = "té t中文\n\n    x\u2028😀 </s>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_best_score_is_joined_first(tmp_path):
    metadata = sentencepiece(
        *(
            ("▁", -9.0),
            ("a", -9.0),
            ("b", -9.0),
            ("c", -9.0),
            ("ab", -3.0),
            ("bc", -2.0),
            ("▁a", -4.0),
        ),
        ("abc", -5.0),
    )
    tokenizer = load(tmp_path, metadata)
    assert texts(tokenizer, "abc") == ["<s>", "▁a", "bc"]
    assert texts(tokenizer, "abab") == ["<s>", "▁", "ab", "ab"]
    metadata["tokenizer.ggml.scores"][-2] = -1.0
    assert texts(load(tmp_path, metadata), "abc b") == ["<s>", "▁a", "bc", "▁", "b"]


def test_of_equal_scores_the_left_pair_is_joined(tmp_path):
    metadata = sentencepiece(
        ("a", -9.0), ("b", -9.0), ("aa", -1.0), ("aaa", -2.0), add_space_prefix=False
    )
    tokenizer = load(tmp_path, metadata)
    assert texts(tokenizer, "aaaaa") == ["<s>", "aa", "aaa"]
    assert texts(tokenizer, "baaab") == ["<s>", "b", "aaa", "b"]


def test_characters_without_a_token_become_bytes(tmp_path):
    tokenizer = load(tmp_path, sentencepiece(("▁", -1.0), ("a", -2.0)))
    assert texts(tokenizer, "aé\n") == ["<s>", "▁", "a", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("aé\n中 a")) == "aé\n中 a"


def test_space_is_put_before_a_text_and_after_each_token_in_it(tmp_path):
    more = (("▁", -1.0), ("a", -2.0), ("▁a", -3.0), ("\n\n", 0.0, USER_DEFINED))
    tokenizer = load(tmp_path, sentencepiece(*more))
    assert texts(tokenizer, "a</s>a\n\na") == ["<s>", "▁a", "</s>", "▁a", "\n\n", "▁a"]
    assert tokenizer.encode("") == [1]
    tokenizer = load(tmp_path, sentencepiece(*more, add_space_prefix=False))
    assert texts(tokenizer, "a</s>a a") == ["<s>", "a", "</s>", "a", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" a", False)) == " a"


def test_pieces_of_an_answer_keep_their_spaces(tmp_path):
    tokenizer = load(tmp_path, sentencepiece(("▁", -1.0), ("a", -2.0), ("▁a", -3.0)))
    answer = Detokenizer(tokenizer, SamplingParams(), [260])
    assert answer.append([261, 260]) + answer.finish() == " aa"
    assert tokenizer.decode([261, 261]) == "a a"


def gemma4(*more, **keys):
    metadata = sentencepiece(*more, model="gemma4", bos_token_id=1, **keys)
    del metadata["tokenizer.ggml.scores"]
    return metadata


def test_gemma4_has_marks_for_spaces_and_always_bos(tmp_path):
    metadata = gemma4(
        *((text, 0) for text in ("▁", "a", "\n", "▁a", "\n\n")),
        ("<|tool_response>", 0, CONTROL),
        merges=["▁ a", "\n \n"],
        add_bos_token=False,
    )
    tokenizer = load(tmp_path, metadata)
    assert texts(tokenizer, "a a\n\n é") == ["<s>", "a", "▁a", "\n\n", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" a\n\n é")) == " a\n\n é"
    # The tag of HTML
    assert 2 not in tokenizer.special_token_ids
    assert 2 not in end_of_generation(metadata)


def test_phi3_tokens_take_the_spaces_after_them(tmp_path):
    metadata = sentencepiece(("▁", -1.0), ("a", -2.0), ("<|user|>", 0.0, CONTROL))
    metadata["general.name"] = "Phi-3 mini"
    assert texts(load(tmp_path, metadata), "<|user|> \n a") == ["<s>", "<|user|>", "▁", "a"]
    assert texts(load(tmp_path, metadata), "<s> a") == ["<s>", "<s>", "▁", "▁", "a"]


@pytest.mark.parametrize(
    ("mask", "pre", "name"),
    [("<mask>", "jina-v2-code", ""), ("[MASK]", "modern-bert", "Modern-BERT base")],
)
def test_masks_take_the_spaces_before_them(tmp_path, mask, pre, name):
    metadata = byte_level((mask, CONTROL), pre=pre)
    metadata["general.name"] = name
    assert texts(load(tmp_path, metadata), f"a  {mask}") == ["a", mask]


def test_ends_of_an_answer_are_found_by_key_and_by_text():
    names = (
        "<|im_end|>",
        "<|endoftext|>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|fim_middle|>",
        "<x>",
    )
    metadata = byte_level(*((name, CONTROL) for name in names), eos_token_id=257)
    assert end_of_generation(metadata) == [257, 256, 258, 259, 260]
    metadata["tokenizer.ggml.eot_token_id"] = 262
    metadata["tokenizer.ggml.fim_rep_token_id"] = 261
    assert end_of_generation(metadata) == [257, 256, 258, 260, 261, 262]


def test_token_that_ends_an_answer_by_its_text_is_special(tmp_path):
    metadata = byte_level(
        ("<|im_end|>", NORMAL), ("<|fim_prefix|>", USER_DEFINED), eos_token_id=256
    )
    assert load(tmp_path, metadata).special_token_ids == {256, 257}
    metadata["tokenizer.ggml.fim_pre_token_id"] = 257
    assert load(tmp_path, metadata).special_token_ids == {256}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("<|return|>", "<|call|>", "<|end|>"), [256, 257]),
        (("<|flush|>", "<|calls|>", "<|end|>"), [256, 257]),
        (("<|return|>", "<|end|>"), [256, 257]),
    ],
)
def test_end_of_one_message_of_several_does_not_end_the_answer(names, expected):
    metadata = byte_level(*((name, CONTROL) for name in names), eos_token_id=256)
    assert end_of_generation(metadata) == expected


def test_id_that_no_token_has_is_as_if_it_were_not_there():
    metadata = sentencepiece(eos_token_id=2**32 - 1, padding_token_id=2**32 - 1)
    assert end_of_generation(metadata) == [2]
    assert "pad_token" not in json.loads(tokenizer_files(metadata)["tokenizer_config.json"])


def test_chat_templates_are_passed_on(tmp_path):
    metadata = byte_level(("<s>", CONTROL), bos_token_id=256)
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    assert load(tmp_path, metadata).chat_template == "{{ messages[0].content }}"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    tokenizer = load(tmp_path, metadata)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert "tools" in tokenizer.chat_template_source
    assert tokenizer.special_tokens == {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("tokenizer.ggml.tokens", None, "list of texts"),
        ("tokenizer.ggml.tokens", ["a", 1], "list of texts"),
        ("tokenizer.ggml.tokens", ["a", "a"], "1 texts twice"),
        ("tokenizer.ggml.token_type", [1], "1 numbers for 256 tokens"),
        ("tokenizer.ggml.token_type", ["a"] * 256, "list of numbers"),
        ("tokenizer.ggml.merges", None, "list of texts"),
        ("tokenizer.ggml.add_bos_token", 1, "true or false"),
        ("tokenizer.chat_template", 1, "must be a text"),
    ],
)
def test_values_that_contradict_each_other_are_refused(key, value, named):
    with pytest.raises(CheckpointError) as caught:
        tokenizer_files({**byte_level(), key: value})
    assert_names(str(caught.value), key, named)


def test_scores_for_some_tokens_are_refused():
    metadata = sentencepiece(("a", -1.0))
    metadata["tokenizer.ggml.scores"].pop()
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores has 259 numbers for 260"):
        tokenizer_files(metadata)


def test_token_without_text_has_the_name_that_llama_cpp_gives_it(tmp_path):
    metadata = byte_level(("", NORMAL))
    assert load(tmp_path, metadata).backend.id_to_token(256) == "[EMPTY_256]"


def test_kimi_k2_needs_no_merges(tmp_path):
    metadata = byte_level(pre="kimi-k2")
    del metadata["tokenizer.ggml.merges"]
    assert texts(load(tmp_path, metadata), "ab") == ["a", "b"]


def gguf_string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))


def write_gguf(file, metadata):
    fields = [gguf_string(key) + gguf_value(value) for key, value in metadata.items()]
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields))
    return file


def test_tokenizer_is_loaded_from_the_file_itself(tmp_path):
    metadata = byte_level(("<|im_end|>", CONTROL), merges=["a b"], eos_token_id=257)
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", metadata))
    assert texts(tokenizer, "ab<|im_end|>") == ["ab", "<|im_end|>"]
    assert tokenizer.eos_token_id == 257
    assert tokenizer.has_chat_template


def test_refusal_names_the_file_and_the_way_out(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", byte_level(pre="novel-bpe"))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(file)
    assert_names(
        str(caught.value), str(file), "novel-bpe", "--tokenizer FOLDER", "skip_tokenizer_init"
    )
