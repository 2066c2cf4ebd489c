"""What a reporter had (configuration, symptom, numbers, text) → the likeliest cause, the arithmetic that shows it, what to change."""
