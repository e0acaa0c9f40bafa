"""How a value of another system becomes ours, where it is not simply the same.

Each function takes the value, and the place: all values of the other system and those that have
been translated. It returns our value, or `LEFT_OUT` if our default is right or only the user knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


class _LeftOut:
    """Stands for no value."""


LEFT_OUT = _LeftOut()


@dataclass(frozen=True)
class Place:
    """What a conversion may look at."""

    theirs: Mapping[str, Any]  # the values of the other system
    ours: Mapping[str, Any]  # our values so far
    key: str  # our key
    world_size: int

    def at(self, *names: str, default: Any = None) -> Any:
        """The first of these values that the other system sets."""
        return next((self.theirs[name] for name in names if name in self.theirs), default)


def tokens_of_samples(value: Any, place: Place) -> Any:
    """Samples of full length, in tokens."""
    lengths = [place.ours.get(f"data.max_{part}_length") for part in ("prompt", "response")]
    longest = place.ours.get("data.max_length")
    if longest is None and None not in lengths:
        longest = sum(lengths)  # type: ignore[arg-type]
    return value * longest if isinstance(value, int) and longest is not None else LEFT_OUT


def times_cp(value: Any, place: Place) -> Any:
    """Tokens of one rank, where ours are those of all cp ranks."""
    role = place.key.partition(".")[0]
    return value * place.ours.get(f"{role}.cp", 1) if isinstance(value, int) else LEFT_OUT


def at_least_longest(value: Any, place: Place) -> Any:
    """Tokens of a micro-batch, where a longer sequence may stand alone in one there."""
    return max(value, place.at("data.max_len", default=0)) if isinstance(value, int) else LEFT_OUT


def dropped(value: Any, _: Place) -> Any:
    """Whether rows that are too long are left out."""
    return "drop" if value else "error"


def recompute(value: Any, place: Place) -> Any:
    """What is computed again in the backward pass."""
    # With megatron's granularity, FSDP's switch has no effect.
    if isinstance(value, bool):
        return "full" if value and "actor.tp" not in place.ours else LEFT_OUT
    return {"full": "full", "selective": "core_attn"}.get(str(value), LEFT_OUT)


def offload(value: Any, place: Place, owner: str) -> Any:
    """Whether what `owner` names leaves the device."""
    is_frozen = place.key.startswith(("reference.", "reward_model."))
    if value is not True or (is_frozen and owner != "params"):
        return LEFT_OUT
    return [*place.ours.get(place.key, []), owner]


def none_below_zero(value: Any, _: Place) -> Any:
    """-1 stands for none there."""
    return value if isinstance(value, int) and value > 0 else LEFT_OUT


def zero_below_zero(value: Any, _: Place) -> Any:
    """-1 stands for none there, and 0 here."""
    return max(0, int(value)) if isinstance(value, (int, float)) else LEFT_OUT


def optimizer(value: Any, _: Place) -> Any:
    """The optimizers that exist here."""
    name = str(value).lower()
    if "muon" in name:
        return "muon"
    return "adamw" if name in ("adam", "adamw") else LEFT_OUT


def betas(value: Any, place: Place) -> Any:
    """Both decays of Adam, of which this is one."""
    number = 1 if place.key.endswith("2") else 0
    return value[number] if isinstance(value, list) else LEFT_OUT


def share_of_lr(value: Any, place: Place) -> Any:
    """A learning rate as a share of the peak."""
    peak = place.ours.get(place.key.replace("min_lr_ratio", "lr"))
    return round(float(value) / float(peak), 6) if peak and value else LEFT_OUT


def schedule(value: Any, _: Place) -> Any:
    """The decay of the learning rate."""
    name = str(value).lower()
    for ours in ("cosine", "linear"):
        if ours in name:
            return ours
    return "constant" if "constant" in name else LEFT_OUT


def warmup(value: Any, place: Place) -> Any:
    """A share of the run as steps, where its length is known."""
    steps = place.ours.get("trainer.total_steps")
    return round(value * steps) if value and steps else LEFT_OUT


def trackers(value: Any, _: Place) -> Any:
    """The trackers that exist here."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name in ("tensorboard", "wandb", "trackio")] or LEFT_OUT


