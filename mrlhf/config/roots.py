"""The five configurations, one for each launcher, and the keys that inherit from another key.

A root is a tree of sections. This file knows which sections a launcher has. It does not know what a
key means; `preflight` checks the conditions between keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, model_validator

from mrlhf.config.algorithm import AlgorithmSection, ReturnsSection
from mrlhf.config.critic import CriticSection, ScalarOptimSection
from mrlhf.config.data import (
    AnyPromptsSection,
    PromptDataSection,
    SplitDataSection,
    SupervisedDataSection,
)
from mrlhf.config.fields import Section, Seed
from mrlhf.config.frozen import JudgeModelSection, RewardModelSection
from mrlhf.config.pair_losses import DPOSection, RewardLossSection
from mrlhf.config.reads import KeyPlace, NotRead, ReadIf
from mrlhf.config.reward import AnyRewardSection, JudgeSection, RewardSection
from mrlhf.config.rollout import RolloutSection
from mrlhf.config.sections import (
    ActorSection,
    OptimSection,
    OwnPromptSection,
    ReferenceSection,
    RoleSection,
    TrainedModelSection,
)
from mrlhf.config.teacher import TeacherSection
from mrlhf.config.trainer import DistributedSection, PPOTrainerSection, TrainerSection
from mrlhf.config.tree import nodes
from mrlhf.rl.names import RowKind, estimator_traits, policy_loss_traits


def section_of(role: str) -> str:
    """The section with the keys of a role, which an ensemble or several teachers share."""
    return role.split(".")[0]


def is_reward_model(role: str) -> bool:
    """Whether a role is a reward model, alone or in an ensemble."""
    return section_of(role) == "reward_model"


class Root(Section):
    """A whole configuration file."""

    # The keys that, left out or null, take the value of another key.
    inherited: ClassVar[Mapping[str, str]] = {}
    # Of these, the keys that do so only if none of the others is given.
    unless_given: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @property
    def unbuilt(self) -> frozenset[str]:
        """The sections of models that this run does not build."""
        return frozenset()

    @property
    def loads_weights(self) -> bool:
        """Whether models begin with stored weights; supervised training may draw random ones."""
        return True

    def longest_of(self, role: str) -> int:
        """Tokens of the longest sequence that a role reads."""
        return int(self.value_of("data.max_length"))

    def head_of(self, role: str) -> Literal["lm", "scalar"]:
        """The head of a role's model."""
        return "scalar" if role == "critic" or is_reward_model(role) else "lm"

    def why_unread(self, key: str) -> NotRead | None:
        """The reason why a key has no effect, by the facts beside it; None if it has one."""
        place = KeyPlace(self, key.rpartition(".")[0])
        for fact in nodes(type(self))[key].field.metadata:
            if isinstance(fact, ReadIf):
                reason = fact.problem(place)
                if reason is not None:
                    return reason
        return None

    def reads(self, key: str) -> bool:
        """Whether a key has an effect."""
        return self.why_unread(key) is None

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        tree = _plain(raw)
        others = {key for keys in cls.unless_given.values() for key in keys}
        given = {key for key in others if _given(tree, key) is not None}

        for key, source in cls.inherited.items():
            section, name = key.split(".")
            if tree.get(section) is None:
                tree[section] = {}
            is_free = given.isdisjoint(cls.unless_given.get(key, ()))
            if is_free and isinstance(tree[section], dict) and _given(tree, key) is None:
                value = _given(tree, source)
                field = nodes(cls)[source].field
                if value is None and not field.is_required():
                    value = field.default
                if value is not None:
                    tree[section][name] = value
        return tree


