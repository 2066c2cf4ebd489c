from verl.batch import rollout


class AgentLoopManager:
    def generate_sequences(self, prompts):
        return rollout(prompts.meta_info["global_steps"])
