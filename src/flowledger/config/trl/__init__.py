"""TRL: its YAML or flags and the accelerate file beside them, turned into a RunConfig."""
