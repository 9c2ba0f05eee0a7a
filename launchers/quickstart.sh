#!/bin/bash
# From a fresh clone to a trained policy, on a machine without a GPU:
#
#   bash launchers/quickstart.sh --out DIR [--model smollm2] [--slurm] [--seed N] [--section.option value ...]
#
# Makes .venv in the repository (a few minutes the first time, nothing when run again); the rest is
# launchers/quickstart.py, which gets all arguments.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$here/setup_venv.sh"
exec "$here/../.venv/bin/python" "$here/quickstart.py" "$@"
