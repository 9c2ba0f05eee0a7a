"""A real vLLM server: what the rollout worker relies on."""

import asyncio

import numpy as np
import pytest

from molt_hpc.config import RunConfig
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.generate import generate
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


def test_long_seeded_prompts_survive_and_one_seed_gives_one_answer(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3)
    config.data.max_len = 4096
    prompts = [[int(t) for t in np.random.default_rng(i).integers(10, 300, 2500)] for i in range(3)]

    async def body(engine):
        first = await asyncio.gather(*(generate(engine, p, 8, 1.0, 5, f"a{i}") for i, p in enumerate(prompts)))
        second = await asyncio.gather(*(generate(engine, p, 8, 1.0, 5, f"b{i}") for i, p in enumerate(prompts)))
        other = await generate(engine, prompts[0], 8, 1.0, 6, "c")
        return first, second, other

    first, second, other = with_engine(config, tmp_path, body)
    for a, b in zip(first, second):
        assert a.token_ids.tolist() == b.token_ids.tolist() and np.isfinite(a.logprobs).all()
        assert a.version_spans.tolist() == [[0, len(a.token_ids), 7]]
    assert other.token_ids.tolist() != first[0].token_ids.tolist()
