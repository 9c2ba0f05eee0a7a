"""The broker's ROUTER socket: CURVE, one allowed key, sends that never wait."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

MORE, NOW = int(zmq.SNDMORE | zmq.NOBLOCK), int(zmq.NOBLOCK)
"""Plain numbers: an enumeration's arithmetic would cost as much as the send."""


class AllowedKey:
    """Lets in whoever holds the run's role key, and nobody else."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Front:
    """A bound socket. `address` is where others connect; peers are known by the identity of their first frame."""

    def __init__(self, keys: dict[str, bytes], host: str, max_message_bytes: int):
        self._context = zmq.Context(io_threads=2)
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(credentials_provider=AllowedKey(keys["role_public"]))
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

    def receive(self) -> list[zmq.Frame] | None:
        """The frames of the next message, the sender's identity first; None if there is none now."""
        try:
            return self.socket.recv_multipart(NOW, copy=False)
        except zmq.Again:
            return None

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
