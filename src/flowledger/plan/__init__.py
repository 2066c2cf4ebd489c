"""What should happen: the three ledgers of a configuration by arithmetic, before any GPU is used; no torch but in `trace`."""
