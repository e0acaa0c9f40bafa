"""A real language model is to us what it is to transformers, and on every layout the same.

Random weights of a few layers hide what trained ones show: a vocabulary of 49,152, logits far
apart, thirty layers over which rounding adds up.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from mrlhf.batch import Experience, Prompts, Rollout
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.inference.base import EngineLimits, Sample, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.models.families import family_of, load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.model_bytes import training_bytes
from mrlhf.roles.actor import Actor
from mrlhf.roles.reference import Reference
from mrlhf.weights.hf import read_weights
from mrlhf.weights.stored import ExpectedTensors
from tests import rollouts
from tests.dist.role_runs import (
    Form,
    Setting,
    build_actor,
    build_critic,
    cut_responses,
    load_experience,
    logprobs_of,
    update_actor,
)
from tests.models import smollm2 as real
from tests.models.engines import answer
from tests.oracle.plain_lora import adapter_of, save_adapter
from tests.oracle.plain_ppo import Case
from tests.oracle.plain_tables import TEMPERATURE
from tests.padding import pad_responses
from tests.ranks import run_ranks

NAME = "smollm2"
WHOLE = Case(NAME, "token-mean")
ADAPTED = Case(NAME, "token-mean", lora=True)
FEW = 4  # chats that are trained on, and so many tokens of each answer
ANSWER_TOKENS = 16
ALONE = Form("alone", 4096, distributed_optimizer=False)
FORMS = {
    1: {"alone": (AxisSizes(), ALONE)},
    2: {
        "pp 2": (AxisSizes(pp=2), Form("pp 2", 100, distributed_optimizer=False)),
        "dp 2": (AxisSizes(), Form("dp 2", 100, distributed_optimizer=True)),
        "cp 2": (AxisSizes(cp=2), Form("cp 2", 4096, distributed_optimizer=False)),
    },
    3: {
        "tp 3": (AxisSizes(tp=3), Form("tp 3", 100, distributed_optimizer=False)),
        "tp 3 sp": (
            AxisSizes(tp=3),
            Form("tp 3 sp", 4096, distributed_optimizer=False, sequence_parallel=True),
        ),
    },
}


@dataclass(frozen=True)
class Found:
    """What a rank found of a layout, with all weights trained and with adapters."""

    logprobs: dict[str, Tensor]  # "whole", "adapted" and "adapters off", [batch, response_len]
    metrics: dict[str, dict[str, float]]  # of one update
    planned: dict[str, int]  # bytes of the rank's model in training, by owner
    measured: dict[str, int]


@dataclass(frozen=True)
class Theirs:
    """What transformers says of all chats."""

    root: Path  # holds the model, an adapter, and what ranks read
    prompts: list[list[int]]
    answers: dict[str, list[real.Answer]]  # by dtype
    logprobs: dict[str, Tensor]  # of the answers in float32, at `TEMPERATURE`; all in one tensor
    states: list[Tensor]  # of the first `FEW` answers


@pytest.fixture(scope="module")
def theirs(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    root = tmp_path_factory.mktemp("real")
    for link in (NAME, f"{NAME}-critic"):
        (root / link).symlink_to(smollm2)
    tokenizer = load_tokenizer(smollm2)
    chats = [[{"role": "user", "content": chat}] for chat in real.CHATS]
    prompts = [tokenizer.encode_prompt(chat)[1] for chat in chats]

    answers = {}
    logprobs = {}
    states: list[Tensor] = []
    for dtype in ("float32", "bfloat16"):
        model = real.load(smollm2, getattr(torch, dtype))
        answers[dtype] = real.generate(model, prompts)
        responses = [answer.token_ids for answer in answers["float32"]]
        of_rows, hidden = real.evaluate(model, prompts, responses, TEMPERATURE)
        logprobs[dtype] = torch.cat(of_rows)
        if dtype == "float32":
            states = hidden[:FEW]
            save_adapter(model, adapter_of(root / NAME), torch.Generator().manual_seed(9))
        del model

    torch.save(_rollout(prompts, responses), root / "rollout")
    few = _rollout(prompts[:FEW], [response[:ANSWER_TOKENS] for response in responses[:FEW]])
    torch.save(
        _experience(few, list(logprobs["float32"].split([*map(len, responses)]))), _few(root)
    )
    return Theirs(root, prompts, answers, logprobs, states)


@pytest.fixture(scope="module")
def alone(theirs: Theirs) -> dict[str, Any]:
    """What one rank finds, of the model itself and of its training."""
    return _found_by(1, _alone, theirs.root)[0]


def _found_by(world_size: int, body: Callable[..., Any], root: Path) -> list[Any]:
    """What each rank finds, through files: tensors of a rank are gone when it ends."""
    run_ranks(world_size, _write_down, body, root)
    files = [root / f"rank {rank} of {world_size}" for rank in range(world_size)]
    return [torch.load(file, weights_only=False) for file in files]


def _write_down(rank: int, world_size: int, body: Callable[..., Any], root: Path) -> None:
    torch.save(body(rank, world_size, root), root / f"rank {rank} of {world_size}")


def _few(root: Path) -> Path:
    """Where `load_experience` looks for what is trained on."""
    return root / f"{NAME}.experience"


def _rollout(prompts: list[list[int]], responses: list[list[int]]) -> Rollout:
    count = len(prompts)
    nothing = [""] * count
    asked = Prompts(prompts, list(range(count)), nothing, nothing, nothing, [{}] * count)
    ids, mask = pad_responses(responses, torch.int32)
    return rollouts.make_rollout(
        asked, [0] * count, ids, mask, torch.zeros(mask.shape), torch.ones(count, dtype=torch.bool)
    )


def _experience(rollout: Rollout, logprobs: list[Tensor]) -> Experience:
    """Old log-probs are so near the model's that some tokens, not all, are clipped."""
    mask = rollout.response_mask
    generator = torch.Generator().manual_seed(6)

    def noise() -> Tensor:
        return torch.where(mask, torch.randn(mask.shape, generator=generator), 0.0)

    rows = [row[:ANSWER_TOKENS].tolist() for row in logprobs[:FEW]]
    old = pad_responses(rows, torch.float32)[0]
    nothing = torch.zeros(mask.shape)
    return Experience(
        rollout=rollout,
        scores=torch.zeros(len(rollout)),
        loss_mask=rollout.loss_mask,
        old_logprobs=old + 0.5 * noise(),
        ref_logprobs=old,
        token_rewards=nothing,
        values=nothing,
        advantages=noise(),
        returns=nothing,
    )


