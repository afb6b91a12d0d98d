"""What a checkpoint's folder declares about pooling: sentence-transformers' files, or config.json.

sentence-transformers writes a list of modules (`modules.json`), and a folder for each that has a
configuration; transformers names a head in `architectures`, and vLLM two tokens in
`classifier_from_token`. Each becomes a `PoolingConfig`. What is not computed here is refused by its
name and value: no model is pooled in another way than its files say. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freight.base.fields import (
    MOST_PARTS,
    JsonDict,
    JsonObject,
    flag,
    integer,
    is_integer,
    number,
)
from freight.base.files import open_regular, read_object
from freight.errors import CheckpointError, ConfigError, choices, listed, shown
from freight.model.config.pooling import (
    PoolingActivation,
    PoolingConfig,
    PoolingKind,
    PoolingLayer,
    is_headless,
)
from freight.pooling import PoolingTask
from freight.text.tokenizer_files import read_files

logger = logging.getLogger("freight")

MODULES = "modules.json"
OPTIONS = (*PoolingKind, "none")  # of --pooling
_ST = "config_sentence_transformers.json"
_CONFIG = "config.json"
_HEAD = "ForSequenceClassification"
_LIMIT = 2**20  # bytes of modules.json
_REMAINS = "load it with sentence-transformers"
# Files of the first module, the newest name first
_TRANSFORMER_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_PATHS = ("sentence_transformers.", "torch.nn.")  # of modules that are known
_MODES = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {
    "Identity": PoolingActivation.IDENTITY,
    "Tanh": PoolingActivation.TANH,
    "GELU": PoolingActivation.GELU,
    "ReLU": PoolingActivation.RELU,
    "Sigmoid": PoolingActivation.SIGMOID,
    "Softmax": PoolingActivation.SOFTMAX,
}
# Tasks of the first module: of an embedding model, of a cross encoder
_TASKS = {
    PoolingTask.EMBED: ("feature-extraction",),
    PoolingTask.CLASSIFY: ("sequence-classification", "text-generation", "feature-extraction"),
}
# Of each task the output of the transformer that is read, and the name that it gets
_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
# Arguments of the tokenizer that change no text, or are read
_TOKENIZER_ARGUMENTS = frozenset(
    ("model_max_length", "padding_side", "truncation_side", "trust_remote_code", "use_fast")
)
_PROBLEMS = {
    "regression": PoolingActivation.IDENTITY,
    "multi_label_classification": PoolingActivation.SIGMOID,
}
_LONGEST_NAME = 255  # bytes, in the file systems there are
_UNBOUNDED = 10**9  # transformers writes 10**30 for a tokenizer without a longest input


def read_pooling(
    path: Path,
    config: JsonObject,
    hidden_size: int,
    option: str | None = None,
    encoder: bool = False,
) -> PoolingConfig | None:
    """Return what the folder `path` declares about pooling; None for a model that generates.

    config       config.json, or what a GGUF file (then `path`) says as one
    hidden_size  channels of the states that are pooled
    option       --pooling: a PoolingKind pools so whatever is declared, "none" not at all; None:
                 as declared
    encoder      whether the model is one whose tokens see those after them, and so cannot generate

    Raises CheckpointError for a declaration that is damaged or not implemented, ConfigError for an
    option that does not fit it.
    """
    if option is not None and option not in OPTIONS:
        raise ConfigError(f"--pooling {option}: choose {choices(OPTIONS)}")
    if option == "none":
        if encoder:
            raise ConfigError(
                "--pooling none: this model is an encoder, which generates no text; omit it"
            )
        return None
    declared = _declared(path, config, hidden_size, encoder)
    if option is None:
        return declared
    kind = PoolingKind(option)
    if declared is None:
        return PoolingConfig(
            PoolingTask.EMBED,
            kind,
            hidden_size,
            normalize=True,
            beside=True,
            source=f"--pooling {option}",
        )
    return _with_kind(declared, kind)


def gives_token_types(path: Path) -> bool:
    """Whether a model's tokenizer tells the texts of a pair apart by token types: those that list
    the model's inputs (`model_input_names`) may leave them out.
    """
    names = None
    if path.is_dir():
        names = _object(path / "tokenizer_config.json").get("model_input_names")
    return not isinstance(names, list) or "token_type_ids" in names


def _with_kind(declared: PoolingConfig, kind: PoolingKind) -> PoolingConfig:
    if declared.kind is kind:
        return declared
    if declared.token_ids:
        raise ConfigError(
            f"--pooling {kind}: the score of this model is a logit after the last token ({declared.source}); omit it"
        )
    logger.warning(
        "--pooling %s: %s says %s, and is not followed", kind, declared.source, declared.kind
    )
    return replace(declared, kind=kind)


def _declared(
    path: Path, config: JsonObject, hidden_size: int, encoder: bool
) -> PoolingConfig | None:
    """Return what is declared, or what a body without a head is taken for."""
    architectures = config.get("architectures") or []
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    # a link to nothing too, as a download that ended early leaves: what it declares is not known
    if path.is_dir() and os.path.lexists(path / MODULES):
        return _Modules(path, config, name, hidden_size, encoder).read()
    if config.get("classifier_from_token") is not None:
        return _read_tokens(path, config)
    if name.endswith(_HEAD):
        return _read_head(config, name, hidden_size, encoder)
    if not (encoder or is_headless(name)):
        return None
    # as sentence-transformers does for an encoder without modules.json; of a decoder, the last token
    # is the one that has seen the others
    kind = PoolingKind.MEAN if encoder else PoolingKind.LAST
    source = f"{_CONFIG}: architectures {name or 'without an entry'}"
    logger.warning(
        "%s has no %s, so how it is pooled is assumed: %s, not normalized; --pooling says it otherwise",
        path,
        MODULES,
        kind,
    )
    return PoolingConfig(
        PoolingTask.EMBED,
        kind,
        hidden_size,
        normalize=False,
        dimensions=_matryoshka(config),
        max_length=_tokenizer_length(path),
        source=source,
    )


# sentence-transformers' files


@dataclass(frozen=True)
class _Modules:
    """A folder with modules.json. `architecture`: that of config.json, whose head may be read."""

    path: Path
    config: JsonObject
    architecture: str
    hidden_size: int
    encoder: bool

    def read(self) -> PoolingConfig:
        options = self._json(_ST)
        task = self._task(options)
        modules = self._list()
        first = self._transformer(modules[0], task)
        layers = [module for module in modules[1:] if module[1] != "Dropout"]
        read = self._embedding
        if task is PoolingTask.CLASSIFY:
            read = self._scores
        pooling = read(layers, options)
        prompts, default = self._prompts(options)
        return replace(
            pooling,
            prompts=prompts,
            default_prompt=default,
            max_length=first.max_length,
            template_values=first.template_values,
            source=MODULES if layers else pooling.source,
        )

    def _json(self, name: str) -> JsonObject:
        """Return the object in a file of the folder, {} if there is none."""
        return _object(self.path / name)

    def _part(self, name: str, content: JsonObject, key: str) -> JsonObject:
        """Return the object under a key of a file, {} if there is none."""
        return _mapping(content, key, str(self.path / name))

    def _refuse(self, where: str, what: str, way_out: str = _REMAINS) -> CheckpointError:
        return CheckpointError(f"{self.path / where}: {what} is not implemented; {way_out}")

    def _task(self, options: JsonObject) -> PoolingTask:
        kind = options.get("model_type", "SentenceTransformer")
        if kind == "SentenceTransformer":
            return PoolingTask.EMBED
        if kind == "CrossEncoder":
            return PoolingTask.CLASSIFY
        raise self._refuse(_ST, f"model_type {shown(str(kind))}")

    def _list(self) -> list[tuple[str, str]]:
        """Return (folder, name of its class) of each module; the first is a Transformer."""
        file = self.path / MODULES
        try:
            with open_regular(file, _LIMIT) as stream:
                entries = json.load(stream)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if not isinstance(entries, list) or not entries or len(entries) > MOST_PARTS:
            raise CheckpointError(f"{file} is no list of modules; fetch the model again")
        modules = [self._module(file, entry) for entry in entries]
        if modules[0][1] != "Transformer":
            raise self._refuse(MODULES, f"a model whose first module is {modules[0][1]}")
        if modules[0][0]:
            raise self._refuse(
                MODULES,
                f"a transformer in the folder {shown(modules[0][0])}",
                "move its files into the model's own folder, and give the entry the path ''",
            )
        return modules

    def _module(self, file: Path, entry: object) -> tuple[str, str]:
        folder = entry.get("path") if isinstance(entry, dict) else None
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(folder, str) or not isinstance(kind, str):
            raise CheckpointError(f"{file}: an entry lacks path or type; fetch the model again")
        # no folder outside
        if folder and (Path(folder).name != folder or folder in (".", "..")):
            raise CheckpointError(f"{file} names {shown(folder)}, which lies outside the folder")
        if not folder.isprintable() or len(folder.encode()) > _LONGEST_NAME:
            raise CheckpointError(
                f"{file}: path is {shown(folder)}, which is no name of a folder; fetch the model again"
            )
        if not kind.startswith(_PATHS):
            raise self._refuse(MODULES, f"type {shown(kind)}, code of the model's own")
        return folder, kind.rpartition(".")[2]

    def _transformer(self, module: tuple[str, str], task: PoolingTask) -> _First:
        for name in _TRANSFORMER_FILES:
            content = self._json(name)
            if content:
                break
        else:
            name = _TRANSFORMER_FILES[0]
        transformer_task = content.get("transformer_task", _TASKS[task][0])
        if transformer_task not in _TASKS[task]:
            raise self._refuse(name, f"transformer_task {shown(str(transformer_task))}")
        for key in ("query_length", "document_length", "query_expansion"):
            if content.get(key) is not None:
                raise self._refuse(name, f"{key} {shown(str(content[key]))}")
        for key in ("config_kwargs", "config_args"):
            changed = sorted(self._part(name, content, key).keys() - {"trust_remote_code"})
            if changed:
                raise self._refuse(
                    name,
                    f"{key} {listed(changed)}",
                    f"write them into {_CONFIG}, and take them out",
                )
        modalities = self._part(name, content, "modality_config")
        if "message" in modalities and task is PoolingTask.EMBED:
            raise self._refuse(
                name,
                "modality_config with message, by which a text is put into the chat template before it is embedded,",
                "take message out of modality_config if texts are to be embedded as they are",
            )
        self._check_outputs(name, content, modalities, str(transformer_task))
        self._check_lower_case(name, content)
        values, length = self._processing(name, content)
        if length is None:
            length = _length(content, "max_seq_length", str(self.path / name))
            length = length or self._tokenizer_length(name, content)
        return _First(length, values)

    def _check_outputs(
        self, name: str, content: JsonObject, modalities: JsonObject, task: str
    ) -> None:
        """Raise CheckpointError where another output of the transformer than its last states, or
        than the logits of its head, goes to the next module.
        """
        output, written = _OUTPUTS[task]
        for modality in modalities.keys() & {"text", "message"}:
            params = self._part(name, modalities, modality)
            for key, expected in (("method", "forward"), ("method_output_name", output)):
                value = params.get(key, expected)
                if value not in (expected, [expected]):
                    raise self._refuse(
                        name, f"modality_config {modality} with {key} {shown(str(value))}"
                    )
        value = content.get("module_output_name", written)
        if value != written:
            raise self._refuse(name, f"module_output_name {shown(str(value))} of {task}")

    def _check_lower_case(self, name: str, content: JsonObject) -> None:
        if not content.get("do_lower_case"):
            return
        if not _lowers(self._json("tokenizer.json").get("normalizer")):
            raise self._refuse(
                name,
                "do_lower_case true, with a tokenizer.json that keeps capital letters,",
                "give texts in lower case and set it false, or add Lowercase to the normalizer of tokenizer.json",
            )

    def _tokenizer_length(self, name: str, content: JsonObject) -> int | None:
        for key in ("processor_kwargs", "tokenizer_args"):
            arguments = self._part(name, content, key)
            unread = sorted(arguments.keys() - _TOKENIZER_ARGUMENTS)
            if unread:
                raise self._refuse(
                    name,
                    f"{key} {listed(unread)}",
                    "write them into tokenizer_config.json or tokenizer.json, and take them out",
                )
            length = _length(arguments, "model_max_length", f"{self.path / name}: {key}")
            if length is not None:
                return length
        return _tokenizer_length(self.path)

    def _processing(self, name: str, content: JsonObject) -> tuple[JsonDict, int | None]:
        """Return the chat template's values, and the longest input, of processing_kwargs."""
        processing = self._part(name, content, "processing_kwargs")
        length: int | None = None
        for part in ("text", "common"):
            arguments = self._part(name, processing, part)
            if arguments.get("add_special_tokens") is False:
                raise self._refuse(name, f"processing_kwargs {part}.add_special_tokens false")
            length = length or _length(arguments, "max_length", f"{self.path / name}: {part}")
        values = dict(self._part(name, processing, "chat_template"))
        length = _length(values, "max_length", f"{self.path / name}: chat_template") or length
        for key in ("restore_suffix", "max_length", "truncation", "padding"):
            values.pop(key, None)
        return values, length

    def _prompts(self, options: JsonObject) -> tuple[dict[str, str], str | None]:
        prompts: dict[str, str] = {}
        for name, text in self._part(_ST, options, "prompts").items():
            if text is not None and not (isinstance(text, str) and _is_unicode(text)):
                raise CheckpointError(
                    f"{self.path / _ST}: the prompt {shown(name)} is {text!r:.40}; it must be a text"
                )
            prompts[name] = text or ""
        default = options.get("default_prompt_name")
        if default is not None and not (isinstance(default, str) and default in prompts):
            raise CheckpointError(
                f"{self.path / _ST}: default_prompt_name {shown(str(default))} is none of its prompts: "
                f"{listed(sorted(prompts)) or 'there are none'}"
            )
        return prompts, default

    def _embedding(self, modules: Sequence[tuple[str, str]], options: JsonObject) -> PoolingConfig:
        kind, modules = self._pooled(modules)
        if options.get("truncate_dim") is not None:
            raise self._refuse(
                _ST,
                f"truncate_dim {shown(str(options['truncate_dim']))}",
                "take truncate_dim out, and ask for so many dimensions with each request",
            )
        normalizes = bool(modules) and modules[-1][1] == "Normalize"
        if normalizes:
            self._check_names(modules[-1][0], "Normalize", "sentence_embedding")
            modules = modules[:-1]
        layers = self._layers(modules, "sentence_embedding")
        size = layers[-1].outputs if layers else self.hidden_size
        return PoolingConfig(
            PoolingTask.EMBED,
            kind,
            size,
            layers,
            normalize=normalizes,
            dimensions=_matryoshka(self.config),
        )

    def _pooled(
        self, modules: Sequence[tuple[str, str]]
    ) -> tuple[PoolingKind, Sequence[tuple[str, str]]]:
        """Return the kind of the Pooling that comes first, and the modules after it."""
        if not modules or modules[0][1] != "Pooling":
            name = modules[0][1] if modules else "no module"
            raise self._refuse(
                MODULES, f"{name} behind the transformer, where Pooling is expected,"
            )
        folder = modules[0][0]
        where = f"{folder}/{_CONFIG}" if folder else _CONFIG
        content = self._json(where)
        size = content.get("embedding_dimension", content.get("word_embedding_dimension"))
        if size != self.hidden_size:
            raise CheckpointError(
                f"{self.path / where}: word_embedding_dimension is {size!r:.20}, and the model's states have "
                f"{self.hidden_size} numbers; fetch the model again"
            )
        if content.get("include_prompt", True) is not True:
            raise self._refuse(
                where,
                "include_prompt false, by which the tokens of a prompt are not pooled,",
                f"set it true if they may be, or {_REMAINS}",
            )
        mode = _pooling_mode(content)
        if not isinstance(mode, str) or mode not in _MODES:
            raise self._refuse(
                where,
                f"pooling_mode {shown(str(mode))}",
                f"--pooling last, mean or cls pools in another way than it was trained for; or {_REMAINS}",
            )
        return _MODES[mode], modules[1:]

    def _layers(self, modules: Sequence[tuple[str, str]], output: str) -> tuple[PoolingLayer, ...]:
        """Return the Dense layers, of which the last gives `output`."""
        layers: list[PoolingLayer] = []
        size = self.hidden_size
        for index, (folder, kind) in enumerate(modules):
            if kind != "Dense":
                where = "before the last module" if kind == "Normalize" else "behind Pooling"
                raise self._refuse(MODULES, f"{kind} {where}")
            given = output if index == len(modules) - 1 else "sentence_embedding"
            layer = self._dense(folder, given)
            if layer.inputs != size:
                raise CheckpointError(
                    f"{self.path / folder / _CONFIG}: in_features is {layer.inputs}, and {size} numbers come before it"
                )
            size = layer.outputs
            layers.append(layer)
        return tuple(layers)

    def _dense(self, folder: str, output: str) -> PoolingLayer:
        content = self._check_names(folder, "Dense", output)
        where = f"{folder}/{_CONFIG}"
        if content.get("use_residual"):
            raise self._refuse(where, "use_residual true")
        weights = self.path / folder / "model.safetensors"
        if not weights.exists():
            if (weights.parent / "pytorch_model.bin").exists():
                raise CheckpointError(
                    f"{weights.parent} has pytorch_model.bin alone, which can run code when opened; Freight reads "
                    "safetensors only: SentenceTransformer(MODEL).save_pretrained(OUT) writes them"
                )
            raise CheckpointError(f"{weights} is missing; fetch the model again")
        try:
            inputs = integer(content, "in_features")
            outputs = integer(content, "out_features")
            bias = flag(content, "bias", True)
        except CheckpointError as error:
            raise CheckpointError(f"{weights.parent}: {error}") from error
        activation = content.get("activation_function", "torch.nn.modules.activation.Tanh")
        return PoolingLayer(
            "linear.weight",
            "linear.bias" if bias else None,
            inputs,
            outputs,
            _activation(activation, f"{self.path / where}: activation_function"),
            folder=folder,
        )

    def _check_names(self, folder: str, kind: str, output: str) -> JsonObject:
        """Return a module's configuration. Raises CheckpointError unless it reads the embedding and
        writes `output`.
        """
        where = f"{folder}/{_CONFIG}"
        content = self._json(where) if folder else {}
        read = content.get("module_input_name") or "sentence_embedding"
        written = content.get("module_output_name") or read
        if (read, written) != ("sentence_embedding", output):
            raise self._refuse(
                where, f"a {kind} from {shown(str(read))} to {shown(str(written))} at this place"
            )
        return content

    def _scores(self, modules: Sequence[tuple[str, str]], options: JsonObject) -> PoolingConfig:
        if not modules:
            pooling = _read_head(self.config, self.architecture, self.hidden_size, self.encoder)
        elif modules[0][1] == "LogitScore":
            pooling = self._logit_score(modules)
        else:
            kind, modules = self._pooled(modules)
            layers = self._layers(modules, "scores")
            if not layers:
                raise self._refuse(
                    MODULES,
                    "a CrossEncoder without a Dense layer (module_output_name scores) behind Pooling",
                )
            size = layers[-1].outputs
            pooling = PoolingConfig(
                PoolingTask.CLASSIFY,
                kind,
                size,
                layers,
                activation=_of_labels(size),
                labels=_labels(self.config, size),
            )
        declared = options.get("activation_fn")
        if declared is not None:
            activation = _activation(declared, f"{self.path / _ST}: activation_fn")
            pooling = replace(pooling, activation=activation)
        return pooling

    def _logit_score(self, modules: Sequence[tuple[str, str]]) -> PoolingConfig:
        folder, _ = modules[0]
        where = f"{folder}/{_CONFIG}"
        if len(modules) > 1:
            raise self._refuse(MODULES, f"{modules[1][1]} behind LogitScore")
        content = self._json(where)
        if content.get("module_input_name", "causal_logits") != "causal_logits":
            raise self._refuse(where, f"module_input_name {content['module_input_name']!r:.40}")
        names = ["true_token_id"]
        if content.get("false_token_id") is not None:
            names.append("false_token_id")
        ids: list[int] = []
        for name in names:
            token = content.get(name)
            if not is_integer(token) or token < 0:
                raise CheckpointError(
                    f"{self.path / where}: {name} is {token!r:.40}; it must be a token id"
                )
            ids.append(token)
        return PoolingConfig(
            PoolingTask.CLASSIFY,
            PoolingKind.LAST,
            1,
            activation=PoolingActivation.SIGMOID,
            token_ids=tuple(ids),
            labels=_labels(self.config, 1),
        )


