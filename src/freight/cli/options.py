"""The options that several verbs share, each defined once: model, engine (one per `EngineArgs`
field), sampling.

`@takes_engine_options` gives a command all of them and one `args: EngineArgs` in their place;
`@takes_sampling_options` does the same with `params: SamplingParams`. Values are checked here,
before torch is loaded.

An option's environment variable is `FREIGHT_` and the field's name, and only `freight.cli` reads
those. Variables that are not Freight's are read elsewhere, too: TGI's in
`adapters/tgi_launcher.py`, OpenMP's in `settings/device.py` and `freight/__init__.py`,
XDG_CACHE_HOME in `kernels/cpu/tuning.py`.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, get_args

import typer
from typer.core import TyperCommand

from freight.base.other_engines.instead import SHORT, as_flag, instead_of
from freight.engine.adapters import LoRARequest
from freight.errors import ConfigError, RequestError, choices, shown
from freight.model.config.presets import shape_config
from freight.sampling import SamplingParams
from freight.settings import resolve
from freight.settings.device import DEVICES
from freight.settings.engine import KV_SCALES, EngineArgs
from freight.settings.kv_source import KV_DTYPE_NAMES
from freight.settings.lora import named_adapters
from freight.settings.skip_layers import FLAG as SKIP_LAYERS
from freight.settings.skip_layers import SLIDING
from freight.settings.speculation import as_number
from freight.settings.states import STATE_DTYPES

# of verbs that serve or generate
RANKS = (
    "tensor_parallel_size",
    "rank_cpus",
    "rank_timeout",
    "pipeline_parallel_size",
    "pp_layers",
    "check_ranks",
    "disable_custom_all_reduce",
)
# of verbs that serve or generate
LORA = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")
LORA_MODULES = "--lora-modules"
_NAMES = "--served-model-name"
_NAMED_ADAPTER = re.compile(r"[^-./{][^=/]*=|\{")  # name=path, or vLLM's JSON
NODES = ("nnodes", "node_rank", "master_addr", "master_port", "join_timeout")  # of freight serve
_ONE_HYPHEN = re.compile(r"-[A-Za-z]")
Function = Callable[..., None]
Values: TypeAlias = dict[str, Any]  # of the parameters of a command, by their names

CHOICES: dict[str, Sequence[object]] = {  # for --help; `settings.resolve.check` validates
    "dtype": ("auto", *resolve.DTYPES),
    "kv_cache_dtype": KV_DTYPE_NAMES,
    "kv_scales": (*KV_SCALES, "FILE", "K,V"),
    "block_size": resolve.BLOCK_SIZES,
    "state_dtype": STATE_DTYPES,
    "device": DEVICES,
    "kernels": resolve.KERNEL_FORMS,
    "attention_compute": resolve.ATTENTION_COMPUTES,
    "scheduling_policy": resolve.SCHEDULING_POLICIES,
    "activations": resolve.ACTIVATIONS,
    "pooling": resolve.POOLINGS,
}


def _with_hyphens(token: str) -> str:
    """Return the option as it is declared: --kv_cache_dtype is --kv-cache-dtype."""
    return token.replace("_", "-")


CONTEXT: Values = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": _with_hyphens,
}
# what a person at a terminal expects, where SamplingParams has the 16 of other libraries
MAX_TOKENS = 256


def option(
    values: str | Iterable[object] | None, sentence: str, *names: str, **more: Any
) -> object:
    """Return an option of typer; `values`, or their names, stand for its value in --help."""
    if values is not None and not isinstance(values, str):
        values = "|".join(map(str, values))
    return typer.Option(*names, metavar=values, help=sentence, **more)


def argument(metavar: str, sentence: str) -> object:
    return typer.Argument(metavar=metavar, help=sentence)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
OneJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Revision = Annotated[str | None, option("NAME", "Branch, tag or commit of a hub model.")]
OutFolder = Annotated[Path, argument("OUT", "The folder to write; it must not exist.")]
OptionalOut = Annotated[Path | None, argument("OUT", "The folder to write; it must not exist.")]


def _tokens(text: str) -> int:
    """Read a number of tokens, also in vLLM's forms: 8k is 8,000, 8K is 8,192, and M and G go on."""
    match = re.fullmatch(r"\s*(-?\d{1,18})(?:([kmg])|([KMG]))?\s*", text)
    if match is None:
        raise typer.BadParameter(
            f"{shown(text)} is not a number of tokens; write 32768, 32k or 32K"
        )
    thousands = "kmg".index(match[2]) + 1 if match[2] else 0
    powers = "KMG".index(match[3]) + 1 if match[3] else 0
    return int(match[1]) * int(1000**thousands) * int(1024**powers)


