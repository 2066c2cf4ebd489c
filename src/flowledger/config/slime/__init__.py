"""slime: its own, Megatron's and SGLang's flags, turned into a RunConfig."""
