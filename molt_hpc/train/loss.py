"""Policy losses and the importance correction: pure functions of per-token tensors.

Every function takes and returns tensors of one shape and a bool mask of the same shape. Values off
the mask never matter, not even if they are not finite: the logarithm of each ratio is clamped and
then replaced by 0 there with `where`, because a product with 0 would keep a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 30.0
"""exp(30) is finite in float32 and far outside of every clip range."""


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


@dataclass
class TokenLoss:
    """loss: per token, differentiable, 0 off the mask. clipped, corrected: bool, which tokens were. ratio: detached."""

    loss: torch.Tensor
    clipped: torch.Tensor
    corrected: torch.Tensor
    ratio: torch.Tensor


PolicyLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LossSettings], tuple[torch.Tensor, torch.Tensor]]

LOSSES: dict[str, PolicyLoss] = {}
"""name -> function (ratio, advantages, mask, settings) -> (loss, clipped), each of the tokens' shape."""


def register(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    def add(function: PolicyLoss) -> PolicyLoss:
        assert name not in LOSSES, name
        LOSSES[name] = function
        return function
    return add


def masked_ratio(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(numerator - denominator) of two log-probs on the mask, 1 off it."""
    log_ratio = (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(mask, log_ratio, torch.zeros_like(log_ratio)).exp()


@register("ppo")
def ppo(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r) A), with an asymmetric range; where A < 0, `dual_clip` bounds it by -dual_clip * A."""
    plain = ratio * advantages
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    objective = torch.minimum(plain, bounded)
    clipped = mask & (bounded < plain)
    if settings.dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, settings.dual_clip * advantages), objective)
    return -objective, clipped


def correction_weight(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor,
                      settings: LossSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each token for the difference between engine and trainer, and which tokens' weights were changed.

    The raw weight is exp(old - rollout): trainer's log-prob before the update over the engine's,
    detached. mask: 0 outside of [low, high]; clip: the nearer end; trunc: at most high.
    """
    with torch.no_grad():
        if settings.correction_level == "off":
            return torch.ones_like(old), torch.zeros_like(mask)
        low, high = settings.correction_low, settings.correction_high
        raw = masked_ratio(old, rollout, mask)
        if settings.correction_mode == "mask":
            weight = torch.where((raw < low) | (raw > high), torch.zeros_like(raw), raw)
        elif settings.correction_mode == "clip":
            weight = raw.clamp(low, high)
        elif settings.correction_mode == "trunc":
            weight = raw.clamp(max=high)
        else:
            raise ValueError(f"algo.advantage.is_correction_mode: expected mask, clip or trunc, got {settings.correction_mode!r}")
        return weight, mask & (weight != raw)


def policy_loss(name: str, log_probs: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor,
                mask: torch.Tensor, settings: LossSettings) -> TokenLoss:
    """Loss of each token. log_probs is differentiated; old, rollout and advantages are constants.

    The caller sums `loss` and divides by the one global number of action tokens; tokens that the
    correction masks out stay in that number.
    """
    if name not in LOSSES:
        raise ValueError(f"actor.loss_mode: expected one of {sorted(LOSSES)}, got {name!r}")
    ratio = masked_ratio(log_probs, old.detach(), mask)
    advantages = torch.where(mask, advantages, torch.zeros_like(advantages))
    loss, clipped = LOSSES[name](ratio, advantages, mask, settings)
    weight, corrected = correction_weight(old.detach(), rollout, mask, settings)
    loss = torch.where(mask, loss * weight, torch.zeros_like(loss))
    return TokenLoss(loss, clipped, corrected, ratio.detach())
