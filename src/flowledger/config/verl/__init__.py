"""verl: its launch scripts, overrides and defaults, turned into a RunConfig."""
