"""Starting a role: as a plain local process, or as an `srun` step; `launcher` is local or srun.

Both keep the write end of a pipe as the role's life line. Its bytes are signals for every task
of the step, its end takes every task down, also when this process was killed: the guard around each
task reads it (see molt_hpc/guard.py), on this node directly and on others through srun.
"""

import contextlib
import fnmatch
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from molt_hpc.guard import guarded
from molt_hpc.slurm.leftovers import RUN_ID
from molt_hpc.slurm.topology import Step, expand_numbers

PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LC_*", "TMPDIR", "LD_LIBRARY_PATH", "PYTHON*",
          "VIRTUAL_ENV", "CONDA_PREFIX", "XDG_CACHE_HOME", "SSL_CERT_*", "*_proxy", "*_PROXY", "HF_*", "TRANSFORMERS_*",
          "TOKENIZERS_*", "TORCH*", "TRITON_*", "VLLM_*", "CUDA*", "NVIDIA_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "SLURM_CONF",
          "MOLT_HPC_*")
"""Variables that a role inherits; `launch.pass_env` adds to them. Everything else stays behind."""

NOT_FOR_SRUN = ("SLURM_EXPORT_ENV", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
                "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND*", "SLURM_MEM_BIND*", "SLURM_EXACT", "SLURM_STEP_*",
                "SLURM_LABELIO", "SLURM_UNBUFFEREDIO")
"""Variables of the job that srun would take as options and that contradict the ones on its line."""

GUARD_GRACE = 6.0
"""Seconds between TERM and KILL inside a role; longer than the grace of the guards that the role starts itself."""


@dataclass(frozen=True)
class Task:
    """One process of a step: its name in messages, its node, the file with its output."""

    name: str
    node: str
    log: Path


class Handle:
    """A started step. `poll` is its exit code once all of it has ended; `srun_log`: srun's own output, of this start from byte `log_start` on."""

    def __init__(self, step: Step, tasks: list[Task], process: subprocess.Popen, srun_log: Path | None, log_start: int):
        self.step, self.role, self.tasks, self.poll = step, step.role, tasks, process.poll
        self._process, self._srun_log, self._log_start = process, srun_log, log_start

    def terminate(self) -> None:
        """Ask every task to end."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended or is being taken down
            self._process.stdin.write(bytes([signal.SIGTERM]))
            self._process.stdin.flush()

    def kill(self) -> None:
        """Take every task down with all its descendants; the guards do it, within seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill_launcher(self) -> None:
        """For a guard or srun that does not end by itself: SIGKILL. The keeper or Slurm does the rest."""
        self._process.kill()

    def ends(self) -> list[tuple[Task, str]]:
        """The tasks known to have ended, with a text such as `exit code 7`, in the order they ended."""
        text, code = self._srun_text(), self.poll()
        launches = dict(re.findall(r"Task launch for \S+ failed on node (\S+): (.+)", text))
        named = [(task, f"a failed launch: {launches[task.node]}") for task in self.tasks if task.node in launches]
        named += [(self.tasks[index], how) for index, how in parse_srun_errors(text) if index < len(self.tasks)]
        return named or ([] if code is None else [(task, describe_code(code)) for task in self.tasks])

    def launcher_message(self) -> str:
        """What srun itself said last; empty for a local process."""
        return next((line for line in reversed(self._srun_text().splitlines()) if line.strip()), "")

    def _srun_text(self) -> str:
        return "" if self._srun_log is None else self._srun_log.read_bytes()[self._log_start:].decode(errors="replace")

    def slurm_reason(self) -> str:
        """Why Slurm ended this step, in its words (`node failure`, `time limit`); empty if it did not say."""
        if self._srun_log is None:
            return ""
        text = self._srun_text()
        text += "".join(task.log.read_text(errors="replace")[-4096:] for task in self.tasks if task.log.exists())
        node = re.search(r"Node failure on (\S+)", text)
        reason = re.search(r"CANCELLED AT \S+ DUE TO ([A-Z ]+)", text)
        return f"node failure on {node[1]}" if node else reason[1].strip().lower() if reason else ""


def command_line(launcher: str, step: Step, argv: list[str], logs: Path) -> list[str]:
    """What `start` runs: `argv` under a guard, by srun once on each node of the step."""
    if launcher == "local":
        return guarded(argv, grace=GUARD_GRACE, control_stdin=True, owner=os.getpid())
    count = len(step.nodes)
    group = [] if step.het_group is None else [f"--het-group={step.het_group}"]
    # --overlap: a step of ours has its nodes for itself, and must not wait for a shell or driver that runs as a step
    return ["srun", *group, f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--cpus-per-task={step.cores}",
            f"--nodelist={','.join(step.nodes)}", f"--job-name={step.role}", "--overlap", "--kill-on-bad-exit=1", "--mpi=none",
            "--export=ALL", "--input=all", f"--output={logs / log_name(step, None)}", "--open-mode=append",
            *guarded(argv, grace=GUARD_GRACE, control_stdin=True)]


def start(launcher: str, step: Step, argv: list[str], env: dict[str, str], logs: Path) -> Handle:
    """Start `argv` once on each node of the step; the tasks' output goes to files in `logs`."""
    tasks = [Task(step.task_name(i), node, logs / log_name(step, i)) for i, node in enumerate(step.nodes)]
    srun_log = logs / f"{log_stem(step)}_srun.log" if launcher == "srun" else None
    with open(srun_log or tasks[0].log, "ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(command_line(launcher, step, argv, logs), env=env, stdin=subprocess.PIPE, stdout=log,
                                   stderr=subprocess.STDOUT, start_new_session=True)
    return Handle(step, tasks, process, srun_log, log_start)


def log_stem(step: Step) -> str:
    return step.role if step.first_rank == 0 else f"{step.role}_from{step.first_rank}"


def log_name(step: Step, index: int | None) -> str:
    """File name of a task's output; without an index srun's pattern for it."""
    if step.role == "broker":
        return "broker.log"
    return f"{log_stem(step)}_n{'%t' if index is None else index}.log"


def role_environment(source: Mapping[str, str], step: Step, run_id: str, launcher: str,
                     extra_names: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a role: allowed variables, its thread count, and for srun the job's own variables."""
    env = {name: value for name, value in source.items() if _matches(name, [*PASSED, *extra_names])}
    if launcher == "srun":
        of_job = {name: value for name, value in source.items() if name.startswith(("SLURM_", "SLURMD_"))}
        env |= {name: value for name, value in of_job.items() if not _matches(name, NOT_FOR_SRUN)}
    if step.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(step.devices)
    return env | {"OMP_NUM_THREADS": str(step.omp_threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", RUN_ID: run_id}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def describe_code(code: int) -> str:
    """`exit code 7`, or the signal's name for 128 + signal and for a negative code."""
    names = {number.value: number.name for number in signal.Signals}
    number = -code if code < 0 else code - 128
    return f"killed by {names[number]}" if number in names else f"exit code {code}"


def parse_srun_errors(text: str) -> list[tuple[int, str]]:
    """(task index, how it ended) from srun's messages, the first end first.

    srun says `srun: error: n3: task 1: Exited with exit code 7` or `...: tasks 0-2: Killed`.
    """
    found = []
    for match in re.finditer(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$", text, re.MULTILINE):
        code = re.search(r"exit code (\d+)", match[2])
        how = describe_code(int(code[1])) if code else match[2].strip().lower()
        found += [(int(index), how) for index in expand_numbers(match[1])]
    return found
