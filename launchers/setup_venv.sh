#!/bin/bash
# Makes .venv in the repository with everything that a machine without a GPU needs; does nothing when it is up to date.
#
#   bash launchers/setup_venv.sh
#
# PYTHON names the Python to build the environment with.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repo/.venv
lock=$repo/launchers/requirements-cpu.lock
stamp=$venv/molt_hpc.stamp
base=${PYTHON:-python3}

say() { printf '[%4ss] %s\n' "$SECONDS" "$*"; }

"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "molt_hpc: Python 3.11 or newer is needed, $base is $("$base" --version 2>&1 || true); name another one: PYTHON=python3.12 bash $0 ..." >&2
    exit 1
}

# The stamp holds what the environment was made from: another lock, setup.cfg, Python or place makes it anew.
wanted=$({ cat "$lock" "$repo/setup.cfg"; "$base" --version; echo "$repo"; } | cksum)

pip_option() {  # an option of pip's own configuration or environment: uv does not read them
    local name=$1 variable=PIP_$(echo "$1" | tr 'a-z-' 'A-Z_')
    if [ -n "${!variable:-}" ]; then echo "${!variable}"; else "$venv/bin/python" -m pip config get "global.$name" 2>/dev/null || true; fi
}

install_packages() {
    local word options=()
    for word in $(pip_option find-links); do options+=(--find-links "$word"); done
    [ ${#options[@]} -gt 0 ] && found_links=1 || found_links=0
    for word in $(pip_option extra-index-url); do options+=(--extra-index-url "$word"); done
    word=$(pip_option index-url); [ -z "$word" ] || options+=(--index-url "$word")
    local torch=(--torch-backend cpu)
    # where pip is told of a folder of wheels, the CPU build of torch lies there
    [ $found_links = 0 ] || torch=()
    "$venv/bin/python" -m pip install -q --disable-pip-version-check uv &&
        "$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps --index-strategy unsafe-best-match \
            ${options[@]+"${options[@]}"} ${torch[@]+"${torch[@]}"} -r "$lock" && return 0
    say "uv could not install the packages; trying pip, which takes longer"
    [ $found_links = 1 ] && options=() || options=(--extra-index-url https://download.pytorch.org/whl/cpu)
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps ${options[@]+"${options[@]}"} -r "$lock"
}

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        echo "molt_hpc: this machine has NVIDIA GPUs; this demo runs on its CPU cores. To train on the GPUs, install"
        echo "molt_hpc: into an environment of its own instead:  pip install -e '.[cuda,slurm,envs]'  (see README.md)"
    fi
    say "making $venv"
    rm -rf "$venv"
    "$base" -m venv "$venv"
    say "installing the packages of launchers/requirements-cpu.lock"
    install_packages
    say "installing molt_hpc itself"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e "$repo"
    # without bytecode every process of vLLM would compile its modules anew at each start
    say "compiling bytecode"
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 2 "$venv/lib" >/dev/null 2>&1 || true
    echo "$wanted" > "$stamp"
    say "the environment is ready"
fi
