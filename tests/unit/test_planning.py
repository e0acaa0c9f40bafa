"""`mrlhf plan`: bytes are those of a hand-over and a build, and what it proposes runs."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mrlhf.commands.plan import layout_of, main
from mrlhf.config import DPOConfig, PPOConfig, SFTConfig, load_config
from mrlhf.config.roots import AnyConfig
from mrlhf.errors import ConfigError
from mrlhf.inference.sizes import engine_ep
from mrlhf.models.flops import forward_flops
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.planning.gpus import GPUS, STATED
from mrlhf.planning.passes import Passes, Work
from mrlhf.planning.search import search
from mrlhf.planning.seconds import Lengths, estimate
from mrlhf.preflight import check, dry_run
from mrlhf.preflight.footprint import ENGINE, GENERATION, OWNERS, footprint
from mrlhf.preflight.memory_checks import check_memory, offloads, with_keys
from mrlhf.preflight.model_checks import check_models
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import sides_of_all
from tests.models.published import write_published
from tests.pages import ROOT, commands_of

GRPO = "configs/gpu/qwen3_8b_grpo_8_gpus.yaml"
MIXTURE = "configs/gpu/qwen3_30b_a3b_grpo_16_gpus.yaml"
# Layout of the actor, and the engine's tp: the same, wider, narrower, across stages; then experts
# that stay whole in the engine too, inside of an actor's group and across.
ENGINES = [
    (ParallelLayout(tp=2, dp=2, etp=2), 2),
    (ParallelLayout(tp=2, pp=2, etp=2), 4),
    (ParallelLayout(tp=4, etp=4), 2),
    (ParallelLayout(tp=2, pp=2, dp=2, etp=2), 2),
    (ParallelLayout(tp=2, cp=2, pp=2, etp=2), 2),
]
OF_EXPERTS = [(ParallelLayout(tp=4, dp=2, ep=8), tp) for tp in (4, 8)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planning")
    write_published(root / "models")
    (root / "configs").symlink_to(ROOT / "configs")
    return root


@pytest.fixture(autouse=True)
def in_its_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def _config(file: str, *overrides: str) -> PPOConfig:
    return load_config(PPOConfig, file, ["distributed.device=cuda", *overrides])


def _specs(config: AnyConfig) -> dict[str, ModelSpec]:
    return {name: spec for name, spec in check_models(config).items() if spec is not None}


@pytest.mark.parametrize(
    ("file", "layout", "tp"),
    [*((file, *engine) for file in (GRPO, MIXTURE) for engine in ENGINES)]
    + [(MIXTURE, *engine) for engine in OF_EXPERTS],
)
def test_the_engine_holds_alone_what_a_hand_over_brings_or_copies(
    file: str, layout: ParallelLayout, tp: int
) -> None:
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    keys = [f"actor.{axis}={size}" for axis, size in sizes.items()]
    config = _config(file, *keys, f"rollout.tp={tp}")
    specs = _specs(config)
    # Few layers, so that the plans are made at once.
    few = {name: _shallow(spec) for name, spec in specs.items()}

    spec = few["actor"]
    ep = engine_ep("native", config.rollout.ep, tp, layout.etp, spec)
    engine = EngineLayout.closest(layout, tp, ep)
    sides = sides_of_all(
        engine,
        lambda rank: role_pieces(spec, layout, rank),
        lambda rank: engine_pieces(spec, engine, rank),
    )
    planner = Planner(sides, 2)
    brought = []
    for stage in range(layout.pp):
        plan = planner.plan(layout.rank_at(pp=stage))
        moves = (*plan.receives, *plan.copies)
        brought.append(2 * sum(move.elements for move in moves))

    sizes_of = footprint(config, few, layout.world_size).sizes
    assert sizes_of[ENGINE] == max(brought)


def _shallow(spec: ModelSpec) -> ModelSpec:
    experts = spec.experts
    if experts is not None:
        experts = replace(experts, count=8, layers=(True,) * 4)
    return replace(spec, num_layers=4, windows=(None,) * 4, experts=experts)


def test_bytes_of_each_owner_are_those_of_the_published_size() -> None:
    """8,190,735,360 weights of Qwen3-8B, of which tp 2 and dp 4 leave a half to each rank."""
    config = _config(GRPO)
    sizes = footprint(config, _specs(config), 8)
    weights = sizes.held["actor/params"] / 2
    assert weights == pytest.approx(8_190_735_360 / 2, rel=1e-3)  # norms lie on both ranks
    assert sizes.held["reference/params"] == sizes.held["actor/params"]
    assert sizes.held["actor/grads"] == 4 * weights
    assert sizes.held["actor/optimizer"] == pytest.approx(12 * weights / 4, rel=1e-6)
    assert sizes.sizes[ENGINE] == 0

    # 36 layers, 8 KV heads over two ranks, heads of 128, keys and values of two bytes.
    assert sizes.sample_bytes == 2 * 36 * 4 * 128 * 2 * 4096

    kept = 36 * 8192 * (8 * 4096 + 8 * (32 + 8) * 128 + 6 * 12288) // 2
    # The output of the layers and the angles of rotation; three more of all tokens' states at the
    # loss, logits of at most 1 GiB with their gradient, and the weight's gradient in float32.
    states = 2 * 8192 * 4096
    row = 151936 // 2 * 2
    at_loss = 3 * states + 3 * (2**29 // row * row) + 2 * row * 4096
    activations = kept + states // 2 + 4 * 128 * 8192 + at_loss
    assert sizes.phases["update of actor"] == {"actor/activations": activations}
    assert sizes.peak == "update of actor"


def test_a_micro_batch_is_no_larger_than_a_rank_s_share_of_an_optimizer_step() -> None:
    """However large it may be: a small batch does not take the activations of a large one."""

    def activations(*keys: str) -> int:
        config = _config(GRPO, "actor.ppo_mini_batch_size=2", "rollout.n=4", *keys)
        phases = footprint(config, _specs(config), 8).phases
        return phases["update of actor"]["actor/activations"]

    share = 2 * 4 * (1024 + 3072) // 4  # tokens of a rank; dp is 4
    few = activations(f"actor.micro_batch_tokens={share}")
    assert activations("actor.micro_batch_tokens=100000") == few
    less = activations(f"actor.micro_batch_tokens={share // 2}")
    assert less < few


def test_a_judge_counts_in_its_own_phase() -> None:
    """8,190,735,360 weights in four parts, and an engine that needs the half of them."""
    path = _config(GRPO).actor.path
    keys = ["reward.terms=[{name: judge}]", "judge.template='{{ response }}'"]
    judge = f"path: {path}, tp: 2, offload: [params], max_prompt_tokens: 4096"
    config = _config(GRPO, *keys, f"judge_model={{{judge}}}")
    phase = "passes of judge_model"
    alike = footprint(config, _specs(config), 8).phases[phase]
    assert alike["judge_model/params"] == pytest.approx(8_190_735_360, rel=1e-3)
    assert alike["judge engine/params"] == 0  # they are the model's
    blocks = -(-(4096 + 512) // 64) * 64
    assert alike["judge engine/cache, at least"] == 2 * 36 * 4 * 128 * 2 * blocks

    split = _config(GRPO, *keys, f"judge_model={{{judge}, pp: 2}}")
    sizes = footprint(split, _specs(split), 8)
    assert sizes.sizes["judge_model/params"] == pytest.approx(8_190_735_360 / 2, rel=0.1)
    assert sizes.sizes["judge engine/params"] > 0.4 * 8_190_735_360


def test_each_of_several_teachers_counts() -> None:
    """The output layer of 151,936 x 4096 weights has two parts; see above for the others."""
    path = _config(GRPO).actor.path
    each = ", ".join(f"{{name: {name}, path: {path}, data_source: {name}}}" for name in "ab")
    config = _config(GRPO, f"teacher={{several: [{each}], tp: 2, offload: [params]}}")
    phases = footprint(config, _specs(config), 8).phases
    for name in ("teacher.a", "teacher.b"):
        (nbytes,) = phases[f"passes of {name}"].values()
        assert nbytes == pytest.approx(8_190_735_360, rel=1e-3)
        assert phases["update of actor"][f"{name}_output/params"] == 151_936 * 4096

    stays = with_keys(config, {"teacher.offload": []})
    leaves = with_keys(stays, {"teacher.offload": offloads(stays)[3]["teacher.offload"]})
    assert footprint(leaves, _specs(leaves), 8).phases == phases


def test_a_teacher_that_follows_counts_with_its_average() -> None:
    """Half of 8,190,735,360 weights, of two bytes, and of four in the average."""
    key = "teacher={weights: earlier, decay: 0.9, offload: [params]}"
    config = _config(GRPO, key, "actor.offload=[params]")
    specs = _specs(config)
    sizes = footprint(config, specs, 8)
    own = {"teacher/params": sizes.sizes["actor/params"]}
    assert own["teacher/params"] == pytest.approx(8_190_735_360, rel=1e-3)
    both = own | {"teacher/optimizer": 2 * own["teacher/params"]}
    actor = {"actor/params": sizes.sizes["actor/params"]}
    assert sizes.phases["move of teacher"] == actor | both
    assert sizes.phases["update of actor"].items() >= (actor | own).items()

    # It comes to be asked, to compare and to move, for which the actor comes and goes too; weights
    # and average then go.
    without = with_keys(config, {"teacher": None})
    gpu = GPUS["h100"]
    seconds = []
    for each in (config, without):
        of_each = footprint(each, specs, 8)
        took = estimate(each, specs, of_each, 8, gpu, Lengths(512, 1536), 70 * 10**9)
        seconds.append(took.seconds["offloading"])
    moved = 4 * own["teacher/params"] + 2 * both["teacher/optimizer"] + 2 * actor["actor/params"]
    wanted = moved / (1e9 * STATED.links * gpu.host_gb_s)
    assert seconds[0] - seconds[1] == pytest.approx(wanted)

    in_reward = with_keys(config, {"algorithm.distillation.mode": "reward"})
    phases = footprint(in_reward, specs, 8).phases
    assert "teacher/params" not in phases["update of actor"]
    becomes = with_keys(config, {"teacher.decay": 0.0, "teacher.offload": []})
    sizes = footprint(becomes, specs, 8)
    assert sizes.held["teacher/params"] == own["teacher/params"]
    assert "teacher/optimizer" not in sizes.sizes
    leaves = with_keys(becomes, {"teacher.offload": offloads(becomes)[3]["teacher.offload"]})
    assert "teacher/params" not in footprint(leaves, specs, 8).held


def test_what_is_offloaded_counts_in_the_phases_that_need_it() -> None:
    everything = "[params,grads,optimizer]"
    stays = _config(GRPO)
    specs = _specs(stays)
    sizes = footprint(stays, specs, 8)
    leaves = footprint(
        _config(GRPO, f"actor.offload={everything}", "reference.offload=params"), specs, 8
    )
    assert leaves.held == {}
    assert leaves.sizes == sizes.sizes
    actor = {f"actor/{owner}": sizes.held[f"actor/{owner}"] for owner in OWNERS}
    update = leaves.phases["update of actor"]
    assert update == actor | sizes.phases["update of actor"]
    params = {"actor/params": actor["actor/params"]}
    assert leaves.phases[GENERATION] == params | sizes.phases[GENERATION]
    assert leaves.phases["passes of reference"] == {
        "reference/params": sizes.held["reference/params"]
    }

    # 3 passes of the actor there and back, states there and back, and the reference once.
    gpu = GPUS["h100"]
    config = _config(GRPO, f"actor.offload={everything}", "reference.offload=params")
    took = estimate(config, specs, leaves, 8, gpu, Lengths(512, 1536), int(7e10))
    moved = 7 * sizes.held["actor/params"] + 2 * sizes.held["actor/optimizer"]
    assert took.seconds["offloading"] == pytest.approx(moved / (1e9 * STATED.links * gpu.host_gb_s))


def test_a_bound_on_memory_is_kept_or_refused_with_what_makes_room() -> None:
    files = [GRPO]
    fits = dry_run(load_config(PPOConfig, files, ["distributed.device=cuda"]), 8).text
    assert "update of actor 69.89 GB, passes of reference 45.05 GB, generation" in fits
    bound = ["distributed.device=cuda", "distributed.device_memory_mb=36000"]
    with pytest.raises(ConfigError) as caught:
        dry_run(load_config(PPOConfig, files, bound), 8)
    message = str(caught.value)
    assert "'generation', which needs 45.35 GB on a rank (actor/grads 16.38 GB, " in message
    remedies = message.partition("Room is made by ")[2].split("; or ")
    assert len(remedies) == 2
    for remedy in remedies:
        assert dry_run(load_config(PPOConfig, files, [*bound, *remedy.split()]), 8).text

    none = ["distributed.device=cuda", "distributed.device_memory_mb=18000"]
    with pytest.raises(ConfigError, match="more ranks or adapters, since no offload does"):
        dry_run(load_config(PPOConfig, files, none), 8)


def test_a_start_on_gpus_that_are_too_small_is_refused() -> None:
    config = _config(GRPO)
    specs = _specs(config)
    check_memory(config, specs, 8, gpu_mb=81_559)
    with pytest.raises(ConfigError, match=r"a GPU of 42\.41 GB is too little for the phase 'gen"):
        check_memory(config, specs, 8, gpu_mb=40_442)
    bounded = _config(GRPO, "distributed.device_memory_mb=60000")
    check_memory(bounded, specs, 8, gpu_mb=40_442)  # the key says what there is


def test_the_seconds_of_a_small_step_have_digits_that_count(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    small = ["actor.path=models/Qwen2.5-1.5B", "data.train_batch_size=2"]
    keys = [*small, "actor.ppo_mini_batch_size=2", "rollout.n=2", "data.max_response_length=32"]
    keys += ["actor.tp=1", "actor.sequence_parallel=false", "rollout.tp=1"]
    assert main(["--config", GRPO, "--gpus", "8", *keys]) == 0

    said = capsys.readouterr().out.splitlines()
    steps = [re.split(r"  +", line)[3] for line in said if re.match(r"\d .*rollout.tp", line)]
    assert len(steps) == 5 and all(0 < float(step) < 0.5 for step in steps)


def test_only_what_does_not_fit_is_offloaded() -> None:
    config = _config(GRPO)
    specs = _specs(config)
    lengths = Lengths(512, 1536)
    small = replace(GPUS["h100"], memory_gb=50.0)
    found = search(config, specs, 4, small, lengths, 10)
    assert found.best and all(plan.config.actor.offload for plan in found.best)

    for plan in found.best:
        stays = {"actor.offload": [], "reference.offload": [], "actor.optim.stream": None}
        less = with_keys(plan.config, stays)
        without = footprint(less, specs, 4)
        assert without.total(without.peak) > 40e9

    # On a single one states pass through in parts, of which the embedding's is the largest.
    alone = search(config, specs, 1, GPUS["h100"], lengths, 10).best[0]
    assert alone.keys["actor.optim.stream"] == "host"
    part = alone.memory.phases["update of actor"]["actor/optimizer, in parts"]
    assert part == 3 * 4 * 151936 * 4096
    plenty = search(config, specs, 4, replace(small, memory_gb=400.0), lengths, 10)
    assert not any("actor.offload" in plan.keys for plan in plenty.best)


def test_seconds_are_operations_over_the_rate_where_nothing_else_counts() -> None:
    config = _config(GRPO, "actor.tp=1", "actor.sequence_parallel=false", "rollout.tp=1")
    specs = _specs(config)
    lengths = Lengths(512, 1536)
    gpu = replace(GPUS["h100"], memory_gb_s=1e12)
    sizes = footprint(config, specs, 1)
    one = estimate(config, specs, sizes, 1, gpu, lengths, int(1e12))
    operations = 128 * 8 * forward_flops(specs["actor"], 2048, 1536)
    rate = gpu.tflops * 1e12 * STATED.products
    assert one.seconds["scoring"] == pytest.approx(2 * operations / rate)  # and the reference
    assert one.seconds["update of actor"] == pytest.approx(3 * operations / rate, rel=0.01)
    assert one.tokens == 128 * 8 * 2048
    assert one.decoded_at_once == config.rollout.max_num_seqs

    recomputed = with_keys(config, {"actor.recompute": "full"})
    four = estimate(recomputed, specs, sizes, 1, gpu, lengths, int(1e12))
    head = 128 * 8 * forward_flops(specs["actor"], 0, 1536)  # that is not computed again
    again = operations - head
    took = (3 * operations + again) / rate
    assert four.seconds["update of actor"] == pytest.approx(took, rel=0.01)

    # Two stages and as many micro-batches idle for a third of the time; the last has the head.
    staged = with_keys(config, {"actor.pp": 2, "actor.micro_batch_tokens": 64 * 8 * 1024})
    sizes = footprint(staged, specs, 2)
    two = estimate(staged, specs, sizes, 2, gpu, lengths, int(1e12))
    busy = 3 * (again / 2 + head) / rate
    assert two.seconds["update of actor"] == pytest.approx(busy * 1.5, rel=0.01)


SPLITS = [{}, {"tp": 4, "etp": 4}, {"tp": 4, "ep": 8}, {"ep": 8}, {"tp": 4, "ep": 4, "etp": 2}]


def test_ranks_share_out_the_products_of_experts() -> None:
    """However experts are dealt out, all ranks together compute as many operations."""
    spec = _specs(_config(MIXTURE))["actor"]
    gpu = replace(GPUS["h100"], memory_gb_s=1e30)
    work = Work(16384, 4096, 1e-9)
    alone = Passes(spec, ParallelLayout(), gpu, 2).forward(work)
    for sizes in SPLITS:
        layout = ParallelLayout(dp=8, **{"etp": 1, **sizes})
        assert layout.tp * Passes(spec, layout, gpu, 2).forward(work) == pytest.approx(
            alone, rel=0.02
        ), sizes  # routers are not shared out


def test_experts_cost_memory_whether_they_get_tokens_or_not() -> None:
    """2 copies and more of all weights a pass; fewer of them with `ep`."""
    spec = _specs(_config(MIXTURE))["actor"]
    weights = 48 * 3 * 128 * 2048 * 768
    gpu = replace(GPUS["h100"], tflops=1e12)
    tiny = Work(1e-9, 1, 1e-9)
    rate = 1e9 * STATED.memory * gpu.memory_gb_s
    for ep in (1, 8):
        passes = Passes(spec, ParallelLayout(dp=8, ep=ep), gpu, 2)
        assert passes.forward(tiny) == pytest.approx(2 * 2 * weights / ep / rate)
        # There and back: 7 times in bfloat16, and a float32 sum that is read and written.
        assert passes.update(tiny, False) == pytest.approx((7 * 2 + 8) * weights / ep / rate)


# Published by NVIDIA for NeMo-RL on H100 (docs/about/performance-summary.md of 0.6 and 0.4): GRPO
# with 64 prompts of 32 responses, at most 4,096 tokens; layout, mean length, seconds of a step.
PUBLISHED = [
    (MIXTURE, "Qwen3-30B-A3B", 32, {"tp": 1, "ep": 8}, 2, 3203, 192),
    (GRPO, "Qwen3-32B", 32, {"tp": 4, "pp": 4}, 4, 3206, 393),
    (GRPO, "Llama-3.1-8B-Instruct", 16, {"tp": 1, "pp": 2}, 1, 1060, 97.7),
]


@pytest.mark.parametrize(("file", "model", "gpus", "sizes", "engine_tp", "mean", "took"), PUBLISHED)
def test_seconds_stand_beside_those_of_published_runs(
    file: str, model: str, gpus: int, sizes: dict[str, int], engine_tp: int, mean: int, took: float
) -> None:
    """They count no waiting, no uneven lengths and no uneven experts, so they are less."""
    keys = {"tp": 1, "pp": 1, "micro_batch_tokens": 4096, "ppo_mini_batch_size": 16} | sizes
    keys |= {"path": f"models/{model}", "use_kl_loss": "true", "offload": "[grads,optimizer]"}
    keys |= {"sequence_parallel": str(keys["tp"] > 1).lower()}
    given = [f"actor.{key}={value}" for key, value in keys.items()]
    given += ["data.train_batch_size=64", "rollout.n=32", f"rollout.tp={engine_tp}"]
    given += ["data.max_prompt_length=512", "data.max_response_length=3584"]
    config = _config(file, *given)
    specs = _specs(config)
    sizes_of = footprint(config, specs, gpus)
    lengths = Lengths(150, mean - 150)
    step = estimate(config, specs, sizes_of, gpus, GPUS["h100"], lengths, int(70e9)).step
    assert 0.55 * took < step < took


def test_what_is_proposed_is_what_a_run_takes(capsys: pytest.CaptureFixture) -> None:
    (command,) = commands_of("docs/memory.md", "--out plans")
    assert main(shlex.split(command)[2:]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("8 x h100 of 80 GB, 10 GB of each left free; prompts of 512 and")
    rows = [line for line in said if line[:1].isdigit() and "rollout.tp" in line]
    assert len(rows) == 5
    (own,) = [line for line in said if line.startswith("yours  ")]
    assert "tp 2, rollout.tp 2, 8192 tokens  " in own
    (beside,) = [line for line in said if line.startswith("yours beside 1: ")]
    first, given = (float(re.split(r"  +", line)[3]) for line in (rows[0], own))
    assert float(re.findall(r"([+-][\d.]+) s", beside)[0]) == pytest.approx(given - first, abs=0.11)
    # Those that the estimate cannot tell from the fastest come with the least memory first.
    peaks = [float(re.split(r"  +", row)[2]) for row in rows]
    assert peaks[0] < 45 < float(re.split(r"  +", own)[2])
    for number in range(1, 6):
        files = [GRPO, f"plans/{number}.yaml"]
        found = dry_run(load_config(PPOConfig, files, []), 8)
        assert found.text.splitlines()[-1].startswith("what could be checked fits 8 ranks")

        config = load_config(PPOConfig, files, [])
        assert f"  {layout_of(config)}  " in rows[number - 1]
        assert (config.reference.tp, config.reference.pp) == (config.actor.tp, config.actor.pp)


@pytest.mark.recipes
def test_the_page_of_scale_has_the_plans_figures(capsys: pytest.CaptureFixture) -> None:
    rows = re.findall(
        r"^\| 1,024 \| (.*?) \| nothing \| (\d+) \| (\d+) \| (\d+) \|$",
        (ROOT / "docs/parallelism.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    (command,) = commands_of("docs/parallelism.md", "plan.py")
    assert main(shlex.split(command)[2:]) == 0
    (first,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("1  ")]
    layout, *numbers = re.split(r"  +", first)[1:]
    peak, step, _, generation = (f"{float(number):.0f}" for number in numbers[:4])
    assert rows == [(layout.rpartition(",")[0], peak, step, generation)]


def test_what_does_not_fit_is_told_with_what_it_lacks(capsys: pytest.CaptureFixture) -> None:
    assert main(["--config", GRPO, "--gpus", "1", "--reserve-gb", "50"]) == 1
    said = capsys.readouterr().out
    assert "none fits; the nearest:" in said
    assert " GB (actor/" in said
    assert "yours does not fit 1 GPUs: actor: world size 1 is not divisible by tp 2" in said
    assert "adapters (actor.lora.rank)" in said
    assert main(["--config", GRPO, "--gpus", "2", "actor.micro_batch_tokens=65536"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^yours does not fit: update of actor lacks \d+ GB \(actor/", said, re.M)


def test_supervised_training_is_planned_too(place: Path, capsys: pytest.CaptureFixture) -> None:
    text = {
        "model": {"path": "models/Qwen3-8B"},
        "data": {"train_files": "train.jsonl", "max_length": 4096, "batch_size": 64},
        "trainer": {"output_dir": "runs/sft"},
    }
    (place / "sft.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    assert main(["--config", "sft.yaml", "--gpus", "8", "--out", "sft-plans"]) == 0
    said = capsys.readouterr().out
    assert "update of model" in said
    assert "generation" not in said
    assert dry_run(load_config(SFTConfig, ["sft.yaml", "sft-plans/1.yaml"], []), 8).text
    # Of a layout that the model has no place for, others are found all the same.
    assert main(["--config", "sft.yaml", "--gpus", "8", "model.pp=8"]) == 0
    said = capsys.readouterr().out
    assert "yours does not fit 8 GPUs: model.pp 8 does not fit the model's 36 layers" in said


def test_the_reference_of_dpo_takes_nothing_beside_the_policy(place: Path) -> None:
    """It has said all before the policy is built, so what leaves the device of it has no effect."""
    text = {
        "model": {"path": "models/Qwen3-8B"},
        "data": {"train_files": "pairs.jsonl", "max_length": 2048, "batch_size": 64},
        "trainer": {"output_dir": "runs/dpo"},
    }
    (place / "dpo.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    config = load_config(DPOConfig, "dpo.yaml", ["distributed.device=cuda"])
    sizes = footprint(config, _specs(config), 8)
    assert sizes.held.keys() == {f"model/{owner}" for owner in OWNERS}
    assert sizes.phases.keys() == {"update of model"}
    with pytest.raises(ConfigError, match="reference has left before the model is built"):
        check(load_config(DPOConfig, "dpo.yaml", ["reference.offload=params"]), 8)
    found = search(config, _specs(config), 2, GPUS["h100"], Lengths(512, 512), 10)
    assert found.best and all("reference.offload" not in plan.keys for plan in found.best)


def _bad_input() -> Iterator[tuple[list[str], str]]:
    yield ["--gpus", "0"], "--gpus 0 is below 1"
    yield ["--gpus", f"1{'0' * 20}"], "is above 1000000"
    yield ["--gpus", "8", "--gpu", "z9"], "neither a file nor one of a100, h100, h200, b200"
    yield (
        ["--gpus", "8", "--gpu", "half.yaml"],
        "half.yaml: tflops, memory_gb_s, link_gb_s, network_gb_s, host_gb_s missing",
    )

    for name in ("zero", "yes", "nan", "infinite", "huge", "tiny"):
        yield ["--gpus", "8", "--gpu", f"{name}.yaml"], "tflops must be a number above 0"
    yield ["--gpus", "8", "--gpu", "parts.yaml"], "per_machine must be a whole number above 0"
    yield ["--gpus", "8", "--gpu", "more.yaml"], "no field is called gbps; there are memory_gb"
    yield ["--gpus", "8", "--gpu", "other.yaml"], "device must be cuda or cpu, and is 'tpu'"
    yield ["--gpus", "8", "--gpu", "latin.yaml"], "latin.yaml is not UTF-8 text"
    yield ["--gpus", "8", "--gpu", "configs"], "configs is neither a file nor one of"

    for reserve in ("-1", "nan", "inf", "80"):
        yield ["--gpus", "8", "--reserve-gb", reserve], f"--reserve-gb {reserve} is not between 0"
    for length in ("nan", "inf", "0"):
        yield ["--gpus", "8", "--prompt-tokens", length], "longest of the data, 1024 and 3072"
    yield ["--gpus", "8", "--response-tokens", "9000"], "longest of the data, 1024 and 3072"
    yield ["--gpus", "8", "actor.path=models/none"], "models/none holds no config.json"


@pytest.mark.parametrize(("arguments", "message"), list(_bad_input()))
def test_bad_input_is_one_line(
    arguments: list[str], message: str, place: Path, capsys: pytest.CaptureFixture
) -> None:
    (place / "half.yaml").write_text("memory_gb: 24\n", encoding="utf-8")
    names = ("memory_gb", "tflops", "memory_gb_s", "link_gb_s", "network_gb_s", "host_gb_s")
    rates = dict.fromkeys(names, 1)
    odd = {"zero": 0, "yes": True, "nan": math.nan, "infinite": math.inf, "huge": 10**400}
    files = {name: {"tflops": value} for name, value in {**odd, "tiny": 1e-320}.items()}
    files |= {"parts": {"per_machine": 1.5}, "more": {"gbps": 1}, "other": {"device": "tpu"}}
    for name, values in files.items():
        (place / f"{name}.yaml").write_text(yaml.safe_dump(rates | values), encoding="utf-8")
    (place / "latin.yaml").write_bytes("# \xe9\n".encode("latin-1"))

    assert main(["--config", GRPO, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(("ranks", "what"), [(0, "below 1"), (-1, "below 1"), (10**20, "above")])
def test_a_number_of_ranks_that_no_job_has_is_refused(ranks: int, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"--world-size {ranks} is {what}"):
        dry_run(_config(GRPO), ranks)


def test_a_gpu_of_ones_own_decides(place: Path) -> None:
    """On GPUs of a quarter of the memory, the layouts that fit cut the model into more parts."""
    config = _config(GRPO)
    specs = _specs(config)
    lengths = Lengths(512, 1536)
    small = replace(GPUS["h100"], memory_gb=40.0)
    found = search(config, specs, 16, small, lengths, 10)
    assert found.best
    for plan in found.best:
        assert plan.memory.total(plan.memory.peak) <= 30e9
        assert plan.config.actor.tp * plan.config.actor.pp >= 4
