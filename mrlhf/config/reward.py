"""The sections of the reward: its terms, the limits of a user's functions, and a judge.

They do not know models, files or ranks.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from mrlhf.config.fields import (
    MOST,
    Count,
    CountOrZero,
    FunctionReference,
    Name,
    NotNegative,
    Number,
    Rows,
    Seconds,
    Section,
    Tokens,
    known_or_own,
)
from mrlhf.config.reads import read_if
from mrlhf.config.user_code import is_reference
from mrlhf.rl.names import RewardName, estimator_traits


class RewardTermSection(Section):
    """One part of the reward."""

    name: Annotated[RewardName | FunctionReference, known_or_own(get_args(RewardName))]
    """a rule, reward_model, judge, environment (what rollout.environment says of an episode), or
    path/to/file.py:function: your own"""
    weight: Number = 1.0
    """factor of this term in the sum"""

    @model_validator(mode="before")
    @classmethod
    def _is_section(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            raise ValueError(f"should be a section with keys of its own: {{name: {raw}}}")
        return raw


_IF_OWN = read_if(
    "terms",
    lambda terms: any(is_reference(term.name) for term in terms),
    "holds no function of your own",
    "name one there",
)


class RewardSection(Section):
    """The score of a response: the weighted sum of its terms."""

    terms: list[RewardTermSection]
    """list of {name, weight}; empty: a teacher alone teaches"""
    timeout_s: Annotated[Seconds, _IF_OWN] = 60.0
    """longest time that one call of a user's function may take, seconds"""
    memory_mb: Annotated[Annotated[int, Field(ge=64, le=MOST)] | None, _IF_OWN] = 16384
    """most private memory of each process of a user's function, MB; null: no limit"""

    refused: ClassVar[Rows] = {
        "reward.terms holds 'reward_model' but there is no such model; set reward_model.path or "
        "remove the term": lambda self, reward_model: (
            "reward_model" in self.names and reward_model is None
        ),
        "reward_model is set but no reward term uses it; add {name: reward_model} to reward.terms "
        "or remove it": lambda self, reward_model: (
            "reward_model" not in self.names and reward_model is not None
        ),
        "reward.terms holds 'judge', which either judge.address and judge.model name or "
        "judge_model.path; set one of these, or remove the term": lambda self, judge, judge_model: (
            "judge" in self.names
            and (None in (judge.address, judge.model)) == (judge_model is None)
        ),
        "judge or judge_model is set but no reward term uses it; add {name: judge} to reward.terms "
        "or remove it": lambda self, judge, judge_model: (
            "judge" not in self.names and (judge != JudgeSection() or judge_model is not None)
        ),
        "reward.terms holds 'environment' but there is none; set rollout.environment or remove the "
        "term": lambda self, rollout: "environment" in self.names and not rollout.environment,
    }

    @property
    def names(self) -> list[str]:
        """The names of the terms."""
        return [term.name for term in self.terms]


_RATING = r"Rating:\s*(\d+(?:\.\d+)?)"
_IF_ADDRESS = read_if("address", bool, "is null", "set that")
_Ends = Annotated[list[Number], Field(min_length=2, max_length=2)]
_IF_NUMBERS = read_if("verdicts", lambda verdicts: not verdicts, "has words", "leave that out")


class JudgeSection(Section):
    """The reward term `judge`: a generative model that is asked about each response."""

    address: Annotated[str, Field(pattern=r"^https?://[\w\[][^\s@]*$")] | None = None
    """server that speaks OpenAI's protocol, as http://host:8000/v1; null: judge_model judges"""
    model: Annotated[Name | None, _IF_ADDRESS] = None
    """the server's name for the model"""
    api_key_variable: Annotated[Name | None, _IF_ADDRESS] = None
    """environment variable that holds the API key, which is written nowhere"""
    template: str = ""
    """jinja2 template of the message: {{ response }} in it, and {{ prompt }} as the policy saw it,
    {{ ground_truth }}, {{ data_source }}, {{ extra_info }}"""
    compare: Literal["none", "pairs"] = "none"
    """pairs: each two responses to a prompt are compared, in both orders, and a score is the share
    of these that a response wins; {{ other }} in template is the second one; none: each is judged
    alone"""
    pattern: Name = _RATING
    """regular expression with one group, which holds the verdict; the last match counts"""
    range: Annotated[_Ends, _IF_NUMBERS] = Field(default_factory=lambda: [1.0, 10.0])
    """the numbers that become the scores 0 and 1; those between lie on the line, and others are no
    verdicts"""
    verdicts: dict[str, Number] = Field(default_factory=dict)
    """score of each word that is a verdict, in capitals or not; empty: verdicts are numbers"""
    unparsed: Number | None = None
    """score of an answer without a verdict; null: it ends the run"""
    n: Count = 1
    """answers for each response, whose scores are averaged"""
    temperature: NotNegative = 0.0
    """temperature of the answers"""
    max_tokens: Tokens = 512
    """most tokens of an answer"""
    timeout_s: Annotated[Seconds, _IF_ADDRESS] = 120.0
    """longest time of a request, and longest wait before another try, seconds"""
    retries: Annotated[CountOrZero, _IF_ADDRESS] = 5
    """tries after the first, if the server is busy, fails or gives no answer"""
    requests_at_once: Annotated[Count, _IF_ADDRESS] = 16
    """most open requests of each rank"""

    refused: ClassVar[Rows] = {
        "{n} answers of {temperature} are alike; lower the first to 1 or raise the second": (
            lambda self: self.n > 1 and self.temperature == 0
        ),
        "{range} has equal ends; give two numbers": lambda self: self.range[0] == self.range[1],
        "{compare} needs all responses to a prompt at once, and {address} has one at a time; set "
        "judge_model.path instead": lambda self: self.compares and self.address is not None,
        "{compare}: judge.template should show {{ response }} and {{ other }}": lambda self: (
            self.compares and not all(name in self.template for name in ("response", "other"))
        ),
        "{compare}: judge.verdicts and judge.unparsed should lie between 0, if the first response "
        "loses, and 1, if it wins": lambda self: (
            self.compares
            and not all(0 <= x <= 1 for x in (self.unparsed or 0, *self.verdicts.values()))
        ),
        "{compare} compares responses, and {algorithm.adv_estimator} scores a greedy one alone; "
        "use another estimator, such as grpo": lambda self, algorithm: (
            self.compares and estimator_traits(algorithm.adv_estimator).needs_greedy_answer
        ),
        "{pattern} is for numbers, and judge.verdicts has words; give one that finds them, such as "
        "\\[\\[(\\w+)\\]\\]": lambda self: bool(self.verdicts) and self.pattern == _RATING,
    }

    @property
    def compares(self) -> bool:
        """Whether responses are compared with each other."""
        return self.compare == "pairs"


class AnyRewardSection(RewardSection):
    """The score of a response, if any is wanted."""

    terms: list[RewardTermSection] = Field(default_factory=list)
    """list of {name, weight}; may be empty"""
