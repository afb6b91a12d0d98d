"""Train the model that ships with Freight: a small Llama that writes Python.

    python tools/train_demo_model.py OUT [--tokens 16e6] [--seed 0] [--threads 2] [--family qwen2]
    python tools/train_demo_model.py OUT --start src/freight/demo --context 2048 --theta 2e4 --rate 0.5 --records 0.5

Data: the source of the running Python's standard library, without its tests and without files that
are tables rather than code. `HELD_OUT` is never trained on and becomes `heldout.txt`; `CALIBRATION`
is ordinary training text, kept apart from the held-out text, and becomes `calibration.txt`.

Guarantees: the same Python, torch, thread count and seed give the same bytes (no data-loader
workers, one generator, fixed order). About an hour on two cores; `--device cuda` takes minutes.

The recipe is the small-model one of the modded-nanogpt speed runs: Muon (Jordan et al. 2024) for
the matrices inside the layers, AdamW for embeddings and norms, linear decay to zero; sequences of
512, the last quarter of 1024, so that positions up to 1024 are trained.

`--family qwen2` trains a model that does not ship, for measurements (tools/measure_centers.py). It
has the same size, with Qwen2.5's differences from Llama: biases of q, k and v, theta 1e6 and
epsilon 1e-6. The biases start at 0 and are trained by AdamW at the rate `BIAS_RATE`, without weight
decay.

`--context` and `--theta` train another model that does not ship, for `freight evaluate long`: a
longer context, and the slower rotation that it needs. With `--start` training continues from a
trained model, whose tokenizer is kept, at a share `--rate` of the usual rates. `--records` is the
share of steps that train on records to look up: every other record repeats an earlier one
(`freight.lab.evaluate.retrieval` asks for such records), so that there is retrieval to measure.
`--layers` makes a smaller model.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from freight.lab.evaluate.retrieval import KEY, VALUE, Vocabulary, vocabulary
from freight.text.tokenizer import Tokenizer as FreightTokenizer

HELD_OUT = [
    "dataclasses.py",
    "heapq.py",
    "textwrap.py",
    "shlex.py",
    "http/cookies.py",
    "statistics.py",
    "queue.py",
]
CALIBRATION = [
    "asyncio/queues.py",
    "bisect.py",
    "configparser.py",
    "fractions.py",
    "zipapp.py",
    "json/decoder.py",
]
NOT_CODE = ["test/", "tests/", "idlelib/idle_test/", "site-packages/", "pydoc_data/", "encodings/", "lib2to3/tests/",
            "ensurepip/_bundled", "html/entities.py", "stringprep.py", "_sysconfigdata", "turtledemo/", "__phello__",
            "config-"]  # fmt: skip
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
# Words with their leading space, numbers of up to three digits, punctuation, and runs of white
# space such as an indent.
PIECES = (
    r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)

VOCAB = 4096
HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
INTERMEDIATE = 768
# Adam moves a parameter by about its rate per step. Qwen2.5 was trained for far more steps than
# this script; in a thousand steps biases need a far higher rate to get as far from 0.
BIAS_RATE = 0.02


@dataclass(frozen=True)
class Family:
    architecture: str
    theta: float
    eps: float
    biases: bool  # of q_proj, k_proj and v_proj
    layers: int = 6
    context: int = 1024  # tokens


FAMILIES = {
    "llama": Family("LlamaForCausalLM", 10000.0, 1e-5, biases=False),
    "qwen2": Family("Qwen2ForCausalLM", 1e6, 1e-6, biases=True),
}


def source_files() -> dict[str, str]:
    """Return {relative path: text} of every file of the standard library that is code."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not any(part in name for part in NOT_CODE):
            try:
                files[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    missing = [name for name in HELD_OUT + CALIBRATION if name not in files]
    if missing:
        raise SystemExit(
            f"this Python's standard library lacks {missing}; train with CPython 3.11 or edit HELD_OUT"
        )
    return files


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE: every byte string can be encoded, and decoding restores it exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
    )
    return tokenizer


