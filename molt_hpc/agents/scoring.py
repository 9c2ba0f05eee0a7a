"""Grading that may hang, eat memory or be attacked by what it reads: each call in a fresh, confined process.

A host process imports the function's file once and forks for every call, so that a call costs milliseconds even if the
file imports sympy, and nothing that one answer does to the interpreter reaches the next.
"""

import atexit
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from molt_hpc.agents.confine import confine

START_SECONDS = 60.0
"""Seconds that a host has for importing the function's file; they do not count as the call's."""

PATIENCE = 10.0
"""Seconds beyond a call's own timeout after which its host counts as stuck."""

_idle: dict[tuple[str, ...], list[subprocess.Popen]] = {}
_lock = threading.Lock()


def score_in_subprocess(function: Callable[..., Any], *args: Any, timeout: float = 5.0, memory_mb: int = 2048) -> Any:
    """`function(*args)`, computed elsewhere: at most `timeout` seconds, `memory_mb` MiB, no network.

    function: defined at the top of a file; arguments and value are JSON. Blocks: call it from a thread in async code. Raises
    TimeoutError, or RuntimeError with the traceback of what it raised or with the signal that ended it.
    """
    if "." in function.__qualname__:
        raise ValueError(f"score_in_subprocess: {function.__qualname__} is not defined at the top of a file")
    key = (inspect.getsourcefile(function) or "", function.__module__, function.__qualname__)
    host = _take(key)
    host.stdin.write(json.dumps({"args": args, "timeout": timeout, "memory_mb": memory_mb}) + "\n")
    host.stdin.flush()
    if not select.select([host.stdout], [], [], timeout + PATIENCE)[0]:
        host.kill()  # it keeps the deadline itself, unless what it ran has stopped it
    line = host.stdout.readline()
    if not line:
        raise RuntimeError(f"score_in_subprocess: the host of {function.__qualname__} ended with {host.wait()}")
    with _lock:
        _idle.setdefault(key, []).append(host)
    answer = json.loads(line)
    if answer.get("late"):
        raise TimeoutError(f"{function.__qualname__} took longer than {timeout:g} s")
    if "error" in answer:
        raise RuntimeError(f"{function.__qualname__} failed: {answer['error']}")
    return answer["value"]


def _take(key: tuple[str, ...]) -> subprocess.Popen:
    with _lock:
        while _idle.get(key):
            if (host := _idle[key].pop()).poll() is None:
                return host
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    words = [sys.executable, "-m", "molt_hpc.agents.scoring", *key]
    host = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    if not select.select([host.stdout], [], [], START_SECONDS)[0] or not host.stdout.readline():
        host.kill()
        raise RuntimeError(f"score_in_subprocess: {key[0]} could not be imported within {START_SECONDS:.0f} s; see this process's log")
    return host


@atexit.register
def _end_hosts() -> None:
    for host in (h for hosts in _idle.values() for h in hosts):
        host.kill()


# the host ----------------------------------------------------------------------------------


def _load(path: str, module: str, name: str) -> Callable[..., Any]:
    if module != "__main__" and importlib.util.find_spec(module.split(".")[0]):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("scored", path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["scored"] = loaded
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def _host(path: str, module: str, name: str) -> None:
    """Answer lines of JSON with lines of JSON until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is no answer
    function = _load(path, module, name)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_call(function, answers.fileno(), **json.loads(line))), file=answers, flush=True)


def _call(function: Callable[..., Any], answers: int, args: list[Any], timeout: float, memory_mb: int) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answers)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # neither the next call's question nor its answer is this one's
        os.close(reading)
        os.setsid()
        _compute(function, args, timeout, memory_mb, writing)
    os.close(writing)
    deadline, raw, ended = time.monotonic() + timeout, b"", False
    while not ended and select.select([reading], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        piece = os.read(reading, 1 << 16)
        raw, ended = raw + piece, not piece
    os.close(reading)
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not ended:
        return {"late": True}
    try:
        return json.loads(raw)
    except ValueError:
        return {"error": f"it ended with status {os.waitstatus_to_exitcode(status)} and no value"}


def _compute(function: Callable[..., Any], args: list[Any], timeout: float, memory_mb: int, writing: int) -> None:
    try:
        confine(memory_mb, timeout)
        raw = json.dumps({"value": function(*args)})
    except BaseException:  # this process ends here, whatever it was
        raw = json.dumps({"error": traceback.format_exc()})
    os.write(writing, raw.encode())
    os._exit(0)


if __name__ == "__main__":
    _host(*sys.argv[1:])
