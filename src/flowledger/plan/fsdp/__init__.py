"""How a rank of FSDP, ZeRO, DDP or one device spends memory: state, units, layers, adapters."""
