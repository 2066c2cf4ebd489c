"""OpenRLHF: its launch flags, turned into a RunConfig."""
