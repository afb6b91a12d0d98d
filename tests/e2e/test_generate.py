"""Generation end to end on the shipped model. The oracle of tokens and probabilities is
transformers in float32.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refuses
from transformers import AutoModelForCausalLM, AutoTokenizer

from freight import LLM, SamplingParams
from freight.checkpoint.reader import resolve_model
from freight.errors import ConfigError, RequestError
from freight.lab.evaluate.report import compare_caches
from freight.outputs import FinishReason, TokenLogprobs
from freight.settings.engine import EngineArgs

DEMO = resolve_model("demo")
BASE = Path(__file__).parents[1] / "fixtures" / "base_bf16"
BOS, EOS = 0, 1
PROMPTS = [
    "def main(",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = ",
    "import os\n",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", kv_cache_memory="32MiB", max_model_len=256)


def oracle_logprobs(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities after each token, [tokens, vocabulary]."""
    with torch.inference_mode():
        return torch.log_softmax(oracle(torch.tensor([token_ids])).logits[0].float(), -1)


def assert_agrees(entry: TokenLogprobs, token: int, expected: torch.Tensor, count: int) -> None:
    """`entry` has the `count` most likely tokens and `token`, with the oracle's log-probabilities
    and ranks.
    """
    assert set(entry) == {*expected.topk(count).indices.tolist(), token}
    for other, logprob in entry.items():
        assert logprob.logprob == pytest.approx(expected[other].item(), abs=1e-4)
        assert logprob.rank == int((expected > expected[other]).sum()) + 1


def test_greedy_tokens_and_logprobs_are_those_of_transformers(llm: LLM, oracle: Any):
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=4, prompt_logprobs=2)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for output in llm.generate(PROMPTS, params):
        prompt, (completion,) = output.prompt_token_ids, output.outputs
        start = len(prompt) - 1
        assert prompt == tokenizer(output.prompt)["input_ids"]
        expected = oracle_logprobs(oracle, prompt + completion.token_ids)
        assert completion.token_ids == expected[start:-1].argmax(-1).tolist()
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.logprobs is not None
        entries = zip(completion.token_ids, completion.logprobs, expected[start:-1], strict=True)
        for token, entry, row in entries:
            assert_agrees(entry, token, row, 4)
        own = expected[range(start, len(expected) - 1), completion.token_ids]
        assert completion.cumulative_logprob == pytest.approx(own.sum().item(), abs=1e-3)
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        for position, entry in enumerate(others):
            assert entry is not None
            assert_agrees(entry, prompt[position + 1], expected[position], 2)


def test_completions_of_one_prompt_share_its_blocks(llm: LLM):
    assert llm.engine.tokenizer is not None
    prompt = llm.engine.tokenizer.encode("# of one prompt\n" + PROMPTS[1] * 3)
    shared = (len(prompt) - 1) // 16
    assert shared >= 3
    params = SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True)
    held = []
    drafts = llm.engine.scheduler.most_drafts - 2  # of a step of three, which has their blocks
    for output in llm.stream(prompt, params):
        lengths = [len(prompt) + len(completion.token_ids) for completion in output.outputs]
        if not output.finished:
            held.append(llm.engine.cache.num_held)
            known = [length - 1 + drafts for length in lengths]  # at most, and one is drawn
            assert held[-1] <= shared + sum(-(-count // 16) - shared for count in known)
    assert max(held) < 3 * shared
    assert llm.engine.cache.num_held == 0
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert all(len(completion.token_ids) == 20 for completion in output.outputs)


def test_the_same_seed_gives_the_same_tokens(llm: LLM):
    def tokens(model: LLM, **params: Any) -> list[list[int]]:
        (output,) = model.generate(PROMPTS[0], SamplingParams(n=2, max_tokens=12, **params))
        return [completion.token_ids for completion in output.outputs]

    assert tokens(llm, seed=7) == tokens(llm, seed=7)
    assert tokens(llm, seed=7) != tokens(llm, seed=8)
    assert tokens(llm) != tokens(llm)  # no seed: a fresh one for each request
    small: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_model_len": 128}
    runs = [LLM(str(DEMO), **small, seed=seed) for seed in (3, 3, 4)]
    first, again, other = map(tokens, runs)
    assert first == again != other


def test_stop_strings_end_the_text_exactly(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (free,) = llm.generate(PROMPTS[0], params)[0].outputs
    for stop in (free.text[5:8], free.text[9]):
        stopping = SamplingParams(temperature=0.0, max_tokens=24, stop=["\0", stop])
        (completion,) = llm.generate(PROMPTS[0], stopping)[0].outputs
        assert completion.text == free.text[: free.text.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
        assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) < len(free.token_ids)


def test_stop_ids_end_a_completion_and_are_no_text(llm: LLM):
    (free,) = llm.generate(PROMPTS[0], GREEDY)[0].outputs
    stop = free.token_ids[6]
    params = SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[stop])
    (completion,) = llm.generate(PROMPTS[0], params)[0].outputs
    assert completion.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
    assert llm.engine.tokenizer is not None
    assert completion.text == llm.engine.tokenizer.decode(completion.token_ids[:-1])


def test_the_model_s_own_end_of_text(llm: LLM):
    def run(**params: Any) -> tuple[list[int], FinishReason | None]:
        params = {"temperature": 0.0, "max_tokens": 9, "logit_bias": {EOS: 1000.0}, **params}
        (completion,) = llm.generate(PROMPTS[0], SamplingParams(**params))[0].outputs
        assert completion.stop_reason is None
        return completion.token_ids, completion.finish_reason

    assert run() == ([EOS], FinishReason.STOP)
    tokens, reason = run(min_tokens=5)
    assert (tokens.index(EOS), len(tokens), reason) == (5, 6, FinishReason.STOP)
    assert run(ignore_eos=True) == ([EOS] * 9, FinishReason.LENGTH)
    tokens, reason = run(min_tokens=9)
    assert (EOS in tokens, len(tokens), reason) == (False, 9, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_length_at_the_end_of_the_context(max_tokens: int | None, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "freight")
    llm = LLM(str(BASE), skip_tokenizer_init=True, kv_cache_memory="1MiB", max_model_len=40)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    short, longest = llm.generate([[5, 6, 7], [9] * 39], params)
    assert [len(short.outputs[0].token_ids), len(longest.outputs[0].token_ids)] == [37, 1]
    assert {output.outputs[0].finish_reason for output in (short, longest)} == {FinishReason.LENGTH}
    assert short.outputs[0].text == ""
    assert "outputs have no text" in caplog.text
    assert llm.engine.cache.num_held == 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=2, max_tokens=16, logprobs=1)])
