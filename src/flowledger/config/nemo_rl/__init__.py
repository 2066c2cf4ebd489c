"""NeMo-RL: its YAML and what that inherits, turned into a RunConfig."""
