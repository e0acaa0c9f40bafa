"""How a value of another system becomes ours, where a table of values cannot say it.

Each function takes the value, and the place: all values of the other system and those that have
been translated. It returns our value, or `LeftOut` if our default is right or only the user knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

_OF_HUB = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.jsonl)(?<!\.json)(?<!\.csv)(?<!\.parquet)")


@dataclass(frozen=True)
class LeftOut:
    """Stands for no value."""

    reason: str = ""  # "": what the table says
    is_told: bool = False  # of a default of the other system, too


@dataclass(frozen=True)
class Place:
    """What a conversion may look at."""

    theirs: Mapping[str, Any]  # the values of the other system
    ours: Mapping[str, Any]  # our values so far
    key: str  # our key
    world_size: int
    name: str = ""  # the other system's key

    def at(self, *names: str, default: Any = None) -> Any:
        """The first of these values that the other system sets."""
        return next((self.theirs[name] for name in names if name in self.theirs), default)

    def beside(self, name: str, default: Any = None) -> Any:
        """The value of a key in the same section of the other system."""
        return self.theirs.get(f"{self.name.rpartition('.')[0]}.{name}", default)

    @property
    def role(self) -> str:
        """The role that our key belongs to."""
        return self.key.partition(".")[0]

    @property
    def is_megatron(self) -> bool:
        """Whether verl ran it on Megatron, and not on FSDP."""
        named = str([self.at("model_engine", "engine", "--config-name", "optim")])
        return "megatron" in named or any(".megatron." in key for key in self.theirs)


def _counts_tokens(place: Place) -> bool:
    """Whether verl cuts micro-batches by tokens (use_dynamic_bsz), and not by samples."""
    actor = place.at("actor_rollout_ref.actor.use_dynamic_bsz", default=False)
    own = place.beside("log_prob_use_dynamic_bsz", place.beside("use_dynamic_bsz", actor))
    return bool(own)


def tokens_of_samples(value: Any, place: Place) -> Any:
    """Samples of full length, in tokens; verl's older keys count those of all ranks."""
    if _counts_tokens(place):
        return LeftOut("use_dynamic_bsz is on, so tokens are counted there, not samples")
    lengths = [place.ours.get(f"data.max_{part}_length", 512) for part in ("prompt", "response")]
    longest = place.ours.get("data.max_length", sum(lengths))
    samples = int(value)
    if not place.name.endswith("_per_gpu"):
        parts = place.world_size
        for axis in ("tp", "pp", "cp") if place.is_megatron else ("cp",):
            parts //= max(1, int(place.ours.get(f"{place.role}.{axis}", 1)))
        samples //= max(1, parts)
    return max(1, samples) * longest


def tokens(value: Any, place: Place) -> Any:
    """Tokens of one rank, where ours are those of all cp ranks."""
    has_samples = any(re.search("micro_batch_size", key) for key in place.theirs)
    if has_samples and not _counts_tokens(place):
        return LeftOut("use_dynamic_bsz is off, so samples are counted there, not tokens")
    return int(value) * int(place.ours.get(f"{place.role}.cp", 1))


def at_least_longest(value: Any, place: Place) -> Any:
    """OpenRLHF's tokens of a micro-batch, in which a longer sequence may stand alone."""
    if not place.at("train.dynamic_batch_enable"):
        return LeftOut("train.dynamic_batch_enable is off, so samples are counted there")
    return max(int(value), int(place.at("data.max_len", default=0)))


def samples_of_openrlhf(value: Any, place: Place) -> Any:
    """OpenRLHF's samples of a micro-batch, in tokens."""
    if place.at("train.dynamic_batch_enable"):
        return LeftOut("train.dynamic_batch_enable is on, so tokens are counted there")
    return int(value) * int(place.at("data.max_len", default=2048))


def recompute(value: Any, place: Place) -> Any:
    """verl's switch, which has no effect on Megatron."""
    if place.is_megatron:
        return LeftOut("Megatron has recompute_granularity instead")
    return "full" if value else LeftOut("none is our default")


def offload(value: Any, place: Place, owner: str) -> Any:
    """Whether what `owner` names leaves the device."""
    if value is not True:
        return LeftOut("nothing is offloaded here either, if offload is left out")
    if place.key.startswith(("reference.", "reward_model.")) and owner != "params":
        return LeftOut("a model that is not trained has weights alone")
    return [*place.ours.get(place.key, []), owner]


def none_below_zero(value: Any, _: Place) -> Any:
    """-1 stands for none there."""
    return int(value) if int(value) > 0 else LeftOut("there is none, as here")


def none_below_one(value: Any, _: Place) -> Any:
    """0 stands for none there, and -1 here."""
    return int(value) if int(value) > 0 else -1


def saves(value: Any, place: Place) -> Any:
    """TRL's steps between checkpoints, if its strategy counts steps."""
    if place.at("save_strategy", default="steps") != "steps":
        return LeftOut("save_strategy is another there")
    return frequency(value, place)


