"""Many sessions on one worker: the chat server in a process of its own, scripted engine with 100 ms latency, real HTTP clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[1] / "scripted_chat_server.py"


@pytest.mark.slow
def test_a_thousand_sessions_speak_at_once_and_descriptors_stay_bounded():
    done = subprocess.run([sys.executable, str(SERVER), "--sessions", "1024", "--turns", "4"], capture_output=True, text=True, timeout=500,
                          env=os.environ | {"PYTHONPATH": str(SERVER.parents[1])})
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["errors"] == 0 and report["replies"] == 4096 and report["segments"] == 1024
    assert report["descriptors_during"] < 1024 + 100 and report["descriptors_after"] < 50
