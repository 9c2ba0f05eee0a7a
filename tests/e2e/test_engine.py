"""A real vLLM server: what the rollout worker relies on."""

import asyncio
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from molt_hpc.config import FsdpConfig, RunConfig
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.generate import generate
from molt_hpc.train.logprob import Kept, pack_segments
from molt_hpc.train.model import build_model
from tests.process_run import small_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def with_engine(config: RunConfig, tmp_path, body):
    async def main():
        engine = Engine("test", config, 0, 0, tmp_path / "engine.log")
        try:
            await engine.wait_healthy()
            await engine.post("/update_weight_version", {"new_version": "7"})
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_long_seeded_prompts_and_idle_connections_survive_one_seed_gives_one_answer_and_what_is_given_up_ends(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3)
    config.data.max_len = 4096
    prompts = [[int(t) for t in np.random.default_rng(i).integers(10, 300, 2500)] for i in range(3)]

    async def body(engine):
        idle = await asyncio.open_unix_connection(engine.socket)
        assert b" 200 " in await health(*idle)
        idle_until = time.monotonic() + 6  # vLLM's own limit is five seconds
        first = await asyncio.gather(*(generate(engine, p, 8, 1.0, 5, f"a{i}") for i, p in enumerate(prompts)))
        second = await asyncio.gather(*(generate(engine, p, 8, 1.0, 5, f"b{i}") for i, p in enumerate(prompts)))
        other = await generate(engine, prompts[0], 8, 1.0, 6, "c")
        nucleus = await generate(engine, prompts[0][:40], 60, 0.8, 5, "d", top_p=0.9, top_k=200)
        await asyncio.sleep(max(0.0, idle_until - time.monotonic()))
        assert b" 200 " in await health(*idle)
        idle[1].close()
        given_up = asyncio.create_task(generate(engine, prompts[0][:10], 4000, 1.0, 5, "e"))
        await until_running(engine, 1)
        given_up.cancel()
        await until_running(engine, 0)
        return first, second, other, nucleus

    first, second, other, nucleus = with_engine(config, tmp_path, body)
    for a, b in zip(first, second):
        assert a.token_ids.tolist() == b.token_ids.tolist() and np.isfinite(a.logprobs).all()
        assert a.version_spans.tolist() == [[0, len(a.token_ids), 7]]
    assert other.token_ids.tolist() != first[0].token_ids.tolist()
    ratio = np.exp(over_nucleus(tiny_qwen3, prompts[0][:40], nucleus.token_ids, 0.8, 0.9, 200) - nucleus.logprobs)
    assert np.abs(ratio - 1).max() < 1e-5


async def health(reader, writer) -> bytes:
    writer.write(b"GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
    return await reader.readuntil(b"\r\n\r\n")


async def until_running(engine, count: int) -> None:
    """Until vLLM itself says that so many requests are in it: one that nobody waits for any more must not keep it busy."""
    while True:
        async with engine._client().get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        running = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running")]
        assert running
        if sum(running) == count:
            return
        await asyncio.sleep(0.05)


def over_nucleus(folder, prompt, sampled, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """What the trainer says of `sampled` if the sampling masks are as they should be: worked out here, from the model in float64."""
    ids = np.concatenate([prompt, sampled]).astype(np.int64)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.tensor(ids)[None]).logits[0, len(prompt) - 1:-1]
    probabilities, order = torch.softmax(torch.topk(logits / temperature, top_k)[0], -1), torch.topk(logits, top_k)[1]
    counts = ((probabilities.cumsum(-1) - probabilities) < top_p).sum(-1)
    kept = Kept.of(counts.numpy(), np.concatenate([row[:n].numpy() for row, n in zip(order, counts)]), torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build_model(folder, "transformers", FsdpConfig(param_dtype="float32"))
        packed = pack_segments([ids], [np.arange(len(ids)) >= len(prompt)], [temperature], model.device)
        packed.kept = kept
        with torch.no_grad():
            return model.score(packed)[0].numpy()
    finally:
        dist.destroy_process_group()