def _longest(text: str) -> int | None:
    """Read a length of contexts; vLLM's auto and -1 are none, and the model's is taken."""
    return None if text.strip() in ("auto", "-1") else _tokens(text)


@dataclass(frozen=True)
class Flag:
    """One option: the field it sets, its type, a sentence, and what stands for its value in --help.

    `also` are other engines' names of it, which are taken as well. `default` is that of an option which no
    dataclass with a default has (`EngineArgs` and `SamplingParams` have theirs). `read` makes a value of
    the text where the type alone does not.
    """

    field: str
    type: Any
    help: str
    metavar: str | None = None
    negatable: bool = False
    also: tuple[str, ...] = ()
    default: object = None
    read: Callable[[str], object] | None = None

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def envvar(self) -> str:
        return f"FREIGHT_{self.field.upper()}"

    def option(self, envvar: str | None) -> object:
        """As an option of typer."""
        name = self.name
        if self.negatable:
            name += f"/--no-{name[2:]}"
        values = self.metavar or CHOICES.get(self.field)
        return option(values, self.help, *self.also, name, envvar=envvar, parser=self.read)

    def parameter(self, default: object, envvar: str | None = None) -> inspect.Parameter:
        """Return a keyword of a command, as typer reads it."""
        annotation: Any = Annotated[self.type, self.option(envvar)]
        return inspect.Parameter(
            self.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


def _kinds(flag: Flag) -> tuple[Any, ...]:
    if isinstance(flag.type, UnionType):
        return get_args(flag.type)
    return (flag.type,)


def takes_text(flag: Flag) -> bool:
    """Return whether the value of an option is text, or a list of texts."""
    return _kinds(flag)[0] in (str, Path, list[str])


def read_value(flag: Flag, value: object) -> Any:
    """Read a value of a configuration file by the type of its option. Raises ConfigError."""
    kinds = _kinds(flag)
    if kinds[0] == list[str]:
        return list(map(str, value)) if isinstance(value, list | tuple) else [str(value)]
    if kinds[0] in (str, Path):
        if NoneType in kinds and value is None:
            return None
        if kinds[0] is Path and not isinstance(value, str):
            raise ConfigError(f"{flag.field} is {shown(value)}; it must be a path")
        return kinds[0](value)
    if flag.read is not None and isinstance(value, str):
        try:
            return flag.read(value)
        except typer.BadParameter as error:
            raise ConfigError(f"{flag.field}: {error.message}") from None
    read = value
    if kinds[0] is float and isinstance(read, int) and not isinstance(read, bool):
        read = float(read)
    if type(read) not in kinds:
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ConfigError(f"{flag.field} is {shown(value)}; it must be {words[kinds[0]]}")
    return read


ENGINE_FLAGS = (
    Flag("dtype", str, "What weights and activations are computed in; auto: the checkpoint's own."),
    Flag(
        "kv_cache_dtype",
        str,
        "What the KV cache stores; auto: what the checkpoint declares, else the dtype.",
    ),
    Flag(
        "kv_cache_dtype_skip_layers",
        list[str],
        "Layers whose cache stays in 16 bits.",
        "LAYER|sliding_window",
    ),
    Flag(
        "kv_scales",
        str,
        "Where the scales of an FP8 cache come from; a kv_cache_scales.json, or numbers.",
    ),
    Flag(
        "quantization_param_path",
        str | None,
        "The same as --kv-scales FILE, as older engines call it.",
        "FILE",
    ),
    Flag("quantization", str | None, "Quantize the weights while they load.", "METHOD"),
    Flag(
        "activations",
        str,
        "What products with weights in 4 bits round their inputs to; auto: int8 on a CPU.",
    ),
    Flag(
        "pooling",
        str,
        "How the states of a prompt become one; auto: as the model declares; none: it generates.",
    ),
    Flag(
        "max_model_len",
        int | None,
        "Longest context in tokens; default, also as auto: the model's.",
        "TOKENS|32K",
        read=_longest,
    ),
    Flag("max_num_seqs", int, "Most requests in one step.", "COUNT"),
    Flag(
        "max_num_batched_tokens",
        int | None,
        "Most tokens in one step; longer prompts go in chunks.",
        "TOKENS|8K",
        read=_tokens,
    ),
    Flag(
        "max_step_seconds",
        float | None,
        "Seconds that prompts may make a step take while others decode.",
        "SECONDS",
    ),
    Flag(
        "scheduling_policy",
        str,
        "Which requests go first: those that came first, or those of lower priority.",
    ),
    Flag("block_size", int, "Tokens per block of the cache."),
    Flag(
        "state_every",
        int | None,
        "Tokens between states that recurrent layers leave for later prompts.",
        "TOKENS",
    ),
    Flag(
        "state_dtype",
        str,
        "What recurrent layers store their states in; auto: int8 beside an 8-bit KV cache.",
    ),
    Flag(
        "enable_prefix_caching",
        bool,
        "Keep the blocks of earlier prompts for later ones.",
        negatable=True,
    ),
    Flag(
        "kv_cache_memory",
        str | None,
        "Memory for the KV cache; default: a share of what is free.",
        "BYTES|4GiB",
    ),
    Flag(
        "speculate",
        int | None,
        "Most drafts of a step; default: 8 on a CPU, from a request's text; auto: also by the model's layers.",
        "COUNT|auto",
        read=as_number,
    ),
    Flag(
        "speculative_config",
        str | None,
        "What drafts, in vLLM's form: the request's text, a second model, MTP layers or EAGLE-3.",
        "JSON",
    ),
    Flag(
        "kv_store",
        str | None,
        "A folder that keeps prefixes beyond eviction and restarts.",
        "DIR",
    ),
    Flag(
        "kv_store_size",
        str | None,
        "Most bytes of the folder; default: 20GiB.",
        "BYTES|20GiB",
    ),
    Flag(
        "kv_store_memory",
        str | None,
        "Memory for blocks of the folder that were used last; default: 2GiB.",
        "BYTES|2GiB",
    ),
    Flag("kv_store_salted", bool, "Store prefixes of requests with a cache_salt as well."),
    Flag("enable_lora", bool, "Take LoRA adapters, which requests name as their model."),
    Flag(
        "lora_modules",
        list[str],
        "Adapters that are loaded at the start.",
        "NAME=PATH",
    ),
    Flag("max_loras", int | None, "Most adapters that are loaded at a time.", "COUNT"),
    Flag("max_lora_rank", int | None, "Largest rank of an adapter; default: 16.", "RANK"),
    Flag("device", str, "What to compute on; auto: a GPU if torch sees one."),
    Flag(
        "kernels",
        str,
        "Which kernels: the best, torch's definition of each, or one build for CPUs: cpu-avx2.",
    ),
    Flag(
        "attention_compute",
        str,
        "fp8: attention multiplies FP8 by FP8 on a GPU that can; auto: 16 bits.",
    ),
    Flag(
        "exact_products",
        bool,
        "On a GPU, compute all products so that any number of GPUs gives the same bits.",
    ),
    Flag(
        "threads",
        int | None,
        "CPU threads; default: one for each physical core that is free to use.",
        "COUNT",
    ),
    Flag(
        "tensor_parallel_size",
        int,
        "Processes that compute the model together, one for each memory node (NUMA).",
        "COUNT",
        also=("-tp", "--tp", "--tp-size", "--num-shard"),
    ),
    Flag("rank_cpus", str | None, "Processors of each of these processes.", "0-31|32-63"),
    Flag(
        "rank_timeout",
        float,
        "Seconds after which one of them that does not answer counts as lost.",
        "SECONDS",
    ),
    Flag(
        "pipeline_parallel_size",
        int,
        "GPUs that divide the layers of the model, one after the other.",
        "COUNT",
        also=("-pp", "--pp", "--pp-size"),
    ),
    Flag(
        "pp_layers",
        str | None,
        "Layers of each of these GPUs; default: by their bytes.",
        "20,20",
    ),
    Flag(
        "check_ranks",
        bool,
        "Compare these processes on GPUs with one of them before they serve.",
        negatable=True,
    ),
    Flag(
        "disable_custom_all_reduce",
        bool,
        "Let NCCL gather between GPUs, and no kernel that writes into their memory.",
    ),
    Flag("nnodes", int, "Machines that these processes are on, equally many on each.", "COUNT"),
    Flag("node_rank", int, "Which of the machines this is; 0 serves.", "NUMBER"),
    Flag("master_addr", str | None, "Where the others reach machine 0.", "ADDRESS"),
    Flag("master_port", int, "Where the others reach machine 0.", "PORT"),
    Flag("join_timeout", float, "Seconds in which all machines must have come.", "SECONDS"),
    Flag(
        "seed",
        int,
        "Makes sampling repeatable: the same seed and prompts, the same tokens.",
        "NUMBER",
    ),
    Flag("revision", str | None, "Branch, tag or commit of a hub model.", "NAME"),
    Flag(
        "ignore_config_keys",
        list[str],
        "Keys of config.json to read over that Freight does not implement.",
        "NAME",
    ),
    Flag(
        "tokenizer", str | None, "A folder or hub id to take the tokenizer from instead.", "MODEL"
    ),
    Flag("skip_tokenizer_init", bool, "Run without a tokenizer: token ids in, token ids out."),
)

SAMPLING_FLAGS = (
    Flag("max_tokens", int, "Tokens to generate at most.", "COUNT"),
    Flag("min_tokens", int, "Tokens to generate at least.", "COUNT"),
    Flag("temperature", float, "Divides the logits; 0 takes the most likely token.", "NUMBER"),
    Flag("top_p", float, "Draw from the smallest set of tokens with this probability.", "SHARE"),
    Flag("top_k", int, "Draw from this many most likely tokens; 0: all.", "COUNT"),
    Flag(
        "min_p",
        float,
        "Draw from tokens with this share of the most likely one's probability.",
        "SHARE",
    ),
    Flag("stop", list[str], "Text that ends the completion; may be repeated.", "TEXT"),
    Flag("stop_token_ids", list[int], "Token id that ends the completion; may be repeated.", "ID"),
    Flag("ignore_eos", bool, "Go on after the model's own end of text."),
    Flag(
        "presence_penalty",
        float,
        "Subtracted once from the logits of tokens already generated.",
        "NUMBER",
    ),
    Flag("frequency_penalty", float, "Subtracted for each time a token was generated.", "NUMBER"),
    Flag("repetition_penalty", float, "Divides the logits of tokens seen so far.", "NUMBER"),
    Flag(
        "logit_bias",
        list[str],
        "Number to add to the logit of a token id; may be repeated.",
        "ID=NUMBER",
    ),
    Flag(
        "timeout_s",
        float | None,
        "Seconds after which a completion ends with what it has by then.",
        "SECONDS",
        also=("--timeout",),
    ),
    Flag(
        "thinking_token_budget",
        int | None,
        "Tokens of thoughts that a completion has at most; -1: no limit.",
        "COUNT",
        also=("--reasoning-budget",),
    ),
    Flag("skip_special_tokens", bool, "Leave special tokens out of the text.", negatable=True),
)

MODEL_VARIABLE = "FREIGHT_MODEL_ID"
ModelArgument = Annotated[
    str | None,
    argument(
        "MODEL", "A folder, a GGUF file, a hub id, or 'demo', the model that ships (default)."
    ),
]
ModelIdOption = Annotated[
    str | None,
    option("MODEL", "The model, as an option.", "--model-id", "--model", envvar=MODEL_VARIABLE),
]


def _engine_option(field: str) -> object:
    """Return an option of engines, for a command that has no `args: EngineArgs`."""
    flag = next(flag for flag in ENGINE_FLAGS if flag.field == field)
    return flag.option(flag.envvar)


IgnoredKeys = Annotated[list[str] | None, _engine_option("ignore_config_keys")]
SkippedLayers = Annotated[list[str] | None, _engine_option("kv_cache_dtype_skip_layers")]
StateEvery = Annotated[int | None, _engine_option("state_every")]
StateDtype = Annotated[str, _engine_option("state_dtype")]
Kernels = Annotated[str, _engine_option("kernels")]
RankCount = Annotated[int, _engine_option("tensor_parallel_size")]
StageCount = Annotated[int, _engine_option("pipeline_parallel_size")]
StageLayers = Annotated[str | None, _engine_option("pp_layers")]
Speculate = Annotated[int | None, _engine_option("speculate")]
SpeculativeConfig = Annotated[str | None, _engine_option("speculative_config")]
MaxLoras = Annotated[int | None, _engine_option("max_loras")]
MaxLoraRank = Annotated[int | None, _engine_option("max_lora_rank")]
Lora = Annotated[
    str | None,
    option("NAME", "Adapter of --lora-modules that answers; default: the first one."),
]
_NO_NODES = "ranks on several machines are for freight serve: omit it"
_ONE_RANK = (
    "ranks and stages are for freight serve, generate, chat, batch and plan, and any number of them "
    "gives what one gives: omit it"
)

_NO_ADAPTERS = (
    "adapters are for freight serve, generate, chat, batch, verify and plan; merge one to measure it "
    "(freight merge BASE ADAPTER OUT)"
)


class Command(TyperCommand):
    """A verb. An option that only other engines have is refused with what to use instead, and one
    of another sub-command with where it is.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._refuse_short(args, ctx)
        try:
            listed = _adapters_split(_layers_joined(args))
            if self._takes_model_alone():
                listed = _names_split(listed)
            return super().parse_args(ctx, listed)
        except Exception as error:
            if type(error).__name__ != "NoSuchOption":  # typer keeps the class to itself
                raise
            spelling = str(getattr(error, "option_name", ""))
            instead = self._instead_of(spelling, ctx)
            if instead is None:
                raise
            raise ConfigError(f"no such option: {spelling}; {instead}") from None

    def _takes_model_alone(self) -> bool:
        arguments = [param.name for param in self.params if param.param_type_name == "argument"]
        return arguments in ([], ["model"])

    def _refuse_short(self, args: Sequence[str], ctx: Any) -> None:
        """Raise ConfigError for an option with one hyphen that only other engines have: -ngl 99, -c 8192.

        Click would read one of several letters as several options, -hf as -h.
        """
        spellings = _spellings(self)
        valued = _spellings(self, valued=True)
        previous = ""
        for arg in args:
            if arg == "--":
                return
            is_value = _with_hyphens(previous) in valued
            previous = "" if is_value else arg
            if is_value or not _ONE_HYPHEN.match(arg) or arg in spellings:
                continue
            by_engine = _options_of_engines(arg, whole=arg[:2] in spellings)
            instead = {engine: self._in_place_of(name, ctx) for engine, name in by_engine.items()}
            if not by_engine or None in instead.values():
                continue
            names = [as_flag(name) for name in by_engine.values()]
            if len(set(names)) == 1:
                spelling = arg if names[0] in spellings else names[0]
                raise ConfigError(f"no such option: {spelling}; {next(iter(instead.values()))}")
            each = [
                f"{engine}'s is {name}: {sentence}"
                for name, (engine, sentence) in zip(names, instead.items(), strict=True)
            ]
            raise ConfigError(f"no such option: {arg}; {'; '.join(each)}")

    def _in_place_of(self, name: str, ctx: Any) -> str | None:
        """Return what to use in place of an option called `name`, which may be one of ours."""
        flag = as_flag(name)
        return f"write {flag}" if flag in _spellings(self) else self._instead_of(flag, ctx)

    def _instead_of(self, spelling: str, ctx: Any) -> str | None:
        """Return what to use in place of an option that this verb does not have."""
        for flag in ENGINE_FLAGS:
            if flag.field in NODES and flag.name == spelling:  # TGI has some of them as well
                return _NO_NODES
        instead = self._of_others(spelling)
        here = _spellings(self) | {"--help", "--version"}
        if instead is not None and here.issuperset(re.findall(r"--[a-z-]+", instead)):
            return instead
        instead = _where_it_is(spelling, ctx)
        if instead is not None:
            return instead
        for flag in ENGINE_FLAGS:
            if flag.field in RANKS and spelling in (flag.name, *flag.also):
                return _ONE_RANK
            if flag.field in LORA and spelling == flag.name:
                return _NO_ADAPTERS
        return None

    def _of_others(self, spelling: str) -> str | None:
        """Return what to use in place of another engine's option, in a form of its own: vLLM's
        --NAME.KEY sets a key of a JSON, and --no-NAME turns one off.
        """
        instead = instead_of(spelling.lstrip("-").replace("-", "_"), as_flag)
        if instead is not None:
            return instead
        option, dot, key = spelling.partition(".")
        if dot and option in _spellings(self):
            return f"write {option} with one JSON that has {key}"
        on = "--" + spelling.removeprefix("--no-")
        if on in _spellings(self):
            return f"it is off without {on}: omit it"
        return instead_of(option.lstrip("-").replace("-", "_"), as_flag) if dot else None


def _options_of_engines(arg: str, whole: bool) -> dict[str, str]:
    """Return the option that `arg` is in each engine which has it; the longest one counts, and a number
    or = may follow it: -c8192, -O3.

    whole   whether nothing may follow, since the letter is an option of ours
    """
    letters = re.split(r"[0-9=.]", arg)[0]
    if whole and letters != arg:
        return {}
    return {engine: table[letters] for engine, table in SHORT.items() if letters in table}


def _spellings(command: Any, valued: bool = False) -> set[str]:
    """Return the options of a click command, as they are written; `valued`: those with a value."""
    spellings: set[str] = set()
    for option in command.params:
        if not (valued and getattr(option, "is_flag", True)):
            spellings.update(option.opts, option.secondary_opts)
    return spellings


def _where_it_is(spelling: str, ctx: Any) -> str | None:
    """Say which sub-commands of the same verb have the option; None where none has it."""
    if ctx.parent is None or ctx.parent.parent is None:
        return None
    commands = ctx.parent.command.commands.items()
    names = [name for name, command in commands if spelling in _spellings(command)]
    if not names:
        return None
    return f"it is an option of {ctx.parent.command_path} {', '.join(names)}"


def _layers_joined(args: Sequence[str]) -> list[str]:
    """vLLM's form of a list, `--kv-cache-dtype-skip-layers 0 2 sliding_window`, as one value. A
    folder 2 is ./2.
    """
    joined: list[str] = []
    is_value = False  # whether the last of `joined` is this option's value
    for arg in args:
        if is_value and (arg.isdecimal() or arg == SLIDING):
            joined[-1] += f",{arg}"
        else:
            is_value = bool(joined) and joined[-1].replace("_", "-") == SKIP_LAYERS
            joined.append(arg)
    return joined


def _names_split(args: Sequence[str]) -> list[str]:
    """vLLM's form of a list, `--served-model-name a b`, as an option for each value, where the model is
    named before: nothing else can stand there.
    """
    if not args or (args[0].startswith("-") and not _names_model(args)):
        return list(args)
    split: list[str] = []
    is_list = False  # whether what is no option is a name
    for position, arg in enumerate(args):
        if arg == "--":
            return [*split, *args[position:]]
        if arg.startswith("-"):
            is_list = _with_hyphens(arg) == _NAMES
        elif is_list and _with_hyphens(split[-1]) != _NAMES:
            split.append(_NAMES)
        split.append(arg)
    return split


def _names_model(args: Sequence[str]) -> bool:
    return any(_with_hyphens(arg.partition("=")[0]) in ("--model", "--model-id") for arg in args)


def _adapters_split(args: Sequence[str]) -> list[str]:
    """vLLM's form of a list, `--lora-modules sql=./sql chat=./chat`, as an option for each value. A
    folder a=b is ./a=b, and behind -- nothing is an option.
    """
    split: list[str] = []
    is_list = False  # whether the last of `args` was one of this option's values
    for position, arg in enumerate(args):
        if arg == "--":
            return [*split, *args[position:]]
        is_first = bool(split) and split[-1].replace("_", "-") == LORA_MODULES
        if is_list and _NAMED_ADAPTER.match(arg):
            split.append(LORA_MODULES)
        is_list = is_first or (is_list and split[-1] == LORA_MODULES)
        split.append(arg)
    return split


def require_name(model: str | None, model_id: str | None) -> None:
    """Raises ConfigError for an empty name, which is a shell's variable without a value and never
    the demo model.
    """
    # typer passes over ""
    variable = None
    if model is None and model_id is None:
        variable = os.environ.get(MODEL_VARIABLE)
    for name, what in (
        (model, "MODEL"),
        (model_id, f"--model-id or {MODEL_VARIABLE}"),
        (variable, MODEL_VARIABLE),
    ):
        if name is not None and not name.strip():
            raise ConfigError(f"{what} is {name!r}: name a model, or leave it out")


def takes_model(command: Function) -> Function:
    """Replace the command's parameter `model: str` by MODEL and --model-id."""

    def build(values: Values) -> Values:
        ctx: typer.Context = values.pop("ctx")
        model = values.pop("model")
        model_id = values.pop("model_id")
        source = ctx.get_parameter_source("model_id")
        require_name(model, model_id)
        if model and model_id and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"MODEL is {model!r} and --model-id {model_id!r}: give one of the two"
            )
        if model is None:
            model = model_id
        if model is None:
            model = "demo"
        return {"model": model}

    kind = inspect.Parameter.KEYWORD_ONLY
    return replace_parameter(
        command,
        "model",
        [
            inspect.Parameter("ctx", kind, annotation=typer.Context),
            inspect.Parameter("model", kind, default=None, annotation=ModelArgument),
            inspect.Parameter("model_id", kind, default=None, annotation=ModelIdOption),
        ],
        build,
    )


