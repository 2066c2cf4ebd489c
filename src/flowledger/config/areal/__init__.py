"""AReaL: its YAML, turned into a RunConfig."""
