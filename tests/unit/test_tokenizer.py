"""Tokenizer and Detokenizer, on byte-level, byte-fallback and Metaspace tokenizers."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.refusals import refuses
from tests.shares import examples
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Built

import freight
from freight.errors import CheckpointError, ConfigError, RequestError
from freight.sampling import SamplingParams
from freight.text.detokenizer import Detokenizer
from freight.text.tokenizer import Tokenizer

DEMO = Path(freight.__file__).parent / "demo"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [
    "你好世界 hello world",
    "😀😃😄😁 smile",
    "naïve café – done",
    "def main():\n    return 0\n",
] * 8


def save(built, folder, **config):
    built.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def add_bos(built):
    bos = built.token_to_id("<s>")
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """Byte-level BPE whose merges cross the borders of words and of characters; with a chat
    template.
    """
    built = Built(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    built.train_from_iterator(CORPUS, trainer)
    built.add_tokens([AddedToken("<tool>", special=False)])
    add_bos(built)
    return save(built, tmp_path_factory.mktemp("byte_level"), chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def windowed(byte_level, tmp_path_factory):
    """The same, with a decoder whose tokens have to be decoded together for all that `read_decoder`
    knows.
    """
    built = Built.from_str(byte_level.backend.to_str())
    built.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = save(built, tmp_path_factory.mktemp("windowed"))
    assert tokenizer.pieces(True) is None
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory):
    """As Llama 2's: words begin with ▁, what is not in the vocabulary becomes one token a byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.", "你"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "▁")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    built = Built(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    built.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    built.add_special_tokens(["<unk>", "<s>", "</s>"])
    add_bos(built)
    return save(built, tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory):
    built = Built(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"])
    built.train_from_iterator(CORPUS, trainer)
    return save(built, tmp_path_factory.mktemp("metaspace"))


@pytest.fixture(scope="session")
def demo():
    return Tokenizer.load(DEMO)


def stream(tokenizer, token_ids, prompt=(), **params):
    """The pieces, one for each token and the last from `finish`, and the stop string."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(max_tokens=None, **params), prompt)
    pieces = [detokenizer.append([token]) for token in token_ids]
    return [*pieces, detokenizer.finish()], detokenizer.stop_reason


TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("你好😀 ea\n\u0301")),
    max_size=60,
)


@settings(max_examples=examples(150))
@given(text=TEXT)
def test_pieces_joined_are_the_text(byte_level, windowed, demo, text):
    for tokenizer in (byte_level, windowed, demo):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces, _ = stream(tokenizer, ids, skip_special_tokens=False)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
            assert pieces[-1] == ""


@settings(max_examples=examples(150))
@given(text=TEXT)
def test_pieces_joined_are_the_text_with_byte_fallback(byte_fallback, text):
    ids = byte_fallback.encode(text)
    pieces, _ = stream(byte_fallback, ids)
    assert "".join(pieces) == byte_fallback.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=examples(100))
@given(
    words=st.lists(
        st.sampled_from(["hello", "world", "", " ", "done", "return 0", "é"]), max_size=20
    )
)
def test_pieces_joined_are_the_text_with_metaspace(metaspace, words):
    ids = metaspace.encode(" ".join(words))
    assert "".join(stream(metaspace, ids)[0]) == metaspace.decode(ids)


@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_tokens_give_the_text_of_all_of_them(byte_level, windowed, data):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 5), max_size=120))
    skip = data.draw(st.booleans())
    for tokenizer in (byte_level, windowed):
        pieces, _ = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip)


def test_a_character_comes_whole_with_its_last_byte(demo):
    ids = demo.encode("a😀b", add_special_tokens=False)
    assert len(ids) > 4
    pieces, _ = stream(demo, ids)
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]


def test_bytes_that_never_become_a_character_are_flushed_at_the_end(demo):
    ids = demo.encode("a😀", add_special_tokens=False)[:-1]
    pieces, _ = stream(demo, ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd"


def test_a_broken_run_of_byte_tokens_takes_nothing_back(byte_fallback):
    ids = byte_fallback.encode("a好", add_special_tokens=False)
    broken = [*ids, ids[-3], *byte_fallback.encode("b", add_special_tokens=False)]
    assert "".join(stream(byte_fallback, broken)[0]) == "a好\ufffd b"
    garbage = [ids[-1]] * 100
    pieces, _ = stream(byte_fallback, [*garbage, *ids[:2]])
    assert "".join(pieces) == "\ufffd" * 100 + " a"


def test_no_token_decodes_more_than_a_window(windowed, monkeypatch):
    byte_level = windowed
    stray_bytes = [byte_level.encode("𝄞", add_special_tokens=False)[1]] * 200
    assert byte_level.decode(stray_bytes) == "\ufffd" * 200
    sizes = []
    decode = Tokenizer.decode

    def recorded(self, token_ids, skip_special_tokens=True):
        sizes.append(len(token_ids))
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", recorded)
    special = [byte_level.eos_token_id] * 200
    for ids in (byte_level.encode("hello world " * 40), stray_bytes, special):
        stream(byte_level, ids, prompt=ids)
    assert max(sizes) <= 25


def test_spaces_between_words_survive(byte_fallback, metaspace):
    for tokenizer, text in (
        (byte_fallback, "the  then in the end"),
        (metaspace, "hello world done"),
    ):
        pieces, _ = stream(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == text


def test_with_the_prompt_the_first_space_survives_too(byte_fallback, metaspace, demo):
    for tokenizer in (byte_fallback, metaspace, demo):
        ids = tokenizer.encode("hello the world")
        for cut in range(2, len(ids)):
            text = "".join(stream(tokenizer, ids[cut:], prompt=ids[:cut])[0])
            assert tokenizer.decode(ids[:cut]) + text == "hello the world"
    ids = byte_fallback.encode("好好好好")  # the last 8 tokens of it begin inside a character
    assert "".join(stream(byte_fallback, byte_fallback.encode("the")[1:], prompt=ids)[0]) == " the"
    assert "".join(stream(byte_fallback, ids[-3:], prompt=ids)[0]) == "好"
    assert stream(byte_fallback, [], prompt=ids[:-1])[0] == [""]


def test_special_tokens_are_skipped_or_shown(byte_level):
    ids = [*byte_level.encode("hello <tool> world"), byte_level.eos_token_id]
    assert "".join(stream(byte_level, ids)[0]) == "hello <tool> world"
    assert (
        "".join(stream(byte_level, ids, skip_special_tokens=False)[0])
        == "<s>hello <tool> world</s>"
    )


def first_stop(text, stops):
    """The definition: read character by character; at the first end of a stop string, the longest
    that ends there.
    """
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=examples(300))
@given(
    parts=st.lists(st.text(st.sampled_from("ab😀 é"), max_size=6), max_size=12),
    stops=st.lists(
        st.text(st.sampled_from("ab😀 é"), min_size=1, max_size=5),
        min_size=1,
        max_size=3,
        unique=True,
    ),
)
def test_text_stops_exactly_before_the_first_stop_string_however_it_is_cut(demo, parts, stops):
    ids = [token for part in parts for token in demo.encode(part, add_special_tokens=False)]
    expected, stop = first_stop("".join(parts), stops)
    pieces, reason = stream(demo, ids, stop=stops)
    assert ("".join(pieces), reason) == (expected, stop)
    together = Detokenizer(demo, SamplingParams(stop=stops))
    assert (together.append(ids) + together.finish(), together.stop_reason) == (expected, stop)


@settings(max_examples=examples(200))
@given(
    parts=st.lists(st.text(st.sampled_from("ab😀 é"), max_size=6), max_size=12),
    stops=st.lists(
        st.text(st.sampled_from("ab😀 é"), min_size=1, max_size=5),
        min_size=1,
        max_size=3,
        unique=True,
    ),
    min_tokens=st.integers(0, 6),
)
def test_an_included_stop_string_is_the_only_difference_and_holds_nothing_back(
    demo, parts, stops, min_tokens
):
    ids = [token for part in parts for token in demo.encode(part, add_special_tokens=False)]
    options = {"stop": stops, "min_tokens": min_tokens}
    left_out, reason = stream(demo, ids, **options)
    pieces, included_reason = stream(demo, ids, include_stop_str_in_output=True, **options)
    assert included_reason == reason
    assert "".join(pieces) == "".join(left_out) + (reason or "")
    plain, _ = stream(demo, ids)
    length = len("".join(pieces))
    for end in range(len(pieces) + 1):
        assert "".join(pieces[:end]) == "".join(plain[:end])[:length]
    together = Detokenizer(
        demo, SamplingParams(include_stop_str_in_output=True, max_tokens=None, **options)
    )
    assert together.append(ids) + together.finish() == "".join(pieces)


def test_what_may_begin_an_included_stop_string_is_given_out_at_once(demo):
    detokenizer = Detokenizer(demo, SamplingParams(stop="\n\n#", include_stop_str_in_output=True))
    ids = {text: demo.encode(text, add_special_tokens=False) for text in ("x", "\n", "#")}
    for text in ("x", "\n", "\n", "\n", "#"):
        assert detokenizer.append(ids[text]) == text
    assert detokenizer.stop_reason == "\n\n#"
    assert detokenizer.append(ids["x"]) + detokenizer.finish() == ""
    both = Detokenizer(demo, SamplingParams(stop="b", include_stop_str_in_output=True))
    assert both.append(demo.encode("a b c", add_special_tokens=False)) == "a b"


def test_a_stop_string_inside_one_token(byte_level):
    ids = byte_level.encode("hello world", add_special_tokens=False)
    assert len(ids) < 5
    pieces, reason = stream(byte_level, ids, stop=["wor", "lo wo"])
    assert ("".join(pieces), reason) == ("hel", "lo wo")


def test_what_may_begin_a_stop_string_is_held_back_until_decided(demo):
    detokenizer = Detokenizer(demo, SamplingParams(stop="\n\n#", max_tokens=None))
    ids = {text: demo.encode(text, add_special_tokens=False) for text in ("x", "\n", "#")}
    assert detokenizer.append(ids["x"]) == "x"
    assert detokenizer.append(ids["\n"]) == ""
    assert detokenizer.append(ids["\n"]) == ""
    assert detokenizer.append(ids["\n"]) == "\n"
    assert detokenizer.append(ids["x"]) == "\n\nx"
    assert detokenizer.append(ids["\n"]) == ""
    assert detokenizer.finish() == "\n"
    assert detokenizer.stop_reason is None


def test_nothing_comes_after_a_stop_string(demo):
    detokenizer = Detokenizer(demo, SamplingParams(stop="b"))
    assert detokenizer.append(demo.encode("a b c", add_special_tokens=False)) == "a "
    assert detokenizer.append(demo.encode("d", add_special_tokens=False)) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.stop_reason == "b"


def test_no_stop_string_ends_within_the_first_min_tokens(demo):
    ids = [demo.encode(text, add_special_tokens=False)[0] for text in ("x", "y", "x", "y")]
    assert stream(demo, ids, stop="y", min_tokens=1) == (["x", "", "", "", ""], "y")
    assert stream(demo, ids, stop="y", min_tokens=2) == (["x", "y", "x", "", ""], "y")
    assert stream(demo, ids, stop="xy", min_tokens=1) == (["", "", "", "", ""], "xy")
    assert stream(demo, ids, stop="xy", min_tokens=2) == (["", "xy", "", "", ""], "xy")
    assert stream(demo, ids[:3], stop=["y", "xyz"], min_tokens=2) == (["", "", "xy", "x"], None)
    assert stream(demo, ids, stop="xy", min_tokens=4) == (["", "xy", "", "xy", ""], None)


def test_ids_of_the_shipped_tokenizer(demo):
    assert (demo.bos_token_id, demo.eos_token_id, demo.vocab_size) == (0, 1, 4096)
    assert demo.encode("def main(")[0] == 0
    assert demo.encode("def main(")[1:] == demo.encode("def main(", add_special_tokens=False)
    assert demo.decode(demo.encode("def main(")) == "def main("
    assert demo.decode(demo.encode("x"), skip_special_tokens=False) == "<|begin_of_text|>x"
    assert demo.decode([4096, 10**6]) == ""


def test_what_cannot_be_encoded_or_decoded_is_refused(demo):
    with refuses(RequestError, "surrogates", "character 1"):
        demo.encode("a\ud800")
    with pytest.raises(RequestError, match="token id -1 is negative"):
        demo.decode([5, -1])


def test_a_templated_chat_has_one_bos(byte_level):
    assert byte_level.has_chat_template
    ids = byte_level.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids.count(byte_level.bos_token_id) == 1
    assert byte_level.decode(ids, skip_special_tokens=False) == "<s><|user|>hello</s><|assistant|>"
    ids = byte_level.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=False
    )
    assert byte_level.decode(ids, skip_special_tokens=False) == "<s><|user|>hello</s>"


def test_chat_without_a_template_names_generate(demo):
    assert not demo.has_chat_template
    with refuses(ConfigError, "no chat template", "generate"):
        demo.apply_chat_template([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "not empty"),
        ("hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], r"messages\[1\].role is None"),
        ([{"role": "user"}], r"messages\[0\].content is None"),
        (
            [{"role": "user", "content": 7}],
            r"messages\[0\].content is 7.*string",
        ),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] is 'x'"),
        ([{"role": "user", "content": "\ud800"}], "not Unicode"),
        ([{"role": "robot", "content": "x"}], "messages.*no robots"),
    ],
)
def test_malformed_messages_are_refused(byte_level, messages, words):
    with pytest.raises(RequestError, match=words):
        byte_level.apply_chat_template(messages)


def test_template_options_cannot_change_what_comes_back(byte_level):
    with refuses(RequestError, "tokenize", "chat template"):
        byte_level.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    with pytest.raises(RequestError, match="continue_final_message"):
        byte_level.apply_chat_template(
            [{"role": "user", "content": "x"}], continue_final_message=True
        )


def test_a_folder_without_a_tokenizer_names_the_way_out(tmp_path):
    with refuses(CheckpointError, str(tmp_path), "no tokenizer", "skip_tokenizer_init=True"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with refuses(CheckpointError, str(tmp_path), "cannot be read", "skip_tokenizer_init=True"):
        Tokenizer.load(tmp_path)


def test_importing_the_module_does_not_load_transformers():
    check = "import freight.text.tokenizer, sys; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_one_that_nobody_uses_is_freed_at_once() -> None:
    tokenizer = Tokenizer.load(DEMO)
    pieces = tokenizer.pieces(True)
    assert pieces is not None
    assert pieces[316]
    freed = weakref.ref(tokenizer)
    gc.disable()
    try:
        del tokenizer
        assert freed() is None
    finally:
        gc.enable()
    assert pieces[1823]
