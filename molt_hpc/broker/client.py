"""The other end of the broker's socket: keys, hello, requests and what the broker says unasked.

All sockets of a run are CURVE sockets. One key pair belongs to the broker and one to the run's
roles; both lie in <run>/keys.json, readable by the owner only. Whoever lacks them cannot connect,
and nobody on the wire can read along.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from molt_hpc import wire

log = logging.getLogger(__name__)

ACKNOWLEDGE_BYTES = 1 << 20
"""Bytes of a batch after which the broker is told that there is room for more."""
PATIENCE = 20.0
"""Seconds of a wait after which the caller may do something about it."""
KEYS = "keys.json"
ENDPOINT = "endpoint.json"


class RunStopped(Exception):
    """The broker said `stop`; the text is its reason."""


class Refused(ValueError):
    """The broker answered a request with a refusal; the text says why."""


def write_private(path: Path, value: dict[str, Any]) -> None:
    """Write JSON that only the owner can read, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)


def create_keys(run: Path) -> None:
    """Make the key pairs of a run: <run>/keys.json, mode 0600."""
    keys: dict[str, str] = {}
    for owner in ("broker", "role"):
        public, secret = zmq.curve_keypair()
        keys |= {f"{owner}_public": public.decode(), f"{owner}_secret": secret.decode()}
    write_private(run / KEYS, keys)


def read_keys(run: Path) -> dict[str, bytes]:
    path = run / KEYS
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: readable by others (mode {path.stat().st_mode & 0o777:o}); expected 600")
    return {name: value.encode() for name, value in json.loads(path.read_text()).items()}


def _connect(context: zmq.Context, run: Path, address: str) -> zmq.Socket:
    keys = read_keys(run)
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = keys["broker_public"]
    socket.curve_publickey, socket.curve_secretkey = keys["role_public"], keys["role_secret"]
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    # A peer whose node vanished sends no FIN: ZeroMQ's own heartbeats notice and reconnect.
    socket.heartbeat_ivl, socket.heartbeat_timeout = 10_000, 60_000
    if address.startswith("tcp://["):
        socket.ipv6 = True
    socket.connect(address)
    return socket


def _hello(role: str, name: str, attempt: int) -> dict[str, Any]:
    return {"role": role, "name": name, "attempt": attempt, "host": os.uname().nodename}


def _decode(frames: list[Any]) -> wire.Message:
    """A message from the broker. Raises RunStopped if it says so."""
    message = wire.decode(frames)
    if message.kind == "stop":
        raise RunStopped(message.fields["reason"])
    return message


class BrokerClient:
    """A blocking client for one thread: requests one at a time, each with a deadline."""

    def __init__(self, run: Path, address: str, role: str, name: str, attempt: int, timeout: float = 60.0):
        self.address, self.name = address, name
        self._context = zmq.Context()
        self._socket = _connect(self._context, Path(run), address)
        self._next_id = self._taken_bytes = 0
        try:
            self.welcome = self.request("hello", _hello(role, name, attempt), timeout=timeout)
        except Exception:  # nobody else can close what nobody gets
            self.close(linger=0)
            raise

    def call(self, kind: str, fields: dict[str, Any] | None = None, arrays: dict[str, np.ndarray] | None = None,
             timeout: float = 10.0, waiting: Callable[[], None] | None = None) -> wire.Message:
        """Send a request and wait for its reply; `waiting` is called every 20 seconds of the wait.

        Raises TimeoutError after `timeout` seconds, RunStopped if the broker ends the run meanwhile, Refused
        if it says no.
        """
        self._next_id += 1
        self._socket.send_multipart(wire.encode(kind, (fields or {}) | {"request": self._next_id}, arrays), copy=False)
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name}: no answer to {kind!r} from the broker at {self.address} within {timeout:.0f} s")
            if not self._socket.poll(min(left, PATIENCE) * 1000):
                if waiting:
                    waiting()
                continue
            message = _decode(self._socket.recv_multipart())
            if message.fields.get("reply_to") != self._next_id:
                continue
            if message.kind == "refused":
                raise Refused(f"{kind}: {message.fields['reason']}")
            return message

    def notice(self, kind: str) -> dict[str, Any] | None:
        """The fields of the newest message of this kind that came unasked, without waiting; None if there is none. Raises RunStopped."""
        found = None
        while self._socket.poll(0):
            message = _decode(self._socket.recv_multipart())
            found = message.fields if message.kind == kind else found
        return found

    def receive(self, kind: str, timeout: float) -> wire.Message:
        """The next message of this kind that follows a reply (the rollouts of a batch); the broker hears that it was taken."""
        if not self._socket.poll(timeout * 1000):
            raise TimeoutError(f"{self.name}: no {kind!r} from the broker at {self.address} within {timeout:.0f} s")
        frames = self._socket.recv_multipart(copy=False)
        message = _decode(frames)
        assert message.kind == kind, f"expected {kind}, got {message.kind}"
        self._taken_bytes += sum(len(f) for f in frames)
        if self._taken_bytes >= ACKNOWLEDGE_BYTES:
            self._socket.send_multipart(wire.encode("got", {"nbytes": self._taken_bytes}))
            self._taken_bytes = 0
        return message

    def request(self, kind: str, fields: dict[str, Any] | None = None, timeout: float = 10.0) -> dict[str, Any]:
        """`call` for requests whose reply is only fields."""
        return self.call(kind, fields, timeout=timeout).fields

    def close(self, linger: int = 500) -> None:
        """Close after at most `linger` milliseconds for what is still to be sent."""
        self._socket.close(linger=linger)
        self._context.term()


