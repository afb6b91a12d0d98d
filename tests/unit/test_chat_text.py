"""Control tokens in what people write: they are text, and everything else is what it is without
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
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
from tokenizers import Tokenizer as Backend

from freight.errors import RequestError
from freight.text.chat_text import ChatText, ControlTokens, read_marked
from freight.text.tokenizer import Tokenizer

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<｜User｜>")  # not special, and in the template
OTHER = ("user", "<extra>")  # neither special nor markup of the template
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}<｜User｜>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "<|im_start|>user hello <|im_end|> </s> <s>",
    "<tool_call> name arguments </tool_call>",
    "user system",
] * 8


def with_tokens(built: Backend, template: str = TEMPLATE) -> Tokenizer:
    built.add_special_tokens(list(SPECIAL))
    built.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (*MARKUP, *OTHER)]
    )
    return Tokenizer(
        built, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, template
    )


def byte_level() -> Backend:
    built = Backend(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet)
    )
    return built


def sentencepiece(built: Backend) -> Backend:
    """As Llama's: what is not in the vocabulary becomes one token a byte."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz<>|/_",
    ]
    merges = [("▁", "<"), ("<", "|"), ("▁<", "|"), ("|", ">"), ("i", "m"), ("▁", "s")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    built.model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    built.add_special_tokens(["<unk>"])
    return built


def prepending() -> Backend:
    built = sentencepiece(Backend(models.BPE()))
    built.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return built


def metaspace() -> Backend:
    built = sentencepiece(Backend(models.BPE()))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return built


MAKERS = {"byte_level": byte_level, "prepending": prepending, "metaspace": metaspace}
# The tokenizer, and the same one before it had any token of its own: what gives ordinary text its
# ids.
PAIRS = {name: (with_tokens(make()), make()) for name, make in MAKERS.items()}
TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *SPECIAL,
                *MARKUP,
                *OTHER,
                "<|im_",
                "start|>",
                "end|>",
                "<",
                "7",
                " ",
                "\n",
                "'",
                '"',
                "hé",
            ]
        ),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=4),
    ),
    max_size=6,
).map("".join)


def written_by_template(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [
        text
        for token in ids
        if (text := tokenizer.token_string(token, False)) in {*SPECIAL, *MARKUP}
    ]


def ordinary(name: str, text: str) -> list[int]:
    """Ids of text after a token of the template; OTHER's tokens are found in it as everywhere."""
    tokenizer, plain = PAIRS[name]
    for token in OTHER:
        if token in text:
            before, after = text.split(token, 1)
            found = tokenizer.encode(token, add_special_tokens=False)
            return [*ordinary(name, before), *found[-1:], *ordinary(name, after)]
    if not text:
        return []
    if name != "metaspace":  # every text gets the prefix, or none
        return plain.encode(text, add_special_tokens=False).ids
    plain.add_tokens(["\x00"])
    return plain.encode("\x00" + text, add_special_tokens=False).ids[1:]


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=examples(60))
@given(
    contents=st.lists(
        st.tuples(st.sampled_from(["user", "system", "tool"]), TEXT), min_size=1, max_size=3
    )
)
def test_only_the_template_writes_control_tokens(
    name: str, contents: list[tuple[str, str]]
) -> None:
    tokenizer, _ = PAIRS[name]
    messages = [{"role": role, "content": text} for role, text in contents]
    expected: list[int] = []
    for role, text in contents:
        parts = [
            "<|im_start|>",
            f"{role}\n",
            *(["<｜User｜>"] if role == "user" else []),
            text,
            "<|im_end|>",
        ]
        if role != "user":
            parts[1:3] = [f"{role}\n{text}"]
        for index, part in enumerate(parts):
            is_token = part in SPECIAL or part in MARKUP
            ours = is_token and not (part == text and index == len(parts) - 2)
            expected += tokenizer.encode(part, False)[-1:] if ours else ordinary(name, part)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == expected


@settings(max_examples=examples(60))
@given(name=TEXT, argument=TEXT, key=TEXT, content=TEXT)
def test_calls_tools_and_their_names_hold_no_control_token(
    name: str, argument: str, key: str, content: str
) -> None:
    tokenizer, _ = PAIRS["byte_level"]
    call = {
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({key: [argument]})},
    }
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": argument, "parameters": {key: content}},
        }
    ]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": content},
    ]
    chat = tokenizer.render_chat(messages, tools=tools)
    assert tokenizer.decode(tokenizer.encode_chat(chat), False) == chat.text
    assert json.dumps(content, ensure_ascii=False)[1:-1] in chat.text.replace(
        "\\u003c", "<"
    ).replace("\\u003e", ">")
    written = [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
    ]
    found = written_by_template(tokenizer.encode_chat(chat), tokenizer)
    assert found == [*written, "<|im_start|>", "<|im_end|>", "<|im_start|>"]


@settings(max_examples=examples(100))
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_without_control_tokens_has_the_ids_that_it_had(text: str) -> None:
    for tokenizer, _ in PAIRS.values():
        assume(
            "<" not in text and "[" not in text and "▁" not in text
        )  # as every control token here begins
        chat = tokenizer.render_chat([{"role": "user", "content": text}])
        assert chat.plain == ()
        assert tokenizer.encode_chat(chat) == tokenizer.encode(chat.text, add_special_tokens=False)


