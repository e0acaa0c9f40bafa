"""Training weights go into vLLM through the reshard plan; each layout answers as transformers."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist

from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.vllm.engine import VllmEngine
from mrlhf.inference.vllm.pieces import vllm_pieces
from mrlhf.models.parameters import role_pieces
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.execute import Resharder, TransferOptions
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import sides_around
from tests.models.engines import answer, fill, spec_of, tensors_of
from tests.ranks import run_ranks
from tests.shards import make_slots
from tests.vllm.models import (
    hf_difference,
    hf_greedy,
    hf_model,
    make_prompts,
    needs_vllm,
)

pytestmark = needs_vllm

LIMITS = EngineLimits(max_num_seqs=8, max_length=64, max_prefill_tokens=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, seed=0)
DRAWN = SamplingParams(n=2, temperature=0.8, max_tokens=6, seed=3)
PROMPTS = make_prompts(count=4)
Case = tuple[str, AxisSizes, int]
DENSE: list[Case] = [  # model, layout of the actor, tp of the engine
    ("qwen2-tied", AxisSizes(tp=2, pp=2), 2),
    # Replicas of consecutive ranks lie in no model-parallel group.
    ("llama", AxisSizes(pp=2), 2),
    ("qwen3", AxisSizes(tp=2), 4),  # more ranks than KV heads
    ("gemma2", AxisSizes(pp=2), 2),
    ("gemma3", AxisSizes(tp=2), 2),
    ("gemma4", AxisSizes(tp=2), 4),
    # The embedding, which is the output layer too, is training's own storage.
    ("qwen2-tied-whole", AxisSizes(), 1),
]
# vLLM's groups outlive an engine with experts, so those of another size need other ranks.
SPLIT: list[Case] = [
    ("qwen2-moe", AxisSizes(tp=2, ep=2, etp=1), 2),
    ("gpt-oss", AxisSizes(tp=2, ep=2, etp=1), 2),
    ("gemma4-moe", AxisSizes(tp=2, ep=2, etp=1), 2),
]
WHOLE: list[Case] = [
    ("glm4-moe", AxisSizes(ep=2), 1),
    ("mixtral", AxisSizes(), 1),  # experts are training's own storage until they are packed
]


def _body(rank: int, world_size: int, cases: list[Case]) -> list[list[tuple[int, ...]]]:
    factory = GroupFactory(timeout_s=600.0)
    drawn = []

    for name, sizes, engine_tp in cases:
        actor = ParallelLayout.for_world("actor", world_size, sizes)
        engines = EngineLayout.consecutive(actor, engine_tp)
        groups = factory.engine_groups(engines)
        spec = spec_of(hf_model(name))
        engine = VllmEngine(spec, groups.tp, torch.device("cpu"), torch.float32, LIMITS)
        sides = sides_around(
            rank,
            engines,
            partial(role_pieces, spec, actor),
            partial(vllm_pieces, spec, engines),
        )
        slots = make_slots(role_pieces(spec, actor, rank))
        planner = Planner(sides, 4)
        options = TransferOptions(bucket_bytes=50_000, verify=True)
        resharder = Resharder(planner, slots, engine, rank, options, groups.exchange)
        assert [
            piece for pieces in engine.parameter_pieces().values() for piece in pieces
        ] == vllm_pieces(spec, engines, rank)
        for version in (1, 2):
            model = hf_model(name, seed=version)
            fill(slots, model)
            engine.wake()
            stats = resharder.run()
            assert stats.bytes_moved == stats.bytes_had_to_move
            engine.commit(version)
            greedy = answer(engine, PROMPTS, range(4), GREEDY)
            assert [s.token_ids for s in greedy] == hf_greedy(model, PROMPTS, 6), (name, version)
            samples = answer(engine, PROMPTS, range(4), DRAWN)
            assert hf_difference(model, PROMPTS, samples, 0.8) < 1e-4
            for slot in slots:  # what is shared with training has been left whole
                piece = slot.piece
                tensor = tensors_of(model)[piece.name]
                part = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
                view = slot.view(piece.start, piece.stop)
                assert torch.equal(view, part.reshape(view.shape)), piece
            engine.sleep()
        drawn.append([tuple(s.token_ids) for s in samples])
        dist.barrier()
        del engine, resharder
        gc.collect()

    return drawn


def test_resharded_weights_answer_as_transformers() -> None:
    drawn = run_ranks(4, _body, DENSE)
    # Tensor-parallel ranks and replicas draw the same for the same prompts.
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert all(len(set(samples)) == 8 for samples in drawn[0])


@pytest.mark.parametrize("cases", [SPLIT, WHOLE], ids=["split", "whole"])
def test_resharded_mixtures_answer_as_transformers(cases: list[Case]) -> None:
    drawn = run_ranks(2, _body, cases)
    assert drawn[0] == drawn[1]
    assert all(len(set(samples)) == 8 for samples in drawn[0])
