"""Small closed vocabularies that several rooms share."""

# How a response ended; the tensor `finish_reason` holds indices into this.
FINISH_REASONS = ("stop", "length", "abort", "timeout")

# Why a sample is not trained on.
DROPPED_REASONS = (
    "abort", "timeout", "environment_error", "reward_error", "reward_timeout", "empty", "no_baseline", "rejected",
)  # fmt: skip

LEVELS = ("off", "steps", "tensors", "tokens")
