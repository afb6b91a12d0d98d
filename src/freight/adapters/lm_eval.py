"""Freight as a model of lm-eval, in process: `FreightLM` is a `TemplateLM` over `LLM`.

lm-eval 0.4.13 knows the models of its table and those that were registered in the process; it does
not search for plugins. So there are three ways to use this one:

    freight evaluate tasks MODEL --tasks arc_easy               two caches at once, with the difference
    python -m freight.lm_eval --model freight --tasks arc_easy --model_args pretrained=MODEL,kv_cache_dtype=fp8
    import freight.lm_eval, then lm_eval.simple_evaluate(model="freight", model_args={"pretrained": MODEL}, …)

The second is lm-eval's command, with all of its options. Requests have the tokens and stop strings
that lm-eval's `local-completions` would send to `freight serve`, and sums have the same order. So
both give the same numbers to the last digit, with the same `add_bos_token` and prefix token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from freight.base.fields import JsonDict, JsonObject
from freight.errors import ConfigError, FreightError, RequestError, install
from freight.llm import LLM
from freight.outputs import TokenLogprobs
from freight.sampling import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ConfigError(f"lm-eval is needed ({error}): {install('eval')}") from None

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)
AT_ONCE = 256  # requests per batch: bounds the log-probabilities in memory
COMMAND_DEVICE = "cuda:0"  # the device that lm-eval's command passes by default
SEED = 1234  # the seed of lm-eval's clients of servers; only requests with sampling depend on it
# Arguments of transformers' `generate` -> the values at which they change no token
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "n": (1,),  # lm-eval reads one answer per request
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "renormalize_logits": (False,),
}
# Arguments without effect at any value: those of beam search only, those of transformers'
# computation, and `do_sample`, which `normalize_gen_kwargs` has translated to the temperature
_NO_EFFECT = (
    "do_sample",
    "early_stopping",
    "length_penalty",
    "use_cache",
    "pad_token_id",
    "cache_implementation",
)
_RENAMED = {"min_new_tokens": "min_tokens"}
_Requests = Sequence[Any]  # of lm-eval, which has no types


class FreightLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model of lm-eval that generates and scores with Freight.

    pretrained       the model: a folder, a hub id or 'demo'
    llm              a loaded model, in place of `pretrained`
    add_bos_token    True or False; None: the special tokens that the tokenizer adds to a text, as
                     with `--model hf`
    prefix_token_id  token before a text without context; None: BOS, else EOS
    max_length       most tokens of context and continuation; longer ones are cut at the start.
                     None: the model's context
    max_gen_toks     tokens to generate if a task does not give a number
    device           "auto", "cpu" or "cuda"; "cuda:0", the default of lm-eval's command, is "auto"
    options          the other fields of `EngineArgs`: kv_cache_dtype, kv_scales, dtype, …

    `batch_size` and `max_batch_size`, which lm-eval always passes, have no effect: the engine forms
    batches itself (`max_num_seqs`). Raises ConfigError and CheckpointError like `LLM`, and
    RequestError for a request that cannot be served.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        *,
        llm: LLM | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        if device == COMMAND_DEVICE:
            device = "auto"
        self.llm = llm or LLM(str(pretrained), device=device, **options)
        self.model = str(pretrained)
        tokenizer = self.llm.engine.tokenizer
        if tokenizer is None:
            raise ConfigError(
                "lm-eval's tasks are text, and skip_tokenizer_init leaves no tokenizer: do not set it"
            )
        self._tokenizer = tokenizer
        self._device = self.llm.config.device
        self.add_bos_token = add_bos_token
        limit = self.llm.config.max_model_len
        if max_length is not None and not 2 <= max_length <= limit:
            raise ConfigError(f"max_length is {max_length}; it must be 2 to {limit}, the context")
        self.max_length = max_length or limit
        self.max_gen_toks = max_gen_toks
        prefix = prefix_token_id
        if prefix is None:
            prefix = tokenizer.bos_token_id
        if prefix is None:
            prefix = self.eot_token_id
        if prefix is None:
            raise ConfigError("the tokenizer names neither BOS nor EOS: give prefix_token_id")
        self._prefix = prefix

    @property
    def eot_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Part of the key in lm-eval's request cache."""
        return self.model.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if not chat_template:
            return None
        return self._tokenizer.chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._tokenizer.render_chat(
            chat_history, add_generation_prompt, not add_generation_prompt
        ).text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Encode a text to token ids. By default BOS is added according to `add_bos_token`, never
        twice.
        """
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
        bos = self._tokenizer.special_tokens.get("bos_token")
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self._tokenizer.encode(string, add_special_tokens)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[object, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """Return, for each (key, context, continuation), the log-probability in nats of the
        continuation, and whether it is the greedy one.

        Log-probabilities are float32, and are added as Python floats from the first token to the
        last.
        """
        prompts = []
        starts = []
        for _, context, continuation in requests:
            if len(continuation) >= self.max_length:
                raise RequestError(
                    f"a continuation has {len(continuation)} tokens, and context and continuation together may have "
                    f"{self.max_length}: use a larger max_model_len or another task"
                )
            prompts.append((context + continuation)[-self.max_length :])
            starts.append(len(prompts[-1]) - len(continuation))
        answers = []
        for at in range(0, len(prompts), AT_ONCE):
            outputs = self.llm.generate(
                prompts[at : at + AT_ONCE], SCORED, progress=not disable_tqdm
            )
            for output, start in zip(outputs, starts[at : at + AT_ONCE], strict=True):
                assert output.prompt_logprobs is not None
                answers.append(
                    _score(output.prompt_token_ids[start:], output.prompt_logprobs[start:])
                )
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: _Requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each full text, in windows that do not overlap, each after
        one token of context.
        """
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            token_ids = self.tok_encode(request.args[0], add_special_tokens=False)
            parts = get_rolling_token_windows(
                token_ids, self.prefix_token_id, self.max_length - 1, 1
            )
            begin = len(windows)
            for part in parts:
                context, continuation = make_disjoint_window(part)
                windows.append((None, context, continuation))
            counts.append(len(windows) - begin)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        sums = []
        for request, count in zip(requests, counts, strict=True):
            sums.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: _Requests, disable_tqdm: bool = False) -> list[str]:
        """Generate each text up to one of the task's stop strings. Greedy unless the task gives a
        temperature.
        """
        prompts = []
        params = []
        for request in requests:
            context, kwargs = request.args
            options = normalize_gen_kwargs(kwargs, self.max_gen_toks)
            max_tokens = options.pop("max_gen_toks")
            until = options.pop("until")
            if max_tokens >= self.max_length:
                raise RequestError(
                    f"max_gen_toks is {max_tokens}, which leaves no context of {self.max_length} tokens"
                )
            stop = handle_stop_sequences(until, self._tokenizer.special_tokens.get("eos_token"))
            params.append(
                SamplingParams(
                    max_tokens=max_tokens,
                    stop=stop,
                    **{"temperature": 0.0, "seed": SEED, **sampling_options(options)},
                )
            )
            prompts.append(self.tok_encode(context)[-(self.max_length - max_tokens) :])
        texts = []
        if prompts:
            outputs = self.llm.generate(cast(Any, prompts), params, progress=not disable_tqdm)
            texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def check_generation_kwargs(kwargs: JsonObject) -> None:
    """Raise RequestError for a task's generation_kwargs that no request can have, before anything
    is computed.
    """
    options = normalize_gen_kwargs(kwargs)
    stop = handle_stop_sequences(options.pop("until"), None)
    SamplingParams(max_tokens=options.pop("max_gen_toks"), stop=stop, **sampling_options(options))


