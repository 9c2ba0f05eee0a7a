"""What users write: a Python file with one `Env` or one `ChatAgent`."""

from molt_hpc.agents.base import AgentRunner, ChatAgent, ChatAgentRunner, ChatContext, Env, Result, SamplingParams, StepEnvRunner
from molt_hpc.agents.scoring import score_in_subprocess

__all__ = ["AgentRunner", "ChatAgent", "ChatAgentRunner", "ChatContext", "Env", "Result", "SamplingParams", "StepEnvRunner", "score_in_subprocess"]
