"""Seconds of a whole weight update with real vLLM servers, beside a bare gloo broadcast of the same bytes, loading alone, and save and reload.

The update is the product's own path: real broker, real rollout worker, stock `vllm serve`, this process as the trainer's
rank 0 with the whole model in memory (so the gather is free and the figures are those of the protocol and the bytes). Loading
alone are the CPU seconds of the thread that loads and repacks in the engine: no transfer can make an update shorter than that.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import torch
import torch.distributed as dist
from bench_run import actor_client, base_config, running_broker, spawn, start_role
from safetensors.torch import save_file

from molt_hpc.config import RunConfig
from molt_hpc.guard import descendants
from molt_hpc.train.publish import Publisher
from molt_hpc.weights import group
from molt_hpc.weights.publish import make_sender


def random_model(folder: Path, mib: int) -> Path:
    """A random float32 Qwen3 of about `mib` MiB with a tokenizer that only has to load."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    hidden, vocab = 512, 2048
    layers = max(1, round((mib * 2**20 / 4 - 2 * vocab * hidden) / (12 * hidden * hidden)))
    config = Qwen3Config(vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden - hidden // 3, num_hidden_layers=layers,
                         num_attention_heads=8, num_key_value_heads=8, head_dim=64, max_position_embeddings=512,
                         tie_word_embeddings=False, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(vocab)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="w1", pad_token="w0").save_pretrained(folder)
    return folder


