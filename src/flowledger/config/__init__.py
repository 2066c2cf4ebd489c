"""What you ask for: RunConfig, frozen and checked at birth."""
