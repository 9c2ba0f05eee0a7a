"""One weight update as the trainer sees it: ask the broker, send, hear that the engines serve the version.

Rank 0 speaks with the broker and is in the transfer group; the other ranks only take part in the gathers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from molt_hpc.broker.client import BrokerClient
from molt_hpc.weights.plan import encode_plan
from molt_hpc.weights.publish import GlooSender, NcclSender, SendReport

log = logging.getLogger(__name__)


class Publisher:
    """Publishes versions; `client` is None on ranks other than 0."""

    def __init__(self, client: BrokerClient | None, sender: GlooSender | NcclSender, timeout: float, first_timeout: float):
        self._client, self._sender, self._timeout = client, sender, timeout
        self._first_timeout = first_timeout

    def publish(self, version: int) -> dict[str, float]:
        """Give `version` to every engine; returns seconds by activity and the bytes sent (rank 0 only).

        Raises TimeoutError or Refused with the broker's reason if the engines do not all serve the version in time.
        """
        if self._client is None:
            self._sender.send()
            return {}
        started = time.monotonic()
        # the first update waits for the roll call, the later ones for engines that are up
        begin = self._client.request("update_begin", {"version": version}, timeout=self._first_timeout + self._timeout)
        self._first_timeout = 0.0
        paused = time.monotonic()
        address, port = self._sender.open(begin["world_size"]) if begin["join"] else self._sender.address()
        fields = {"version": version, "master_address": address, "master_port": port, "backend": self._sender.backend}
        self._client.call("update_transfer", fields, {"plan": encode_plan(self._sender.plan())}, timeout=60)
        report = self._transfer(version, begin)
        sent = time.monotonic()
        done = self._client.request("update_sent", {"version": version, "checksum": report.checksum}, timeout=2 * self._timeout + 30)
        seconds = {"pause": paused - started, **report.seconds, "apply": done["seconds"]["transferring"], "verify_resume": time.monotonic() - sent}
        log.info("version %d is served: %d bytes, %s", version, report.nbytes, ", ".join(f"{k} {v:.3f} s" for k, v in seconds.items()))
        return {f"seconds_update_{k}": v for k, v in seconds.items()} | {"update_bytes": float(report.nbytes)}

    def _transfer(self, version: int, begin: dict[str, Any]) -> SendReport:
        try:
            return with_deadline(lambda: self._join_and_send(begin), self._timeout, f"the transfer of version {version}")
        except (RuntimeError, TimeoutError) as error:
            self._client.request("update_sent", {"version": version, "failed": f"{type(error).__name__}: {error}"}, timeout=30)
            raise

    def _join_and_send(self, begin: dict[str, Any]) -> SendReport:
        if begin["join"]:
            self._sender.join(begin["epoch"], begin["world_size"])
        return self._sender.send()


def with_deadline(work: Callable[[], Any], seconds: float, what: str) -> Any:
    """Run `work` on a side thread; TimeoutError if it does not end in time (the thread is then left behind).

    A collective whose peer has vanished may never return, and nothing in Python can interrupt it.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:  # handed to the caller's thread, whatever it is
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True, name=what)
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "value" not in outcome:
        raise TimeoutError(f"{what} did not end within {seconds:.0f} s")
    return outcome["value"]