def _alone(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    (setting,) = _settings(root, world_size)
    rollout = torch.load(root / "rollout", weights_only=False)
    prompts = rollout.prompts.token_ids
    found: dict[str, Any] = {"layouts": _on_layouts(rank, world_size, root)}
    for dtype in ("float32", "bfloat16"):
        found[f"{dtype} answers"] = _answers(root, prompts, dtype)
        of_dtype = replace(setting, form=replace(setting.form, dtype=dtype))
        actor = build_actor(of_dtype, WHOLE)
        found[f"{dtype} logprobs"] = logprobs_of(actor, rollout, len(rollout))[rollout.loss_mask]
        del actor

    critic = build_critic(setting, WHOLE)
    few = load_experience(root, WHOLE).rollout
    cut = cut_responses(critic, few)
    found["values of a new critic"] = critic.values(few, cut)
    (head,) = (slot for slot in critic.engine.slots if slot.piece.name == "score.weight")
    head.store(_head(head.parameter.shape[-1]))
    found["values"] = critic.values(few, cut)
    return found


def _head(hidden: int) -> Tensor:
    return torch.randn(1, hidden, generator=torch.Generator().manual_seed(8))


def _answers(
    root: Path, prompts: list[list[int]], dtype: str, group: dist.ProcessGroup | None = None
) -> list[Sample]:
    """The native engine's greedy answers."""
    spec = load_spec(root / NAME, "lm")
    limits = EngineLimits(max_num_seqs=32, max_length=256, max_prefill_tokens=1024)
    of_dtype = getattr(torch, dtype)
    engine = NativeEngine(spec, group, torch.device("cpu"), of_dtype, limits)
    shapes = family_of(spec).tensor_shapes(spec)
    read_weights(root / NAME, engine.weight_slots(), ExpectedTensors(shapes))
    engine.commit(1)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=real.MAX_TOKENS, seed=0, stop_token_ids=(2,)
    )
    return answer(engine, prompts, list(range(len(prompts))), sampling)


