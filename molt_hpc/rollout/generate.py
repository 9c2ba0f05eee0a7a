"""Token in, token out: one turn sampled by an engine, with log-probs and weights versions.

Every sampling field is sent on every request. A field that is left out would be filled from the model's
generation_config.json, and a hidden top-k would make the log-probs those of another distribution.
"""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from molt_hpc.data.media import ImageError
from molt_hpc.rollout.engine import Engine, EngineError


@dataclass
class Turn:
    """What an engine sampled: token_ids int32 [N], logprobs float32 [N], spans (start, end, version) over 0..N.

    finish_reason: `stop` or `length`; stop_reason: the stop string or token id that ended it, None for the model's own end of text.
    kept: with sampling masks (int32 [N], among how many ids each token was sampled; int32 [M], these, token by token). routed: with
    router replay uint8 or int16 [P, layers, k], the experts of P tokens up to the last but one.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: np.ndarray
    finish_reason: str
    stop_reason: str | int | None = None
    kept: tuple[np.ndarray, np.ndarray] | None = None
    routed: np.ndarray | None = None

    def stop_token(self) -> int | None:
        """The sampled token that ended the turn; None if it was cut by a limit or a stop string."""
        ended = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        return int(self.token_ids[-1]) if ended else None


def sampling_parameters(max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """All fields that shape the distribution, pinned; sampling is from the full support if nothing is added."""
    return {"n": 1, "max_tokens": max_tokens, "min_tokens": 0, "temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": seed, "stop": [],
            "stop_token_ids": [], "ignore_eos": False, "logprobs": 0, "detokenize": False, "skip_special_tokens": False}


@dataclass
class Seen:
    """The images of a prompt, and what the engine must make of it. files: their paths, with the hashes as names."""

    files: list[Path]
    token_ids: list[int]
    spans: list[tuple[int, int]]

    def parts(self) -> list[dict[str, str]]:
        return [{"type": "image_url", "url": path.as_uri(), "uuid": path.name} for path in self.files]

    def check(self, answer: dict[str, Any]) -> None:
        """Raise ImageError if the engine put other tokens, or its embeddings in other places, than the trainer will."""
        spans = [(p["offset"], p["offset"] + p["length"]) for p in (answer.get("mm_placeholders") or {}).get("image", [])]
        if answer.get("prompt_token_ids") != self.token_ids or spans != self.spans:
            raise ImageError(f"the engine laid the images out at {spans} of {len(answer.get('prompt_token_ids') or ())} tokens, expected "
                             f"{self.spans} of {len(self.token_ids)}: its image processor is another one, or a reply holds the placeholder")


async def generate(engine: Engine, token_ids: list[int] | bytes, max_tokens: int, temperature: float, seed: int, request_id: str,
                   on_tokens: Callable[[list[int]], None] | None = None, seen: Seen | None = None, **sampling: Any) -> Turn:
    """Sample one turn after `token_ids` (a list, or one encoded as JSON); `sampling` replaces further fields of the request.

    on_tokens: called with new ids while the engine samples, all but the last ones. seen: the prompt's images, if it has any.
    Raises EngineError if the answer lacks what training needs, ImageError if it saw other images than the trainer will.
    """
    if sampling.get("stop"):
        sampling["detokenize"] = True  # vLLM finds stop strings only in text
    body = {"request_id": request_id, "model": "policy", "stream": on_tokens is not None,
            "sampling_params": sampling_parameters(max_tokens, temperature, seed) | sampling}
    body |= {"content_parts": seen.parts(), "return_token_ids": True} if seen else {}
    ids = token_ids if isinstance(token_ids, bytes) else json.dumps(token_ids).encode()
    engine.running += 1
    try:
        raw = json.dumps(body).encode()[:-1] + b', "token_ids": ' + ids + b"}"
        answer = await (_follow(engine, raw, on_tokens) if on_tokens else engine.post("/inference/v1/generate", raw))
    finally:
        engine.running -= 1
    if seen:
        seen.check(answer)
    return parse_answer(answer, f"{engine.name}, request {request_id}")


async def _follow(engine: Engine, raw: bytes, on_tokens: Callable[[list[int]], None]) -> dict[str, Any]:
    """A streamed answer, put together as the whole one would be."""
    whole: dict[str, Any] = {"token_ids": [], "logprobs": {"content": []}}
    prompt: dict[str, Any] = {}
    async for event in engine.stream("/inference/v1/generate", raw):
        prompt |= {k: event[k] for k in ("prompt_token_ids", "mm_placeholders") if event.get(k) is not None}
        for choice in event.get("choices", ()):
            whole["token_ids"] += choice.get("token_ids") or []
            whole["logprobs"]["content"] += (choice.get("logprobs") or {}).get("content") or []
            if choice.get("sampling_mask") is not None:
                whole["sampling_mask"] = whole.get("sampling_mask", []) + choice["sampling_mask"]
            whole |= {k: choice[k] for k in ("finish_reason", "stop_reason", "weight_versions", "routed_experts") if choice.get(k) is not None}
            if choice.get("finish_reason") is None:
                on_tokens(choice.get("token_ids") or [])
    return prompt | {"choices": [whole]}


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
    return Turn(np.array(ids, np.int32), logprobs, versions, str(choice.get("finish_reason")), choice.get("stop_reason"),
                _kept(choice.get("sampling_mask"), ids, where), _routed(choice.get("routed_experts"), where))


def _kept(masks: list[list[int]] | None, ids: list[int], where: str) -> tuple[np.ndarray, np.ndarray] | None:
    if masks is None:
        return None
    if len(masks) != len(ids) or not all(token in mask for token, mask in zip(ids, masks)):
        raise EngineError(f"{where}: {len(masks)} sampling masks for {len(ids)} tokens, or one without the token that was sampled")
    return np.array([len(mask) for mask in masks], np.int32), np.fromiter(chain.from_iterable(masks), np.int32)


def _routed(encoded: str | None, where: str) -> np.ndarray | None:
    if encoded is None:
        return None
    try:
        routed = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except ValueError as error:
        raise EngineError(f"{where}: routed experts that are no array: {error}") from None
    return routed if routed.dtype == np.uint8 else routed.astype(np.int16)
