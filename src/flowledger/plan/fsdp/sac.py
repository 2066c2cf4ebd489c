"""Selective checkpoints that keep the outputs of chosen operators instead of whole layers."""

from flowledger.plan.fsdp.layers import Pass
from flowledger.plan.saved import Kept, kept


def kept_outputs(run: Pass) -> list[Kept]:
    """Outputs that a layer keeps beside its input: attention, and every second matrix product (torchtitan)."""
    return kept("hf", "selective", run.names, run.held)
