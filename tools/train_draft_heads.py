"""Train what drafts for the demo and a small hybrid: an EAGLE-3 head, and layers that predict a further token.

    python tools/train_draft_heads.py OUT [--steps 400] [--depth 3] [--vocabulary 1024] [--seed 0] [--threads 1]

Writes OUT/eagle3, a head in EAGLE-3's format (arXiv:2503.01840) with logits of the most frequent
tokens, and OUT/mimo, the demo as a MiMo model, whose checkpoints have such layers (DeepSeek-V3,
section 2.2, arXiv:2412.19437; `mtp_layers` of MiMo). A MiMo model is a Qwen2: the demo's weights,
and biases of 0. OUT/qwen3_5 is tests/fixtures/hybrids/delta_net, three gated delta nets and attention,
with the layer that checkpoints of Qwen3.5 and Qwen3-Next have (`mtp.*`): attention and a feed-forward,
as in the model's last layer. `freight.model.eagle` and `freight.model.predicting` have the formulas.

All learn the model's own distribution of the next token, of the features that it has of the
text the demo was trained on. Like EAGLE-3 they are trained over `--depth` passes, each on the states that
the last one gave: so a head learns to go on from its own states.

The heads are small and hardly trained. They show that drafts are right and how often, not a gain in
speed: a pass of a head reads a quarter of what the model's reads, or more. `tools/measure_draft_heads.py`
measures what the engine makes of them. The same Python, torch, thread count and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo_model import (
    EOS,
    FAMILIES,
    HELD_OUT,
    HIDDEN,
    VOCAB,
    Block,
    Model,
    batches,
    source_files,
)
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    apply_rotary_pos_emb,
)

from freight.checkpoint.reader import resolve_model

TAKEN = (1, 3, 5)  # layers of the demo whose output an EAGLE-3 head takes
LENGTH = 256  # tokens of a window
RATE = 3e-3  # of AdamW; Muon's products in bfloat16 take many CPUs longer than all of the rest
STD = 0.04  # of matrices before training
DECAY = 0.8  # weight of a pass beside the one before it, as EAGLE-3's
EAGLE, PREDICTING, HYBRID = HEADS = ("eagle3", "mimo", "qwen3_5")  # folders
DELTA_NET = Path(__file__).parents[1] / "tests/fixtures/hybrids/delta_net"

Stored = dict[str, Tensor]


@dataclass(frozen=True)
class Features:
    """What a model gives for rows of windows, [batch, length, ...].

    streams   the output of each layer
    final     the final states, normed
    embedded  the embedding of the token behind each row
    targets   logits of the token behind that one
    """

    streams: list[Tensor]
    final: Tensor
    embedded: Tensor
    targets: Tensor


class Target:
    """A model that is drafted for, in float32, which is not trained.

    folder   of its checkpoint
    rotary   cos and sin of the positions of a window, as its layers take them
    """

    folder: Path
    rotary: tuple[Tensor, Tensor]

    def features(self, windows: Tensor) -> Features:
        """Return the features of windows [batch, length + 1], for `length` rows."""
        raise NotImplementedError


class Demo(Target):
    """The demo."""

    def __init__(self) -> None:
        self.folder = resolve_model("demo")
        self.model = Model(FAMILIES["llama"])
        self.model.load(self.folder)
        self.model.requires_grad_(False)
        self.rotary = self.model.cos[:LENGTH], self.model.sin[:LENGTH]

    @torch.no_grad()
    def features(self, windows: Tensor) -> Features:
        model = self.model
        embedded = model.embed(windows)
        x = embedded
        streams = []
        for block in model.layers:
            x = block(x, model.cos[: x.shape[1]], model.sin[: x.shape[1]])
            streams.append(x[:, :-1])
        final = model.norm(x)
        targets = F.linear(final[:, 1:], model.embed.weight)
        return Features(streams, final[:, :-1], embedded[:, 1:], targets)


class Hybrid(Target):
    """The small Qwen3.5, in transformers' modules. An EAGLE-3 head is not trained for it, so its features
    have no streams.
    """

    def __init__(self) -> None:
        self.folder = DELTA_NET
        self.model: Any = Qwen3_5ForCausalLM.from_pretrained(DELTA_NET, dtype=torch.float32)
        self.model.requires_grad_(False)
        positions = torch.arange(LENGTH).expand(3, 1, -1)  # of text the three are the same
        self.rotary = self.model.model.rotary_emb(torch.zeros(1), positions)

    @torch.no_grad()
    def features(self, windows: Tensor) -> Features:
        embedded = self.model.model.embed_tokens(windows)
        final = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        targets = self.model.lm_head(final[:, 1:])
        return Features([], final[:, :-1], embedded[:, 1:], targets)


class Head(nn.Module):
    """One layer behind a model's. It takes part in attention over the keys of all passes."""

    def __init__(self, target: Target, block: nn.Module, ids: Tensor) -> None:
        """block: the layer, whose matrices are drawn here; ids: the tokens that have logits."""
        super().__init__()
        self.block = block
        self.ids = ids
        self._cos, self._sin = target.rotary
        for name, parameter in block.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def taken(self, features: Features) -> Tensor:
        """Return the states of the first pass."""
        raise NotImplementedError

    def forward(
        self, states: Tensor, embedded: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return states and logits of rows. past: keys and values of the passes before, to which this
        pass appends.
        """
        raise NotImplementedError

    def write(self, folder: Path, target: Target) -> None:
        """Write a checkpoint."""
        raise NotImplementedError

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return what attention gives, as `q`: [batch, heads, LENGTH, head_dim].

        In pass d a row sees the rows of the first pass up to d before it, and one row of each
        pass in between: those are the keys that drafts have where it is the d-th behind them.
        """
        past.append((k, v))
        keys = torch.cat([key for key, _ in past], 2)
        values = torch.cat([value for _, value in past], 2)
        depth = len(past) - 1
        rows = torch.arange(LENGTH)
        behind = rows[:, None] - rows
        seen = [behind >= depth]
        for index in range(1, len(past)):
            seen.append(behind == depth - index)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=torch.cat(seen, 1), enable_gqa=q.shape[1] != keys.shape[1]
        )


