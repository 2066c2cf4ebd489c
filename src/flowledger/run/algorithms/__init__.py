"""The formulas of RL post-training: rewards to advantages, log-probs to a loss. Pure functions of tensors.

advantages and policy_losses hold the tables of names; what is behind a name is in the file of its family.
"""
