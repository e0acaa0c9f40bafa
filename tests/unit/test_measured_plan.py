"""Seconds from measured kernels, by hand, and the file that they are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from mrlhf.commands.plan import main
from mrlhf.config import PPOConfig, SFTConfig, load_config
from mrlhf.config.roots import AnyConfig
from mrlhf.errors import ConfigError
from mrlhf.models.families import load_spec
from mrlhf.models.flops import forward_flops, visible_pairs
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.planning.gpus import MEASURED, Gpu
from mrlhf.planning.kernels import Kernels, Product, ProductTable
from mrlhf.planning.machine_file import gpu_of, machine_text
from mrlhf.planning.passes import Passes, Work
from mrlhf.planning.seconds import Estimate, Lengths, estimate
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models
from tests.models.published import write_published

CORNERS = [(rows, inner, columns) for rows in (1, 4) for inner in (2, 8) for columns in (3, 9)]
SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
# A thousand operations, or bytes, or logits a second, and multiples of it.
KERNELS = Kernels(
    products=ProductTable((Product(1, 1, 1, 1e-9),)),
    engine_products=ProductTable((Product(1, 1, 1, 2e-9),)),
    attention_tflops=2e-9,
    attention_backward_tflops=4e-9,
    streamed_gb_s=1e-6,
    logits_g_s=1e-6,
    logits_backward_g_s=0.5e-6,
    update_gb_s=2e-6,
    lay_out_gb_s=1e-6,
    layer_s=0.1,
    layer_backward_s=0.2,
    pack_s=0.3,
    pack_backward_s=0.4,
    step_s=0.5,
    engine_keys_gb_s=0.5e-6,
    engine_layer_s=0.6,
    engine_pass_s=0.7,
    engine_row_s=0.8,
)
SLOW = Gpu(
    "slow", 4, 1e-9, 1e-6, 2e-6, 2e-6, 1e-6, per_machine=2, latency_s=0.9, device="cpu",
    dtype="float32", measured=KERNELS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(**SMALL, max_position_embeddings=64)
    config.save_pretrained(tmp_path / "small")


def test_a_product_between_measured_shapes_has_a_speed_between_theirs() -> None:
    speeds = dict(zip(CORNERS, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0), strict=True))
    table = ProductTable(tuple(Product(*shape, speed) for shape, speed in speeds.items()))
    assert table.is_grid

    def speed(*shape: float) -> float:
        return 2 * shape[0] * shape[1] * shape[2] / table.seconds(*shape) / 1e12

    for corner in CORNERS:
        assert speed(*corner) == pytest.approx(speeds[corner])
    assert speed(2, 2, 3) == pytest.approx(4)  # half-way between 1 and 16 in logarithms
    assert speed(2, 4, 27**0.5) == pytest.approx(128**0.5)  # of all eight
    assert speed(1000, 100, 100) == pytest.approx(128)
    assert speed(0.5, 1, 1) == pytest.approx(1)
    assert not ProductTable(table.products[:-1]).is_grid


def test_a_fine_tuning_step_is_the_sum_of_its_parts() -> None:
    """Four sequences of 8 tokens, of which 6 are a response, in two micro-batches."""
    took = _estimate(_fine_tuning(), 1)
    # A layer's 576 weights; 36 pairs of positions a sequence, 8 numbers a token in its heads; 464
    # bytes of activations a token; an output layer of 256 weights for 12 tokens.
    products = (3 * 2 * 576 * 16 * 2 + 3 * 2 * 256 * 12) / 1e3
    attention = (4 * 8 * 36 * 2 / 2e3 + 2 * 4 * 8 * 36 * 2 / 4e3) * 2
    memory = 5 * 464 * 16 * 2 / 1e3
    logits = 12 * 32 / 0.5e3
    fixed = 2 * (0.1 + 0.2) + 0.3 + 0.4
    pack = products / MEASURED.products + attention + memory / MEASURED.memory + logits + fixed
    # 1,704 weights: AdamW touches 28 bytes of each, and gradients of 4 bytes go by seven times.
    update = (28 * 1704 / 2e3 + 28 * 1704 / 1e3) / MEASURED.memory + 0.5
    assert took.seconds["update of model"] == pytest.approx(2 * pack + update)

    recomputed = _estimate(_fine_tuning("model.recompute=full"), 1)
    again = products * 2 * 2 * 576 * 16 / (3 * 2 * (2 * 576 * 16 + 256 * 12)) / MEASURED.products
    again += 4 * 8 * 36 * 2 / 2e3 * 2 + memory * 2 / 5 / MEASURED.memory + 2 * 0.1
    more = recomputed.seconds["update of model"] - took.seconds["update of model"]
    assert more == pytest.approx(2 * again)


def test_ranks_share_the_work_and_exchange() -> None:
    alone = _estimate(_fine_tuning(), 1).seconds["update of model"]
    # Two all-reduces of 8 numbers a token and layer in a forward pass, and two back, for all 32.
    split = _estimate(_fine_tuning("model.tp=2"), 2).seconds["update of model"]
    link = 2e3 * MEASURED.links
    exchanged = 2 * 2 * 32 * 4 * 8 * 4 / 2 / link + 2 * 2 * 2 * 2 * 0.9
    assert alone / 2 < split - exchanged < 0.75 * alone
    replicas = _estimate(_fine_tuning(), 2).seconds["update of model"]
    assert replicas > alone / 2 + 4 * 1704 / link


def test_a_pass_of_the_engine_is_bound_by_its_weights_or_its_rows() -> None:
    spec = load_spec("small", "lm")
    model = Passes(spec, ParallelLayout(), SLOW, 4)
    fixed = 2 * 0.6 + 0.7
    # Two rows that each see 10 tokens: 2,304 bytes a layer, and 1,024 of the output layer.
    read = (2 * 2304 + 1024 + 2 * 2 * 2 * 2 * 4 * 4 * 10) / 1e3 / MEASURED.memory
    assert model.engine(Work(2, 10, 2)) == pytest.approx(read + 64 / 1e3 + fixed + 2 * 0.8)
    # With a hundred rows the products take longer than the weights.
    products = 100 * 2 * (2 * 576 + 256) / 2e3 / MEASURED.products
    keys = 2 * 2 * 100 * 4 * 4 * 10 / 0.5e3 / MEASURED.memory
    took = model.engine(Work(100, 10, 100))
    assert took == pytest.approx(products + keys + 3200 / 1e3 + fixed + 100 * 0.8)


def test_each_phase_of_ppo_counts_what_it_computes() -> None:
    text = {
        "actor": {"path": "small", "ppo_mini_batch_size": 2, "use_kl_loss": True},
        "algorithm": {"adv_estimator": "grpo"},
        "rollout": {"n": 2},
        "reward": {"terms": [{"name": "exact_match"}]},
        "data": {
            "train_files": "train.jsonl",
            "train_batch_size": 2,
            "max_prompt_length": 4,
            "max_response_length": 6,
        },
        "trainer": {"output_dir": "run", "total_steps": 1},
    }
    Path("grpo.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    config = load_config(PPOConfig, "grpo.yaml", ["distributed.device=cpu"])
    took = _estimate(config, 1).seconds

    model = Passes(load_spec("small", "lm"), ParallelLayout(), SLOW, 4)
    assert took["scoring"] == pytest.approx(2 * model.forward(Work(32, 8, 24)))
    prompts = model.engine(Work(4, 1, 2))
    assert took["generation"] == pytest.approx(prompts + 6 * model.engine(Work(4, 5, 4)))
    assert took["hand-over"] == pytest.approx(4 * 1704 / 1e3)
    update = (28 * 1704 / 2e3 + 28 * 1704 / 1e3) / MEASURED.memory + 0.5
    assert took["update of actor"] == pytest.approx(model.update(Work(32, 8, 24), False) + update)


def test_the_products_of_a_pass_are_its_operations() -> None:
    """With one speed they take what `forward_flops` counts, in dense models and mixtures."""
    free = replace(
        KERNELS, attention_tflops=1e30, logits_g_s=1e30, streamed_gb_s=1e30, layer_s=0.0, pack_s=0.0
    )
    fast = replace(SLOW, memory_gb_s=1e30, measured=free)
    write_published(Path("models"))
    for path in sorted(Path("models").iterdir()):
        spec = load_spec(path, "lm")
        took = Passes(spec, ParallelLayout(), fast, 4).forward(Work(64, 64, 16))
        pairs = sum(visible_pairs(64, window) for window in spec.windows)
        operations = forward_flops(spec, 64, 16) - 4 * spec.num_heads * spec.head_dim * pairs
        assert took * MEASURED.products == pytest.approx(operations / 1e3), path


def test_a_file_says_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(machine_text(SLOW, "by hand"), encoding="utf-8")
    assert gpu_of(str(file)) == SLOW
    assert file.read_text(encoding="utf-8").startswith("# by hand\n")


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda values: values.pop(name)


def _kernel(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda values: values["measured"].update({name: value})


BAD = [
    (_without("tflops"), "bad.yaml: tflops missing; give memory_gb, tflops"),
    (lambda values: values.update(gbps=1), "no field is called gbps; there are memory_gb"),
    (lambda values: values.update(tflops=-1), "tflops must be a number above 0, and is -1"),
    (lambda values: values.update(tflops=True), "tflops must be a number above 0, and is True"),
    (lambda values: values.update(device="tpu"), "device must be cuda or cpu, and is 'tpu'"),
    (lambda values: values.update(measured=3), "measured: give products, engine_products"),
    (lambda values: values["measured"].pop("step_s"), "measured: step_s missing"),
    (_kernel("layer_s", "fast"), "measured: layer_s must be a number above 0, and is 'fast'"),
    (_kernel("warp_s", 1), "measured: no field is called warp_s"),
    (_kernel("products", [[1, 2, 3]]), "products must be a list of [rows, inner, columns, tflops]"),
    (
        _kernel("products", [[1, 2, 2, 1.0], [2, 4, 2, 1.0]]),
        "one entry for each combination of the sizes",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_file_is_refused_in_one_line(
    spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    values = yaml.safe_load(machine_text(SLOW, "by hand"))
    spoil(values)
    Path("bad.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        gpu_of("bad.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_is_for_the_device_and_dtype_that_were_measured(
    capsys: pytest.CaptureFixture,
) -> None:
    Path("slow.yaml").write_text(machine_text(SLOW, "by hand"), encoding="utf-8")
    _fine_tuning()
    plan = ["--config", "sft.yaml", "--gpus", "2", "--gpu", "slow.yaml"]
    assert main(plan) == 0
    assert capsys.readouterr().out.startswith("2 x slow of 4 GB, 0.5 GB of each left free")
    assert main([*plan, "model.dtype=bfloat16"]) == 2
    said = capsys.readouterr().err
    assert "model.dtype is bfloat16, but the kernels of slow were measured in float32" in said


def test_bad_arguments_start_no_rank(capsys: pytest.CaptureFixture) -> None:
    assert main(["--measure", "m.yaml", "--ranks", "0"]) == 2
    assert "--ranks 0 is below 1" in capsys.readouterr().err
    Path("file").touch()
    assert main(["--measure", "file/m.yaml"]) == 2
    assert capsys.readouterr().err == "error: file: File exists\n"


def test_a_plan_needs_a_run_and_a_number(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--gpus", "2"])
    assert "--config and --gpus are required, or --measure" in capsys.readouterr().err


def _fine_tuning(*keys: str) -> SFTConfig:
    text = {
        "model": {"path": "small", "micro_batch_tokens": 16},
        "data": {"train_files": "train.jsonl", "max_length": 16, "batch_size": 4},
        "trainer": {"output_dir": "run", "total_steps": 1},
    }
    Path("sft.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    return load_config(SFTConfig, "sft.yaml", ["distributed.device=cpu", *keys])


def _estimate(config: AnyConfig, ranks: int) -> Estimate:
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    sizes = footprint(config, specs, ranks)
    return estimate(config, specs, sizes, ranks, SLOW, Lengths(2, 6), int(4e9))
