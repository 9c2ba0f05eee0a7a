"""Untrusted code: bounded in time, memory, output, without network, and nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from molt_hpc.agents import score_in_subprocess, scoring
from molt_hpc.agents.python_tool import run_python


def add(a, b):
    return a + b


def hang():
    while True:
        pass


def divide(a, b):
    return a / b


def eat():
    return len(bytearray(8 << 30))


def leave():
    os._exit(3)


COUNT = 0


def count():
    global COUNT
    COUNT += 1
    return COUNT


def connect():
    import socket

    socket.create_connection(("127.0.0.1", 9))


def scribble(everywhere):
    for number in range(3, 64) if everywhere else ():
        with contextlib.suppress(OSError):
            os.write(number, b'{"value": "forged"}\n')
    return "honest"


def stop_host():
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(100)


def test_a_score_comes_back_and_each_call_starts_from_the_same_state():
    assert score_in_subprocess(add, 1, 2) == 3 and score_in_subprocess(add, "a", "b") == "ab"
    assert [score_in_subprocess(count) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("function, args, error, words", [
    (hang, (), TimeoutError, "took longer than 0.5 s"), (divide, (1, 0), RuntimeError, "ZeroDivisionError"), (eat, (), RuntimeError, "MemoryError"),
    (leave, (), RuntimeError, "status 3"), (connect, (), RuntimeError, "PermissionError")])
def test_what_a_grader_must_not_do_is_an_error_and_the_next_call_works(function, args, error, words):
    with pytest.raises(error, match=words):
        score_in_subprocess(function, *args, timeout=0.5)
    assert score_in_subprocess(add, 1, 2) == 3


def test_what_a_grader_writes_elsewhere_is_no_answer():
    with pytest.raises(RuntimeError, match="no value"):
        score_in_subprocess(scribble, True)
    assert [score_in_subprocess(scribble, False) for _ in range(2)] == ["honest", "honest"]


def test_a_grader_that_stops_its_host_is_late_too(monkeypatch):
    monkeypatch.setattr(scoring, "PATIENCE", 1.0)
    with pytest.raises(RuntimeError, match="host of stop_host ended with -9"):
        score_in_subprocess(stop_host, timeout=0.5)
    assert score_in_subprocess(add, 1, 2) == 3


def test_scores_are_computed_side_by_side():
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda i: score_in_subprocess(add, i, i), range(12))) == [2 * i for i in range(12)]


def test_a_function_inside_another_is_refused():
    with pytest.raises(ValueError, match="not defined at the top of a file"):
        score_in_subprocess(lambda: 1)


def test_a_program_prints_its_answer_and_its_traceback():
    assert run_python("print(6 * 7)") == "42"
    assert "ZeroDivisionError" in run_python("1 / 0")


def test_a_program_is_bounded_in_time_memory_and_output():
    assert run_python("while True: pass", timeout=0.5) == "[ended after 0.5 s]"
    assert "MemoryError" in run_python("x = bytearray(4 << 30)")
    long = run_python("print('a' * 100000 + 'end')", output_chars=100)
    assert len(long) < 120 and "[...]" in long and long.endswith("end")
    assert run_python("while True: print('a' * 100000)").endswith("[ended: more than 16 MiB of output]")
    assert run_python("import os; os.kill(os.getpid(), 11)") == "[ended by SIGSEGV]"


def test_a_program_has_no_network():
    assert "PermissionError" in run_python("import socket; socket.socket()")
    assert "PermissionError" in run_python("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import socket; socket.socket()'])")


def test_children_of_a_program_end_with_it(tmp_path):
    mark = tmp_path / "alive"
    code = f"""
import os, time
for _ in range(20):
    if os.fork() == 0:
        try:
            os.setsid()
        except PermissionError:
            pass
        if os.fork() == 0:
            while True:
                open({str(mark)!r}, "a").write("x")
                time.sleep(0.02)
        time.sleep(1000)
"""
    run_python(code, timeout=1.0)
    size = mark.stat().st_size
    time.sleep(0.3)
    assert size > 0 and mark.stat().st_size == size
