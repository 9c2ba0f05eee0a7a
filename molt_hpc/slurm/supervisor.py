"""The life of a run: start every role, watch them, say why it ends, leave nothing behind.

One loop in one thread. It looks at every process five times a second and asks the broker for its
status once a second. The run ends well when the broker ends with 0. A rollout role that dies while the run goes on is
started again by itself; anything else that ends, a role, a deadline, a signal, ends the run with one message that names it.
However it ends, `_stop_everything` is the last thing that happens: a stop message, TERM, take-down by the guards, and a
search for leftovers.
"""

import contextlib
import itertools
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from molt_hpc.broker.client import BrokerClient, Refused, RunStopped, address_towards, wait_for_endpoint
from molt_hpc.config import RunConfig
from molt_hpc.guard import KILL_PATIENCE
from molt_hpc.slurm.console import Console, find_reason, last_lines
from molt_hpc.slurm.leftovers import end_processes
from molt_hpc.slurm.preflight import broker_step
from molt_hpc.slurm.requeue import slurm
from molt_hpc.slurm.roles import RoleCommand, role_command
from molt_hpc.slurm.steps import GUARD_GRACE, Handle, role_environment, start
from molt_hpc.slurm.topology import Step, Topology

LOOK = 0.2
"""Seconds between two looks at the processes."""
STATUS_INTERVAL, STATUS_TIMEOUT = 1.0, 3.0
"""Seconds between two status requests, and until one counts as unanswered."""
ENDPOINT_TIMEOUT = 120.0
"""Seconds for the broker to listen: a cold file system may need a minute for its imports."""
WAIT_REPORT = 30.0
"""Seconds between two lines about the same wait."""
SLURM_REASON_WAIT = 1.0
"""Seconds after Slurm's SIGTERM in which its reason may still appear in a step's log."""
TAKE_DOWN = 2 * GUARD_GRACE + KILL_PATIENCE + 2
"""Seconds that the guards may need to take a role down."""
STOP_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGHUP: "SIGHUP",
                signal.SIGUSR1: "SIGUSR1: the job's time limit is near or it is preempted",
                signal.SIGUSR2: "SIGUSR2: the job is about to be interrupted"}
