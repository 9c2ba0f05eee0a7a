"""A guard returns what its command returned and leaves nothing behind, however it ends itself."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from molt_hpc.guard import OPEN_FILES, descendants, guarded
from molt_hpc.slurm.leftovers import RUN_ID, end_processes, find_processes

# a child that daemonises and one that stays, both deaf to TERM; then the main process says that all run
STUBBORN = """
import os, signal, subprocess, sys, time
deaf = "import signal, time, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w').close(); time.sleep(600)"
folder = sys.argv[1]
for index in range(2):
    subprocess.Popen([sys.executable, "-c", deaf, f"{folder}/child{index}"], start_new_session=index == 0)
while len([n for n in os.listdir(folder) if n.startswith("child")]) < 2:
    time.sleep(0.01)
open(f"{folder}/ready", "w").close()
if sys.argv[2] == "end":
    sys.exit(5)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""


def wait_until(condition, what: str, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


@pytest.fixture
def tagged():
    """(a run id, an environment that carries it); whatever a failed test leaves is ended."""
    run_id = uuid.uuid4().hex
    yield run_id, {**os.environ, RUN_ID: run_id}
    end_processes(run_id)


def start_stubborn(folder: Path, env: dict, how: str = "stay", **more) -> subprocess.Popen:
    sockets = folder / "sockets"
    sockets.mkdir()
    argv = guarded([sys.executable, "-c", STUBBORN, str(folder), how], cleanup=str(sockets), grace=0.3,
                   control_stdin="stdin" in more, owner=os.getpid())
    guard = subprocess.Popen(argv, env=env, **more)
    wait_until((folder / "ready").exists, "the command's children")
    return guard


def assert_nothing_left(run_id: str, folder: Path):
    wait_until(lambda: not find_processes(run_id), "the end of all processes")
    assert not (folder / "sockets").exists()


def keeper_of(guard: subprocess.Popen) -> int:
    return next(pid for pid in descendants(guard.pid) if "molt_hpc.guard" in Path(f"/proc/{pid}/cmdline").read_text())


@pytest.mark.parametrize("command, code", [(["true"], 0), (["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], 137),
                                           (["sh", "-c", "kill -TERM $$"], 143), (["/no/such/program"], 127)])
def test_exit_code_is_the_commands(command, code):
    assert subprocess.run(guarded(command)).returncode == code


def test_a_command_may_have_more_open_files_than_a_login_shell():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    line = ["sh", "-c", f"ulimit -Sn 300; exec {shlex.join(guarded(['sh', '-c', 'ulimit -Sn']))}"]
    assert int(subprocess.run(line, capture_output=True, check=True).stdout) == min(hard, OPEN_FILES)


def test_descendants_end_with_the_command(tmp_path, tagged):
    run_id, env = tagged
    assert start_stubborn(tmp_path, env, "end").wait(20) == 5
    assert find_processes(run_id) == []
    assert not (tmp_path / "sockets").exists()


def test_everything_ends_when_the_guard_is_killed(tmp_path, tagged):
    run_id, env = tagged
    guard = start_stubborn(tmp_path, env)
    guard.kill()
    guard.wait(20)
    assert_nothing_left(run_id, tmp_path)


def test_everything_ends_when_the_keeper_is_killed(tmp_path, tagged):
    run_id, env = tagged
    guard = start_stubborn(tmp_path, env)
    os.kill(keeper_of(guard), signal.SIGKILL)
    assert guard.wait(20) == 137
    assert_nothing_left(run_id, tmp_path)


def test_everything_ends_when_the_control_pipe_closes(tmp_path, tagged):
    run_id, env = tagged
    guard = start_stubborn(tmp_path, env, stdin=subprocess.PIPE)
    guard.stdin.close()
    assert guard.wait(20) == 137
    assert_nothing_left(run_id, tmp_path)


def test_everything_ends_when_the_owner_is_killed(tmp_path, tagged):
    run_id, env = tagged
    (tmp_path / "sockets").mkdir()
    argv = guarded([sys.executable, "-c", STUBBORN, str(tmp_path), "stay"], cleanup=str(tmp_path / "sockets"), grace=0.3)
    owner = subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *argv], env=env)
    wait_until((tmp_path / "ready").exists, "the command's children")
    owner.kill()
    owner.wait(20)
    assert_nothing_left(run_id, tmp_path)


def test_a_guard_inside_a_guard_still_removes_its_folder(tmp_path, tagged):
    run_id, env = tagged
    (tmp_path / "sockets").mkdir()
    inner = guarded([sys.executable, "-c", STUBBORN, str(tmp_path), "stay"], cleanup=str(tmp_path / "sockets"), grace=0.2)
    outer = subprocess.Popen(guarded(["sh", "-c", '"$@" & wait', "sh", *inner], grace=3.0), env=env)
    wait_until((tmp_path / "ready").exists, "the command's children")
    outer.kill()
    outer.wait(20)
    assert_nothing_left(run_id, tmp_path)


def test_signals_and_control_bytes_reach_the_command(tmp_path):
    script = """
import signal, sys, time
seen = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda n, _: seen.append(n))
print("ready", flush=True)
while len(seen) < 4:
    time.sleep(0.01)
print(sorted(seen), flush=True)
"""
    guard = subprocess.Popen(guarded([sys.executable, "-c", script], control_stdin=True), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert guard.stdout.readline() == b"ready\n"
    guard.stdin.write(bytes([signal.SIGTERM, signal.SIGUSR1]))
    guard.stdin.flush()
    guard.send_signal(signal.SIGINT)
    guard.send_signal(signal.SIGUSR2)
    assert guard.stdout.readline() == str(sorted([15, 10, 2, 12])).encode() + b"\n"
    assert guard.wait(20) == 0


def test_a_guard_whose_owner_is_already_gone_ends_its_command(tagged):
    run_id, env = tagged
    gone = subprocess.Popen(["true"])
    gone.wait(20)
    guard = subprocess.Popen(guarded(["sleep", "600"], owner=gone.pid), env=env)
    assert guard.wait(20) == 143
    assert find_processes(run_id) == []
