"""Train the small models in tests/fixtures/hybrids (recurrent states) and tests/fixtures/latents.

    python tools/train_small_models.py delta_net OUT [--tokens 1.8e6] [--seed 0]
    python tools/train_small_models.py mamba2 OUT [--tokens 1.8e6] [--seed 0]
    python tools/train_small_models.py latent OUT [--tokens 4e6] [--seed 0]

`delta_net` is Qwen3.5's text architecture: three gated delta nets, then attention. `mamba2` is
Granite 4's without experts: three Mamba-2 layers, then attention without rotary embedding. `latent`
is DeepSeek-V3's without experts, with latents of 256 channels. All are transformers' own modules,
on its plain torch code. The tokenizer is the demo model's, cut to its first 1024 tokens.

Half of the rows of a batch are text, the same as for the demo model. The other half are records in
the form of `freight evaluate long`, most of which repeat an earlier one. In records only the words
that can be known count for the loss: of a repeated record the second word of the key, and the
value. The optimizers are Muon for the matrices inside the layers and AdamW for the rest, with
linear decay to zero, as in tools/train_demo_model.py. One thread; the same Python, torch,
transformers and processor give the same bytes.

OUT gets config.json and model.safetensors in bfloat16 as transformers writes them, the tokenizer,
and training.log. The figures at the log's end are of the weights in bfloat16, computed in float32.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from train_demo_model import BOS, EOS, HELD_OUT, source_files
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from freight.lab.evaluate.retrieval import KEY, VALUE, Vocabulary, make_contexts, vocabulary
from freight.text.tokenizer import Tokenizer as FreightTokenizer

Say = Callable[[str], None]
VOCAB = 1024
HIDDEN = 96
INTERMEDIATE = 192
CONTEXT = 1024
DEMO = Path(__file__).parents[1] / "src/freight/demo"
BATCH = 1024  # tokens; twice as many if one row has as many
AGAIN = 0.7  # chance that a record is an earlier one
# Tokens after which a head's state has decayed to a half, before training. With transformers'
# initialization states are forgotten within a token or two, and training hardly recovers from that.
HALF_LIVES = {"delta_net": (16, 64, 256, 1024), "mamba2": (8, 32, 64, 128, 256, 1024)}
STEP = 0.05  # of Mamba-2's time, before training


def build(kind: str, seed: int) -> PreTrainedModel:
    """Build the untrained model in float32, as transformers initializes it, except for the
    recurrent layers (`start`).
    """
    torch.manual_seed(seed)
    if kind == "latent":
        return latent_model()
    shared: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    if kind == "delta_net":
        rope = {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        }  # fmt: skip
        delta = Qwen3_5TextConfig(
            **shared, intermediate_size=INTERMEDIATE, head_dim=64, rope_parameters=rope, linear_num_key_heads=2,
            linear_key_head_dim=64, linear_num_value_heads=4, linear_value_head_dim=64,
        )  # fmt: skip
        model: PreTrainedModel = Qwen3_5ForCausalLM(delta)
    else:
        mamba = GraniteMoeHybridConfig(
            **shared, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=2 * INTERMEDIATE,
            attention_multiplier=48**-0.5, position_embedding_type=None, mamba_n_heads=6, mamba_d_head=32,
            mamba_d_state=64, mamba_chunk_size=32,
        )  # fmt: skip
        model = GraniteMoeHybridForCausalLM(mamba)
    mixers = [module for module in model.modules() if hasattr(module, "A_log")]
    for lag, mixer in enumerate(mixers):
        start(mixer, kind, lag)
    return model


def latent_model() -> PreTrainedModel:
    """Build three layers of latent attention; two groups of 128 channels per latent, as a scale for
    each group needs them.
    """
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=2 * INTERMEDIATE, num_hidden_layers=3,
        first_k_dense_replace=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=256,
        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


@torch.no_grad()
def start(mixer: Any, kind: str, lag: int) -> None:
    """Initialize a recurrent layer as a memory: it looks up what followed the token that is `lag`
    tokens back.

    Queries and keys are one random projection, of the token `lag` back and of the one before that;
    heads have `HALF_LIVES`. After Trockman et al. 2024, "Mimetic Initialization Helps State Space
    Models Learn to Recall".
    """
    if kind == "delta_net":
        rows = mixer.in_proj_qkv.weight
        query = 0
        key = mixer.key_dim
        first = 0
    else:
        first = mixer.intermediate_size  # rows of the gate, which has no convolution
        rows = mixer.in_proj.weight
        key = mixer.intermediate_size
        query = mixer.intermediate_size + mixer.ssm_state_size
    size = abs(key - query)
    shared = torch.randn(size, HIDDEN) * HIDDEN**-0.5
    taps = mixer.conv1d.weight[:, 0]  # [channels, 4]; the last one is of the token itself
    taps[:, -1] = 1.0
    for at, back in ((query, lag), (key, lag + 1)):
        rows[first + at : first + at + size] = shared
        taps[at : at + size, -1] = 0.0
        taps[at : at + size, -1 - back] = 1.0
    rates = math.log(2) / torch.tensor(HALF_LIVES[kind])  # of a token
    steps = rates if kind == "delta_net" else torch.full_like(rates, STEP)
    mixer.A_log.copy_((rates / steps).log())
    mixer.dt_bias.copy_(steps.expm1().log())  # softplus(dt_bias) = steps


def write_tokenizer(out: Path) -> Tokenizer:
    """Write the demo's tokenizer with its first `VOCAB` tokens.

    The merges of BPE are in the order in which training found them, so the first ones are what
    training with a smaller vocabulary finds.
    """
    out.mkdir(parents=True, exist_ok=True)
    stored = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    model = stored["model"]
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < VOCAB}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, value in [("tokenizer.json", stored), ("tokenizer_config.json", settings)]:
        (out / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def record_row(words: Vocabulary, length: int, draw: random.Random) -> tuple[list[int], list[bool]]:
    """Draw `length` + 1 tokens of records; return them, and which of them are known from an earlier
    record.
    """
    earlier: list[list[int]] = []
    ids = [*words.begin]
    known = [False] * len(words.begin)
    while len(ids) <= length:
        again = bool(earlier) and draw.random() < AGAIN
        if not again:
            key = draw.choices(words.words, k=KEY)
            value = draw.choices(words.words, k=VALUE)
            earlier.append([*key, *words.equals, *value, *words.end])
        ids += draw.choice(earlier) if again else earlier[-1]
        known += [False] + [again] * (KEY - 1) + [False] * len(words.equals)
        known += [again] * VALUE + [False] * len(words.end)
    return ids[: length + 1], known[: length + 1]


def length_at(progress: float) -> int:
    """Return the tokens of a row at this share of the training, 0 … 1."""
    if progress < 0.3:
        return 128
    if progress < 0.6:
        return 256
    return 512 if progress < 0.9 else CONTEXT


def optimizers_of(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the rest, at a tenth of its
    rate for decay parameters.
    """
    matrices = []
    decays = []
    others = []
    for name, parameter in model.named_parameters():
        if name.endswith(("in_proj_a.weight", "A_log", "dt_bias")):
            decays.append(parameter)
        elif parameter.ndim == 2 and "embed" not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": others, "lr": 5e-3}, {"params": decays, "lr": 5e-4}]
    return [
        torch.optim.Muon(
            matrices, lr=0.02, momentum=0.95, weight_decay=0.05, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    model: PreTrainedModel, text: Tensor, words: Vocabulary, steps: int, seed: int, say: Say
) -> None:
    draw = random.Random(seed)
    optimizers = optimizers_of(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    begin = time.monotonic()
    done = 0
    model.train()
    for step in range(steps):
        length = length_at(step / steps)
        half = max(BATCH // length // 2, 1)
        starts = [draw.randrange(len(text) - length) for _ in range(half)]
        records = [record_row(words, length, draw) for _ in range(half)]
        rows = [
            *(text[start : start + length + 1] for start in starts),
            *(torch.tensor(ids) for ids, _ in records),
        ]
        known = torch.tensor([flags[1:] for _, flags in records])
        batch = torch.stack(rows)
        done += len(rows) * length
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
        text_loss = losses[:half].mean()
        known_loss = losses[half:][known].mean()
        (text_loss + known_loss).backward()
        share = min((step + 1) / 40, (steps - step) / (steps * 0.6), 1.0)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * share
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            speed = done / (time.monotonic() - begin)
            losses_text = f"text {float(text_loss.detach()):.3f}, known words {float(known_loss.detach()):.3f}"
            say(f"step {step} of {steps}: {losses_text}, {speed:.0f} tokens/s")


def log_probs(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Tensor:
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits.float().log_softmax(-1)


def forget(cache: DynamicCache) -> None:
    """Set the recurrent states to zero. The last inputs of the convolutions, and attention's keys,
    stay.
    """
    for layer in cache.layers:
        for state in getattr(layer, "recurrent_states", {}).values():
            if state is not None:
                state.zero_()


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel, stream: Tensor, sizes: Tensor, context: int, most: int, reset: bool
) -> float:
    """Return the bits per byte of the first `most` windows of `context` tokens, computed 64 tokens
    at a time.

    sizes: the bytes of each token of `stream`. reset: set the states to zero after each 64 tokens.
    """
    most = min(most, (len(stream) - 1) // context)
    windows = stream[: most * context + 1].unfold(0, context + 1, context)
    nats = 0.0
    for part in windows.split(max(1, 8192 // context)):
        cache = DynamicCache(config=model.config)
        for start in range(0, context, 64):
            result = log_probs(model, part[:, start : start + 64], cache)
            nats += float(
                F.nll_loss(
                    result.flatten(0, 1), part[:, start + 1 : start + 65].flatten(), reduction="sum"
                )
            )
            if reset:
                forget(cache)
    return nats / math.log(2) / int(sizes[1 : most * context + 1].sum())


@torch.no_grad()
def recall(
    model: PreTrainedModel, words: Vocabulary, context: int, count: int, states: bool
) -> dict[int, float]:
    """Return {depth in tokens: share of questions of `freight evaluate long` whose complete value
    is the most likely one}.

    states: keep the recurrent states until the question comes.
    """
    results: dict[int, list[bool]] = {}
    for made in make_contexts(words, context, count, 4, seed=977):
        cache = DynamicCache(config=model.config)
        log_probs(model, torch.tensor([made.token_ids]).expand(len(made.questions), -1), cache)
        if not states:
            forget(cache)
        asked = torch.tensor([[*question.key, *question.value[:-1]] for question in made.questions])
        best = log_probs(model, asked, cache)[:, -VALUE:].argmax(-1)
        for question, tokens in zip(made.questions, best.tolist(), strict=True):
            results.setdefault(question.depth, []).append(tokens == list(question.value))
    return {depth: sum(hits) / len(hits) for depth, hits in results.items()}


def measure(
    model: PreTrainedModel, held_out: Tensor, sizes: Tensor, words: Vocabulary, say: Say
) -> None:
    """Report bits per byte of the held-out text, and records found, with the states and without."""
    model.eval()
    recurrent = any(hasattr(module, "A_log") for module in model.modules())
    for context, most in ((256, 8), (CONTEXT, len(held_out))):
        for reset in (False, True)[: 1 + recurrent]:
            bits = bits_per_byte(model, held_out, sizes, context, most, reset)
            which = f"first {most} windows" if most < len(held_out) else "windows"
            how = "set to 0 every 64 tokens" if reset else "kept"
            say(f"held out, {which} of {context} tokens, states {how}: {bits:.4f} bits per byte")
    for context in (256, CONTEXT // 2, CONTEXT):
        for states in (True, False)[: 1 + recurrent]:
            shares = recall(model, words, context, 16, states).items()
            how = "kept" if states else "set to 0 before the question"
            result = ", ".join(f"{share:.0%} of {depth} back" for depth, share in shares)
            say(f"records found in {context} tokens, states {how}: {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=[*HALF_LIVES, "latent"])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokens", type=float, default=1.8e6, help="steps times BATCH (default 1.8e6)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Hide the warning that the plain torch code is used, which is intended here
    logging.getLogger("transformers").setLevel(logging.ERROR)

    tokenizer = write_tokenizer(args.out)
    files = source_files()
    names = [name for name in files if name not in HELD_OUT]
    random.Random(args.seed).shuffle(names)
    encoded = tokenizer.encode_batch([files[name] for name in names])
    text = torch.tensor([token for item in encoded for token in [*item.ids, 1]])
    held_out = tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"))
    # Byte-level tokens have one character per byte
    sizes = torch.tensor([len(token) for token in held_out.tokens])
    words = vocabulary(FreightTokenizer.load(args.out), VOCAB, 0)
    model = build(args.kind, args.seed)

    log = open(args.out / "training.log", "w")  # noqa: SIM115 - closed at exit

    def say(line: str) -> None:
        print(line, flush=True)
        print(line, file=log, flush=True)

    count = sum(parameter.numel() for parameter in model.parameters())
    versions = f"python {platform.python_version()} torch {torch.__version__} transformers {transformers.__version__}"
    say(f"{versions} seed {args.seed}, {args.kind}, {count} parameters")
    say(
        f"{len(names)} files, {len(text)} tokens to train on; {len(sizes)} held out; {len(words.words)} words"
    )
    train(model, text, words, int(args.tokens) // BATCH, args.seed, say)
    model.bfloat16().save_pretrained(args.out)
    measure(model.float(), torch.tensor(held_out.ids), sizes, words, say)
    log.close()


if __name__ == "__main__":
    main()
