#!/bin/bash
# Train with reinforcement learning in one plain allocation, for clusters without heterogeneous jobs:
# the first actor.num_nodes nodes train, the next rollout.num_nodes roll out.
#
#   sbatch -N3 --gpus-per-node=8 sbatch/train_rl_plain.sh my_run.toml --actor.num_nodes 2
#
# Arguments, Python and what happens at the time limit: as in train_rl.sh.
#
#SBATCH --job-name=molt_hpc
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive

python=${MOLT_HPC_PYTHON:-${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin/python}
[ -x "$python" ] || [ -n "$MOLT_HPC_PYTHON" ] || python=python
exec "$python" -m molt_hpc run "$@"