SAVING = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that leave time to save; after the first one the run hands its job in again itself."""

DONE, FAILED, HANDED_IN = 0, 1, 75
ENDS = {DONE: "done", FAILED: "failed", HANDED_IN: "stopped and handed in again"}


class Failure(Exception):
    """The run must end; the text says why. `handle` is the step whose end is the cause, if one is."""

    def __init__(self, reason: str, handle: Handle | None = None):
        super().__init__(reason)
        self.handle = handle


class Supervisor:
    """Runs one attempt of one run; `run` returns the exit code (0 done, 1 failed or stopped, 75 handed in again)."""

    def __init__(self, config: RunConfig, topology: Topology, run_id: str, attempt: int, logs: Path, env: Mapping[str, str],
                 command: RoleCommand = role_command):
        self.config, self.topology, self.run_id, self.attempt, self.logs = config, topology, run_id, attempt, logs
        self.run_folder, self.env, self.command = Path(config.output_dir).absolute(), env, command
        self.console = Console(logs / "supervisor.log")
        self.broker: Handle | None = None
        self.roles: list[Handle] = []
        self.client: BrokerClient | None = None
        self.status = {"phase": "roll_call", "reason": "", "missing": [], "step": 0, "version": 0}
        self.lines_seen = 0
        self.first_step: int | None = None
        self.asked: int | None = None
        self.ended_early: dict[Handle, float] = {}
        self.restarts: Counter[Step] = Counter()

    def run(self) -> int:
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        code, reason = FAILED, "the supervisor ends"
        try:
            self._start_broker()
            for step in self.topology.steps:
                self.roles.append(self._start(step, self.address, self.topology.launcher))
            self._watch()
            self._let_roles_end()
            code, reason = DONE, "the run is done"
        except Failure as failure:
            reason = str(failure)
            self._report(failure)
        finally:
            self._stop_everything(reason)
            code = self._hand_in_again() if self.asked == signal.SIGUSR1 and code == FAILED else code
            self.console.say(f"run {self.run_folder}: {ENDS[code]} after step {self.status['step']}")
            self.console.close()
        return code

    def _on_signal(self, number: int, _frame: object) -> None:
        self.asked = self.asked or number

    def _check_asked(self) -> None:
        if self.asked is None:
            return
        if self.asked in SAVING and self.client is not None and self.status["phase"] == "running":
            self._save()
        deadline, reason = time.monotonic() + SLURM_REASON_WAIT, ""
        while self.asked == signal.SIGTERM and self.topology.launcher == "srun" and time.monotonic() < deadline:
            reason = max((handle.slurm_reason() for handle in self.roles), key=len, default="")  # the longest one names the node
            time.sleep(LOOK)
        raise Failure(f"stopped by {STOP_SIGNALS[self.asked]}" + (f": {reason}" if reason else ""))

    def _save(self) -> None:
        """Have the actor save, so that the next attempt need not train again what was trained since the last checkpoint."""
        grace = self.config.launch.save_grace
        self.console.say(f"waiting up to {grace:.0f} s (launch.save_grace) for the actor to end its step and to save")
        try:
            self.console.say(f"saved after step {self.client.request('save', timeout=grace)['step']}")
        except (TimeoutError, Refused, RunStopped) as error:
            self.console.say(f"not saved: {error}")

    # starting ------------------------------------------------------------------------------

    def _start(self, step: Step, where: str, launcher: str) -> Handle:
        env = role_environment(self.env, step, self.run_id, launcher, self.config.launch.pass_env)
        argv = self.command(step, self.run_folder, self.attempt, where)
        self.console.say(f"starting {step.role} on {','.join(step.nodes)}, {step.omp_threads} threads a process")
        try:
            return start(launcher, step, argv, env, self.logs)
        except OSError as error:
            raise Failure(f"{step.role} cannot be started: {error}") from None

    def _start_broker(self) -> None:
        self.broker = self._start(broker_step(), listening_host(self.topology), "local")
        try:
            address = wait_for_endpoint(self.run_folder, self.attempt, ENDPOINT_TIMEOUT, self._broker_lives)
        except RuntimeError:
            raise self._end_of(self.broker) from None
        except TimeoutError as error:
            raise Failure(str(error), self.broker) from None
        try:
            self.client = BrokerClient(self.run_folder, address, "supervisor", "supervisor", self.attempt, timeout=ENDPOINT_TIMEOUT)
        except (TimeoutError, Refused, RunStopped) as error:
            raise Failure(f"the broker at {address} cannot be asked: {error}", self.broker) from None
        self.address = address
        self.console.say(f"the broker listens on {address}")

    def _broker_lives(self) -> bool:
        self._check_asked()
        return self.broker.poll() is None

    # watching ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Return when the broker has ended with 0; raise Failure for everything else that ends the run."""
        started = last_answer = time.monotonic()
        next_status, self.next_report = started, started + WAIT_REPORT
        while True:
            self._check_asked()
            if self.broker.poll() is not None:
                if self.broker.poll() == 0:
                    return
                raise self._end_of(self.broker)
            for handle in list(self.roles):
                self._look_at(handle)
            now = time.monotonic()
            if now >= next_status:
                last_answer = now if self._ask_status() else last_answer
                next_status = time.monotonic() + STATUS_INTERVAL
            if now - last_answer > self.config.broker.heartbeat_timeout:
                raise Failure(f"the broker at {self.address} has not answered for {now - last_answer:.0f} s", self.broker)
            self._check_roll_call(now - started)
            time.sleep(LOOK)

    def _check_roll_call(self, waited: float) -> None:
        """Say whom the roll call waits for, end it at its deadline."""
        if self.status["phase"] != "roll_call":
            total = self.status.get("total_steps", "?")
            self.console.waiting(f"{self.status['phase']}: step {self.status['step']} of {total}, weights version {self.status['version']}")
            return
        missing, limit = ", ".join(self.status["missing"]) or "the broker's first status", self.config.launch.roll_call_timeout
        text = f"waiting for {missing} to report ({waited:.0f} of {limit:.0f} s)"
        self.console.waiting(text)
        if waited > limit:
            raise Failure(f"roll call: no report within {limit:.0f} s (launch.roll_call_timeout) from {missing}")
        if time.monotonic() >= self.next_report:
            self.console.say(text)
            self.next_report += WAIT_REPORT

    def _ask_status(self) -> bool:
        """Fetch the broker's status and print its new step lines; False if no answer came."""
        try:
            answer = self.client.request("status", {"lines_from": self.lines_seen}, timeout=STATUS_TIMEOUT)
        except TimeoutError:
            return False
        except RunStopped as stop:
            answer = self.status | {"phase": "failed", "reason": str(stop), "step_lines": []}
        if answer["phase"] == "running" and self.status["phase"] == "roll_call":
            self.console.say("every role has reported: the run begins")
        self.status = answer
        self.first_step = answer["step"] if self.first_step is None else self.first_step
        for line in answer["step_lines"]:
            self.console.say(line)
        self.lines_seen += len(answer["step_lines"])
        if answer["phase"] == "failed":
            raise Failure(answer["reason"] or "the broker gave no reason", self._first_ended())
        return True

    def _look_at(self, handle: Handle) -> None:
        """Raise Failure if this step has ended and should not have."""
        code = handle.poll()
        if code is None:
            return
        if handle not in self.ended_early:
            self.ended_early[handle] = time.monotonic() + self.config.launch.stop_grace
            self._ask_status()
        if self.status["phase"] != "done" and (code != 0 or time.monotonic() > self.ended_early[handle]):
            failure = self._end_of(handle)
            if code == 0 or not self._start_again(handle, failure):
                raise failure

    def _start_again(self, handle: Handle, failure: Failure) -> bool:
        """Start a rollout role anew whose end does not end the run; False if it may not be. Its leases go to others meanwhile."""
        step, limit = handle.step, self.config.launch.max_restarts
        if step.role != "rollout" or self.status["phase"] != "running" or self.restarts[step] >= limit or handle.slurm_reason():
            return False
        self.restarts[step] += 1
        self.console.say(f"{failure}; the role is started again, time {self.restarts[step]} of {limit} (launch.max_restarts)")
        self.roles[self.roles.index(handle)] = self._start(step, self.address, self.topology.launcher)
        return True

    def _first_ended(self) -> Handle | None:
        """The step that ended badly, once those that are about to end had a moment to do so."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for handle in self.roles:
                if handle.poll() not in (None, 0):
                    return handle
            time.sleep(LOOK)
        return None

    def _end_of(self, handle: Handle) -> Failure:
        """What to say about a step that ended: task, node, how, and why if its log or the broker knows."""
        task, how = handle.ends()[0]
        early = "" if handle.poll() else " before the run was done"
        # who is killed cannot say why: the last error in its log is an older one
        reason = "" if how in ("killed", "killed by SIGKILL") else find_reason(task.log)
        reason = reason or handle.launcher_message()
        if handle is not self.broker and self.status["phase"] == "failed":
            reason = self.status["reason"]
        verb = "was" if how.startswith("killed") else "ended with"
        return Failure(f"{task.name} on node {task.node} {verb} {how}{early}" + (f": {reason}" if reason else ""), handle)

    # ending --------------------------------------------------------------------------------

    def _report(self, failure: Failure) -> None:
        """One line with the reason, then the last lines of the logs that explain it."""
        self.console.error(str(failure))
        if failure.handle is not None:
            tasks, count = ([task for task, _ in failure.handle.ends()] or failure.handle.tasks)[:1], 20
        else:
            tasks, count = [] if self.asked else [task for handle in self.roles for task in handle.tasks][:4], 5
        for task in tasks:
            self.console.detail(f"last lines of {task.log}:", last_lines(task.log, count))

    def _let_roles_end(self) -> None:
        """The broker is done: the others have the grace to end by themselves."""
        self.status["phase"] = "done"
        if not self._wait_for_end(self.roles, self.config.launch.stop_grace):
            late = ", ".join(h.role for h in self.roles if h.poll() is None)
            self.console.say(f"{late} did not end within {self.config.launch.stop_grace:.0f} s (launch.stop_grace) of the run's end")

    def _wait_for_end(self, handles: list[Handle], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(h.poll() is None for h in handles):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK / 4)
        return True

    def _hand_in_again(self) -> int:
        """Before the time limit: Slurm starts the job again and the run goes on, unless a whole time limit has brought no step."""
        if self.topology.launcher != "srun":
            return FAILED
        if self.first_step is None or self.status["step"] == self.first_step:
            self.console.error("the job is not handed in again: no step was trained since its start; give it more time")
            return FAILED
        try:
            slurm("scontrol", "requeue", self.env["SLURM_JOB_ID"])
        except ValueError as error:
            self.console.error(f"the job is not handed in again: {error}")
            return FAILED
        self.console.say("the job is handed in again and will go on in this folder")
        return HANDED_IN

    def _stop_everything(self, reason: str) -> None:
        """End what still runs, politely first; returns when nothing of this run is left on this node."""
        self.console.waiting(None)
        handles = [*self.roles, *([self.broker] if self.broker else [])]
        grace = self.config.launch.stop_grace
        if self.client is not None and self.broker.poll() is None:
            with contextlib.suppress(TimeoutError, RunStopped, Refused):  # it ends, or hangs; TERM follows
                self.client.request("stop", {"reason": reason}, timeout=STATUS_TIMEOUT)
            self._wait_for_end(self.roles, grace / 2)
        for action, patience in ((Handle.terminate, grace / 2), (Handle.kill, TAKE_DOWN), (Handle.kill_launcher, TAKE_DOWN)):
            for handle in [h for h in handles if h.poll() is None]:
                if action is Handle.kill_launcher:
                    self.console.say(f"{handle.role} did not end: killing its launcher")
                action(handle)
            self._wait_for_end(handles, patience)
        if self.client is not None:
            self.client.close()
        killed, left = end_processes(self.run_id)
        if killed or left:
            self.console.say(f"processes that had escaped were killed: {killed}; still there: {left}")


def listening_host(topology: Topology) -> str:
    """The address on which the broker listens: loopback for local roles, else the interface that leads to their nodes.

    Raises Failure if no node of the job can be resolved.
    """
    here = socket.gethostname().split(".")[0]
    others = [node for step in topology.steps for node in step.nodes if node != here]
    if topology.launcher == "local" or not others:
        return "127.0.0.1"
    for name in filter(None, itertools.chain(others, map(_slurm_address, others))):
        with contextlib.suppress(OSError):
            return address_towards(name)
    raise Failure(f"the broker cannot tell on which address to listen: none of {', '.join(others)} resolves")


def _slurm_address(node: str) -> str | None:
    """What Slurm itself uses to reach a node, for clusters whose node names do not resolve."""
    try:
        shown = slurm("scontrol", "show", "node", node)
    except ValueError:
        return None
    return next((word.removeprefix("NodeAddr=") for word in shown if word.startswith("NodeAddr=")), None)
