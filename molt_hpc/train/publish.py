"""One weight update as the trainer sees it: ask the broker, send, hear that the engines serve the version.

Rank 0 speaks with the broker and is in the transfer group; the others only take part in the gathers and are told by small
integers when the next round of them begins. A transfer may be stopped by the broker, because an engine was lost in it; it
is then sent once more, under another epoch, to the engines that are left.
"""

import logging
import time
from functools import partial
from typing import Any

import torch

from molt_hpc import wire
from molt_hpc.broker.client import BrokerClient, RunStopped
from molt_hpc.config import RunConfig
from molt_hpc.train.collectives import announce
from molt_hpc.train.drift import DriftProbe
from molt_hpc.weights.plan import encode_plan
from molt_hpc.weights.publish import Sender, SendReport
from molt_hpc.weights.threads import aside

log = logging.getLogger(__name__)

WAIT, SEND, SERVED = 2, 4, 5
"""What rank 0 announces within an update: nothing yet, gather and send, it is over."""
LOOK = 0.02
"""Seconds between two looks for a word of the broker while the weights are being sent."""


class Publisher:
    """Publishes versions; `client` is None on ranks other than 0."""

    def __init__(self, client: BrokerClient | None, sender: Sender, config: RunConfig, device: torch.device,
                 probe: DriftProbe | None = None):
        self._client, self._sender, self._device, self._probe = client, sender, device, probe
        self._timeout = config.weights.timeout
        # the broker watches every phase; this only ends a wait for a broker that is gone
        self._limit = config.launch.roll_call_timeout + 3 * config.vllm.start_timeout + 10 * self._timeout

    def publish(self, version: int) -> dict[str, float]:
        """Give `version` to every engine; returns seconds by activity and the bytes sent (rank 0 only). All ranks call it.

        Raises TimeoutError, RunStopped with the broker's reason if the version cannot be served, or the drift probe's error.
        """
        self._sender.stage()
        report, probes = {}, {}
        if self._client is not None:
            report, probes = self._conduct(version)
            announce(SERVED, self._device)
        else:
            while (code := announce(WAIT, self._device)) != SERVED:
                if code == SEND:
                    self._sender.send()
        return report | (self._probe.compare(version, probes) if self._probe else {})

    def _ask(self, kind: str, fields: dict[str, Any], arrays: dict[str, Any] | None = None) -> wire.Message:
        return self._client.call(kind, fields, arrays, timeout=self._limit, waiting=lambda: announce(WAIT, self._device))

    def _conduct(self, version: int) -> tuple[dict[str, float], dict[str, bytes]]:
        """Rank 0: send as often as the broker says; the report and what the engines answered to the probe."""
        started, sent = time.monotonic(), SendReport()
        reply = self._ask("update_begin", {"version": version})
        while reply.kind == "send":
            reply, sent = self._send(version, reply.fields)
        done = reply.fields
        phases, engines = done["seconds"], done["engine_seconds"]
        seconds = {"drain": phases["drain"] + phases.get("waiting", 0.0), "pause": phases.get("pausing", 0.0), **sent.seconds,
                   "transfer": phases.get("transferring", 0.0), "abort": phases.get("aborting", 0.0),
                   "apply": sum(engines.get(part, 0.0) for part in ("start", "load", "finish")),
                   "load_cpu": engines.get("load_cpu", 0.0), "verify": engines.get("verify", 0.0),
                   "resume": phases.get("resuming", 0.0), "total": time.monotonic() - started}
        log.info("version %d is served, epoch %d: %d bytes, %s", version, done["epoch"], sent.nbytes,
                 ", ".join(f"{what} {spent:.3f} s" for what, spent in seconds.items()))
        report = {f"seconds_update_{what}": spent for what, spent in seconds.items()}
        report |= {"update_bytes": float(sent.nbytes), "update_epoch": done["epoch"]}
        return report, done["probes"]

    def _send(self, version: int, begin: dict[str, Any]) -> tuple[wire.Message, SendReport]:
        """Send the weights under one epoch; the broker's word on what comes next."""
        epoch = {"version": version, "epoch": begin["epoch"]}
        address, port = self._sender.open(begin["world_size"]) if begin["join"] else self._sender.address()
        arrays = {"plan": encode_plan(self._sender.plan())} | ({"probe": self._probe.tokens} if self._probe else {})
        group = {"master_address": address, "master_port": port, "backend": self._sender.backend}
        reply = self._ask("update_transfer", epoch | group, arrays)
        if reply.kind != "ok":  # an engine was lost before anything was sent
            return reply, SendReport()
        announce(SEND, self._device)
        try:
            sent = self._transfer(begin)
            outcome = {"checksum": sent.checksum}
        except RuntimeError as error:
            log.warning("the transfer of version %d, epoch %d, was not finished: %s", version, begin["epoch"], error)
            sent, outcome = SendReport(), {"failed": str(error)}
            self._sender.abort()  # receivers that are well wait for what will not come: without a word they would count as hung
        return self._ask("update_sent", epoch | outcome), sent

    def _transfer(self, begin: dict[str, Any]) -> SendReport:
        """Join and send on a side thread while this one listens.

        Raises RuntimeError if the transfer failed or was stopped, TimeoutError if the sender does not come free.
        """
        limit, stopped = 2 * self._timeout + 30, False
        deadline = time.monotonic() + limit

        def look() -> None:
            nonlocal stopped
            try:
                word = None if stopped else self._client.notice("update_stop")
            except RunStopped:
                self._sender.abort()
                raise
            if word and word["epoch"] == begin["epoch"]:
                self._sender.abort()
                stopped = True
            if time.monotonic() > deadline:
                raise TimeoutError(f"the transfer of epoch {begin['epoch']} did not end within {limit:.0f} s")

        return aside(partial(self._join_and_send, begin), look, LOOK)

    def _join_and_send(self, begin: dict[str, Any]) -> SendReport:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        failure = None
        if begin["join"]:
            try:
                self._sender.join(begin["epoch"], begin["world_size"])
            except RuntimeError as error:
                failure = error
        try:
            return self._sender.send()  # even if nobody listens: the other ranks have begun to gather
        except RuntimeError as error:
            raise failure or error from None
