"""Fine-tuning and reward models whose sequences lie on several ranks, against a plain loop.

What a rank keeps of a pack is measured too.

`test_training`, `test_role_evaluation` and `test_model_parity` check the same of the other roles.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrlhf.batch import Sequences
from mrlhf.config.roots import TrainedModelSection
from mrlhf.config.sections import OptimSection
from mrlhf.data.preferences import PreferencePairs
from mrlhf.data.sft import SftExample
from mrlhf.models import attention
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.trainers.reward_model import PreferenceLearning
from mrlhf.trainers.sft import FineTuning
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import CPU
from tests.plain_ppo import SIZES
from tests.ranks import run_ranks

EOS = 2
ROWS = 10
LAYOUTS = {
    2: [AxisSizes(cp=2)],
    4: [AxisSizes(cp=2), AxisSizes(tp=2, cp=2), AxisSizes(cp=2, pp=2), AxisSizes(cp=4)],
}


def _examples() -> list[SftExample]:
    rng = random.Random(3)
    examples = []
    for _ in range(ROWS):
        prompt = rng.randint(1, 9)
        response = rng.choice((1, 2, 7, 14))
        tokens = [rng.randint(3, 30) for _ in range(prompt + response)]
        examples.append(SftExample(tokens, [0] * prompt + [1] * response))
    return examples


def _pairs() -> PreferencePairs:
    rng = random.Random(4)

    def side() -> list[list[int]]:
        return [
            [rng.randint(3, 30) for _ in range(rng.randint(1, 21))] + [EOS] * rng.randint(0, 3)
            for _ in range(ROWS)
        ]

    return PreferencePairs(side(), side(), prompt_lengths=ROWS * [1], dropped=0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model and a sequence classifier."""
    directory = tmp_path_factory.mktemp("context")
    for name, auto in (
        ("lm", transformers.AutoModelForCausalLM),
        ("scalar", transformers.AutoModelForSequenceClassification),
    ):
        torch.manual_seed(5)
        config = transformers.LlamaConfig(
            **SIZES, num_labels=1, pad_token_id=EOS, eos_token_id=EOS, initializer_range=0.3
        )
        auto.from_config(config).save_pretrained(directory / name)
    return directory


def _engine(root: str, head: Any, sizes: AxisSizes, world_size: int, budget: int) -> ModelEngine:
    groups = GroupFactory(timeout_s=60.0).role_groups(
        ParallelLayout.for_world("model", world_size, sizes)
    )
    section = TrainedModelSection(
        path=f"{root}/{head}",
        tp=sizes.tp,
        cp=sizes.cp,
        pp=sizes.pp,
        sequence_parallel=sizes.tp > 1,
        dtype="float32",
        micro_batch_tokens=budget,
    )
    engine = ModelEngine(section, load_spec(section.path, head), groups, CPU)
    engine.load(section.path, seed=0)
    return engine


def _in_ranks(rank: int, world_size: int, root: str) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    optim = OptimSection(lr=1e-3, clip_grad=0.0)
    metrics = {}
    for sizes in LAYOUTS[world_size]:
        for budget in (48, 1000):
            tuned = _engine(root, "lm", sizes, world_size, budget)
            tuned.attach_optimizer(optim, total_updates=1)
            learned = _engine(root, "scalar", sizes, world_size, budget)
            learned.attach_optimizer(optim, total_updates=1)

            examples = _examples()
            fine_tuning = FineTuning(examples, examples)
            preferences = PreferenceLearning(_pairs(), _pairs())
            before = {**fine_tuning.validate(tuned), "val/accuracy": 0.0}
            scored = preferences.validate(learned)
            metrics[f"{sizes}, {budget} tokens"] = {
                **fine_tuning.step(tuned, range(ROWS)),
                **preferences.step(learned, range(ROWS)),
                "val/sft": before["val/loss"],
                "val/rm": scored["val/loss"],
                "val/accuracy": scored["val/accuracy"],
            }
    return metrics


def _grad_norm(model: torch.nn.Module) -> float:
    squares = [
        parameter.grad.square().sum()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt())


def _plain_fine_tuning(path: Path) -> dict[str, float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    losses = []
    for example in _examples():
        tokens = torch.tensor(example.token_ids)
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        mask = torch.tensor(example.loss_mask).bool()[1:]
        losses.append(-logprobs[:-1].gather(1, tokens[1:, None])[:, 0][mask])
    loss = torch.cat(losses).mean()
    loss.backward()
    value = float(loss.detach())
    return {"sft/loss": value, "val/sft": value, "sft/grad_norm": _grad_norm(model)}


def _plain_preferences(path: Path) -> dict[str, float]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    pairs = _pairs()

    def scores(rows: list[list[int]]) -> Tensor:
        return torch.stack([model(torch.tensor([row])).logits[0, 0] for row in rows])

    margin = scores(pairs.chosen_ids) - scores(pairs.rejected_ids)
    loss = -logsigmoid(margin).mean()
    loss.backward()
    accuracy = float((margin > 0).float().mean())
    return {
        "rm/loss": float(loss.detach()),
        "val/rm": float(loss.detach()),
        "rm/margin": float(margin.detach().mean()),
        "rm/accuracy": accuracy,
        "val/accuracy": accuracy,
        "rm/grad_norm": _grad_norm(model),
    }


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_fine_tuning_and_reward_models_equal_the_plain_loop(root: Path, world_size: int) -> None:
    wanted = _plain_fine_tuning(root / "lm") | _plain_preferences(root / "scalar")
    assert 0 < wanted["rm/accuracy"] < 1 and wanted["rm/grad_norm"] > 0.1
    for metrics in run_ranks(world_size, _in_ranks, str(root)):
        assert len(metrics) == 2 * len(LAYOUTS[world_size])
        for label, found in metrics.items():
            for name, value in wanted.items():
                assert found[name] == pytest.approx(value, rel=2e-5, abs=2e-6), f"{label}: {name}"


def _kept_bytes(rank: int, world_size: int, root: str) -> dict[str, list[int]]:
    """What autograd keeps of one pack of two sequences, with and without compiled attention."""
    torch.set_num_threads(1)
    kept: dict[str, list[int]] = {}
    for compiled in (True, False):
        if not compiled:
            attention.compiled_attention.is_available = lambda dtype: False  # type: ignore
        for cp in (1, 2, 4):
            engine = _engine(root, "lm", AxisSizes(cp=cp), world_size, 10**6)
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
