"""The optimizer equals AdamW in one process, wherever experts lie and whatever the head's rate.

The model is made by hand: each pipeline stage has a vector that every rank holds and a matrix that
is split over the tensor-parallel ranks; the first stage of a layout with expert parallelism has
experts too, and the last stage a scalar head with a learning rate of its own. The loss is linear,
so that its gradients are numbers that this file chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.config.critic import ScalarOptimSection
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.training.data_parallel import data_parallel
from mrlhf.training.optimizer import ShardedOptimizer
from tests.ranks import run_ranks

WORLD_SIZE = 4
LAYOUTS = (
    ParallelLayout(tp=2, dp=2, ep=2),
    ParallelLayout(tp=2, dp=2, ep=4),
    ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    ParallelLayout(tp=2, pp=2, ep=2),
    ParallelLayout(pp=2, dp=2, ep=2),
    ParallelLayout(tp=4, ep=2, etp=2),
    ParallelLayout(tp=4, ep=2),
    ParallelLayout(dp=4, ep=2),
    ParallelLayout(cp=2, dp=2, ep=2),
    ParallelLayout(dp=4),
    ParallelLayout(tp=2, pp=2),
    ParallelLayout(pp=2, dp=2),
    ParallelLayout(pp=4),
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "whole": {"use_distributed_optimizer": False},
    "split": {},
    "overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
EXPERTS = 4
STEPS = 3
HEAD = "output_layer.weight"
SHAPES = {"vector": (6,), "matrix": (4, 3), "expert": (6, 4), HEAD: (1, 5)}
OPTIM: dict[str, Any] = {
    "lr": 1e-2,
    "head_lr": 3e-2,
    "lr_decay_style": "linear",
    "min_lr_ratio": 0.1,
    "lr_warmup_steps": 1,
    "adam_eps": 1e-3,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
}
# The warm-up takes a step; then the rates fall to a tenth, which they would have in step 4.
FRACTIONS = (1.0, 0.7, 0.4)

Name = tuple[str, int, int]
"""Of a whole tensor: what it is, the pipeline stage, and the number of the expert or shard."""


def _draw(name: Name, *seed: int) -> Tensor:
    """The weight, or what a replica's share of a step's batch, `seed`, adds to its gradient."""
    kind, stage, number = name
    numbers = (list(SHAPES).index(kind), stage, number, *seed)
    generator = torch.Generator().manual_seed(hash(numbers) % 2**31)
    return torch.randn(SHAPES[kind], generator=generator)


@dataclass(frozen=True)
class Held:
    """A slice of a tensor that a rank holds."""

    name: Name  # of the tensor
    rows: slice  # of the tensor that are held
    replica: int  # which of the slice's replicas this is


class HandMade(torch.nn.Module):
    """One rank's stage; `held` says what each parameter is made of, in rows."""

    pre_process = True
    share_embeddings_and_output_weights = False

    def __init__(self, groups: RoleGroups) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        layout = groups.layout
        at = groups.coordinates
        replica = at.dp * layout.cp + at.cp
        whole = slice(None)
        self.held = {
            "vector": [Held(("vector", at.pp, 0), whole, replica)],
            "matrix": [Held(("matrix", at.pp, at.tp), whole, replica)],
        }

        if at.pp == 0 and layout.ep > 1:
            count = EXPERTS // layout.ep
            height = SHAPES["expert"][0] // layout.etp
            rows = slice(at.etp * height, (at.etp + 1) * height)
            numbers = range(at.ep * count, (at.ep + 1) * count)
            self.held["expert"] = [Held(("expert", 0, n), rows, at.edp) for n in numbers]

        if at.pp == layout.pp - 1:
            self.held[HEAD] = [Held((HEAD, at.pp, 0), whole, replica)]
            self.output_layer = torch.nn.Module()

        for kind, held in self.held.items():
            parts = [_draw(part.name)[part.rows] for part in held]
            parameter: Any = torch.nn.Parameter(torch.cat(parts))
            parameter.tensor_model_parallel = kind == "matrix" or (
                kind == "expert" and layout.etp > 1
            )
            parameter.allreduce = kind != "expert"
            owner, _, attribute = kind.rpartition(".")
            self.get_submodule(owner).register_parameter(attribute, parameter)

    def forward(self, step: int) -> Tensor:
        loss = torch.zeros(())
        for kind, held in self.held.items():
            parts = [_draw(part.name, step, part.replica)[part.rows] for part in held]
            loss = loss + (self.get_parameter(kind) * torch.cat(parts)).sum()
        return loss


@dataclass(frozen=True)
class Result:
    """What one rank has after all steps: norms of the gradients, and slices of weights."""

    norms: list[float]  # of each step
    # What it reported in each step, of all but the head and of the head.
    rates: list[tuple[float, float | None]]
    weights: list[tuple[Name, int, list]]  # the name, first row and values of each slice
    # The name of each parameter, and how many of its elements the optimizer holds.
    optimized: dict[str, int]


def _in_ranks(rank: int, world_size: int) -> dict[tuple[ParallelLayout, str], Result]:
    factory = GroupFactory(timeout_s=600.0)
    results = {}
    for layout in LAYOUTS:
        groups = factory.role_groups(layout)
        for name, keys in OPTIMIZERS.items():
            results[layout, name] = _train(groups, ScalarOptimSection(**OPTIM, **keys))
    return results


