"""Find the agent class in a user's file."""

import importlib.util
import sys
from pathlib import Path

from molt_hpc.agents.base import AgentRunner, ChatAgent, ChatAgentRunner, Env, StepEnvRunner

GIVEN = (AgentRunner, StepEnvRunner, ChatAgentRunner)


def load_agent(path: str | Path) -> type[Env | ChatAgent]:
    """Import an agent file and return its agent class.

    The class is the one that the file's `AgentRunner` names, or the one that it calls `Agent`, or the only subclass of Env or
    ChatAgent that it defines. Raises ValueError if the file is missing, cannot be imported or does not name one class.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"train.agent_path: there is no file {path}")
    name = f"molt_hpc_agent_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))  # files beside the agent can be imported by it
    try:
        spec.loader.exec_module(module)
        runner = vars(module).get("AgentRunner")
        if isinstance(runner, type) and issubclass(runner, AgentRunner) and runner not in GIVEN:
            return runner().agent
    except Exception as error:  # whatever the user's file raises is the user's to see
        raise ValueError(f"train.agent_path: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return _only_class(module, name, path)


def _only_class(module: object, name: str, path: Path) -> type[Env | ChatAgent]:
    found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, (Env, ChatAgent)) and v.__module__ == name]
    leaves = [c for c in found if not any(c is not other and issubclass(other, c) for other in found)]
    chosen = [c for c in found if c.__name__ == "Agent"] or leaves
    if len(chosen) != 1:
        names = ", ".join(c.__name__ for c in chosen) or "none"
        raise ValueError(f"train.agent_path: {path} must define one subclass of molt_hpc.agents.Env or ChatAgent (or name one of "
                         f"them Agent, or define an AgentRunner); it defines {names}")
    return chosen[0]
