"""The runs that are disturbed: their models, data, reward function and configurations, all tiny."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from mrlhf.data.rows import write_rows
from tests.faults.runs import Setting
from tests.oracle import plain_models, plain_optimizer
from tests.tiny_task import ppo_keys, sft_keys, write_tiny_task

STEPS = 4

# It has no state, and the responses of a random policy differ in it.
REWARD = """
import random
import time


def digits(data_source, solution_str, ground_truth, extra_info):
    count = sum(character.isdigit() for character in solution_str)
    values = [(i, 0.25) for i, letter in enumerate(solution_str) if letter.isdigit()]
    return {"score": count / 4, "acc": float(count > 2), "character_positions": values}


def waits(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    last = extra_info["response_tokens"] - 1
    return {"score": len(solution_str) / 8, "token_positions": [(last, 0.5)]}


def fails(data_source, solution_str, ground_truth, extra_info):
    return deeper(0)


def deeper(depth):
    if depth == 50:
        raise LookupError("no such answer")
    if depth % 2:
        return deeper(depth + 1)
    return 1 + deeper(depth + 1)


def hangs(data_source, solution_str, ground_truth, extra_info):
    while True:
        pass


class Asks:
    # Asks for more, as often as a random number says.

    def reset(self, row):
        self.left = random.randint(0, 3)
        self.seen = 0
        return str(row["uid"])

    def reply(self, text):
        self.seen += len(text)
        self.left -= 1
        time.sleep(0.01)
        return str(self.seen) if self.left >= 0 else None

    def turn_reward(self):
        return self.seen / 8

    def reward(self):
        return {"score": random.random(), "acc": float(self.seen > 3), "seen": self.seen}
"""
# It has no special tokens, like the vocabulary of the task.
# Of the policy's turns but the last it writes only what stands behind a -.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' and not loop.last %}"
    "{{ message.content.split('-')[-1] }}{% else %}{{ message.content }}{% endif %}+{% endfor %}"
)


def write_inputs(rank: int, world_size: int, directory: str) -> None:
    """Write everything that the runs read; one process calls it."""
    root = Path(directory)
    torch.manual_seed(3)
    plain_models.save_models(root)
    write_tiny_task(root / "data")
    write_rows(root / "data" / "preferences.jsonl", _preferences(root / "data" / "sft.jsonl"))
    rows = (root / "data" / "train.jsonl").read_text().splitlines()
    given = [row | {"response": row["answer"] + "+1"} for row in map(json.loads, rows)]
    write_rows(root / "data" / "given.jsonl", given)
    for part in (root / "llama-ref", root / "data" / "tokenizer"):
        shutil.copytree(part, root / "judge", dirs_exist_ok=True)
    (root / "rewards.py").write_text(REWARD)
    (root / "chat.jinja").write_text(TEMPLATE)
    for name, content in (
        ("ppo", _ppo(root)),
        ("sft", _sft(root)),
        ("rm", _rm(root)),
        ("critic", _critic(root)),
        ("dpo", _dpo(root)),
    ):
        (root / f"{name}.yaml").write_text(yaml.safe_dump(content))


def ppo(inputs: Path) -> Setting:
    """A critic, an adaptive KL, dynamic sampling, sampled validation; the actor has TP=2."""
    return Setting("ppo", "ppo", ["--config", str(inputs / "ppo.yaml")])


def offloaded(inputs: Path) -> Setting:
    """All that can leave the device does, in a way of its own for each model that trains."""
    everything = "[params,grads,optimizer]"
    keys = [
        *(f"{role}.offload={everything}" for role in ("actor", "critic")),
        "critic.optim.stream=disk",
        "reference.offload=[params]",
        "trainer.async_save=true",
    ]
    return Setting("offloaded", "ppo", ["--config", str(inputs / "ppo.yaml"), *keys])


def episodes(inputs: Path) -> Setting:
    """Several turns, each of a few tokens, of which half end it; some begin another context."""
    keys = [
        "rollout.on_rewrite=split",
        f"rollout.environment={inputs / 'rewards.py'}:Asks",
        "rollout.max_turns=3",
        "rollout.tool_workers=2",
        f"rollout.stop_token_ids={[*range(4, 16)]}",
        'reward.terms=[{"name": "environment"}]',
        f"data.chat_template={inputs / 'chat.jinja'}",
        "data.max_prompt_length=12",
        "data.max_response_length=24",
        # A teacher in another layout than the actor's, asked again where the update goes on.
        f"teacher.path={inputs / 'llama-ref'}",
        "teacher.pp=2",
    ]
    return Setting("episodes", "ppo", ["--config", str(inputs / "ppo.yaml"), *keys])


def partial(inputs: Path) -> Setting:
    """Those episodes, drawn in several steps, with a slow function beside their own reward.

    Not all tokens can be drawn, and what the engine says of the likeliest centres the scores.
    """
    terms = [{"name": "environment"}, {"name": f"{inputs / 'rewards.py'}:waits", "weight": 0.5}]
    keys = [
        f"reward.terms={json.dumps(terms)}",
        "rollout.partial.over=1.75",
        "rollout.partial.max_versions=3",
        "rollout.partial.turn_cost=2",
        "rollout.top_p=0.9",
        "algorithm.rollout_correction.preset=bypass_pg_token_tis_sc",
        "rollout.topk_log_probs=5",
        "algorithm.filter_groups.enable=false",
    ]
    return Setting("partial", "ppo", [*episodes(inputs).arguments, *keys])


def bypass(inputs: Path) -> Setting:
    """Without a pass before the update, which may end early; with weights that do not train.

    The critic takes 3 x 1 optimizer steps for at most 2 x 2 of the actor. The teacher is an average
    of earlier actors, finer than their weights.
    """
    keys = [
        *("teacher.weights=earlier", "teacher.decay=0.75", "teacher.offload=[params]"),
        "actor.dtype=bfloat16",
        'actor.freeze=["model.layers.0.*", model.embed_tokens.weight]',
        'critic.freeze=["*.self_attn.*"]',
        "critic.ppo_epochs=3",
        "critic.ppo_mini_batch_size=8",
        "critic.optim.lr_warmup_steps=2",
        "trainer.export_critic=true",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.filter_groups.enable=false",
        "actor.target_kl_stop=0.001",
        "actor.micro_batch_tokens=18",  # many packs in a mini-batch
    ]
    return Setting("bypass", "ppo", ["--config", str(inputs / "ppo.yaml"), *keys])


def lora(inputs: Path) -> Setting:
    """Adapters of actor and critic; the reference is the actor without its own.

    The teacher is an average of earlier ones, and teaches on given responses too. Teacher and
    critic read the reference answer in prompts of their own. A reward model, in a layout of its
    own, gives the reference answers the mean score 0.
    """
    terms = [{"name": f"{inputs / 'rewards.py'}:digits"}, {"name": "reward_model"}]
    keys = [
        *("actor.lora.rank=4", "critic.lora.rank=2", f"reference.path={inputs / 'llama'}"),
        *("teacher.weights=earlier", "teacher.decay=0.5", "teacher.max_prompt_length=16"),
        "teacher.template='{{ prompt }}={{ ground_truth }}'",
        *("critic.max_prompt_length=12", "critic.template='{{ ground_truth }}={{ prompt }}'"),
        f"reward.terms={json.dumps(terms)}",
        f"reward_model={{path: {inputs / 'llama-critic'}, normalise: reference, pp: 2}}",
        *("algorithm.reward_norm=null", "algorithm.filter_groups.enable=false"),
        f"data.train_files={inputs / 'data' / 'given.jsonl'}",
        "algorithm.distillation.given_share=0.4",
    ]
    return Setting("lora", "ppo", ["--config", str(inputs / "ppo.yaml"), *keys])


def sft(inputs: Path) -> Setting:
    """Supervised fine-tuning."""
    return Setting("sft", "sft", ["--config", str(inputs / "sft.yaml")])


def reward_model(inputs: Path) -> Setting:
    """Training of a reward model, by Muon."""
    return Setting("rm", "rm", ["--config", str(inputs / "rm.yaml")])


def critic(inputs: Path) -> Setting:
    """Training of a critic on stored rollouts."""
    return Setting("critic", "critic", ["--config", str(inputs / "critic.yaml")])


def dpo(inputs: Path) -> Setting:
    """DPO against another policy than the one that is trained."""
    return Setting("dpo", "dpo", ["--config", str(inputs / "dpo.yaml")])


def _preferences(file: Path) -> list[dict[str, str]]:
    pairs = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        wrong = row["response"][::-1] + "0"
        pairs.append({"prompt": row["prompt"], "chosen": row["response"], "rejected": wrong})
    return pairs


def _trainer() -> dict[str, Any]:
    return {
        "total_steps": STEPS,
        "save_freq": 1,
        "test_freq": 2,
        "save_every_minutes": None,
        "max_to_keep": None,
        "output_dir": "given by each test",
    }


def _ppo(root: Path) -> dict[str, Any]:
    trained: dict[str, Any] = {
        "ppo_mini_batch_size": 4,
        "ppo_epochs": 2,
        "micro_batch_tokens": 64,
        "optim": {"lr": 1e-3, "adam_eps": plain_optimizer.EPS, "lr_decay_style": "linear"},
    }

    keys = ppo_keys(root, trained)
    keys["critic"]["optim"] = {**trained["optim"], "head_lr": 5e-3}
    return keys | {
        "reward": {"terms": [{"name": f"{root}/rewards.py:digits"}]},
        "algorithm": {
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.01, "horizon": 100},
            "reward_norm": "running",
            "filter_groups": {"enable": True, "metric": "score", "max_num_gen_batches": 3},
        },
        "trainer": {**_trainer(), "val_sampled": True},
    }


def _sft(root: Path) -> dict[str, Any]:
    keys = sft_keys(root, max_length=16)
    keys["model"] |= {"tp": 1, "micro_batch_tokens": 32, "freeze": ["*.layers.1.self_attn.*"]}
    keys["optim"]["lr_decay_style"] = "cosine"
    keys["data"]["val_files"] = keys["data"]["train_files"]
    return keys | {"trainer": _trainer()}


def _rm(root: Path) -> dict[str, Any]:
    content = _preference_keys(root)
    content["optim"] |= {"name": "muon", "head_lr": 5e-3}
    return content


def _critic(root: Path) -> dict[str, Any]:
    content = _preference_keys(root)
    rows = [json.loads(line) for line in (root / "data" / "sft.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["score"] = number % 3 / 2
    write_rows(root / "data" / "scored.jsonl", rows)
    content["data"]["train_files"] = str(root / "data" / "scored.jsonl")
    content["optim"]["head_lr"] = 5e-3
    return {**content, "algorithm": {"gamma": 0.99}}


def _preference_keys(root: Path) -> dict[str, Any]:
    content = _sft(root)
    content["model"]["tp"] = 2
    del content["data"]["val_files"]
    content["data"]["train_files"] = str(root / "data" / "preferences.jsonl")
    content["data"]["held_out_fraction"] = 0.2
    return content


def _dpo(root: Path) -> dict[str, Any]:
    return {**_preference_keys(root), "reference": {"path": str(root / "llama-ref")}}
