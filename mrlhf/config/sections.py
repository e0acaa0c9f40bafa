"""The sections of models, reward, run and processes, field by field: what may be asked for, in
which unit.

A section checks its own fields and the numbers it holds alone. It knows no other section (`roots`
fills in what one takes from another, `checks` compares them), no model, no rank and no file.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from mrlhf.config.fields import Count, CountOrZero, Fraction, NotNegative, Positive, Section
from mrlhf.rl.names import SEQUENCE_LEVEL, KlKind, LossAggMode, LossMode, RewardName
from mrlhf.user_code import check_name

Dtype = Literal["auto", "float32", "bfloat16"]
Recompute = Literal["none", "full", "core_attn", "mlp"]
LrDecayStyle = Literal["constant", "linear", "cosine"]
CLIP_RATIO = 0.2


class OptimSection(Section):
    """AdamW and its learning-rate schedule."""

    lr: NotNegative = Field(1e-5, description="peak learning rate")
    min_lr_ratio: Fraction = Field(
        0.0, description="learning rate after the decay, as a fraction of lr"
    )
    lr_warmup_steps: CountOrZero = Field(0, description="scheduler steps of linear warm-up from 0")
    lr_decay_style: LrDecayStyle = Field(
        "constant", description="shape of the schedule after the warm-up"
    )
    lr_decay_steps: Count | None = Field(
        None, description="scheduler steps until min_lr_ratio; null: the whole run"
    )
    weight_decay: NotNegative = Field(0.01, description="decoupled weight decay")
    adam_beta1: Fraction = Field(0.9, description="decay of the first moment")
    adam_beta2: Fraction = Field(0.999, description="decay of the second moment")
    adam_eps: Positive = Field(1e-8, description="added to the denominator of the update")
    clip_grad: NotNegative = Field(1.0, description="largest global gradient norm; 0: no clipping")
    skip_grad_norm: Positive | None = Field(
        None,
        description="leave out a step with a larger gradient norm; null: only one that is not finite",
    )
    max_skipped_steps: Count = Field(10, description="steps left out in a row that end the run")
    use_distributed_optimizer: bool = Field(
        True, description="split optimizer states over data-parallel ranks"
    )

    @model_validator(mode="after")
    def _warmup_ends_before_decay(self) -> OptimSection:
        if self.lr_decay_steps is not None and self.lr_warmup_steps >= self.lr_decay_steps:
            raise ValueError(
                f"lr_warmup_steps {self.lr_warmup_steps} is not below lr_decay_steps {self.lr_decay_steps}; "
                "lower the first or raise the second"
            )
        return self


class ActorOptimSection(OptimSection):
    """The actor's optimizer."""

    lr: NotNegative = Field(1e-6, description="peak learning rate")


class RoleSection(Section):
    """A model and how it is laid out over the ranks; data parallelism takes what tp x pp leaves."""

    path: str = Field(
        description="Hugging Face directory: config.json, with or without safetensors"
    )
    tp: Count = Field(1, description="tensor-parallel size, ranks")
    pp: Count = Field(1, description="pipeline-parallel size, ranks")
    sequence_parallel: bool = Field(
        False, description="split norms and residuals along the sequence; needs tp > 1"
    )
    dtype: Dtype = Field(
        "auto", description="of parameters and activations; auto: bfloat16 on cuda, float32 on cpu"
    )
    recompute: Recompute = Field(
        "none", description="activations computed again in backward instead of kept"
    )
    micro_batch_tokens: Count = Field(
        16384, description="token budget of one packed micro-batch on a rank"
    )


class PolicyLossSection(Section):
    """Which objective trains the policy; the keys of the others have no effect."""

    loss_mode: LossMode | str = Field(
        "vanilla",
        description="objective; vanilla: PPO's clipped ratio with dual clip; "
        "path/to/file.py:function: your own",
    )
    clip_cov_ratio: Fraction = Field(
        0.0002, description="clip_cov: part of the tokens that get no gradient"
    )
    clip_cov_lb: float = Field(1.0, description="clip_cov: their covariance is above this")
    clip_cov_ub: float = Field(5.0, description="clip_cov: and below this")
    kl_cov_ratio: Fraction = Field(
        0.0002, description="kl_cov: part of the tokens that get a KL penalty"
    )
    ppo_kl_coef: NotNegative = Field(0.1, description="kl_cov: weight of that penalty")

    @field_validator("loss_mode", mode="before")
    @classmethod
    def _is_loss_or_function(cls, name: object) -> str:
        return check_name(name, get_args(LossMode))

    @model_validator(mode="after")
    def _covariance_bounds_are_in_order(self) -> PolicyLossSection:
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb {self.clip_cov_lb} is not below clip_cov_ub {self.clip_cov_ub}; "
                "lower the first or raise the second"
            )
        return self


