"""The section `algorithm.rollout_correction`: importance weights, and rejection of sampled tokens.

It reads thresholds that are written as text, and fills in presets. It does not know how a weight or
a statistic is computed; `mrlhf.rl.correction` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import BeforeValidator, model_validator

from mrlhf.config.fields import Rows, Section, known_name
from mrlhf.config.reads import read_if
from mrlhf.rl.names import BypassLoss, Statistic, WeightLevel, estimator_traits

_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQUENCE_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SUM_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
_CENTRED = {"score_centering": True}
PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "decoupled_token_is": _TOKEN_IS,
        "decoupled_seq_is": _SEQUENCE_IS,
        "decoupled_token_icepop": _ICEPOP,
        "decoupled_seq_is_rs": {**_SEQUENCE_IS, **_SUM_RS},
        "decoupled_geo_rs": _GEO_RS,
        "geo_rs_seq_tis": {**_SEQUENCE_IS, **_GEO_RS},
        "geo_rs_token_tis": {**_TOKEN_IS, **_GEO_RS},
        "decoupled_geo_rs_seq_tis": {**_SEQUENCE_IS, **_GEO_RS},
        "decoupled_geo_rs_token_tis": {**_TOKEN_IS, **_GEO_RS},
        "decoupled_k3_rs": _K3_RS,
        "decoupled_k3_rs_seq_tis": {**_SEQUENCE_IS, **_K3_RS},
        "decoupled_k3_rs_token_tis": {**_TOKEN_IS, **_K3_RS},
        "bypass_ppo_clip": _CLIP,
        "bypass_ppo_clip_geo_rs": {**_CLIP, **_GEO_RS},
        "bypass_ppo_clip_k3_rs": {**_CLIP, **_K3_RS},
        "bypass_pg_is": {**_REINFORCE, **_SEQUENCE_IS},
        "bypass_pg_token_icepop": {**_REINFORCE, **_ICEPOP},
        "bypass_pg_geo_rs": {**_REINFORCE, **_GEO_RS},
        "bypass_pg_geo_rs_seq_tis": {**_REINFORCE, **_SEQUENCE_IS, **_GEO_RS},
        "bypass_pg_geo_rs_token_tis": {**_REINFORCE, **_TOKEN_IS, **_GEO_RS},
        "bypass_pg_sc": {**_REINFORCE, **_CENTRED},
        "bypass_pg_token_tis_sc": {**_REINFORCE, **_TOKEN_IS, **_CENTRED},
        "bypass_pg_token_icepop_sc": {**_REINFORCE, **_ICEPOP, **_CENTRED},
        "disabled": {},
    }
)

if TYPE_CHECKING:
    CorrectionPreset = str
else:
    CorrectionPreset = Literal[tuple(PRESETS)]

_NUMBERS_OF = {
    "rollout_is": ("rollout_is_threshold", "rollout_is_batch_normalize"),
    "rollout_rs": ("rollout_rs_threshold",),
}
_LEAST = 1e-9
_MOST = 1e9
NOT_EVEN_ONE = "does not even hold the ratio 1, at which engine and trainer agree"


def _bounds_in(value: object) -> list[tuple[float | None, float]]:
    """The bounds in each comma-joined part of a number or a text; ValueError if one has none.

    A part is a number, which is an upper bound, or "lower_upper".
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    every = []
    for part in str(value).split(","):
        bounds = [float(number) for number in part.split("_")]
        in_range = all(_LEAST <= bound <= _MOST for bound in bounds)
        if len(bounds) > 2 or not in_range or bounds != sorted(set(bounds)):
            raise ValueError
        every.append((bounds[0] if len(bounds) == 2 else None, bounds[-1]))
    return every


def _weight_threshold(value: object) -> object:
    """`value` if it is one threshold of weights that holds the ratio 1; a number as such."""
    allowed = "a number of at least 1, or lower_upper with 0 < lower <= 1 <= upper, such as 0.5_5.0"
    try:
        ((lower, upper),) = _bounds_in(value)
    except ValueError:
        raise ValueError(f"should be {allowed}") from None
    if upper < 1 or (lower is not None and lower > 1):
        raise ValueError(f"{NOT_EVEN_ONE}; should be {allowed}")
    return upper if lower is None else value


