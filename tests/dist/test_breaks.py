"""The comparisons of `test_invariance` and `test_ppo_step` see a fault: each break is put into the
ranks, one by one.

A break changes one function of ours, or of megatron-core, in two ranks that train a tiny model.
Without a break every comparison passes, and with it those fail that the break names. Breaks of a
step of PPO stand at the end, each as a scenario above the test of it. A break of what moves
weights stands in `test_reshard`, of a checkpoint in `test_checkpoint_layouts`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import megatron.core.distributed
import pytest
import torch
import torch.distributed as dist

from mrlhf.batch import Experience, Rollout, Sequences
from mrlhf.data.preferences import PreferenceRows
from mrlhf.models import build
from mrlhf.models.experts import RoutedExperts
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.vocab_sums import LocalSums
from mrlhf.records import SamplingMasks
from mrlhf.roles.actor import Actor
from mrlhf.trainers import critic as critic_trainer
from mrlhf.trainers.ppo import experience as experience_of_ppo
from mrlhf.trainers.reward_model import PreferenceLearning
from mrlhf.training import engine, first_weights, muon
from mrlhf.training.held_adapters import HeldAdapters
from mrlhf.training.muon import Muon
from mrlhf.training.residency import Owner, Residency
from mrlhf.weights.shard import Slot
from tests.covering import Row
from tests.dist.invariance_checks import PlainRuns, comparisons
from tests.dist.invariance_runs import RowResult, train_row
from tests.dist.ppo_runs import (
    DP4,
    TP2_PP2,
    Runs,
    Scenario,
    assert_experience_by_hand,
    assert_same_on_every_layout,
)
from tests.dist.role_runs import save_inputs
from tests.ranks import run_ranks

# megatron-core's module is hidden by the function of its name.
FINALIZE = sys.modules[f"{megatron.core.distributed.__name__}.finalize_model_grads"]

PLAIN: Row = {
    "ranks": 2,
    "dp": 1,
    "vpp": 1,
    "uneven_stages": False,
    "sequence_parallel": False,
    "share_prompts": False,
    "offload": None,
    "recompute": "none",
    "micro_batch_tokens": 24,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "model": "llama",
    "router_losses": False,
    "lora": False,
    "freeze": False,
    "optimizer": "adamw",
    "loss": "sampled KL",
}
REPLICAS = PLAIN | {"dp": 2}
TENSORS = PLAIN | {"tp": 2, "sequence_parallel": True}
CONTEXT = PLAIN | {"cp": 2}
STAGES = PLAIN | {"pp": 2, "model": "qwen2-tied"}
EXPERTS = PLAIN | {"tp": 2, "ep": 2, "etp": 1, "model": "qwen3-moe", "sequence_parallel": True}
ADAPTERS = TENSORS | {"lora": True, "model": "phi3"}
# Both ranks hold a half of every expert.
EXPERT_ADAPTERS = EXPERTS | {"lora": True, "ep": 1, "etp": None}
# The first rank trains nothing.
FROZEN = PLAIN | {"pp": 2, "freeze": True}
FROZEN_REPLICAS = REPLICAS | {
    "freeze": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "offload": "streamed",
}
MUON = TENSORS | {"optimizer": "muon"}
MUON_REPLICAS = REPLICAS | {"optimizer": "muon"}
OFFLOADED = TENSORS | {"offload": "offloaded"}
SOUND = {
    "tp": TENSORS,
    "dp": REPLICAS,
    "cp": CONTEXT,
    "pp": STAGES,
    "ep": EXPERTS,
    "adapters": ADAPTERS,
    "adapters of experts": EXPERT_ADAPTERS,
    "frozen": FROZEN,
    "frozen, dp": FROZEN_REPLICAS,
    "offload": OFFLOADED,
    "muon, tp": MUON,
    "muon, dp": MUON_REPLICAS,
}

Patch = Callable[[pytest.MonkeyPatch, int], None]
"""Puts the break into a rank."""


@dataclass(frozen=True)
class Break:
    """One fault."""

    row: Row  # where it is put
    patch: Patch  # puts it there
    seen: tuple[str, ...]  # comparisons that must fail, among others


def _copy_once(patch: pytest.MonkeyPatch, rank: int) -> None:
    """What has left once is not copied to the host again."""
    copied = Residency._copied

    def stale(own: Residency, owner: Owner, key: int, held: Any) -> Any:
        return copied(own, owner, key, held._replace(is_constant=True))

    patch.setattr(Residency, "_copied", stale)


def _lose_a_gradient(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The gradient of rank 1 is not added to the other's."""
    whole = engine.finalize_model_grads

    def lossy(chunks: Sequence[Any], *arguments: Any, **options: Any) -> None:
        for chunk in chunks:
            for parameter in chunk.parameters():
                if rank == 1:
                    parameter.main_grad.zero_()
        whole(chunks, *arguments, **options)

    patch.setattr(engine, "finalize_model_grads", lossy)


