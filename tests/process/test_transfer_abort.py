"""A gloo transfer whose receiver is stopped: the sender gives it up at once, frees the other receivers, and sends again without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from molt_hpc.config import WeightsConfig
from molt_hpc.weights.group import checksum
from molt_hpc.weights.publish import GlooSender
from tests.weight_source import TensorSource

SIZE = 4 << 20


class Receiver:
    def __init__(self, address, rank, world, epoch):
        words = [sys.executable, "-m", "tests.process.receiver", address[0], str(address[1]), str(rank), str(world), str(epoch)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def line(self):
        return self.process.stdout.readline().strip()

    def expect(self, buckets):
        self.process.stdin.write(f"{SIZE}\n" * buckets)
        self.process.stdin.close()


@pytest.fixture
def receivers():
    made = []
    yield made
    for receiver in made:
        receiver.process.kill()
        receiver.process.wait()


def in_background(work):
    result = {}

    def run():
        try:
            result["value"] = work()
        except RuntimeError as error:
            result["error"] = str(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before it joins", "in the transfer"])
def test_a_stopped_receiver_is_given_up_and_the_other_one_gets_everything(receivers, when):
    source = TensorSource({f"w{i}": torch.full((SIZE // 4,), float(i)) for i in range(12)})  # more than the socket buffers hold
    sender = GlooSender(source, WeightsConfig(backend="gloo", timeout=60.0, bucket_bytes=SIZE), 0, "127.0.0.1")
    buckets = len(sender.buckets())
    address = sender.open(3)
    receivers += [Receiver(address, rank, 3, 1) for rank in (1, 2)]
    if when == "before it joins":
        os.kill(receivers[0].process.pid, signal.SIGSTOP)
    joining, joined = in_background(lambda: sender.join(1, 3))
    if when == "in the transfer":
        joining.join(60)
        for receiver in receivers:
            assert [receiver.line(), receiver.line()] == ["here", "joined"]
        os.kill(receivers[0].process.pid, signal.SIGSTOP)
        receivers[1].expect(buckets)
    sender.stage()
    sending, sent = in_background(sender.send) if when == "in the transfer" else (joining, joined)
    time.sleep(1.0)
    assert sending.is_alive()
    started = time.monotonic()
    sender.abort()
    sending.join(30)
    assert "aborted" in sent["error"] and time.monotonic() - started < 10
    if when == "before it joins":
        with pytest.raises(RuntimeError):  # every rank has begun to gather and must come to the end
            sender.send()
    assert "failed: aborted" in receivers[1].process.stdout.read()

    receivers.append(Receiver(sender.open(2), 1, 2, 2))
    receivers[2].expect(buckets)
    sender.join(2, 2)
    sender.stage()
    report = sender.send()
    assert report.nbytes == buckets * SIZE
    assert [receivers[2].line() for _ in range(2)] == ["here", "joined"]
    assert [receivers[2].line() for _ in range(buckets)] == [checksum(t) for t in source.tensors.values()]
    sender.close()
