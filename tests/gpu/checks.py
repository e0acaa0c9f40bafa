"""What a GPU must compute as a CPU does, one function for each subject.

The CPU's numbers are those of transformers and torch in float32. Each function takes a `Place`,
raises an AssertionError, and returns figures worth keeping. This file needs torch, transformers,
megatron-core and pydantic alone; neither pytest nor what reads data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.engine_loop import generate, requests_for
from mrlhf.device import Device, pick_device
from mrlhf.inference.base import EngineLimits, Sample, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.native.graphs import DecodeGraphs
from mrlhf.models.families import load_spec
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.execute import Resharder, TransferOptions
from mrlhf.reshard.plan import Planner
from tests.dist import role_runs
from tests.dist.role_runs import MANY_PACKS, Form, Setting
from tests.gpu import packed_attention
from tests.oracle import plain_models, plain_ppo, plain_tables
from tests.oracle.plain_ppo import Case
from tests.plans import side_of_ranks

Figures = dict[str, float]

MODELS = ("llama", "qwen2-tied", "qwen3")
NEAR = {
    "use_kl_loss": True,
    "kl_loss_type": "low_var_kl",
    "kl_loss_coef": 0.3,
    "entropy_coeff": 0.05,
}
UPDATE = Case("qwen3", "token-mean", NEAR)
BFLOAT16 = replace(MANY_PACKS, dtype="bfloat16")
SMALL = EngineLimits(max_num_seqs=8, max_length=48, max_prefill_tokens=64, cache_bytes=64 << 20)
PRODUCTION = replace(SMALL, max_length=600, max_prefill_tokens=200)
SHORT_PROMPTS = (1, 8, 15, 3, 20, 6, 11, 2, 9, 17, 5)
LONG_PROMPTS = (300, 5, 530, 250)  # tokens; pages of a GPU have 64
NEVER = (3, 5, 8)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k and top-p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
}


@dataclass(frozen=True)
class Place:
    """Where the checks run."""

    setting: Setting  # one rank of its own on the device, with the models and experiences on disk
    work: Path  # a directory for what a check writes

    @property
    def device(self) -> torch.device:
        """The device under test."""
        return self.setting.device.torch_device

    def with_form(self, form: Form) -> Setting:
        """The setting, but its roles are run in another way."""
        return replace(self.setting, form=form)


@contextmanager
def prepared(kind: str, root: Path) -> Iterator[Place]:
    """Join a job of one rank and write the models; `kind` is "auto" or "cpu"."""
    device: Device = pick_device(kind, local_rank=0)
    backend = "gloo" if device.kind == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        role_runs.save_inputs(root)
        layout = ParallelLayout.for_world("actor", 1, AxisSizes(tp=1, pp=1))
        groups = GroupFactory(timeout_s=600.0).role_groups(layout)
        yield Place(Setting(root, groups, MANY_PACKS, device), root / "work")
    finally:
        dist.destroy_process_group()


def nccl(place: Place) -> Figures:
    """The collectives that training uses, in a group of one rank, on the device and on the host."""
    for device in (place.device, torch.device("cpu")):
        numbers = torch.arange(8, dtype=torch.float32, device=device)
        received = torch.empty_like(numbers)
        dist.all_gather_into_tensor(received, numbers)
        assert torch.equal(received, numbers)

        dist.reduce_scatter_tensor(received, numbers)
        assert torch.equal(received, numbers)

        dist.all_reduce(received)
        dist.broadcast(received, src=0)
        assert torch.equal(received, numbers)
    dist.barrier()
    return {}


def logprobs(place: Place) -> Figures:
    """Log-probabilities, entropy, KL and values of whole batches equal transformers'."""
    figures = {}
    for model in MODELS:
        case = Case(model, "token-mean")
        tables = role_runs.evaluate(place.setting, case)
        for name, wanted in _with_transformers(place, case).items():
            gap = float((tables[name] - wanted).abs().max())
            assert gap < 1e-4, f"{model}: {name} differs by {gap:.2g}"
            figures[f"{model}, {name}"] = gap
    return figures


def bfloat16_logprobs(place: Place) -> Figures:
    """In bfloat16 they stay near."""
    case = Case("llama", "token-mean")
    tables = role_runs.evaluate(place.with_form(BFLOAT16), case)
    mask = role_runs.load_experience(place.setting.root, case).rollout.response_mask
    figures = {}
    for name, wanted in _with_transformers(place, case).items():
        gap = float((tables[name] - wanted).abs()[mask].mean())
        assert gap < 0.03, f"{name} differs by {gap:.2g} on average"
        figures[name] = gap
    return figures