class AsyncBrokerClient:
    """An asyncio client that sends without waiting and yields what arrives; for the rollout worker."""

    def __init__(self, run: Path, address: str, max_message_bytes: int):
        self._context = zmq.asyncio.Context()
        self._socket = _connect(self._context, Path(run), address)
        self._limit = max_message_bytes

    async def hello(self, role: str, name: str, attempt: int, timeout: float = 60.0) -> dict[str, Any]:
        """Introduce this process; returns the broker's welcome. Raises Refused or TimeoutError."""
        await self.send("hello", _hello(role, name, attempt))
        # poll and then receive: a cancelled receive may swallow a message
        if not await self._socket.poll(timeout * 1000):
            raise TimeoutError(f"{name}: no welcome from the broker within {timeout:.0f} s")
        message = await self.receive()
        if message.kind == "refused":
            raise Refused(f"hello: {message.fields['reason']}")
        return message.fields

    async def send(self, kind: str, fields: dict[str, Any] | None = None, arrays: dict[str, np.ndarray] | None = None) -> None:
        """Send one message. Raises wire.WireError if it is larger than broker.max_message_bytes."""
        await self.send_frames(wire.encode(kind, fields, arrays))

    async def send_frames(self, frames: list[Any]) -> None:
        """Send an encoded message."""
        if (size := wire.size_of(frames)) > self._limit:
            raise wire.WireError(f"a message of {size} bytes, the limit is {self._limit} (broker.max_message_bytes)")
        await self._socket.send_multipart(frames, copy=False)

    async def receive(self) -> wire.Message:
        return wire.decode(await self._socket.recv_multipart())

    def close(self) -> None:
        self._socket.close(linger=500)
        self._context.term()


async def cancel_all(tasks: list[asyncio.Task]) -> None:
    """Cancel tasks and wait until they have ended; their errors have been reported before."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def address_towards(host: str, port: int = 9) -> str:
    """The address of this machine that packets to `host` leave from (nothing is sent).

    Raises OSError if the host is unknown.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def wait_for_endpoint(run: Path, attempt: int, timeout: float, alive: Callable[[], bool] = lambda: True) -> str:
    """Wait until this attempt's broker has written <run>/endpoint.json; returns its address.

    Raises TimeoutError, or RuntimeError as soon as `alive()` is false.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            endpoint = json.loads((run / ENDPOINT).read_text())
            if endpoint["attempt"] == attempt:
                return endpoint["address"]
        if not alive():
            raise RuntimeError("the broker ended before it was listening")
        time.sleep(0.05)
    raise TimeoutError(f"the broker did not write {run / ENDPOINT} within {timeout:.0f} s")
