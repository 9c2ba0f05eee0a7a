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
    """Whole folders are slow: they start training ranks, model servers or a Slurm."""
    for item in items:
        if item.path.parent.name in ("train", "e2e", "slurm"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """With -n: a file's tests run one after the other in one process, and so do all that need the one Slurm."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "slurm" if "slurm/" in file else file

    return ByFile(config, log)
