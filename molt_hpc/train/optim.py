"""AdamW and Muon, the learning-rate schedule, and the guarded optimizer step.

The schedule is a pure function of the position in the run, so a resumed or replayed run needs no
scheduler state. The step is guarded: a loss or gradient that is not finite changes nothing and
raises on every rank.
"""

import math
import re

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from molt_hpc.config import OptimConfig


class TrainingError(RuntimeError):
    """Training cannot go on as it is; raised on all ranks alike. No weights may be published after it."""


class BadStep(TrainingError):
    """A loss or gradient was not finite: the optimizer step was not made, the weights are as before it."""


CPU = torch.device("cpu")
LAYER_MATRIX = re.compile(r"\.(layers|h|blocks)\.\d+\..*weight$")
"""Parameters that Muon is made for, if they have two dimensions: no embeddings, no output layer."""


class Optimizers:
    """Several optimizers over disjoint parameters, used as one. A parameter group's rate is the schedule's times its `scale`.

    The state is there from the start, as the first step would make it, so that a checkpoint has the same tensors at any time.
    offload: between two steps it is on the CPU.
    """

    def __init__(self, parts: list[torch.optim.Optimizer], offload: bool = False):
        self.parts, self.offload = parts, offload
        for part in parts:
            adam = isinstance(part, torch.optim.AdamW)
            for parameter in (p for group in part.param_groups for p in group["params"]):
                slots = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",)
                part.state[parameter] = {slot: torch.zeros_like(parameter.detach()) for slot in slots}
                if adam:
                    part.state[parameter]["step"] = torch.zeros(())
                self._place(part, parameter, CPU)

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    def _place(self, part: torch.optim.Optimizer, parameter: torch.nn.Parameter, device: torch.device) -> None:
        """Move a parameter's state if it is offloaded; torch wants the step count on the CPU at all times."""
        if self.offload:
            part.state[parameter] |= {slot: t.to(device) for slot, t in part.state[parameter].items() if slot != "step"}

    def step(self) -> None:
        for part in self.parts:
            for parameter in list(part.state):
                self._place(part, parameter, parameter.device)
            part.step()
            for parameter in list(part.state):
                self._place(part, parameter, CPU)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Empty for a parameter that does not learn."""
        return next((part.state[parameter] for part in self.parts if parameter in part.state), {})


def build_optimizer(named_parameters: list[tuple[str, torch.nn.Parameter]], config: OptimConfig, offload: str = "none") -> Optimizers:
    """AdamW over sharded parameters, with optim muon Muon over the layers' matrices; norms and biases decay only if they are told to.

    offload: fsdp.offload.
    """
    adam, muon = config.adam, config.muon
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    muons = {id(p) for name, p in trained if config.optim == "muon" and p.ndim == 2 and LAYER_MATRIX.search(name) and "norm" not in name}
    adams = [(name, p) for name, p in trained if id(p) not in muons]
    chosen = {id(p) for name, p in adams if adam.decay_norms or (p.ndim >= 2 and "norm" not in name and not name.endswith("bias"))}
    matrices, decayed = [p for _, p in trained if id(p) in muons], [p for _, p in adams if id(p) in chosen]
    plain = [p for _, p in adams if id(p) not in chosen]
    groups = [{"params": decayed, "weight_decay": adam.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    # foreach would stack parameters of different meshes (experts, dense), which DTensor refuses
    parts: list[torch.optim.Optimizer] = [torch.optim.AdamW([g for g in groups if g["params"]], lr=adam.lr, betas=tuple(adam.betas),
                                                            eps=adam.eps, foreach=False)]
    if matrices:
        decay = adam.weight_decay if muon.weight_decay is None else muon.weight_decay
        parts.append(torch.optim.Muon([{"params": matrices, "scale": muon.lr / adam.lr}], lr=muon.lr, weight_decay=decay,
                                      momentum=muon.momentum, ns_steps=muon.ns_steps))
    return Optimizers(parts, offload == "optimizer")


def learning_rate(config: OptimConfig, position: float, total: int | None) -> float:
    """The rate of the optimizer step at `position` (0 .. total, fractions allowed) of a run of `total` steps.

    Warm-up rises linearly and reaches the peak at its last step. linear and cosine then fall to
    min_lr_ratio x peak at the end of the run. Raises ValueError if the schedule needs a total that is not known.
    """
    name, peak = config.lr_scheduler, config.adam.lr
    if name == "constant":
        return peak
    if not total and (name != "constant_with_warmup" or config.lr_warmup_ratio > 0):
        raise ValueError(f"lr_scheduler {name}: the number of steps of the run is not known; set train.max_steps")
    warmup = round(config.lr_warmup_ratio * (total or 0))
    if position < warmup:
        return peak * min(1.0, (position + 1) / warmup)
    if name == "constant_with_warmup":
        return peak
    progress = min(1.0, (position - warmup) / max(1, total - warmup))
    fall = 1 - progress if name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)


def local_square_sum(parameters: list[torch.nn.Parameter], world_size: int) -> torch.Tensor:
    """This rank's share of the squared gradient norm, float64; the shares of all ranks add up to it.

    A gradient that several ranks hold in full counts as one: each holder gives its part.
    """
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        holders = world_size
        if isinstance(grad, DTensor):
            for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
                holders //= size if isinstance(placement, Shard) or placement.is_shard() else 1
            grad = grad.to_local()
        total = total.to(grad.device) + grad.detach().to(torch.float64).square().sum() / holders
    return total


def guarded_step(optimizer: Optimizers | torch.optim.Optimizer, rate: float, max_norm: float, local_loss: torch.Tensor,
                 device: torch.device) -> tuple[float, float]:
    """Clip the global gradient norm, check loss and norm on all ranks, step, check the weights, and clear the gradients.

    local_loss: this rank's share of the loss; the shares add up. Returns (loss, norm before clipping), equal on all
    ranks. Raises on all ranks BadStep, without stepping, if either is not finite; TrainingError if a weight is not
    finite after the step: such weights are beyond repair and must not be published.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    squares = local_square_sum(parameters, dist.get_world_size())
    packed = torch.stack([squares.to(device), local_loss.detach().to(device, torch.float64)])
    dist.all_reduce(packed)
    norm, loss = math.sqrt(packed[0].item()) if packed[0] >= 0 else math.nan, packed[1].item()
    if not (math.isfinite(norm) and math.isfinite(loss)):
        optimizer.zero_grad(set_to_none=True)
        raise BadStep(f"loss {loss} and gradient norm {norm}: expected finite numbers; the optimizer step was not made. "
                      "Lower actor.adam.lr, or look at the step's saved trajectories with tools/replay.py")
    if max_norm > 0 and norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    bad = sum(((~torch.isfinite(p.to_local() if isinstance(p, DTensor) else p.detach())).sum().to(device) for p in parameters),
              torch.zeros((), device=device, dtype=torch.int64))
    dist.all_reduce(bad)
    if bad.item():
        raise TrainingError(f"{bad.item()} weights are not finite after a step of learning rate {rate:g} with gradient norm {norm:g}: "
                            "lower actor.adam.lr and go on from the last checkpoint with --ckpt.resume; these weights are not published")
    return loss, norm