@dataclass(frozen=True)
class _First:
    """What the first module says: the longest input, and values of the chat template."""

    max_length: int | None
    template_values: JsonDict


def _object(file: Path) -> JsonObject:
    """Return the object in a file, {} if there is none. A link to nothing is refused: what it would
    say is not known.
    """
    if not os.path.lexists(file):
        return {}
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _mapping(content: JsonObject, key: str, where: str) -> JsonObject:
    """Return the object under a key, {} if there is none."""
    value = content.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} is {value!r:.40}; it must be an object")
    return value


def _length(content: JsonObject, key: str, where: str) -> int | None:
    """Return a length in tokens; None where there is none, or no limit."""
    value = content.get(key)
    if value is None or (isinstance(value, int | float) and value >= _UNBOUNDED):
        return None
    if not is_integer(value) or value < 1:
        raise CheckpointError(
            f"{where}: {key} is {value!r:.40}; it must be a number of tokens, 1 or more"
        )
    return int(value)


def _tokenizer_length(path: Path) -> int | None:
    if not path.is_dir():
        return None
    file = path / "tokenizer_config.json"
    return _length(_object(file), "model_max_length", str(file))


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _lowers(normalizer: object) -> bool:
    """Return whether a normalizer of tokenizer.json writes small letters."""
    content = normalizer if isinstance(normalizer, dict) else {}
    parts = content.get("normalizers")
    if content.get("type") == "Sequence" and isinstance(parts, list):
        return any(map(_lowers, parts))
    return content.get("type") == "Lowercase" or content.get("lowercase") is True


