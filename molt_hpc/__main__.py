"""The commands: `python -m molt_hpc COMMAND ...`.

Nothing heavy is imported here: `check` and `status` must work on a login node that has no torch. An
error of the user's is one line on standard error and exit code 1.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path

from molt_hpc import __version__

USAGE = """usage: python -m molt_hpc COMMAND ...

  run CONFIG.toml [--section.option value ...]     run the training: starts and watches every role
  check CONFIG.toml [--section.option value ...]   all checks of run, and what it would start; starts nothing
  sft CONFIG.toml [--section.option value ...]     supervised fine-tuning on this machine
  status RUN                                       what the run in this folder is doing
  stop RUN [--reason TEXT]                         end the run in this folder
  --version

started by run, one per role: broker, actor, rollout

exit codes of run: 0 done, 1 failed or stopped, 75 stopped before the time limit and handed in to Slurm again. `run --help` lists all options.
"""

BROKER = ("--broker", "address of the broker")
NODE_RANK = ("--node-rank", "rank of this node in its role; unset: Slurm's SLURM_NODEID")


def cmd_run(words: list[str]) -> int:
    """Check everything, make the run folder, supervise the run to its end."""
    from molt_hpc.slurm.preflight import check_run_folder, preflight
    from molt_hpc.slurm.requeue import take_up
    from molt_hpc.slurm.run_folder import open_run_folder
    from molt_hpc.slurm.supervisor import Supervisor
    config = _load_run_config("run", words)
    take_up(config, os.environ)
    check_run_folder(Path(config.output_dir), config.ckpt.resume)
    topology = preflight(config, os.environ)
    run_id, attempt, logs = open_run_folder(config, topology, [sys.executable, "-m", "molt_hpc", "run", *words], os.environ)
    code = Supervisor(config, topology, run_id, attempt, logs, os.environ).run()
    if code == 0:
        _show_curve(Path(config.output_dir))
    return code


def _show_curve(run: Path) -> None:
    """The reward curve in the terminal and as a picture; a run without a step has none."""
    from molt_hpc.observe.report import plot, text
    try:
        print(f"\n{text(run)}\n")
        print(f"picture: {plot(run)}", flush=True)
    except ValueError as error:
        print(f"no curve: {error}", file=sys.stderr)


def cmd_check(words: list[str]) -> int:
    """Check everything and print what `run` would do."""
    from molt_hpc.slurm.preflight import preflight, report
    config = _load_run_config("check", words)
    print(report(config, preflight(config, os.environ)))
    return 0


def _load_run_config(command: str, words: list[str]):
    """The configuration of run and check; ends the program after printing their help."""
    from molt_hpc.config import RunConfig, help_text, load
    usage = f"usage: python -m molt_hpc {command} CONFIG.toml [--section.option value ...]"
    if not words:
        raise ValueError(f"{command}: no configuration file is given; {usage}")
    if {"-h", "--help"} & set(words):
        print(f"{usage}\n\noptions [default]:\n{help_text(RunConfig)}")
        raise SystemExit(0)
    path, overrides = (None, words) if words[0].startswith("--") else (words[0], words[1:])
    return load(RunConfig, path, overrides)


def cmd_broker(words: list[str]) -> int:
    """The broker of a run; the only process that writes its metrics."""
    from molt_hpc.broker.server import Broker
    from molt_hpc.config import RunConfig, load
    from molt_hpc.observe.metrics import StepWriter
    args = _role_words("broker", words, ("--host", "address to listen on"))
    config = load(RunConfig, args.run / "config.toml")
    return Broker(args.run, config, args.attempt, StepWriter(args.run, config.logger.tensorboard), args.host or "127.0.0.1").serve()


def cmd_actor(words: list[str]) -> int:
    """Become this node's torchrun."""
    from molt_hpc.slurm.roles import exec_actor, node_rank
    args = _role_words("actor", words, BROKER, NODE_RANK)
    exec_actor(args.run, args.broker, args.attempt, node_rank() if args.node_rank is None else int(args.node_rank))
    return 0


def cmd_rollout(words: list[str]) -> int:
    """The worker of this node; its rank comes from the command line or from Slurm."""
    from molt_hpc.rollout.worker import serve
    from molt_hpc.slurm.roles import node_rank
    args = _role_words("rollout", words, BROKER, NODE_RANK, ("--first-rank", "rank of the step's first node; unset: 0"))
    return serve(args.run, args.broker, args.attempt, node_rank(int(args.first_rank or 0)) if args.node_rank is None else int(args.node_rank))


def _parser(command: str, *options: tuple[str, str]) -> argparse.ArgumentParser:
    """Takes a run folder and some options (name, help)."""
    parser = argparse.ArgumentParser(prog=f"python -m molt_hpc {command}")
    parser.add_argument("run", type=Path, help="run folder")
    for name, meaning in options:
        parser.add_argument(name, help=meaning)
    return parser


def _role_words(role: str, words: list[str], *options: tuple[str, str]) -> argparse.Namespace:
    """A role's arguments; its log begins here."""
    parser = _parser(role, *options)
    parser.add_argument("--attempt", type=int, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return parser.parse_args(words)


def cmd_sft(words: list[str]) -> int:
    from molt_hpc.train.sft import main
    return main(words)


def cmd_status(words: list[str]) -> int:
    """Ask the broker and print its answer as JSON."""
    args = _parser("status").parse_args(words)
    status = _ask(args.run, "status", {"lines_from": 0})
    status.pop("reply_to", None)
    print(json.dumps(status | {"step_lines": status["step_lines"][-3:]}, indent=2))
    return 0


def cmd_stop(words: list[str]) -> int:
    """Tell the broker to end the run; the supervisor does the rest."""
    args = _parser("stop", ("--reason", "text for the log and the message")).parse_args(words)
    _ask(args.run, "stop", {"reason": args.reason or f"stopped by `molt_hpc stop` at {time.strftime('%H:%M:%S')}"})
    print(f"{args.run}: the broker ends the run")
    return 0


def _ask(run: Path, kind: str, fields: dict) -> dict:
    """One request to a run's broker. Raises ValueError if there is none."""
    from molt_hpc.broker.client import BrokerClient, Refused, RunStopped
    try:
        endpoint = json.loads((run / "endpoint.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{run}: no endpoint.json, so no broker has listened there yet") from None
    try:
        with contextlib.closing(BrokerClient(run, endpoint["address"], "observer", f"observer_{os.getpid()}", endpoint["attempt"], 5.0)) as client:
            return client.request(kind, fields, timeout=5.0)
    except TimeoutError:
        raise ValueError(f"{run}: the broker at {endpoint['address']} does not answer; "
                         "the run has ended, or this machine cannot reach it") from None
    except (RunStopped, Refused) as error:
        raise ValueError(f"{run}: {error}") from None


COMMANDS = {"run": cmd_run, "check": cmd_check, "sft": cmd_sft, "status": cmd_status, "stop": cmd_stop}
ROLES = {"broker": cmd_broker, "actor": cmd_actor, "rollout": cmd_rollout}


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] in ROLES:
        return ROLES[words[0]](words[1:])  # an error in a role is shown with its traceback, in the role's log
    try:
        if words[0] not in COMMANDS:
            raise ValueError(f"unknown command {words[0]!r}; commands are {', '.join(COMMANDS)}")
        return COMMANDS[words[0]](words[1:])
    except ValueError as error:
        print(f"molt_hpc: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
