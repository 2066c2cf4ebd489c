"""A step you can read: the reference loop in torch."""
