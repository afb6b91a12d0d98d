"""PoolingConfig: how one vector comes of a prompt's final states. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from freight.pooling import PoolingTask

# ends of the names of transformers' classes that have no matrix of the vocabulary
_HEADLESS = ("ForSequenceClassification", "TextModel", "Model")
# classes with such a head whose names end alike: GPT2LMHeadModel, InternVLChatModel
_GENERATING = ("LMHeadModel", "ChatModel")
_HEADED = ("ForCausalLM", "ForConditionalGeneration")


def headless_names(architecture: str) -> tuple[str, ...]:
    """Return the names of the classes that run the same layers as `architecture`, without its head."""
    for end in _HEADED:
        if architecture.endswith(end):
            base = architecture.removesuffix(end)
            return tuple(base + headless for headless in _HEADLESS)
    return ()


def is_headless(architecture: str) -> bool:
    """Whether a class of transformers has no matrix of the vocabulary, or none that generates."""
    if architecture.endswith(_GENERATING):
        return False
    return architecture.endswith((*_HEADLESS, "ForMaskedLM"))


class PoolingKind(StrEnum):
    """Which of a prompt's final states become one."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # the mean of all
    CLS = "cls"  # that of the first token


class PoolingActivation(StrEnum):
    """A function of a vector after a layer."""

    IDENTITY = "identity"
    TANH = "tanh"
    GELU = "gelu"
    RELU = "relu"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True)
class PoolingLayer:
    """A Linear layer after pooling, in float32: norm(activation(weight x + bias)).

    weight      name of its tensor [outputs, inputs]
    bias        name of its bias [outputs]; None: there is none
    inputs, outputs   their number
    activation  of the result
    norm        name of the weight of a LayerNorm after the activation, without bias; None: none
    folder      folder within the checkpoint whose model.safetensors has the tensors, as
                sentence-transformers writes a module; "": the checkpoint's own files
    """

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    activation: PoolingActivation = PoolingActivation.IDENTITY
    norm: str | None = None
    norm_eps: float = 1e-5
    folder: str = ""


@dataclass(frozen=True)
class PoolingConfig:
    """What a model pools, and how.

    task            what comes of it
    kind            which states are pooled
    layers          after pooling, in order
    size            numbers of the result
    normalize       embed: whether it is divided by its length
    activation      classify: of the last layer's outputs
    dimensions      embed: sizes that the model was trained to be cut to; (): any size
    token_ids       classify: the score is the logit of the first of these tokens after the prompt,
                    less that of the second if there are two (Qwen3-Reranker: yes, no); (): `layers`
    labels          classify: names of the classes
    prompts         by name, a text before a prompt ("query": "Instruct: …")
    default_prompt  name of the prompt that is used where none is named; None: no prompt
    max_length      longest input in tokens, which the model was made for; None: its context
    yes_or_no       classify: whether a pair is put as Qwen3-Reranker's question, to which it answers
                    yes or no, where the chat template has no place for a query and a document
    template_values classify: values that the chat template gets with a pair
    token_types     kinds of tokens that the model tells apart, of which the second text of a pair
                    has the second (BERT); 1: none
    beside          whether the model also generates: pooling was asked for by an option
    source          the file or key that says so, for messages
    """

    task: PoolingTask
    kind: PoolingKind
    size: int
    layers: tuple[PoolingLayer, ...] = ()
    normalize: bool = True
    activation: PoolingActivation = PoolingActivation.IDENTITY
    dimensions: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    yes_or_no: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict)
    token_types: int = 1
    beside: bool = False
    source: str = ""

    @property
    def pairs(self) -> bool:
        """Whether the model gives one score for two texts."""
        return self.task is PoolingTask.CLASSIFY and self.size == 1
