"""Draw tokens: reproducible per request and token position, whatever else is in the batch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pearl_executor.ports import Sampling

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) only: two rounds of the SplitMix64 mixer.

    A request that is interrupted and resumed elsewhere draws the same numbers at the same token positions.
    """
    state = (seed * 0x9E3779B97F4A7C15 + position + 1) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    # 52 bits, so that the number times a sum of probabilities stays below that sum after rounding.
    return (state >> 12) * 2.0**-52


def sample(logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Draw one token for each row of `logits` [rows, vocabulary]. Returns tokens and their log-probabilities.

    The log-probability is the behaviour policy's: log-softmax of logits / temperature at the drawn token, over the
    whole vocabulary (before `top_p` cuts). Greedy rows (temperature 0) report it at temperature 1.
    """
    scale = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits.device).unsqueeze(1)
    logprobs = torch.log_softmax(logits.float() / scale, dim=-1)
    tokens = logprobs.argmax(-1)
    drawn = [i for i, s in enumerate(samplings) if s.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        points = torch.tensor([uniforms[i] for i in drawn], dtype=torch.float64, device=logits.device)
        top_p = torch.tensor([samplings[i].top_p for i in drawn], dtype=torch.float64, device=logits.device)
        tokens[rows] = _invert(_nucleus(logprobs[rows].double().exp(), top_p), points)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    if not all(map(math.isfinite, chosen)):
        raise FloatingPointError(
            f"the model's logits are not finite (log-probabilities {chosen[:4]}): broken weights, or too narrow a type"
        )
    return tokens.tolist(), chosen


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose probabilities add up to `top_p`."""
    if bool((top_p >= 1).all()):
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p.unsqueeze(1)
    return probabilities.masked_fill(outside.scatter(1, order, outside), 0.0)


def _invert(probabilities: Tensor, points: Tensor) -> Tensor:
    """Inverse of the cumulative distribution at `points`, for unnormalized rows."""
    cumulative = probabilities.cumsum(-1)
    target = points.unsqueeze(1) * cumulative[:, -1:]
    # The clamp matters for rows of NaN only, which the caller reports.
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probabilities.shape[1] - 1)