def sampling_options(options: JsonObject) -> JsonDict:
    """Return the fields of SamplingParams in a task's generation_kwargs.

    Arguments of transformers' `generate` are left out if their value changes no token, such as
    `num_beams: 1`. Raises RequestError for a value that would.
    """
    sampling = {}
    for name, value in options.items():
        if name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise RequestError(
                    f"generation_kwargs has {name}: {value!r}, which Freight does not compute; only "
                    f"{' or '.join(map(repr, _NEUTRAL[name]))} is taken: change the task's file, or give lm-eval's "
                    f"command --gen_kwargs {name}={_NEUTRAL[name][0]}"
                )
        elif name not in _NO_EFFECT:
            sampling[_RENAMED.get(name, name)] = value
    return sampling


def _score(token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> tuple[float, bool]:
    """Return the sum of log-probabilities, and whether every token is a likeliest one."""
    logprobs = []
    greedy = True
    for token, entry in zip(token_ids, entries, strict=True):
        assert entry
        logprobs.append(entry[token].logprob)
        greedy = greedy and logprobs[-1] == max(other.logprob for other in entry.values())
    return sum(logprobs), greedy


def main() -> None:
    """Run lm-eval's command, with `--model freight` registered. An error of Freight is one line,
    with exit status 1.
    """
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except FreightError as error:
        raise SystemExit(f"error: {error}") from None


model_registry.register("freight", target="freight.adapters.lm_eval:FreightLM")
