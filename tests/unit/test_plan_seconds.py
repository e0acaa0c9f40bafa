"""Seconds from the rates of a GPU, by hand, and the file that they are read from."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from mrlhf.config import PPOConfig, SFTConfig, load_config
from mrlhf.config.roots import AnyConfig
from mrlhf.models.families import load_spec
from mrlhf.models.flops import forward_flops
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.planning.gpus import STATED, Gpu, gpu_of
from mrlhf.planning.passes import Passes, Work
from mrlhf.planning.seconds import Estimate, Lengths, estimate
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models

SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
# Of a run: a thousand operations a second, a thousand bytes of memory, two thousand of a link.
SLOW = Gpu(
    "slow", 4, 1e-9 / STATED.products, 1e-6 / STATED.memory, 2e-6 / STATED.links, 2e-6, 1e-6,
    per_machine=2, latency_s=0.9, device="cpu",
)  # fmt: skip


_JUDGE = (
    "reward.terms=[{name: judge}]",
    "judge={template: '{{response}}', n: 3, temperature: 1.0, max_tokens: 10}",
    "judge_model={path: small, max_prompt_tokens: 20}",
)


@pytest.fixture(autouse=True)
def in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(**SMALL, max_position_embeddings=64)
    config.save_pretrained(tmp_path / "small")


def test_a_fine_tuning_step_is_the_sum_of_its_parts() -> None:
    """Four sequences of 8 tokens, of which 6 are a response, in two micro-batches."""
    took = _estimate(_fine_tuning(), 1)
    # A layer's 576 weights; 36 pairs of positions a sequence, 8 numbers a token in its heads; 464
    # bytes of activations a token; an output layer of 256 weights for 12 tokens.
    products = (3 * 2 * 576 * 16 * 2 + 3 * 2 * 256 * 12) / 1e3
    attention = 3 * (4 * 8 * 36 * 2 / 1e3) * 2
    memory = 5 * 464 * 16 * 2 / 1e3
    # 1,704 weights: AdamW touches 28 bytes of each, and gradients of 4 bytes go by seven times.
    update = 2 * 28 * 1704 / 1e3
    pack = products + attention + memory
    assert took.seconds["update of model"] == pytest.approx(2 * pack + update)

    recomputed = _estimate(_fine_tuning("model.recompute=full"), 1)
    again = 2 * 576 * 16 * 2 / 1e3 + attention / 3 + memory * 2 / 5
    more = recomputed.seconds["update of model"] - took.seconds["update of model"]
    assert more == pytest.approx(2 * again)


def test_ranks_share_the_work_and_exchange() -> None:
    alone = _estimate(_fine_tuning(), 1).seconds["update of model"]
    # Two all-reduces of 8 numbers a token and layer in a forward pass, and two back, for all 32.
    split = _estimate(_fine_tuning("model.tp=2"), 2).seconds["update of model"]
    link = 2e3
    exchanged = 2 * 2 * 32 * 4 * 8 * 4 / 2 / link + 2 * 2 * 2 * 2 * 0.9
    assert alone / 2 < split - exchanged < 0.75 * alone
    replicas = _estimate(_fine_tuning(), 2).seconds["update of model"]
    assert replicas > alone / 2 + 4 * 1704 / link


def test_a_pass_of_the_engine_is_bound_by_its_weights_or_its_rows() -> None:
    spec = load_spec("small", "lm")
    model = Passes(spec, ParallelLayout(), SLOW, 4)
    # Two rows that each see 10 tokens: 2,304 bytes a layer, and 1,024 of the output layer.
    read = (2 * 2304 + 1024 + 2 * 2 * 2 * 4 * 4 * 10) / 1e3
    assert model.engine(Work(2, 10, 2)) == pytest.approx(read)
    # With a hundred rows the products take longer than the weights.
    products = 100 * 2 * (2 * 576 + 256) / 1e3
    keys = 2 * 2 * 100 * 4 * 4 * 10 / 1e3
    assert model.engine(Work(100, 10, 100)) == pytest.approx(products + keys)


def test_each_phase_of_ppo_counts_what_it_computes() -> None:
    took = _estimate(_policy(), 1).seconds

    model = Passes(load_spec("small", "lm"), ParallelLayout(), SLOW, 4)
    # The reference scores; the only update of a step sees the policy as it was.
    scoring = model.forward(Work(32, 8, 24))
    assert took["scoring"] == pytest.approx(scoring)
    teachers = [f"{{name: {name}, path: small, data_source: {name}}}" for name in "ab"]
    for keys, passes in (
        (["actor.ppo_epochs=2"], 2),
        (["algorithm.use_kl_in_reward=true"], 2),
        (["actor.ppo_epochs=2", "algorithm.rollout_correction.bypass_mode=true"], 1),
        (["actor.lora.rank=2"], 1),  # without its adapters the policy is the reference
        (["actor.lora.rank=2", "actor.ppo_epochs=2"], 2),
        ([f"teacher.several=[{', '.join(teachers)}]"], 2),  # each reads a half
    ):
        more = _estimate(_policy(*keys), 1).seconds
        assert more["scoring"] == pytest.approx(passes * scoring), keys
    prompts = model.engine(Work(4, 1, 2))
    assert took["generation"] == pytest.approx(prompts + 6 * model.engine(Work(4, 5, 4)))
    assert took["hand-over"] == 0  # the engine reads the actor's weights where they are
    update = 2 * 28 * 1704 / 1e3
    assert took["update of actor"] == pytest.approx(model.update(Work(32, 8, 24), False) + update)


def test_a_judge_on_the_ranks_reads_messages_and_draws_votes() -> None:
    model = Passes(load_spec("small", "lm"), ParallelLayout(), SLOW, 4)
    plain = _estimate(_policy(), 1).seconds
    pairs = ("judge.compare=pairs", "judge.template='{{response}} {{other}}'")
    # Four responses, in two pairs; each shows a prompt of 2 tokens, and one or two of 6.
    for keys, length, at_once in (
        ((), 8, 12),
        (pairs, 14, 12),
        ((*pairs, "judge_model.max_prompt_tokens=13"), 13, 12),
        ((*pairs, "rollout.max_num_seqs=4"), 14, 4),
    ):
        config = _policy(*_JUDGE, *keys)
        took = _estimate(config, 1).seconds
        # Three votes on each have 5 tokens on the average; the longest has 10.
        seen = length + 2.5
        answers = 5 * 12 / at_once * model.engine(Work(at_once, seen, at_once))
        answers += 5 * model.engine(Work(1, seen, 1))
        messages = model.engine(Work(4 * length, length / 2, 4))
        assert took["judging"] == pytest.approx(messages + answers), keys
        assert took["scoring"] == plain["scoring"]


def test_the_products_of_a_pass_are_its_operations(published: Path) -> None:
    """They take what `forward_flops` counts; in mixtures, products of experts are slower."""
    fast = replace(SLOW, memory_gb_s=1e30)
    for path in sorted(published.iterdir()):
        spec = load_spec(path, "lm")
        took = Passes(spec, ParallelLayout(), fast, 4).forward(Work(64, 64, 16))
        plain = forward_flops(spec, 64, 16) / 1e3
        if spec.experts is None:
            assert took == pytest.approx(plain), path
        else:
            assert plain < took < plain * STATED.products / STATED.experts, path


def test_a_file_holds_the_fields_of_a_gpu() -> None:
    values = asdict(SLOW)
    del values["name"]
    Path("slow.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    assert gpu_of("slow.yaml") == SLOW


def _policy(*keys: str) -> PPOConfig:
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
    return load_config(PPOConfig, "grpo.yaml", ["distributed.device=cpu", *keys])


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
