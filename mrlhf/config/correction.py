"""The section `algorithm.rollout_correction`: importance weights and rejection against the policy
of the engine.

It reads the texts of thresholds and fills in presets. It knows no tensor; how a weight or a
statistic is computed is said in `mrlhf.rl.correction`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field, model_validator

from mrlhf.config.fields import Section
from mrlhf.rl.names import BypassLoss, Statistic, WeightLevel

CorrectionPreset = Literal[
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "geo_rs_seq_tis",
    "geo_rs_token_tis",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
    "disabled",
]

_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQUENCE_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SUM_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
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
        "disabled": {},
    }
)


NO_CORRECTION: Mapping[str, object] = MappingProxyType(
    {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
    }
)
NOT_EVEN_ONE = "does not even hold the ratio 1, at which engine and trainer agree"


def _numbers(text: str) -> tuple[float | None, float]:
    """(None, number) of "number", (lower, upper) of "lower_upper".

    Raises:
        ValueError: neither, or not 0 < lower < upper.
    """
    *first, last = text.split("_", maxsplit=1)
    if "_" in last:  # Python would read 2_000 as a number
        raise ValueError
    bounds = (float(first[0]) if first else None, float(last))
    if not all(math.isfinite(bound) and bound > 0 for bound in bounds if bound is not None):
        raise ValueError
    if bounds[0] is not None and bounds[0] >= bounds[1]:
        raise ValueError
    return bounds


def _as_texts(value: object) -> list[str]:
    """The parts of a threshold, each as text; none where it is no threshold at all."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return []
    return str(value).split(",")


def _readable(value: object, parts: list[str], allowed: str) -> object:
    """`value` with a text that is one number as that number.

    Raises:
        ValueError: a part is no threshold; says what is allowed.
    """
    try:
        bounds = [_numbers(part) for part in parts]
    except ValueError:
        bounds = []
    if not bounds:
        raise ValueError(f"should be {allowed}")
    return bounds[0][1] if len(bounds) == 1 and bounds[0][0] is None else value


def _weight_threshold(value: object) -> object:
    parts = _as_texts(value)
    allowed = "a number of at least 1, or lower_upper with 0 < lower <= 1 <= upper, such as 0.5_5.0"
    read = _readable(value, parts if len(parts) == 1 else [], allowed)
    lower, upper = _numbers(parts[0])
    if upper < 1 or (lower is not None and lower > 1):
        raise ValueError(f"{NOT_EVEN_ONE}; should be {allowed}")
    return read


def _known_preset(value: object) -> object:
    """`value`, if it is a preset or none; else names the nearest one before all."""
    if value is None or value in get_args(CorrectionPreset):
        return value
    near = difflib.get_close_matches(str(value), get_args(CorrectionPreset), n=1)
    hint = f"did you mean '{near[0]}'? It should be" if near else "should be"
    raise ValueError(f"{hint} one of {', '.join(get_args(CorrectionPreset))}")


def _rejection_threshold(value: object) -> object:
    if value is None:
        return None
    allowed = "a number above 0, or lower_upper with 0 < lower < upper, such as 0.5_2.0, or several of these joined by commas"
    return _readable(value, _as_texts(value), allowed)


