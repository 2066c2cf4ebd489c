"""Where to watch vLLM (0.32): a table and nothing else.

Its scheduler, in whichever process of the job that runs: it is called for every token of a batch, so its calls are told to
functions that add up, and are no spans. Its workers, where they are given weights by vLLM's own ways; verl has another.
"""

from flowledger.flow.seams import Probe

VERSIONS = ">=0.32,<0.33"
_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_WORKER = "vllm.v1.worker.gpu_worker"  # the CPU's worker is one of these too
_TOLD = "flowledger.record.vllm_scheduler"

PROBES: tuple[Probe, ...] = (
    *(
        Probe(stage="rollout", target=f"{_SCHEDULER}:Scheduler.{name}", told=f"{_TOLD}:{told}", versions=VERSIONS)
        for name, told in (("schedule", "scheduled"), ("_preempt_request", "preempted"), ("_free_request", "freed"))
    ),
    Probe(
        stage="weight_sync", target=f"{_CORE}:EngineCore.set_weight_version", told=f"{_TOLD}:versioned", versions=VERSIONS
    ),
    *(
        Probe(stage="weight_sync", target=f"{_WORKER}:Worker.{name}", role="rollout", versions=VERSIONS)
        for name in ("update_weights", "reload_weights")
    ),
)  # fmt: skip
# Module -> what a process is that is the first to call something in it.
ROLES = dict.fromkeys((_CORE, _SCHEDULER, _WORKER), "rollout")
