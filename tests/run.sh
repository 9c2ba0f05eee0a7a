#!/usr/bin/env bash
# The tests: `bash tests/run.sh` runs everything that this machine can run, `bash tests/run.sh quick` what takes
# less than three minutes. What is missing is installed first: the virtual environment, and Slurm's packages where
# this is root on a Debian-like machine; elsewhere the tests that need Slurm say that they are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
bash launchers/setup_venv.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

if [ "${1:-}" = quick ]; then
    exec .venv/bin/python -m pytest -m "not slow and not slurm and not engine and not gpu" "${@:2}"
fi
if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing Slurm's packages"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge iproute2 >/dev/null
fi
if ! [ -d .venv/triton ]; then  # in a folder of its own: only one test's server is to see it, see tests/interpreted_vllm.py
    .venv/bin/python -m pip install -q --no-deps --target .venv/triton triton==3.7.1 || echo "triton could not be installed: one test will be skipped"
fi
if ! [ -d .venv/verifiers ]; then  # an environment of its own: it needs an older openai, and sees everything else of the first one
    .venv/bin/python -m venv --without-pip .venv/verifiers
    realpath .venv/lib/python3*/site-packages >"$(echo .venv/verifiers/lib/python3*/site-packages)/outer.pth"
    .venv/verifiers/bin/python -m pip install -q --no-warn-conflicts verifiers==0.4.0 ||
        { rm -rf .venv/verifiers; echo "verifiers could not be installed: one test will be skipped"; }
fi
# two files of tests at a time: most of them wait for servers and ranks to start
base=$(mktemp -d)  # a short name: paths of sockets have little room
.venv/bin/python -m pytest --durations=15 -n 2 --no-loadscope-reorder --basetemp "$base/t" "$@" && rm -rf "$base"
