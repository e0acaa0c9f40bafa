"""A process with the simulated device, of which each rank of a job is a fork.

It imports torch, megatron-core and mrlhf once. Requests are lines of JSON on its standard input,
and each gets one line as an answer; `client.py` writes them. It does not know what a job does.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.simulated_device.guard import load_guard

load_guard()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.ports import free_ports  # noqa: E402
from tests.simulated_device import cuda  # noqa: E402
from tests.simulated_device.state import DEVICE  # noqa: E402

_POLL_S = 0.05
_ENDS_S = 20.0  # in which other ranks say what they know when one has failed


def main() -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    cuda.install()
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import mrlhf.roles.actor  # noqa: F401

    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what jobs print must not be taken for an answer
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")


def _run(request: dict[str, Any]) -> list[str]:
    """Run a job; returns the failures of its ranks."""
    world_size = request["world_size"]
    out = Path(request["out"])
    port = free_ports(1)[0]
    children = {}
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            _rank(rank, world_size, port, request, out)
        children[child] = rank

    late = time.monotonic() + request["limit_s"]
    failures = []
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            rank = children.pop(child)
            if status != 0:
                late = min(late, time.monotonic() + _ENDS_S)
                said = [out / f"{rank}.{kind}" for kind in ("txt", "crash")]
                texts = [file.read_text() for file in said if file.exists()]
                failures.append("\n".join([f"rank {rank}: status {status}", *texts]))
        elif time.monotonic() > late:
            for child in children:
                os.kill(child, 9)
            if not failures:
                failures.append(f"ranks {sorted(children.values())} were not done in time")
            late = float("inf")
        else:
            time.sleep(_POLL_S)
    return failures


def _rank(rank: int, world_size: int, port: int, request: dict[str, Any], out: Path) -> None:
    code = 1
    faulthandler.enable((out / f"{rank}.crash").open("w"))
    try:
        os.environ.update(request["environment"])
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
        os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
        DEVICE.index = rank
        module, name = request["body"].split(":")
        result = getattr(importlib.import_module(module), name)(*request["arguments"])

        (out / f"{rank}.pickle").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.barrier()
        code = 0
    except BaseException:
        (out / f"{rank}.txt").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
