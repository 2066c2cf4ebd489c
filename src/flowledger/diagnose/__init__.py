"""What it means: laws and findings, read from a ledger."""
