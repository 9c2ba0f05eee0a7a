"""`molt_hpc run` with scripted roles: `python scripted_run.py SCRIPT CONFIG.toml [--section.option value ...]`."""

from __future__ import annotations

import json
import os
import sys

from scripted_roles import scripted

from molt_hpc.config import RunConfig, load
from molt_hpc.slurm.preflight import this_machine
from molt_hpc.slurm.requeue import take_up
from molt_hpc.slurm.run_folder import open_run_folder
from molt_hpc.slurm.supervisor import Supervisor
from molt_hpc.slurm.topology import plan


def main(script: dict, path: str, overrides: list[str]) -> int:
    config = load(RunConfig, path, overrides, check=False)
    take_up(config, os.environ)
    topology = plan(config, os.environ, this_machine(os.environ))
    run_id, attempt, logs = open_run_folder(config, topology, sys.argv, os.environ)
    return Supervisor(config, topology, run_id, attempt, logs, os.environ, scripted(script)).run()


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    except ValueError as error:
        sys.exit(f"molt_hpc: error: {error}")