def _settings(root: Path, world_size: int) -> Iterator[Setting]:
    factory = GroupFactory(timeout_s=600.0)
    for sizes, form in FORMS[world_size].values():
        layout = ParallelLayout.for_world("actor", world_size, sizes)
        yield Setting(root, factory.role_groups(layout), form)


def _on_layouts(rank: int, world_size: int, root: Path) -> dict[str, Found]:
    """What this rank finds on each layout; updated weights and adapters go to files."""
    found = {}
    for setting in _settings(root, world_size):
        name = setting.form.name
        of_layout = Found({}, {}, {}, {})
        for case in (WHOLE, ADAPTED):
            kind = "adapted" if case.lora else "whole"
            experience = load_experience(root, case)
            actor = build_actor(setting, case, ppo_epochs=1)
            of_layout.logprobs[kind] = logprobs_of(actor, experience.rollout, FEW)
            if case.lora:
                of_layout.logprobs["adapters off"] = _without_adapters(actor, experience.rollout)
            of_layout.metrics[kind] = update_actor(actor, experience, FEW)
            if not case.lora:
                of_layout.planned.update(_planned(actor, setting))
                of_layout.measured.update(actor.engine.residency.nbytes)
            actor.engine.export(root / "updated" / kind / name, 10**10)
            del actor
        found[name] = of_layout

        if name in ("alone", "pp 2", "tp 3"):
            stored = replace(setting, form=replace(setting.form, dtype="bfloat16"))
            build_actor(stored, WHOLE).engine.export(root / "exported" / name, 10**10)
    return found


def _without_adapters(actor: Actor, rollout: Rollout) -> Tensor:
    off = Reference(actor.engine, TEMPERATURE, actor.engine.adapters.off)
    return off.logprobs(rollout, cut_responses(actor, rollout))


def _planned(actor: Actor, setting: Setting) -> dict[str, int]:
    planned = training_bytes(
        actor.engine.spec,
        setting.groups.layout,
        actor.engine.dtype.itemsize,
        splits_optimizer=setting.form.distributed_optimizer,
        stage=setting.groups.coordinates.pp,
    )
    return dict(vars(planned))


def test_float32_is_transformers_float32(theirs: Theirs, alone: dict[str, Any]) -> None:
    wanted = theirs.answers["float32"]
    for sample, one in zip(alone["float32 answers"], wanted, strict=True):
        assert sample.token_ids == one.token_ids
        index = torch.tensor(one.token_ids)[:, None]
        logprobs = one.logits.log_softmax(-1).gather(1, index)[:, 0]
        assert sample.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert sum(len(one.token_ids) == real.MAX_TOKENS for one in wanted) > 5
    assert len({one.token_ids[-1] for one in wanted}) > 2

    difference = (alone["float32 logprobs"] - theirs.logprobs["float32"]).abs().max()
    assert difference < 1e-4


def test_bfloat16_errs_no_more_than_that_of_transformers(
    theirs: Theirs, alone: dict[str, Any]
) -> None:
    exact = theirs.logprobs["float32"]
    ours, other = (
        (logprobs - exact).abs()
        for logprobs in (alone["bfloat16 logprobs"], theirs.logprobs["bfloat16"])
    )
    # Two ways of rounding the same sums; which one is nearer differs between processors.
    assert 0 < ours.mean() < 1.5 * other.mean()
    assert ours.max() < 3 * other.max()


def test_bfloat16_answers_part_where_two_logits_are_a_step_apart(
    theirs: Theirs, alone: dict[str, Any]
) -> None:
    same = 0
    for sample, one in zip(alone["bfloat16 answers"], theirs.answers["bfloat16"], strict=True):
        ours = sample.token_ids
        if ours == one.token_ids:
            same += 1
            continue
        pairs = zip(ours, one.token_ids, strict=False)
        place = next(i for i, (mine, other) in enumerate(pairs) if mine != other)
        logits = one.logits[place]
        top = logits.max()
        step = 2.0 ** (torch.log2(top.abs()).floor().item() - 7)  # bfloat16 has 8 bits
        assert top - logits[ours[place]] <= 2 * step, (place, top, logits[ours[place]])
    assert same > len(real.CHATS) // 2


