"""LLM: the engine for Python callers, one prompt or many, with the names that vLLM's users know."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from freight.config.engine import EngineArgs
from freight.engine.build import BeforeWeights, build_engine
from freight.errors import RequestError
from freight.outputs import RequestOutput
from freight.sampling import SamplingParams
from freight.tokenizer import require_chat_template

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

CUT_OFF_SHARE = 1e-3  # of the keys and values of a run: what calibrated scales cut off on other text stays well below

logger = logging.getLogger("freight")


class LLM:
    """A model ready to generate.

        llm = LLM(model="demo", kv_cache_dtype="fp8")
        llm.generate(["def main("], SamplingParams(max_tokens=64, temperature=0.0))[0].outputs[0].text

    `model` is a folder, a hub id, or 'demo', the model that ships with the package. The other options are the fields
    of `EngineArgs`. Raises ConfigError for a setting that cannot be honoured and CheckpointError for a folder that
    cannot be read, both before any weight is read; `before_weights` is called right then, and may raise as well.
    """

    def __init__(self, model: str = "demo", *, before_weights: BeforeWeights | None = None, **options: Any) -> None:
        _log_to_stderr()
        args = EngineArgs.from_options(model=model, **options)
        self.engine, self.config = build_engine(args, before_weights)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in the order given.

        A prompt is a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [int]}. `sampling_params`
        is one for all or one for each. `progress` shows a bar on stderr. Raises RequestError for any prompt that
        cannot be served, before the first is computed.
        """
        batch = _prompts(prompts)
        ids = self._add_all(batch, _params(sampling_params, len(batch)))
        try:
            with self._cache_watched():
                self._run(ids, progress)
            return [self.engine.output(request_id) for request_id in ids]
        finally:
            for request_id in ids:
                self.engine.release(request_id)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what there is after each new token. Leaving the loop aborts the request."""
        (request_id,) = self._add_all([prompt], [sampling_params or SamplingParams()])
        try:
            with self._cache_watched():
                while self.engine.has_unfinished:
                    if request_id in self.engine.step():
                        output = self.engine.output(request_id)
                        yield output
                        if output.finished:
                            return
        finally:
            self.engine.release(request_id)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or many, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [self.chat_prompt(conversation, **template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def chat_prompt(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The token ids of a conversation. Raises ConfigError for a model without a chat template."""
        return require_chat_template(self.engine.tokenizer).apply_chat_template(messages, **template_options)

    def kv_cache_info(self) -> dict[str, str | int | None]:
        """The cache in use, by the names every JSON of Freight uses; bytes_per_token includes `token` scales."""
        kv, pool = self.config.kv, self.engine.runner.pool
        return {
            "dtype": str(kv.format),
            "granularity": str(kv.granularity) if kv.granularity else None,
            "scale_source": str(kv.scale_source) if kv.scale_source else None,
            "bytes_per_token": pool.spec.bytes_per_token,
            "num_blocks": pool.num_blocks,
            "block_size": pool.spec.block_size,
            "capacity_tokens": pool.capacity_tokens,
        }

    def _add_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        """Queue all or none."""
        added: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                request_id = str(next(self._ids))
                self.engine.add(request_id, _text_or_ids(prompt), one)
                added.append(request_id)
        except BaseException:
            for request_id in added:
                self.engine.release(request_id)
            raise
        return added

    def _run(self, ids: list[str], progress: bool) -> None:
        """Step until every request of `ids` is done."""
        columns = (TextColumn("generating"), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
        with Progress(*columns, disable=not progress, console=_stderr_console()) as bar:
            task = bar.add_task("", total=len(ids))
            while self.engine.has_unfinished:
                news = self.engine.step()
                if progress:
                    bar.advance(task, sum(self.engine.output(request_id).finished for request_id in news))

    @contextmanager
    def _cache_watched(self) -> Iterator[None]:
        """Say of a run, however it ends, that NaNs were stored in the cache, or that its scales cut off too much."""
        pool = self.engine.runner.pool
        before, tokens_before = pool.counters(), self.engine.num_computed_tokens
        try:
            yield
        finally:
            nans, cut_off = (now - then for now, then in zip(pool.counters(), before, strict=True))
            stored = (self.engine.num_computed_tokens - tokens_before) * pool.values_per_token
            if nans:
                logger.warning(
                    "%d NaN were stored in the KV cache: the model computes NaN, its output means nothing", nans
                )
            if cut_off > CUT_OFF_SHARE * stored:
                logger.warning(
                    "%.1f %% of the keys and values lay beyond the range of their scales and were cut off: these "
                    "scales do not fit this model and text; --kv-scales dynamic measures them as it goes",
                    100 * cut_off / stored,
                )


def _text_or_ids(prompt: Prompt) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            return str(prompt["prompt"])
        if keys == {"prompt_token_ids"}:
            return list(prompt["prompt_token_ids"])
        raise RequestError(
            f'a prompt dict is {{"prompt": str}} or {{"prompt_token_ids": [int]}}; this has {sorted(keys)}'
        )
    if isinstance(prompt, str | Sequence):
        return prompt
    raise RequestError(f"a prompt is a string, a list of token ids or a dict, not {type(prompt).__name__}")


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(isinstance(item, int) for item in batch) else batch


def _params(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} SamplingParams for {count} prompts; give one, or one for each")
    return list(given)


def _stderr_console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _log_to_stderr() -> None:
    """What start-up decides is said even where the program has not set up logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("freight: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
