"""Token in, token out: one turn sampled by an engine, with log-probs and weights versions.

Every sampling field is sent on every request. A field that is left out would be filled from the model's
generation_config.json, and a hidden top-k would make the log-probs those of another distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from molt_hpc.rollout.engine import Engine, EngineError


@dataclass
class Turn:
    """What an engine sampled: token_ids int32 [N], logprobs float32 [N], spans (start, end, version) over 0..N."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: np.ndarray
    finish_reason: str


def sampling_parameters(max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """All fields that shape the distribution, pinned; sampling is from the full support."""
    return {"n": 1, "max_tokens": max_tokens, "min_tokens": 0, "temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": seed, "stop": [],
            "stop_token_ids": [], "ignore_eos": False, "logprobs": 0, "detokenize": False, "skip_special_tokens": False}


async def generate(engine: Engine, token_ids: list[int], max_tokens: int, temperature: float, seed: int, request_id: str) -> Turn:
    """Sample one turn after `token_ids`. Raises EngineError if the answer lacks what training needs."""
    body = {"request_id": request_id, "model": "policy", "token_ids": token_ids, "stream": False,
            "sampling_params": sampling_parameters(max_tokens, temperature, seed)}
    engine.running += 1
    try:
        answer = await engine.post("/inference/v1/generate", body)
    finally:
        engine.running -= 1
    return parse_answer(answer, f"{engine.name}, request {request_id}")


def parse_answer(answer: dict[str, Any], where: str) -> Turn:
    """Check and convert one answer of /inference/v1/generate."""
    choice = answer["choices"][0]
    ids = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if not ids or len(content) != len(ids):
        raise EngineError(f"{where}: {len(ids)} tokens with {len(content)} log-probs, finish reason {choice.get('finish_reason')!r}")
    if choice.get("finish_reason") == "abort":
        raise EngineError(f"{where}: the request was aborted")
    spans = choice.get("weight_versions") or []
    try:
        versions = np.array([[s["start"], s["end"], int(s["version"])] for s in spans], np.int32).reshape(-1, 3)
    except ValueError:
        raise EngineError(f"{where}: weights version {spans!r} was not set by a weight update") from None
    if not len(versions) or versions[0, 0] != 0 or versions[-1, 1] != len(ids):
        raise EngineError(f"{where}: version spans {spans!r} do not cover {len(ids)} tokens")
    logprobs = np.array([c["logprob"] for c in content], np.float32)
    return Turn(np.array(ids, np.int32), logprobs, versions, str(choice["finish_reason"]))
