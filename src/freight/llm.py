"""LLM: the engine for Python callers. Names are those that vLLM's users know."""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from freight import terminal
from freight.config.engine import EngineArgs
from freight.config.other_engines import CALLS
from freight.engine.build import BeforeWeights, build_engine, cache_facts
from freight.engine.intake import AcceptedPrompt
from freight.engine.turns import Turns
from freight.engine.watch import cache_watched
from freight.errors import ConfigError, GenerationError, RequestError, shown
from freight.outputs import RequestOutput
from freight.sampling import SamplingParams
from freight.start_log import log_to_stderr
from freight.text.tokenizer import require_chat_template

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Accepted = tuple[AcceptedPrompt, SamplingParams]


class LLM:
    """A model ready to generate.

        llm = LLM(model="demo", kv_cache_dtype="fp8")
        llm.generate(["def main("], SamplingParams(max_tokens=64, temperature=0.0))[0].outputs[0].text

    `model` is a folder, a hub id, or 'demo', the model that ships with the package. The other
    options are the fields of `EngineArgs`. Raises ConfigError for a setting that cannot be honoured
    and CheckpointError for a folder that cannot be read, both before any weight is read;
    `before_weights` is called right then, and may raise as well.

    May be called from several threads: their requests are computed together, and a step is taken by
    one thread at a time, in order of arrival. A call that is interrupted (Ctrl-C), and a stream
    that is left, take their requests with them and change nothing for other calls.
    """

    def __init__(
        self, model: str = "demo", *, before_weights: BeforeWeights | None = None, **options: Any
    ) -> None:
        log_to_stderr()
        args = EngineArgs.from_options(model=model, **options)
        self.engine, self.config = build_engine(args, before_weights)
        self._ids = itertools.count()
        self._turns = Turns(self.engine.release)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_error: str = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in the order given.

        A prompt is a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [int]}.
        `sampling_params` is one for all or one for each. `progress` shows a bar on stderr. Raises
        RequestError for any prompt that cannot be served, before the first is computed. A prompt
        that fails while it is computed stops no other: at the end `on_error="raise"` raises
        GenerationError, whose `outputs` has all, and "return" returns all, the failed completions
        with finish reason "error". `tokenization_kwargs` may have `add_special_tokens` (True unless
        given) and `truncate_prompt_tokens`, in place of that of `sampling_params`. `unknown` names,
        such as vLLM's use_tqdm, are a ConfigError.
        """
        for name in unknown:
            raise _unknown(
                name,
                "generate takes prompts, sampling_params, progress, on_error and tokenization_kwargs",
            )
        _check_on_error(on_error)
        accepted = self._accept_all(prompts, sampling_params, _Tokenization.of(tokenization_kwargs))
        ids: list[str] = []
        try:
            with cache_watched(self.engine):
                self._turns.run(lambda: self._add_all(ids, accepted))
                self._run(ids, progress)
            outputs = self._turns.run(
                lambda: [self.engine.output(request_id) for request_id in ids]
            )
        finally:
            self._turns.released.extend(ids)
            self._turns.tidy()
        if on_error == "raise":
            _raise_failed(outputs)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_error: str = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the complete output so far after each step with a token.

        The request is checked now, queued when the first output is asked for, and computed on
        whenever this stream or any other call of the LLM takes a step. Leaving the loop aborts it.
        A failure is raised or returned after the last output, as in `generate`.
        """
        _check_on_error(on_error)
        accepted = self._accept_all(
            [prompt], sampling_params, _Tokenization.of(tokenization_kwargs)
        )
        return self._stream(accepted, on_error)

    def _stream(self, accepted: list[Accepted], on_error: str) -> Iterator[RequestOutput]:
        ids: list[str] = []
        try:
            with cache_watched(self.engine):
                self._turns.run(lambda: self._add_all(ids, accepted))
                seen = 0
                while True:
                    output, seen = self._turns.run(partial(self._advance, ids[0], seen))
                    if output is not None:
                        yield output
                        if output.finished:
                            break
                if on_error == "raise":
                    _raise_failed([output])
        finally:
            self._turns.released.extend(ids)
            self._turns.tidy()

    def _advance(self, request_id: str, seen: int) -> tuple[RequestOutput | None, int]:
        """Step if the request has only `seen` deltas. Return its output, None if there is still
        nothing new, and the number of its deltas.
        """
        engine = self.engine
        engine.report()  # the deltas of steps that `generate` took in another thread
        if engine.num_deltas(request_id) == seen and not engine.is_finished(request_id):
            engine.step()
        count = engine.num_deltas(request_id)
        is_new = count > seen or engine.is_finished(request_id)
        return (engine.output(request_id) if is_new else None), count

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_error: str = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or many, with the model's chat
        template.

        `template_options` are those of `chat_prompt`; everything else is as in `generate`, except
        that no special tokens are added to the template's output unless `tokenization_kwargs` asks
        for them.

        `template_options` are those of `chat_prompt`; everything else is as in `generate`, but that
        no special tokens are added to what the template writes unless `tokenization_kwargs` asks
        for them.
        """
        added = bool(_Tokenization.of(tokenization_kwargs).add_special_tokens)
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        several = is_list and not (messages and isinstance(messages[0], Mapping))
        conversations: Any = messages if several else [messages]
        prompts = [
            self.chat_prompt(conversation, add_special_tokens=added, **template_options)
            for conversation in conversations
        ]
        return self.generate(
            prompts,
            sampling_params,
            progress=progress,
            on_error=on_error,
            tokenization_kwargs=tokenization_kwargs,
        )

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_special_tokens: bool = False,
        **template_options: Any,
    ) -> list[int]:
        """Return the token ids of a conversation.

        add_special_tokens: put the tokenizer's special tokens of a text around the template's
        output.

        template_options: add_generation_prompt, continue_final_message, and whatever the model's
        chat template reads (tools, enable_thinking, …).

        Raises ConfigError for an option that the template does not read, and for a model without a
        chat template; RequestError for messages that the template refuses.
        """
        tokenizer = require_chat_template(self.engine.tokenizer)
        read = {
            "continue_final_message",
            "add_generation_prompt",
            *re.findall(r"\w+", tokenizer.chat_template_source),
        }
        for name in template_options:
            if name not in read:
                raise _unknown(name, "the model's chat template does not read it; omit it")
        return tokenizer.encode_chat(
            tokenizer.render_chat(messages, **template_options), add_special_tokens
        )

    def kv_cache_info(self) -> dict[str, Any]:
        """Describe the cache in use, under the names that every JSON of Freight uses;
        bytes_per_token includes `token` scales.

        A cache whose layers differ also has `layers`, a list of {dtype, granularity}.
        """
        return cache_facts(self.engine.runner.pool, self.config)

    def _accept_all(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        tokenization: _Tokenization,
    ) -> list[Accepted]:
        """Check every prompt with its parameters. Raises the error of the first that cannot be
        served. Changes nothing.
        """
        batch = _prompts(prompts)
        params = [tokenization.applied(one) for one in _params(sampling_params, len(batch))]
        adds = tokenization.add_special_tokens is not False
        return [
            (self.engine.accept(_text_or_ids(prompt), one, adds), one)
            for prompt, one in zip(batch, params, strict=True)
        ]

    def _add_all(self, ids: list[str], accepted: list[Accepted]) -> None:
        """Queue all. An id is in `ids` before the engine has it, so that an interrupted caller
        releases it.
        """
        for prompt, params in accepted:
            ids.append(str(next(self._ids)))
            self.engine.add(ids[-1], prompt, params)

    def _run(self, ids: list[str], progress: bool) -> None:
        """Step until every request of `ids` is done."""
        pending = deque(ids)

        def advance() -> int:
            """Take a step; return the number of finished requests, counted only for the bar."""
            while pending and self.engine.is_finished(pending[0]):
                pending.popleft()
            if pending:
                self.engine.step(quiet_until=math.inf)  # nobody reads the deltas of a single step
            return sum(map(self.engine.is_finished, ids)) if progress else 0

        columns = (
            TextColumn("generating"),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, disable=not progress, console=terminal.console(stderr=True)) as bar:
            task = bar.add_task("", total=len(ids))
            while pending:
                bar.update(task, completed=self._turns.run(advance))


@dataclass(frozen=True)
class _Tokenization:
    """The `tokenization_kwargs` of a call. None: not given."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> _Tokenization:
        """Check `given`. Raises ConfigError for other names, and for an `add_special_tokens` that
        is no bool.
        """
        known = ("add_special_tokens", "truncate_prompt_tokens")
        for name in given or ():
            if name not in known:
                raise ConfigError(
                    f"tokenization_kwargs has {shown(name)}; it may have {' and '.join(known)}"
                )
        made = cls(**(given or {}))
        if not isinstance(made.add_special_tokens, bool | None):
            raise ConfigError(
                f"add_special_tokens is {shown(made.add_special_tokens)}; it must be True or False"
            )
        return made

    def applied(self, params: SamplingParams) -> SamplingParams:
        most = self.truncate_prompt_tokens
        return params if most is None else replace(params, truncate_prompt_tokens=most)


