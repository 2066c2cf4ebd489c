"""The model's own code under FakeTensor: the only part of the planner that touches torch."""
