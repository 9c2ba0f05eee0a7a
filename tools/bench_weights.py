"""Seconds of a whole weight update with a real vLLM server, beside a bare gloo broadcast of the same bytes.

The update is the product's own path: real broker, real rollout worker, stock `vllm serve`, this process as the trainer's
rank 0 with the whole model in memory (so the gather is free and the figures are those of the protocol and the bytes).
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

import torch
from bench_run import actor_client, base_config, running_broker, start_role

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

        self.tensors = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter((name, t.data) for name, t in self.tensors.items())


def _receive(port: int, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    member = group.join(group.open_store("127.0.0.1", port, 2, False, 60), 1, 1, 2, 60)
    for _ in range(rounds):
        for size in sizes:
            group.broadcast(member, torch.empty(size, dtype=torch.uint8))


def bare_broadcast(sizes: list[int], rounds: int) -> float:
    """Median seconds to broadcast buckets of these sizes to one receiving process."""
    store = group.open_store("127.0.0.1", 0, 2, True, 60)
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(store.port, sizes, rounds + 1), daemon=True)
    receiver.start()
    member = group.join(store, 1, 0, 2, 60)
    buffers, seconds = [torch.zeros(size, dtype=torch.uint8) for size in sizes], []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for buffer in buffers:
            group.broadcast(member, buffer)
        seconds.append(time.perf_counter() - started)
    receiver.join()
    return statistics.median(seconds[1:])


def measure(model: Path | None, mib: int, updates: int) -> dict[str, Any]:
    """One row: median seconds of an update by activity, bytes, and the bare broadcast of the same buckets."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = model or random_model(Path(folder) / "model", mib)
        config = base_config(Path(folder), 1000)
        config.actor.model_name_or_path, config.data.max_len, config.data.apply_chat_template = str(model), 512, False
        config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 1, 2, 1  # the engine idles
        config.vllm.enforce_eager, config.vllm.kv_cache_memory_bytes = True, 64 << 20
        with running_broker(config) as (run, address):
            worker = start_role(run, ["rollout", str(run), "--broker", address, "--attempt", "1"])
            try:
                client = actor_client(run, address)
                sender = make_sender("gloo", Loaded(model), 0, "127.0.0.1", config.weights.bucket_bytes, config.weights.timeout)
                publisher = Publisher(client, sender, config.weights.timeout, config.launch.roll_call_timeout)
                publisher.publish(0)
                totals, parts = [], []
                for version in range(1, updates + 1):
                    started = time.perf_counter()
                    parts.append(publisher.publish(version))
                    totals.append(time.perf_counter() - started)
                client.close()
            finally:
                worker.terminate()
                worker.wait(30)
        sizes = [bucket.nbytes for bucket in sender.plan()]
        bare = bare_broadcast(sizes, updates)
    total, nbytes = statistics.median(totals), sum(sizes)
    row = {"bytes": nbytes, "update_seconds": total, "update_mb_per_s": nbytes / total / 1e6, "bare_broadcast_seconds": bare,
           "bare_mb_per_s": nbytes / bare / 1e6, "ratio_bare_to_update": bare / total}
    row |= {name: statistics.median(p[name] for p in parts) for name in parts[0] if name.startswith("seconds_")}
    return {"part": "weights", "rows": [row]}
