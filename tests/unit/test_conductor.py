"""The conductor: what the workers and the trainer are told in which order, for cases that need several engines in one worker."""

from __future__ import annotations

from molt_hpc import wire
from molt_hpc.broker.conductor import Conductor
from molt_hpc.broker.fleet import NOTHING, Fleet, Peer
from molt_hpc.config import RunConfig


class Stage:
    """A conductor over workers `w0` and `w1` with two engines each; everything that it says is kept."""

    def __init__(self):
        self.fleet, self.told, self.replies, self.opened, self.lost, self.failed = Fleet(8), [], [], [], [], []
        for worker in ("w0", "w1"):
            peer = Peer(worker.encode(), "rollout", worker, "host", 0.0, ready=True)
            self.fleet.add(peer)
            for index in range(2):
                self.fleet.engine_ready(peer, f"{worker}_e{index}", 1)
        self.conductor = Conductor(RunConfig(), self.fleet, self.send, self.reply, self.opened.append, self.lost.append, self.failed.append)

    def send(self, identity, kind, fields, frames=(), specs=()):
        self.told.append((kind, fields.get("engine", "")))
        return True

    def reply(self, identity, request, kind, fields):
        self.replies.append((kind, fields))

    def answer(self, kind, *engines, epoch=1):
        for engine in engines:
            self.conductor.engine_answer({"answer": kind, "engine": engine, "version": 0, "epoch": epoch, "checksum": "aa"}, 1.0)

    def transfer(self, epoch):
        fields = {"version": 0, "epoch": epoch, "master_address": "x", "master_port": 1, "backend": "gloo"}
        self.conductor.transfer(wire.decode(wire.encode("update_transfer", fields)), 2, 1.0)


def test_a_worker_that_is_lost_takes_all_its_engines_out_at_once():
    stage = Stage()
    stage.conductor.begin(b"actor", 1, 0, True, 0.0)
    stage.answer("paused", "w0_e1", "w1_e0", "w1_e1")
    peer = stage.fleet.named("w0")
    engines = {name: state.lost_at() for name, state in peer.engines.items()}
    stage.fleet.remove(peer)
    stage.conductor.engines_lost(engines, "w0 is gone", 1.0)
    while stage.replies[-1][0] == "send" and not stage.opened:
        epoch = stage.replies[-1][1]["epoch"]
        stage.transfer(epoch)
        stage.answer("aborted", "w1_e0", "w1_e1", epoch=epoch)
        if stage.replies[-1][0] == "ok":
            stage.answer("applied", "w1_e0", "w1_e1", epoch=epoch)
            stage.conductor.sent({"version": 0, "epoch": epoch, "checksum": "aa"}, 3, 1.0)
            stage.answer("resumed", "w1_e0", "w1_e1", epoch=epoch)
    assert stage.opened == [0] and stage.replies[-1][0] == "done" and not stage.failed
    assert sorted(stage.lost) == [f"w0_e{i} while {phase} version 0: w0 is gone" for i, phase in ((0, "pausing"), (1, "transferring"))]
    assert {name: e.served for name, e in stage.fleet.engines.items()} == {"w1_e0": 0, "w1_e1": 0}


def test_admission_opens_with_the_first_engine_that_serves_and_each_counts_from_its_own_proof():
    stage = Stage()
    stage.conductor.begin(b"actor", 1, 0, True, 0.0)
    everybody = sorted(stage.fleet.engines)
    stage.answer("paused", *everybody)
    stage.transfer(1)
    stage.answer("applied", *everybody)
    assert not stage.opened
    stage.conductor.sent({"version": 0, "epoch": 1, "checksum": "aa"}, 3, 1.0)
    assert not stage.opened and [e for kind, e in stage.told if kind == "resume"] == everybody
    stage.answer("resumed", "w1_e0")
    assert stage.opened == [0]
    assert {name for name, e in stage.fleet.engines.items() if e.served == 0} == {"w1_e0"}
    assert stage.fleet.engines["w0_e0"].served == NOTHING


def test_an_update_waits_for_the_roll_call():
    stage = Stage()
    stage.conductor.begin(b"actor", 1, 0, False, 0.0)
    assert not stage.told
    stage.conductor.roll_call_done(5.0)
    assert len(stage.told) == 4
    stage.answer("paused", *sorted(stage.fleet.engines))
    assert stage.replies == [("send", {"epoch": 1, "join": True, "world_size": 5})]


def test_a_dropped_engine_is_told_once_and_its_own_report_adds_nothing():
    stage = Stage()
    stage.conductor.begin(b"actor", 1, 0, True, 0.0)
    stage.answer("paused", "w0_e1", "w1_e0", "w1_e1")
    stage.conductor.expire(1000.0)
    peer = stage.fleet.named("w0")
    stage.conductor.engine_gone(peer, {"engine": "w0_e0", "reason": "dropped", "starting": True}, 1001.0)
    assert [e for kind, e in stage.told if kind == "drop"] == ["w0_e0"] and len(stage.lost) == 1
    assert "w0_e0" not in stage.fleet.ready_engines()
    stage.conductor.engine_ready(peer, {"engine": "w0_e0", "world_size": 1}, 1002.0)
    assert stage.fleet.stale_engines(0) >= {"w0_e0"}


def test_a_restarted_worker_takes_the_update_up_however_long_its_servers_took_to_start():
    stage = Stage()
    stage.conductor.begin(b"actor", 1, 0, True, 0.0)
    for name in ("w0", "w1"):
        peer = stage.fleet.named(name)
        engines = {engine: state.lost_at() for engine, state in peer.engines.items()}
        stage.fleet.remove(peer)
        stage.conductor.engines_lost(engines, f"{name} is gone", 1.0)
    back = Peer(b"w2", "rollout", "w0", "host", 2.0)
    stage.fleet.add(back)
    late = 1.0 + RunConfig().weights.timeout + RunConfig().vllm.start_timeout - 5
    stage.conductor.expire(late)
    assert not stage.failed
    back.ready = True
    stage.fleet.engine_ready(back, "w0_e0", 1)
    stage.conductor.expire(late + 1)
    assert not stage.failed and stage.told[-1] == ("pause", "w0_e0")
