"""`text_offset` of completions is a position in the choice's text, also where tokens are parts of a
character, of a prompt, or of words that a tokenizer of words joins with spaces.
"""

from __future__ import annotations

import math
from array import array

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from freight.checkpoint.reader import resolve_model
from freight.outputs import Logprob, Scores
from freight.serve.openai.logprobs import TextLogprobs, chat_entries
from freight.text.tokenizer import Tokenizer

DEMO = Tokenizer.load(resolve_model("demo"))
TEXT = "A 世界🙂é«"
ALL = 99  # characters: more than any text here has
OFFSETS = [0, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 6, 6]


def sentence_pieces() -> Tokenizer:
    """Words with a mark for the space before them, and a token for every byte, as Llama 2 has."""
    words = ["<unk>", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def entries(ids: list[int]) -> list[dict[int, Logprob]]:
    return [{token: Logprob(-0.5, 1, None)} for token in ids]


def byte_ids(text: str) -> list[int]:
    ids = [DEMO.encode(character, add_special_tokens=False) for character in text]
    return [token for tokens in ids for token in tokens]


def scored(ids: list[int]) -> list[Scores]:
    count = len(ids) - 1
    return [Scores(1, array("i", ids[1:]), array("f", [-0.5] * count), array("i", [1] * count))]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_parts_of_a_character_have_its_position(step: int) -> None:
    ids = byte_ids(TEXT)
    logprobs = TextLogprobs(DEMO)
    found = []
    for at in range(0, len(ids), step):  # in deltas, as a stream has them
        logprobs.add(ids[at : at + step], entries(ids[at : at + step]))
        found += logprobs.take(len(TEXT), ended=False)["text_offset"]
    assert found == OFFSETS
    assert found == logprobs.body(ALL)["text_offset"]


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("skip_special", [True, False])
def test_the_tokens_of_an_echoed_prompt_and_of_the_answer_share_one_text(
    as_text: bool, skip_special: bool
) -> None:
    prompt = [0, *byte_ids(TEXT)]  # with BOS
    answer = byte_ids("é x")
    text = TEXT if as_text else DEMO.decode(prompt, skip_special)
    before = len(text) - len(TEXT)
    logprobs = TextLogprobs(DEMO, prompt, skip_special)
    logprobs.add_prompt(prompt, scored(prompt), text)
    logprobs.add(answer, entries(answer))
    rest = [len(text) + offset for offset in (0, 0, 1, 2)]
    assert logprobs.body(ALL)["text_offset"] == [0, *(before + offset for offset in OFFSETS), *rest]


def test_tokens_of_a_prompt_that_was_shortened_are_at_its_end() -> None:
    ids = byte_ids(TEXT)[2:]
    logprobs = TextLogprobs(DEMO, ids)
    logprobs.add_prompt(ids, scored(ids), TEXT)
    assert logprobs.body(ALL)["text_offset"] == OFFSETS[2:]


def test_bytes_that_become_no_character_stand_for_one() -> None:
    ids = [byte_ids("世")[0], *byte_ids("A")]
    logprobs = TextLogprobs(DEMO)
    logprobs.add(ids, entries(ids))
    assert logprobs.body(ALL)["text_offset"] == [0, 1]


def test_tokens_that_a_stop_string_took_out_have_the_end_of_the_text() -> None:
    """The stop string 界🙂 leaves "A 世"; until it is complete, its tokens wait for it."""
    ids = byte_ids("A 世界🙂")
    logprobs = TextLogprobs(DEMO)
    logprobs.add(ids[:-1], entries(ids[:-1]))
    waiting = logprobs.take(2, ended=False)["text_offset"]  # of the text "A ", before 世
    assert waiting == [0, 1, 2, 2, 2]
    logprobs.add(ids[-1:], entries(ids[-1:]))
    assert waiting + logprobs.take(3, ended=True)["text_offset"] == [0, 1, 2, 2, 2] + [3] * 7
    assert logprobs.body(3)["text_offset"] == [0, 1, 2, 2, 2] + [3] * 7


def test_spaces_that_belong_to_a_word_count() -> None:
    tokenizer = sentence_pieces()
    ids = [1, 2, *(4 + byte for byte in "é".encode()), 3, 2]
    assert tokenizer.decode(ids) == "Hello worldé! world"
    logprobs = TextLogprobs(tokenizer)
    logprobs.add(ids, entries(ids))
    assert logprobs.body(ALL)["text_offset"] == [0, 5, 11, 11, 12, 13]
    # behind a prompt the first word keeps its space
    after = TextLogprobs(tokenizer, [1])
    after.add([2, 3], entries([2, 3]))
    assert after.body(ALL)["text_offset"] == [0, 6]
    assert math.isclose(after.body(ALL)["token_logprobs"][0], -0.5)


def test_the_bytes_of_tokens_make_up_the_text() -> None:
    """`token` is the token by itself, where decoders drop the space that a text begins with."""
    tokenizer = sentence_pieces()
    ids = [2, *(4 + byte for byte in "é".encode()), 3, 2]
    found = chat_entries(ids, entries(ids), 1, tokenizer)
    assert bytes(byte for entry in found for byte in entry["bytes"]) == " worldé! world".encode()
    assert found[0]["top_logprobs"][0]["bytes"] == list(b" world")
