"""The broker's ROUTER socket: CURVE, one allowed key, sends that never wait; and the batch on its way to the actor."""

import contextlib
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from molt_hpc.broker.client import ACKNOWLEDGE_BYTES
from molt_hpc.broker.store import Store

MORE, NOW = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)
"""Plain numbers: an enumeration's arithmetic would cost as much as the send."""


class Front:
    """A bound socket. `address` is where others connect; peers are known by the identity of their first frame."""

    def __init__(self, keys: dict[str, bytes], host: str, max_message_bytes: int):
        self._context = zmq.Context(io_threads=2)
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(credentials_provider=SimpleNamespace(callback=lambda domain, key: key == keys["role_public"]))
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys["broker_public"], keys["broker_secret"]
        self.socket.router_mandatory = True
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.backlog = 4096
        self.socket.maxmsgsize = max_message_bytes
        self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = 10_000, 60_000
        self.socket.ipv6 = ":" in host
        name = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{name}:{self.socket.bind_to_random_port(f'tcp://{name}')}"

    def waiting(self, most: int) -> Iterator[list[zmq.Frame]]:
        """The messages that wait now, at most so many of them: frames, the sender's identity first."""
        with contextlib.suppress(zmq.Again):
            for _ in range(most):
                yield self.socket.recv_multipart(NOW, copy=False)

    def send(self, identity: bytes, frames: list[Any]) -> bool:
        """Send without ever waiting. False if the peer is not connected any more."""
        try:
            self.socket.send(identity, MORE)
            for frame in frames[:-1]:
                self.socket.send(frame, MORE, copy=False)
            self.socket.send(frames[-1], NOW, copy=False)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False

    def close(self) -> None:
        self._auth.stop()
        self.socket.close(linger=500)
        self._context.term()


class Outgoing:
    """The rollouts of one batch that are not sent yet, and the bytes that are sent and not yet taken.

    As many are under way as the actor has room for, so that no socket queue holds a whole batch.
    """

    def __init__(self, front: Front, store: Store, memory_bytes: int):
        self._front, self._store = front, store
        self._window = max(memory_bytes // 4, 2 * ACKNOWLEDGE_BYTES)
        self._keys: deque[tuple[int, int]] = deque()
        self._identity, self._unread = b"", 0

    def clear(self, identity: bytes) -> None:
        """The actor asks for a batch: nothing of an earlier one is under way."""
        self._keys.clear()
        self._identity, self._unread = identity, 0

    def add(self, keys: list[tuple[int, int]]) -> None:
        self._keys.extend(keys)

    def got(self, nbytes: int) -> None:
        """The actor has taken so many bytes."""
        self._unread -= nbytes

    def pump(self) -> None:
        """Send on while the actor has room; one rollout may overshoot."""
        while self._keys and self._unread < self._window:
            key = self._keys.popleft()
            self._unread += self._store.size(*key)
            self._front.send(self._identity, self._store.frames(*key))
