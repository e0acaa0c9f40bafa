"""`mrlhf plan`: the bytes of each phase are those of a hand-over and of a build."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrlhf.config import PPOConfig, load_config
from mrlhf.errors import ConfigError
from mrlhf.inference.sizes import engine_ep
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.planning.gpus import GPUS, STATED
from mrlhf.planning.seconds import Lengths, estimate
from mrlhf.preflight import dry_run
from mrlhf.preflight.footprint import ENGINE, GENERATION, OWNERS, footprint
from mrlhf.preflight.memory_checks import check_memory, offloads, with_keys
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import sides_of_all
from tests.planned import GRPO, MIXTURE, config_of, specs_of

pytestmark = pytest.mark.usefixtures("among_published")

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
    config = config_of(file, *keys, f"rollout.tp={tp}")
    specs = specs_of(config)
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
    config = config_of(GRPO)
    sizes = footprint(config, specs_of(config), 8)
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
        config = config_of(GRPO, "actor.ppo_mini_batch_size=2", "rollout.n=4", *keys)
        phases = footprint(config, specs_of(config), 8).phases
        return phases["update of actor"]["actor/activations"]

    share = 2 * 4 * (1024 + 3072) // 4  # tokens of a rank; dp is 4
    few = activations(f"actor.micro_batch_tokens={share}")
    assert activations("actor.micro_batch_tokens=100000") == few
    less = activations(f"actor.micro_batch_tokens={share // 2}")
    assert less < few


def test_a_judge_counts_in_its_own_phase() -> None:
    """8,190,735,360 weights in four parts, and an engine that needs the half of them."""
    path = config_of(GRPO).actor.path
    keys = ["reward.terms=[{name: judge}]", "judge.template='{{ response }}'"]
    judge = f"path: {path}, tp: 2, offload: [params], max_prompt_tokens: 4096"
    config = config_of(GRPO, *keys, f"judge_model={{{judge}}}")
    phase = "passes of judge_model"
    alike = footprint(config, specs_of(config), 8).phases[phase]
    assert alike["judge_model/params"] == pytest.approx(8_190_735_360, rel=1e-3)
    assert alike["judge engine/params"] == 0  # they are the model's
    blocks = -(-(4096 + 512) // 64) * 64
    assert alike["judge engine/cache, at least"] == 2 * 36 * 4 * 128 * 2 * blocks

    split = config_of(GRPO, *keys, f"judge_model={{{judge}, pp: 2}}")
    sizes = footprint(split, specs_of(split), 8)
    assert sizes.sizes["judge_model/params"] == pytest.approx(8_190_735_360 / 2, rel=0.1)
    assert sizes.sizes["judge engine/params"] > 0.4 * 8_190_735_360


def test_each_of_several_teachers_counts() -> None:
    """The output layer of 151,936 x 4096 weights has two parts; see above for the others."""
    path = config_of(GRPO).actor.path
    each = ", ".join(f"{{name: {name}, path: {path}, data_source: {name}}}" for name in "ab")
    config = config_of(GRPO, f"teacher={{several: [{each}], tp: 2, offload: [params]}}")
    phases = footprint(config, specs_of(config), 8).phases
    for name in ("teacher.a", "teacher.b"):
        (nbytes,) = phases[f"passes of {name}"].values()
        assert nbytes == pytest.approx(8_190_735_360, rel=1e-3)
        assert phases["update of actor"][f"{name}_output/params"] == 151_936 * 4096

    stays = with_keys(config, {"teacher.offload": []})
    leaves = with_keys(stays, {"teacher.offload": offloads(stays)[3]["teacher.offload"]})
    assert footprint(leaves, specs_of(leaves), 8).phases == phases


def test_a_teacher_that_follows_counts_with_its_average() -> None:
    """Half of 8,190,735,360 weights, of two bytes, and of four in the average."""
    key = "teacher={weights: earlier, decay: 0.9, offload: [params]}"
    config = config_of(GRPO, key, "actor.offload=[params]")
    specs = specs_of(config)
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
    stays = config_of(GRPO)
    specs = specs_of(stays)
    sizes = footprint(stays, specs, 8)
    leaves = footprint(
        config_of(GRPO, f"actor.offload={everything}", "reference.offload=params"), specs, 8
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
    config = config_of(GRPO, f"actor.offload={everything}", "reference.offload=params")
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
    config = config_of(GRPO)
    specs = specs_of(config)
    check_memory(config, specs, 8, gpu_mb=81_559)
    with pytest.raises(ConfigError, match=r"a GPU of 42\.41 GB is too little for the phase 'gen"):
        check_memory(config, specs, 8, gpu_mb=40_442)
    bounded = config_of(GRPO, "distributed.device_memory_mb=60000")
    check_memory(bounded, specs, 8, gpu_mb=40_442)  # the key says what there is
