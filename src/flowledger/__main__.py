"""`python -m flowledger`, as torchrun starts it: `torchrun … -m flowledger run CONFIG.yaml`."""

from flowledger.cli import main

main()
