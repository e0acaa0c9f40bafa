"""A policy with adapters in the inference engine: apart, or merged into the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.merging import merged_slots
from tests.dist.role_runs import MANY_PACKS, Setting, build_actor, save_inputs
from tests.models.mixtures import as_in_files
from tests.oracle import plain_models
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

# Fused layers, one tensor for q, k and v, more ranks than KV heads, experts whole and split.
LAYOUTS = {
    "llama-biases": [AxisSizes(tp=2), AxisSizes(tp=4), AxisSizes(pp=2)],
    "phi3": [AxisSizes(tp=2)],
    "qwen3-moe": [AxisSizes(ep=2), AxisSizes(tp=2, ep=2, etp=2)],
    "qwen2-moe": [AxisSizes(tp=2, ep=4, etp=1)],
}


def _merged_tensors(model: Path) -> dict[str, Tensor]:
    """The base with its adapter merged, as the formula says."""
    adapted = plain_models.load(model, adapted=True)
    weights = {name: tensor.detach() for name, tensor in adapted.named_parameters()}
    for name, module in adapted.named_modules():
        if torch.nn.utils.parametrize.is_parametrized(module):
            for own in module.parametrizations:
                weights[f"{name}.{own}"] = getattr(module, own).detach()
    return as_in_files(
        {name: weight for name, weight in weights.items() if "parametrizations" not in name},
        adapted.config.model_type,
    )


def _merge(rank: int, world_size: int, root: Path) -> None:
    factory = GroupFactory(timeout_s=600.0)
    for model, layouts in LAYOUTS.items():
        wanted = _merged_tensors(root / model)
        for sizes in layouts:
            groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, sizes))
            case = Case(model, "token-mean", lora=True)
            actor = build_actor(Setting(root, groups, MANY_PACKS), case)
            for slot in merged_slots(actor.engine):
                piece = slot.piece
                if piece.name.endswith("correction_bias"):
                    continue
                whole = wanted[piece.name]
                expected = whole.narrow(piece.dim, piece.start, piece.stop - piece.start)
                torch.testing.assert_close(slot.load(), expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_inputs(root)
    return root


def test_merged_weights_are_those_of_the_formula(root: Path) -> None:
    run_ranks(4, _merge, root)
