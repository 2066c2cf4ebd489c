"""The language: what flows, written as data (stdlib only)."""
