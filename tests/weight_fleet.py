"""Real engines updated by the product's own two ends, with the test in the place of the broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from molt_hpc import wire
from molt_hpc.broker.updates import rank_offsets
from molt_hpc.config import RunConfig
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.update import apply_command, score
from molt_hpc.weights.plan import encode_plan
from molt_hpc.weights.publish import Sender
from tests.weight_source import TensorSource


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder under their published names, each in its dtype."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


class Checkpoint(TensorSource):
    """A folder's tensors as a weight source."""

    def __init__(self, folder: Path):
        super().__init__(read_folder(folder))


def rewritten(folder: Path, out: Path, change) -> Path:
    """A copy of a model folder with every tensor put through `change(name, tensor)`."""
    shutil.copytree(folder, out)
    for path in out.glob("*.safetensors"):
        save_file({name: change(name, tensor).contiguous() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    return out


def perturbed(folder: Path, out: Path, seed: int, scale: float = 0.05) -> Path:
    """A copy of a model folder whose weights have moved."""
    generator = torch.Generator().manual_seed(seed)
    return rewritten(folder, out, lambda _, t: (t.float() + torch.randn(t.shape, generator=generator) * scale).to(t.dtype))


class Fleet:
    """Engines and the state that a broker would hold about them: the epoch and who is in it."""

    def __init__(self, config: RunConfig, engines: dict[str, Engine]):
        self.config, self.engines, self.epoch = config, engines, 0
        self.members: list[str] = []

    async def command(self, name: str, fields: dict, arrays: dict | None = None) -> dict[str, dict]:
        """Give one command to all engines; their answers, or their errors."""
        message = wire.decode(wire.encode(name, {}, arrays or {}))
        commands = [apply_command(e, self.config, name, fields | self._rank(e), message) for e in self.engines.values()]
        answers = await asyncio.gather(*commands, return_exceptions=True)
        return dict(zip(self.engines, answers))

    def _sizes(self) -> dict[str, int]:
        return {name: engine.world_size for name, engine in self.engines.items()}

    def _rank(self, engine: Engine) -> dict:
        return {"rank_offset": rank_offsets(self._sizes())[0][engine.name]}

    async def transfer(self, sender: Sender, version: int) -> tuple[dict, object]:
        """The transfer alone, engines being paused; answers and the sender's report."""
        world = rank_offsets(self._sizes())[1]
        join = self.members != sorted(self.engines)
        if join:
            self.epoch, self.members = self.epoch + 1, sorted(self.engines)
        address, port = sender.open(world) if join else sender.address()
        fields = {"version": version, "epoch": self.epoch, "join": join, "world_size": world, "timeout": self.config.weights.timeout,
                  "master_address": address, "master_port": port, "backend": sender.backend}
        answers = asyncio.create_task(self.command("transfer", fields, {"plan": encode_plan(sender.plan())}))
        if join:
            await asyncio.to_thread(sender.join, self.epoch, world)
        report = await asyncio.to_thread(sender.send)
        return await answers, report

    async def update(self, sender: Sender, version: int) -> object:
        """One whole update, which must succeed on every engine."""
        await asyncio.to_thread(sender.stage)
        for answer in (await self.command("pause", {"version": version})).values():
            raise_if_error(answer)
        answers, report = await self.transfer(sender, version)
        for answer in answers.values():
            raise_if_error(answer)
            assert answer["checksum"] == report.checksum
        for answer in (await self.command("resume", {"version": version})).values():
            raise_if_error(answer)
        return report

    async def scores(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        return {name: await score(engine, tokens, 60) for name, engine in self.engines.items()}


def raise_if_error(answer: object) -> None:
    if isinstance(answer, BaseException):
        raise answer


@contextlib.asynccontextmanager
async def running(configs: dict[str, RunConfig], folder: Path):
    """Engines by name, each with its own configuration; healthy inside the block."""
    engines = {name: Engine(name, config, index, 0, folder / f"{name}.log") for index, (name, config) in enumerate(configs.items())}
    try:
        await asyncio.gather(*(engine.wait_healthy() for engine in engines.values()))
        yield engines
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()))


def probe(count: int = 4, length: int = 24, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 300, (count, length)).astype(np.int32)


def reference_scores(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 [K, L - 1]: log-probs by a transformers forward pass in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    vision = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    return forward_scores(kind.from_pretrained(folder, dtype=torch.float32).eval(), tokens)


@torch.no_grad()
def forward_scores(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.asarray(tokens, np.int64))
    return torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0].numpy()