class Loaded:
    """A model in memory as a weight source."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tensors = {name: parameter.data.clone() for name, parameter in model.named_parameters()}  # not the mapped file

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def _receive(port: int, rank: int, world: int, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    member = group.join(group.open_store("127.0.0.1", port, world, False, 60), 1, rank, world, 60)
    buffer = torch.zeros(max(sizes), dtype=torch.uint8)
    for _ in range(rounds):
        for size in sizes:
            group.broadcast(member, buffer[:size])


def bare_broadcast(sizes: list[int], receivers: int, rounds: int) -> float:
    """Median seconds to broadcast buckets of these sizes to receiving processes; all buffers are reused."""
    world = receivers + 1
    store = group.open_store("127.0.0.1", 0, world, True, 60)
    processes = [spawn(_receive, store.port, rank, world, sizes, rounds + 1) for rank in range(1, world)]
    member = group.join(store, 1, 0, world, 60)
    buffer, seconds = torch.zeros(max(sizes), dtype=torch.uint8), []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for size in sizes:
            group.broadcast(member, buffer[:size])
        seconds.append(time.perf_counter() - started)
    for process in processes:
        process.join()
    return statistics.median(seconds[1:])


class Memory:
    """Bytes by which processes grow at most from here on."""

    def __init__(self, pids: list[int]):
        self._pids, self._before = pids, {}
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the kernel's high-water mark starts anew
            self._before[pid] = self._read(pid, "VmRSS")

    @staticmethod
    def _read(pid: int, field: str) -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    def peak(self) -> int:
        return max(self._read(pid, "VmHWM") - self._before[pid] for pid in self._pids)


async def _reload(sockets: list[Path], source: Loaded, folder: Path) -> float:
    """Seconds of the naive way: pause, save a checkpoint, every engine reads it through vLLM's own reload, resume."""
    async def everywhere(path: str, body: Any = None) -> None:
        for answer in await asyncio.gather(*(client.post(path, json=body) for client in clients)):
            assert answer.status == 200, await answer.text()

    clients = [aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(str(socket))) for socket in sockets]
    started = time.perf_counter()
    await everywhere("/pause?mode=keep")
    save_file(source.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    await everywhere("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    await everywhere("/resume")
    seconds = time.perf_counter() - started
    await asyncio.gather(*(client.close() for client in clients))
    return seconds


def settings(folder: Path, model: Path, engines: int, ranks: int, backend: str, bucket_bytes: int | None) -> RunConfig:
    config = base_config(folder, 1000)
    config.actor.model_name_or_path, config.data.max_len, config.data.apply_chat_template = str(model), 512, False
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 1, 2, 1  # the engines idle
    config.vllm.enforce_eager, config.vllm.kv_cache_memory_bytes, config.vllm.num_engines = True, 512 << 20, engines
    config.vllm.tensor_parallel_size = ranks
    config.launch.roll_call_timeout = config.vllm.start_timeout = 180.0
    config.weights.backend, config.weights.bucket_bytes = backend, bucket_bytes or config.weights.bucket_bytes
    config.launch.socket_dir = str(folder / "s")
    (folder / "s").mkdir()
    return config


def measure(model: Path | None = None, mib: int = 64, updates: int = 5, engines: int = 1, ranks: int = 1, backend: str = "gloo",
            bucket_bytes: int | None = None) -> dict[str, Any]:
    """One row: median seconds of an update by activity, bytes, memory, and the ways to compare with; ranks: of one server."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = model or random_model(folder / "model", mib)
        config = settings(folder, model, engines, ranks, backend, bucket_bytes)
        with running_broker(config) as (run, address):
            worker = start_role(run, ["rollout", str(run), "--broker", address, "--attempt", "1"])
            try:
                client, source = actor_client(run, address), Loaded(model)
                sender = make_sender(config.weights, source, 0, "127.0.0.1", run / "weights")
                publisher = Publisher(client, sender, config, torch.device("cpu"))
                while sum(len(w["engines"]) for w in client.request("status")["workers"].values()) < engines:
                    if worker.poll() is not None:
                        raise SystemExit("bench weights: the rollout role ended:\n" + (run / "logs/attempt_1/rollout.log").read_text()[-2000:])
                    time.sleep(0.5)  # the broker ends the run, and so this wait, if they do not come
                trainer, receivers = Memory([os.getpid()]), Memory(descendants(worker.pid))
                publisher.publish(0)
                totals, parts = [], []
                for version in range(1, updates + 1):
                    for tensor in source.tensors.values():
                        tensor.add_(1e-4)  # what has not changed is not loaded again from files
                    started = time.perf_counter()
                    parts.append(publisher.publish(version))
                    totals.append(time.perf_counter() - started)
                memory = {"trainer_extra_bytes": trainer.peak(), "engine_extra_bytes": receivers.peak()}
                client.close()
                shutil.copytree(model, folder / "naive", ignore=shutil.ignore_patterns("*.safetensors"))
                naive = [asyncio.run(_reload(sorted(folder.glob("s/*/engine.sock")), source, folder / "naive")) for _ in range(3)][1:]
            finally:
                worker.terminate()
                worker.wait(30)
        sizes = [bucket.nbytes for bucket in sender.buckets()]
        bare = bare_broadcast(sizes, engines * ranks, updates)
    medians = {name: statistics.median(p[name] for p in parts) for name in parts[0] if name.startswith("seconds_")}
    paused = statistics.median(sum(p[f"seconds_update_{phase}"] for phase in ("pause", "transfer", "resume")) for p in parts)
    total, reload, alone = statistics.median(totals), statistics.median(naive), medians.pop("seconds_update_load_cpu")
    row = {"backend": backend, "engines": engines, "ranks": ranks, "bytes": sum(sizes), "bucket_bytes": config.weights.bucket_bytes,
           "update_seconds": total, "bare_broadcast_seconds": bare, "save_and_reload_seconds": reload, "load_alone_seconds": alone,
           "pause_seconds": paused, "ratio_bare_to_update": bare / total, "ratio_reload_to_update": reload / total,
           "ratio_load_alone_to_update": alone / total, "ratio_bare_to_load_alone": bare / alone,
           "ratio_pause_to_transfer": paused / medians["seconds_update_transfer"], "ratio_bare_to_pause": bare / paused, **memory, **medians}
    dist.destroy_process_group()
    return {"part": "weights", "rows": [row]}