def update(place: Place) -> Figures:
    """One PPO update of actor and critic in float32 gives the weights of the plain loop."""
    trained = _update(place, MANY_PACKS)
    for name, (value, wanted) in trained.metrics.items():
        assert abs(value - wanted) <= 1e-4 * abs(wanted) + 1e-5, (name, value, wanted)
    assert trained.largest_gap < 1e-4, trained.largest_gap
    return {"largest gap of a weight": trained.largest_gap}


def bfloat16_update(place: Place) -> Figures:
    """The same in bfloat16 stays near, and moves the weights as far and in the same direction."""
    trained = _update(place, BFLOAT16)
    for name, (value, wanted) in trained.metrics.items():
        assert abs(value - wanted) <= 0.1 * abs(wanted) + 0.03, (name, value, wanted)
    assert trained.gap_over_way < 0.3, trained.gap_over_way
    return {"gap of the weights over their way": trained.gap_over_way}


def muon_update(place: Place) -> Figures:
    """Muon rounds its products to bfloat16 on a GPU, and moves the weights as the plain loop."""
    trained = _update(place, MANY_PACKS, replace(UPDATE, optimizer="muon"))
    assert trained.gap_over_way < 0.1, trained.gap_over_way
    return {"gap of the weights over their way": trained.gap_over_way}


def ratio_is_one(place: Place) -> Figures:
    """Evaluation and update do the same arithmetic: at first the KL of the two is 0 exactly."""
    case = Case("qwen3", "token-mean", {"use_kl_loss": True, "kl_loss_type": "abs"})
    for form in (MANY_PACKS, BFLOAT16):
        setting = place.with_form(form)
        experience = role_runs.load_experience(setting.root, case)
        rows = len(experience.rollout)
        actor = role_runs.build_actor(setting, case, ppo_epochs=1)
        current = role_runs.logprobs_of(actor, experience.rollout, rows)
        fresh = replace(experience, old_logprobs=current, ref_logprobs=current)
        metrics = role_runs.update_actor(actor, fresh, rows)
        assert metrics["actor/kl_loss"] == 0.0, f"{form.dtype}: {metrics['actor/kl_loss']}"
    return {}


def attention(place: Place) -> Figures:
    """Attention within packs, of several dtypes and windows, equals a CPU's in float32."""
    return packed_attention.gaps(place.device)


def engine(place: Place) -> Figures:
    """The native engine's greedy tokens are transformers', with CUDA graphs and without."""
    figures = {}
    on_gpu = place.device.type == "cuda"
    for model in (*MODELS, "deepseek-v3"):
        for eager in (False, True):
            with mock.patch.object(DecodeGraphs, "run", autospec=True, side_effect=_run) as run:
                actor_path = place.setting.root / model
                gap = _generate(actor_path, _engine(place, actor_path, eager))
            assert run.called == (on_gpu and not eager), (model, eager)
            figures[f"{model}, {'eager' if eager else 'graphs'}"] = gap
    return figures


_run = DecodeGraphs.run


def engine_in_bfloat16(place: Place) -> Figures:
    """The engine as a run uses it stays near transformers in float32 with the same weights.

    In bfloat16, with several pages a sequence, prompts in chunks that are computed once for all
    their samples, more samples than run at once, and tokens that are never drawn.
    """
    figures = {}
    root = place.setting.root / "qwen3"
    reference = plain_models.load(root).bfloat16().float()
    for name, options in SAMPLINGS.items():
        for eager in (False, True):
            holder = _engine(place, root, eager, PRODUCTION, torch.bfloat16, NEVER)
            gaps = _gaps_of_samples(holder, reference, options)
            assert float(gaps.mean()) < 0.03, f"{name}: {float(gaps.mean()):.2g} on average"
            assert float(gaps.max()) < 0.3, f"{name}: {float(gaps.max()):.2g}"
            figures[f"{name}, {'eager' if eager else 'graphs'}"] = float(gaps.mean())
    return figures


