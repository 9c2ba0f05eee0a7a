"""The policy loss: what is off the mask never matters, and no input makes it overflow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.train.loss import LossSettings, correction_weight, policy_loss

OFF = LossSettings(correction_level="off")
finite = st.floats(-50, 0)


def run(current, old=None, rollout=None, advantages=None, mask=None, settings=OFF):
    current = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    old = current.detach() if old is None else torch.tensor(old, dtype=torch.float32)
    rollout = old if rollout is None else torch.tensor(rollout, dtype=torch.float32)
    advantages = torch.ones_like(old) if advantages is None else torch.tensor(advantages, dtype=torch.float32)
    mask = torch.ones_like(old).bool() if mask is None else torch.tensor(mask)
    result = policy_loss("ppo", current, old, rollout, advantages, mask, settings)
    result.loss.sum().backward()
    return result, current.grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_values_off_the_mask_change_neither_loss_nor_gradient(bad: float):
    clean, clean_grad = run([-1.0, -2.0], [-1.1, -2.0], advantages=[1.0, 0.0], mask=[True, False])
    result, grad = run([-1.0, bad], [-1.1, -2.0], [-1.1, bad], [1.0, bad], [True, False])
    assert torch.equal(result.loss, clean.loss)
    assert grad[0] == clean_grad[0] and grad[1] == 0


def test_an_infinite_log_prob_on_the_mask_is_not_hidden():
    result, _ = run([math.nan], [-1.0])
    assert not torch.isfinite(result.loss).all()


@given(st.lists(st.tuples(finite, finite, finite, st.floats(-5, 5)), min_size=1, max_size=20), st.sampled_from(["mask", "clip", "trunc"]))
@settings(deadline=None)
def test_loss_and_gradient_are_finite_for_any_finite_input(rows, mode):
    current, old, rollout, advantages = zip(*rows, strict=True)
    result, grad = run(current, old, rollout, advantages, settings=LossSettings(correction_mode=mode))
    assert torch.isfinite(result.loss).all() and torch.isfinite(grad).all()


def test_a_ratio_beyond_the_range_in_the_good_direction_has_no_gradient():
    result, grad = run([-1.0, -1.0], [-2.0, -0.5], advantages=[1.0, -1.0])
    assert result.clipped.tolist() == [True, True] and grad.tolist() == [0.0, 0.0]
    assert result.loss.tolist() == pytest.approx([-1.2, 0.8])


def test_a_ratio_beyond_the_range_in_the_bad_direction_keeps_its_gradient():
    result, grad = run([-1.0, -1.0], [-0.5, -2.0], advantages=[1.0, -1.0])
    assert result.clipped.tolist() == [False, False] and (grad != 0).all()


def test_the_range_is_asymmetric():
    result, _ = run([-1.0, -1.0], [-2.0, -0.5], advantages=[1.0, -1.0], settings=LossSettings(0.1, 0.4, correction_level="off"))
    assert result.loss.tolist() == pytest.approx([-1.4, 0.9])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    settings = LossSettings(dual_clip=3.0, correction_level="off")
    result, grad = run([-1.0, -1.0], [-6.0, -6.0], advantages=[-1.0, 1.0], settings=settings)
    assert result.loss.tolist() == pytest.approx([3.0, -1.2]) and grad[0] == 0


@pytest.mark.parametrize(("mode", "weights", "changed"), [
    ("mask", [0.0, 1.0, 0.0], [True, False, True]), ("clip", [0.5, 1.0, 2.0], [True, False, True]),
    ("trunc", [math.exp(-2), 1.0, 2.0], [False, False, True])])
def test_the_correction_outside_of_its_band(mode: str, weights, changed):
    old, rollout = torch.tensor([-3.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -3.0])
    weight, corrected = correction_weight(old, rollout, torch.ones(3).bool(), LossSettings(correction_mode=mode))
    assert weight.tolist() == pytest.approx(weights) and corrected.tolist() == changed


def test_the_correction_is_a_constant_for_the_gradient():
    _, plain = run([-1.0], [-1.0])
    _, weighted = run([-1.0], [-1.0], [-1.5], settings=LossSettings())
    assert weighted.item() == pytest.approx(plain.item() * math.exp(0.5))


def test_an_unknown_loss_is_refused_with_the_known_ones():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"expected one of \['ppo'.*got 'pop'"):
        policy_loss("pop", one, one, one, one, one.bool(), OFF)
