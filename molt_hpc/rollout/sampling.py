"""What one request may ask of the sampler: recorded with the reply, or refused because the trainer could not undo it. Pure.

The trainer recomputes log-probs at the recorded temperature, over the tokens that the engine's sampling masks name if the run has them
(rollout.top_k), over all tokens otherwise. What leaves out tokens (nucleus, top-k, grammars) needs masks in replies that are trained;
what moves probability between tokens (penalties, biases) is refused there, and passed on for replies that are not.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from molt_hpc.config import RolloutConfig

NEUTRAL = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
           "min_tokens": (0,), "logit_bias": ({},), "ignore_eos": (False,), "structured_outputs": ({},)}
"""Fields that reshape the distribution, with the values that do not."""
MASKED = ("top_p", "top_k", "min_p", "min_tokens", "structured_outputs")
"""Those of them that only leave out tokens: a sampling mask says which."""


class Unsupported(ValueError):
    """A field of a request that cannot be honoured; `param` names it."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Sampling:
    """max_tokens: None, what the context leaves. extra: further fields for the engine. masked: the engine answers with sampling masks."""

    temperature: float
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    masked: bool = False

    def engine_fields(self) -> dict[str, Any]:
        return {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids), **self.extra}


def run_sampling(rollout: RolloutConfig) -> Sampling:
    """What a run samples with where a request says nothing."""
    extra = {"top_p": rollout.top_p, "top_k": rollout.top_k} if rollout.top_k else {}
    return Sampling(rollout.temperature, rollout.max_new_tokens, extra=extra, masked=bool(rollout.top_k))


def parse_sampling(fields: dict[str, Any], default: Sampling, trained: bool = True) -> Sampling:
    """`default` with what `fields` ask for; None counts as left out. Raises Unsupported."""
    fields = {k: v for k, v in fields.items() if v is not None}
    extra = dict(default.extra)
    for name, values in NEUTRAL.items():
        if name not in fields:
            continue
        extra[name] = value = fields.pop(name)
        if value in values or not trained or (default.masked and name in MASKED):
            continue
        remedy = " without sampling masks (rollout.top_k)" if name in MASKED else ""
        name = "response_format" if name == "structured_outputs" else name
        raise Unsupported(name, f"{name}={value!r} changes the distribution, which training cannot undo{remedy}: only {values[0]!r} is taken here")
    # with masks top_k bounds their size
    for name, low, high in (("top_p", 1e-6, 1), ("top_k", 1 if default.masked else -1, 1 << 20), ("min_p", 0, 1)):
        value = extra.get(name, 1)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            raise Unsupported(name, f"{name}={value!r}: expected {low:g} to {high:g}")
    stop = fields.pop("stop", default.stop)
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
        raise Unsupported("stop", f"stop={stop!r}: expected texts that are not empty")
    sampling = replace(default, stop=tuple(stop), extra=extra)
    try:
        for name, kind in (("temperature", float), ("max_tokens", int), ("seed", int)):
            sampling = replace(sampling, **{name: kind(fields.pop(name, getattr(sampling, name)))}) if name in fields else sampling
        sampling = replace(sampling, stop_token_ids=tuple(int(i) for i in fields.pop("stop_token_ids", default.stop_token_ids)))
    except (TypeError, ValueError):
        raise Unsupported(name, f"{name}: expected a number") from None
    if fields:
        raise Unsupported(next(iter(fields)), f"sampling parameter {next(iter(fields))!r} is not supported")
    if not 0 <= sampling.temperature < float("inf") or (trained and sampling.temperature == 0):
        raise Unsupported("temperature", f"temperature={sampling.temperature}: a trained reply needs more than 0 (a greedy one has no log-prob)")
    if default.masked and sampling.temperature == 0:  # vLLM takes no greedy request beside masks: the same from one token
        sampling = replace(sampling, temperature=1.0, extra=extra | {"top_k": 1})
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise Unsupported("max_tokens", f"max_tokens={sampling.max_tokens}: expected at least 1")
    return sampling
