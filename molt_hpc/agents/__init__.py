"""What users write: a Python file with one `Env` subclass."""

from molt_hpc.agents.base import Env, Result

__all__ = ["Env", "Result"]
