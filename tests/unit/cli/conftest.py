"""A command line in process, and an LLM that answers without a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.environment import is_option

from freight.__main__ import run as main
from freight.engine.adapters import LoRARequest
from freight.outputs import CompletionOutput, FinishReason, RequestOutput
from freight.sampling import SamplingParams


@dataclass(frozen=True)
class Answer:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str


class FakeLLM:
    """Says 'one two three' to everything, a word per token, and remembers what it was asked."""

    made: dict[str, Any]
    asked: list[Any]
    params: list[SamplingParams]
    adapters: list[LoRARequest | None]
    template = True
    fails: Exception | type[BaseException] | None = None

    def __init__(self, *, before_weights: Callable[[Any], None], **options: Any) -> None:
        tokenizer = SimpleNamespace(has_chat_template=self.template)
        before_weights(
            SimpleNamespace(
                tokenizer=tokenizer,
                accept=lambda prompt, params: None,
                check_form=lambda form: None,
            )
        )
        type(self).made, type(self).asked, type(self).params = options, [], []
        type(self).adapters = []

    def stream(
        self, prompt: Any, params: SamplingParams, *, lora_request: LoRARequest | None
    ) -> Iterator[RequestOutput]:
        self.adapters.append(lora_request)
        self.asked.append(prompt)
        self.params.append(params)
        if self.fails:
            raise self.fails
        for words in range(1, 4):
            yield self.output(prompt, params, words)

    def generate(
        self,
        prompts: list[Any],
        params: SamplingParams,
        *,
        progress: bool,
        lora_request: LoRARequest | None,
    ) -> list[RequestOutput]:
        self.adapters.append(lora_request)
        assert not progress, "no bar where stderr is no terminal"
        self.asked.extend(prompts)
        self.params.append(params)
        return [self.output(prompt, params, 3) for prompt in prompts]

    def output(self, prompt: Any, params: SamplingParams, words: int) -> RequestOutput:
        text = " ".join(["one", "two", "three"][:words]) if params.detokenize else ""
        reason = FinishReason.LENGTH if words == 3 else None
        done = [CompletionOutput(i, text, list(range(words)), reason) for i in range(params.n)]
        text_given = isinstance(prompt, str)
        return RequestOutput(
            "0", prompt if text_given else None, [7] if text_given else prompt, done, words == 3
        )

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(message["content"]) for message in messages]

    def kv_cache_info(self) -> dict[str, Any]:
        return {
            "dtype": "fp8_e4m3fn",
            "granularity": "token",
            "scale_source": "dynamic",
            "bytes_per_token": 1,
            "num_blocks": 2,
            "block_size": 16,
            "capacity_tokens": 32,
        }


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Puts a fresh FakeLLM in the place of freight.llm.LLM."""
    fake = type("FakeLLM", (FakeLLM,), {})
    module = ModuleType("freight.llm")
    module.LLM = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "freight.llm", module)
    return fake


@pytest.fixture
def freight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Runs `freight ARGV`, with none of our variables in the environment but those given."""

    def run(*argv: str, **environ: str) -> Answer:
        with monkeypatch.context() as patch:
            for name in filter(is_option, list(os.environ)):
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["freight", *argv])
            code = 0
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
        said = capsys.readouterr()
        return Answer(code, said.out, said.err)

    return run