def adapter_of(args: EngineArgs, name: str | None) -> LoRARequest | None:
    """Return the adapter that answers: the one of --lora-modules that is called `name`, or the first of
    them; None: the model alone. Raises ConfigError for a name that is not among them.
    """
    names = [adapter.name for adapter in named_adapters(args.lora_modules)]
    if name is None:
        return LoRARequest(names[0]) if names else None
    if name not in names:
        offered = (
            f"it has {choices(names)}" if names else "add --enable-lora --lora-modules NAME=PATH"
        )
        raise ConfigError(f"--lora {shown(name)} is not in --lora-modules: {offered}")
    return LoRARequest(name)


def check_random_weights(model: str, shape: str) -> None:
    """Raises ConfigError for a model with a shape, and for an unknown shape."""
    if model != "demo":
        raise ConfigError(f"MODEL is {model!r} and --random-weights {shape!r}: give one of the two")
    shape_config(shape)


def model_and_others(
    ctx: typer.Context, model_id: str | None, names: Sequence[str], values: Sequence[object]
) -> list[str]:
    """Return the arguments called `names`, in order, where --model-id may stand for the one called
    MODEL.

    `values` are the arguments as typed, None for those beyond. Raises ConfigError for one too few
    or too many.
    """
    require_name(None, model_id)
    present = [str(value) for value in values if value is not None]
    index = names.index("MODEL")
    source = ctx.get_parameter_source("model_id")
    if len(present) == len(names) and source is not None and source.name == "COMMANDLINE":
        raise ConfigError(
            f"MODEL is {present[index]!r} and --model-id {model_id!r}: give one of the two"
        )
    if len(present) < len(names) and model_id and len(present) >= index:
        present.insert(index, model_id)
    if len(present) < len(names):
        raise ConfigError(f"{names[len(present)]} is missing: give {' '.join(names)}")
    return present


