"""Run configurations for the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from molt_hpc.config import RunConfig, dump


@pytest.fixture
def write_config(tmp_path: Path):
    """A function model folder, name, **{dotted option: value} -> path of a TOML file for float32 training on the CPU."""

    def write(model: Path, name: str = "config.toml", **options) -> Path:
        config = RunConfig(output_dir=str(tmp_path / "run"))
        config.actor.model_name_or_path = str(model)
        config.actor.backend = "transformers"
        config.actor.adam.lr = 1e-3
        config.fsdp.param_dtype = "float32"
        config.train.max_tokens_per_gpu = 200
        config.data.prompt_dataset = config.train.agent_path = "unused"
        for dotted, value in options.items():
            *parents, leaf = dotted.split("__")
            node = config
            for parent in parents:
                node = getattr(node, parent)
            setattr(node, leaf, value)
        path = tmp_path / name
        path.write_text(dump(config))
        return path

    return write
