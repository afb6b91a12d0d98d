"""Where a thought ends by its budget, token by token: tags of one token and of several, begun and
complete ones, in prompts and in answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.refusals import refuses
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Built

from freight import RequestError, SamplingParams
from freight.engine.adjust import SamplingRow
from freight.engine.sampler import sample
from freight.engine.thinking import TagTokens, Thought, read_tags
from freight.text.harmony import MARKERS
from freight.text.thinking import THINK, THINK_GRANITE, THINK_HARMONY, model_tags
from freight.text.tokenizer import Tokenizer

WHOLE = ("<think>", "</think>", *MARKERS, "<end>")


def new_tokenizer(template: str = "</think>", whole: Sequence[str] = WHOLE) -> Tokenizer:
    """A token for each byte, for "</", "an" and "ink>", and for the markup in `whole`; <end> and
    harmony's are special.
    """
    vocab = {
        token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    merges = [("<", "/"), ("a", "n"), ("i", "n"), ("k", ">"), ("in", "k>")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    built = Built(models.BPE(vocab, merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    special = (*MARKERS, "<end>")
    built.add_tokens([AddedToken(text, special=text in special) for text in whole])
    return Tokenizer(built, chat_template=template)


PLAIN = new_tokenizer(whole=("<end>",))  # tags are of several tokens
TOKENS = new_tokenizer()


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def thought(
    tokenizer: Tokenizer, budget: int, prompt: str = "", only_first: bool = False
) -> Thought:
    params = SamplingParams(thinking_token_budget=budget)
    tags = read_tags(params, tokenizer, tokenizer.vocab_size)
    return Thought(tags, budget, ids(tokenizer, prompt), only_first)


def written(
    tokenizer: Tokenizer, budget: int, text: str, prompt: str = "", only_first: bool = False
) -> str:
    """What becomes of an answer whose model goes on with `text`, token by token. A token that is
    forced is one of them if it is the next.
    """
    state = thought(tokenizer, budget, prompt, only_first)
    output: list[int] = []
    left = ids(tokenizer, text)
    while True:
        token = state.forced(output)
        if token is None and not left:
            return tokenizer.decode(output, skip_special_tokens=False)
        if token is None or left[:1] == [token]:
            token = left.pop(0)
        output.append(token)


@pytest.mark.parametrize("tokenizer", [PLAIN, TOKENS], ids=["several", "one"])
@pytest.mark.parametrize(
    ("budget", "prompt", "text", "expected"),
    [
        (3, "<think>", "abcdef", "abc</think>def"),
        (3, "<think>\n", "abcdef", "abc</think>def"),
        (0, "<think>", "abc", "</think>abc"),
        (3, "", "abcdef", "abcdef"),
        (3, "", "<think>xyzabc", "<think>xyz</think>abc"),
        (0, "", "<think>xyz", "<think></think>xyz"),
        (3, "<think>", "xy</think>abcdef", "xy</think>abcdef"),
        (3, "<think>", "xyz", "xyz</think>"),
        (3, "<think>xy</think>", "abcdef", "abcdef"),
        (3, "<think>four", "abcdef", "abc</think>def"),  # the prompt's are not counted
        (3, "<think>a<end>", "abcdef", "abcdef"),  # of another message
        (3, "<end><think>", "abcdef", "abc</think>def"),
        (3, "<think>", "ab</think>c<think>defg", "ab</think>c<think>d</think>efg"),  # of all
        (2, "<think>", "ab</think>c<think>de", "ab</think>c<think></think>de"),
        (3, "</think>", "a<think>bcde", "a<think>bcd</think>e"),
        (1, "<thi", "nk>abc", "nk>a</think>bc"),  # a tag that the prompt has begun
    ],
)
def test_a_thought_ends_with_its_budget(
    tokenizer: Tokenizer, budget: int, prompt: str, text: str, expected: str
) -> None:
    assert written(tokenizer, budget, text, prompt) == expected


@pytest.mark.parametrize(
    ("budget", "text", "expected"),
    [
        (3, "ab</t", "ab</think>"),  # "</" is one token
        (4, "ab</tx", "ab</think>x"),
        (5, "ab</thx", "ab</think>x"),
        (6, "ab</think>x", "ab</think>x"),
        (3, "ab<c", "ab</think>c"),  # begun by another token than the tag's own
        (4, "ab<<c", "ab<</think>c"),
    ],
)
def test_a_tag_of_several_tokens_that_is_begun_is_completed(
    budget: int, text: str, expected: str
) -> None:
    assert written(PLAIN, budget, text, "<think>") == expected


def test_of_a_tag_that_repeats_itself_the_most_is_begun() -> None:
    params = SamplingParams(thinking_token_budget=9, thinking_tags=("(", "--b"))
    state = Thought(read_tags(params, PLAIN, 10**6), 3, ids(PLAIN, "("), False)
    assert state.forced(ids(PLAIN, "x--")) == ids(PLAIN, "b")[0]


def test_a_tag_of_one_token_is_forced_as_a_whole() -> None:
    begun = [ids(TOKENS, letter)[0] for letter in "ab</thi"]
    assert thought(TOKENS, 3, "<think>").forced(begun) == ids(TOKENS, "</think>")[0]


@pytest.mark.parametrize(("encoded", "forced"), [(3, 3), (4, 1), (5, 1)])
def test_a_rest_that_is_encoded_as_another_text_is_none(encoded: int, forced: int) -> None:
    texts = {1: b"</", 2: b"think>", 3: b"thi", 4: b" think>", 5: b"", 6: b"<", 7: b"/"}
    tags = TagTokens(
        (b"<think>",), (b"</think>",), (1, 2), texts.__getitem__, lambda _: [encoded], bool
    )
    assert tags.closing_token((6, 7)) == forced


def test_the_opening_tag_begins_no_closing_tag() -> None:
    params = SamplingParams(thinking_token_budget=9, thinking_tags=("(-", "-)"))
    state = Thought(read_tags(params, PLAIN, 10**6), 0, ids(PLAIN, "x"), False)
    assert state.forced(ids(PLAIN, "(-")) == ids(PLAIN, "-")[0]
    assert state.forced(ids(PLAIN, "(--")) == ids(PLAIN, ")")[0]


def test_an_opening_tag_within_a_thought_opens_none_after_it() -> None:
    text = "a<think>b</think>cdefgh"
    assert written(TOKENS, 3, text, "<think>") == text


def test_a_tag_in_other_tokens_than_its_own_is_one() -> None:
    """As the reader of answers finds it."""
    letters = [ids(TOKENS, letter)[0] for letter in "ab</think>cdef"]
    assert thought(TOKENS, 3, "<think>").forced(letters) is None
    opened = [ids(TOKENS, letter)[0] for letter in "<think>abc"]
    assert thought(TOKENS, 3).forced(opened) == ids(TOKENS, "</think>")[0]


def test_a_token_that_has_text_before_the_closing_tag_is_of_the_thought() -> None:
    tags = read_tags(
        SamplingParams(thinking_token_budget=9, thinking_tags=("(", "n)")), PLAIN, 10**6
    )
    state = Thought(tags, 3, ids(PLAIN, "("), False)
    output = ids(PLAIN, "xan)(")  # "an" is one token
    assert state.forced(output) is None
    assert state.forced([*output, *ids(PLAIN, "b")]) == ids(PLAIN, "n")[0]


def test_with_a_form_only_the_beginning_of_an_answer_is_a_thought() -> None:
    assert written(PLAIN, 1, '{"<think>abc', only_first=True) == '{"<think>abc'
    assert written(PLAIN, 1, "<think>abc", only_first=True) == "<think>a</think>bc"
    assert written(PLAIN, 1, " \n<think>abc", only_first=True) == " \n<think>a</think>bc"
    assert written(PLAIN, 1, "<think>abc", "ab", only_first=True) == "<think>a</think>bc"
    assert written(PLAIN, 1, "think>abc", "<", only_first=True) == "think>a</think>bc"
    far = "a       <think>bcd"  # the text that is looked at is blank, and the beginning is not
    assert written(TOKENS, 1, far, only_first=True) == far
    long = "x" * 40 + "<think>abc"
    assert written(PLAIN, 1, long, only_first=True) == long
    assert written(PLAIN, 1, "ab<think>cd", "<think>", True) == "a</think>b<think>cd"
    assert written(PLAIN, 1, "a</think><think>cd", "<think>", True) == "a</think><think>cd"


def test_a_fork_goes_on_alone() -> None:
    state = thought(TOKENS, 2, "<think>")
    tokens = ids(TOKENS, "ab")
    assert state.forced(tokens[:1]) is None
    fork = state.fork()
    assert fork.forced(tokens) is not None
    assert state.forced([*tokens[:1], *ids(TOKENS, "</think>")]) is None


def test_whether_a_token_may_be_forced_after_the_next() -> None:
    def may(budget: int, text: str, prompt: str = "") -> bool:
        return thought(TOKENS, budget, prompt).may_force_next(ids(TOKENS, text))

    assert not may(1, "")
    assert may(0, "")
    assert may(1, "", "<think>")
    assert not may(2, "", "<think>")
    assert may(2, "a", "<think>")
    assert may(1, "a</think>", "<think>")
    assert not may(2, "a</think>", "<think>")
    done = Thought(
        read_tags(SamplingParams(thinking_token_budget=0), TOKENS, 10**6), 0, ids(TOKENS, "x"), True
    )
    assert not done.may_force_next(ids(TOKENS, "x" * 60))


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>abcd<|end|><|start|>assistant<|channel|>final<|message|>efg",
            "<|channel|>analysis<|message|>ab<|end|>cd<|end|><|start|>assistant<|channel|>final<|message|>efg",
        ),
        ("<|start|>assistant<|channel|>analysis<|message|>", "abc", "ab<|end|>c"),
        (  # a call
            "<|start|>assistant",
            " to=python<|channel|>analysis<|message|>abcd",
            " to=python<|channel|>analysis<|message|>abcd",
        ),
        (
            "<|start|>assistant<|channel|>analysis<|message|>x<|end|><|start|>assistant",
            "<|channel|>final<|message|>abcd",
            "<|channel|>final<|message|>abcd",
        ),
    ],
)
def test_harmony(prompt: str, text: str, expected: str) -> None:
    tokenizer = new_tokenizer("<|start|><|channel|><|message|>")
    assert model_tags(tokenizer) is THINK_HARMONY
    assert written(tokenizer, 2, text, prompt) == expected


def test_variants_of_a_tag() -> None:
    tokenizer = new_tokenizer("Here is my thought process:")
    assert model_tags(tokenizer) is THINK_GRANITE
    opening = "Here's my thought process:"
    text = f"{opening} abcdef"
    assert written(tokenizer, 3, text) == f"{opening} abHere is my response:cdef"
    begun = f"{opening} aHere's my"
    assert written(tokenizer, 11, begun) == f"{begun} response:"
    given = SamplingParams(thinking_token_budget=3, thinking_tags=THINK_GRANITE.pair)
    assert len(read_tags(given, PLAIN, 10**6).closes) == 2


def test_the_tags_of_a_response_template_win() -> None:
    fields = {"thinking": {"open": "<a>", "close": "</a>"}}
    built = new_tokenizer().backend
    tokenizer = Tokenizer(built, chat_template="</think>", response_template={"fields": fields})
    tags = model_tags(tokenizer)
    assert tags is not None
    assert tags.pair == ("<a>", "</a>")
    fields["thinking"] = {"open_pattern": "<a>", "close": "</a>"}
    assert model_tags(tokenizer) is THINK


def test_what_cannot_have_a_budget_is_refused() -> None:
    params = SamplingParams(thinking_token_budget=5)
    with refuses(RequestError, "thinking_token_budget is 5", "needs a tokenizer"):
        read_tags(params, None, 10)
    with refuses(RequestError, "thinking_token_budget is 5", "not known", "thinking_tags"):
        read_tags(params, new_tokenizer("no tags"), 10**6)
    with refuses(RequestError, "thinking_token_budget is 5", "'</think>'"):
        read_tags(params, TOKENS, 10)
    lower = new_tokenizer()
    lower.backend.normalizer = normalizers.Lowercase()
    upper = SamplingParams(thinking_token_budget=5, thinking_tags=("<A>", "</A>"))
    with refuses(RequestError, "do not write the closing tag '</A>'"):
        read_tags(upper, Tokenizer(lower.backend, chat_template="</think>"), 10**6)
    joined = new_tokenizer()
    joined.backend.decoder = decoders.WordPiece()
    with refuses(RequestError, "thinking_token_budget is 5", "together"):
        read_tags(params, Tokenizer(joined.backend, chat_template="</think>"), 10**6)


def new_row(state: Thought | None, output: list[int], **params: object) -> SamplingRow:
    given = SamplingParams(**params)  # type: ignore[arg-type]
    return SamplingRow(given, 7, (1, 2), output, frozenset({3}), thought=state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_token_is_drawn_whatever_else_is_asked(temperature: float) -> None:
    """Its log-probability is the model's, and the rows beside it have the bits of a step alone."""
    size = TOKENS.vocab_size
    closing = ids(TOKENS, "</think>")[0]
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(1))
    params = {"temperature": temperature, "logprobs": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.2}
    barred = {"allowed_token_ids": [5], "logit_bias": {closing: -100.0}, "min_tokens": 9}
    forced = new_row(
        thought(TOKENS, 1, "<think>"),
        [1],
        **params,
        **barred,
        max_tokens=20,
        repetition_penalty=1.5,
    )
    free = new_row(thought(TOKENS, 2, "<think>"), [1], **params)
    plain = new_row(None, [1], **params)
    drawn = sample(logits, [forced, free, plain])
    assert drawn[0].token_id == closing
    assert drawn[0].logprobs is not None
    by_token = {token: logprob for token, logprob, _ in drawn[0].logprobs}
    assert by_token[closing] == logits.log_softmax(-1)[0, closing].item()
    assert drawn[1] == sample(logits[1:2], [new_row(None, [1], **params)])[0]
    assert drawn[2] == sample(logits[2:], [plain])[0]
    assert forced.changes_logits
    assert not free.changes_logits
    assert free.may_follow is False
    assert plain.may_follow


