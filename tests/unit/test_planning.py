"""`mrlhf plan`: what it proposes runs, in the seconds of stated rates."""

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
from mrlhf.errors import ConfigError
from mrlhf.models.flops import forward_flops
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.planning.gpus import GPUS, STATED
from mrlhf.planning.passes import Passes, Work
from mrlhf.planning.search import search
from mrlhf.planning.seconds import Lengths, estimate
from mrlhf.preflight import check, dry_run
from mrlhf.preflight.footprint import OWNERS, footprint
from mrlhf.preflight.memory_checks import with_keys
from tests.pages import ROOT, commands_of
from tests.planned import GRPO, MIXTURE, config_of, specs_of

pytestmark = pytest.mark.usefixtures("among_published")


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
    config = config_of(GRPO)
    specs = specs_of(config)
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
    config = config_of(GRPO, "actor.tp=1", "actor.sequence_parallel=false", "rollout.tp=1")
    specs = specs_of(config)
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
    spec = specs_of(config_of(MIXTURE))["actor"]
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
    spec = specs_of(config_of(MIXTURE))["actor"]
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
    config = config_of(file, *given)
    specs = specs_of(config)
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


def test_supervised_training_is_planned_too(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = {
        "model": {"path": "models/Qwen3-8B"},
        "data": {"train_files": "train.jsonl", "max_length": 4096, "batch_size": 64},
        "trainer": {"output_dir": "runs/sft"},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    assert main(["--config", "sft.yaml", "--gpus", "8", "--out", "sft-plans"]) == 0
    said = capsys.readouterr().out
    assert "update of model" in said
    assert "generation" not in said
    assert dry_run(load_config(SFTConfig, ["sft.yaml", "sft-plans/1.yaml"], []), 8).text
    # Of a layout that the model has no place for, others are found all the same.
    assert main(["--config", "sft.yaml", "--gpus", "8", "model.pp=8"]) == 0
    said = capsys.readouterr().out
    assert "yours does not fit 8 GPUs: model.pp 8 does not fit the model's 36 layers" in said


def test_the_reference_of_dpo_takes_nothing_beside_the_policy(tmp_path: Path) -> None:
    """It has said all before the policy is built, so what leaves the device of it has no effect."""
    text = {
        "model": {"path": "models/Qwen3-8B"},
        "data": {"train_files": "pairs.jsonl", "max_length": 2048, "batch_size": 64},
        "trainer": {"output_dir": "runs/dpo"},
    }
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    config = load_config(DPOConfig, "dpo.yaml", ["distributed.device=cuda"])
    sizes = footprint(config, specs_of(config), 8)
    assert sizes.held.keys() == {f"model/{owner}" for owner in OWNERS}
    assert sizes.phases.keys() == {"update of model"}
    with pytest.raises(ConfigError, match="reference has left before the model is built"):
        check(load_config(DPOConfig, "dpo.yaml", ["reference.offload=params"]), 8)
    found = search(config, specs_of(config), 2, GPUS["h100"], Lengths(512, 512), 10)
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
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "half.yaml").write_text("memory_gb: 24\n", encoding="utf-8")
    names = ("memory_gb", "tflops", "memory_gb_s", "link_gb_s", "network_gb_s", "host_gb_s")
    rates = dict.fromkeys(names, 1)
    odd = {"zero": 0, "yes": True, "nan": math.nan, "infinite": math.inf, "huge": 10**400}
    files = {name: {"tflops": value} for name, value in {**odd, "tiny": 1e-320}.items()}
    files |= {"parts": {"per_machine": 1.5}, "more": {"gbps": 1}, "other": {"device": "tpu"}}
    for name, values in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(rates | values), encoding="utf-8")
    (tmp_path / "latin.yaml").write_bytes("# \xe9\n".encode("latin-1"))

    assert main(["--config", GRPO, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(("ranks", "what"), [(0, "below 1"), (-1, "below 1"), (10**20, "above")])
def test_a_number_of_ranks_that_no_job_has_is_refused(ranks: int, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"--world-size {ranks} is {what}"):
        dry_run(config_of(GRPO), ranks)


def test_a_gpu_of_ones_own_decides(tmp_path: Path) -> None:
    """On GPUs of a quarter of the memory, the layouts that fit cut the model into more parts."""
    config = config_of(GRPO)
    specs = specs_of(config)
    lengths = Lengths(512, 1536)
    small = replace(GPUS["h100"], memory_gb=40.0)
    found = search(config, specs, 16, small, lengths, 10)
    assert found.best
    for plan in found.best:
        assert plan.memory.total(plan.memory.peak) <= 30e9
        assert plan.config.actor.tp * plan.config.actor.pp >= 4