class DemoHead(Head):
    """A head whose layer is as the demo's."""

    block: Block

    def layer(self, x: Tensor, inputs: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the layer's result. x: the residual stream; inputs: of q, k and v."""
        q, k, v = self.block.projected(inputs, self._cos, self._sin)
        return self.block.finished(x, self.attended(q, k, v, past))


class EagleHead(DemoHead):
    """An EAGLE-3 head: `fc` makes a state of the features, attention takes embedding and state."""

    def __init__(self, demo: Demo, ids: Tensor) -> None:
        super().__init__(demo, Block(FAMILIES["llama"], 2 * HIDDEN), ids)
        self.fc = nn.Linear(len(TAKEN) * HIDDEN, HIDDEN, bias=False)
        nn.init.normal_(self.fc.weight, std=STD)
        self.hidden_norm = nn.RMSNorm(HIDDEN, FAMILIES["llama"].eps)
        self.norm = nn.RMSNorm(HIDDEN, FAMILIES["llama"].eps)
        self.norm.weight.data = demo.model.norm.weight.data.clone()
        self.lm_head = nn.Linear(HIDDEN, len(ids), bias=False)
        self.lm_head.weight.data = demo.model.embed.weight.data[ids]

    def taken(self, features: Features) -> Tensor:
        states: Tensor = self.fc(torch.cat([features.streams[index] for index in TAKEN], -1))
        return states

    def forward(
        self, states: Tensor, embedded: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        of_embedding = self.block.input_layernorm(embedded)
        inputs = torch.cat((of_embedding, self.hidden_norm(states)), -1)
        states = self.layer(states, inputs, past)
        return states, self.lm_head(self.norm(states))

    def write(self, folder: Path, target: Target) -> None:
        """Write a head as SafeAILab/EAGLE and SpecForge do."""
        stored = layer_state(self.block, "midlayer.")
        stored["midlayer.hidden_norm.weight"] = self.hidden_norm.weight
        for name in ("fc", "norm", "lm_head"):
            stored[f"{name}.weight"] = self.get_parameter(f"{name}.weight")
        stored = in_16_bits(stored)
        stored["d2t"] = self.ids - torch.arange(len(self.ids))
        stored["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, self.ids, True)
        described = json.loads((target.folder / "config.json").read_text())
        described |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.ids),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(TAKEN),
                "use_aux_hidden_state": True,
            },
        }
        write(folder, described, stored)


