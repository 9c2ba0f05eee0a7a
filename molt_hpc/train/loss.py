"""Policy losses, the importance correction, KL estimates and the value loss: pure functions of per-token tensors.

Every function takes and returns tensors of one shape [N] and a bool mask of that shape. Values off the mask never
matter, not even if they are not finite: the logarithm of each ratio is clamped and then replaced by 0 there with
`where`, because a product with 0 would keep a NaN. What belongs to a whole sequence (a rollout, whatever its
segments) is summed by the tokens' sequence numbers.
"""

from dataclasses import dataclass

import torch

from molt_hpc.train.registry import Registry

LOG_RATIO_LIMIT = 30.0
"""exp(30) is finite in float32 and far outside of every clip range."""
KL_LIMIT = 10.0
"""k2 and k3 are clamped to this; beyond it they have no gradient."""


@dataclass
class LossSettings:
    """What a policy loss may need; see ActorConfig and AdvantageConfig for the meaning."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction_level: str = "token"
    correction_mode: str = "trunc"
    correction_low: float = 0.5
    correction_high: float = 2.0
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)


@dataclass
class Tokens:
    """What a loss sees. ratio: exp(log_probs - old), differentiable, 1 off the mask. sequence: int64 [N], which sequence a token is of.

    sequence_log_ratio: mean of log_probs - old over the whole sequence of each token, detached, where it was computed
    beforehand because the sequence is spread over micro-batches.
    """

    log_probs: torch.Tensor
    old: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    sequence: torch.Tensor
    sequence_log_ratio: torch.Tensor | None = None


@dataclass
class TokenLoss:
    """loss: per token, differentiable, 0 off the mask. clipped, corrected: bool, which tokens were. ratio, weight: detached."""

    loss: torch.Tensor
    clipped: torch.Tensor
    corrected: torch.Tensor
    ratio: torch.Tensor
    weight: torch.Tensor


LOSSES = Registry("actor.loss_mode")
"""name -> function (Tokens, LossSettings) -> (loss, clipped), each of the tokens' shape."""
register = LOSSES.register

SEQUENCE_LOSSES = {"gspo"}
"""Losses whose ratio is that of the whole sequence."""