def engine(value: Any, _: Place) -> Any:
    """The inference engine."""
    return "vllm" if value in ("vllm", True) else "native"


def resume(value: Any, _: Place) -> Any:
    """Whether and from where a run goes on."""
    words = {"auto": "auto", "disable": "never"}
    return words.get(str(value), LEFT_OUT if str(value) == "resume_path" else value)


def every_step(value: Any, _: Place) -> Any:
    """A directory there is a frequency here."""
    return 1 if value else LEFT_OUT


def replay(value: Any, _: Place) -> Any:
    """Which choice of experts an update repeats."""
    return {"R3": "rollout", "R2": "old", True: "rollout"}.get(value, LEFT_OUT)


def rewards(value: Any, place: Place) -> Any:
    """A function of the user's own."""
    if place.ours.get(place.key) is not None or not isinstance(value, str):
        return LEFT_OUT
    is_verls = place.at("reward_funcs", "reward.remote_url") is None
    name = place.at(
        "custom_reward_function.name",
        "reward.custom_reward_function.name",
        default="compute_score" if is_verls else "reward_func",
    )
    return [{"name": f"{value}:{name}"}] if value.endswith(".py") else LEFT_OUT


def as_list(value: Any, _: Place) -> Any:
    """One file, or several."""
    return value if isinstance(value, list) else [value]


def left_out(_: Any, __: Place) -> Any:
    """Only the user can choose it here."""
    return LEFT_OUT


def _samples_a_step(place: Place) -> int:
    """Completions, rows or pairs of one optimizer step of Hugging Face's trainer."""
    each = int(place.at("per_device_train_batch_size"))
    return each * place.world_size * int(place.at("gradient_accumulation_steps"))


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
    return max(1, _samples_a_step(place) // int(place.at("num_generations")))


def rows_a_step(value: Any, place: Place) -> Any:
    """TRL's rows of one optimizer step, over all ranks."""
    return _samples_a_step(place)


def prompts_of_samples(value: Any, place: Place) -> Any:
    """OpenRLHF's samples of an optimizer step as prompts."""
    return max(1, int(value) // int(place.at("rollout.n_samples_per_prompt", default=1)))


def prompt_part(value: Any, place: Place) -> Any:
    """A longest sequence, as the prompt's part of it."""
    response = place.ours.get("data.max_response_length")
    return value - response if response is not None and value > response else LEFT_OUT


def scaled(value: Any, _: Place) -> Any:
    """TRL's scale_rewards: by the group, or not at all."""
    return value not in ("none", False)


def aggregation(value: Any, _: Place) -> Any:
    """The loss type of TRL's GRPO as an aggregation."""
    return {
        "grpo": "seq-mean-token-mean",
        "dapo": "token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    }.get(str(value), LEFT_OUT)


def token_level(value: Any, _: Place) -> Any:
    """Whether ratios of engine and trainer weigh each token."""
    return "token" if value else LEFT_OUT


def recompute_switch(value: Any, _: Place) -> Any:
    """Gradient checkpointing on or off."""
    return "full" if value else "none"


def estimator(value: Any, _: Place) -> Any:
    """OpenRLHF's advantage estimators."""
    names = {"group_norm": "grpo", "reinforce_baseline": "reinforce_plus_plus_baseline"}
    names |= {"reinforce": "reinforce_plus_plus", "dr_grpo": "grpo"}
    return names.get(str(value), value)


CONVERSIONS: dict[str, Callable[[Any, Place], Any]] = {
    "offload_params": partial(offload, owner="params"),
    "offload_grads": partial(offload, owner="grads"),
    "offload_optimizer": partial(offload, owner="optimizer"),
} | {
    function.__name__: function
    for function in (
        *(tokens_of_samples, times_cp, at_least_longest, dropped, recompute, none_below_zero),
        *(zero_below_zero, optimizer, betas),
        *(share_of_lr, schedule, warmup, trackers, engine, resume, every_step, replay, rewards),
        *(as_list, left_out, prompts_a_step, prompts_a_mini_batch, rows_a_step, scaled),
        *(prompts_of_samples, prompt_part, aggregation, recompute_switch, estimator, token_level),
    )
}
