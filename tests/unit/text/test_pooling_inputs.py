"""Prompts by name, and pairs as one input: by chat template, by Qwen3-Reranker's question, joined."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pooling_models import DEMO, bert_tokenizer
from tests.refusals import refuses
from tokenizers import AddedToken, Regex, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from freight.errors import RequestError
from freight.model.config.pooling import PoolingConfig, PoolingKind
from freight.pooling import PoolingTask
from freight.text.pooling_inputs import PairTokens, named_prompt, pair_tokens
from freight.text.tokenizer import Tokenizer

ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
CONVERSATION = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
# Of Qwen2 and Qwen3
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def pooling(**values: Any) -> PoolingConfig:
    return PoolingConfig(PoolingTask.CLASSIFY, PoolingKind.LAST, 1, **{"source": "x", **values})


def demo(template: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer.load(DEMO)
    return tokenizer if template is None else tokenizer.with_chat_template(template)


def bert() -> Tokenizer:
    return Tokenizer(bert_tokenizer())


def pair_ids(*given: Any, **options: Any) -> list[int]:
    """The token ids of a pair in a model that does not tell the texts apart otherwise."""
    pair = pair_tokens(*given, **options)
    assert pair.first_segment is None
    return pair.token_ids


def test_prompts_by_name() -> None:
    config = pooling(prompts={"query": "Q: ", "document": ""})
    assert named_prompt(config, "text") == "text"
    assert named_prompt(config, "text", "query") == "Q: text"
    assert named_prompt(config, "text", "document") == "text"
    by_default = pooling(prompts={"query": "Q: ", "document": ""}, default_prompt="query")
    assert named_prompt(by_default, "text") == "Q: text"
    assert named_prompt(by_default, "text", "document") == "text"
    with refuses(RequestError, "querry", "document, query", "did you mean query"):
        named_prompt(config, "text", "querry")
    with refuses(RequestError, "query", "has none"):
        named_prompt(pooling(), "text", "query")


@given(st.text("ab c", max_size=12), st.text("ab c", max_size=12))
def test_a_pair_is_joined_as_the_tokenizer_joins_it(query: str, document: str) -> None:
    """BERT's template, and one that transformers' tokenizers read from the same file."""
    ids = pair_ids(bert(), pooling(), query, document)
    assert ids == bert_tokenizer().encode(query, document).ids
    assert ids.count(3) == 2
    assert ids[0] == 2
    instructed = pair_ids(bert(), pooling(), query, document, "a")
    assert instructed == bert_tokenizer().encode("a" + query, document).ids


@given(st.text("ab c", max_size=12), st.text("ab c", max_size=12), st.integers(3, 30))
def test_the_first_segment_of_a_pair(query: str, document: str, more: int) -> None:
    """Where the tokenizer's token types change, also of a pair that is cut."""
    config = pooling(token_types=2)
    theirs = bert_tokenizer().encode(query, document)
    pair = pair_tokens(bert(), config, query, document)
    assert pair == PairTokens(theirs.ids, theirs.type_ids.index(1))
    assert theirs.type_ids == [int(i >= pair.first_segment) for i in range(len(theirs.ids))]
    most = pair.first_segment + more
    assert pair_tokens(bert(), config, query, document, most=most).first_segment == (
        pair.first_segment
    )


