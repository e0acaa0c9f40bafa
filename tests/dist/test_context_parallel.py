"""What a rank keeps of a pack whose sequences lie on several ranks.

`test_invariance` and `test_model_parity` check what such ranks compute.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.sections import RoleSection
from mrlhf.host import kernels
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import CPU
from tests.oracle.plain_models import SIZES
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model."""
    directory = tmp_path_factory.mktemp("context")
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(directory)
    return directory


def _engine(root: str, factory: GroupFactory, sizes: AxisSizes, world_size: int) -> ModelEngine:
    groups = factory.role_groups(ParallelLayout.for_world("model", world_size, sizes))
    section = RoleSection(path=root, cp=sizes.cp, dtype="float32", micro_batch_tokens=10**6)
    engine = ModelEngine(section, load_spec(root, "lm"), groups, CPU)
    engine.load(root, seed=0)
    return engine


def _kept_bytes(rank: int, world_size: int, root: str) -> dict[str, list[int]]:
    """What autograd keeps of one pack of two sequences, with and without compiled attention."""
    factory = GroupFactory(timeout_s=600.0)
    kept: dict[str, list[int]] = {}
    for compiled in (True, False):
        if not compiled:
            kernels.find = lambda dtype: None  # type: ignore
        for cp in (1, 2, 4):
            engine = _engine(root, factory, AxisSizes(cp=cp), world_size)
            sequences = Sequences.of([[7] * 512] * world_size, [1] * world_size)
            storages: dict[int, int] = {}

            def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            weights = {
                parameter.untyped_storage().data_ptr()
                for chunk in engine.chunks
                for parameter in chunk.parameters()
            }
            [pack] = engine.cut(sequences, "last").packs
            engine.chunks[0].train()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = engine._pipeline._forward_pack(engine.chunks[0], pack)
            kept.setdefault(f"compiled {compiled}", []).append(
                sum(size for place, size in storages.items() if place not in weights)
            )
            del output
    return kept


def test_a_rank_keeps_its_share_of_a_pack(root: Path) -> None:
    """The same sequences in all cases: four data-parallel ranks, or a pack of four on four ranks.

    With `cp` ranks a pack has `cp` times the sequences, so what a rank keeps stays the same.
    """
    for kept in run_ranks(4, _kept_bytes, str(root)):
        for name, sizes in kept.items():
            whole, *shared = sizes
            assert whole > 100_000
            for size in shared:
                assert size < 1.15 * whole, (name, sizes)
