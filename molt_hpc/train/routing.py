"""Router replay: in the forward pass of training every token goes to the experts that it went to when the engine sampled it.

Only the choice is replayed. The weights of the chosen experts come from the live router, so its gradient is that of the loss. A segment
has the engine's choices for all its tokens but the last, which nothing is predicted from; that one, and the tokens of stand-ins and of
passes that no engine has seen (the drift probe), choose for themselves.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class Router:
    """What one layer's router must choose. layer: its number among all layers, as the engine counts; chosen: int16 [T, k], -1: own choice.

    Stays until the next forward pass, since recomputed activations must choose the same again.
    """

    def __init__(self, layer: int):
        self.layer = layer
        self.chosen: torch.Tensor | None = None

    def apply(self, indices: torch.Tensor) -> torch.Tensor:
        """The experts [T, k] to use instead of the router's own. NeMo AutoModel's routers call it by this name."""
        if self.chosen is None:
            return indices
        if self.chosen.shape != indices.shape:
            raise ValueError(f"layer {self.layer} chooses {list(indices.shape)} experts, the engine chose {list(self.chosen.shape)}: "
                             "is it another model, or one that the trainer splits by tokens?")
        chosen = self.chosen.to(indices.dtype)
        return torch.where(chosen >= 0, chosen, indices)


class _Choice(TorchFunctionMode):
    """Around a transformers router: its top-k over all experts is the choice (one over groups of experts is not)."""

    def __init__(self, router: Router, experts: int):
        super().__init__()
        self._router, self._experts = router, experts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.topk, torch.Tensor.topk) and args[0].ndim == 2 and args[0].shape[1] == self._experts:
            indices = self._router.apply(result[1])
            return args[0].gather(-1, indices), indices
        return result


def replayed_routers(module: nn.Module) -> list[Router]:
    """Take over the choice of every router of AutoModel's and transformers' mixture-of-experts layers. Raises ValueError if there is none."""
    found = []
    for name, part in module.named_modules():
        layer, own = re.match(r"(?!.*\bmtp\b).*\blayers\.(\d+)\.", name), hasattr(part, "router_replay")
        if layer is None or not (own or type(part).__name__.lower().endswith("topkrouter")):
            continue
        found.append(Router(int(layer[1])))
        if own:
            part.router_replay = found[-1]
        else:
            part.forward = _choosing(part.forward, found[-1], part.weight.shape[0])
    if not found:
        raise ValueError(f"train.routing_replay: {type(module).__name__} has no router that is known here; is it a mixture of experts?")
    return found


def _choosing(forward: Callable[..., Any], router: Router, experts: int) -> Callable[..., Any]:
    def chosen_forward(*inputs: Any, **options: Any) -> Any:
        with _Choice(router, experts):
            return forward(*inputs, **options)

    return chosen_forward


def lay_out(parts: list[np.ndarray], device: torch.device) -> torch.Tensor:
    """int16 [T, layers, k] of packed segments from the engine's [T_s - 1, layers, k] of each."""
    last = np.full((1, *parts[0].shape[1:]), -1, np.int16)
    return torch.from_numpy(np.concatenate([rows.astype(np.int16) for part in parts for rows in (part, last)])).to(device)


def follow(routers: list[Router], routed: torch.Tensor | None, tokens: int) -> None:
    """Let the next forward pass, over `tokens` tokens, choose what `routed` says; None: for itself."""
    if routed is not None:
        routed = nn.functional.pad(routed, (0, 0, 0, 0, 0, tokens - len(routed)), value=-1)
    for router in routers:
        router.chosen = None if routed is None else routed[:, router.layer]
