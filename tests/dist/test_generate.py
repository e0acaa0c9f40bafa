"""`mrlhf generate` gives the responses, log-probabilities and rewards of a run's validation, on one
rank and on two; and an interrupted job goes on to the same file.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from mrlhf.batch import Rollout
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.config import PPOConfig, load_config
from mrlhf.data.rows import read_rows
from mrlhf.data.sft import encode_sft
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import ConfigError
from mrlhf.inputs import read_ppo_inputs
from mrlhf.inputs.read import load_rewards, read_engine_inputs, read_prompts
from mrlhf.parallel.groups import GroupFactory
from mrlhf.preflight import check_policy
from mrlhf.run.startup import Run
from mrlhf.trainers.generation import GenerationOptions, _facts, answer, check_generation
from mrlhf.trainers.policy import policy_config
from mrlhf.trainers.ppo.setup import assemble
from mrlhf.trainers.ppo.step import PPOTrainer
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import CPU
from tests.oracle import plain_models
from tests.ranks import run_ranks
from tests.tiny_task import ppo_keys, write_tiny_task

N = 3
BATCH = 4
PROMPTS = 10
LAYOUTS = {1: [], 2: ["actor.tp=2", "rollout.tp=1"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generate")
    plain_models.save_models(root)
    write_tiny_task(root / "data", train=PROMPTS)
    keys = ppo_keys(root, {})
    keys["actor"] = {"path": str(root / "llama")}
    keys["critic"] |= {"ppo_mini_batch_size": 8}
    keys["data"] |= {"val_files": keys["data"]["train_files"]}

    keys["reward_model"] = {"path": str(root / "qwen2-tied-critic")}
    keys["reward"] = {"terms": [{"name": "exact_match"}, {"name": "reward_model", "weight": 0.5}]}
    keys["trainer"] = {
        "total_steps": 1,
        "output_dir": str(root / "run"),
        "val_sampled": True,
        "val_n": N,
    }

    (root / "ppo.yaml").write_text(yaml.safe_dump(keys))
    for ranks in LAYOUTS:
        (root / str(ranks)).mkdir()
        run_ranks(ranks, _in_ranks, str(root))

    return root


def _in_ranks(rank: int, world_size: int, place: str) -> None:
    """Validate as a run does before its first step, and answer the same prompts."""
    root = Path(place)
    own = root / str(world_size)
    run = Run(CPU, rank, world_size, GroupFactory(timeout_s=600.0), own)
    config = load_config(PPOConfig, root / "ppo.yaml", LAYOUTS[world_size])
    parts = assemble(config, read_ppo_inputs(config), run)
    validated: list[Rollout] = []
    generate = parts.generator.generate

    def record(*arguments: Any) -> Any:
        drawn = generate(*arguments)
        validated.append(drawn.rollout)
        return drawn

    parts.generator.generate = record  # type: ignore[method-assign]
    metrics = PPOTrainer(config, run, parts).held_out.measure(0)
    parts.scorer.close()
    torch.save((metrics, validated), own / f"validated{rank}.pt")
    if world_size == 1:
        _save_checkpoint(own / "checkpoints", config, parts.actor.engine)

    for name, batch in (
        *(("greedy", 128), ("sampled", 128), ("batches", BATCH), ("resumed", BATCH)),
        ("of_run", 128),
    ):
        options = GenerationOptions(own / f"{name}.jsonl", name == "greedy", batch, False, False)
        keys = [f"rollout.n={1 if options.greedy else N}", *LAYOUTS[world_size]]
        policy = root / ("1" if name == "of_run" else "llama")
        config = policy_config(str(policy), [str(root / "ppo.yaml")], keys)
        if name == "resumed" and rank == 0:
            # Another job was killed in its second batch, as it wrote a line.
            facts = json.dumps(_facts(options, config, world_size)) + "\n"
            begun = (own / "batches.jsonl").read_text().splitlines(keepends=True)
            half = facts + "".join(begun[: BATCH * N + 2]) + begun[BATCH * N + 2][:50]
            options.partial.write_text(half)
        dist.barrier()
        check_generation(options, config, world_size)
        inputs = read_engine_inputs(config)
        _, prompts = read_prompts(config, inputs)["val"]
        reward = load_rewards(config)
        answer(options, config, run, inputs, prompts, reward)
        reward.close()


def _save_checkpoint(directory: Path, config: PPOConfig, actor: ModelEngine) -> None:
    """Save the policy as a run does that began from another model of the same shape."""
    world = dist.group.WORLD
    assert world is not None
    stated = config.model_dump()
    stated["actor"]["path"] = str(Path(config.actor.path).with_name("llama-ref"))
    saver = Saver(directory, RunIdentity("ppo", stated, {}), world, asynchronous=False)
    saver.save(Contents(3, False, {"actor": actor}, {}))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_numbers_are_those_of_a_validation(root: Path, ranks: int) -> None:
    metrics, rollouts = torch.load(root / str(ranks) / "validated0.pt", weights_only=False)
    for name, rollout, n in zip(("greedy", "sampled"), rollouts, (1, N), strict=True):
        rows = _rows(root / str(ranks) / f"{name}.jsonl")
        assert len(rows) == len(rollout) == PROMPTS * n
        for index, row in enumerate(rows):
            length = rollout.response_lengths[index]
            assert row["token_ids"] == rollout.response_ids[index, :length].tolist()
            assert row["logprobs"] == rollout.rollout_logprobs[index, :length].tolist()
            assert row["finish_reason"] == ("stop" if rollout.stopped[index] else "length")
            assert (row["uid"], row["sample"]) == (index // n, index % n)
            weighted = row["terms"]["exact_match"] + 0.5 * row["terms"]["reward_model"]
            assert row["reward"] == pytest.approx(weighted, abs=1e-6)
        kind = "val" if name == "greedy" else "val_sampled"
        mean = torch.tensor([row["reward"] for row in rows], dtype=torch.float64).mean().item()
        (source,) = {row["data_source"] for row in rows}
        assert mean == metrics[f"{kind}/{source}/reward_mean"]

        best = [max(rows[i : i + n], key=lambda row: row["reward"]) for i in range(0, len(rows), n)]
        assert [row for row in rows if row["best"]] == best
        summary = json.loads((root / str(ranks) / f"{name}.summary.json").read_text())
        assert summary["reward"] == pytest.approx(mean)
        assert summary["best_of_n"] == pytest.approx(sum(row["reward"] for row in best) / PROMPTS)
        assert summary["length"] * len(rows) == pytest.approx(sum(rollout.response_lengths))


def test_layouts_and_batches_differ_by_rounding_alone(root: Path) -> None:
    first = _rows(root / "1" / "sampled.jsonl")
    for other in (root / "1" / "batches.jsonl", root / "2" / "sampled.jsonl"):
        for row, wanted in zip(_rows(other), first, strict=True):
            assert row["response"] == wanted["response"]
            assert row["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_run_that_has_not_ended_answers_with_its_newest_checkpoint(
    root: Path, ranks: int
) -> None:
    own = root / str(ranks)
    assert _rows(own / "of_run.jsonl") == _rows(own / "sampled.jsonl")
    summary = json.loads((own / "of_run.summary.json").read_text())
    checkpoint = root / "1" / "checkpoints" / "step_000003"
    assert summary["model"] == str(checkpoint)

    checkpoint.rename(root / "1" / "step_000003")  # by itself, and without the tokenizer's model
    try:
        config = policy_config(str(root / "1" / "step_000003"), None)
        assert config.data.tokenizer == str(root / "data" / "tokenizer")
        assert config.actor.path == str(root / "llama-ref")
    finally:
        (root / "1" / "step_000003").rename(checkpoint)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_an_interrupted_job_goes_on_to_the_same_file(root: Path, ranks: int) -> None:
    whole = (root / str(ranks) / "batches.jsonl").read_bytes()
    assert (root / str(ranks) / "resumed.jsonl").read_bytes() == whole
    assert not list((root / str(ranks)).glob("*.partial"))


def test_rows_train_as_they_are(root: Path) -> None:
    tokenizer = load_tokenizer(root / "data" / "tokenizer")
    rows = read_rows([root / "1" / "sampled.jsonl"])
    examples = encode_sft(rows, tokenizer, max_length=64)
    for row, example in zip(rows, examples, strict=True):
        learned = zip(example.token_ids, example.loss_mask, strict=True)
        drawn = [token for token, counts in learned if counts]
        if row.fields["finish_reason"] == "stop":
            assert tokenizer.decode(drawn) == row.fields["response"]


def test_an_unfinished_job_of_another_kind_is_not_gone_on_with(root: Path, tmp_path: Path) -> None:
    options = GenerationOptions(tmp_path / "out.jsonl", False, BATCH, False, False)
    files = [str(root / "ppo.yaml")]
    config = policy_config(str(root / "llama"), files)
    options.partial.write_text(json.dumps(_facts(options, config, 1)) + "\n")
    check_generation(options, config, 1)
    check_generation(
        options, policy_config(str(root / "llama"), files, ["data.date=2020-01-01"]), 1
    )

    changed = {
        "seed 3 and not 4": ["seed=4"],
        "rollout.n 2 and not 5": ["rollout.n=5"],
        "data.val_files": [f"data.val_files={root / 'data' / 'sft.jsonl'}"],
        "reward.terms": ["reward.terms=[{name: reward_model}]"],
    }
    for words, keys in changed.items():
        with pytest.raises(ConfigError, match=f"was begun with .*{words}"):
            check_generation(options, policy_config(str(root / "llama"), files, keys), 1)
    with pytest.raises(ConfigError, match=r"was begun with actor\.path"):
        check_generation(options, policy_config(str(root / "llama-ref"), files), 1)
    with pytest.raises(ConfigError, match="was begun with --batch 4 and not 5"):
        check_generation(replace(options, batch=5), config, 1)
    with pytest.raises(ConfigError, match="was begun with ranks 1 and not 2"):
        check_generation(options, config, 2)
    check_generation(replace(options, batch=5, overwrite=True), config, 1)

    options.partial.write_text("something else\n")
    with pytest.raises(ConfigError, match="partial was begun"):
        check_generation(options, config, 1)


def test_mistakes_are_one_line_before_anything_is_built(root: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    scorer = tmp_path / "scorer"
    models = {
        "actor.path .*none does not exist": root / "none",
        "qwen2-tied-critic is a reward model": root / "qwen2-tied-critic",
        "the base of the adapter, /nowhere, is no directory here": adapter,
        "adapter of a reward model": scorer,
        "holds no config.json": root,
    }
    for directory, task in ((adapter, "CAUSAL_LM"), (scorer, "SEQ_CLS")):
        directory.mkdir()
        stated = {"base_model_name_or_path": "/nowhere", "r": 4, "task_type": task}
        (directory / "adapter_config.json").write_text(json.dumps(stated))
    files = [str(root / "ppo.yaml")]
    options = GenerationOptions(tmp_path / "out.jsonl", False, BATCH, False, False)
    for words, model in models.items():
        with pytest.raises(ConfigError, match=words) as caught:
            check_policy(policy_config(str(model), files), 1)
        assert "\n" not in str(caught.value)

    config = policy_config(str(root / "llama"), files)
    nothing = policy_config(str(root / "llama"), None)
    (tmp_path / "there.jsonl").touch()
    for words, changes, given in (
        ("no is no directory that can be written", {"out": tmp_path / "no" / "out.jsonl"}, config),
        ("not the name of a file that ends in .jsonl", {"out": tmp_path / "out.txt"}, config),
        ("is there already", {"out": tmp_path / "there.jsonl"}, config),
        ("--batch 0 is below 1", {"batch": 0}, config),
        ("2 answers of temperature 0 are alike", {"greedy": True}, config),
        ("reward.terms is empty", {"best": True}, nothing),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            check_generation(replace(options, **changes), given, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"bad value 0 for 'rollout\.n'"):
        policy_config(str(root / "llama"), files, ["rollout.n=0"])
