"""How a Megatron rank spends memory: state, layers, head, pipeline."""
