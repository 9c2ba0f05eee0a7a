"""The drift probe: a few fixed prompts whose log-probs engines and trainer compute after every update.

Both sides read the same tokens with the same weights, so what they disagree about is numerics, or a weight that did not arrive
as it should have. It is the one check that sees the whole way: gather, names, transfer, vLLM's fusing and repacking, its kernels.
"""

import logging
from typing import Any

import numpy as np
import torch

from molt_hpc.config import WeightsConfig
from molt_hpc.train.logprob import pack_segments
from molt_hpc.train.model import TrainModel

log = logging.getLogger(__name__)

LENGTH = 32
"""Tokens of one probe prompt."""


def probe_tokens(folder: Any, count: int, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    """int32 [count, length]: random ordinary tokens of a model folder's tokenizer, the same at every call."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    return np.random.default_rng(seed).choice(ordinary, (count, length)).astype(np.int32)


class DriftProbe:
    """Scores the probe prompts with the trainer's model and compares with what the engines found."""

    def __init__(self, model: TrainModel, config: WeightsConfig, tokens: np.ndarray):
        self._model, self._config, self.tokens = model, config, tokens

    @torch.no_grad()
    def score(self) -> np.ndarray:
        """float32 [K, L - 1]: log-probs of all tokens but the first ones. All ranks must call it together."""
        count, length = self.tokens.shape
        packed = pack_segments(list(self.tokens), [np.arange(length) > 0] * count, [1.0] * count, self._model.device)
        scores, _ = self._model.score(packed)
        self._model.reshard()
        return scores.float().cpu().numpy().reshape(count, length - 1)

    def compare(self, version: int, engines: dict[str, bytes]) -> dict[str, float]:
        """`judge` on the trainer's own log-probs. All ranks must call it; only rank 0 has the engines' values and gets an answer."""
        return judge(self._config, version, self.score(), engines)


def judge(config: WeightsConfig, version: int, ours: np.ndarray, engines: dict[str, bytes]) -> dict[str, float]:
    """drift_mean (of the worst engine) and drift_max of one update: |log-prob of engine - of trainer| over the probe tokens.

    ours: float32 [K, L - 1]; engines: name -> the same from the engine, as bytes. Logs an error above weights.drift_alarm; raises
    DriftError above weights.drift_stop. A value that is not finite is above every bound.
    """
    deltas = {name: np.abs(np.frombuffer(raw, "<f4").reshape(ours.shape).astype(np.float64) - ours) for name, raw in sorted(engines.items())}
    if not deltas:
        return {}
    worst = max(deltas, key=lambda name: np.nan_to_num(deltas[name].mean(), nan=np.inf))
    mean, largest = float(deltas[worst].mean()), float(max(delta.max() for delta in deltas.values()))
    what = f"version {version}: log-probs of {worst} are {mean:.3g} off the trainer's in the mean of {ours.size} probe tokens"
    if config.drift_stop and not mean <= config.drift_stop:
        raise DriftError(f"{what}, weights.drift_stop is {config.drift_stop:g}")
    if config.drift_alarm and not mean <= config.drift_alarm:
        log.error("%s, weights.drift_alarm is %g", what, config.drift_alarm)
    return {"drift_mean": mean, "drift_max": largest}


class DriftError(RuntimeError):
    """Engines and trainer disagree more than weights.drift_stop allows."""
