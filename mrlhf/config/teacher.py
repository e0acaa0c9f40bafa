"""The sections of a teacher, and of what the policy learns from it.

A section checks its own fields, and knows no model and no rank.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from mrlhf.config.fields import Count, Decay, PathText, Positive, Rows, Section, Texts, expand_path
from mrlhf.config.frozen import FrozenSection
from mrlhf.config.reads import KeyPlace, NotRead, ReadIf, read_if
from mrlhf.config.sections import OwnPromptSection, RoleSection
from mrlhf.rl.names import estimator_traits


def _without_teacher(place: KeyPlace) -> NotRead | None:
    """A key of the distillation where there is no teacher."""
    if place.config.teacher is not None:
        return None
    return NotRead(", since there is no teacher", "set teacher.path", ("teacher",))


_IF_THERE_IS_ONE = ReadIf(_without_teacher)
_IF_PATH = read_if("weights", lambda name: name == "path", "is another", "use path")
_IF_EARLIER = read_if("weights", lambda name: name == "earlier", "is another", "use earlier")
_IN_LOSS = read_if("mode", lambda mode: mode == "loss", "is reward", "use loss")


class NamedTeacherSection(Section):
    """One of several teachers."""

    name: Annotated[str, Field(pattern=r"^[\w-]+$")]
    """its name in metrics and messages: letters, digits, _ and -"""
    path: PathText
    """Hugging Face directory, or org/name of the Hub"""
    data_source: Annotated[Texts, Field(min_length=1)]
    """the data sources whose rows it teaches"""


class TeacherSection(OwnPromptSection, FrozenSection):
    """A frozen policy that the trained one learns from, in a layout of its own."""

    weights: Literal["path", "base", "earlier"] = "path"
    """path: those of path, a model of its own; base: the actor's model without its adapters, which
    takes no memory; earlier: the actor of an earlier step, with other adapters, or without any as a
    second model. Of the latter two the keys of a layout are the actor's"""
    every: Annotated[Count, _IF_EARLIER] = 1
    """earlier: steps after which it moves"""
    decay: Annotated[Decay, _IF_EARLIER] = 0.0
    """earlier: the share that stays of its weights when it moves, in an exponential average; 0: it
    becomes the policy"""
    path: Annotated[str, AfterValidator(lambda text: text and expand_path(text))] = ""
    """weights path: Hugging Face directory, or org/name of the Hub"""
    several: Annotated[list[NamedTeacherSection], _IF_PATH] = Field(default_factory=list)
    """in the place of path: several teachers, each with the rows of other data sources; all have
    this section's layout, and its other keys"""

    refused: ClassVar[Rows] = {
        "{section}.path is not set, and {weights} is a model of its own; set it, or weights to "
        "base, or name several teachers in {section}.several": lambda self: (
            self.weights == "path" and not self.path and not self.several
        ),
        "{path} is one teacher, and {section}.several names {names}; leave out one of "
        "both": lambda self: (
            bool(self.path and self.several)
            and {"names": ", ".join(each.name for each in self.several)}
        ),
        "{section}.several names {twice} twice; each has one place, and each data source one "
        "teacher": lambda self: _named_twice(self.several),
        "{section}.{key} has no effect, since {weights} is the actor's model in its layout; leave "
        "it out, or set weights to path": lambda self, earlier_actor: [
            {"key": key}
            for key in RoleSection.model_fields
            if self.weights != "path" and self.value_of(key) != _default_of(key)
            if key != "offload" or earlier_actor is None
        ],
        "{weights} is the actor's model without its adapters, and it has none; set "
        "actor.lora.rank, or weights to path or earlier": lambda self, actor: (
            self.weights == "base" and not actor.lora.is_on
        ),
    }

    @property
    def models(self) -> dict[str, TeacherSection]:
        """The models that are built, by role; none if the policy teaches itself."""
        if self.weights != "path":
            return {}
        if not self.several:
            return {"teacher": self}
        return {f"teacher.{x.name}": self.model_copy(update={"path": x.path}) for x in self.several}

    @property
    def by_source(self) -> dict[str, str]:
        """The name of each data source's teacher; empty if there is one for all."""
        return {source: each.name for each in self.several for source in each.data_source}