def _pooling_mode(content: JsonObject) -> Any:
    """Return the mode of a Pooling's configuration: a name, or several."""
    mode = content.get("pooling_mode")
    if mode is None:
        chosen = [name for key, name in _LEGACY_MODES.items() if content.get(key)]
        mode = chosen or "mean"
    if isinstance(mode, list):
        return mode[0] if len(mode) == 1 else " and ".join(map(str, mode))
    return mode


def _activation(name: object, where: str) -> PoolingActivation:
    """Return the activation of this class name, as torch.nn.modules.activation.Tanh."""
    module, _, kind = str(name).rpartition(".")
    if module.startswith("torch.nn") and kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind]
    raise CheckpointError(
        f"{where} {shown(str(name))} is not implemented: it is none of {choices(_ACTIVATIONS)} of torch.nn; {_REMAINS}"
    )


# config.json


def _matryoshka(config: JsonObject) -> tuple[int, ...]:
    """Return the sizes that embeddings may be cut to; (): any."""
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(is_integer(size) and size > 0 for size in sizes):
        raise CheckpointError(
            f"{_CONFIG}: matryoshka_dimensions = {sizes!r:.60} must be a list of integers"
        )
    return tuple(sizes)


def _labels(config: JsonObject, count: int | None = None) -> tuple[str, ...]:
    """Return the names of the classes; of a count that config.json does not name, their numbers.

    transformers takes two classes where config.json says nothing.
    """
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        try:
            by_id = {int(key): str(name) for key, name in names.items()}
        except ValueError as error:
            raise CheckpointError(f"{_CONFIG}: id2label has a key that is no integer") from error
        if sorted(by_id) != list(range(len(by_id))) or len(by_id) > MOST_PARTS:
            raise CheckpointError(
                f"{_CONFIG}: id2label must number its {len(by_id):,} classes from 0, and have at most {MOST_PARTS:,}"
            )
        labels = tuple(by_id[index] for index in range(len(by_id)))
        if count is None or count == len(labels):
            return labels
    if count is None:
        count = integer(config, "num_labels", 2)
    if count > MOST_PARTS:
        raise CheckpointError(
            f"{_CONFIG}: num_labels is {count:,}; a head of at most {MOST_PARTS:,} classes is implemented"
        )
    return tuple(f"LABEL_{index}" for index in range(count))