class ActorSection(RoleSection):
    """The policy that is trained."""

    optim: ActorOptimSection = Field(description="optimizer")
    ppo_mini_batch_size: Count = Field(
        256, description="prompts an optimizer step (x rollout.n = samples)"
    )
    ppo_epochs: Count = Field(1, description="passes over the batch in each training step")
    clip_ratio: Positive = Field(
        CLIP_RATIO,
        description="the probability ratio is clipped to 1 -/+ this; geo_mean: its logarithm to -/+ this; dppo_tv, "
        "dppo_kl: a token has no gradient once its probability has moved by more",
    )
    clip_ratio_low: Positive | None = Field(
        None, description="lower clip distance; null: clip_ratio"
    )
    clip_ratio_high: Positive | None = Field(
        None, description="upper clip distance; null: clip_ratio"
    )
    clip_ratio_c: Annotated[float, Field(gt=1)] = Field(
        3.0,
        description="dual clip: bound of the ratio where the advantage is negative; dppo_tv, dppo_kl: everywhere",
    )
    policy_loss: PolicyLossSection = Field(description="which objective trains the policy")
    tau_pos: Positive = Field(
        1.0, description="sapo: temperature of the gate where the advantage is positive"
    )
    tau_neg: Positive = Field(1.05, description="sapo: temperature of the gate elsewhere")
    positive_lm_coef: NotNegative = Field(
        0.0, description="VAPO: weight of the negative log-likelihood of the right responses"
    )
    target_kl_stop: Positive | None = Field(
        None,
        description="an update ends before the step whose mini-batch has a larger actor/ppo_kl; null: never",
    )
    entropy_coeff: float = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(
        False, description="add kl_loss_coef x KL(current, reference) to the loss"
    )
    kl_loss_coef: NotNegative = Field(0.001, description="weight of the KL term of the loss")
    kl_loss_type: KlKind = Field("low_var_kl", description="estimator of the KL in the loss")
    loss_agg_mode: LossAggMode | None = Field(
        None,
        description="how per-token losses become one number; null: seq-mean-token-mean for gspo, sapo, geo_mean, "
        "else token-mean",
    )
    loss_scale_factor: Positive | None = Field(
        None,
        description="divisor of seq-mean-token-sum-norm, tokens; null: data.max_response_length",
    )

    @property
    def agg_mode(self) -> LossAggMode:
        """How per-token losses become one number: as configured, else as the objective is defined."""
        if self.loss_agg_mode is not None:
            return self.loss_agg_mode
        return (
            "seq-mean-token-mean" if self.policy_loss.loss_mode in SEQUENCE_LEVEL else "token-mean"
        )

    @property
    def clip_low(self) -> float:
        """Distance of the lower clip bound from 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Distance of the upper clip bound from 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class CriticSection(RoleSection):
    """The value model; starts from the weights of path with a fresh scalar head unless they hold
    one.
    """

    optim: OptimSection = Field(description="optimizer")
    ppo_mini_batch_size: Count = Field(
        256, description="prompts an optimizer step (x rollout.n = samples)"
    )
    ppo_epochs: Count = Field(1, description="passes over the batch in each training step")
    cliprange_value: Positive = Field(
        0.5, description="values may move by this from the old ones before the loss clips"
    )
    loss_agg_mode: LossAggMode = Field(
        "token-mean", description="how per-token losses become one number"
    )
    loss_scale_factor: Positive | None = Field(
        None,
        description="divisor of seq-mean-token-sum-norm, tokens; null: data.max_response_length",
    )


class ReferenceSection(RoleSection):
    """The frozen policy that the KL is measured from; built only where a KL is asked for."""


class RewardModelSection(RoleSection):
    """A frozen sequence classifier with one output (score.weight) that scores whole responses."""


class RewardTermSection(Section):
    """One part of the reward."""

    name: str = Field(
        description="exact_match, gsm8k, gsm8k_flexible, format, reward_model, or path/to/file.py:function"
    )
    weight: float = Field(1.0, description="factor of this term in the sum")

    @field_validator("name")
    @classmethod
    def _is_rule_or_function(cls, name: str) -> str:
        return check_name(name, get_args(RewardName))


class RewardSection(Section):
    """The score of a response: the weighted sum of its terms."""

    terms: Annotated[list[RewardTermSection], Field(min_length=1)] = Field(
        description="list of {name, weight}"
    )
    timeout_s: Positive = Field(60.0, description="limit of one call of a user's function, seconds")


class TrainerSection(Section):
    """How long to train, and what to leave behind."""

    total_steps: Count | None = Field(
        None, description="training steps; null: total_epochs decides"
    )
    total_epochs: Count = Field(
        1, description="passes over train_files; used where total_steps is null"
    )
    test_freq: CountOrZero = Field(
        0, description="validate every so many steps; 0: at the start and the end only"
    )
    val_before_train: bool = Field(True, description="validate before the first step")
    output_dir: str = Field(
        description="directory of metrics, logs and the final Hugging Face checkpoint"
    )
    tensorboard: bool = Field(False, description="write TensorBoard event files too")
    max_shard_size_mb: Count = Field(
        5000, description="largest safetensors file of the exported model, MB"
    )

    def steps(self, num_rows: int, batch_size: int) -> int:
        """Training steps on `num_rows` rows; an epoch's incomplete last batch is left out."""
        return (
            self.total_epochs * (num_rows // batch_size)
            if self.total_steps is None
            else self.total_steps
        )


class PPOTrainerSection(TrainerSection):
    """How long to train, and what to leave behind."""

    critic_warmup: CountOrZero = Field(
        0, description="the actor is left alone in the steps before this one"
    )
    val_sampled: bool = Field(
        False, description="validate samples at rollout.temperature besides greedy answers"
    )
    val_n: Count = Field(1, description="samples a prompt in that validation")
    peak_tflops: Positive | None = Field(
        None,
        description="dense peak of one device at the training dtype, TFLOP/s, for perf/mfu; null: that of common "
        "NVIDIA GPUs is known",
    )


class DistributedSection(Section):
    """The processes."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is one"
    )
    timeout_s: Positive = Field(600.0, description="longest wait in one collective, seconds")
