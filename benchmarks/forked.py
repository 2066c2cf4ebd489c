"""Several ranks of one job on this machine: forked from a process that has imported everything, joined by gloo."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class Failed(Exception):  # noqa: N818
    """A rank raised, died or did not answer in time."""


def ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """function(*args) on `size` ranks at once; what each returned, in their order. Raises Failed with the first trouble."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_rank, args=(rank, size, folder, pipes[rank][1], function, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return _answers([ours for ours, _ in pipes], timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in answers], timeout=timeout_s)
        if not ready:
            raise Failed(f"ranks {sorted(set(range(len(pipes))) - set(answers))} did not answer in {timeout_s:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]  # what was waited for is one of them
            try:
                fine, answer = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise Failed(f"rank {rank} died") from None
            if not fine:
                raise Failed(f"rank {rank}: {answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, size: int, folder: str, answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    try:
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        answer.send_bytes(pickle.dumps((True, function(*args))))
    except BaseException as error:  # noqa: BLE001  it is told to the parent
        answer.send_bytes(pickle.dumps((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))
    answer.close()
    os._exit(0)  # what the parent has registered to happen at exit is not for its children
