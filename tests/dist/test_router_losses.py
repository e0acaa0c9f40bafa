"""The gradients of router losses, and the load of experts, against transformers on every layout.

The model's own loss is 0 here, so that nothing else has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mrlhf.batch import Sequences
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import Device
from mrlhf.metrics import Tally
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.engine import ModelEngine, PackResult
from tests.mixture_models import as_in_files
from tests.ranks import run_ranks

CPU = Device("cpu", torch.device("cpu"), "gloo")
LENGTHS = (5, 19, 12, 24, 7, 3)
BALANCE = 0.3
Z = 0.05
EXPERTS = 8
PER_TOKEN = 3
LAYOUTS = {
    1: [AxisSizes()],
    2: [AxisSizes(ep=2), AxisSizes(tp=2, ep=2), AxisSizes(tp=2), AxisSizes(cp=2, ep=2)],
    4: [AxisSizes(pp=2, ep=2), AxisSizes(tp=2, ep=2, etp=2), AxisSizes(tp=2, pp=2)],
}


def _sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 67, (length,), generator=generator).tolist() for length in LENGTHS]


def _config(layers: int) -> Any:
    return transformers.Qwen3MoeConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The model's directory, and what transformers says of it."""
    path = tmp_path_factory.mktemp("router") / "model"
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(
        _config(layers=4), attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.1 * noise if "norm" in name else 0.15 * noise
    model.save_pretrained(path)

    sequences = _sequences()
    loads = torch.zeros(model.config.num_hidden_layers, EXPERTS)
    for sequence in sequences:
        logits = model(torch.tensor([sequence]), output_router_logits=True).router_logits
        for layer, of_layer in enumerate(logits):
            # Theirs is not divided by the experts of a token.
            balance = load_balancing_loss_func((of_layer,), EXPERTS, PER_TOKEN) / PER_TOKEN
            z = of_layer.logsumexp(dim=-1).square().mean()
            ((BALANCE * balance + Z * z) / len(sequences)).backward(retain_graph=True)
            chosen = of_layer.topk(PER_TOKEN).indices.flatten()
            loads[layer] += chosen.bincount(minlength=EXPERTS)

    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    shares = loads / loads.sum(dim=1, keepdim=True)
    entropies = torch.distributions.Categorical(shares).entropy() / torch.tensor(EXPERTS).log()
    return path, {
        "gradients": as_in_files(gradients, "qwen3_moe"),
        "largest": (shares * EXPERTS).max().item(),
        "entropy": entropies.min().item(),
    }


def _nothing(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
    return output.sum() * 0.0, PackResult(Tally())


def _forms(tp: int) -> Iterator[dict[str, Any]]:
    """Ways to run that change no number."""
    yield {"micro_batch_tokens": 24}
    yield {"micro_batch_tokens": 1000, "recompute": "full"}
    if tp > 1:
        yield {"micro_batch_tokens": 40, "sequence_parallel": True, "recompute": "mlp"}


def _in_ranks(rank: int, world_size: int, path: str, expected: dict[str, Any]) -> dict[str, Any]:
    factory = GroupFactory(timeout_s=120.0)
    worst = {}
    for sizes in LAYOUTS[world_size]:
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, sizes))
        for form in _forms(sizes.tp):
            section = ActorSection(
                path=path,
                dtype="float32",
                tp=sizes.tp,
                cp=sizes.cp,
                pp=sizes.pp,
                ep=sizes.ep,
                etp=sizes.etp,
                router_balance_coef=BALANCE,
                router_z_coef=Z,
                optim=ActorOptimSection(lr=0.0, clip_grad=0.0, use_distributed_optimizer=False),
                **form,
            )
            engine = ModelEngine(section, load_spec(path, "lm"), groups, CPU)
            engine.load(path, seed=0)
            engine.attach_optimizer(section.optim, total_updates=1)

            sequences = Sequences.of(_sequences(), [1] * len(LENGTHS))
            packs = engine.cut(sequences, "last").packs
            result = engine.train_mini_batch(packs, _nothing, ())
            assert result.load is not None
            assert result.load.largest == pytest.approx(expected["largest"], rel=1e-6)
            assert result.load.entropy == pytest.approx(expected["entropy"], rel=1e-6)
            worst[f"{sizes} {form}"] = _worst(engine, expected["gradients"])
    return worst


def _worst(engine: ModelEngine, expected: dict[str, Tensor]) -> float:
    """The largest deviation of a gradient, over the largest entry of all."""
    worst = 0.0
    for slot in engine.slots:
        piece = slot.piece
        wanted = expected[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
        gradient = replace(slot, parameter=slot.parameter.main_grad).load()
        worst = max(worst, (gradient - wanted).abs().max().item())
    return worst / max(gradient.abs().max().item() for gradient in expected.values())


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_gradients_and_loads_equal_those_of_transformers(
    reference: tuple[Path, dict[str, Any]], world_size: int
) -> None:
    path, expected = reference
    for worst in run_ranks(world_size, _in_ranks, str(path), expected):
        assert max(worst.values()) < 1e-5, worst