class PredictingHead(DemoHead):
    """A layer as MiMo has it, which predicts a further token with the demo's embedding and head."""

    def __init__(self, demo: Demo) -> None:
        family = replace(FAMILIES["llama"], biases=True)
        super().__init__(demo, Block(family), torch.arange(VOCAB))
        self.token_layernorm = nn.RMSNorm(HIDDEN, family.eps)
        self.hidden_layernorm = nn.RMSNorm(HIDDEN, family.eps)
        self.input_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        nn.init.normal_(self.input_proj.weight, std=STD)
        self.final_layernorm = nn.RMSNorm(HIDDEN, family.eps)
        self.final_layernorm.weight.data = demo.model.norm.weight.data.clone()
        self._embedding = demo.model.embed.weight.data

    def taken(self, features: Features) -> Tensor:
        return features.final

    def forward(
        self, states: Tensor, embedded: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        seen = (torch.arange(LENGTH) > 0).unsqueeze(-1)  # MiMo masks the embedding of position 0
        parts = self.hidden_layernorm(states), self.token_layernorm(embedded * seen)
        x = self.input_proj(torch.cat(parts, -1))
        states = self.final_layernorm(self.layer(x, self.block.input_layernorm(x), past))
        return states, F.linear(states, self._embedding)

    def write(self, folder: Path, target: Target) -> None:
        """Write the demo as a MiMo model, with the layer."""
        prefix = "model.mtp_layers.0."
        stored = layer_state(self.block, prefix)
        for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"):
            stored[f"{prefix}{name}.weight"] = self.get_parameter(f"{name}.weight")
        stored = {**load_file(target.folder / "model.safetensors"), **in_16_bits(stored)}
        for name in sorted(stored):
            module = name.removesuffix(".weight")
            if module.endswith(("q_proj", "k_proj", "v_proj")) and f"{module}.bias" not in stored:
                size = len(stored[name])
                stored[f"{module}.bias"] = torch.zeros(size, dtype=torch.bfloat16)
        described = json.loads((target.folder / "config.json").read_text())
        del described["attention_bias"], described["mlp_bias"]
        described |= {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "num_nextn_predict_layers": 1,
        }
        shutil.copytree(target.folder, folder, dirs_exist_ok=True)
        write(folder, described, stored)


class HybridHead(Head):
    """A layer as Qwen3.5 and Qwen3-Next have it: the embedding is the first half of what is projected,
    and attention has a gate.
    """

    block: Qwen3_5DecoderLayer

    def __init__(self, hybrid: Hybrid) -> None:
        config = hybrid.model.config
        block = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
        super().__init__(hybrid, block, torch.arange(config.vocab_size))
        size = config.hidden_size
        norms = [Qwen3_5RMSNorm(size, config.rms_norm_eps) for _ in range(3)]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.norm.weight.data = hybrid.model.model.norm.weight.data.clone()
        self.fc = nn.Linear(2 * size, size, bias=False)
        nn.init.normal_(self.fc.weight, std=STD)
        self._embedding = hybrid.model.lm_head.weight.data

    def taken(self, features: Features) -> Tensor:
        return features.final

    def forward(
        self, states: Tensor, embedded: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        states = self.norm(self.layer(self.fc(torch.cat(parts, -1)), past))
        return states, F.linear(states, self._embedding)

    def layer(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the layer's result for the residual stream x, as `Qwen3_5DecoderLayer` computes it."""
        attention = self.block.self_attn
        inputs = self.block.input_layernorm(x)
        heads = (-1, attention.head_dim)
        q, gate = attention.q_proj(inputs).unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, -1)
        q = attention.q_norm(q).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(inputs).unflatten(-1, heads)).transpose(1, 2)
        v = attention.v_proj(inputs).unflatten(-1, heads).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, self._cos, self._sin)
        attended = self.attended(q, k, v, past).transpose(1, 2) * gate.sigmoid()
        x = x + attention.o_proj(attended.flatten(-2))
        mixed: Tensor = x + self.block.mlp(self.block.post_attention_layernorm(x))
        return mixed

    def write(self, folder: Path, target: Target) -> None:
        """Write the hybrid with the layer, as Qwen3.5 is published."""
        stored: Stored = {}
        for name, parameter in self.named_parameters():
            stored["mtp." + name.replace("block.", "layers.0.", 1)] = parameter
        stored = {**load_file(target.folder / "model.safetensors"), **in_16_bits(stored)}
        described = json.loads((target.folder / "config.json").read_text())
        described["mtp_num_hidden_layers"] = 1
        logs = shutil.ignore_patterns("*.log")
        shutil.copytree(target.folder, folder, ignore=logs, dirs_exist_ok=True)
        write(folder, described, stored)


def layer_state(block: Block, prefix: str) -> Stored:
    """Return the weights of a layer by the names of a Llama's."""
    stored: Stored = {}
    for name, parameter in block.named_parameters():
        group = "self_attn." if name[:2] in ("q_", "k_", "v_", "o_") else "mlp."
        if "_proj" not in name:
            group = ""
        stored[prefix + group + name] = parameter
    return stored


def in_16_bits(stored: Stored) -> Stored:
    return {name: t.detach().to(torch.bfloat16).contiguous() for name, t in stored.items()}


