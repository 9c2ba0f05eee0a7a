"""Roles that follow a script: real processes and the real wire, without a model.

    python scripted_roles.py ROLE RUN ATTEMPT WHERE FIRST_RANK SCRIPT

SCRIPT is JSON, role -> how it behaves; what a role does not find there it does well. `broker` ends the run
after {"steps": N}; a role's {"end": ...} makes it misbehave once every role is running, with "once" only in its first life. Each role writes
who and where it is to <run>/placement_*.json.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from molt_hpc import wire
from molt_hpc.broker.client import ENDPOINT, BrokerClient, RunStopped, read_keys, write_private
from molt_hpc.config import RunConfig, load
from molt_hpc.slurm.roles import meeting_point, node_rank, torchrun_line
from molt_hpc.slurm.topology import Step

DEAF_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def scripted(script: dict) -> Callable[[Step, Path, int, str], list[str]]:
    """A RoleCommand for the supervisor that starts these roles."""
    def command(step: Step, run: Path, attempt: int, where: str) -> list[str]:
        return [sys.executable, __file__, step.role, str(run), str(attempt), where, str(step.first_rank), json.dumps(script)]
    return command


class ScriptedBroker:
    """Answers as the contract says; ends the run after `steps` steps, or as its script says."""

    def __init__(self, run: Path, attempt: int, host: str, script: dict):
        self.run, self.script, self.own = run, script, script.get("broker", {})
        self.expected = script.get("expected", ["actor", "rollout_n0"])
        self.peers: dict[bytes, str] = {}
        self.ready: set[str] = set()
        self.board: dict = {}
        self.phase, self.reason, self.lines, self.step = "roll_call", "", [], 0
        keys = read_keys(run)
        context = zmq.Context.instance()
        auth = ThreadAuthenticator(context)
        auth.start()
        auth.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.curve_server, self.socket.linger = True, 500
        self.socket.curve_publickey, self.socket.curve_secretkey = keys["broker_public"], keys["broker_secret"]
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        write_private(run / ENDPOINT, {"address": f"tcp://{host}:{port}", "attempt": attempt})
        self.auth = auth

    def serve(self) -> int:
        next_step, ended = time.monotonic() + 0.1, None
        while ended is None or time.monotonic() < ended:
            if self.socket.poll(50):
                self._answer(self.socket.recv_multipart())
            now = time.monotonic()
            if self.phase == "running" and now > next_step:
                self.step, next_step = self.step + 1, now + 0.1
                self.lines.append(f"step {self.step} | reward {self.step / 10:.2f}")
                with open(self.run / "metrics.jsonl", "a") as file:
                    file.write(json.dumps({"step": self.step, "reward_mean": self.step / 10}) + "\n")
                self._follow_script()
            if self.phase in ("done", "failed") and ended is None:
                ended = now + 1.5
                for peer, name in self.peers.items():
                    if name != "supervisor":
                        self.socket.send_multipart([peer, *wire.encode("stop", {"reason": self.reason or "the run is done"})])
        self.auth.stop()
        return 0 if self.phase == "done" else 1

    def _follow_script(self) -> None:
        if self.step == self.own.get("fail_at"):
            self.phase, self.reason = "failed", "the script says fail"
        elif self.step == self.own.get("freeze_at"):
            time.sleep(600)
        elif self.step == self.own.get("steps", 3):
            self.phase = "done"

    def _answer(self, frames: list[bytes]) -> None:
        peer, message = frames[0], wire.decode(frames[1:])
        fields, reply = message.fields, {}
        if message.kind == "hello":
            self.peers[peer] = fields["name"]
        elif message.kind == "ready":
            self.ready.add(self.peers[peer])
            self.phase = "running" if self.phase == "roll_call" and self.ready >= set(self.expected) else self.phase
        elif message.kind == "status":
            missing = [name for name in self.expected if name not in self.ready]
            reply = {"phase": self.phase, "reason": self.reason, "missing": missing, "step": self.step, "version": self.step,
                     "step_lines": self.lines[fields.get("lines_from", 0):]}
        elif message.kind == "save":
            if not self.own.get("saves", True):
                return
            reply = {"step": self.step}
        elif message.kind == "stop":
            self.phase, self.reason = "failed", fields["reason"]
        elif message.kind == "publish":
            self.board[fields["key"]] = fields["value"]
        elif message.kind == "lookup":
            reply = {"value": self.board.get(fields["key"])}
        self.socket.send_multipart([peer, *wire.encode("ok", reply | {"reply_to": fields["request"]})])


def misbehave(how: str) -> int | None:
    """End in the way that the script names; None: go on."""
    if how == "exit7":
        print("RuntimeError: the script says exit 7", flush=True)
        return 7
    if how == "exit0":
        return 0
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError("the script says raise")
    return None


def await_training_nodes(run: Path, seconds: float = 60.0) -> None:
    """Rank 0 reports for all training nodes, so it waits until they have started, as a real one does in its process group."""
    nodes, deadline = load(RunConfig, run / "config.toml", check=False).actor.num_nodes, time.monotonic() + seconds
    while not all((run / f"placement_actor_{rank}.json").exists() for rank in range(1, nodes)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{nodes} training nodes have not started within {seconds:.0f} s")
        time.sleep(0.05)


def serve_role(name: str, run: Path, attempt: int, address: str, rank: int, script: dict) -> int:
    """Report, stay until the broker says stop, misbehave if the script says so."""
    own = {**script.get(name.split("_")[0], {}), **script.get(name, {}), **script.get(f"{name}@{rank}", {})}
    if own.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", DEAF_CHILD], start_new_session=True)
    where = {"name": name, "rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "environment": dict(os.environ)}
    (run / f"placement_{name}_{rank}.json").write_text(json.dumps(where))
    if name == "actor" and rank == 0:
        await_training_nodes(run)
    client = BrokerClient(run, address, name.split("_")[0], name, attempt)
    if not own.get("silent") and (name != "actor" or rank == 0):
        client.request("ready")
    try:
        while client.request("status")["phase"] != "done":
            once = run / f"misbehaved_{name}_{rank}"
            if client.request("status")["step"] >= 1 and "end" in own and not (own.get("once") and once.exists()):
                once.touch()
                code = misbehave(own["end"])
                if code is not None:
                    return code
            time.sleep(0.05)
    except RunStopped:
        pass
    except TimeoutError:
        return 1
    if own.get("deaf"):
        time.sleep(600)
    return 0


def main(argv: list[str]) -> int:
    role, run, attempt, where, first, script = argv[0], Path(argv[1]), int(argv[2]), argv[3], int(argv[4]), json.loads(argv[5])
    if role == "broker":
        return ScriptedBroker(run, attempt, where, script).serve()
    rank = node_rank(first)
    if role == "rollout":
        return serve_role(f"rollout_n{rank}", run, attempt, where, rank, script)
    ranks = script.get("torchrun")
    if ranks:
        host, port = meeting_point(run, where, attempt, rank, ranks["nodes"])
        program = (str(Path(__file__).with_name("scripted_rank.py")),)
        line = torchrun_line(run, where, attempt, rank, ranks["nodes"], ranks["procs"], host, port, program)
        os.execv(line[0], line)
    return serve_role("actor", run, attempt, where, rank, script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