def _statistics(value: object) -> object:
    """Comma-joined names without spaces and repetitions."""
    if isinstance(value, list):
        joined = ",".join(str(name) for name in value)
        raise ValueError(f"should be one text, not a list; join the names by commas: '{joined}'")
    if not isinstance(value, str):
        return value
    names = list(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in get_args(Statistic):
            near = difflib.get_close_matches(name, get_args(Statistic), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"should be a comma-joined list of {', '.join(get_args(Statistic))}{hint}"
            )
    return ",".join(names)


class RolloutCorrectionSection(Section):
    """What is done about the engine's policy not being the trainer's; its metrics are reported in
    any case.
    """

    preset: Annotated[CorrectionPreset | None, BeforeValidator(_known_preset)] = Field(
        None,
        description="a named setting of all the keys below; those beside it win, those of earlier files do not; "
        "once read it is null and the keys hold its values",
    )
    rollout_is: WeightLevel | None = Field(
        None,
        description="importance weight of each token, or of each response on all its tokens; null: none",
    )
    rollout_is_threshold: Annotated[float | str, BeforeValidator(_weight_threshold)] = Field(
        2.0,
        description="weights are cut off at this number; lower_upper: those outside become 0 (IcePop)",
    )
    rollout_is_batch_normalize: bool = Field(False, description="divide the weights by their mean")
    rollout_rs: Annotated[str | None, BeforeValidator(_statistics)] = Field(
        None,
        description="what is rejected: comma-joined {token, seq_sum, seq_mean}_{k1, k2, k3}, seq_max_{k2, k3}; "
        "null: nothing",
    )
    rollout_rs_threshold: Annotated[float | str | None, BeforeValidator(_rejection_threshold)] = (
        Field(
            None,
            description="one for all of rollout_rs, or one each; k1: lower_upper, or upper alone (lower = 1/upper); "
            "k2, k3: upper",
        )
    )
    bypass_mode: bool = Field(
        False, description="take the engine's log-probs for the old ones; saves a forward pass"
    )
    loss_type: BypassLoss = Field(
        "ppo_clip", description="bypass_mode: clip the ratio, or REINFORCE with the weights"
    )

    @classmethod
    def spelt_out(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """`raw` with its preset's keys in place of the preset; without rejection there is no
        threshold of it either.
        """
        full = dict(raw)
        if isinstance(raw.get("preset"), str) and raw["preset"] in PRESETS:
            full = {**NO_CORRECTION, **PRESETS[raw["preset"]], **raw, "preset": None}
        if "rollout_rs" in raw and raw["rollout_rs"] is None and "rollout_rs_threshold" not in raw:
            full["rollout_rs_threshold"] = None
        return full

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, raw: Any) -> Any:
        return cls.spelt_out(dict(raw)) if isinstance(raw, Mapping) else raw

    @model_validator(mode="after")
    def _thresholds_fit(self) -> RolloutCorrectionSection:
        if self.rollout_rs is None and self.rollout_rs_threshold is not None:
            raise ValueError(
                f"rollout_rs_threshold {self.rollout_rs_threshold} is given without rollout_rs; "
                "name the statistic in rollout_rs or set rollout_rs_threshold to null"
            )
        if self.rollout_rs is not None and self.rollout_rs_threshold is None:
            raise ValueError(
                f"rollout_rs {self.rollout_rs} is given without rollout_rs_threshold; give one"
            )
        self._read_criteria()
        return self

    @property
    def active(self) -> bool:
        """Whether anything is corrected."""
        return self.rollout_is is not None or self.rollout_rs is not None or self.bypass_mode

    @property
    def bounds(self) -> tuple[float | None, float]:
        """Of the weights: (None, where they are cut off), or (lower, upper) outside which they
        become 0.
        """
        return _numbers(str(self.rollout_is_threshold))

    @property
    def criteria(self) -> tuple[tuple[Statistic, float | None, float], ...]:
        """What is rejected: statistic, lower bound (k1 alone has one), upper bound."""
        return self._read_criteria()

    def _read_criteria(self) -> tuple[tuple[Statistic, float | None, float], ...]:
        if self.rollout_rs is None:
            return ()
        names = cast(list[Statistic], self.rollout_rs.split(","))
        thresholds = _as_texts(self.rollout_rs_threshold)
        if len(thresholds) not in (1, len(names)):
            raise ValueError(
                f"rollout_rs_threshold {self.rollout_rs_threshold} holds {len(thresholds)} thresholds for the "
                f"{len(names)} statistics of rollout_rs; give one for all, or one each"
            )
        texts = thresholds * len(names) if len(thresholds) == 1 else thresholds
        return tuple(
            (name, *_range(name, *_numbers(text))) for name, text in zip(names, texts, strict=True)
        )


def _range(name: str, lower: float | None, upper: float) -> tuple[float | None, float]:
    """The bounds of statistic `name`: of k1 always two, of the others the upper one.

    Raises:
        ValueError: a lower bound that the statistic has not, or bounds that the ratio 1 is outside
            of.
    """
    if not name.endswith("_k1"):
        if lower is not None:
            raise ValueError(
                f"rollout_rs_threshold {lower}_{upper} of {name} has a lower bound; give {upper} alone"
            )
        return None, upper
    if lower is not None:
        if not lower <= 1 <= upper:
            raise ValueError(
                f"rollout_rs_threshold {lower}_{upper} of {name} {NOT_EVEN_ONE}; give lower_upper with lower <= 1 <= "
                "upper"
            )
        return lower, upper
    if upper <= 1:
        raise ValueError(
            f"rollout_rs_threshold {upper} of {name} stands for {1 / upper:g}_{upper}, which holds nothing; "
            "give a number above 1, or lower_upper"
        )
    return 1 / upper, upper