def losses(head: Head, features: Features, depth: int) -> Iterator[tuple[Tensor, float]]:
    """Yield for each pass the mean cross-entropy beside the model's distribution, of the head's tokens
    alone, and how often the head's most likely token is the model's most likely one.
    """
    states = head.taken(features)
    likely = features.targets[..., head.ids].softmax(-1)
    best = features.targets.argmax(-1)
    past: list[tuple[Tensor, Tensor]] = []
    for index in range(depth):
        states, logits = head(states, features.embedded, past)
        rows = slice(index, None)  # those before have no row to go on from
        found = logits[:, rows]
        loss = -(likely[:, rows] * found.log_softmax(-1)).sum(-1).mean()
        agreed = (head.ids[found.argmax(-1)] == best[:, rows]).float().mean()
        yield loss, float(agreed)
        states = F.pad(states, (0, 0, 1, 0))[:, :-1]


def train(head: Head, target: Target, stream: Iterator[Tensor], steps: int, depth: int) -> None:
    """Train `head` on `steps` batches of windows, with a log."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    begin = time.monotonic()
    for step in range(steps):
        rate = min((step + 1) / 10, (steps - step) / (steps * 0.6), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * rate
        total = torch.zeros(())
        lines = []
        for index, (loss, agreed) in enumerate(losses(head, target.features(next(stream)), depth)):
            total = total + DECAY**index * loss
            lines.append(f"{float(loss.detach()):.3f} ({agreed:.2f})")
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            seconds = time.monotonic() - begin
            print(
                f"step {step} of {steps}, loss (right) of each pass: {', '.join(lines)}; {seconds:.0f} s",
                flush=True,
            )


@torch.no_grad()
def evaluate(head: Head, target: Target, stream: Tensor, depth: int) -> list[float]:
    """Return for each pass how often the head's most likely token is the model's most likely one."""
    windows = stream[: 8 * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    found = [agreed for _, agreed in losses(head, target.features(windows), depth)]
    return [round(agreed, 3) for agreed in found]


def tokens_of(target: Target, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return at least `num_tokens` tokens to train on, of files in random order, and held-out ones."""
    files = source_files()
    names = [name for name in files if name not in HELD_OUT]
    random.Random(seed).shuffle(names)
    tokenizer = Tokenizer.from_file(str(target.folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    assert eos is not None
    ids: list[int] = []
    for name in names:
        if len(ids) > num_tokens:
            break
        ids += [*tokenizer.encode(files[name]).ids, eos]
    return torch.tensor(ids), torch.tensor(tokenizer.encode(files["textwrap.py"]).ids)


def frequent(stream: Tensor, count: int) -> Tensor:
    """Return the `count` most frequent tokens, rising; of equals the lower ones."""
    counts = torch.bincount(stream, minlength=VOCAB)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def write(folder: Path, described: dict[str, Any], stored: Stored) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def train_heads(
    out: Path,
    steps: int,
    rows: int = 2,
    depth: int = 3,
    vocabulary: int = 1024,
    seed: int = 0,
    names: Sequence[str] = HEADS,
) -> None:
    """Train and write the heads of `names`. rows: windows of a batch."""
    for name in names:
        target = Hybrid() if name == HYBRID else Demo()
        stream, held_out = tokens_of(target, steps * rows * LENGTH, seed)
        torch.manual_seed(seed)
        head = head_of(target, name, stream, vocabulary)
        print(f"{name}: {sum(p.numel() for p in head.parameters())} parameters", flush=True)
        generator = torch.Generator().manual_seed(seed)
        train(head, target, batches(stream, LENGTH, rows, generator), steps, depth)
        print(f"{name}: held out, right in each pass: {evaluate(head, target, held_out, depth)}")
        head.write(out / name, target)


def head_of(target: Target, name: str, stream: Tensor, vocabulary: int) -> Head:
    """Build the untrained head of this name; one in EAGLE-3's format for the most frequent tokens of
    `stream`.
    """
    if isinstance(target, Hybrid):
        return HybridHead(target)
    assert isinstance(target, Demo)
    if name == EAGLE:
        return EagleHead(target, frequent(stream, vocabulary))
    return PredictingHead(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=2, help=f"windows of {LENGTH} tokens a step")
    parser.add_argument(
        "--depth", type=int, default=3, help="passes, each on the last one's states"
    )
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens of the EAGLE-3 head")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Hide the warning that the plain torch code is used, which is intended here
    logging.getLogger("transformers").setLevel(logging.ERROR)
    train_heads(args.out, args.steps, args.rows, args.depth, args.vocabulary, args.seed, args.heads)


if __name__ == "__main__":
    main()
