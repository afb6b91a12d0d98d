"""BatchLLM: a class for Ray Data's `map_batches`, prompts in, answers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freight.base.fields import JsonDict, JsonObject
from freight.errors import ConfigError, shown
from freight.llm import LLM
from freight.outputs import RequestOutput
from freight.sampling import SamplingParams


class BatchLLM:
    """An LLM of its own in each worker of Ray Data.

        ds.map_batches(BatchLLM, fn_constructor_kwargs={"model": "demo"}, concurrency=2, batch_size=256)

    The column `prompt_column` has texts, lists of token ids, or conversations: lists of {"role",
    "content"}, which go through the model's chat template. To the columns of a batch are added:
    `generated_text`, `generated_tokens` (token ids), `finish_reason`, and `num_cached_tokens` of the
    prompt.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        sampling_params: SamplingParams | JsonObject | None = None,
        prompt_column: str = "prompt",
        on_error: str = "raise",
        **options: Any,
    ) -> None:
        """Load the model. `options` and what is raised are those of LLM; `on_error` is that of
        `LLM.generate`, and "return" gives a prompt that fails while it is computed the finish reason
        "error".
        """
        if isinstance(sampling_params, Mapping):
            sampling_params = SamplingParams(**sampling_params)
        if sampling_params is not None and sampling_params.n != 1:
            raise ConfigError(f"n is {sampling_params.n}; a row has one answer: omit it")
        self._params = sampling_params
        self._column = prompt_column
        self._on_error = on_error
        self._llm = LLM(model, **options)

    def __call__(self, batch: JsonDict) -> JsonDict:
        """Answer a batch, a dictionary of columns. Raises ConfigError where the column of prompts is
        missing, RequestError for a prompt that cannot be served.
        """
        if self._column not in batch:
            raise ConfigError(
                f"there is no column {shown(self._column)}; the batch has {', '.join(batch)}: "
                "prompt_column names another"
            )
        columns: dict[str, list[object]] = {
            "generated_text": [],
            "generated_tokens": [],
            "finish_reason": [],
            "num_cached_tokens": [],
        }
        for output in self._answer([_plain(prompt) for prompt in batch[self._column]]):
            answer = output.outputs[0]
            columns["generated_text"].append(answer.text)
            columns["generated_tokens"].append(list(answer.token_ids))
            columns["finish_reason"].append(str(answer.finish_reason))
            columns["num_cached_tokens"].append(output.num_cached_tokens)
        return batch | columns

    def _answer(self, prompts: Sequence[Any]) -> list[RequestOutput]:
        is_chat = bool(prompts) and _is_conversation(prompts[0])
        if is_chat:
            return self._llm.chat(prompts, self._params, on_error=self._on_error)
        return self._llm.generate(prompts, self._params, on_error=self._on_error)


def _plain(value: object) -> Any:
    """Return a value of a column as Python's: Ray Data makes arrays of NumPy of lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _is_conversation(prompt: object) -> bool:
    is_list = isinstance(prompt, list) and bool(prompt)
    return is_list and isinstance(prompt[0], Mapping)  # type: ignore[index]
