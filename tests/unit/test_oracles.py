"""The algorithms meet independent values: every case of an oracle file, at 1e-6 in float64 and 1e-5 in float32.

MOLT_HPC_ORACLES may name another file of the same layout. A case of an algorithm that does not exist here is skipped with the
reason; the file that comes with the project has none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from molt_hpc.train import advantage
from molt_hpc.train.loss import LOSSES, LossSettings, adapted_coefficient, kl_estimate, policy_loss, value_loss
from molt_hpc.train.planner import token_shares

OWN = Path(__file__).parents[1] / "data" / "algorithms.json"
PATH = Path(os.environ.get("MOLT_HPC_ORACLES") or OWN)
CASES = json.loads(PATH.read_text())
KINDS = ("advantage", "loss", "value_loss", "kl", "kl_controller")
# The values were computed in float32 and have nine digits: sums of cancelling terms carry their absolute error.
TOLERANCE = {torch.float64: {"rtol": 1e-6, "atol": 1e-6}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])


def cases(kind: str, describe=lambda case: "") -> list:
    return [pytest.param(case, id=f"{number}-{describe(case)}") for number, case in enumerate(CASES.get(kind, []))]


def missing(case: dict) -> str | None:
    if case.get("estimator") not in (None, *advantage.ESTIMATORS, "k1", "k2", "k3"):
        return f"estimator {case['estimator']} is not implemented"
    if case.get("loss_mode") not in (None, *LOSSES):
        return f"loss {case['loss_mode']} is not implemented"
    return None


@pytest.mark.parametrize("case", cases("advantage", lambda c: c["estimator"]))
def test_advantages_and_returns_meet_the_oracle(case: dict):
    if reason := missing(case):
        pytest.skip(reason)
    inputs, mask = case["inputs"], np.array(case["inputs"]["action_mask"], bool)
    groups = np.zeros(len(inputs["rewards"]), int)
    for group, rows in enumerate(inputs["groups"]):
        groups[rows] = group
    episodes = advantage.Episodes(
        np.array(inputs["rewards"]), groups, np.repeat(inputs["sample_to_rollout"], mask.sum(1)), np.nonzero(mask)[1],
        np.array(inputs["kl"])[mask], np.array(inputs["values"])[mask], kl_coef=inputs["kl_coef"], gamma=inputs["gamma"], lam=inputs["lam"],
        whiten=inputs["whiten"])
    found = advantage.compute(case["estimator"], episodes)
    for name, values in zip(("advantages", "returns"), found, strict=True):
        np.testing.assert_allclose(values, np.array(case["outputs"][name])[mask], **TOLERANCE[torch.float64], err_msg=name)


def shares_of(case: dict, mask: torch.Tensor) -> torch.Tensor:
    """The product's shares, rescaled from this rank's rows to the global batch that the case names."""
    inputs, rows = case["inputs"], torch.nonzero(mask)[:, 0].numpy()
    shares = token_shares(case["aggregation"], rows, mask.shape[1])
    if case["aggregation"] == "token-mean":
        shares = shares * len(rows) / (inputs["batch_num_tokens"] or len(rows))
    else:
        shares = shares * len(np.unique(rows)) / (inputs["global_batch_size"] or len(mask))
    found = torch.zeros(mask.shape, dtype=torch.float64)
    found[mask] = torch.from_numpy(shares)
    return found


@DTYPES
@pytest.mark.parametrize("case", cases("loss", lambda c: "-".join((c["loss_mode"], c["is_level"], c["is_mode"], c["aggregation"]))))
def test_loss_and_gradient_meet_the_oracle(case: dict, dtype: torch.dtype):
    if reason := missing(case):
        pytest.skip(reason)
    inputs, outputs, tolerance = case["inputs"], case["outputs"], TOLERANCE[dtype]
    old, rollout, advantages = (torch.tensor(inputs[name], dtype=dtype) for name in ("old_log_probs", "rollout_log_probs", "advantages"))
    current = torch.tensor(inputs["log_probs"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(inputs["action_mask"]).bool()
    settings = LossSettings(inputs["clip_low"], inputs["clip_high"], inputs["dual_clip"], case["is_level"], case["is_mode"],
                            inputs["is_low"], inputs["is_high"])
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)
    result = policy_loss(case["loss_mode"], current, old, rollout, advantages, mask, settings, sequence)
    loss = (result.loss * shares_of(case, mask).to(dtype)).sum() * inputs["dp_size"]
    loss.backward()
    np.testing.assert_allclose(loss.item(), outputs["loss"], **tolerance)
    np.testing.assert_allclose(current.grad.numpy(), outputs["grad"], **tolerance)
    count = mask.sum()
    reported = {"reported_loss": result.loss.sum() / count, "clip_ratio": result.clipped.sum() / count,
                "policy_kl": -result.ratio[mask].log().mean(), "rollout_kl": (rollout - old)[mask].mean(),
                "is_filter_ratio": result.corrected.any(1).double().mean()}
    if case["is_level"] == "token":
        reported["is_filter_ratio"] = result.corrected.sum() / count
    for name, value in reported.items():
        if outputs[name] is None:  # without a correction the oracle reports nothing of it
            continue
        np.testing.assert_allclose(value.item(), outputs[name], **tolerance, err_msg=name)


@DTYPES
@pytest.mark.parametrize("case", cases("value_loss"))
def test_the_value_loss_meets_the_oracle(case: dict, dtype: torch.dtype):
    inputs, outputs = case["inputs"], case["outputs"]
    values, old, returns = (torch.tensor(inputs[name], dtype=dtype) for name in ("values", "old_values", "returns"))
    mask = torch.tensor(inputs["action_mask"]).bool()
    losses, clipped = value_loss(values.requires_grad_(), old, returns, mask, inputs["value_clip"])
    loss = losses.sum() / mask.sum()
    loss.backward()
    np.testing.assert_allclose(loss.item(), outputs["loss"], **TOLERANCE[dtype])
    np.testing.assert_allclose(values.grad.numpy(), outputs["grad"], **TOLERANCE[dtype])
    np.testing.assert_allclose(clipped.sum().item() / mask.sum().item(), outputs["clip_fraction"] or 0.0, **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("case", cases("kl", lambda c: c["estimator"]))
def test_kl_estimates_meet_the_oracle(case: dict, dtype: torch.dtype):
    log_probs, reference = (torch.tensor(case["inputs"][name], dtype=dtype) for name in ("log_probs", "ref_log_probs"))
    np.testing.assert_allclose(kl_estimate(case["estimator"], log_probs, reference).numpy(), case["outputs"]["kl"], **TOLERANCE[dtype])


@pytest.mark.parametrize("case", cases("kl_controller"))
def test_the_adaptive_coefficient_meets_the_oracle(case: dict):
    inputs, coefficient = case["inputs"], case["inputs"]["init_coef"]
    for measured, expected in case["outputs"]["current_and_coef"]:
        coefficient = adapted_coefficient(coefficient, measured, inputs["target"], inputs["horizon"], inputs["n"])
        assert coefficient == pytest.approx(expected, rel=1e-6)


def test_every_case_of_the_projects_own_file_is_met_and_none_left_out():
    own = json.loads(OWN.read_text())
    assert set(own) <= set(KINDS), f"no test reads {set(own) - set(KINDS)}"
    assert [reason for kind in KINDS for case in own[kind] if (reason := missing(case))] == []