def _named_twice(several: list[NamedTeacherSection]) -> list[dict[str, str]]:
    """The teachers and data sources that are named more than once."""
    named = [f"the teacher {each.name}" for each in several]
    named += [f"the data source {source}" for each in several for source in each.data_source]
    return [{"twice": words} for words in sorted(set(named)) if named.count(words) > 1]


def _default_of(key: str) -> object:
    return TeacherSection.model_fields[key].get_default(call_default_factory=True)


class DistillationSection(Section):
    """What the policy learns from the teacher, on its own responses."""

    mode: Annotated[Literal["loss", "reward"], _IF_THERE_IS_ONE] = "loss"
    """loss: a divergence from the teacher over the whole vocabulary is added to the loss; reward:
    log(teacher / policy) of the drawn token is added to its reward"""
    kl: Annotated[Literal["forward", "reverse", "jsd"], _IF_THERE_IS_ONE, _IN_LOSS] = "reverse"
    """loss: the divergence; reverse: KL(policy, teacher); forward: KL(teacher, policy); jsd: the
    generalised Jensen-Shannon divergence"""
    beta: Annotated[
        Annotated[float, Field(gt=0, lt=1)],
        _IF_THERE_IS_ONE,
        read_if("kl", lambda kl: kl == "jsd", "is not jsd", "use jsd"),
    ] = 0.5
    """jsd: the teacher's share of the mixture, and of the divergences from it"""
    temperature: Annotated[Positive | None, _IF_THERE_IS_ONE, _IN_LOSS] = None
    """loss: temperature of both distributions in the divergence; null: rollout.temperature"""
    top_k: Annotated[Count | None, _IF_THERE_IS_ONE, _IN_LOSS] = None
    """loss: compare the teacher's so many likeliest tokens alone, over which both distributions are
    renormalised; null: the whole vocabulary"""
    coef: Annotated[Positive, _IF_THERE_IS_ONE] = 1.0
    """factor of the divergence, or of the reward"""
    given_share: Annotated[Annotated[float, Field(ge=0, lt=1)], _IF_THERE_IS_ONE, _IN_LOSS] = 0.0
    """loss: the share of each step's prompts whose responses are not drawn, but are those of their
    row: the text in its column response, or a list of texts, of which a prompt's samples take one
    each. On these the teacher alone teaches. It is 1 - lmbda of GKD"""

    refused: ClassVar[Rows] = {
        "{mode} and KL 'full' both take the loss over the whole vocabulary from another model; use "
        "another kl_loss_type and kl_penalty, such as low_var_kl": lambda self, needs_full_kl: (
            self.mode == "loss" and needs_full_kl
        ),
        "{mode} adds to the sum of a response's rewards, and {algorithm.adv_estimator} compares "
        "single scores; use mode loss, or another estimator": lambda self, algorithm: (
            self.mode == "reward" and estimator_traits(algorithm.adv_estimator).compares_terms
        ),
        "{given_share} is for whole batches of single turns with scores as they are; leave {other} "
        "out, or {section}.given_share": lambda self, rollout, algorithm: [
            {"other": key}
            for key, is_on in {
                "rollout.environment and rollout.tools": rollout.has_turns,
                "rollout.partial": rollout.partial.is_on,
                "algorithm.filter_groups": algorithm.filter_groups.enable,
                "algorithm.reward_norm": algorithm.reward_norm is not None,
            }.items()
            if self.given_share and is_on
        ],
    }

    @property
    def divergence_beta(self) -> float:
        """The teacher's share of the mixture; see `NumbersToCompute.beta`."""
        return {"forward": 0.0, "reverse": 1.0, "jsd": self.beta}[self.kl]

    def sharpness(self, temperature: float) -> float:
        """What multiplies logits that are divided by `temperature`; see `NumbersToCompute`."""
        return 1.0 if self.temperature is None else temperature / self.temperature
