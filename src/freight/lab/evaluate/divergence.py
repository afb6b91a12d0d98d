"""Divergence of one model's next-token distributions from another's, token by token.

With logits a and b, Z the sum of a row's exponentials and p = exp(a) / Z(a),

    KL = Σ p (log p - log q) = Σ p (a - b) - log Z(a) + log Z(b)

Each setting costs one exponential and one product per logit. Differences of logits are taken before
they are summed, and sums of exponentials enter in float64, so a small KL keeps its digits.
Log-probabilities are never stored: of a token, and in sums, they follow from logits and Z.
`kl_divergence` is the definition, which impossible tokens need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freight.engine.sampler import highest
from freight.lab.evaluate.perplexity import of_targets

# magnitude of a row's largest logit up to which float32 sums the exponentials as they are
SAFE = 60.0
# logits that are compared at a time, so that what is in between stays in a processor's caches
TILE = 2**18

# of each row: log-probability of its target, KL, whether the top is the same
Judged = tuple[Tensor, Tensor, Tensor]


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) = Σ p (log p - log q) in nats, from log-probabilities [rows,
    vocab_size] -> [rows].
    """
    difference = torch.where(reference > -torch.inf, reference - other, 0.0)
    return (reference.exp() * difference).sum(-1)


@dataclass(frozen=True)
class Reference:
    """The distributions that others are compared with.

    logits          float32 [rows, vocab_size]
    probabilities   their softmax, float32
    log_sum         log of the sum of a row's exponentials, float64 [rows]
    top             the token that a row ranks first, int64 [rows]
    """

    logits: Tensor
    probabilities: Tensor
    log_sum: Tensor
    top: Tensor

    @staticmethod
    def of(logits: Tensor) -> Reference:
        top = highest(logits)
        scratch = torch.empty_like(logits)
        total, log_sum = _exponentials(logits, top, scratch)
        return Reference(logits, scratch.div_(total[:, None]), log_sum, top)

    def itself(self, targets: Tensor) -> Judged:
        """Do as `judge` with the same logits: no divergence."""
        logprobs = (of_targets(self.logits, targets).double() - self.log_sum).float()
        return logprobs, torch.zeros_like(logprobs), torch.ones_like(targets, dtype=torch.bool)

    def judge(self, logits: Tensor, targets: Tensor) -> Judged:
        """Others' logits, float32 [rows, vocab_size], and the tokens that follow, int64 [rows]."""
        size = max(1, TILE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        scratch = logits.new_empty(min(size, len(logits)), logits.shape[1])
        pieces = []
        for start in range(0, len(logits), size):
            pieces.append(self._piece(slice(start, start + size), logits, targets, scratch))
        logprobs, kl, same = map(torch.cat, zip(*pieces, strict=True))
        return logprobs, kl, same

    def _piece(self, rows: slice, all_logits: Tensor, targets: Tensor, scratch: Tensor) -> Judged:
        logits = all_logits[rows]
        reference = self.logits[rows]
        scratch = scratch[: len(logits)]
        top = highest(logits)
        _, log_sum = _exponentials(logits, top, scratch)
        differences = torch.sub(reference, logits, out=scratch)
        mean = _dot(self.probabilities[rows], differences).double()
        kl = (mean - self.log_sum[rows] + log_sum).float()
        if not kl.isfinite().all():  # a token that is impossible for one of both
            kl = kl_divergence(torch.log_softmax(reference, -1), torch.log_softmax(logits, -1))
        logprobs = (of_targets(logits, targets[rows]).double() - log_sum).float()
        return logprobs, kl, top == self.top[rows]


def _exponentials(logits: Tensor, top: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Writes each row's exponentials to `scratch`, times a constant; their sum [rows], and log Σ
    exp, float64 [rows].

    The constant is 1, unless the largest logits of some row are beyond what float32 sums.
    """
    peak = of_targets(logits, top)
    if bool((peak.abs() < SAFE).all()):
        total = torch.exp(logits, out=scratch).sum(-1)
        return total, total.double().log()
    total = torch.sub(logits, peak[:, None], out=scratch).exp_().sum(-1)
    return total, total.double().log() + peak.double()


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Sums of products by row: [rows]. On a CPU by numpy, which takes half of torch's time or less."""
    if first.device.type != "cpu":
        product: Tensor = torch.linalg.vecdot(first, second)
        return product
    with np.errstate(invalid="ignore"):  # 0 times infinity, where a token is impossible
        sums: np.ndarray = np.matmul(first.numpy()[:, None], second.numpy()[:, :, None])
    return torch.from_numpy(sums[:, 0, 0])