def test_a_critic_made_of_it_begins_with_zeros_and_reads_the_last_states(
    theirs: Theirs, alone: dict[str, Any]
) -> None:
    rows = [states[:ANSWER_TOKENS] for states in theirs.states]
    head = _head(rows[0].shape[1])
    wanted = pad_responses([(states @ head.T)[:, 0].tolist() for states in rows], torch.float32)[0]
    assert alone["values of a new critic"].shape == wanted.shape
    assert not alone["values of a new critic"].any()
    torch.testing.assert_close(alone["values"], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_layout_is_one_rank(theirs: Theirs, alone: dict[str, Any], world_size: int) -> None:
    wanted = alone["layouts"]["alone"]
    assert not torch.allclose(wanted.logprobs["adapted"], wanted.logprobs["whole"], atol=0.1)
    body: Callable[..., Any] = _on_layouts if world_size == 2 else _on_layouts_and_engine
    for rank, found in enumerate(_found_by(world_size, body, theirs.root)):
        for name, of_layout in found.items():
            title = f"{name}, rank {rank}"
            _assert_near(of_layout, wanted, title)
            _assert_bytes(of_layout, is_padded=name == "dp 2", title=title)

    for kind in ("whole", "adapted"):
        for name in FORMS[world_size]:
            updated = theirs.root / "updated" / kind
            _assert_same_weights(updated / name, updated / "alone", 2e-5)
            shutil.rmtree(updated / name)
    for exported in (theirs.root / "exported").iterdir():
        assert len(_assert_same_weights(exported, theirs.root / NAME, 0.0)) == 272


def _on_layouts_and_engine(rank: int, world_size: int, root: Path) -> dict[str, Found]:
    rollout = torch.load(root / "rollout", weights_only=False)
    responses = [
        ids[:length].tolist()
        for ids, length in zip(rollout.response_ids, rollout.response_lengths, strict=True)
    ]
    samples = _answers(root, rollout.prompts.token_ids[:FEW], "float32", dist.group.WORLD)
    assert [sample.token_ids for sample in samples] == responses[:FEW]
    return _on_layouts(rank, world_size, root)


def _assert_near(found: Found, wanted: Found, title: str) -> None:
    for kind, logprobs in wanted.logprobs.items():
        difference = (found.logprobs[kind] - logprobs).abs().max()
        assert difference < 1e-4, (title, kind, difference)
    for kind, metrics in wanted.metrics.items():
        assert metrics["actor/grad_norm"] > 0.01 and metrics["actor/pg_clipfrac"] > 0
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/pg_clipfrac"):
            if name in metrics:
                near = pytest.approx(metrics[name], rel=1e-4, abs=1e-5)
                assert found.metrics[kind][name] == near, (title, kind, name)


def _assert_bytes(found: Found, is_padded: bool, title: str) -> None:
    planned = found.planned
    measured = dict(zip(planned, found.measured.values(), strict=True))
    if not is_padded:
        assert measured == planned, title
        return
    # Replicas share out padded buckets, so that one of them has a little more than its part.
    for owner, nbytes in planned.items():
        assert measured[owner] == pytest.approx(nbytes, rel=5e-3), (title, owner)


def _assert_same_weights(directory: Path, other: Path, tolerance: float) -> list[str]:
    """The names of the tensors, which two checkpoints hold alike."""
    (file,) = directory.glob("*.safetensors")
    (wanted,) = other.glob("*.safetensors")
    with safe_open(file, "pt") as ours, safe_open(wanted, "pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        for name in ours.keys():  # noqa: SIM118  it is no mapping
            tensor, expected = ours.get_tensor(name), theirs.get_tensor(name)
            assert tensor.dtype == expected.dtype
            worst = (tensor.float() - expected.float()).abs().max().item()
            assert worst <= tolerance, (directory, name, worst)
        return list(ours.keys())
