"""What one request may ask of the sampler: recorded with the reply, or refused because the trainer could not undo it. Pure.

The trainer recomputes log-probs from the full distribution at the recorded temperature. Whatever else reshapes the distribution
(nucleus, penalties, biases, grammars) is refused for replies that are trained, and passed on for replies that are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

NEUTRAL = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
           "min_tokens": (0,), "logit_bias": ({},), "ignore_eos": (False,), "structured_outputs": ({},)}
"""Fields that reshape the distribution, with the values that do not."""


class Unsupported(ValueError):
    """A field of a request that cannot be honoured; `param` names it."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Sampling:
    """max_tokens: None, what the context leaves. extra: fields for the engine, of untrained requests only."""

    temperature: float
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def engine_fields(self) -> dict[str, Any]:
        return {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids), **self.extra}


def parse_sampling(fields: dict[str, Any], default: Sampling, trained: bool = True) -> Sampling:
    """`default` with what `fields` ask for; None counts as left out. Raises Unsupported."""
    fields = {k: v for k, v in fields.items() if v is not None}
    extra = {}
    for name, values in NEUTRAL.items():
        value = fields.pop(name, values[0])
        if value in values:
            continue
        if trained:
            raise Unsupported(name, f"{name}={value!r} changes the distribution, which training cannot undo: only {values[0]!r} is taken here")
        extra[name] = value
    stop = fields.pop("stop", default.stop)
    sampling = replace(default, stop=(stop,) if isinstance(stop, str) else tuple(stop), extra=extra)
    try:
        for name, kind in (("temperature", float), ("max_tokens", int), ("seed", int)):
            sampling = replace(sampling, **{name: kind(fields.pop(name, getattr(sampling, name)))}) if name in fields else sampling
        sampling = replace(sampling, stop_token_ids=tuple(int(i) for i in fields.pop("stop_token_ids", default.stop_token_ids)))
    except (TypeError, ValueError):
        raise Unsupported(name, f"{name}: expected a number") from None
    if fields:
        raise Unsupported(next(iter(fields)), f"sampling parameter {next(iter(fields))!r} is not supported")
    if sampling.temperature < 0 or (trained and sampling.temperature == 0):
        raise Unsupported("temperature", f"temperature={sampling.temperature}: a trained reply needs more than 0 (a greedy one has no log-prob)")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise Unsupported("max_tokens", f"max_tokens={sampling.max_tokens}: expected at least 1")
    return sampling
