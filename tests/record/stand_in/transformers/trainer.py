"""The loop that trainers inherit: what it calls of them, in its order."""

from accelerate.accelerator import Accelerator

from transformers.trainer_callback import CallbackHandler


class Trainer:
    def __init__(self):
        self.accelerator, self.callback_handler = Accelerator(), CallbackHandler()

    def train(self, steps=2):
        for _ in range(steps):
            self.callback_handler.on_step_begin(None, self.state, None)
            for _ in range(self.args.steps_per_generation):
                loss = self.compute_loss(self.model, self._prepare_inputs([{"prompt": "a"}] * self.rows))
                self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.state.global_step += 1
            self.callback_handler.on_step_end(None, self.state, None)
            self._maybe_log_save_evaluate(loss)
        self._save_checkpoint(self.model, None)

    def _maybe_log_save_evaluate(self, loss):
        self.log({"loss": float(loss.detach()), "learning_rate": 0.1})
        if self.args.evaluates:
            self.evaluate()

    def evaluate(self):
        self.model.eval()
        self.compute_loss(self.model, self._generate_and_score_completions([{"prompt": "a"}] * self.num_generations))
        self.model.train()

    def log(self, logs, start_time=None): ...
    def _save_checkpoint(self, model, trial): ...
