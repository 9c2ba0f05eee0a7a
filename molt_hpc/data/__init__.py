"""What is read and written: prompts, chat templates, trajectory shards."""
