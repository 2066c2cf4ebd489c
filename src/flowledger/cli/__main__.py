"""`python -m flowledger.cli`."""

from flowledger.cli import main

main()
