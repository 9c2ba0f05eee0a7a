"""The demo from end to end: model, data, warm start, the main job, and what came of it.

    bash launchers/quickstart.sh --out DIR [--model tiny|smollm2] [--slurm] [--seed N] [--section.option value ...]

DIR becomes the run folder (it must be new or empty). The model and data that the main job starts from are made once and kept
in <repository>/.demo, one folder for each recipe and seed; delete it at any time. Options with a dot reach
`python -m molt_hpc run` behind those of the recipe (launchers/demo/*.toml), so they win.

`--slurm` runs the same job as a heterogeneous Slurm job on a cluster of three nodes that tools/local_slurm starts on
this machine and ends again: two nodes train, one rolls out.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
DEMO = REPO / "launchers" / "demo"
sys.path.insert(0, str(DEMO))

import recipe  # a file of launchers/demo

STARTED = time.monotonic()
SLURM_LIMIT_S = 7200
POLL_S = 1.0


def say(message: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f}s] {message}", flush=True)


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="launchers/quickstart.sh", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="run folder, new or empty")
    parser.add_argument("--model", choices=sorted(recipe.RECIPES), default="tiny",
                        help="tiny: made here, minutes; smollm2: the real SmolLM2-135M-Instruct, slow without a GPU")
    parser.add_argument("--slurm", action="store_true", help="as a Slurm job on a local cluster of three nodes")
    parser.add_argument("--seed", type=int, default=0, help="of model, data and run")
    args, rest = parser.parse_known_args(words)
    if rest and not rest[0].startswith("--"):
        parser.error(f"expected an option --section.option, got {rest[0]!r}")
    if any(word.split("=")[0] in ("--output_dir", "--output-dir") for word in rest):
        parser.error("the run folder is given by --out")
    args.out = args.out.resolve()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out {args.out} already has files; choose a new folder, or remove it")
    return args, rest


def run_here(words: list[str]) -> int:
    """The main job as local processes; returns its exit code. A signal to us is the job's to handle: it ends its own processes."""
    job = subprocess.Popen([sys.executable, "-m", "molt_hpc", "run", *words])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: job.send_signal(received))
    return job.wait()


def run_in_slurm(words: list[str], out: Path) -> int:
    """The main job in a Slurm of three local nodes; shows the job's output as it comes. Returns 0 if it completed."""
    log = out.parent / f"{out.name}.slurm.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    # without this a SIGTERM would leave the cluster behind; Ctrl-C raises by itself
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="molt_demo_") as folder:
        tool = [str(REPO / "tools" / "local_slurm"), "--dir", f"{folder}/cluster"]
        Path(folder, "sockets").mkdir()
        os.environ |= {"SLURM_CONF": f"{folder}/cluster/etc/slurm.conf", "MOLT_HPC_PYTHON": sys.executable}
        try:
            say("starting Slurm: a controller and three nodes")
            if subprocess.run([*tool, "up", "--nodes", "3", "--cpus", "2"]).returncode:
                return 1
            words = [*words, "--actor.num_nodes", "2", "--actor.num_procs_per_node", "1", "--launch.cpus_per_node", "1",
                     "--launch.socket_dir", f"{folder}/sockets"]
            done = subprocess.run(["sbatch", "--parsable", "-o", log, "-N2", ":", "-N1", REPO / "sbatch" / "train_rl.sh", *words],
                                  capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"quickstart: sbatch refused the job: {done.stderr.strip()}")
            job = done.stdout.strip().split(";")[0]
            say(f"job {job}: training on two nodes, rollout on a third; its output is {log}")
            return _follow(job, log)
        finally:
            say("ending Slurm")
            subprocess.run([*tool, "down"])


def _follow(job: str, log: Path) -> int:
    """Copy the job's output to ours until it ends; 0 if it completed."""
    from submit_rl import job_info

    shown, deadline = 0, time.monotonic() + SLURM_LIMIT_S
    while time.monotonic() < deadline:
        info = job_info(job)
        output = log.read_bytes() if log.exists() else b""
        sys.stdout.write(output[shown:].decode(errors="replace"))
        sys.stdout.flush()
        shown = len(output)
        if info and info["State"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            say(f"job {job} ended: {info['State']}")
            return 0 if info["State"] == "COMPLETED" else 1
        time.sleep(POLL_S)
    say(f"job {job} has not ended after {SLURM_LIMIT_S} s and is cancelled")
    subprocess.run(["scancel", job])
    return 1


def main(words: list[str] | None = None) -> int:
    args, rest = parse(sys.argv[1:] if words is None else words)
    try:
        start = recipe.prepare(args.model, recipe.RECIPES[args.model], args.seed, REPO / ".demo", say)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 1
    options = [str(start.config), "--actor.model_name_or_path", str(start.model), "--data.prompt_dataset", str(start.prompts),
               "--train.agent_path", str(DEMO / "agent.py"), "--train.seed", str(args.seed), "--output_dir", str(args.out), *rest]
    say("the main job: python -m molt_hpc run " + " ".join(options))
    began = time.monotonic()
    code = run_in_slurm(options, args.out) if args.slurm else run_here(options)
    say(f"the main job ended with exit code {code} after {time.monotonic() - began:.0f} s")
    if code == 0:
        trained = max(args.out.glob("checkpoints/step_*/hf"), default="none was written")
        for what, path in (("picture of the curve", args.out / "reward.png"), ("all metrics", args.out / "metrics.jsonl"),
                           ("every trajectory", args.out / "trajectories"), ("trained model (Hugging Face)", trained)):
            print(f"  {what:<30} {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
