"""Schedules, weight decay and the guarded step."""

from __future__ import annotations

import math

import pytest
import torch

from molt_hpc.config import AdamConfig, MuonConfig, OptimConfig
from molt_hpc.train.optim import BadStep, TrainingError, build_optimizer, guarded_step, learning_rate

pytestmark = pytest.mark.usefixtures("process_group")
CPU = torch.device("cpu")


def rates(name: str, total: int, warmup: float = 0.0, minimum: float = 0.0) -> list[float]:
    config = OptimConfig(adam=AdamConfig(lr=1.0), lr_scheduler=name, lr_warmup_ratio=warmup, min_lr_ratio=minimum)
    return [learning_rate(config, step, total) for step in range(total)]


def test_constant_needs_no_total():
    assert learning_rate(OptimConfig(adam=AdamConfig(lr=2.0)), 123.0, None) == 2.0


def test_warm_up_rises_to_the_peak_and_stays():
    assert rates("constant_with_warmup", 10, 0.4) == pytest.approx([0.25, 0.5, 0.75, 1.0] + [1.0] * 6)


def test_linear_falls_to_its_end():
    assert rates("linear", 4, minimum=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert learning_rate(OptimConfig(adam=AdamConfig(lr=1.0), lr_scheduler="linear", min_lr_ratio=0.2), 99, 4) == pytest.approx(0.2)


def test_cosine_passes_the_middle_at_half():
    found = rates("cosine", 8, minimum=0.0)
    assert found[0] == 1.0 and found[4] == pytest.approx(0.5) and found[7] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_warm_up_and_fall_meet_at_the_peak(name: str):
    found = rates(name, 20, warmup=0.25, minimum=0.1)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and found[5] == pytest.approx(1.0)
    assert all(a > b for a, b in zip(found[5:-1], found[6:], strict=True)) and found[-1] > 0.1


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_falling_schedule_without_a_total_is_refused(name: str):
    with pytest.raises(ValueError, match="set train.max_steps"):
        learning_rate(OptimConfig(lr_scheduler=name), 0, None)


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    def tensor(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.ones(shape))
    return [("layers.0.q_proj.weight", tensor(2, 2)), ("layers.0.q_proj.bias", tensor(2)), ("layers.0.input_layernorm.weight", tensor(2)),
            ("layers.0.odd_norm.weight", tensor(2, 2))]


def test_norms_and_biases_are_not_decayed():
    named = parameters()
    optimizer = build_optimizer(named, OptimConfig(adam=AdamConfig(lr=0.1, weight_decay=0.5)))
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    guarded_step(optimizer, 0.1, 1.0, torch.zeros(()), CPU)
    assert [parameter.detach().mean().item() for _, parameter in named] == pytest.approx([0.95, 1.0, 1.0, 1.0])


def test_norms_and_biases_decay_if_they_are_told_to():
    named = parameters()
    optimizer = build_optimizer(named, OptimConfig(adam=AdamConfig(lr=0.1, weight_decay=0.5, decay_norms=True)))
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    guarded_step(optimizer, 0.1, 1.0, torch.zeros(()), CPU)
    assert [parameter.detach().mean().item() for _, parameter in named] == pytest.approx([0.95] * 4)


def test_muon_trains_the_layers_matrices_and_follows_the_schedule_of_adam():
    named = [("model.layers.0.mlp.up_proj.weight", torch.nn.Parameter(torch.zeros(4, 4))),
             ("model.embed_tokens.weight", torch.nn.Parameter(torch.zeros(4, 4))),
             ("model.layers.0.norm.weight", torch.nn.Parameter(torch.zeros(4)))]
    optimizer = build_optimizer(named, OptimConfig(optim="muon", adam=AdamConfig(lr=0.1), muon=MuonConfig(lr=0.5)))
    for name, parameter in named:
        assert ("momentum_buffer" in optimizer.state_of(parameter)) == ("up_proj" in name)
        parameter.grad = torch.eye(4) if parameter.ndim == 2 else torch.ones(4)
    guarded_step(optimizer, 0.05, 0.0, torch.zeros(()), CPU)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05, 0.25])
    assert named[0][1].detach().diagonal().mean().item() == pytest.approx(-0.25, rel=0.3), "an orthogonal step of the rate's length"
    assert named[1][1].detach().diagonal().tolist() == pytest.approx([-0.05] * 4)


def test_parameters_that_keep_their_values_are_no_business_of_the_optimizer():
    named = parameters()
    named[0][1].requires_grad_(False)
    chosen = [p for group in build_optimizer(named, OptimConfig()).param_groups for p in group["params"]]
    assert len(chosen) == 3 and not any(p is named[0][1] for p in chosen)


def test_weights_that_are_not_finite_after_a_step_are_not_to_be_published():
    parameter = torch.nn.Parameter(torch.full((2,), 3e38))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([-1.0, 0.0])
    with pytest.raises(TrainingError, match="1 weights are not finite.*not published"):
        guarded_step(optimizer, 3e38, 0.0, torch.tensor(0.0), CPU)


def test_a_gradient_above_the_norm_is_scaled_and_its_own_norm_reported():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    loss, norm = guarded_step(optimizer, 1.0, 1.0, torch.tensor(0.25), CPU)
    assert (loss, norm) == (0.25, 5.0)
    assert parameter.detach().tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


@pytest.mark.parametrize(("loss", "grad"), [(math.nan, 1.0), (math.inf, 1.0), (0.0, math.nan), (0.0, math.inf)])
def test_what_is_not_finite_changes_nothing(loss: float, grad: float):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, foreach=False)
    parameter.grad = torch.tensor([0.0, grad, 0.0])
    with pytest.raises(BadStep, match="expected finite numbers"):
        guarded_step(optimizer, 1.0, 1.0, torch.tensor(loss), CPU)
    assert parameter.detach().tolist() == [1.0] * 3 and not optimizer.state and parameter.grad is None