def _of_labels(count: int) -> PoolingActivation:
    """Return what makes probabilities of so many logits."""
    return PoolingActivation.SIGMOID if count == 1 else PoolingActivation.SOFTMAX


def _head_activation(config: JsonObject, count: int) -> PoolingActivation:
    """Return the activation of a head: the one that is declared, that of the problem it was trained
    for, or that of the number of labels.
    """
    declared = _mapping(config, "sentence_transformers", _CONFIG).get("activation_fn")
    key = "sentence_transformers.activation_fn"
    if declared is None:
        key = "sbert_ce_default_activation_function"
        declared = config.get(key)
    if declared is not None:
        return _activation(declared, f"{_CONFIG}: {key}")
    problem = config.get("problem_type")
    return _PROBLEMS.get(str(problem)) or _of_labels(count)


def _read_head(
    config: JsonObject, architecture: str, hidden_size: int, encoder: bool
) -> PoolingConfig:
    """Read the head of a `*ForSequenceClassification` of transformers."""
    if not architecture.endswith(_HEAD):
        raise CheckpointError(
            f"{_CONFIG}: architectures {architecture or 'without an entry'} has no head that scores; a CrossEncoder "
            f"without further modules needs one of *{_HEAD}"
        )
    labels = _labels(config)
    if config.get("num_labels") not in (None, len(labels)):
        raise CheckpointError(
            f"{_CONFIG}: num_labels is {config['num_labels']!r:.20}, and id2label names {len(labels)}"
        )
    kind, layers = _head_layers(config, architecture, hidden_size, encoder, len(labels))
    return PoolingConfig(
        PoolingTask.CLASSIFY,
        kind,
        len(labels),
        layers,
        activation=_head_activation(config, len(labels)),
        labels=labels,
        source=f"{_CONFIG}: architectures {architecture}",
    )


