"""LLM: the engine for Python callers. Names are those that vLLM's users know."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from freight.base import terminal
from freight.base.start_log import log_to_stderr
from freight.engine.adapters import LoadedAdapter, LoRARequest
from freight.engine.build import BeforeWeights, cache_facts, start_engine
from freight.engine.intake import AcceptedPrompt
from freight.engine.messages import level_of_tags
from freight.engine.renewal import Renewal, Source
from freight.engine.turns import Turns
from freight.engine.verification import (
    NO_SEED,
    OTHER_KERNELS,
    Verification,
    compare_output,
    has_no_seed,
    unknown,
)
from freight.engine.watch import cache_watched
from freight.errors import RequestError
from freight.model.config.pooling import PoolingConfig
from freight.model.open import open_model
from freight.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    FinishReason,
    PooledOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from freight.pooling import PoolingParams, PoolingTask
from freight.sampling import SamplingParams
from freight.settings.engine import EngineArgs, EngineConfig
from freight.text.pooling_inputs import named_prompt, pair_tokens
from freight.text.prompts import (
    Message,
    Prompt,
    Tokenization,
    chat_prompt,
    check_on_error,
    cosine,
    pairs_of,
    params_of,
    prompts_of,
    raise_failed,
    require_tokenizer,
    text_or_ids,
    unknown_option,
)

Accepted = tuple[AcceptedPrompt, SamplingParams]
Adapted = LoRARequest | Sequence[LoRARequest | None] | None


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
        opened = open_model(args)
        self.engine, config = start_engine(opened, before_weights)
        self._renewal = Renewal(self.engine, opened, config)
        self._ids = itertools.count()
        self._turns = Turns(self.engine.release)

    @property
    def config(self) -> EngineConfig:
        """The decisions that the options, the checkpoint and the device came to."""
        return self._renewal.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        on_error: str = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapted = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in the order given.

        A prompt is a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": [int]}.
        `sampling_params` is one for all or one for each. `progress` shows a bar on stderr. Raises
        RequestError for any prompt that cannot be served, before the first is computed. A prompt
        that fails while it is computed stops no other: at the end `on_error="raise"` raises
        GenerationError, whose `outputs` has all, and "return" returns all, the failed completions
        with finish reason "error". `tokenization_kwargs` may have `add_special_tokens` (True unless
        given) and `truncate_prompt_tokens`, in place of that of `sampling_params`. `lora_request` names
        the adapter of all prompts, or of each; None: the model alone. `unknown` names, such as vLLM's
        use_tqdm, are a ConfigError.
        """
        for name in unknown:
            raise unknown_option(
                name,
                "generate takes prompts, sampling_params, progress, on_error, tokenization_kwargs and lora_request",
            )
        check_on_error(on_error)
        accepted = self._accept_all(prompts, sampling_params, Tokenization.of(tokenization_kwargs))
        adapted = _for_each(lora_request, len(accepted))
        ids: list[str] = []
        try:
            with cache_watched(self.engine):
                self._turns.run(lambda: self._add_all(ids, accepted, adapted))
                self._run(ids, progress)
            outputs = self._turns.run(
                lambda: [self.engine.output(request_id) for request_id in ids]
            )
        finally:
            self._turns.released.extend(ids)
            self._turns.tidy()
        if on_error == "raise":
            raise_failed(outputs)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_error: str = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the complete output so far after each step with a token, or
        with several where drafts came true.

        The request is checked now, queued when the first output is asked for, and computed on
        whenever this stream or any other call of the LLM takes a step. Leaving the loop aborts it.
        A failure is raised or returned after the last output, as in `generate`.
        """
        check_on_error(on_error)
        accepted = self._accept_all([prompt], sampling_params, Tokenization.of(tokenization_kwargs))
        return self._stream(accepted, on_error, lora_request)

    def _stream(
        self, accepted: list[Accepted], on_error: str, lora_request: LoRARequest | None
    ) -> Iterator[RequestOutput]:
        ids: list[str] = []
        try:
            with cache_watched(self.engine):
                self._turns.run(lambda: self._add_all(ids, accepted, [lora_request]))
                seen = 0
                while True:
                    output, seen = self._turns.run(partial(self._advance, ids[0], seen))
                    if output is not None:
                        yield output
                        if output.finished:
                            break
                if on_error == "raise":
                    raise_failed([output])
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
        lora_request: Adapted = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or many, with the model's chat
        template.

        `template_options` are those of `chat_prompt`; everything else is as in `generate`, except
        that no special tokens are added to the template's output unless `tokenization_kwargs` asks
        for them.
        """
        added = bool(Tokenization.of(tokenization_kwargs).add_special_tokens)
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
            lora_request=lora_request,
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
        lora_request: Adapted = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of one prompt or of many, in the order given.

        prompt_name: which of the model's own prompts is put before each text ("query"); None: its
        default, if it has one. A prompt of token ids has none. truncate_prompt_tokens: keep the first
        tokens, so many; -1: as many as the context has room for; None: a longer prompt is refused.
        Otherwise as `generate`. Raises RequestError for a model that gives no embeddings, and for a
        name that it has no prompt of.
        """
        params = pooling_params or PoolingParams()
        config = self._pooling(params.task)
        named = []
        for prompt in prompts_of(prompts):
            text = text_or_ids(prompt)
            if isinstance(text, str):
                text = named_prompt(config, text, prompt_name)
            named.append(text)
        outputs = self._pooled(named, params, truncate_prompt_tokens, progress, lora_request)
        return _results(outputs, EmbeddingOutput)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
        lora_request: Adapted = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return a number for each class, of one prompt or of many: probabilities, unless
        `use_activation` is False. Otherwise as `embed`.
        """
        params = pooling_params or PoolingParams(task=PoolingTask.CLASSIFY)
        texts = [text_or_ids(prompt) for prompt in prompts_of(prompts)]
        outputs = self._pooled(texts, params, truncate_prompt_tokens, progress, lora_request)
        return _results(outputs, ClassificationOutput)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return how well each text of `data_2` fits to its text of `data_1`, or to the only one.

        A model that scores pairs reads both as one prompt, with `instruction` where its template has
        one; of a pair that is too long the end of the second text is left out. One that embeds gives
        the cosine of the two embeddings. Otherwise as `embed`.
        """
        queries, documents = pairs_of(data_1, data_2)
        config = self.engine.intake.pooling
        if config is None or config.task is PoolingTask.CLASSIFY:
            params = pooling_params or PoolingParams(task=PoolingTask.CLASSIFY)
            prompts, each = self._pairs(
                queries, documents, params, instruction, truncate_prompt_tokens
            )
            outputs = self._pooled(prompts, each, truncate_prompt_tokens, progress, lora_request)
            return _results(outputs, lambda values: ScoringOutput(values[0]))
        if instruction is not None:
            raise RequestError("instruction is for models that score pairs; this one embeds texts")
        firsts = list(dict.fromkeys(queries))
        embedded = self.embed(
            [*firsts, *documents],
            pooling_params=pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            progress=progress,
            lora_request=lora_request,
        )
        of_query = dict(zip(firsts, embedded, strict=False))
        scored = []
        for query, document in zip(queries, embedded[len(firsts) :], strict=True):
            scored.append(_cosine_of(of_query[query], document))
        return scored

    def _pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        params: PoolingParams,
        instruction: str | None,
        most: int | None,
    ) -> tuple[list[Sequence[int]], list[PoolingParams]]:
        """Return each pair as the tokens that the model reads, `most` of them, and its parameters.
        Raises RequestError.
        """
        config = self._pooling(params.task)
        if config.size != 1:
            raise RequestError(
                f"this model gives {config.size} scores, and a pair has one; use LLM.classify"
            )
        tokenizer = require_tokenizer(self.engine.tokenizer)
        if most == -1:
            most = self.engine.intake.max_model_len
        prompts: list[Sequence[int]] = []
        each = []
        for query, document in zip(queries, documents, strict=True):
            pair = pair_tokens(tokenizer, config, query, document, instruction, most)
            prompts.append(pair.token_ids)
            each.append(replace(params, first_segment=pair.first_segment))
        return prompts, each

    def _pooling(self, task: PoolingTask) -> PoolingConfig:
        """Return how the model pools. Raises RequestError where it does not do `task`."""
        self.engine.intake.check_task(PoolingParams(task=task))
        config = self.engine.intake.pooling
        assert config is not None
        return config

    def _pooled(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: PoolingParams | Sequence[PoolingParams],
        truncate_prompt_tokens: int | None,
        progress: bool,
        lora_request: Adapted,
    ) -> list[RequestOutput]:
        all_of_them = [params] if isinstance(params, PoolingParams) else params
        sampling_params = [
            SamplingParams(
                max_tokens=0, pooling=pooling, truncate_prompt_tokens=truncate_prompt_tokens
            )
            for pooling in all_of_them
        ]
        if isinstance(params, PoolingParams):
            sampling_params *= len(prompts)
        return self.generate(prompts, sampling_params, progress=progress, lora_request=lora_request)

    def update_weights(self, weights: Source) -> None:
        """Go on with other weights of the same model: a folder or a hub id, or all its tensors, by the
        names that its files have, as a mapping or as pairs. They are copied, and quantized as they would be
        at the start. The prefix cache is emptied, adapters are loaded again from their paths, and
        `fingerprint` changes.

        Raises ConfigError and CheckpointError for weights that do not fit, CapacityError where they
        have no room beside the old ones, and RequestError while requests of other threads run. The old weights
        stay then.
        """
        self._turns.run(lambda: self._renewal.update(weights))

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1, that of the cache, and on a GPU also that of the weights, which wait in
        the host's memory; 2, that of the weights, too, which `wake_up` reads from their files.
        Prompts are refused until then. Raises RequestError while requests run.
        """
        self._turns.run(lambda: self._renewal.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back. `tags` of ["weights"] takes that of the weights
        alone, so that an update does not have to fit beside the cache.

        Raises CheckpointError where the files of the weights are gone, RequestError for another tag.
        """
        level = level_of_tags(tags)
        self._turns.run(lambda: self._renewal.wake_up(level))

    @property
    def is_sleeping(self) -> bool:
        return self._renewal.level > 0

    def reset_prefix_cache(self) -> None:
        """Find no block of the cache again. Those of a store are found still."""
        self._turns.run(self._renewal.reset_prefix_cache)

    @property
    def fingerprint(self) -> str:
        """What decides the bits of this engine, weights included: 'fp_' and 16 digits."""
        return self._turns.run(self._renewal.fingerprint)

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter under a name, for `LoRARequest(name)`. One that has the name is replaced:
        requests that use it end with it.

        Raises CheckpointError and ConfigError for its files, CapacityError where all of `max_loras`
        are in use, RequestError for an engine that takes none; nothing has changed then.
        """
        self._turns.run(lambda: self.engine.adapters.load(name, path))

    def unload_adapter(self, name: str) -> None:
        """Take an adapter away. Raises RequestError for a name that nothing is loaded under."""
        self._turns.run(lambda: self.engine.adapters.unload(name))

    @property
    def adapters(self) -> dict[str, str]:
        """The digests of the adapters that are loaded, by name."""
        return {adapter.name: adapter.digest for adapter in self.engine.adapters.loaded}

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
        return chat_prompt(self.engine.tokenizer, messages, add_special_tokens, template_options)

    def verify(
        self,
        outputs: RequestOutput | Sequence[RequestOutput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Adapted = None,
    ) -> list[Verification]:
        """Say of each output whether this model gives it with these parameters, without generating it
        again.

        Prompt and answer are computed in one prefill, and every token is drawn again at its own
        position, with the seed and the parameters. All that the output states is compared: tokens,
        log-probabilities, text and ends. `sampling_params` and `lora_request` are those of `generate`,
        one for all or one for each. It cannot be said (`Outcome.UNKNOWN`) of an output that was
        sampled without a seed, and where a row's bits depend on other rows: on a GPU, with the reference kernels, and
        for models of transformers. Raises RequestError for parameters that the prompt cannot be served
        with, and a token outside of the vocabulary.
        """
        requests = [outputs] if isinstance(outputs, RequestOutput) else list(outputs)
        params = params_of(sampling_params, len(requests))
        results: list[Verification | None] = [
            self._unknown(output, redrawn_result)
            for output, redrawn_result in zip(requests, params, strict=True)
        ]
        indexes = [index for index, result in enumerate(results) if result is None]
        ids: list[str] = []
        try:
            adapted = _for_each(lora_request, len(requests))
            asked = [(requests[index], params[index], adapted[index]) for index in indexes]
            self._turns.run(lambda: self._redraw_all(ids, asked))
            self._run(ids, progress=False)
            redrawn = self._turns.run(lambda: [self.engine.redrawn(name) for name in ids])
        finally:
            self._turns.released.extend(ids)
            self._turns.tidy()
        for index, redrawn_result in zip(indexes, redrawn, strict=True):
            results[index] = compare_output(requests[index], redrawn_result)
        return [result for result in results if result is not None]

    def _unknown(self, output: RequestOutput, params: SamplingParams) -> Verification | None:
        """Return why an output cannot be verified; None: it can be."""
        if not self.engine.is_reproducible:
            return unknown(OTHER_KERNELS)
        if has_no_seed(params):
            return unknown(NO_SEED)
        failed = [
            completion
            for completion in output.outputs
            if completion.finish_reason is FinishReason.ERROR
        ]
        if failed:
            return unknown(f"completion {failed[0].index} failed: {failed[0].error}")
        return None

    def _redraw_all(
        self,
        ids: list[str],
        asked: Sequence[tuple[RequestOutput, SamplingParams, LoRARequest | None]],
    ) -> None:
        for output, params, lora_request in asked:
            params = replace(params, truncate_prompt_tokens=None)  # the output has what was left
            prompt = self.engine.accept(output.prompt_token_ids, params)
            ids.append(str(next(self._ids)))
            answers = [completion.token_ids for completion in output.outputs]
            self.engine.redraw(ids[-1], prompt, params, answers, self._adapter(lora_request))

    def kv_cache_info(self) -> dict[str, Any]:
        """Describe the cache in use, under the names that every JSON of Freight uses;
        bytes_per_token includes `token` scales.

        A cache whose layers differ also has `layers`, a list of {dtype, granularity}.
        """
        runner = self.engine.runner
        return cache_facts(runner.pool, self.config, runner.num_ranks)

    def _accept_all(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        tokenization: Tokenization,
    ) -> list[Accepted]:
        """Check every prompt with its parameters. Raises the error of the first that cannot be
        served. Changes nothing.
        """
        batch = prompts_of(prompts)
        params = [
            tokenization.applied(prompt_params)
            for prompt_params in params_of(sampling_params, len(batch))
        ]
        adds = tokenization.add_special_tokens is not False
        return [
            (self.engine.accept(text_or_ids(prompt), prompt_params, adds), prompt_params)
            for prompt, prompt_params in zip(batch, params, strict=True)
        ]

    def _adapter(self, request: LoRARequest | None) -> LoadedAdapter | None:
        return None if request is None else self.engine.adapters.requested(request)

    def _add_all(
        self,
        ids: list[str],
        accepted: list[Accepted],
        adapted: Sequence[LoRARequest | None],
    ) -> None:
        """Queue all, each with its adapter. An id is in `ids` before the engine has it, so that an interrupted caller
        releases it.
        """
        for (prompt, params), request in zip(accepted, adapted, strict=True):
            ids.append(str(next(self._ids)))
            self.engine.add(ids[-1], prompt, params, self._adapter(request))

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


def _results(
    outputs: Sequence[RequestOutput], result_of: Callable[[list[float]], PooledOutput]
) -> list[PoolingRequestOutput[PooledOutput]]:
    """Return what was pooled of each prompt, as `result_of` has it."""
    results = []
    for output in outputs:
        assert output.pooled is not None, "a prompt that failed was raised"
        result = result_of(output.pooled.values.tolist())
        ids = output.prompt_token_ids
        results.append(
            PoolingRequestOutput(output.request_id, result, ids, output.num_cached_tokens)
        )
    return results


def _cosine_of(
    query: PoolingRequestOutput[EmbeddingOutput], document: PoolingRequestOutput[EmbeddingOutput]
) -> PoolingRequestOutput[ScoringOutput]:
    """Return the score of two texts by their embeddings."""
    score = cosine(query.outputs.embedding, document.outputs.embedding)
    token_ids = query.prompt_token_ids + document.prompt_token_ids
    cached = query.num_cached_tokens + document.num_cached_tokens
    return PoolingRequestOutput(document.request_id, ScoringOutput(score), token_ids, cached)


def _for_each(lora_request: Adapted, count: int) -> Sequence[LoRARequest | None]:
    """Return the adapter of each of `count` prompts. Raises RequestError for another number."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if len(lora_request) != count:
        raise RequestError(
            f"there are {len(lora_request)} lora_request and {count} prompts; give one for all, or one for each"
        )
    return lora_request