def frequency(value: Any, place: Place) -> Any:
    """Steps, or a share of the run; -1 stands for never there, and 0 here."""
    if not 0 < value < 1:
        return max(0, int(value))
    steps = place.ours.get("trainer.total_steps")
    if steps is None:
        return LeftOut(f"{value} of a run whose steps are not known; write it in steps", True)
    return math.floor(value * steps) if "steps_ratio" in place.name else math.ceil(value * steps)


def evaluations(value: Any, place: Place) -> Any:
    """TRL's steps between evaluations, which need a strategy."""
    if place.at("eval_strategy", "evaluation_strategy", default="no") in ("no", False):
        return LeftOut("eval_strategy is no there, so there are no evaluations")
    return frequency(value, place)


def warmup(value: Any, place: Place) -> Any:
    """Steps; a share of the run where it is below 1 or where that is what the key says."""
    is_share = 0 < value < 1 or "ratio" in place.name
    if not is_share:
        return int(value) if value > 0 else LeftOut("there is none, as here")
    return frequency(value, place) if value else LeftOut("there is none, as here")


def optimizer(value: Any, _: Place) -> Any:
    """The optimizers that exist here."""
    name = str(value).lower()
    return (
        "muon" if "muon" in name else "adamw" if "adam" in name else LeftOut(f"{name} is not here")
    )


def pair(value: Any, place: Place) -> Any:
    """Two numbers, whose first is our key's, and whose second that of its sibling."""
    first, second = value
    sibling = place.key.replace("adam_beta1", "adam_beta2").replace("ratio_low", "ratio_high")
    return {place.key: first, sibling: second}


def share_of_lr(value: Any, place: Place) -> Any:
    """A learning rate as a share of the peak."""
    peak = place.ours[place.key.replace("min_lr_ratio", "lr")]
    return round(float(value) / float(peak), 6)


def schedule(value: Any, _: Place) -> Any:
    """The decay of the learning rate."""
    names = [name for name in ("cosine", "linear", "constant") if name in str(value).lower()]
    return names[0] if names else LeftOut(f"{value} is not here; cosine, linear and constant are")


def trackers(value: Any, _: Place) -> Any:
    """The trackers that exist here."""
    names = value if isinstance(value, list) else [value]
    found = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    return found or LeftOut("the console is always on")


def resume(value: Any, _: Place) -> Any:
    """Whether and from where a run goes on."""
    words = {"auto": "auto", "disable": "never", "True": "auto", "False": "never"}
    return words.get(str(value), LeftOut() if str(value) == "resume_path" else str(value))


def rewards(value: Any, place: Place) -> Any:
    """A function of the user's own."""
    is_verls = place.at("reward_funcs", "reward.remote_url") is None
    name = place.at(
        "custom_reward_function.name",
        "reward.custom_reward_function.name",
        default="compute_score" if is_verls else "reward_func",
    )
    return [{"name": f"{value}:{name}"}] if str(value).endswith(".py") else LeftOut()


def as_list(value: Any, _: Place) -> Any:
    """One, or several."""
    values = value if isinstance(value, list) else [value]
    return [item.rstrip(",") if isinstance(item, str) else item for item in values]


def split_of_trl(value: Any, place: Place) -> Any:
    """A split of TRL's dataset if that is one of the Hub, else the files that it names."""
    is_held_out = place.key == "data.val_files"
    if is_held_out and isinstance(evaluations(1, place), LeftOut):
        return evaluations(1, place)

    name = place.at("dataset_name")
    split = value if is_held_out else place.at("dataset_train_split", default="train")
    parts = [part for part in (place.at("dataset_config"), split) if part is not None]
    if all(isinstance(part, str) for part in (name, *parts)) and _OF_HUB.fullmatch(name):
        return [f"{name}:{'/'.join(parts)}"]
    return (
        as_list(value, place)
        if place.name == "dataset_name"
        else LeftOut("dataset_name names files, without splits")
    )


def symmetric(value: Any, _: Place) -> Any:
    """Two bounds of a reward as one."""
    low, high = value
    return high if low == -high else LeftOut("both bounds are alike here")


def correction_bounds(value: Any, place: Place) -> Any:
    """OpenRLHF's bounds of the weights, which depend on the kind of correction."""
    kind = place.at("algo.advantage.is_correction_type", default="tis")
    if not place.at("algo.advantage.is_correction_enable", default=False):
        return LeftOut("is_correction_enable is not set")
    if kind == "tis":
        return value[1]
    return "_".join(map(str, value)) if kind == "icepop" else LeftOut("see is_correction_type")


def kl_of_openrlhf(value: Any, place: Place) -> Any:
    """The weight or the kind of the KL, which is in the loss or in the reward."""
    if not place.at("algo.kl.use_loss", default=False):
        return value
    of_loss = "kl_loss_type" if place.name.endswith("estimator") else "kl_loss_coef"
    return {f"actor.{of_loss}": value}


