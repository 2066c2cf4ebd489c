"""Launch scripts: parsed and expanded as bash would, never executed."""
