"""What an engine does in a weight update: vLLM's own routes, called in the order that the broker conducts."""

from __future__ import annotations

import time
from typing import Any

from molt_hpc.config import RunConfig
from molt_hpc.rollout.engine import Engine, EngineError
from molt_hpc.weights.plan import decode_plan
from molt_hpc.wire import Message


async def apply_command(engine: Engine, config: RunConfig, command: str, fields: dict[str, Any], message: Message) -> dict[str, Any]:
    """Carry out `pause`, `transfer` or `resume` and return the answer's fields.

    Raises EngineError if a route fails, ValueError (wire.WireError) if the plan arrived damaged.
    """
    timeout = config.weights.timeout
    if command == "pause":
        engine.paused = True
        await engine.post("/pause?mode=keep", timeout=timeout)
        return {"answer": "paused"}
    if command == "resume":
        # The prefix cache and the KV of frozen requests hold the old weights: nothing of them may serve the new version.
        await engine.post("/reset_prefix_cache?reset_running_requests=true", timeout=timeout)
        await engine.post("/resume", timeout=timeout)
        engine.paused = False
        served = (await engine.get("/weight_info", timeout=timeout))["weight_version"]
        if served != str(fields["version"]):
            raise EngineError(f"{engine.name} serves version {served!r} after the update to {fields['version']}")
        return {"answer": "resumed"}
    return await _transfer(engine, fields, decode_plan(message.arrays()["plan"]), timeout)


async def _transfer(engine: Engine, fields: dict[str, Any], plan: list[dict], timeout: float) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    clock = time.monotonic()

    def lap(name: str) -> None:
        nonlocal clock
        seconds[name] = time.monotonic() - clock
        clock = time.monotonic()

    if fields["join"]:
        await engine.post("/init_weight_transfer_engine", {"init_info": _init_info(fields)}, timeout)
    lap("join")
    await engine.post("/start_weight_update", timeout=timeout)
    lap("start")
    for bucket in plan:
        await engine.post("/update_weights", {"update_info": _update_info(fields["backend"], bucket)}, timeout)
    lap("receive")
    await engine.post("/finish_weight_update", {"weight_version": str(fields["version"])}, timeout)
    lap("finish")
    return {"answer": "applied", "checksum": await _checksum(engine, fields["backend"], timeout), "seconds": seconds}


def _init_info(fields: dict[str, Any]) -> dict[str, Any]:
    info = {k: fields[k] for k in ("master_address", "master_port", "rank_offset", "world_size")}
    return info | ({"epoch": fields["epoch"], "timeout": fields["timeout"]} if fields["backend"] == "gloo" else {"packed": True})


def _update_info(backend: str, bucket: dict) -> dict[str, Any]:
    if backend == "gloo":
        return bucket
    names, dtypes, shapes = zip(*((name, dtype, shape) for name, dtype, shape, _ in bucket["tensors"]))
    return {"names": names, "dtype_names": dtypes, "shapes": shapes}


async def _checksum(engine: Engine, backend: str, timeout: float) -> str:
    """The checksum of what arrived, equal on all ranks of the server."""
    if backend != "gloo":
        return "unattested"
    reports = (await engine.post("/collective_rpc", {"method": "molt_hpc_weight_report"}, timeout))["results"]
    checksums = {f"{report['checksum']:08x}" for report in reports}
    if len(checksums) != 1:
        raise EngineError(f"{engine.name}: its ranks received different bytes: {sorted(checksums)}")
    return checksums.pop()