def _train(groups: RoleGroups, optim: ScalarOptimSection) -> Result:
    model = HandMade(groups)
    device = torch.device("cpu")
    [chunk] = data_parallel([model], model.config, groups, device, optim)
    optimizer = ShardedOptimizer([chunk], groups, optim, torch.float32, STEPS, slots=[])
    replicas = groups.layout.dp * groups.layout.cp

    norms = []
    rates = []
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        (chunk(step) * replicas).backward()
        finalize_model_grads([chunk], pg_collection=groups.collection)
        rates.append((optimizer.learning_rate, optimizer.head_learning_rate))
        optimizer._optimizer.prepare_grads()
        norm_of_megatron = optimizer._optimizer.get_grad_norm()
        norms.append(optimizer.step().grad_norm)
        assert norms[-1] == norm_of_megatron
        optimizer.advance_schedule()
    optimizer.wait_for_weights()

    weights = []
    for kind, held in model.held.items():
        parts = model.get_parameter(kind).detach().chunk(len(held))
        for part, values in zip(held, parts, strict=True):
            weights.append((part.name, part.rows.start or 0, values.tolist()))
    ranges = optimizer.ranges(list(model.parameters()))
    optimized = {
        kind: 0 if part is None else len(part.main)
        for kind, part in zip(model.held, ranges, strict=True)
    }
    return Result(norms, rates, weights, optimized)


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[ParallelLayout, str], Result]]:
    return run_ranks(WORLD_SIZE, _in_ranks)


def _replicas(layout: ParallelLayout, kind: str) -> int:
    """How many ranks hold the same slice of the tensor, with another share of the batch."""
    return layout.edp if kind == "expert" else layout.dp * layout.cp


def _in_one_process(layout: ParallelLayout) -> tuple[list[float], dict[Name, Tensor]]:
    """The same steps with torch's AdamW on whole tensors."""
    names: list[Name] = [(HEAD, layout.pp - 1, 0)]
    if layout.ep > 1:
        names += [("expert", 0, number) for number in range(EXPERTS)]
    for stage in range(layout.pp):
        names.append(("vector", stage, 0))
        names += [("matrix", stage, shard) for shard in range(layout.tp)]

    weights = {name: torch.nn.Parameter(_draw(name)) for name in names}
    of_kind = {kind: [weights[name] for name in names if name[0] == kind] for kind in SHAPES}
    adam = torch.optim.AdamW(
        [
            {"params": of_kind["matrix"] + of_kind["expert"]},
            {"params": of_kind["vector"], "weight_decay": 0.0},
            {"params": of_kind[HEAD]},
        ],
        eps=OPTIM["adam_eps"],
        weight_decay=OPTIM["weight_decay"],
    )

    norms = []
    for step, fraction in enumerate(FRACTIONS):
        rates = (OPTIM["lr"], OPTIM["lr"], OPTIM["head_lr"])
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = fraction * rate
        for name, weight in weights.items():
            parts = [_draw(name, step, replica) for replica in range(_replicas(layout, name[0]))]
            weight.grad = torch.stack(parts).sum(dim=0)
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), OPTIM["clip_grad"])
        norms.append(norm.item())
        adam.step()
    return norms, {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_kinds_of_weights_train_as_in_one_process(
    ranks: list[dict[tuple[ParallelLayout, str], Result]], layout: ParallelLayout, optimizer: str
) -> None:
    norms, wanted = _in_one_process(layout)
    seen = set()
    for results in ranks:
        result = results[layout, optimizer]
        assert result.norms == pytest.approx(norms, rel=1e-6)
        assert min(result.norms) > OPTIM["clip_grad"]
        # Ranks without the head know its rate, too: the metrics are those of any rank.
        rates, head_rates = zip(*result.rates, strict=True)
        assert rates == pytest.approx([OPTIM["lr"] * part for part in FRACTIONS])
        assert head_rates == pytest.approx([OPTIM["head_lr"] * part for part in FRACTIONS])
        for name, first, values in result.weights:
            seen.add(name)
            expected = wanted[name][first : first + len(values)]
            torch.testing.assert_close(torch.tensor(values), expected, rtol=0, atol=1e-6)
    assert seen == wanted.keys()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_optimizer_finds_what_it_holds_of_each_parameter(
    ranks: list[dict[tuple[ParallelLayout, str], Result]], layout: ParallelLayout, optimizer: str
) -> None:
    # Over all ranks, every element is held once, or by each replica if the optimizer is whole, as
    # it is where all but the experts has no replicas.
    is_whole = optimizer == "whole" or layout.dp * layout.cp == 1
    copies = {"vector": layout.tp, "matrix": 1, "expert": 1, HEAD: layout.tp}
    elements = {
        "vector": 6 * layout.pp,
        "matrix": 12 * layout.tp * layout.pp,
        "expert": 24 * EXPERTS if layout.ep > 1 else 0,
        HEAD: 5,
    }

    for kind, total in elements.items():
        held = sum(results[layout, optimizer].optimized.get(kind, 0) for results in ranks)
        times = copies[kind] * (_replicas(layout, kind) if is_whole else 1)
        assert held == total * times, kind
