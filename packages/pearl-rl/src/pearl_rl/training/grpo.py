"""The GRPO objective on tensors: log-probabilities, importance weights, clip, KL, entropy. No state, no collectives.

Shapes: B rows of T tokens, right-padded. Position t of a [B, T−1] tensor speaks of token t+1 of its row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pearl_rl.training.options import LossOptions

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a model says about the tokens of a micro-batch; both [B, T−1], float32."""

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution that each token was drawn from, nats; carries gradient only where asked for."""


def score_tokens(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, entropy_gradient: bool = False
) -> TokenScores:
    """Log-probability of each token but the first, and the entropy at its place.

    `logits` [B, T, V] as the model gives them, `tokens` [B, T] int64. The softmax is taken in float32.
    """
    log_softmax = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    logprobs = log_softmax.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return TokenScores(logprobs, entropy)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of a micro-batch, and sums over its generated tokens that metrics are made of (all scalars)."""

    loss: Tensor
    """Σ weight · (policy + kl_coefficient · KL − entropy_coefficient · entropy); micro-batches add up."""
    tokens: Tensor
    """How many tokens carried loss."""
    entropy_sum: Tensor
    kl_sum: Tensor
    """k3 estimate of KL(new ‖ reference); 0 without a reference."""
    drift_sum: Tensor
    """k3 estimate of KL(new ‖ behaviour): how far off-policy the tokens are."""
    importance_sum: Tensor
    """Importance weights before truncation."""
    limited: Tensor
    """Tokens whose importance weight was truncated, or whose gradient the clip cut off."""


def grpo_loss(
    new: TokenScores,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    options: LossOptions,
    reference_logprobs: Tensor | None = None,
) -> LossTerms:
    """Token-level policy-gradient loss against recorded behaviour log-probabilities.

    `behaviour_logprobs`, `reference_logprobs` and `mask` (bool) are [B, T−1]; `advantages` and `weights` are [B] or
    broadcast to [B, T−1]; `weights` are the aggregation's (they add up to 1 over the mini-batch's generated tokens).

    Without a clip the importance weight ρ = min(exp(new − behaviour), C) is a constant: the gradient is that of
    −ρ·A·new. With a clip the weight carries the gradient: −min(ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A) with the same
    truncation at C, which then bounds what a negative advantage can do. Masked tokens have no influence, whatever
    their values (infinities included).
    """
    advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
    weights = weights.unsqueeze(-1) if weights.dim() == 1 else weights
    zero = torch.zeros_like(new.logprobs)
    # torch.where, not multiplication: 0 · inf of a masked token would poison the sum and its gradient.
    logprobs = torch.where(mask, new.logprobs, zero)
    log_ratio = logprobs - torch.where(mask, behaviour_logprobs, zero)
    # exp of a wild difference is inf, and 0 · inf in the backward of a clamp is NaN.
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if options.clips:
        policy, limited = _clipped(ratio, advantages, options)
    else:
        policy = -(ratio.detach().clamp(max=options.truncation) * advantages * logprobs)
        limited = ratio.detach() > options.truncation
    loss = policy - options.entropy_coefficient * new.entropy
    kl = zero
    if reference_logprobs is not None:
        kl = k3_divergence(logprobs, torch.where(mask, reference_logprobs, zero))
        loss = loss + options.kl_coefficient * kl
    return LossTerms(
        loss=(torch.where(mask, loss, zero) * weights).sum(),
        tokens=mask.sum(),
        entropy_sum=_masked_sum(new.entropy, mask),
        kl_sum=_masked_sum(kl, mask),
        drift_sum=_masked_sum(k3_divergence(logprobs, logprobs - log_ratio), mask),
        importance_sum=_masked_sum(ratio, mask),
        limited=(limited & mask).sum(),
    )


def k3_divergence(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate of KL(policy ‖ other) at tokens drawn from the policy: exp(d) − d − 1 with d = other − policy, ≥ 0."""
    difference = other_logprobs - logprobs
    return torch.expm1(difference) - difference


def _clipped(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    if options.clip_low is None or options.clip_high is None:
        raise ValueError("clip_low and clip_high are not set")
    truncated = ratio.clamp(max=options.truncation)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    policy = -torch.minimum(truncated * advantages, clipped * advantages)
    cut = torch.where(advantages >= 0, ratio > 1 + options.clip_high, ratio < 1 - options.clip_low)
    return policy, (cut | (ratio > options.truncation)).detach()


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), torch.zeros_like(values)).sum()
