"""The process in which vLLM's scheduler lives: it steps as long as there is work."""

from vllm.v1.core.sched.scheduler import Request, Scheduler


class EngineCore:
    def __init__(self):
        self.scheduler, self.weight_version = Scheduler(), "default"

    def set_weight_version(self, weight_version):
        self.weight_version = weight_version

    def answer(self, lengths, abort=()):
        """Requests of (prompt, response, cached) tokens, all at once; which are given up after the first step."""
        for number, (prompt, response, cached) in enumerate(lengths):
            self.scheduler.add_request(Request(f"r{number}", prompt, response, cached))
        while self.scheduler.requests:
            self.scheduler.update_from_output(self.scheduler.schedule())
            self.scheduler.finish_requests(abort)
            abort = ()
        return self.scheduler.told
