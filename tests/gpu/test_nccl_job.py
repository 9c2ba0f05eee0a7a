"""The main job with its GPU parts: nccl weight transfer, bfloat16 engine, NCCL collectives. Needs two GPUs on one node."""

from pathlib import Path

import pytest
import torch

from molt_hpc.observe.metrics import read_metrics
from tests.e2e.test_main_job import processes_of, start
from tests.process_run import small_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1200),
              pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_the_main_job_publishes_over_nccl(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3, prompts=12)
    config.weights.backend, config.actor.num_procs_per_node, config.actor.adam.lr = "nccl", 1, 1e-3
    config.fsdp.param_dtype, config.vllm.dtype, config.vllm.kv_cache_memory_bytes = "bfloat16", "bfloat16", None
    process = start(config, tmp_path)
    output, _ = process.communicate(timeout=1000)
    assert process.returncode == 0, output
    records = read_metrics(Path(config.output_dir))
    assert [r["version"] for r in records] == [1, 2, 3]
    assert all(r["logprob_gap_mean"] < 0.05 for r in records)
    assert processes_of(Path(config.output_dir)) == []
