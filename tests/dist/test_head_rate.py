"""A scalar head with a learning rate of its own trains as torch's AdamW with two rates does.

The model is made by hand: each pipeline stage has a matrix that is split over the tensor-parallel
ranks and a vector, and the last stage has a head. Its loss is linear, so that its gradients are
numbers that this file chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.config.sections import ScalarOptimSection
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.training.data_parallel import data_parallel
from mrlhf.training.optimizer import ShardedOptimizer
from tests.ranks import run_ranks

WORLD_SIZE = 4
LAYOUTS = (
    ParallelLayout(dp=4),
    ParallelLayout(tp=2, pp=2),
    ParallelLayout(pp=2, dp=2),
    ParallelLayout(pp=4),
)
OPTIMIZERS = ("whole", "split")
STEPS = 3
HEAD_LR = 3e-2
OPTIM: dict[str, Any] = {
    "lr": 1e-3,
    "lr_decay_style": "linear",
    "min_lr_ratio": 0.1,
    "lr_warmup_steps": 1,
    "adam_eps": 1e-3,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
}
# The warm-up takes a step; then the rates fall to a tenth, which they would have in step 4.
FRACTIONS = (1.0, 0.7, 0.4)
SHAPES = {"matrix": (4, 3), "vector": (6,), "head": (1, 5)}

Name = tuple[str, int, int]
"""Of a whole tensor: what it is, the pipeline stage, and the number of the shard."""


def _draw(kind: str, *seed: int) -> Tensor:
    numbers = (*SHAPES, "end").index(kind), *seed
    generator = torch.Generator().manual_seed(hash(numbers) % 2**31)
    return torch.randn(SHAPES[kind], generator=generator)


class HandMade(torch.nn.Module):
    """One rank's stage; `names` says what each parameter is."""

    pre_process = True
    share_embeddings_and_output_weights = False

    def __init__(self, groups: RoleGroups) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        at = groups.coordinates
        self.names: dict[str, Name] = {
            "matrix": ("matrix", at.pp, at.tp),
            "vector": ("vector", at.pp, 0),
        }
        if at.pp == groups.layout.pp - 1:
            self.names["output_layer.weight"] = ("head", at.pp, 0)
            self.output_layer = torch.nn.Module()

        for path, name in self.names.items():
            parameter: Any = torch.nn.Parameter(_draw(*name))
            parameter.tensor_model_parallel = name[0] == "matrix"
            owner, _, attribute = path.rpartition(".")
            self.get_submodule(owner).register_parameter(attribute, parameter)

    def forward(self, step: int, replica: int) -> Tensor:
        loss = torch.zeros(())
        for path, name in self.names.items():
            loss = loss + (self.get_parameter(path) * _draw(*name, 1 + step, replica)).sum()
        return loss


@dataclass(frozen=True)
class Result:
    """What one rank has after all steps: the rates that it reported, and its weights."""

    rates: list[float]
    head_rates: list[float | None]
    weights: dict[Name, list]


def _in_ranks(rank: int, world_size: int) -> dict[tuple[ParallelLayout, str], Result]:
    factory = GroupFactory(timeout_s=600.0)
    results = {}
    for layout in LAYOUTS:
        groups = factory.role_groups(layout)
        for name in OPTIMIZERS:
            split = name == "split"
            optim = ScalarOptimSection(**OPTIM, head_lr=HEAD_LR, use_distributed_optimizer=split)
            results[layout, name] = _train(groups, optim)
    return results


def _train(groups: RoleGroups, optim: ScalarOptimSection) -> Result:
    model = HandMade(groups)
    [chunk] = data_parallel([model], model.config, groups, torch.device("cpu"), optim)
    optimizer = ShardedOptimizer([chunk], groups, optim, torch.float32, STEPS)

    rates = []
    head_rates = []
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        (chunk(step, groups.coordinates.dp) * groups.layout.dp).backward()
        finalize_model_grads([chunk], pg_collection=groups.collection)
        rates.append(optimizer.learning_rate)
        head_rates.append(optimizer.head_learning_rate)
        optimizer.step()
        optimizer.advance_schedule()
    optimizer.wait_for_weights()

    weights = {name: model.get_parameter(path).tolist() for path, name in model.names.items()}
    return Result(rates, head_rates, weights)


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[ParallelLayout, str], Result]]:
    return run_ranks(WORLD_SIZE, _in_ranks)


def _in_one_process(layout: ParallelLayout) -> dict[Name, Tensor]:
    """The same steps with torch's AdamW on whole tensors."""
    names: list[Name] = [("head", layout.pp - 1, 0)]
    for stage in range(layout.pp):
        names.append(("vector", stage, 0))
        names += [("matrix", stage, shard) for shard in range(layout.tp)]

    weights = {name: torch.nn.Parameter(_draw(*name)) for name in names}
    of_kind = {kind: [weights[name] for name in names if name[0] == kind] for kind in SHAPES}
    adam = torch.optim.AdamW(
        [
            {"params": of_kind["matrix"]},
            {"params": of_kind["vector"], "weight_decay": 0.0},
            {"params": of_kind["head"]},
        ],
        eps=OPTIM["adam_eps"],
        weight_decay=OPTIM["weight_decay"],
    )

    for step, fraction in enumerate(FRACTIONS):
        for group, rate in zip(adam.param_groups, (OPTIM["lr"], OPTIM["lr"], HEAD_LR), strict=True):
            group["lr"] = fraction * rate
        for name, weight in weights.items():
            parts = [_draw(*name, 1 + step, replica) for replica in range(layout.dp)]
            weight.grad = torch.stack(parts).sum(dim=0)
        torch.nn.utils.clip_grad_norm_(weights.values(), OPTIM["clip_grad"])
        adam.step()
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_head_follows_its_own_rate(
    ranks: list[dict[tuple[ParallelLayout, str], Result]], layout: ParallelLayout, optimizer: str
) -> None:
    wanted = _in_one_process(layout)
    seen = set()
    for results in ranks:
        result = results[layout, optimizer]
        # Ranks without the head know its rate, too: the metrics are those of any rank.
        assert result.rates == pytest.approx([OPTIM["lr"] * part for part in FRACTIONS])
        assert result.head_rates == pytest.approx([HEAD_LR * part for part in FRACTIONS])
        for name, values in result.weights.items():
            seen.add(name)
            torch.testing.assert_close(torch.tensor(values), wanted[name], rtol=0, atol=1e-6)
    assert seen == wanted.keys()
