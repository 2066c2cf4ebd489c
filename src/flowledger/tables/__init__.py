"""Facts without code, each with unit and source."""
