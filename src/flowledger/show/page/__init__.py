"""The page: eight views of a run, a plan, or both, each a pair of files: what it is made of (Python) and how it is drawn (JavaScript)."""