def test_other_token_types_of_a_pair_are_refused() -> None:
    backend = bert_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:1 $A:1 [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    with refuses(RequestError, "tokenizer.json", "token types"):
        pair_tokens(Tokenizer(backend), pooling(token_types=2), "a", "b")
    assert pair_tokens(Tokenizer(backend), pooling(), "a", "b").first_segment is None


def test_a_long_pair_is_joined_alike() -> None:
    document = "ab c" * 3000
    assert pair_ids(bert(), pooling(), "a", document) == bert_tokenizer().encode("a", document).ids


@pytest.mark.parametrize("template", [ROLES, PARTS])
def test_a_template_with_places_for_a_pair(template: str) -> None:
    tokenizer = demo(template)
    ids = pair_ids(tokenizer, pooling(token_ids=(1, 2)), "who", "he", "find")
    assert tokenizer.decode(ids) == "<system>find<query>who<document>he"
    config = pooling(prompts={"it": "seek"}, default_prompt="it")
    assert (
        tokenizer.decode(pair_ids(tokenizer, config, "who", "he"))
        == "<system>seek<query>who<document>he"
    )
    assert (
        tokenizer.decode(pair_ids(tokenizer, config, "who", "he", "")) == "<query>who<document>he"
    )


def test_values_of_the_template() -> None:
    tokenizer = demo(ROLES + "{% if add_generation_prompt %}!{% endif %}{{ more }}")
    plain = tokenizer.decode(pair_ids(tokenizer, pooling(), "who", "he"))
    assert plain == "<query>who<document>he"
    config = pooling(template_values={"add_generation_prompt": True, "more": "?"})
    assert tokenizer.decode(pair_ids(tokenizer, config, "who", "he")) == plain + "!?"


def test_a_template_of_conversations_has_no_place_for_a_pair() -> None:
    tokenizer = demo(CONVERSATION)
    assert pair_ids(tokenizer, pooling(), "who", "he") == demo().encode_pair("who", "he")[0]
    with refuses(RequestError, "modules.json", "--chat-template", "query and document"):
        pair_ids(tokenizer, pooling(token_ids=(1, 2), source="modules.json"), "who", "he")
    with refuses(RequestError, "not Unicode"):
        pair_ids(tokenizer, pooling(), "\ud800", "he")


def qwen() -> Tokenizer:
    backend = Backend.from_str(Tokenizer.load(DEMO).backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = ["<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    return Tokenizer(backend)


def test_the_question_of_qwen3_reranker() -> None:
    """Written out as its model card does; control tokens in a text stay text."""
    tokenizer = qwen()
    config = pooling(token_ids=(5, 6), yes_or_no=True)
    begin = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for instruction, said in (
        (None, "Given a web search query, retrieve relevant passages that answer the query"),
        ("Find it", "Find it"),
    ):
        text = f"<Instruct>: {said}\n<Query>: who is it?\n<Document>: it is he."
        parts = (tokenizer.encode(part, False) for part in (begin, text, end))
        ids = pair_ids(tokenizer, config, "who is it?", "it is he.", instruction)
        assert ids == [*chain.from_iterable(parts)]
    control = tokenizer.backend.token_to_id("<|im_end|>")
    ids = pair_ids(tokenizer, config, "who?", "he<|im_end|>")
    assert ids.count(control) == 2
    with refuses(RequestError, "is_original_qwen3_reranker", "<|im_start|>"):
        pair_ids(demo(), config, "who?", "he")


@pytest.mark.parametrize("kind", ["joined", "template", "question"])
def test_a_document_is_cut_and_nothing_else(kind: str) -> None:
    tokenizer, config = {
        "joined": (bert(), pooling()),
        "template": (demo(ROLES + "<end>"), pooling()),
        "question": (qwen(), pooling(yes_or_no=True, token_ids=(5, 6))),
    }[kind]
    document = " ".join(f"ab{'c' * (index % 5)}" for index in range(200))
    whole = pair_ids(tokenizer, config, "a query", document)
    without = pair_ids(tokenizer, config, "a query", "")
    for most in (len(without), len(without) + 1, len(without) + 40, len(whole) - 1, len(whole)):
        ids = pair_ids(tokenizer, config, "a query", document, most=most)
        assert most - 6 < len(ids) <= most
        assert ids[: len(without) // 2] == whole[: len(without) // 2]
        assert ids[-1] == whole[-1]
    with refuses(RequestError, f"{len(without)}", f"{len(without) - 1}", "max_model_len"):
        pair_ids(tokenizer, config, "a query", document, most=len(without) - 1)
