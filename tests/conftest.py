"""Fixtures shared by all tests: tiny models, and a quiet, single-threaded environment for them and their children."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No test is timed: a busy machine must not fail one.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# Spinning OpenMP threads on shared cores cost more than the tests' arithmetic; children inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory):
    """A function kind, **options -> folder; each variant is made once a session."""
    from tests.tiny import make_tiny

    made: dict[tuple, Path] = {}

    def get(kind: str, **options) -> Path:
        key = (kind, *sorted(options.items()))
        if key not in made:
            made[key] = make_tiny(kind, tmp_path_factory.mktemp(kind), **options)
        return made[key]

    return get


@pytest.fixture(scope="module")
def process_group():
    """torch.distributed for this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_models) -> Path:
    return tiny_models("qwen3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole folders are slow: they start training ranks, model servers or a Slurm, of which there is one. Tests of a file run one by one."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group("slurm" if folder == "slurm" else item.path.stem))
        if folder in ("train", "e2e", "slurm"):
            item.add_marker(pytest.mark.slow)