def reshard(place: Place) -> Figures:
    """Trained weights are in the engine after a hand-over, which copies nothing on one rank."""
    case = UPDATE
    setting = place.setting
    actor = role_runs.build_actor(setting, case)
    spec = actor.engine.spec
    holder = _empty_engine(place.device, spec, eager=False)

    source = side_of_ranks({0: role_pieces(spec, setting.groups.layout, 0)})
    layout = EngineLayout.inside(setting.groups.layout, 1)
    target = side_of_ranks({0: engine_pieces(spec, layout, 0)})
    options = TransferOptions(bucket_bytes=1 << 20, verify=True)
    planner = Planner([(source, target)], itemsize=4)
    resharder = Resharder(planner, actor.engine.slots, holder, 0, options)

    experience = role_runs.load_experience(setting.root, case)
    for version in (1, 2):
        role_runs.update_actor(actor, experience, plain_ppo.MINI_BATCH)
        holder.wake()
        stats = resharder.run(meanwhile=holder.take_cache)
        holder.commit(version)
        assert stats.bytes_moved == 0, stats

        exported = place.work / f"resharded {version}"
        actor.engine.export(exported, 10**9)
        config = setting.root / case.model / "config.json"
        (exported / "config.json").write_bytes(config.read_bytes())
        gap = _generate(exported, holder)
        holder.sleep(free_weights=True)
    return {"largest gap of a log-probability": gap}


def adapters(place: Place) -> Figures:
    """An engine adds the adapters of a policy as on a CPU, those of experts too."""
    figures = {}
    for model in ("qwen3", "qwen3-moe"):
        actor = role_runs.build_actor(place.setting, Case(model, "token-mean", lora=True))
        answers = []
        for device in (place.device, torch.device("cpu")):
            holder = _empty_engine(device, actor.engine.spec, eager=False)
            weights = {slot.piece.key: slot for slot in actor.engine.slots}
            for slot in holder.weight_slots():
                slot.store(weights[slot.piece.key].load().detach().cpu())
            holder.commit(1)
            answers.append(_answers(holder))

        gaps = []
        for here, on_cpu in zip(*answers, strict=True):
            assert here.token_ids == on_cpu.token_ids, model
            gaps.append(_largest_gap(here.logprobs, torch.tensor(on_cpu.logprobs)))

        figures[model] = max(gaps)
        assert figures[model] < 1e-3, f"{model}: log-probabilities differ by {figures[model]:.2g}"
    return figures


CHECKS: dict[str, Callable[[Place], Figures]] = {
    "NCCL at world size 1": nccl,
    "log-probs, entropy, KL, values": logprobs,
    "log-probs in bfloat16": bfloat16_logprobs,
    "first ratio is one": ratio_is_one,
    "PPO update in float32": update,
    "PPO update in bfloat16": bfloat16_update,
    "PPO update by Muon": muon_update,
    "attention within packs": attention,
    "native engine, CUDA graphs": engine,
    "native engine in bfloat16": engine_in_bfloat16,
    "reshard": reshard,
    "adapters": adapters,
}


def _with_transformers(place: Place, case: Case) -> dict[str, Tensor]:
    root = place.setting.root
    experience = role_runs.load_experience(root, case)
    rollout = experience.rollout
    policy = plain_models.load(root / case.model)
    log_p, entropy = plain_tables.evaluate(policy, rollout)

    assert experience.ref_logprobs is not None
    return {
        "logprobs": log_p,
        "entropy": entropy,
        "full_kl": plain_tables.full_kl(
            policy, plain_models.load(root / f"{case.model}-ref"), rollout
        ),
        "ref_logprobs": experience.ref_logprobs,
        "values": plain_tables.token_values(
            plain_models.load(root / f"{case.model}-critic"), rollout
        ),
    }


@dataclass(frozen=True)
class _Trained:
    """An update beside that of the plain loop."""

    metrics: dict[str, tuple[float, float]]  # by name ours and those of the plain loop
    largest_gap: float  # of any weight
    gap_over_way: float  # the sum of all gaps over the sum of how far the weights went


