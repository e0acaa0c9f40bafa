"""The batches of a run as numbers: each role's work in a pass, and how it is cut.

It knows no model, and produces no text.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrlhf.config.roots import AnyConfig, PPOConfig, PreferenceConfig, is_reward_model
from mrlhf.config.sections import OptimSection, RoleSection
from mrlhf.parallel.layout import AxisSizes
from mrlhf.parallel.pipeline_order import idle_share
from mrlhf.parallel.segments import Segments


@dataclass(frozen=True)
class RoleWork:
    """The work of one role at once: a mini-batch that it is trained on, or all that it scores."""

    name: str
    role: RoleSection
    is_trained: bool  # whether there is a backward pass
    dp: int
    key: str  # the key that sizes the batch
    rows: int  # the value of that key: prompts, sequences or pairs
    units: int  # sequences or pairs of the batch, on all ranks
    longest: int  # tokens of the longest unit, padded for context-parallel ranks
    mini_batches: int = 1  # in a step
    epochs: int = 1  # passes over them

    @property
    def per_rank(self) -> int:
        """Units of a data-parallel rank."""
        return -(-self.units // self.dp)

    @property
    def per_micro_batch(self) -> int:
        """Units of full length that a micro-batch holds."""
        return self.role.micro_batch_tokens // self.longest

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank, if all units have full length."""
        return -(-self.per_rank // self.per_micro_batch)

    @property
    def bubble(self) -> float:
        """The share of the time in which a rank of the pipeline is idle."""
        return idle_share(self.micro_batches, self.role.pp, self.role.vpp)


def role_work(config: AnyConfig, world_size: int) -> list[RoleWork]:
    """The work of each role on `world_size` ranks; its layout must fit them."""
    works = []
    for name, role in config.roles().items():
        if name == "judge_model":
            continue  # its engine has neither micro-batches nor rows of a batch
        dp = AxisSizes.of(role).dp(world_size)
        is_frozen = isinstance(config, PPOConfig) and name not in config.trained()
        longest = longest_unit(config, role.cp, name if is_frozen else None)
        if not isinstance(config, PPOConfig):
            rows = config.data.batch_size
            is_trained = name == "model"
            works.append(
                RoleWork(name, role, is_trained, dp, "data.batch_size", rows, rows, longest)
            )
            continue

        trained = config.trained().get(name)
        batch = config.data.train_batch_size
        if trained is not None:
            key = f"{name}.ppo_mini_batch_size"
            rows = trained.ppo_mini_batch_size
            cut = (batch // rows, trained.ppo_epochs)
        else:
            # The reward model scores all responses, not only those that are trained on.
            scores_all = is_reward_model(name)
            key = "data.gen_batch_size" if scores_all else "data.train_batch_size"
            rows = config.data.gen_batch_size if scores_all else batch
            cut = (1, 1)
        units = rows * config.rollout.n
        works.append(RoleWork(name, role, trained is not None, dp, key, rows, units, longest, *cut))
    return works


def trained_models(config: AnyConfig) -> dict[str, tuple[RoleSection, OptimSection]]:
    """The models that are trained, each with its optimizer."""
    if isinstance(config, PPOConfig):
        return {name: (role, role.optim) for name, role in config.trained().items()}
    return {"model": (config.model, config.optim)}


def longest_unit(config: AnyConfig, cp: int = 1, role: str | None = None) -> int:
    """Tokens of the longest sequence, or pair of sequences, padded for `cp` ranks.

    `role` reads it, whose prompts may be its own; None: it is one of the data's.
    """
    longest = config.data.max_length if role is None else config.longest_of(role)
    longest = Segments(size=cp).padded(longest)
    return config.fewest_responses * longest if isinstance(config, PreferenceConfig) else longest
