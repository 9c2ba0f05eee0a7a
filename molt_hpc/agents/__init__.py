"""What users write: Env, Result, and the loader of an agent file."""