def _skip(name: str) -> Patch:
    """A step of megatron-core's reduction of gradients is left out."""

    def put(patch: pytest.MonkeyPatch, rank: int) -> None:
        assert callable(getattr(FINALIZE, name))
        patch.setattr(FINALIZE, name, lambda *_, **__: None)

    return put


def _keep_parts(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Gradients of which each rank of an expert has a part are not summed."""
    patch.setattr(HeldAdapters, "sum_parts", lambda *_: None)


def _leave_adapters_on(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A teacher that is the policy without its adapters has them."""
    patch.setattr(HeldAdapters, "off", lambda *_: nullcontext())


def _read_the_policys_prompts(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Critic and teacher read what the policy has read, and not their own prompts."""
    right = Rollout.sequences
    patch.setattr(Rollout, "sequences", lambda rollout, prompt_ids=None: right(rollout))


def _share_adapters(patch: pytest.MonkeyPatch, rank: int) -> None:
    """All experts of a rank compute with the adapter of the first."""
    right = RoutedExperts.forward

    def shared(experts: RoutedExperts, *arguments: Any) -> Any:
        first, *others = experts.values()
        for expert in others:
            expert.linear_fc1.adapters = first.linear_fc1.adapters
        return right(experts, *arguments)

    patch.setattr(RoutedExperts, "forward", shared)


def _read_other_names(rename: Callable[[str], str]) -> Patch:
    """Rank 1 reads other tensors than its own, of the same shape."""

    def put(patch: pytest.MonkeyPatch, rank: int) -> None:
        right = first_weights.read_model

        def wrong(path: Any, spec: Any, slots: Sequence[Slot], needs_head: bool) -> bool:
            renamed = []
            for slot in slots:
                piece = slot.piece._replace(name=rename(slot.piece.name))
                renamed.append(replace(slot, piece=piece) if rank == 1 else slot)
            return right(path, spec, renamed, needs_head)

        patch.setattr(first_weights, "read_model", wrong)

    return put


def _read_the_first_shard(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 1 reads rank 0's rows of one matrix."""
    right = first_weights.read_model

    def wrong(path: Any, spec: Any, slots: Sequence[Slot], needs_head: bool) -> bool:
        moved = []
        for slot in slots:
            piece = slot.piece
            if rank == 1 and piece.name.endswith("layers.1.mlp.up_proj.weight"):
                piece = piece._replace(start=0, stop=piece.stop - piece.start)
            moved.append(replace(slot, piece=piece))
        return right(path, spec, moved, needs_head)

    patch.setattr(first_weights, "read_model", wrong)


def _shift_the_mask(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The responses begin one token late."""
    right = engine.make_packs

    def late(sequences: Sequences, *arguments: Any) -> Any:
        prompts = torch.minimum(sequences.prompt_lengths + 1, sequences.lengths)
        return right(replace(sequences, prompt_lengths=prompts), *arguments)

    patch.setattr(engine, "make_packs", late)


def _normalise_alone(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank takes its part of the vocabulary for the whole."""
    right = LocalSums.combine
    patch.setattr(LocalSums, "combine", lambda sums, group: right(sums, None))


def _mask_the_first_columns(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank takes the masks of the first rank's part of the vocabulary for its own."""
    right = SamplingMasks.excluded

    def wrong(masks: SamplingMasks, columns: range, *arguments: Any) -> Any:
        return right(masks, range(len(columns)), *arguments)

    patch.setattr(SamplingMasks, "excluded", wrong)


def _mask_other_tokens(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A token has the mask of the place after it."""
    right = SamplingMasks.by_place

    def wrong(masks: SamplingMasks) -> SamplingMasks:
        every = right(masks)
        return replace(every, begins=every.begins.roll(-1), counts=every.counts.roll(-1, dims=0))

    patch.setattr(SamplingMasks, "by_place", wrong)


def _orthogonalise_parts(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank takes its part of a matrix for the whole."""

    def alone(own: Muon, matrices: Any, dtype: Any) -> Any:
        parts = [muon.orthogonalised(matrix.of_gradient()) for matrix in matrices]
        return torch.cat([part.flatten() for part in parts])

    patch.setattr(Muon, "_orthogonalised_parts", alone)


def _keep_own_updates(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A replica does not get the matrices that the other has orthogonalised."""
    right = dist.broadcast

    def lost(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("group_src", rank) != rank:
            tensor = tensor.zero_().clone()
        return right(tensor, *arguments, **options)

    patch.setattr(muon.dist, "broadcast", lost)


def _take_the_first_margins(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The pairs of a pack get the margins of the first pairs of all."""
    right = PreferenceLearning._measure

    def wrong(task: PreferenceLearning, data: Any, rows: Sequence[int], scores: Any) -> Any:
        if data.margins is None:
            return right(task, data, rows, scores)
        return right(task, data, range(len(rows)), scores)

    patch.setattr(PreferenceLearning, "_measure", wrong)


def _count_each_pair_once(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A ranking counts as often as it has pairs, and not once."""
    right = PreferenceRows.compared

    def wrong(data: PreferenceRows, rows: Sequence[int]) -> Any:
        return [replace(pair, share=1.0) for pair in right(data, rows)]

    patch.setattr(PreferenceRows, "compared", wrong)


def _freeze_nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The weights that should not train have gradients, and an optimizer that moves them."""
    patch.setattr(build, "_freeze", lambda *_: None)


def _begin_values_one_token_late(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 1 takes the returns of the next tokens for its own."""
    right = critic_trainer.lay_flat

    def late(tables: Any, packs: Any) -> Any:
        moved = {name: table.roll(-1, dims=1) for name, table in tables.items()}
        return right(moved if rank == 1 else tables, packs)

    patch.setattr(critic_trainer, "lay_flat", late)


BREAKS = {
    "a rank's gradient is not summed": Break(
        REPLICAS, _lose_a_gradient, ("actor weights", "critic weights", "sft metrics", "rm weights")
    ),
    "gradients of norms are not summed": Break(
        TENSORS,
        _skip("_allreduce_non_tensor_model_parallel_grads"),
        ("actor weights", "critic weights", "sft weights", "rm weights"),
    ),
    "gradients of tied embeddings are not summed": Break(
        STAGES, _skip("_allreduce_word_embedding_grads"), ("actor weights", "sft weights")
    ),
    "a wrong shard": Break(TENSORS, _read_the_first_shard, ("tables", "actor metrics")),
    "a wrong stage": Break(
        STAGES,
        _read_other_names(lambda name: re.sub(r"layers\.[23]\.", "layers.1.", name)),
        ("tables", "critic metrics"),
    ),
    "a wrong expert": Break(
        EXPERTS,
        _read_other_names(lambda name: re.sub(r"experts\.\d+\.", "experts.0.", name)),
        ("tables", "actor metrics"),
    ),
    "a factor that ranks share is not summed": Break(
        ADAPTERS,
        _skip("_allreduce_non_tensor_model_parallel_grads"),
        ("actor weights", "critic weights", "sft weights", "rm weights"),
    ),
    "a part of a factor is not summed": Break(
        EXPERT_ADAPTERS, _keep_parts, ("actor weights", "critic weights", "sft weights")
    ),
    "a base with its adapters": Break(
        ADAPTERS, _leave_adapters_on, ("actor metrics", "actor weights")
    ),
    "prompts of the policy for all": Break(
        ADAPTERS, _read_the_policys_prompts, ("critic metrics", "critic weights", "actor metrics")
    ),
    "experts share an adapter": Break(
        EXPERT_ADAPTERS, _share_adapters, ("tables", "actor metrics")
    ),
    "a mask off by one": Break(CONTEXT, _shift_the_mask, ("tables", "actor metrics")),
    "what is offloaded comes back as it first left": Break(
        OFFLOADED, _copy_once, ("actor weights", "critic weights", "sft weights", "rm weights")
    ),
    "a part is orthogonalised as if it were the whole": Break(
        MUON, _orthogonalise_parts, ("actor weights", "critic weights", "sft weights", "rm weights")
    ),
    "updates of matrices stay with their replica": Break(
        MUON_REPLICAS, _keep_own_updates, ("actor weights", "actor replicas", "sft replicas")
    ),
    "a vocabulary that is not summed": Break(
        TENSORS, _normalise_alone, ("tables", "actor metrics", "sft metrics")
    ),
    "masks of other columns": Break(TENSORS, _mask_the_first_columns, ("actor metrics",)),
    "masks of other tokens": Break(CONTEXT, _mask_other_tokens, ("actor metrics", "actor weights")),
    "frozen weights train": Break(
        FROZEN,
        _freeze_nothing,
        ("actor frozen", "critic frozen", "sft frozen", "rm frozen", "critic metrics"),
    ),
    "returns of other tokens": Break(
        CONTEXT, _begin_values_one_token_late, ("values metrics", "values weights")
    ),
    "margins of other pairs": Break(
        REPLICAS, _take_the_first_margins, ("rm metrics", "rm weights")
    ),
    "rankings that count by their pairs": Break(
        REPLICAS, _count_each_pair_once, ("rm metrics", "rm weights")
    ),
}


def _train_all(rank: int, world_size: int, root: str) -> dict[str, RowResult]:
    """Train each sound row, and each broken one; the weights go to `<root>/<name>`."""
    factory = GroupFactory(timeout_s=600.0)
    results = {}
    for name, row in SOUND.items():
        results[name] = train_row(Path(root), factory, _with_axes(row), Path(root) / name)
    for name, fault in BREAKS.items():
        with pytest.MonkeyPatch.context() as patch:
            fault.patch(patch, rank)
            out = Path(root) / name
            results[name] = train_row(Path(root), factory, _with_axes(fault.row), out)
        dist.barrier()
    return results


def _with_axes(row: Row) -> Row:
    """The row with all axes of a layout."""
    return {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": None, **row}


class Trained:
    """All rows, and what they must equal."""

    def __init__(self, root: Path) -> None:
        save_inputs(root, 2, sorted({row["model"] for row in SOUND.values()}))
        self._root = root
        self._plain = PlainRuns(root)
        self._ranks = run_ranks(2, _train_all, str(root))
        self.failing = cache(self._failing)

    def _failing(self, name: str) -> dict[str, str]:
        """The comparisons that fail for a row, each with its message."""
        row = _with_axes(SOUND[name] if name in SOUND else BREAKS[name].row)
        results = [rank[name] for rank in self._ranks]
        failing = {}
        for title, check in comparisons(results, self._plain, row, self._root / name).items():
            try:
                check()
            except AssertionError as error:
                failing[title] = str(error)
        return failing


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("breaks"))


@pytest.mark.parametrize("name", SOUND)
def test_nothing_fails_without_a_break(trained: Trained, name: str) -> None:
    assert trained.failing(name) == {}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_seen(trained: Trained, name: str) -> None:
    assert trained.failing(name).keys() >= set(BREAKS[name].seen)


def _take_the_advantages_of_other_rows(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 1 trains on the advantages of the rows before."""
    right = Actor.update

    def wrong(actor: Actor, experience: Experience, *arguments: Any) -> Any:
        moved = replace(experience, advantages=experience.advantages.roll(1, dims=0))
        return right(actor, moved if rank == 1 else experience, *arguments)

    patch.setattr(Actor, "update", wrong)


def _whiten_over_other_tokens(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The mask of the advantages' mean and variance is off by one token."""
    right = experience_of_ppo.local_moments
    patch.setattr(
        experience_of_ppo, "local_moments", lambda x, mask: right(x, mask.roll(1, dims=1))
    )


SOUND_STEP = Scenario("sound", DP4)
SOUND_STEP_DEEP = Scenario("sound, tp2 pp2", TP2_PP2)
OTHER_ROWS = Scenario("advantages of other rows", DP4, _take_the_advantages_of_other_rows)
OTHER_TOKENS = Scenario("whitened over other tokens", DP4, _whiten_over_other_tokens)


def test_a_step_passes_without_a_break(runs: Runs) -> None:
    assert_same_on_every_layout(runs, SOUND_STEP_DEEP, SOUND_STEP)
    assert_experience_by_hand(runs.steps(SOUND_STEP)[0], terminal=False)


def test_an_advantage_of_another_row_is_seen(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="advantages of other rows, step 1"):
        assert_same_on_every_layout(runs, SOUND_STEP_DEEP, OTHER_ROWS)


def test_a_mask_of_a_step_that_is_off_by_one_is_seen(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_experience_by_hand(runs.steps(OTHER_TOKENS)[0], terminal=False)
