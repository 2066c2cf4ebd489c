"""What verl's driver and workers call, in their order, on two prompts of two samples; every module is a few lines."""
