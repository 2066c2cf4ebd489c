"""The debug orders: fixed sequences of steps, each a test with evidence and a next step."""
