"""What you see: terminal tables, the passport, exports."""
