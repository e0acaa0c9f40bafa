"""The door of NCCL: collectives of the device, which gloo carries out, and their order.

A collective takes tensors of one kind. What a rank calls is kept in `DEVICE.collectives`, which
`orders.py` compares between ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.simulated_device.counts import place
from tests.simulated_device.orders import Collective
from tests.simulated_device.state import DEVICE
from tests.simulated_device.tensors import (
    COLLECTIVES,
    DeviceMismatchError,
    SimulatedTensor,
    inner_of,
    is_host,
    on_device,
)

_NCCL_ALONE: set[str] = set()
"""Groups that have no gloo for tensors of the host."""


def communicate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one of c10d's operators."""
    flat, spec = tree_flatten((args, kwargs))
    hosts = [x for x in flat if is_host(x)]
    ours = [x for x in flat if isinstance(x, SimulatedTensor)]
    if hosts and ours:
        raise DeviceMismatchError(f"{func.name()} with tensors of host and device at {place()}")
    _record(func, args, ours or hosts, is_of_device=bool(ours))
    if not ours:
        for value in hosts:
            DEVICE.host.check(value, is_written=True)
        return func(*args, **kwargs)

    DEVICE.launch(func.name())
    inner_args, inner_kwargs = tree_unflatten([inner_of(x) for x in flat], spec)

    def run() -> Any:
        return func(*inner_args, **inner_kwargs)

    def run_again() -> Any:
        for work in tree_flatten(run())[0]:
            if hasattr(work, "wait"):
                work.wait()
        return []

    outs, out_spec = tree_flatten(run())
    if DEVICE.capturing is not None:
        DEVICE.capturing.add(run_again, [], [])
    known = {id(x.inner): x for x in ours}

    def result_of(out: Any) -> Any:
        if not isinstance(out, torch.Tensor):
            return out
        return known[id(out)] if id(out) in known else on_device(out)

    results = [result_of(out) for out in outs]
    return tree_unflatten(results, out_spec)


def _record(func: Any, args: Any, tensors: list[torch.Tensor], is_of_device: bool) -> None:
    names = [item.name for item in func._schema.arguments]
    values = dict(zip(names, args, strict=False))
    boxed = values.get("process_group")
    if boxed is None:
        return
    group = dist.ProcessGroup.unbox(boxed)
    if not is_of_device and group.group_name in _NCCL_ALONE:
        raise RuntimeError(f"No backend type associated with device type cpu at {place()}")

    ranks = tuple(dist.get_process_group_ranks(group))
    operator = func.name().removeprefix("c10d::")
    peer = values.get("dst", values.get("src", -1))
    sizes = ",".join(str(x.numel()) for x in tensors)
    if operator.startswith(("alltoall", "gather", "scatter")):
        sizes = "of each rank"  # they may differ
    DEVICE.collectives.append(
        Collective(
            "device" if is_of_device else "host",
            operator,
            group.group_name,
            ranks,
            f"{tensors[0].dtype}[{sizes}]" if tensors else "",
            -1 if peer == -1 else ranks[peer],
            place(),
            sum(x.nbytes for x in tensors),
        )
    )


def _without_nccl(backend: str | None) -> str | None:
    return "gloo" if backend and "nccl" in backend else backend


def install() -> None:
    """Let gloo stand for NCCL in every group that is made from now on."""
    COLLECTIVES.append(communicate)
    real_init = dist.init_process_group
    real_group = dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        real_init(_without_nccl(backend), *args, **options)
        if backend == "nccl":
            _NCCL_ALONE.add(dist.group.WORLD.group_name)

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any
    ) -> Any:
        group = real_group(ranks, timeout, _without_nccl(backend), **options)
        if backend == "nccl" and isinstance(group, dist.ProcessGroup):
            _NCCL_ALONE.add(group.group_name)
        return group

    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group