def _head_layers(
    config: JsonObject, architecture: str, size: int, encoder: bool, count: int
) -> tuple[PoolingKind, tuple[PoolingLayer, ...]]:
    """Return what a head pools, and its layers with the names that transformers gives them."""
    family = architecture.removesuffix(_HEAD)
    if family == "Bert":
        return PoolingKind.CLS, (
            _linear("bert.pooler.dense", size, size, PoolingActivation.TANH),
            _linear("classifier", size, count),
        )
    if family in ("Roberta", "XLMRoberta", "Camembert"):
        return PoolingKind.CLS, (
            _linear("classifier.dense", size, size, PoolingActivation.TANH),
            _linear("classifier.out_proj", size, count),
        )
    if family == "ModernBert":
        return _modern_bert(config, size, count)
    if encoder:
        raise CheckpointError(
            f"{_CONFIG}: the head of {architecture} is not implemented; it is that of Bert, Roberta, XLMRoberta, "
            f"Camembert or ModernBert that is; {_REMAINS}"
        )
    return PoolingKind.LAST, (PoolingLayer("score.weight", None, size, count),)


def _linear(
    name: str, inputs: int, outputs: int, activation: PoolingActivation = PoolingActivation.IDENTITY
) -> PoolingLayer:
    return PoolingLayer(f"{name}.weight", f"{name}.bias", inputs, outputs, activation)