def _update(place: Place, form: Form, case: Case = UPDATE) -> _Trained:
    setting = place.with_form(form)
    out = place.work / case.optimizer / form.dtype
    metrics = role_runs.train(setting, case, out)

    experience = role_runs.load_experience(setting.root, case)
    model = setting.root / case.model
    critic = Path(f"{model}-critic")
    outcomes = (
        ("actor", model, plain_ppo.train_actor(case, model, experience)),
        ("critic", critic, plain_ppo.train_critic(case, model, experience)),
    )

    pairs = {}
    largest = gaps = ways = 0.0
    for role, path, outcome in outcomes:
        pairs |= {name: (metrics[name], value) for name, value in outcome.metrics.items()}
        before = dict(plain_models.load(path).named_parameters())
        trained = load_file(out / role / "model.safetensors")
        for name, weight in outcome.weights.items():
            gap = (trained[name].float() - weight).abs()
            largest = max(largest, float(gap.max()))
            gaps += float(gap.sum())
            ways += float((weight - before[name]).detach().abs().sum())
    return _Trained(pairs, largest, gaps / ways)


def _empty_engine(
    device: torch.device,
    spec: ModelSpec,
    eager: bool,
    limits: EngineLimits = SMALL,
    dtype: torch.dtype = torch.float32,
    never: tuple[int, ...] = (),
) -> NativeEngine:
    limits = replace(limits, enforce_eager=eager)
    return NativeEngine(spec, None, device, dtype, limits, never=never)


def _engine(place: Place, model: Path, eager: bool, *form: Any) -> NativeEngine:
    """An engine with the weights of a checkpoint; `form` is that of `_empty_engine`."""
    holder = _empty_engine(place.device, load_spec(str(model), "lm"), eager, *form)
    state = load_file(model / "model.safetensors")
    for slot in holder.weight_slots():
        piece = slot.piece
        slot.store(state[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start))
    holder.commit(1)
    return holder


def _gaps_of_samples(holder: NativeEngine, reference: Any, options: dict[str, Any]) -> Tensor:
    """Draw three samples of each long prompt; returns the gap of each token's log-probability."""
    prompts = _prompts(LONG_PROMPTS)
    sampling = SamplingParams(n=3, max_tokens=20, seed=0, **options)
    finished = generate(holder, requests_for(prompts, list(range(len(prompts))), sampling, None))
    # Prompts are computed once for the samples that run at the same time.
    assert finished.stats.computed_prompt_tokens < 2 * sum(LONG_PROMPTS)

    gaps = []
    for number, prompt in enumerate(prompts):
        samples = [some for some in finished.samples if some.request_id == number]
        assert len({tuple(sample.token_ids) for sample in samples}) == sampling.n
        assert not {*NEVER} & {token for sample in samples for token in sample.token_ids}
        ids = torch.tensor([[*prompt, *sample.token_ids] for sample in samples])
        with torch.no_grad():
            logits = reference(ids).logits[:, len(prompt) - 1 : -1] / sampling.temperature
        drawn = ids[:, len(prompt) :, None]
        wanted = logits.log_softmax(dim=-1).gather(2, drawn)[..., 0]
        gaps.append((torch.tensor([sample.logprobs for sample in samples]) - wanted).abs())
    return torch.stack(gaps)


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    vocabulary = plain_models.SIZES["vocab_size"]
    return [
        torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


def _generate(model: Path, holder: NativeEngine) -> float:
    """Answer prompts greedily; returns the largest gap of a log-probability to transformers'.

    A token may have a logit 1e-3 below the largest one, since rounding decides between such two.
    """
    prompts = _prompts(SHORT_PROMPTS)
    samples = _answers(holder)
    assert len(samples) == len(prompts)

    largest = 0.0
    reference = plain_models.load(model)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert len(sample.token_ids) == 14
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        drawn = torch.tensor(list(sample.token_ids))[:, None]
        below = logits.max(dim=-1).values - logits.gather(1, drawn)[:, 0]
        assert float(below.max()) < 1e-3, f"{model.name}: not the greedy token"

        wanted = logits.log_softmax(dim=-1).gather(1, drawn)[:, 0]
        largest = max(largest, _largest_gap(sample.logprobs, wanted))
    assert largest < 1e-3, f"{model.name}: log-probabilities differ by {largest:.2g}"
    return largest


def _answers(holder: NativeEngine) -> list[Sample]:
    """Answer the short prompts greedily."""
    prompts = _prompts(SHORT_PROMPTS)
    sampling = SamplingParams(temperature=0.0, max_tokens=14, seed=0)
    return generate(holder, requests_for(prompts, list(range(len(prompts))), sampling)).samples


def _largest_gap(logprobs: Sequence[float], wanted: Tensor) -> float:
    return float((torch.tensor(logprobs) - wanted).abs().max())
