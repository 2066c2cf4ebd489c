"""Where to watch collectives: the lowest functions that Python calls, so that each is seen once, whoever called it.

Those are the methods of a process group, under every function of `torch.distributed` (FSDP2, pipelining and our loop
call these), and the functional operators, under DTensor. The kind of communication is that of the function's name
(`flow.comm`). Arguments are named by their place: `@group` (a process group, or its name), `@size` (tensors whose bytes
are the size), `@share` (tensors whose bytes times the ranks are the size), `@peer` (a rank within the group), `@wait` (a
work or a tensor that the call waits for). Results are what it fills. Functions on objects name nothing: they are made of
collectives, and count as one. A pipeline makes its sends and receives before it starts them: `@micro_batch` is theirs.
"""

from collections.abc import Mapping

from flowledger.flow.seams import Probe

_GROUP = "torch._C._distributed_c10d:ProcessGroup"
_OPS = "torch.distributed._functional_collectives:torch.ops"


def _probe(target: str, args: Mapping[str, str], made: str | None = None) -> Probe:
    filled = {made: "comm_buffer"} if made is not None else {}
    return Probe(stage=None, target=target, scope="collective", args=args, results=filled, optional=True)


def _method(name: str, args: Mapping[str, str], made: str | None = None) -> Probe:
    return _probe(f"{_GROUP}.{name}", {"0": "@group"} | dict(args), made)


def _operator(name: str, group: str, args: Mapping[str, str], made: str = "") -> Probe:
    return _probe(f"{_OPS}.{name}", {group: "@group"} | dict(args), made)


_IN_PLACE = {"1": "@size"}  # the first argument is the group itself
_OUT_IN = {"2": "@size"}

PROBES: tuple[Probe, ...] = (
    *(_method(name, _IN_PLACE, "args.1") for name in ("allreduce", "allreduce_coalesced", "broadcast", "reduce")),
    *(
        _method(name, _IN_PLACE, "args.1")
        for name in (
            "allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "_allgather_base",
            "allgather_into_tensor_coalesced",
        )
    ),
    *(
        _method(name, _OUT_IN, "args.1")
        for name in (
            "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base",
            "reduce_scatter_tensor_coalesced", "alltoall", "all_to_all_single", "alltoall_base",
        )
    ),
    _method("gather", {"2": "@share"}, "args.1"),
    _method("scatter", {"1": "@share"}, "args.1"),
    _method("send", {"1": "@size", "2": "@peer"}),
    _method("recv", {"1": "@size", "2": "@peer"}, "args.1"),
    _method("recv_anysource", {"1": "@size"}, "args.1"),
    _method("barrier", {}),
    _method("monitored_barrier", {}),
    _probe("torch._C._distributed_c10d:Work.wait", {"0": "@wait"}),
    # ------------------------------------------------------------ functional
    *(_operator(f"_c10d_functional.{name}", "2", {"0": "@size"}) for name in ("all_reduce", "all_reduce_coalesced")),
    *(
        _operator(f"{space}.{name}", "2", {"0": "@share"})
        for space, name in (
            ("_c10d_functional", "all_gather_into_tensor"),
            ("_c10d_functional", "all_gather_into_tensor_coalesced"),
            ("_c10d_functional_autograd", "all_gather_into_tensor"),
        )
    ),
    *(
        _operator(f"{space}.{name}", "3", {"0": "@size"})
        for space, name in (
            ("_c10d_functional", "reduce_scatter_tensor"),
            ("_c10d_functional", "reduce_scatter_tensor_coalesced"),
            ("_c10d_functional", "all_to_all_single"),
            ("_c10d_functional_autograd", "reduce_scatter_tensor"),
            ("_c10d_functional_autograd", "all_to_all_single"),
            ("_dtensor", "shard_dim_alltoall"),
        )
    ),
    _operator("_c10d_functional.broadcast", "2", {"0": "@size"}),
    _probe(f"{_OPS}._c10d_functional.wait_tensor", {"0": "@wait"}),
    # ------------------------------------------------------------ pipelines
    *(
        Probe(
            stage=None, target=f"torch.distributed.pipelining.stage:_PipelineStageBase.get_{way}_{what}_ops", phase=phase,
            scope="collective", args={"1": "@micro_batch"}, optional=True,
        )
        for way, phase in (("fwd", "forward"), ("bwd", "backward"))
        for what in ("send", "recv")
    ),
    # ------------------------------------------------------------ on objects
    *(
        _probe(f"{module}:{name}", {})
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
        for name in (
            "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
            "recv_object_list",
        )
    ),
)  # fmt: skip
