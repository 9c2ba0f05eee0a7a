"""What an engine does in a weight update: vLLM's own routes, called in the order that the broker conducts."""

import asyncio
import logging
import re
import time
from typing import Any

import numpy as np

from molt_hpc.config import RunConfig
from molt_hpc.rollout.engine import Engine, EngineError
from molt_hpc.rollout.generate import sampling_parameters
from molt_hpc.weights.plan import decode_plan
from molt_hpc.wire import Message

log = logging.getLogger(__name__)


async def apply_command(engine: Engine, config: RunConfig, command: str, fields: dict[str, Any], message: Message) -> dict[str, Any]:
    """Carry out `pause`, `transfer` or `resume` and return the answer's fields.

    Raises EngineError if a route fails, ValueError (wire.WireError) if the plan arrived damaged.
    """
    timeout = config.weights.timeout
    if command == "pause":
        engine.paused = True
        # Its default clears the processed images in two processes one after the other; a request in between would miss one for ever.
        await engine.post("/pause?mode=keep&clear_cache=false", timeout=timeout)
        return {"answer": "paused"}
    if command == "resume":
        # The prefix cache, the KV of frozen requests and images' embeddings hold the old weights: nothing of them may serve the new version.
        await engine.post("/reset_prefix_cache?reset_running_requests=true", timeout=timeout)
        await engine.post("/reset_encoder_cache", timeout=timeout)
        await engine.post("/resume", timeout=timeout)
        engine.paused = False
        served = (await engine.get("/weight_info", timeout=timeout))["weight_version"]
        if served != str(fields["version"]):
            raise EngineError(f"{engine.name} serves version {served!r} after the update to {fields['version']}")
        probe = {} if engine.probe is None else {"probe": (await score(engine, engine.probe, timeout)).tobytes()}
        return {"answer": "resumed"} | probe
    arrays = message.arrays()
    engine.probe = arrays.get("probe")
    return await _transfer(engine, fields, decode_plan(arrays["plan"]), timeout, config.weights.ignore)


async def abort_update(engine: Engine, timeout: float) -> None:
    """Leave an update that was given up, so that another can begin. Raises EngineError if the server does not answer."""
    await engine.post("/collective_rpc", {"method": "molt_hpc_weight_cancel"}, timeout)


async def _transfer(engine: Engine, fields: dict[str, Any], plan: dict[str, Any], timeout: float, ignore: list[str]) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    clock = time.monotonic()

    def lap(name: str) -> None:
        nonlocal clock
        seconds[name] = time.monotonic() - clock
        clock = time.monotonic()

    if fields["join"]:
        init = {k: fields[k] for k in ("master_address", "master_port", "rank_offset", "world_size", "epoch", "timeout")}
        await engine.post("/collective_rpc", {"method": "molt_hpc_weight_cancel"}, timeout)
        await engine.post("/init_weight_transfer_engine", {"init_info": init}, timeout)
    lap("join")
    await engine.post("/start_weight_update", timeout=timeout)
    lap("start")
    for body in plan["updates"]:
        await engine.post("/update_weights", {"update_info": body}, timeout)
    lap("receive")
    reports = (await engine.post("/collective_rpc", {"method": "molt_hpc_weight_report"}, timeout))["results"]
    checksum = verify(engine.name, reports, ignore)
    lap("verify")
    # within `receive`, while further bytes arrived
    seconds |= {name: max(report["seconds"].get(name, 0.0) for report in reports) for name in ("load", "load_cpu")}
    await engine.post("/finish_weight_update", {"weight_version": str(fields["version"])}, timeout)
    lap("finish")
    return {"answer": "applied", "checksum": checksum, "seconds": seconds}


def verify(engine: str, reports: list[dict[str, Any]], ignore: list[str]) -> str:
    """The checksum of what arrived, from the reports of a server's ranks.

    Raises EngineError if its ranks received different bytes, a parameter was not filled, or a tensor fills nothing on any rank; tensors
    that match one of the patterns in `ignore` are only logged then.
    """
    checksums = {report["checksum"] for report in reports}
    if len(checksums) != 1:
        raise EngineError(f"{engine}: its ranks received different bytes: {sorted(checksums)}")
    # another rank's layer or expert is skipped here and loaded there
    nowhere = sorted(set.intersection(*(set(report["skipped"]) for report in reports)))
    unknown = [name for name in nowhere if not any(re.search(pattern, name) for pattern in ignore)]
    if unknown:
        raise EngineError(f"{engine}: its model has no place for {_some(unknown)}: trainer and engine disagree on the architecture; "
                          "if that is meant, name them in weights.ignore")
    if nowhere:
        log.info("%s: its model has no place for %s, as weights.ignore allows", engine, _some(nowhere))
    missing = sorted({name for report in reports for name in report["missing"]})
    if missing:
        raise EngineError(f"{engine}: the update did not bring {_some(missing)}")
    return checksums.pop()


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


async def score(engine: Engine, tokens: np.ndarray, timeout: float) -> np.ndarray:
    """float32 [K, L - 1]: the engine's log-probs of all tokens but the first of each prompt, over all tokens; tokens: int32 [K, L]."""
    async def one(number: int, ids: list[int]) -> list[float]:
        body = {"request_id": f"probe-{number}", "model": "policy", "token_ids": ids, "stream": False,
                "sampling_params": sampling_parameters(1, 1.0, 0) | {"prompt_logprobs": 0, "top_k": 1}}  # of the one token sampled
        answer = await engine.post("/inference/v1/generate", body, timeout)
        return [row[str(token)]["logprob"] for row, token in zip(answer["prompt_logprobs"][1:], ids[1:], strict=True)]

    return np.array(await asyncio.gather(*(one(i, ids) for i, ids in enumerate(tokens.tolist()))), "<f4")