def _rejection_threshold(value: object) -> object:
    """`value` if it is one threshold of rejection, or several; one number as such."""
    if value is None:
        return None
    try:
        (lower, upper), *others = _bounds_in(value)
    except ValueError:
        raise ValueError(
            "should be a number above 0, or lower_upper with 0 < lower < upper, such as 0.5_2.0, "
            "or several of these joined by commas"
        ) from None
    return upper if lower is None and not others else value


def _statistics(value: object) -> object:
    """The names in `value` joined by commas, without spaces and repetitions."""
    if isinstance(value, list):
        joined = ",".join(str(name) for name in value)
        raise ValueError(f"should be one text, not a list; join the names by commas: '{joined}'")
    if not isinstance(value, str):
        return value

    statistics = get_args(Statistic)
    names = list(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in statistics:
            near = difflib.get_close_matches(name, statistics, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"should be a comma-joined list of {', '.join(statistics)}{hint}")
    return ",".join(names)


_IF_WEIGHTED = read_if(
    "rollout_is", lambda level: level is not None, "is null", "set that to token or sequence"
)
_IF_REJECTED = read_if(
    "rollout_rs", lambda names: names is not None, "is null", "name the statistic there"
)


class RolloutCorrectionSection(Section):
    """How the difference between the engine's policy and the trainer's is corrected.

    The metrics of the difference are reported in any case.
    """

    preset: Annotated[CorrectionPreset | None, known_name(tuple(PRESETS))] = None
    """a named setting of all the keys below; a key beside it wins, a key of an earlier file does
    not; after reading it is null and the keys hold its values"""
    rollout_is: WeightLevel | None = None
    """importance weights: one of each token, or one of each response for all its tokens; null:
    none"""
    rollout_is_threshold: Annotated[
        float | str, BeforeValidator(_weight_threshold), _IF_WEIGHTED
    ] = 2.0
    """a number: larger weights are lowered to it; lower_upper: weights outside become 0 (IcePop)"""
    rollout_is_batch_normalize: Annotated[bool, _IF_WEIGHTED] = False
    """divide the weights by their mean"""
    rollout_rs: Annotated[str | None, BeforeValidator(_statistics)] = None
    """statistics that reject: comma-joined {token, seq_sum, seq_mean}_{k1, k2, k3}, seq_max_{k2,
    k3}; null: nothing is rejected"""
    rollout_rs_threshold: Annotated[
        float | str | None, BeforeValidator(_rejection_threshold), _IF_REJECTED
    ] = None
    """one threshold for all of rollout_rs, or one each, comma-joined; k1: lower_upper, or upper
    alone (lower = 1/upper); k2, k3: upper"""
    bypass_mode: bool = False
    """use the engine's log-probs as the old ones; saves a forward pass"""
    loss_type: BypassLoss = "ppo_clip"
    """with bypass_mode; ppo_clip: the loss of actor.policy_loss; reinforce: REINFORCE with the
    weights"""
    score_centering: bool = False
    """with loss_type reinforce: subtract the engine's mean of each token's gradient (its score),
    which moves the policy whatever is rewarded; from the engine's rollout.topk_log_probs"""

    refused: ClassVar[Rows] = {
        "{loss_type} needs algorithm.rollout_correction.bypass_mode; turn that on or set "
        "loss_type to ppo_clip": lambda self: (
            self.loss_type == "reinforce" and not self.bypass_mode
        ),
        "{loss_type} and {actor.policy_loss.loss_mode} are two losses; set loss_mode to "
        "vanilla or loss_type to ppo_clip": lambda self, actor: (
            self.bypass_mode
            and self.loss_type == "reinforce"
            and actor.policy_loss.loss_mode != "vanilla"
        ),
        "{rollout_is} with bypass_mode and loss_type ppo_clip: the ratio is to the engine's "
        "policy already and would count twice; set rollout_is to null or loss_type to "
        "reinforce": lambda self: (
            self.bypass_mode and self.loss_type == "ppo_clip" and self.rollout_is is not None
        ),
        "{score_centering} needs algorithm.rollout_correction.bypass_mode with loss_type "
        "reinforce; set both, as preset bypass_pg_sc does": lambda self: (
            self.score_centering and self.loss_type != "reinforce"
        ),
        "{score_centering} takes the mean over the tokens that could stand at one place, and "
        "{rollout_is} depends on all of a response; set rollout_is to token or null": lambda self: (
            self.score_centering and self.rollout_is == "sequence"
        ),
        "{score_centering} and {rollout_is_batch_normalize} are not supported together; turn the "
        "latter off": lambda self: (
            self.score_centering and self.rollout_is is not None and self.rollout_is_batch_normalize
        ),
        "{score_centering} and {rollout_rs} of single tokens are not supported together; use the "
        "IcePop weights rollout_is token, rollout_is_threshold 0.5_5.0, or a statistic of "
        "sequences": lambda self: (
            self.score_centering and any(name.startswith("token_") for name, *_ in self.criteria)
        ),
        "algorithm.kl_penalty full needs the forward pass that "
        "algorithm.rollout_correction.bypass_mode saves; choose another algorithm.kl_penalty, "
        "such as k1, or turn bypass_mode off": lambda self, full_kl_in_reward: (
            self.bypass_mode and full_kl_in_reward
        ),
        "{algorithm.adv_estimator} needs the probabilities of the whole vocabulary, from the "
        "forward pass that algorithm.rollout_correction.bypass_mode saves; turn bypass_mode "
        "off or use another estimator, such as rloo": lambda self, algorithm: (
            self.bypass_mode
            and estimator_traits(algorithm.adv_estimator).needs_squared_probabilities
        ),
    }

    @classmethod
    def expand(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Replace the preset in `raw` by its keys.

        If weights or rejection are switched off beside it, its numbers for them are dropped.
        """
        if not isinstance(raw.get("preset"), str) or raw["preset"] not in PRESETS:
            return raw
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        full = {**defaults, **PRESETS[raw["preset"]], **raw, "preset": None}
        for switch, numbers in _NUMBERS_OF.items():
            if full[switch] is None:
                full |= {number: raw.get(number, defaults[number]) for number in numbers}
        return full

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthands(cls, raw: Any) -> Any:
        return cls.expand(dict(raw)) if isinstance(raw, Mapping) else raw

    @model_validator(mode="after")
    def _thresholds_fit(self) -> RolloutCorrectionSection:
        if self.rollout_rs is not None and self.rollout_rs_threshold is None:
            raise ValueError(
                f"rollout_rs {self.rollout_rs} is given without rollout_rs_threshold; give one"
            )

        _ = self.criteria  # which refuses thresholds that do not fit
        return self

    def trained_loss(self, loss_mode: str) -> str:
        """The policy loss that is trained if `actor.policy_loss` has `loss_mode`."""
        return "reinforce" if self.loss_type == "reinforce" else loss_mode

    @property
    def active(self) -> bool:
        """Whether anything is corrected."""
        return self.rollout_is is not None or self.rollout_rs is not None or self.bypass_mode

    @property
    def bounds(self) -> tuple[float | None, float]:
        """(None, upper): larger weights are lowered to it; (lower, upper): others become 0."""
        return _bounds_in(self.rollout_is_threshold)[0]

    @property
    def criteria(self) -> tuple[tuple[Statistic, float | None, float], ...]:
        """The criteria for keeping a token: statistic, lower bound (only of k1), upper bound."""
        if self.rollout_rs is None:
            return ()

        names = cast(list[Statistic], self.rollout_rs.split(","))
        thresholds = _bounds_in(self.rollout_rs_threshold)
        if len(thresholds) not in (1, len(names)):
            raise ValueError(
                f"rollout_rs_threshold {self.rollout_rs_threshold} holds {len(thresholds)} "
                f"thresholds for the {len(names)} statistics of rollout_rs; give one for all, or "
                "one each"
            )
        every = thresholds if len(thresholds) > 1 else thresholds * len(names)
        return tuple(
            (name, *_bounds_of(name, *bounds)) for name, bounds in zip(names, every, strict=True)
        )


def _bounds_of(name: str, lower: float | None, upper: float) -> tuple[float | None, float]:
    """The bounds of statistic `name`: k1 has two, the others only an upper one."""
    if not name.endswith("_k1"):
        if lower is not None:
            raise ValueError(
                f"rollout_rs_threshold {lower}_{upper} of {name} has a lower bound; give {upper} "
                "alone"
            )
        return None, upper

    if lower is not None:
        if not lower <= 1 <= upper:
            raise ValueError(
                f"rollout_rs_threshold {lower}_{upper} of {name} {NOT_EVEN_ONE}; give lower_upper "
                "with lower <= 1 <= upper"
            )
        return lower, upper

    if upper <= 1:
        raise ValueError(
            f"rollout_rs_threshold {upper} of {name} stands for {1 / upper:g}_{upper}, which holds "
            "nothing; give a number above 1, or lower_upper"
        )
    return 1 / upper, upper