def _modern_bert(
    config: JsonObject, size: int, count: int
) -> tuple[PoolingKind, tuple[PoolingLayer, ...]]:
    kind = config.get("classifier_pooling", "cls")
    if kind not in ("cls", "mean"):
        raise CheckpointError(
            f"{_CONFIG}: classifier_pooling {kind!r:.40} is not implemented; it is cls or mean"
        )
    activation = config.get("classifier_activation", "gelu")
    if activation not in ("gelu", "relu", "tanh"):
        raise CheckpointError(
            f"{_CONFIG}: classifier_activation {activation!r:.40} is not implemented; it is gelu, relu or tanh"
        )
    if flag(config, "norm_bias"):
        raise CheckpointError(
            f"{_CONFIG}: norm_bias true is not implemented in the head of ModernBert; {_REMAINS}"
        )
    dense = PoolingLayer(
        "head.dense.weight",
        "head.dense.bias" if flag(config, "classifier_bias") else None,
        size,
        size,
        PoolingActivation(activation),
        norm="head.norm.weight",
        norm_eps=number(config, "norm_eps", 1e-5),
    )
    return PoolingKind(kind), (dense, _linear("classifier", size, count))


def _read_tokens(path: Path, config: JsonObject) -> PoolingConfig:
    """Read vLLM's classifier_from_token: of two tokens the score is the logit of the second less
    that of the first, of one its logit.
    """
    names = config["classifier_from_token"]
    key = f"{_CONFIG}: classifier_from_token"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{key} = {names!r:.60} must be a list of tokens")
    if len(names) not in (1, 2):
        raise CheckpointError(
            f"{key} names {len(names)} tokens; a score of one or two is implemented"
        )
    yes_or_no = flag(config, "is_original_qwen3_reranker")
    if len(names) == 2 and not yes_or_no and config.get("method") != "from_2_way_softmax":
        raise CheckpointError(
            f"{key} names two tokens without is_original_qwen3_reranker true: scores of two classes are not "
            "implemented; add it if the second token less the first is the score"
        )
    ids = _token_ids(path, names, key)
    return PoolingConfig(
        PoolingTask.CLASSIFY,
        PoolingKind.LAST,
        1,
        activation=_head_activation(config, 1),
        token_ids=tuple(reversed(ids)),
        labels=("LABEL_0",),
        max_length=_tokenizer_length(path),
        yes_or_no=yes_or_no,
        source=key,
    )


def _token_ids(path: Path, names: Collection[str], key: str) -> list[int]:
    """Return the ids of tokens in the folder's tokenizer.json."""
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{key} names tokens, and {path} has no tokenizer.json that has their ids; "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL) writes it"
        )
    backend = read_files(path).backend
    ids: list[int] = []
    for name in names:
        token = backend.token_to_id(name)
        if token is None:
            raise CheckpointError(f"{key}: {path / 'tokenizer.json'} has no token {shown(name)}")
        ids.append(token)
    return ids