def test_rows_along_an_answer_force_where_it_was_forced() -> None:
    size = TOKENS.vocab_size
    output = ids(TOKENS, "ab</think>cd")
    row = new_row(thought(TOKENS, 2, "<think>"), [], temperature=0.0)
    rows = row.along(output, len(output))
    assert [one.forced for one in rows] == [None, None, output[2], None, None]
    drawn = sample(torch.zeros(len(rows), size), rows)
    assert [one.token_id for one in drawn] == [0, 0, output[2], 0, 0]
    assert row.forced is None


def test_a_row_that_was_forked_has_a_thought_of_its_own() -> None:
    row = new_row(thought(TOKENS, 2, "<think>"), [])
    assert row.fork(ids(TOKENS, "ab")).forced == ids(TOKENS, "</think>")[0]
    assert row.forced is None


@pytest.mark.parametrize("has_place", [True, False, None])
def test_a_grammar_without_a_place_for_the_tag_wins(has_place: bool | None) -> None:
    """None: the grammar has an error, and permits nothing."""
    closing = ids(TOKENS, "</think>")[0]
    permitted = np.zeros(TOKENS.vocab_size, np.bool_)
    permitted[[5, closing]] = True, bool(has_place)
    grammar = SimpleNamespace(
        permitted=lambda *_: None if has_place is None else permitted, stop_token_ids=frozenset()
    )
    row = SamplingRow(
        SamplingParams(temperature=0.0),
        7,
        (1, 2),
        ids(TOKENS, "a"),
        frozenset({3}),
        grammar=cast(Any, grammar),
        thought=thought(TOKENS, 1, "<think>"),
    )
    assert row.forced == (closing if has_place else None)
    if has_place is not None:
        drawn = sample(torch.zeros(1, TOKENS.vocab_size), [row])
        assert drawn[0].token_id == (closing if has_place else 5)
