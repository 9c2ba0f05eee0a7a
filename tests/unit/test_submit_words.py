"""The launcher for submitit takes its own options out of the command line and sizes the rollout component."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from molt_hpc.config import RunConfig, load

pytest.importorskip("submitit")
sys.path.insert(0, str(Path(__file__).parents[2] / "launchers"))
from submit_rl import SlurmOptions, SubmitConfig, outside_of_jobs, rollout_component  # noqa: E402


def test_slurm_options_stand_beside_the_runs_own_and_the_job_is_not_told_of_them():
    words = ["--slurm.time", "5", "--train.max_steps", "3", "--slurm.het=false", "--data.shuffle"]
    config = load(SubmitConfig, None, words, check=False)
    assert config.slurm == SlurmOptions(time=5, het=False)
    assert config.run() == load(RunConfig, None, ["--train.max_steps", "3", "--data.shuffle"], check=False)


def test_an_unknown_slurm_option_names_the_nearest():
    with pytest.raises(ValueError, match="unknown option slurm.partion; did you mean slurm.partition"):
        load(SubmitConfig, None, ["--slurm.partion", "x"], check=False)


def test_rollout_nodes_are_sized_like_training_nodes_unless_said_otherwise():
    config = RunConfig()
    config.rollout.num_nodes = 3
    assert rollout_component(config, SlurmOptions(cpus=8, gpus=4)) == {
        "nodes": 3, "ntasks-per-node": 1, "cpus-per-task": 8, "gpus-per-node": 4}
    assert rollout_component(config, SlurmOptions(gpus=4, rollout_gpus=0)) == {"nodes": 3, "ntasks-per-node": 1, "exclusive": True}


def test_a_surrounding_job_is_hidden_from_sbatch():
    os.environ |= {"SLURM_HET_SIZE": "2", "SBATCH_PARTITION": "x"}
    before = os.environ.get("SLURM_CONF")
    try:
        with outside_of_jobs():
            assert not {"SLURM_HET_SIZE", "SBATCH_PARTITION"} & set(os.environ)
            assert os.environ.get("SLURM_CONF") == before
        assert os.environ["SLURM_HET_SIZE"] == "2"
    finally:
        del os.environ["SLURM_HET_SIZE"], os.environ["SBATCH_PARTITION"]
