"""The losses: what is off the mask never matters, no input makes them overflow, and each does what its paper says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.config_checks import LOSSES as KNOWN
from molt_hpc.train.loss import LOSSES, LossSettings, correction_weight, kl_estimate, policy_loss, value_loss

OFF = LossSettings(correction_level="off")
finite = st.floats(-50, 0)


def run(current, old=None, rollout=None, advantages=None, mask=None, settings=OFF, name="ppo", sequence=None):
    current = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    old = current.detach() if old is None else torch.tensor(old, dtype=torch.float32)
    rollout = old if rollout is None else torch.tensor(rollout, dtype=torch.float32)
    advantages = torch.ones_like(old) if advantages is None else torch.tensor(advantages, dtype=torch.float32)
    mask = torch.ones_like(old).bool() if mask is None else torch.tensor(mask)
    sequence = torch.zeros(len(old), dtype=torch.int64) if sequence is None else torch.tensor(sequence)
    result = policy_loss(name, current, old, rollout, advantages, mask, settings, sequence)
    result.loss.sum().backward()
    return result, current.grad


def test_the_configuration_names_every_loss_there_is():
    # a user's file may have registered more in this process
    assert set(KNOWN) == {name for name, function in LOSSES.items() if function.__module__.startswith("molt_hpc.")}


@pytest.mark.parametrize("level", ["off", "token", "seq", "geo"])
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_values_off_the_mask_change_neither_loss_nor_gradient(bad: float, name: str, level: str):
    chosen = {"settings": LossSettings(0.2, 1.2, correction_level=level), "name": name}
    clean, clean_grad = run([-1.0, -2.0], [-1.1, -2.0], [-1.2, -2.0], [1.0, 0.0], [True, False], **chosen)
    result, grad = run([-1.0, bad], [-1.1, -2.0], [-1.2, bad], [1.0, bad], [True, False], **chosen)
    assert torch.equal(result.loss, clean.loss) and result.loss[0] != 0
    assert grad[0] == clean_grad[0] != 0 and grad[1] == 0


@pytest.mark.parametrize("name", KNOWN)
def test_a_log_prob_that_is_no_number_on_the_mask_is_not_hidden(name: str):
    result, _ = run([math.nan], [-1.0], name=name)
    assert not torch.isfinite(result.loss).all()


@pytest.mark.parametrize("name", KNOWN)
def test_at_the_start_of_a_step_every_loss_has_the_policy_gradient(name: str):
    settings = LossSettings(0.2, 1.2, correction_level="off", sapo_temperatures=(1.0, 1.0))
    _, grad = run([-1.0, -2.0, -0.5], advantages=[1.0, -2.0, 0.5], settings=settings, name=name)
    assert grad.tolist() == pytest.approx([-1.0, 2.0, -0.5])


def test_gspo_gives_all_tokens_of_a_sequence_one_ratio():
    result, grad = run([-1.0, -2.0, -1.0], [-1.3, -2.0, -1.2], name="gspo", sequence=[0, 0, 1])
    assert (-result.loss).tolist() == pytest.approx([math.exp(0.15)] * 2 + [1.2])
    assert result.clipped.tolist() == [False, False, True] and grad[2] == 0 and grad[0] == grad[1] != 0


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    result, grad = run([-1.0], [-3.0], settings=LossSettings(0.2, 1.5, correction_level="off"), name="cispo")
    assert grad.item() == pytest.approx(-1.5) and result.clipped.item()


def test_dppo_drops_tokens_by_the_change_of_their_probability_in_the_advantages_direction():
    probabilities, before = [0.5, 0.05, 0.1, 0.5], [0.3, 0.01, 0.4, 0.3]
    settings = LossSettings(0.15, 0.15, correction_level="off")
    result, grad = run([math.log(p) for p in probabilities], [math.log(p) for p in before], advantages=[1.0, 1.0, 1.0, -1.0],
                       settings=settings, name="dppo")
    assert result.clipped.tolist() == [True, False, False, False], "a rare token may grow fivefold, and a move against the advantage stays"
    assert grad[0] == 0 and (grad[1:] != 0).all()


def test_sapo_falls_off_softly_on_both_sides():
    grads = [run([-2.0 + d], [-2.0], settings=OFF, name="sapo")[1].item() for d in (-1.0, 0.0, 1.0)]
    assert abs(grads[1]) == pytest.approx(1.0) and abs(grads[0]) < 1 and abs(grads[2]) / math.e < abs(grads[1])
    ratio, gate = math.exp(0.5), lambda r, t: 4 / t / (1 + math.exp(-t * (r - 1)))
    result, _ = run([-1.5, -1.5], [-2.0, -2.0], advantages=[1.0, -1.0], name="sapo")
    assert result.loss.tolist() == pytest.approx([-gate(ratio, 1.0), gate(ratio, 1.05)])


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


def test_a_sequence_is_masked_as_a_whole_by_its_product_or_its_mean():
    old, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.3, -1.4, -1.1])
    unit, every = torch.tensor([0, 0, 1]), torch.ones(3).bool()
    settings = [LossSettings(correction_level=level, correction_mode="mask", correction_high=1.8) for level in ("seq", "geo")]
    product, mean = (correction_weight(old, rollout, every, chosen, unit) for chosen in settings)
    assert product[0].tolist() == pytest.approx([0, 0, math.exp(0.1)]) and product[1].tolist() == [True, True, False]
    assert mean[0].tolist() == pytest.approx([math.exp(0.3), math.exp(0.4), math.exp(0.1)]) and not mean[1].any()
    clip = correction_weight(old, rollout, every, LossSettings(correction_level="seq", correction_mode="clip", correction_high=1.8), unit)
    assert clip[0].tolist() == pytest.approx([1.8, 1.8, math.exp(0.1)])


def test_a_stale_prefix_gated_by_itself_does_not_drop_the_tail():
    old, rollout = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-4.0, -4.0, -1.0, -1.1])
    settings, every = LossSettings(correction_level="geo", correction_mode="mask"), torch.ones(4).bool()
    together, _ = correction_weight(old, rollout, every, settings, torch.zeros(4, dtype=torch.int64))
    by_version, _ = correction_weight(old, rollout, every, settings, torch.tensor([0, 0, 1, 1]))
    assert together.tolist() == [0] * 4
    assert by_version.tolist() == pytest.approx([0, 0, 1, math.exp(0.1)])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
@settings(deadline=None)
def test_k2_and_k3_are_never_negative_and_all_three_vanish_on_equal_policies(differences):
    reference = torch.full((len(differences),), -2.0, dtype=torch.float64)
    current = reference + torch.tensor(differences, dtype=torch.float64)
    assert (kl_estimate("k2", current, reference) >= 0).all() and (kl_estimate("k3", current, reference) >= -1e-12).all()
    assert all((kl_estimate(name, reference, reference) == 0).all() for name in ("k1", "k2", "k3"))


def test_k3_has_the_mean_of_k1():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.5, 0.3]).log()
    exact = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        assert (policy.exp() * kl_estimate(name, policy, reference)).sum() == pytest.approx(exact.item())


def test_the_value_loss_takes_the_worse_of_plain_and_clipped():
    values = torch.tensor([1.0, 0.1, math.nan], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(3), torch.tensor([2.0, 2.0, 0.0]), torch.tensor([True, True, False]), 0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 1.9**2, 0.0]) and clipped.tolist() == [True, False, False]
    assert values.grad.tolist() == pytest.approx([0.0, -1.9, 0.0])


def test_the_correction_is_a_constant_for_the_gradient():
    _, plain = run([-1.0], [-1.0])
    _, weighted = run([-1.0], [-1.0], [-1.5], settings=LossSettings())
    assert weighted.item() == pytest.approx(plain.item() * math.exp(0.5))


def test_an_unknown_loss_is_refused_with_the_known_ones():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"expected one of \['cispo'.*got 'pop'"):
        policy_loss("pop", one, one, one, one, one.bool(), OFF)
