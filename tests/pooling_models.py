"""Tiny models with random weights as sentence-transformers and transformers save them.

Saved by the libraries themselves: what they write is what Freight has to read.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

import freight

DEMO = Path(freight.__file__).parent / "demo"
HIDDEN = 32
_TINY = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 4096,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BODIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def demo_tokenizer(folder: Path, **config: Any) -> None:
    """Write the demo model's tokenizer into `folder`, as transformers does."""
    source = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(DEMO / "tokenizer.json"),
        bos_token="<|begin_of_text|>",
        pad_token="<|begin_of_text|>",
        model_max_length=256,
        **config,
    )
    source.save_pretrained(folder)


def bert_tokenizer() -> Backend:
    """A tokenizer that joins a pair as BERT's does."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    backend = Backend(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return backend


# Special tokens of an encoder's tokenizer, and how they stand around a text and a pair
_SPECIAL = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "modernbert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "xlm-roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "gemma3_text": ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
}
_AROUND = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "modernbert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
    "xlm-roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "gemma3_text": ("<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1"),
}
_SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 258,
}
_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0},
    "xlm-roberta": {
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
    "modernbert": {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
    },
    "gemma3_text": {
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_bidirectional_attention": True,
    },
}
ENCODERS = tuple(_ENCODERS)


def encoder_tokenizer(model_type: str, folder: Path) -> None:
    """Write a tokenizer of letters into `folder`, with the family's special tokens around texts and
    pairs.
    """
    special = _SPECIAL[model_type]
    unknown = next(token for token in special if "unk" in token.lower())
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?_():="
    words = [*special, *letters, *(f"##{letter}" for letter in letters)]
    backend = Backend(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token=unknown)
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    single, pair = _AROUND[model_type]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, words.index(token)) for token in special]
    )
    inputs = ["input_ids", "attention_mask"]
    if model_type == "bert":
        inputs.append("token_type_ids")
    names = {
        f"{name}_token": token
        for token in special
        for name in (token.strip("[]<>").lower(),)
        if name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
    }
    if model_type == "xlm-roberta":
        names |= {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=256, model_input_names=inputs, **names
    )
    tokenizer.save_pretrained(folder)


def save_encoder(
    folder: Path, model_type: str, auto: Any = transformers.AutoModel, **keys: Any
) -> Path:
    """Save an encoder of a family of `ENCODERS` with every parameter random, and a tokenizer.

    auto: the class of transformers that has the head, such as AutoModelForSequenceClassification
    """
    torch.manual_seed(3)
    said = {**_SHAPE, **_ENCODERS[model_type], **keys}
    config = transformers.AutoConfig.for_model(model_type, **said)
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            offset = is_norm and model_type != "gemma3_text"
            small = 0.1
            if parameter.ndim == 2:  # outputs of a matrix are about as large as its inputs
                small = 1.1 * parameter.shape[1] ** -0.5
            parameter.copy_(offset + small * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    encoder_tokenizer(model_type, folder)
    return folder


def save_body(
    folder: Path,
    body: str = "qwen3",
    head: str = "Model",
    chat_template: str | None = None,
    **keys: Any,
) -> Path:
    """Save a model of a family of `BODIES` with random weights, and the demo's tokenizer."""
    torch.manual_seed(1)
    name = BODIES[body]
    config = getattr(transformers, f"{name}Config")(**{**_TINY, **keys})
    model = getattr(transformers, f"{name}{head}")(config)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # norms and biases too, and states that differ by token
            parameter.normal_(1 if parameter.ndim == 1 else 0, 0.3)
    model.save_pretrained(folder)
    demo_tokenizer(folder, chat_template=chat_template)
    return folder


def save_embedder(folder: Path, body: Path, modules: Sequence[Any], **keys: Any) -> Any:
    """Save what sentence-transformers makes of a body and further modules; return its model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    model = SentenceTransformer(modules=[Transformer(str(body)), *modules], device="cpu", **keys)
    model.save(str(folder), create_model_card=False)
    return model


def copied(source: Path, folder: Path) -> Path:
    """Copy a model's folder, to be changed."""
    return Path(shutil.copytree(source, folder))