def loss_of_verl(value: Any, _: Place) -> Any:
    """The policy loss; that of bypass mode is named elsewhere."""
    if value == "bypass_mode":
        return LeftOut("here algorithm.rollout_correction.loss_type says which loss that is")
    return value


def level_of_trl(value: Any, place: Place) -> Any:
    """What TRL's weights of vLLM's samples are of: a token or a sequence."""
    if not place.at("use_vllm") or place.at("vllm_importance_sampling_correction") is False:
        return LeftOut("there is no correction without use_vllm")
    return str(value).partition("_")[0]


def bounds_of_trl(value: Any, place: Place) -> Any:
    """The bounds of these weights; those outside are clamped (a number) or dropped (two)."""
    if isinstance(level_of_trl("", place), LeftOut):
        return level_of_trl("", place)
    low = place.at("vllm_importance_sampling_clip_min", default=1e-9)
    is_mask = "mask" in place.at("vllm_importance_sampling_mode", default="sequence_mask")
    return f"{low}_{value}" if is_mask else value


def divergence_of_trl(value: Any, _: Place) -> Any:
    """TRL's beta, which says what is between the policy and the teacher."""
    section = "algorithm.distillation"
    kl = {0: "forward", 1: "reverse"}.get(value, "jsd")
    return {f"{section}.kl": kl} | ({f"{section}.beta": value} if kl == "jsd" else {})


def share_given(value: Any, _: Place) -> Any:
    """GKD's lmbda, the share of prompts whose responses are drawn."""
    return round(1 - value, 6)


def high_of_trl(value: Any, place: Place) -> Any:
    """TRL's upper clip distance; with CISPO it is the largest ratio itself."""
    return round(value - 1, 6) if place.at("loss_type") == "cispo" else value


def of_adapter(value: Any, place: Place) -> Any:
    """Keys of LoRA, without effect where all weights are trained."""
    if not place.at("use_peft", "ds.lora.rank", default=False):
        return LeftOut("there are no adapters without use_peft or a rank, so all is trained")
    return as_list(value, place) if place.key.endswith("modules") else value


def left_out(_: Any, __: Place) -> Any:
    """Only the user can choose it here."""
    return LeftOut()


def prompts_a_step(value: Any, place: Place) -> Any:
    """TRL's completions of one generation as prompts; ours are those of a step."""
    accumulated = int(place.at("gradient_accumulation_steps"))
    mini_batches = int(place.at("num_mini_batches", default=1))  # of the PPO trainer
    turns = int(place.at("steps_per_generation", default=accumulated * mini_batches))
    each = int(place.at("per_device_train_batch_size")) * place.world_size
    whole = int(place.at("generation_batch_size", default=each * turns))
    return max(1, whole // int(place.at("num_generations")))


def prompts_a_mini_batch(value: Any, place: Place) -> Any:
    """TRL's completions of one optimizer step as prompts."""
    return max(1, rows_a_step(value, place) // int(place.at("num_generations")))


def rows_a_step(value: Any, place: Place) -> int:
    """TRL's completions, rows or pairs of one optimizer step, over all ranks."""
    each = int(place.at("per_device_train_batch_size"))
    return each * place.world_size * int(place.at("gradient_accumulation_steps"))


def base_of_policy(value: Any, place: Place) -> Any:
    """The model of TRL's PPO, unless it names the policy's own."""
    return LeftOut("the policy is sft_model_path") if place.at("sft_model_path") else value


def steps_of_episodes(value: Any, place: Place) -> Any:
    """The responses of TRL's PPO run as steps."""
    return max(1, -(-int(value) // prompts_a_step(None, place)))


def prompts_of_samples(value: Any, place: Place) -> Any:
    """OpenRLHF's samples of an optimizer step as prompts."""
    return max(1, int(value) // int(place.at("rollout.n_samples_per_prompt", default=1)))


def prompt_part(value: Any, place: Place) -> Any:
    """A longest sequence, as the prompt's part of it."""
    response = place.ours.get("data.max_response_length")
    if response is None or value <= response:
        return LeftOut(
            "prompt and response share it; set data.max_prompt_length and data.max_response_length"
        )
    return value - response


CONVERSIONS: dict[str, Callable[[Any, Place], Any]] = {
    f"offload_{owner}": partial(offload, owner=owner) for owner in ("params", "grads", "optimizer")
} | {
    function.__name__: function
    for function in (
        *(tokens_of_samples, tokens, at_least_longest, samples_of_openrlhf, recompute),
        *(none_below_zero, none_below_one, saves, kl_of_openrlhf, level_of_trl, bounds_of_trl),
        *(split_of_trl, frequency, evaluations, warmup, optimizer, pair, share_of_lr, schedule),
        *(trackers, resume, rewards, as_list, symmetric, correction_bounds),
        *(high_of_trl, of_adapter, left_out, prompts_a_step, prompts_a_mini_batch, rows_a_step),
        *(divergence_of_trl, share_given, loss_of_verl),
        *(base_of_policy, steps_of_episodes, prompts_of_samples, prompt_part),
    )
}
