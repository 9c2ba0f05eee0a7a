"""Rollouts a second through the broker, beside a bare ROUTER/DEALER relay of the same payloads.

The producer and the consumer are the same in all cases: one process that makes rollouts as fast as it is allowed
to, and this process that takes them. The broker is measured as it is configured by default, where a payload beyond
broker.inline_bytes goes through a file of its producer, and with every payload on the socket (`inline`); the bare
relay with CURVE, which the broker's sockets have, and without.
"""

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from bench_run import actor_client, base_config, publish, running_broker, spawn

from molt_hpc import wire
from molt_hpc.broker.client import BrokerClient
from molt_hpc.config import BrokerConfig
from molt_hpc.data.references import Producer, resolve

CREDITS = 128
BATCH, SAMPLES = 64, 8


def measure(sizes: list[int] = [1024, 65536, 1048576], seconds: float = 5.0) -> dict[str, Any]:
    """One row a payload size: rollouts/s and MB/s of the broker, of the bare relays, and their ratios."""
    rows = []
    for size in sizes:
        broker, inline = _broker(size, seconds, BrokerConfig().inline_bytes), _broker(size, seconds, 1 << 30)
        bare, plain = _bare(size, seconds, True), _bare(size, seconds, False)
        rows.append({"payload_bytes": size, "broker_per_s": broker, "broker_mb_per_s": broker * size / 1e6, "inline_per_s": inline,
                     "bare_curve_per_s": bare, "bare_plain_per_s": plain, "ratio_to_bare_curve": broker / bare,
                     "ratio_to_bare_plain": broker / plain, "inline_to_bare_curve": inline / bare})
    return {"rows": rows}


# through the broker ----------------------------------------------------------------------------


def _produce(run: Path, address: str, size: int, inline_bytes: int) -> None:
    """A scripted rollout worker: answers each lease with a payload of `size` bytes, and updates at once."""
    client = BrokerClient(run, address, "rollout", "rollout_n0", 1)
    socket, payload, producer = client._socket, np.zeros(size, np.uint8), Producer(run, "rollout_n0")
    socket.send_multipart(wire.encode("ready", {"engines": {"e0": 1}}))
    socket.send_multipart(wire.encode("credits", {"credits": CREDITS}))
    answers = {"pause": "paused", "transfer": "applied", "resume": "resumed"}
    while socket.poll(20_000):
        message = wire.decode(socket.recv_multipart())
        fields = message.fields
        if message.kind == "stop":
            return
        if message.kind in answers:
            socket.send_multipart(wire.encode("engine_answer", {"answer": answers[message.kind], "engine": "e0", "version": fields["version"],
                                                                "epoch": fields["epoch"], "checksum": "x"}))
        heads = [{k: lease[k] for k in ("group_id", "sample", "attempt")} | {"credits": 1} for lease in fields.get("leases", ())]
        messages = [wire.encode("rollout", head, {"payload": payload}) for head in heads]
        for frames in producer.put(messages) if messages and size > inline_bytes else messages:
            socket.send_multipart(frames, copy=False)


def _broker(size: int, seconds: float, inline_bytes: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = base_config(Path(folder), 200_000 if size < 100_000 else 20_000)
        config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.max_lag = BATCH, SAMPLES, 1
        with running_broker(config) as (run, address):
            producer = spawn(_produce, run, address, size, inline_bytes)
            client = actor_client(run, address)
            publish(client, 0, 60)
            rate = _consume(run, client, seconds)
            client.close()
            producer.kill()
            producer.join()
    return rate


def _consume(run: Path, client: BrokerClient, seconds: float) -> float:
    count, started = 0, 0.0
    while True:
        batch = client.call("next_batch", timeout=60)
        for _ in range(batch.fields["rollouts"]):
            resolve(run, client.receive("rollout", 60))
        step = batch.fields["step"]
        client.request("trained", {"step": step})
        publish(client, step, 60)
        if step == 1:  # the first batch warms the path
            started = time.perf_counter()
            continue
        count += batch.fields["rollouts"]
        if time.perf_counter() - started > seconds:
            return count / (time.perf_counter() - started)


# bare ------------------------------------------------------------------------------------------


def _relay(ports: Any, keys: tuple | None) -> None:
    """ROUTER in front, DEALER behind: forwards frames, nothing else."""
    context = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for end in (front, back):
        if keys:
            end.curve_server, end.curve_publickey, end.curve_secretkey = True, *keys[0]
    ports.send((front.bind_to_random_port("tcp://127.0.0.1"), back.bind_to_random_port("tcp://127.0.0.1")))
    zmq.proxy(front, back)


def _end(port: int, keys: tuple | None) -> zmq.Socket:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 0
    if keys:
        socket.curve_serverkey = keys[0][0]
        socket.curve_publickey, socket.curve_secretkey = keys[1]
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def _pump(port: int, keys: tuple | None, size: int) -> None:
    """Send `size` bytes for every credit that comes back."""
    socket, payload = _end(port, keys), np.zeros(size, np.uint8)
    for _ in range(CREDITS):
        socket.send_multipart([b"header", payload], copy=False)
    while socket.poll(20_000):
        socket.recv_multipart()
        socket.send_multipart([b"header", payload], copy=False)


def _bare(size: int, seconds: float, curve: bool) -> float:
    keys = (zmq.curve_keypair(), zmq.curve_keypair()) if curve else None
    ours, theirs = multiprocessing.Pipe()
    relay = spawn(_relay, theirs, keys)
    front, back = ours.recv()
    pump = spawn(_pump, front, keys, size)
    socket, count, started = _end(back, keys), 0, 0.0
    while not started or time.perf_counter() - started < seconds:
        frames = socket.recv_multipart(copy=False)
        socket.send_multipart([frames[0], b"credit"])
        count += 1
        if not started and count == CREDITS:
            count, started = 0, time.perf_counter()
    rate = count / (time.perf_counter() - started)
    for process in (pump, relay):
        process.kill()
        process.join()
    socket.close()
    return rate