def _text_or_ids(prompt: Any) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            return str(prompt["prompt"])
        if keys == {"prompt_token_ids"}:
            ids = _listed(prompt["prompt_token_ids"])
            if isinstance(ids, Sequence) and not isinstance(ids, str):
                return ids
            raise RequestError(f"prompt_token_ids is {shown(ids)}; it must be a list of token ids")
        raise RequestError(
            f'a prompt dict is {{"prompt": str}} or {{"prompt_token_ids": [int]}}; this has {sorted(map(str, keys))}'
        )
    prompt = _listed(prompt)
    if isinstance(prompt, Sequence):
        return prompt
    raise RequestError(
        f"a prompt is a string, a list of token ids or a dict, not {type(prompt).__name__}"
    )


def _prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts for one prompt or many. A list or array of integers is one prompt."""
    prompts = _listed(prompts)
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts are a string, token ids, a dict or a list of these, not {type(prompts).__name__}"
        )
    batch = list(prompts)
    return [batch] if batch and all(isinstance(item, Integral) for item in batch) else batch


def _listed(value: Any) -> Any:
    """Return an array or tensor as lists of Python numbers; anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def _params(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    for one in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(one, SamplingParams):
            raise RequestError(
                f"sampling_params has a {type(one).__name__}; give a SamplingParams, or a list with one for each prompt"
            )
    if len(given) != count:
        raise RequestError(
            f"{len(given)} SamplingParams for {count} prompts; give one, or one for each"
        )
    return list(given)


def _unknown(option: str, otherwise: str) -> ConfigError:
    """Return the error for an option that a call does not have: what to use instead if another
    engine has it, else `otherwise`.
    """
    return ConfigError(f"unknown option {option!r}: {CALLS.get(option, otherwise)}")


def _check_on_error(on_error: str) -> None:
    if on_error not in ("raise", "return"):
        raise ConfigError(f"on_error is {on_error!r}; it must be 'raise' or 'return'")


def _raise_failed(outputs: Sequence[RequestOutput]) -> None:
    """Raise GenerationError if a completion of `outputs` failed."""
    failed: list[tuple[int, str]] = []
    for index, output in enumerate(outputs):
        failed += [(index, one.error) for one in output.outputs if one.error is not None]
    if not failed:
        return
    first, error = failed[0]
    which = "the prompt failed"
    if len(outputs) > 1:
        count = len({index for index, _ in failed})
        which = f"{count} of {len(outputs)} prompts failed; prompt {first}"
    raise GenerationError(f"{which}: {error}", outputs)