def masked_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """numerator - denominator of two log-probs, clamped, on the mask; 0 off it."""
    log_ratio = (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(mask, log_ratio, torch.zeros_like(log_ratio))


def sequence_sum(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The sum over each token's sequence, at every one of its tokens."""
    flat = sequence.flatten()
    sums = values.new_zeros(int(flat.max()) + 1 if flat.numel() else 0).index_add_(0, flat, values.flatten())
    return sums[flat].view_as(values)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The mean over the masked tokens of each token's sequence; `values` are 0 off the mask."""
    return sequence_sum(values, sequence) / sequence_sum(mask.to(values.dtype), sequence).clamp(min=1)


def _clipped_objective(ratio: torch.Tensor, tokens: Tokens, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    return torch.minimum(plain, bounded), tokens.mask & (bounded < plain)


@register("ppo")
def ppo(tokens: Tokens, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r) A), with an asymmetric range; where A < 0, `dual_clip` bounds it by -dual_clip * A."""
    objective, clipped = _clipped_objective(tokens.ratio, tokens, settings)
    if settings.dual_clip is not None:
        objective = torch.where(tokens.advantages < 0, torch.maximum(objective, settings.dual_clip * tokens.advantages), objective)
    return -objective, clipped


@register("gspo")
def gspo(tokens: Tokens, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """ppo with one ratio for a sequence: the geometric mean over its tokens, the gradient through each (arXiv 2507.18071, GSPO-token)."""
    mean = tokens.sequence_log_ratio
    if mean is None:
        mean = sequence_mean(masked_log_ratio(tokens.log_probs.detach(), tokens.old, tokens.mask), tokens.mask, tokens.sequence)
    own = masked_log_ratio(tokens.log_probs, tokens.log_probs.detach(), tokens.mask)
    objective, clipped = _clipped_objective((mean + own).exp(), tokens, settings)
    return -objective, clipped


@register("cispo")
def cispo(tokens: Tokens, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r, clip_high) A log p with a constant weight: no token loses its gradient; clip_high is a ratio (arXiv 2506.13585)."""
    weight = tokens.ratio.detach().clamp(max=settings.clip_high)
    log_probs = torch.where(tokens.mask, tokens.log_probs, torch.zeros_like(tokens.log_probs))
    return -weight * tokens.advantages * log_probs, tokens.mask & (tokens.ratio > settings.clip_high)


@register("dppo")
def dppo(tokens: Tokens, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """-r A without the tokens whose probability has moved on in A's direction by more than the clip range.

    The trust region is the binary total variation |p - p_old|, not the ratio: rare tokens keep their gradient.
    """
    moved = torch.where(tokens.mask, tokens.log_probs.detach().exp() - tokens.old.exp(), torch.zeros_like(tokens.old))
    left = torch.where(tokens.advantages > 0, moved > settings.clip_high, moved < -settings.clip_low) & tokens.mask
    return torch.where(left, torch.zeros_like(tokens.ratio), -tokens.ratio * tokens.advantages), left


@register("sapo")
def sapo(tokens: Tokens, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """-(4 / t) sigmoid(t (r - 1)) A: a soft gate in place of the clip, with one temperature t for each sign of A (arXiv 2511.20347)."""
    positive, negative = settings.sapo_temperatures
    temperature = torch.where(tokens.advantages > 0, positive, negative).to(tokens.ratio.dtype)
    gate = torch.sigmoid(temperature * (tokens.ratio - 1)) * 4 / temperature
    return -gate * tokens.advantages, torch.zeros_like(tokens.mask)


def correction_weight(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, settings: LossSettings,
                      unit: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each token for the difference between engine and trainer, and which tokens' weights were changed.

    w = exp(old - rollout) is the trainer's probability before the update over the engine's, detached. What is held
    against the band is w itself (token), or the product (seq) or geometric mean (geo) of w over the tokens of one
    `unit` int64 [N]: a rollout, or the part of it that one version of the weights sampled. mask: w inside of
    [low, high], 0 outside; clip: the nearer end; trunc: at most high.
    """
    with torch.no_grad():
        if settings.correction_level == "off":
            return torch.ones_like(old), torch.zeros_like(mask)
        log_ratio = masked_log_ratio(old, rollout, mask)
        weight = compared = log_ratio.exp()
        if settings.correction_level != "token":
            together = sequence_sum if settings.correction_level == "seq" else lambda values, by: sequence_mean(values, mask, by)
            compared = together(log_ratio, unit).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        low, high = settings.correction_low, settings.correction_high
        over, under = compared > high, compared < low
        if settings.correction_mode == "mask":
            return torch.where(over | under, torch.zeros_like(weight), weight), mask & (over | under)
        if settings.correction_mode == "clip":
            return compared.clamp(low, high), mask & (over | under)
        return compared.clamp(max=high), mask & over


def policy_loss(name: str, log_probs: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor,
                mask: torch.Tensor, settings: LossSettings, sequence: torch.Tensor | None = None,
                correction: tuple[torch.Tensor, torch.Tensor] | None = None, sequence_log_ratio: torch.Tensor | None = None,
                unit: torch.Tensor | None = None) -> TokenLoss:
    """Loss of each token. log_probs is differentiated; old, rollout and advantages are constants.

    sequence: int64 [N], needed by sequence-level losses and corrections (by these `unit` in its place). correction: what
    correction_weight gave for these tokens, where it was computed beforehand. The caller sums the loss with the tokens' shares
    (planner.token_shares); tokens that the correction masks out keep their share.
    """
    old = old.detach()
    ratio = masked_log_ratio(log_probs, old, mask).exp()
    advantages = torch.where(mask, advantages, torch.zeros_like(advantages))
    loss, clipped = LOSSES[name](Tokens(log_probs, old, ratio, advantages, mask, sequence, sequence_log_ratio), settings)
    weight, corrected = correction or correction_weight(old, rollout, mask, settings, sequence if unit is None else unit)
    loss = torch.where(mask, loss * weight, torch.zeros_like(loss))
    return TokenLoss(loss, clipped, corrected, ratio.detach(), weight)


def kl_estimate(name: str, log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy | reference) at each sampled token (joschu.net/blog/kl-approx.html), d = log_probs - reference.

    k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d.
    """
    difference = (log_probs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if name == "k1":
        return difference
    found = difference.square() / 2 if name == "k2" else (-difference).exp() - 1 + difference
    return found.clamp(-KL_LIMIT, KL_LIMIT)


def adapted_coefficient(coefficient: float, measured: float, target: float, horizon: float, rollouts: int) -> float:
    """The coefficient after a batch of `rollouts` whose KL was `measured` (arXiv 1909.08593, section 2.2)."""
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * rollouts / horizon)


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor,
               clip: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, clipped): half the larger of the squared errors of the value and of the value kept within `clip` of the old one.

    Both are 0 and False off the mask; clipped: the value has moved further than that. clip None: the plain squared error.
    """
    values, old_values, returns = (torch.where(mask, v, torch.zeros_like(v)) for v in (values, old_values, returns))
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(mask)
    moved = values - old_values
    bounded = (old_values + moved.clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, mask & (moved.abs() > clip)