def _plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` in which each section, given as mapping or object, is a new dictionary."""
    copy: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, BaseModel):
            copy[key] = value.model_dump(exclude_unset=True)
        else:
            copy[key] = dict(value) if isinstance(value, Mapping) else value
    return copy


def _given(tree: Mapping[str, Any], key: str) -> Any:
    """The value of `section.name` in `tree`; None if it has none."""
    section, name = key.split(".")
    values = tree.get(section)
    return values.get(name) if isinstance(values, dict) else None


_OF_POLICY = [key for key in RoleSection.model_fields if key != "offload"]


def _of_reference(policy: str) -> dict[str, str]:
    """The keys of the reference, which inherit from the policy that is trained."""
    return {f"reference.{key}": f"{policy}.{key}" for key in _OF_POLICY}


def _is_policy(reference: ReferenceSection, policy: RoleSection) -> bool:
    """Whether a reference has the model, layout and precision of the policy."""
    return all(reference.value_of(key) == policy.value_of(key) for key in _OF_POLICY)


# These go with the policy's sizes; beside a size of its own, the reference has their defaults.
_WITH_SIZES_OF_REFERENCE = {
    "reference.vpp": ("reference.pp",),
    "reference.pp_layers": ("reference.pp", "reference.vpp"),
    "reference.etp": ("reference.tp", "reference.ep"),
    "reference.sequence_parallel": ("reference.tp",),
}


class PPOConfig(Root):
    """The configuration of launch/train_ppo.py."""

    inherited: ClassVar[Mapping[str, str]] = {
        "critic.path": "actor.path",
        "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
        "critic.ppo_epochs": "actor.ppo_epochs",
        "critic.share_prompts": "actor.share_prompts",
        **_of_reference("actor"),
        "data.tokenizer": "actor.path",
        "data.gen_batch_size": "data.train_batch_size",
        "actor.loss_scale_factor": "data.max_response_length",
        "critic.loss_scale_factor": "data.max_response_length",
    }
    unless_given: ClassVar[Mapping[str, tuple[str, ...]]] = _WITH_SIZES_OF_REFERENCE

    seed: Seed = 1
    """seed of the data order, of sampling and of fresh weights"""
    actor: ActorSection
    """the policy that is trained"""
    critic: CriticSection
    """the value model; built where advantages need values"""
    reference: ReferenceSection
    """the frozen policy that the KL is measured from"""
    teacher: TeacherSection | None = None
    """a frozen policy that the trained one learns from, see algorithm.distillation; null: none"""
    reward_model: RewardModelSection | None = None
    """a frozen model that scores responses; null: none"""
    reward: RewardSection
    """the score of a response"""
    judge: JudgeSection
    """the reward term `judge`: a generative model that is asked"""
    judge_model: JudgeModelSection | None = None
    """a frozen model that judges on the ranks; null: none"""
    rollout: RolloutSection
    """generation"""
    data: PromptDataSection
    """prompts"""
    algorithm: AlgorithmSection
    """from scores to advantages"""
    trainer: PPOTrainerSection
    """how long to train, and what to leave behind"""
    distributed: DistributedSection
    """the processes"""

    @property
    def unbuilt(self) -> frozenset[str]:
        """The sections of models that this run does not use."""
        models = {"critic", "reference", "teacher", "reward_model", "judge_model"}
        read = {"reference": self.needs_reference, "teacher": self.teacher is not None}
        unused = models.difference(self.roles())
        return frozenset(name for name in unused if not read.get(name, False))

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages need values."""
        traits = estimator_traits(self.algorithm.adv_estimator)
        return traits.needs_values or self.algorithm.use_critic

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference is in use, or a loss that compares with it."""
        prefers = estimator_traits(self.algorithm.adv_estimator).pairs
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss or prefers

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is the policy without its adapters, and no model of its own."""
        return self.actor.lora.is_on and _is_policy(self.reference, self.actor)

    @property
    def full_kl_in_reward(self) -> bool:
        """Whether the KL in the reward sums over the vocabulary."""
        return self.algorithm.use_kl_in_reward and self.algorithm.kl_penalty == "full"

    @property
    def full_kl_in_loss(self) -> bool:
        """Whether the KL in the loss sums over the vocabulary."""
        return self.actor.use_kl_loss and self.actor.kl_loss_type == "full"

    @property
    def needs_full_kl(self) -> bool:
        """Whether a KL in use needs actor and reference in one place."""
        return self.full_kl_in_reward or self.full_kl_in_loss

    @property
    def distils_in(self) -> Literal["loss", "reward"] | None:
        """Where the policy meets the teacher; None without one."""
        return None if self.teacher is None else self.algorithm.distillation.mode

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the policy, with other weights, in its layout."""
        return self.teacher is not None and not self.teacher.models

    @property
    def earlier_actor(self) -> ActorSection | None:
        """The second model that is the actor of an earlier step, if the teacher is one."""
        section = self.teacher
        if section is None or section.weights != "earlier" or self.actor.lora.is_on:
            return None
        offload = ["params", "optimizer"] if section.offload else []
        return self.actor.model_copy(update={"offload": offload})

    def longest_of(self, role: str) -> int:
        """Tokens of the longest sequence that a role reads, whose prompts may be its own."""
        lengths = [self.data.max_length]
        for name, section in self.own_prompts().items():
            is_policy = name == "teacher" and self.teaches_itself
            reads = section_of(role) == ("actor" if is_policy else name)
            if reads and section.max_prompt_length is not None:
                lengths.append(section.max_prompt_length + self.data.max_response_length)
        return max(lengths)

    def own_prompts(self) -> dict[str, OwnPromptSection]:
        """The sections of the models that read other prompts than the policy, by their names."""
        critic = self.critic if self.needs_critic else None
        readers: dict[str, OwnPromptSection | None] = {"teacher": self.teacher, "critic": critic}
        return {name: section for name, section in readers.items() if section and section.template}

    @property
    def needs_old_logprobs_early(self) -> bool:
        """Whether more than the update needs the log-probabilities from before it."""
        algorithm = self.algorithm
        correction = algorithm.rollout_correction
        loss = correction.trained_loss(self.actor.policy_loss.loss_mode)
        return (
            correction.active
            or algorithm.use_kl_in_reward
            or self.distils_in == "reward"
            or estimator_traits(algorithm.adv_estimator).needs_squared_probabilities
            or estimator_traits(algorithm.adv_estimator).pairs
            or policy_loss_traits(loss).selects_tokens
            or self.actor.router_replay != "none"
        )

    @property
    def prompts_per_step(self) -> int:
        """Prompts that one training step takes at least; dynamic sampling may take more."""
        return max(self.data.train_batch_size, self.data.gen_batch_size)

    @property
    def samples_per_step(self) -> int:
        """Responses that are trained on in one training step."""
        return self.data.train_batch_size * self.rollout.n

    def trained(self) -> dict[str, ActorSection | CriticSection]:
        """The models that this run trains, by the name of their section."""
        trained: dict[str, ActorSection | CriticSection] = {"actor": self.actor}
        if self.needs_critic:
            trained["critic"] = self.critic
        return trained

    def optims(self) -> dict[str, OptimSection]:
        """The optimizers of the models that are trained, by their keys."""
        return {f"{name}.optim": role.optim for name, role in self.trained().items()}

    def roles(self) -> dict[str, RoleSection]:
        """The models that this run builds, by the name of their section."""
        roles: dict[str, RoleSection] = {**self.trained()}
        if self.needs_reference and not self.reference_is_policy:
            roles["reference"] = self.reference
        if self.teacher is not None:
            roles |= self.teacher.models
        if self.judge_model is not None:
            roles["judge_model"] = self.judge_model
        return roles | self._reward_models()

    def _reward_models(self) -> dict[str, RoleSection]:
        """The reward model, and the further members of its ensemble, which have its layout."""
        section = self.reward_model
        if section is None:
            return {}
        roles: dict[str, RoleSection] = {"reward_model": section}
        for number, path in enumerate(section.ensemble):
            member = section.model_copy(update={"path": path})
            roles[f"reward_model.ensemble.{number}"] = member
        return roles

    def of_judge(self) -> GenerationConfig:
        """The configuration whose policy is the judge on the ranks, for its engine."""
        model = self.judge_model
        assert model is not None
        keys: dict[str, dict[str, Any]] = {
            "rollout": {"engine": "native", "tp": model.tp, "ep": None, "environment": []}
            | {"n": self.judge.n, "temperature": self.judge.temperature}
            | {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
            | {"stop": [], "stop_token_ids": [], "tools": []},
            "data": {"tokenizer": model.path, "chat_template": None}
            | {"max_prompt_length": model.max_prompt_tokens}
            | {"max_response_length": self.judge.max_tokens},
        }
        changes = {name: self.value_of(name).model_copy(update=new) for name, new in keys.items()}
        actor = ActorSection(**{key: model.value_of(key) for key in _OF_POLICY})
        others = {"actor": actor, "reward": AnyRewardSection(), "judge_model": None}
        return GenerationConfig.model_construct(**{**vars(self), **changes, **others})


class GenerationConfig(PPOConfig):
    """The configuration of a policy that is asked and not trained: PPO's, and what it may lack."""

    reward: AnyRewardSection
    """the score of a response; no terms: none"""
    data: AnyPromptsSection
    """prompts"""

    @property
    def loads_weights(self) -> bool:
        """Whether the policy has a model's weights, and not those of a checkpoint."""
        return self.trainer.resume == "never"

    def trained(self) -> dict[str, ActorSection | CriticSection]:
        """None."""
        return {}

    def roles(self) -> dict[str, RoleSection]:
        """The models that are built, by the name of their section."""
        roles: dict[str, RoleSection] = {"actor": self.actor}
        if "reward_model" in self.reward.names:
            roles |= self._reward_models()
        if "judge" in self.reward.names and self.judge_model:
            roles["judge_model"] = self.judge_model
        return roles


class SupervisedConfig(Root):
    """The keys of every training on rows of a file: fine-tuning, and those on preference pairs."""

    inherited: ClassVar[Mapping[str, str]] = {"data.tokenizer": "model.path"}

    seed: Seed = 1
    """seed of the data order and of fresh weights"""
    model: TrainedModelSection
    """the model that is trained"""
    optim: OptimSection
    """optimizer"""
    data: SupervisedDataSection
    """sequences to learn from"""
    trainer: TrainerSection
    """how long to train, and what to leave behind"""
    distributed: DistributedSection
    """the processes"""

    @property
    def loads_weights(self) -> bool:
        """Whether the model begins with stored weights."""
        return self.model.init != "random"

    def head_of(self, role: str) -> Literal["lm", "scalar"]:
        """The head of the model, for which there is an optimizer of its own kind."""
        return "scalar" if isinstance(self.optim, ScalarOptimSection) else "lm"

    def optims(self) -> dict[str, OptimSection]:
        """The optimizer, by its key."""
        return {"optim": self.optim}

    def roles(self) -> dict[str, RoleSection]:
        """The models that this run builds, by the name of their section."""
        return {"model": self.model}


class SFTConfig(SupervisedConfig):
    """The configuration of launch/train_sft.py."""

    data: SupervisedDataSection
    """prompts with the responses to learn"""


class PreferenceConfig(SupervisedConfig):
    """The keys of every training on preference pairs."""

    data: SplitDataSection
    """prompts with a chosen and a rejected response"""

    @property
    def rows(self) -> RowKind:
        """What a row is."""
        return "pairs"

    @property
    def fewest_responses(self) -> int:
        """The fewest responses of a row, which stay in one micro-batch."""
        return 1 if self.rows == "targets" else 2


class RewardModelConfig(PreferenceConfig):
    """The configuration of launch/train_rm.py."""

    rm: RewardLossSection
    """what the rows are, and the loss"""
    optim: ScalarOptimSection
    """optimizer"""

    @property
    def rows(self) -> RowKind:
        """What a row is."""
        return self.rm.rows


class CriticConfig(SupervisedConfig):
    """The configuration of launch/train_critic.py."""

    algorithm: ReturnsSection
    """the targets of the critic"""
    optim: ScalarOptimSection
    """optimizer"""
    data: SplitDataSection
    """stored rollouts: parquet or jsonl dumps of a run, or rows of prompt, response and score"""


class DPOConfig(PreferenceConfig):
    """The configuration of launch/train_dpo.py."""

    inherited: ClassVar[Mapping[str, str]] = {
        **SupervisedConfig.inherited,
        **_of_reference("model"),
    }
    unless_given: ClassVar[Mapping[str, tuple[str, ...]]] = _WITH_SIZES_OF_REFERENCE

    dpo: DPOSection
    """the loss on preference pairs"""
    reference: ReferenceSection
    """the frozen policy that the trained one is compared with"""

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is the policy as it begins, or without its adapters."""
        return self.model.lora.is_on and _is_policy(self.reference, self.model)

    def roles(self) -> dict[str, RoleSection]:
        """The models that this run builds, by the name of their section."""
        return {"model": self.model, "reference": self.reference}


AnySupervised = SFTConfig | CriticConfig | PreferenceConfig
AnyConfig = PPOConfig | AnySupervised
Program = Literal["ppo", "sft", "rm", "critic", "dpo"]
PROGRAMS: Mapping[Program, type[AnyConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "rm": RewardModelConfig,
    "critic": CriticConfig,
    "dpo": DPOConfig,
}