def takes_engine_options(command: Function, without: Sequence[str] = NODES) -> Function:
    """Replace the command's parameter `args: EngineArgs` by MODEL, --model-id and an option for
    every other field.

    The fields in `without` get neither option nor variable, and keep their defaults.
    """
    defaults = {field.name: field.default for field in fields(EngineArgs)}
    flags = [flag for flag in ENGINE_FLAGS if flag.field not in without]

    def build(values: Values) -> Values:
        args = EngineArgs(
            model=values.pop("model"), **{flag.field: values.pop(flag.field) for flag in flags}
        )
        resolve.check(args)
        return {"args": args}

    model = inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, annotation=str)
    parameters = [flag.parameter(defaults[flag.field], flag.envvar) for flag in flags]
    return takes_model(replace_parameter(command, "args", [model, *parameters], build))


def takes_options_of_one_rank(command: Function) -> Function:
    """`takes_engine_options` for a command that measures a model in this process."""
    return takes_engine_options(command, without=(*RANKS, *NODES, *LORA))


def takes_sampling_options(command: Function) -> Function:
    """Replace the command's parameter `params: SamplingParams` by the sampling options."""
    plain = SamplingParams(max_tokens=MAX_TOKENS)

    parameters = []
    for flag in SAMPLING_FLAGS:
        default = getattr(plain, flag.field)
        if flag.type in (list[str], list[int]):
            default = []
        parameters.append(flag.parameter(default))

    def build(values: Values) -> Values:
        sampling = {flag.field: values.pop(flag.field) for flag in SAMPLING_FLAGS}
        sampling["logit_bias"] = _biases(sampling["logit_bias"])
        return {"params": SamplingParams(**sampling)}

    return replace_parameter(command, "params", parameters, build)


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    """'ID=NUMBER' each."""
    biases = {}
    try:
        for pair in pairs:
            token, bias = pair.split("=")
            biases[int(token)] = float(bias)
        return biases
    except ValueError:
        raise RequestError(
            f"--logit-bias is {' '.join(pairs)!r}; each must be ID=NUMBER, as in 42=-5"
        ) from None


def replace_parameter(
    command: Function,
    parameter: str,
    options: Sequence[inspect.Parameter],
    build: Callable[[Values], Values],
) -> Function:
    """`command` with `options` in the place of `parameter`, which `build` makes by taking theirs
    out of the values.
    """

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        made = build(values)
        command(**values, **made)

    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    parameters.pop(parameter)
    for name, keyword in parameters.items():
        parameters[name] = keyword.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for keyword in options:
        parameters[keyword.name] = keyword
    wrapped.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    wrapped.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    return wrapped