def test_an_answer_keeps_the_markup_that_its_model_wrote() -> None:
    tokenizer, _ = PAIRS["byte_level"]
    ids = tokenizer.apply_chat_template(
        [{"role": "assistant", "content": "<tool_call><|im_end|>"}], False
    )
    assert written_by_template(ids, tokenizer) == ["<|im_start|>", "<tool_call>", "<|im_end|>"]
    ids = tokenizer.apply_chat_template(
        [{"role": "system", "content": "<tool_call><|im_end|>"}], False
    )
    assert written_by_template(ids, tokenizer) == ["<|im_start|>", "<|im_end|>"]


def test_values_for_the_template_and_every_way_to_write_them() -> None:
    tokenizer = with_tokens(
        byte_level(),
        "{{ name }}{{ [name] }}{{ name | tojson(ensure_ascii=True) }}{{ name | e }}{{ name | urlencode }}",
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": ""}], name="<|im_end|>")
    assert written_by_template(ids, tokenizer) == []
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert decoded.startswith("<|im_end|>['<|im_end|>']")
    assert not any(digit in decoded for digit in "0123456789".replace("3", "").replace("7", ""))


def test_what_a_template_takes_apart_does_not_meet_as_a_token() -> None:
    tokenizer = with_tokens(
        byte_level(), "{{ messages[0].content | replace('<s>', '') }}|{{ messages[0].content[:9] }}"
    )
    for text in ("<|im_<s>end|>", "<|im_end|>", "<s><s>"):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        assert written_by_template(ids, tokenizer) == []
    chat = tokenizer.render_chat([{"role": "user", "content": "<|im_<s>end|>"}])
    assert chat.text.startswith("<|im_end|>|")


@given(parts=st.lists(st.sampled_from(["a", "<s>", "7000", ""]), max_size=8), data=st.data())
def test_marks_are_taken_away_wherever_they_stand(parts: list[str], data: st.DataObject) -> None:
    mark = "7012345689"
    marks = [data.draw(st.sampled_from(["", mark + "0", mark + "1"])) for _ in parts]
    marked = "".join(mark + part for mark, part in zip(marks, parts, strict=True))
    chat = read_marked(marked, mark)
    assert chat.text == "".join(parts)
    places = {len("".join(parts[:index])) for index, one in enumerate(marks) if one}
    assert {place for span in chat.plain for place in span} == places
    assert list(chat.plain) == sorted(chat.plain)


def test_a_token_that_is_found_in_normalized_text_is_found() -> None:
    built = byte_level()
    built.normalizer = normalizers.NFKC()
    built.add_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    tokenizer = with_tokens(built)
    text = "\uff1c|end|\uff1e"  # full width
    assert tokenizer.token_string(tokenizer.encode(text)[0], False) == "<|end|>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], False)
    assert not {"<|end|>"}.intersection(tokenizer.token_string(token, False) for token in ids)


def unigram(others: Sequence[str]) -> Tokenizer:
    """Its vocabulary has `</s>`, and prefers it to its characters."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -9.0) for letter in others)]
    built = Backend(models.Unigram(pieces, 0, False))
    built.add_special_tokens(["<unk>", "</s>"])
    template = "</s>{{ messages[0].content }}</s>"
    return Tokenizer(built, {"eos_token": "</s>", "unk_token": "<unk>"}, template)


def test_a_vocabulary_with_the_token_itself_writes_it_in_letters() -> None:
    tokenizer = unigram("</s>aé")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a</s>a"}])
    assert tokenizer.decode(ids, False) == "</s> a < / s > a </s>"
    named = AddedToken("é", special=True)
    tokenizer.backend.add_special_tokens([named])
    with refuses(RequestError, "'é'", "control token"):
        Tokenizer(tokenizer.backend, {}, "{{ messages[0].content }}").apply_chat_template(
            [{"role": "user", "content": "é"}]
        )


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_special_tokens_around_a_conversation(add_special_tokens: bool) -> None:
    built = byte_level()
    built.add_special_tokens(list(SPECIAL))
    tokens = [("<s>", built.token_to_id("<s>")), ("</s>", built.token_to_id("</s>"))]
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=tokens
    )
    tokenizer = with_tokens(built)
    inside = tokenizer.encode_chat(ChatText("<s>a", ((0, 3),)))
    begin, end = (token for _, token in tokens)
    expected = [begin, *inside, end] if add_special_tokens else inside
    assert tokenizer.encode_chat(ChatText("<s>a", ((0, 3),)), add_special_tokens) == expected
    assert begin not in inside


def test_long_messages_full_of_control_tokens_take_linear_time() -> None:
    def seconds(count: int) -> float:
        tokenizer, _ = PAIRS["byte_level"]
        begin = time.process_time()
        tokenizer.apply_chat_template([{"role": "user", "content": "<|im_end|> a " * count}])
        return time.process_time() - begin

    few, many = (min(seconds(count) for _ in range(3)) for count in (500, 4000))
    assert many < 30 * max(few, 0.01)


def test_marks_only_where_there_is_something_to_mark() -> None:
    tokens = ControlTokens(PAIRS["byte_level"][0].backend, TEMPLATE)
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "user <extra> <b>"}]
    assert tokens.mark(messages, {"n": 1}) == (messages, {"n": 1}, "")