def test_a_stream_ends_with_what_generate_gives(llm: LLM, params: SamplingParams):
    outputs = list(llm.stream(PROMPTS[0], params))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == list(range(1, len(outputs) + 1))
    texts = [output.outputs[0].text for output in outputs]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert outputs[-1].outputs == llm.generate(PROMPTS[0], params)[0].outputs
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_leaving_a_stream_frees_everything(llm: LLM):
    before = llm.generate(PROMPTS[2], GREEDY)[0].outputs
    stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=100, n=2))
    next(stream)
    next(stream)
    assert llm.engine.cache.num_held > 0
    stream.close()
    assert llm.engine.cache.num_held == 0
    assert not llm.engine.has_unfinished
    assert llm.generate(PROMPTS[2], GREEDY)[0].outputs == before


def test_stop_ids_are_the_union_of_both_configs(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    llm = LLM(str(folder), skip_tokenizer_init=True, kv_cache_memory="1MiB")
    for token, count in ((2, 1), (5, 1), (7, 1), (6, 4)):
        bias = {token: 1000.0}
        params = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=bias, logprobs=0)
        (completion,) = llm.generate([11, 12], params)[0].outputs
        assert completion.token_ids == [token] * count
        assert completion.logprobs is not None
        assert completion.logprobs[0][token].decoded_token is None


def test_prompts_of_every_form_with_parameters_each(llm: LLM):
    ids = llm.generate(PROMPTS[0], GREEDY)[0].prompt_token_ids
    prompts = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (3, 5, 7, 9)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, PROMPTS[0], None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5, 7, 9]
    answers = [output.outputs[0].token_ids for output in outputs]
    assert all(answers[3][: len(answer)] == answer for answer in answers)
    assert llm.generate(ids, GREEDY)[0].outputs == llm.generate([ids], GREEDY)[0].outputs
    assert llm.generate([]) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-3)])
def test_perplexity_is_that_of_transformers(dtype: str, tolerance: float):
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[:4000]
    args = EngineArgs(model="demo", dtype=dtype)
    (score,) = compare_caches(args, [], text, window=256)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    losses = []
    for start in range(0, len(token_ids), 256):
        part = token_ids[start : start + 256]
        logprobs = oracle_logprobs(model, [BOS, *part[:-1]])
        losses.append(-logprobs[torch.arange(len(part)), part])
    expected = torch.cat(losses).double().mean().exp().item()
    assert score.num_tokens == len(token_ids) > 900
    assert score.perplexity == pytest.approx(expected, rel=tolerance)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(DEMO, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return LLM(str(folder), kv_cache_memory="8MiB", max_model_len=128)


def test_chat_has_exactly_one_begin_token(chat: LLM):
    messages = [{"role": "system", "content": "write code"}, {"role": "user", "content": "hello"}]
    (output,) = chat.chat(messages, GREEDY)
    assert output.prompt_token_ids.count(BOS) == 1
    assert output.prompt_token_ids[0] == BOS
    written = "# system: write code\n# user: hello\n# assistant: "
    assert chat.engine.tokenizer is not None
    assert chat.engine.tokenizer.decode(output.prompt_token_ids) == written
    assert output.outputs == chat.generate(written, GREEDY)[0].outputs
    both = chat.chat([messages, messages[1:]], GREEDY)
    assert both[0].outputs == output.outputs
    assert len(both[1].prompt_token_ids) < len(both[0].prompt_token_ids)


def test_chat_refuses_what_is_no_list_of_messages(chat: LLM):
    others: list[Any] = [{"role": "user", "content": "x"}, "hello", None, 5, iter([]), ["hello"]]
    for other in others:
        with refuses(RequestError, "messages", '[{"role": "user", "content": "Hello"}]'):
            chat.chat(other, GREEDY)


def test_chat_takes_the_options_that_its_template_reads(chat: LLM):
    messages = [{"role": "user", "content": "hello"}]
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    for option, instead in (
        ({"use_tqdm": False}, "'use_tqdm': use progress"),
        (kwargs, "'chat_template_kwargs'.*keywords"),
        ({"chat_template": TEMPLATE}, "'chat_template'.*template"),
        ({"tools": []}, "'tools'.*chat template"),
        ({"tokenize": False}, "'tokenize'.*chat template"),
    ):
        with pytest.raises(ConfigError, match=instead):
            chat.chat(messages, GREEDY, **option)
    options = {"add_generation_prompt": False, "continue_final_message": False}
    ids = chat.chat_prompt(messages, bos_token="", **options)
    assert len(ids) < len(chat.chat_prompt(messages))
