def ppo_loss(config, model_output, data, dp_group=None):
    return model_output["log_probs"].values().float().mean(), {}


def value_loss(config, model_output, data, dp_group=None):
    return model_output["values"].values().float().mean(), {}
