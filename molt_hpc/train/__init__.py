"""The trainer: planning, advantages, losses, the packed forward, the optimizer step."""
