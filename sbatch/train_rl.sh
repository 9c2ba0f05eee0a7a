#!/bin/bash
# Train with reinforcement learning as one heterogeneous job: component 0 trains, component 1 rolls out.
#
#   sbatch sbatch/train_rl.sh my_run.toml --train.agent_path my_agent.py
#
# Everything behind the script's name reaches `python -m molt_hpc run` unchanged. Submit from the folder in
# which `.venv` lies, or name a Python with MOLT_HPC_PYTHON. The #SBATCH values below are defaults; those of
# the command line win, component by component, with a colon between the components:
#
#   sbatch -p gpu -N2 --gpus-per-node=8 : -p gpu -N4 --gpus-per-node=8 sbatch/train_rl.sh my_run.toml \
#       --actor.num_nodes 2 --actor.num_procs_per_node 8 --rollout.num_nodes 4 --vllm.num_engines 32
#
# Before its time limit the job saves and is handed in again. A step and a checkpoint that take more than a minute need an
# earlier signal: --signal=B:USR1@900 --launch.save_grace 800.
#
#SBATCH --job-name=molt_hpc
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH hetjob
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive

# Slurm runs a copy of this file, so the folder of the submission is the only one known. `exec`, so that Python
# gets the signal that Slurm sends before the time limit.
python=${MOLT_HPC_PYTHON:-${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin/python}
[ -x "$python" ] || [ -n "$MOLT_HPC_PYTHON" ] || python=python
exec "$python" -m molt_hpc run "$@"
