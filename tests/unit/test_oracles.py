"""The algorithms meet independent values: every case of an oracle file, or a counted skip with the reason.

MOLT_HPC_ORACLES may name another file of the same layout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from molt_hpc.train import advantage
from molt_hpc.train.loss import LOSSES, LossSettings, policy_loss

PATH = Path(os.environ.get("MOLT_HPC_ORACLES") or Path(__file__).parents[1] / "data" / "algorithms.json")
CASES = json.loads(PATH.read_text())
LEVELS, MODES = ("off", "token"), ("mask", "clip", "trunc")
KINDS_COVERED = ("advantage", "loss")


def missing_advantage(case: dict) -> str | None:
    name = case["estimator"]
    return None if name in advantage.ESTIMATORS else f"estimator {name} is not implemented"


def missing_loss(case: dict) -> str | None:
    if case["loss_mode"] not in LOSSES:
        return f"loss {case['loss_mode']} is not implemented"
    if case["is_level"] not in LEVELS:
        return f"correction level {case['is_level']} is not implemented"
    return None if case["aggregation"] == "token-mean" else f"aggregation {case['aggregation']} is not implemented"


def named(kind: str, describe) -> list:
    return [pytest.param(case, id=f"{number}-{describe(case)}") for number, case in enumerate(CASES.get(kind, []))]


@pytest.mark.parametrize("case", named("advantage", lambda c: c["estimator"]))
def test_advantages_meet_the_oracle(case: dict):
    if reason := missing_advantage(case):
        pytest.skip(reason)
    inputs = case["inputs"]
    groups = np.zeros(len(inputs["rewards"]), int)
    for group, rows in enumerate(inputs["groups"]):
        groups[rows] = group
    values = advantage.compute(case["estimator"], np.array(inputs["rewards"]), groups, (-1e30, 1e30))
    tokens = values[inputs["sample_to_rollout"]][:, None] * np.array(inputs["action_mask"], float)
    np.testing.assert_allclose(tokens, case["outputs"]["advantages"], rtol=1e-6, atol=1e-7)


def settings_of(case: dict) -> LossSettings:
    inputs = case["inputs"]
    return LossSettings(inputs["clip_low"], inputs["clip_high"], inputs["dual_clip"], case["is_level"], case["is_mode"],
                        inputs["is_low"], inputs["is_high"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", named("loss", lambda c: "-".join((c["loss_mode"], c["is_level"], c["is_mode"], c["aggregation"]))))
def test_loss_and_gradient_meet_the_oracle(case: dict, dtype: torch.dtype):
    if reason := missing_loss(case):
        pytest.skip(reason)
    inputs, outputs = case["inputs"], case["outputs"]
    tensors = {name: torch.tensor(inputs[name], dtype=dtype) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    current = torch.tensor(inputs["log_probs"], dtype=dtype, requires_grad=True)
    mask = torch.tensor(inputs["action_mask"]).bool()
    result = policy_loss(case["loss_mode"], current, tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["advantages"],
                         mask, settings_of(case))
    loss = result.loss.sum() / (inputs["batch_num_tokens"] or mask.sum()) * inputs["dp_size"]
    loss.backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(loss.item(), outputs["loss"], **tolerance)
    np.testing.assert_allclose(current.grad.numpy(), outputs["grad"], **tolerance)
    np.testing.assert_allclose((result.loss.sum() / mask.sum()).item(), outputs["reported_loss"], **tolerance)
    np.testing.assert_allclose(result.clipped.sum().item() / mask.sum().item(), outputs["clip_ratio"], **tolerance)
    if outputs["is_filter_ratio"] is not None:
        np.testing.assert_allclose(result.corrected.sum().item() / mask.sum().item(), outputs["is_filter_ratio"], **tolerance)


def test_the_file_holds_cases_of_every_implemented_algorithm(capsys):
    reasons: dict[str, int] = {}
    done = 0
    for kind, missing in (("advantage", missing_advantage), ("loss", missing_loss)):
        for case in CASES.get(kind, []):
            reason = missing(case)
            done += reason is None
            reasons |= {reason: reasons.get(reason, 0) + 1} if reason else {}
    for kind in sorted(set(CASES) - set(KINDS_COVERED)):
        reasons[f"{kind} is not implemented"] = len(CASES[kind])
    with capsys.disabled():
        print(f"\noracles of {PATH.name}: {done} cases met, {sum(reasons.values())} left out: "
              + "; ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items())))
    assert done > 0
