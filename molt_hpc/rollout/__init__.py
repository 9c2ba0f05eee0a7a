"""Rollout nodes: vLLM servers, agent processes, and the worker between them and the broker."""
