"""Environments of other libraries as agents; each file needs that library (`pip install 'molt_hpc[envs]'`)."""
