"""One thin table of probes per loop or framework."""
