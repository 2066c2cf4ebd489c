"""How a user starts each framework on one machine without a GPU, for two steps of GRPO: a command and its environment.

Nothing of a recorder is in them: what is to watch a launch stands before its command, or in its environment.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import environments

HERE = Path(__file__).resolve().parent
STEPS = 2
RESPONSE_TOKENS = 24
TIMEOUT_S = 900

EVERYWHERE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
VERL_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a token of its own in the home folder otherwise
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise: beside anything else that runs here, a step would take minutes
    "HYDRA_FULL_ERROR": "1",
}
MICRO_BATCH = 4
# verl's settings; {folder} and {seed} are the launch's.
VERL = (
    "algorithm.adv_estimator=grpo",
    "data.train_files={folder}/prompts.parquet",
    "data.val_files={folder}/prompts.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    f"data.max_response_length={RESPONSE_TOKENS}",
    "data.dataloader_num_workers=0",
    "data.seed={seed}",
    "actor_rollout_ref.model.path={folder}/model",
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.strategy=fsdp2",  # FSDP1 refuses a CPU
    "actor_rollout_ref.actor.fsdp_config.seed={seed}",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "actor_rollout_ref.actor.use_torch_compile=false",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
    "actor_rollout_ref.ref.strategy=fsdp2",
    f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.seed={seed}",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    "+actor_rollout_ref.rollout.enable_sleep_mode=false",  # only GPUs let go of their memory
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.max_model_len=128",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
    f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.custom_reward_function.path={folder}/reward.py",
    "reward.custom_reward_function.name=compute_score",
    "reward.num_workers=1",
    "trainer.device=cpu",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.default_local_dir={folder}/checkpoints",
    "trainer.logger=[console]",
    "ray_kwargs.ray_init.num_cpus=32",  # V1 waits for ever for eight of storage alone when it has four
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command, and what is added to the environment it runs in."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def verl_v0(folder: Path, *, seed: int = 1, settings: Sequence[str] = ()) -> Launch:
    """verl's older trainer, in which batches pass through the driver."""
    return _verl(folder, seed, ("trainer.use_v1=false", *settings))


def verl_v1(folder: Path, *, seed: int = 1, settings: Sequence[str] = ()) -> Launch:
    """verl's newer trainer, in which batches pass through TransferQueue."""
    storage = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
    return _verl(folder, seed, ("trainer.use_v1=true", storage, *settings))


def trl(folder: Path, *, seed: int = 1, processes: int = 1, kind: str = "grpo") -> Launch:
    """A trainer of TRL's in a user's script, under torchrun where there are several processes (DDP, or FSDP); `kind`: as it says."""
    python, script = str(environments.python("trl")), (str(HERE / "train_grpo.py"), str(folder), str(seed), kind)
    if processes == 1:
        return Launch(command=(python, *script))
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return Launch(command=(*torchrun, *script))


def _verl(folder: Path, seed: int, settings: Sequence[str]) -> Launch:
    told = [setting.format(folder=folder, seed=seed) for setting in (*VERL, *settings)]
    command = (str(environments.python("verl")), "-m", "verl.trainer.main_ppo", *told)
    return Launch(command=command, environment=VERL_ENVIRONMENT)


def run(launch: Launch, log: Path, *, prefix: Sequence[str] = (), **more: str) -> str:
    """What a launch printed, also kept in `log`. `prefix` stands before its command, `more` in its environment.

    Raises CalledProcessError when it ends with another code than 0, TimeoutExpired after TIMEOUT_S.
    """
    # Ray's sockets lie in a folder whose path must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as short, log.open("wb") as out:
        command = (*prefix, *launch.command)
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True,
            env=environment(launch.environment | {"RAY_TMPDIR": short} | more),
        )  # fmt: skip
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            _end(process)
    printed = log.read_text(encoding="utf-8", errors="replace")
    if code:
        raise subprocess.CalledProcessError(code, command, output=printed[-10_000:])
    return printed


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's, with what every launch has, and more."""
    return {**os.environ, **EVERYWHERE, **more}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first, as Ray stops its processes then."""
    for sent, wait_s in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
        if process.poll() is None:
            os.killpg(process.pid, sent)
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
