"""What is shown of a log: its end, and the line that says why."""

from __future__ import annotations

import pytest

from molt_hpc.slurm.console import Console, find_reason, last_lines


def test_last_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(50)))
    assert last_lines(log, 3) == ["line 47", "line 48", "line 49"]
    assert last_lines(tmp_path / "none") == []


@pytest.mark.parametrize("text, reason", [
    ("Traceback (most recent call last):\n  File x\nValueError: bad shape 3\n", "ValueError: bad shape 3"),
    ("20:00 ERROR the worker fails: engine gone\nbye\n", "the worker fails: engine gone"),
    ("molt_hpc: error: no such file\n", "no such file"),
    ("[rank1]: RuntimeError: out of memory\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
     "RuntimeError: out of memory"),
    ("all is well\n", "")])
def test_the_reason_is_found_in_a_log(tmp_path, text, reason):
    (tmp_path / "log").write_text(text)
    assert find_reason(tmp_path / "log") == reason


def test_messages_go_to_the_log_file_too(tmp_path, capsys):
    console = Console(tmp_path / "log")
    console.say("step 1 [x] | reward")
    console.error("it broke")
    console.detail("last lines of y:", ["a", "b"])
    console.close()
    out, err = capsys.readouterr()
    assert out == "step 1 [x] | reward\n"
    assert err == "molt_hpc: error: it broke\nlast lines of y:\n  | a\n  | b\n"
    assert [line[9:] for line in (tmp_path / "log").read_text().splitlines() if line[2] == ":"] == [
        "step 1 [x] | reward", "error: it broke", "last lines of y:"]
