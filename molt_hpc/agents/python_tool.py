"""A Python interpreter as a tool for agents: a fresh, confined process for each call (confine.py)."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from molt_hpc.agents import confine

SCHEMA = {"type": "function", "function": {
    "name": "python", "description": "Run a Python program and get what it prints. Nothing is kept between calls; there is no network.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "the program"}}, "required": ["code"]}}}
"""The tool as an OpenAI function."""


def run_python(code: str, timeout: float = 10.0, memory_mb: int = 1024, output_chars: int = 2048) -> str:
    """What the program prints, standard error included, cut in the middle to `output_chars`; a last line says if it was ended.

    Blocks for at most `timeout` seconds: call it from a thread in async code.
    """
    with tempfile.TemporaryDirectory(prefix="molt_hpc_python_") as folder:
        program, output = Path(folder) / "program.py", Path(folder) / "output"
        program.write_text(code)
        words = [sys.executable, "-I", confine.__file__, "--memory-mb", str(memory_mb), "--seconds", str(timeout), str(program)]
        env = {"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with open(output, "wb") as file:
            process = subprocess.Popen(words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        try:
            exit_code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            end_group(process)
        text, full = _shortened(output, output_chars), output.stat().st_size >= confine.FILE_BYTES
    if exit_code is None:
        ended = f"[ended after {timeout:g} s]"
    elif exit_code < 0:
        ended = f"[ended by {signal.Signals(-exit_code).name}]"
    else:
        ended = f"[ended: more than {confine.FILE_BYTES >> 20} MiB of output]" if full else ""
    return f"{text}\n{ended}".strip()


def end_group(process: subprocess.Popen) -> None:
    """Kill a process that leads a session and everything it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _shortened(path: Path, limit: int) -> str:
    with open(path, "rb") as file:
        head = file.read(4 * limit)
        size = path.stat().st_size
        file.seek(max(size - 4 * limit, 0))
        tail = file.read()
    if size <= 4 * limit and len(text := head.decode(errors="replace").strip()) <= limit:
        return text
    half = limit // 2
    return f"{head.decode(errors='replace')[:half]}\n[...]\n{tail.decode(errors='replace').rstrip()[-half:]}"
