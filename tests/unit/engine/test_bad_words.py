"""bad_words: which sequences of tokens are blocked, by what vLLM's own tests expect, and in greedy
decoding.

The prompts and words of `test_what_vllm_expects` are those of vLLM's
tests/samplers/test_no_bad_words.py (Apache-2.0), with a tokenizer in which they have as many tokens
as in the models of that file.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.refusals import assert_names, refuses
from tokenizers import Tokenizer as Built
from tokenizers import decoders, models, pre_tokenizers

from freight import LLM, RequestError, SamplingParams
from freight.engine.bad_words import BadWords, read_bad_words
from freight.text.tokenizer import Tokenizer

WORDS = ["Ġyears", "Ġold", "Ġolder", "years", "old", "Ġyou", "you", "w", "ord", "Ġword"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level, with some words whole. "word" has two tokens and " word" one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *WORDS]))}
    merges = [("o", "r"), ("or", "d"), ("y", "o"), ("yo", "u")]
    vocab |= {
        left + right: vocab.get(left + right, len(vocab) + at)
        for at, (left, right) in enumerate(merges)
    }
    vocab = {token: index for index, token in enumerate(vocab)}
    built = Built(models.BPE(vocab, merges, ignore_merges=True))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return Tokenizer(built)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def barred(tokenizer: Tokenizer, words: Sequence[str], output: str) -> set[str]:
    """The texts of the tokens that may not follow `output`."""
    bad = read_bad_words(words, tokenizer, tokenizer.vocab_size)
    assert bad is not None
    return {tokenizer.decode([token]) for token in bad.barred(ids(tokenizer, output))}


@pytest.mark.parametrize(
    ("words", "output", "expected"),
    [
        (["you"], "", {"you", " you"}),
        (["years"], "", {"years", " years"}),
        (["old"], " years", {"old", " old"}),
        (["years old"], "", set()),
        (["years old"], " years", {" old"}),
        (["years old"], "years", {" old"}),
        (["years old"], " old", set()),
        (["years old", "years older"], " years", {" old", " older"}),
        (["years old", "years older"], " older", set()),
    ],
)
def test_what_vllm_expects(tokenizer, words, output, expected):
    assert barred(tokenizer, words, output) == expected


def test_a_word_is_blocked_with_and_without_a_space_however_many_tokens_it_has(tokenizer):
    assert len(ids(tokenizer, "word")) == 2
    assert len(ids(tokenizer, " word")) == 1
    for word in ("word", " word"):
        assert barred(tokenizer, [word], "") == {" word"}
        assert barred(tokenizer, [word], "w") == {" word", "ord"}


def test_words_without_a_token_and_tokens_that_the_model_lacks(tokenizer):
    with refuses(RequestError, "bad_words[1] is '  '", "no token"):
        read_bad_words(["you", "  "], tokenizer, tokenizer.vocab_size)
    assert read_bad_words([], tokenizer, tokenizer.vocab_size) is None
    first = min(ids(tokenizer, "you") + ids(tokenizer, " you"))
    none = read_bad_words(["you"], tokenizer, first)
    assert none is not None
    assert none.barred([]) == []


def test_one_token_may_end_several_words():
    bad = BadWords([[5], [1, 2, 3], [2, 3], [2, 4], [9, 2, 3], [5]])
    assert bad.barred([]) == [5]
    assert sorted(bad.barred([1, 2])) == [3, 3, 4, 5]
    assert sorted(bad.barred([2])) == [3, 4, 5]
    assert bad.barred([3]) == [5]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_cache_dtype="bfloat16", kv_cache_memory="16MiB")


def test_greedy_decoding_is_that_of_a_filter_over_the_most_likely_tokens(llm):
    """Each token anew: of the 20 most likely, the first that completes no bad word, found by
    looking at all of them.
    """
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("def main(")
    plain = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24))[0].outputs[0]
    drawn = plain.token_ids

    def forms_of(word: str) -> list[list[int]]:
        return [ids(tokenizer, prefix + word.lstrip()) for prefix in ("", " ")]

    def drawn_word(length: int) -> str:
        """The first text of so many of the drawn tokens that is tokenized as it was drawn."""
        places = range(len(drawn) - length + 1)
        return next(
            word
            for place in places
            if (word := tokenizer.decode(drawn[place : place + length]).strip())
            and drawn[place : place + length] in forms_of(word)
        )

    bad = [drawn_word(1), drawn_word(2), "self"]
    forms = [form for word in bad for form in forms_of(word)]
    wanted: list[int] = []
    for _ in range(24):
        one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        step = llm.generate([[*prompt, *wanted]], one)[0].outputs[0]
        assert step.logprobs is not None
        ranked = sorted(step.logprobs[0], key=lambda token: step.logprobs[0][token].rank)
        wanted.append(
            next(
                token
                for token in ranked
                if not any([*wanted, token][-len(form) :] == form for form in forms)
            )
        )
    params = SamplingParams(temperature=0.0, max_tokens=24, bad_words=bad)
    beside = SamplingParams(temperature=0.0, max_tokens=24)
    found, other = (one.outputs[0] for one in llm.generate([prompt, prompt], [params, beside]))
    assert found.token_ids == wanted != plain.token_ids
    assert other.token_ids == plain.token_ids
    several = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=24, bad_words=bad)
    for output in llm.generate([prompt], several)[0].outputs:
        windows = [output.token_ids[at : at + len(form)] for form in forms for at in range(24)]
        assert not any(form in windows for form in forms)


def test_only_allowed_tokens_are_drawn_and_a_request_without_any_fails_alone(llm):
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    allowed = [*ids(tokenizer, " self"), *ids(tokenizer, "."), *ids(tokenizer, "x")]
    drawn = llm.generate(
        ["def main("] * 2,
        SamplingParams(temperature=2.0, n=3, max_tokens=20, allowed_token_ids=allowed),
    )
    tokens = {token for one in drawn for output in one.outputs for token in output.token_ids}
    assert 1 < len(tokens) <= len(tokens & set(allowed))
    nothing = SamplingParams(allowed_token_ids=ids(tokenizer, "x"), bad_words=["x"], max_tokens=4)
    plain = SamplingParams(temperature=0.0, max_tokens=4)
    alone = llm.generate(["def main("], plain)
    failed, other = llm.generate(["def main("] * 2, [nothing, plain], on_error="return")
    assert failed.outputs[0].finish_reason == "error"
    assert_names(failed.outputs[0].error, "allowed_token_ids", "bad_words")
    assert other.outputs[0] == alone[0].outputs[0]
    with refuses(RequestError, "allowed_token_ids", "token id 4096"):
        llm.generate("x", SamplingParams(allowed_token_ids=[5, 4096]))


def test_prompts_are_cut_and_tokenized_as_asked(llm):
    text = "def main(argv): return"
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    whole = tokenizer.encode(text)

    def prompt(params: SamplingParams | None = None, **tokenization: object) -> list[int]:
        params = params or SamplingParams(max_tokens=1)
        return llm.generate(text, params, tokenization_kwargs=tokenization)[0].prompt_token_ids

    assert prompt() == whole
    assert prompt(SamplingParams(truncate_prompt_tokens=3, max_tokens=1)) == whole[-3:]
    assert prompt(truncate_prompt_tokens=3) == whole[-3:]
    assert prompt(truncate_prompt_tokens=500) == whole
    assert prompt(add_special_tokens=False) == whole[1:] == ids(tokenizer, text)
    long = [5] * 3000
    for max_tokens, kept in ((16, 1024 - 16), (None, 1023)):
        params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens, timeout_s=1e-6)
        assert len(llm.generate([long], params)[0].prompt_token_ids) == kept
    with refuses(RequestError, "max_model_len 1024"):
        prompt(SamplingParams(truncate_prompt_tokens=-1, max_tokens=1024))
