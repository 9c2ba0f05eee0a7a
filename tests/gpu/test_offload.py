"""The optimizer's state between steps, where there is a GPU to keep it off."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from molt_hpc.config import AdamConfig, OptimConfig
from molt_hpc.train.optim import build_optimizer, guarded_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_an_offloaded_state_is_on_the_cpu_between_steps_and_changes_no_step():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    found = []
    for offload in ("none", "optimizer"):
        parameter = torch.nn.Parameter(torch.ones(8, 4, device="cuda"))
        optimizer = build_optimizer([("model.layers.0.mlp.up_proj.weight", parameter)], OptimConfig(adam=AdamConfig(lr=0.1)), offload)
        for step in range(3):
            parameter.grad = torch.linspace(-1, 1 + step, 32, device="cuda").view(8, 4)
            guarded_step(optimizer, 0.1, 1.0, torch.zeros(()), parameter.device)
        devices = {tensor.device.type for slot, tensor in optimizer.state_of(parameter).items() if slot != "step"}
        assert devices == {"cpu" if offload == "optimizer" else "cuda"}
        found.append(parameter.detach().clone())
    dist.destroy_process_group()
    assert torch.equal(*found)
