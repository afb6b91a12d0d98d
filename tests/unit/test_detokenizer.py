"""Detokenizer token by token against the `tokenizers` library on all tokens, with any ids, for
every kind of decoder.

tests/unit/test_tokenizer.py has its other guarantees.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.shares import examples
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Built

from freight.sampling import SamplingParams
from freight.text import tokenizer as tokenizers
from freight.text.detokenizer import Detokenizer, _StopStrings
from freight.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "▁",
    "▁▁",
    "▁the",
    "the▁",
    " x",
    "a",
    "",
    "é",
    "你",
    "\ufffd",
    "▁a▁b",
    "<0x4>",
    "##s",
    "<0xe4>",
    "\n",
]
WORDS += sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS += [
    "ä½",
    "ä½ł",
    "ł",
    "ðŁĺ",
    "Ģ",
    "Ġthe",
    "Ġä½",
]  # bytes and pieces of characters, as byte-level tokens
LLAMA_2 = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
DECODERS = {
    "byte-level": decoders.ByteLevel(),
    "llama 2": decoders.Sequence(LLAMA_2),
    "gemma": decoders.Sequence(LLAMA_2[:3]),
    "strips two": decoders.Sequence([*LLAMA_2[:3], decoders.Strip(" ", 2, 0)]),
    "two replacements": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Replace(" ", "_"), *LLAMA_2[1:3]]
    ),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace, first": decoders.Metaspace(prepend_scheme="first"),
}
TOGETHER = {  # the tokens have to be decoded together
    "none": None,
    "strips the end": decoders.Sequence([*LLAMA_2[:3], decoders.Strip(" ", 1, 1)]),
    "replaces in the text": decoders.Sequence([*LLAMA_2[:3], decoders.Replace("a b", "c")]),
    "replaces a pattern": decoders.Sequence([decoders.Replace(Regex("▁+"), " "), *LLAMA_2[1:]]),
    "word pieces": decoders.WordPiece(),
    "byte-level twice": decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()]),
}


def build(decoder):
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*BYTES, *WORDS]))}
    built = Built(models.BPE(vocab, []))
    if decoder is not None:
        built.decoder = decoder
    built.add_special_tokens(["<s>", "<ßé>"])
    built.add_tokens([AddedToken("<t ö▁>", special=False)])
    return built


BUILT = {name: build(decoder) for name, decoder in DECODERS.items()}
TOKENIZERS = {name: Tokenizer(build(decoder)) for name, decoder in DECODERS.items()}
IDS = st.lists(
    st.one_of(
        st.integers(0, TOKENIZERS["llama 2"].vocab_size + 1),
        st.sampled_from([0xE4, 0xBD, 0xA0, 0x20]),
    ),
    max_size=24,
)


def stream(tokenizer, token_ids, skip, prompt=()):
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip), prompt)
    pieces = [detokenizer.append([token]) for token in token_ids]
    return "".join(pieces) + detokenizer.finish()


def broken_after_a_character(text_of_bytes):
    """Whether a run of byte tokens becomes invalid after a whole character, which streaming cannot
    take back.
    """
    try:
        text_of_bytes.decode()
    except UnicodeDecodeError as error:
        return error.start > 0
    return False


def runs_of_bytes(tokenizer, ids, skip):
    run = b""
    if not getattr(tokenizer.pieces(skip).decoder, "byte_fallback", False):
        return
    for token in ids:
        string = tokenizer.token_string(token, skip)
        if string in BYTES or string == "<0xe4>":
            run += bytes.fromhex(string[3:5])
        elif string is not None:
            yield run
            run = b""
    yield run


@pytest.mark.parametrize("name", DECODERS)
def test_the_decoder_is_known(name):
    assert TOKENIZERS[name].pieces(True) is not None


@pytest.mark.parametrize("name", TOGETHER)
def test_a_decoder_that_is_not_known_decodes_tokens_together(name):
    assert Tokenizer(build(TOGETHER[name])).pieces(True) is None


@pytest.mark.parametrize("name", DECODERS)
def test_the_text_of_any_tokens_is_the_library_s(name):
    built, tokenizer = BUILT[name], TOKENIZERS[name]

    @settings(max_examples=examples(150))
    @given(ids=IDS, skip=st.booleans())
    @example(ids=[0xE4, 0xBD], skip=True)
    @example(ids=[0xBD, 0xE4, 0xBD, 0xA0, 260], skip=True)
    @example(ids=[0x20, 0x20, 0x20, 258], skip=True)
    def check(ids, skip):
        if any(map(broken_after_a_character, runs_of_bytes(tokenizer, ids, skip))):
            return
        assert stream(tokenizer, ids, skip) == built.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("name", DECODERS)
def test_after_a_prompt_nothing_is_removed_at_the_start(name):
    built, tokenizer = BUILT[name], TOKENIZERS[name]
    prompt = [built.token_to_id("a"), built.token_to_id("<s>")]

    @settings(max_examples=examples(60))
    @given(ids=IDS)
    def check(ids):
        if any(map(broken_after_a_character, runs_of_bytes(tokenizer, ids, True))):
            return
        assert "a" + stream(tokenizer, ids, True, prompt) == built.decode(prompt + ids)
        assert stream(tokenizer, ids, True, [prompt[1]]) == built.decode(ids)

    check()


def test_every_token_by_itself_is_the_library_s():
    for name, tokenizer in TOKENIZERS.items():
        for token in range(tokenizer.vocab_size):
            assert stream(tokenizer, [token], False) == BUILT[name].decode(
                [token], skip_special_tokens=False
            )


def test_a_token_is_decoded_once(monkeypatch):
    asked = []
    token_string = tokenizers._token_string
    monkeypatch.setattr(tokenizers, "_token_string", lambda *a: asked.append(a) or token_string(*a))
    monkeypatch.setattr(Tokenizer, "decode", lambda *a: pytest.fail("decoded again"))
    for name in ("byte-level", "llama 2", "gemma"):
        tokenizer = Tokenizer(build(DECODERS[name]))
        asked.clear()
        for _ in range(3):
            stream(tokenizer, [*range(100)] * 3, True, prompt=[3])
        assert len(asked) == 100


def test_of_stop_strings_in_one_piece_the_first_to_end_counts_and_no_more_is_held_back_than_may_begin_one():
    assert _StopStrings(["d", "bc"]).feed("abcd", True) == ("a", "bc")
    assert _StopStrings(["c", "abc"]).feed("abc", True) == ("", "abc")
    assert _StopStrings(["abc"]).feed("xax", True) == ("xax", None)