class Block(nn.Module):
    """A decoder layer. inputs: channels that q, k and v are made of."""

    def __init__(self, family: Family, inputs: int = HIDDEN) -> None:
        super().__init__()
        self.q_proj = nn.Linear(inputs, HEADS * HEAD_DIM, bias=family.biases)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.k_proj = nn.Linear(inputs, KV_HEADS * HEAD_DIM, bias=family.biases)
        self.v_proj = nn.Linear(inputs, KV_HEADS * HEAD_DIM, bias=family.biases)
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.input_layernorm = nn.RMSNorm(HIDDEN, family.eps)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, family.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: [batch, length, HIDDEN]
        q, k, v = self.projected(self.input_layernorm(x), cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.finished(x, attended)

    def projected(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of h [batch, length, inputs]: [batch, HEADS, length, HEAD_DIM]."""
        q, k, v = [
            projection(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        ]
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        return q, k, v

    def finished(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add what attention gave, [batch, HEADS, length, HEAD_DIM], and the feed-forward to x."""
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        h = self.post_attention_layernorm(x)
        mixed: Tensor = x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Model(nn.Module):
    """A causal LM with tied embeddings; `state()` gives its parameters the names of a Hugging Face
    checkpoint of `family`.
    """

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        blocks = [Block(family) for _ in range(family.layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(HIDDEN, family.eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for block in blocks:
            for projection in (block.o_proj, block.down_proj):
                nn.init.zeros_(projection.weight)
        inverse = family.theta ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(family.context).float(), inverse)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token; ids and targets: [batch, length]."""
        x = self.embed(ids)
        n = ids.shape[1]
        for block in self.layers:
            x = block(x, self.cos[:n], self.sin[:n])
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def state(self) -> dict[str, Tensor]:
        names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        state = {}
        for name, tensor in self.state_dict().items():
            parent = name.rpartition("_proj")[0]
            group = "self_attn." if parent[-1:] in "qkvo" else "mlp."
            full = names.get(name) or f"model.{name}"
            if parent:
                module = f"{parent.split('.')[-1]}_proj"
                full = full.replace(f".{module}", f".{group}{module}")
            state[full] = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        return state

    def load(self, checkpoint: Path) -> None:
        """Take the weights of a checkpoint that has the names of `state`."""
        stored = load_file(checkpoint / "model.safetensors")
        self.load_state_dict(
            {own: stored[name] for own, name in zip(self.state_dict(), self.state(), strict=True)}
        )


def batches(stream: Tensor, length: int, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield [rows, length + 1] windows without end: each epoch covers the stream once, from a
    random offset, in random order.
    """
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        windows = stream[
            offset : offset + (len(stream) - offset - 1) // length * length + 1
        ].unfold(0, length + 1, length)
        order = torch.randperm(len(windows), generator=generator)
        for at in range(0, len(order) - rows + 1, rows):
            yield windows[order[at : at + rows]]


def record_batches(
    words: Vocabulary, length: int, rows: int, draw: random.Random
) -> Iterator[Tensor]:
    """Yield [rows, length + 1] windows of records without end; every other record repeats an
    earlier one, at any distance.
    """
    while True:
        windows = []
        for _ in range(rows):
            earlier: list[list[int]] = []
            ids = [*words.begin]
            while len(ids) <= length:
                if earlier and draw.random() < 0.5:
                    record = draw.choice(earlier)
                else:
                    key = draw.choices(words.words, k=KEY)
                    value = draw.choices(words.words, k=VALUE)
                    record = [*key, *words.equals, *value, *words.end]
                    earlier.append(record)
                ids += record
            windows.append(ids[: length + 1])
        yield torch.tensor(windows)


@torch.no_grad()
def evaluate(model: Model, stream: Tensor, context: int, device: str) -> float:
    """Return the mean nats per token over windows of `context` tokens."""
    windows = (
        stream[: (len(stream) - 1) // context * context + 1]
        .unfold(0, context + 1, context)
        .to(device)
    )
    losses = []
    for window in windows.split(max(1, 8192 // context)):
        with torch.autocast(device, dtype=torch.bfloat16):
            losses.append(float(model(window[:, :-1], window[:, 1:])) * len(window))
    return sum(losses) / len(windows)


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, AdamW for embeddings and norms, and another
    for biases.
    """
    named = dict(model.named_parameters())
    biases = [p for n, p in named.items() if n.endswith("bias")]
    matrices = [p for n, p in named.items() if n.endswith("_proj.weight")]
    others = [p for n, p in named.items() if "_proj" not in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    if biases:
        optimizers.append(
            torch.optim.AdamW(biases, lr=BIAS_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        )
    return optimizers


def bias_lines(model: Model) -> Iterator[str]:
    """Yield lines on how far the biases of each projection are from 0: largest and root mean
    square, one number per layer.
    """
    for side in "qkv":
        biases = [
            p.detach() for n, p in model.named_parameters() if n.endswith(f"{side}_proj.bias")
        ]
        if biases:
            sizes = " ".join(
                f"{float(b.abs().max()):.2f}/{float(b.square().mean().sqrt()):.2f}" for b in biases
            )
            yield f"{side} biases, largest/rms by layer: {sizes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--tokens", type=float, default=16e6, help="tokens to train on (default 16e6)"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--family", default="llama", choices=FAMILIES)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens; at most --batch-tokens (default 1024)"
    )
    parser.add_argument("--theta", type=float, help="of rotary embedding (default: the family's)")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="factor of the learning rates (default 1)"
    )
    parser.add_argument(
        "--records",
        type=float,
        default=0.0,
        help="share of steps on records to look up (default 0)",
    )
    parser.add_argument(
        "--start", type=Path, help="a checkpoint of this script to go on from, with a new optimizer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if not 2 <= args.context <= args.batch_tokens:
        parser.error(
            f"--context {args.context} is not among 2 to --batch-tokens, {args.batch_tokens}"
        )
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)

    files = source_files()
    trained = [name for name in files if name not in HELD_OUT]
    random.Random(args.seed).shuffle(trained)
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer([files[name] for name in trained])
    eos = tokenizer.token_to_id(EOS)

    def stream(names: list[str]) -> Tensor:
        encodings = tokenizer.encode_batch([files[name] for name in names])
        return torch.tensor([token for encoding in encodings for token in (*encoding.ids, eos)])

    train = stream(trained)
    held_out = stream(HELD_OUT)
    held_out_text = "".join(files[name] for name in HELD_OUT)
    family = FAMILIES[args.family]
    family = replace(
        family, theta=args.theta or family.theta, layers=args.layers, context=args.context
    )
    write_data(args.out, files, tokenizer, held_out_text, family)

    model = Model(family).to(args.device)
    if args.start:
        model.load(args.start)
    optimizers = optimizers_of(model)
    base = [args.rate * group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    steps = int(args.tokens) // args.batch_tokens
    lengths = (args.context // 2, args.context)
    short, long = [
        batches(train, length, args.batch_tokens // length, generator) for length in lengths
    ]
    draw = random.Random(args.seed)
    words = vocabulary(FreightTokenizer.load(args.out), VOCAB, tokenizer.token_to_id(BOS))
    records = record_batches(words, args.context, args.batch_tokens // args.context, draw)
    log = open(args.out / "training.log", "w")  # noqa: SIM115 - closed at exit

    def say(line: str) -> None:
        print(line, flush=True)
        print(line, file=log, flush=True)

    count = sum(p.numel() for p in model.parameters())
    versions = f"python {platform.python_version()} torch {torch.__version__}"
    say(f"{versions} device {args.device} threads {args.threads} seed {args.seed}")
    trained_on = f"{len(trained)} files, {len(train)} tokens to train on"
    say(f"{trained_on}; {len(HELD_OUT)} files, {len(held_out)} tokens held out; {count} parameters")
    begin = time.monotonic()
    for step in range(steps):
        text = short if step < steps * 3 // 4 else long
        window = next(records if draw.random() < args.records else text).to(args.device)
        rate = min((step + 1) / 50, (steps - step) / (steps * 0.6), 1.0)
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = model(window[:, :-1], window[:, 1:])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            seconds = time.monotonic() - begin
            done = (step + 1) * args.batch_tokens
            rates = f"{done / 1e6:.2f} M tokens, {done / seconds:.0f} tokens/s"
            say(f"step {step} of {steps}, loss {float(loss.detach()):.4f}, {rates}")
        if step % 250 == 249 or step == steps - 1:
            nats = evaluate(model, held_out, args.context, args.device)
            bits = nats * len(held_out) / math.log(2) / len(held_out_text.encode())
            say(
                f"held out: loss {nats:.4f}, perplexity {math.exp(nats):.3f}, {bits:.4f} bits per byte"
            )
            for line in bias_lines(model):
                say(line)
            save_file(model.state(), args.out / "model.safetensors", metadata={"format": "pt"})
    log.close()


def write_data(
    out: Path, files: dict[str, str], tokenizer: Tokenizer, held_out_text: str, family: Family
) -> None:
    """Write everything but the weights: texts, tokenizer, configuration."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "heldout.txt").write_text(held_out_text, encoding="utf-8")
    (out / "calibration.txt").write_text(
        "".join(files[name] for name in CALIBRATION), encoding="utf-8"
    )
    tokenizer.save(str(out / "tokenizer.json"))
    bos = tokenizer.token_to_id(BOS)
    eos = tokenizer.token_to_id(EOS)
    model_type = family.architecture.removesuffix("ForCausalLM").lower()
    config = {
        "architectures": [family.architecture], "model_type": model_type, "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": family.layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "max_position_embeddings": family.context, "rope_theta": family.theta, "rms_norm_eps": family.eps,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": bos, "eos_token_id": eos,
    }  # fmt: skip
    if family.biases:  # a Qwen2 configuration has no key for biases: q, k and v always have them
        config = {
            key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")
        }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "model_max_length": family.context, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, value in [
        ("config.json", config),
        ("tokenizer_config.json", settings),
        ("generation_config.json", {"bos_token_id": bos, "eos_token_id": eos}),
    ]:
        (out / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
