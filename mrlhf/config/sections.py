"""The sections of the configuration files, documented field by field: what may be asked for, in which unit.

A section checks its own fields and the numbers it holds alone. It knows no other section (`roots` fills in what one
takes from another, `checks` compares them), no model, no rank and no file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

# Names of algorithms repeat those of mrlhf.rl and mrlhf.rewards, whose import would bring torch; a test compares them.
Dtype = Literal["auto", "float32", "bfloat16"]
Recompute = Literal["none", "full", "core_attn", "mlp"]
LrDecayStyle = Literal["constant", "linear", "cosine"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
KlPenalty = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1_clamped", "full"]
KlLoss = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1_clamped", "full", "k1+", "k3+"]
KlPlacement = Literal["token", "terminal"]
KlControl = Literal["fixed", "adaptive"]
AdvEstimator = Literal["gae"]
Overlong = Literal["error", "drop"]
RewardName = Literal["exact_match", "gsm8k", "gsm8k_flexible", "format", "reward_model"]

UTILIZATION = 0.9  # default of rollout.gpu_memory_utilization

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


def _one_or_many(value: object) -> object:
    """A single text stands for a list of one."""
    return [value] if isinstance(value, str) else value


Files = Annotated[list[str], BeforeValidator(_one_or_many)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_one_or_many)]


class Section(BaseModel):
    """A frozen group of keys; unknown keys, inexact types, inf and nan are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def subsections(cls) -> dict[str, type[Section]]:
        """The fields that are sections and always there, with their classes."""
        types = ((name, field.annotation) for name, field in cls.model_fields.items())
        return {name: kind for name, kind in types if isinstance(kind, type) and issubclass(kind, Section)}

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, raw: Any) -> Any:
        """A section that is left out or has nothing under it is empty, so that its own missing keys are named."""
        if not isinstance(raw, Mapping):
            return raw
        empty: dict[str, dict[str, Any]] = {name: {} for name in cls.subsections() if raw.get(name) is None}
        return {**raw, **empty}


class OptimSection(Section):
    """AdamW and its learning-rate schedule."""

    lr: NotNegative = Field(1e-5, description="peak learning rate")
    min_lr_ratio: Fraction = Field(0.0, description="learning rate after the decay, as a fraction of lr")
    lr_warmup_steps: CountOrZero = Field(0, description="scheduler steps of linear warm-up from 0")
    lr_decay_style: LrDecayStyle = Field("constant", description="shape of the schedule after the warm-up")
    lr_decay_steps: Count | None = Field(None, description="scheduler steps until min_lr_ratio; null: the whole run")
    weight_decay: NotNegative = Field(0.01, description="decoupled weight decay")
    adam_beta1: Fraction = Field(0.9, description="decay of the first moment")
    adam_beta2: Fraction = Field(0.999, description="decay of the second moment")
    adam_eps: Positive = Field(1e-8, description="added to the denominator of the update")
    clip_grad: NotNegative = Field(1.0, description="largest global gradient norm; 0: no clipping")
    use_distributed_optimizer: bool = Field(True, description="split optimizer states over data-parallel ranks")

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

    path: str = Field(description="Hugging Face directory: config.json, with or without safetensors")
    tp: Count = Field(1, description="tensor-parallel size, ranks")
    pp: Count = Field(1, description="pipeline-parallel size, ranks")
    sequence_parallel: bool = Field(False, description="split norms and residuals along the sequence; needs tp > 1")
    dtype: Dtype = Field("auto", description="of parameters and activations; auto: bfloat16 on cuda, float32 on cpu")
    recompute: Recompute = Field("none", description="activations computed again in backward instead of kept")
    micro_batch_tokens: Count = Field(16384, description="token budget of one packed micro-batch on a rank")


class ActorSection(RoleSection):
    """The policy that is trained."""

    optim: ActorOptimSection = Field(description="optimizer")
    ppo_mini_batch_size: Count = Field(256, description="prompts an optimizer step (x rollout.n = samples)")
    ppo_epochs: Count = Field(1, description="passes over the batch in each training step")
    clip_ratio: Positive = Field(0.2, description="PPO clips the probability ratio to 1 -/+ this")
    clip_ratio_low: Positive | None = Field(None, description="lower clip distance; null: clip_ratio")
    clip_ratio_high: Positive | None = Field(None, description="upper clip distance; null: clip_ratio")
    clip_ratio_c: Annotated[float, Field(gt=1)] = Field(
        3.0, description="dual clip: bound of the ratio where the advantage is negative"
    )
    entropy_coeff: float = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add kl_loss_coef x KL(current, reference) to the loss")
    kl_loss_coef: NotNegative = Field(0.001, description="weight of the KL term of the loss")
    kl_loss_type: KlLoss = Field("low_var_kl", description="estimator of the KL in the loss")
    loss_agg_mode: LossAggMode = Field("token-mean", description="how per-token losses become one number")
    loss_scale_factor: Positive | None = Field(
        None, description="divisor of seq-mean-token-sum-norm, tokens; null: data.max_response_length"
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
    """The value model; starts from the weights of path with a fresh scalar head unless they hold one."""

    optim: OptimSection = Field(description="optimizer")
    ppo_mini_batch_size: Count = Field(256, description="prompts an optimizer step (x rollout.n = samples)")
    ppo_epochs: Count = Field(1, description="passes over the batch in each training step")
    cliprange_value: Positive = Field(
        0.5, description="values may move by this from the old ones before the loss clips"
    )
    loss_agg_mode: LossAggMode = Field("token-mean", description="how per-token losses become one number")
    loss_scale_factor: Positive | None = Field(
        None, description="divisor of seq-mean-token-sum-norm, tokens; null: data.max_response_length"
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
        path, _, function = name.rpartition(":")
        if name in get_args(RewardName) or (path.endswith(".py") and function.isidentifier()):
            return name
        near = difflib.get_close_matches(name, get_args(RewardName), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"should be {', '.join(get_args(RewardName))} or path/to/file.py:function{hint}")


class RewardSection(Section):
    """The score of a response: the weighted sum of its terms."""

    terms: Annotated[list[RewardTermSection], Field(min_length=1)] = Field(description="list of {name, weight}")
    timeout_s: Positive = Field(60.0, description="limit of one call of a user's function, seconds")


class RolloutSection(Section):
    """Generation."""

    engine: Literal["native", "vllm"] = Field("native", description="inference engine; vllm needs the package")
    tp: Count = Field(1, description="ranks that share one engine replica; divides actor.tp x actor.pp")
    n: Count = Field(1, description="samples a prompt")
    temperature: Positive = Field(1.0, description="logits are divided by this, in the engine and in training")
    top_k: int = Field(-1, description="sample from the k likeliest tokens; -1: off")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="sample from this much probability; 1: off")
    max_num_seqs: Count = Field(256, description="sequences decoded at once in one replica")
    max_prefill_tokens: Count = Field(
        8192, description="prompt tokens computed in one step of one replica; longer prompts are computed in chunks"
    )
    stop: Texts = Field(default_factory=list, description="a response ends where its text contains one of these")
    block_size: Count | None = Field(
        None, description="tokens of a block of the KV cache; null: 16 on a CPU, what the kernels need on a GPU"
    )
    kv_cache_mb: Count | None = Field(
        None, description="KV cache of one rank, MiB; null: up to half of the free memory, on cuda the next key's"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        UTILIZATION, description="share of a GPU's memory that is in use, everything counted, with the KV cache"
    )
    enforce_eager: bool = Field(False, description="capture no CUDA graphs")
    verify_reshard: bool = Field(False, description="compare checksums of every moved weight slice")
    reshard_bucket_mb: Count = Field(64, description="all transfer buffers of one rank while weights move, MiB")
    dump_freq: CountOrZero = Field(0, description="write the rollouts as jsonl every so many steps; 0: never")

    @model_validator(mode="after")
    def _top_k_is_off_or_a_count(self) -> RolloutSection:
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is neither -1 (off) nor at least 1")
        return self

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the whole distribution."""
        return self.top_k != -1 or self.top_p < 1.0

    @property
    def cache_block(self) -> int:
        """Tokens of a block of the KV cache, on a CPU where nothing is set."""
        return self.block_size or 16


class PromptDataSection(Section):
    """Prompts with reference answers."""

    train_files: Files = Field(min_length=1, description="jsonl or parquet files (one name, or a list)")
    val_files: Files = Field(default_factory=list, description="the same, for validation; may be empty")
    tokenizer: str = Field(description="directory of the tokenizer")
    train_batch_size: Count = Field(1024, description="prompts a training step (x rollout.n = samples)")
    max_prompt_length: Count = Field(512, description="longest prompt, tokens")
    max_response_length: Count = Field(512, description="longest response, tokens")
    overlong_prompts: Overlong = Field("error", description="what becomes of a longer prompt")
    shuffle: bool = Field(True, description="a new order in every epoch, from seed")
    chat_template: str | None = Field(None, description="jinja file; null: the tokenizer's own")

    @property
    def max_length(self) -> int:
        """Longest prompt and response together, tokens."""
        return self.max_prompt_length + self.max_response_length


class KlCtrlSection(Section):
    """The coefficient of the KL in the reward."""

    type: KlControl = Field("fixed", description="adaptive: steered towards target_kl")
    kl_coef: NotNegative = Field(0.001, description="(initial) coefficient")
    target_kl: Positive = Field(0.1, description="adaptive: wanted mean KL a token, nats")
    horizon: Count = Field(10000, description="adaptive: samples over which the coefficient moves")


class AlgorithmSection(Section):
    """From scores to advantages."""

    adv_estimator: AdvEstimator = Field("gae", description="advantage estimator")
    gamma: Fraction = Field(1.0, description="discount a token")
    lam: Fraction = Field(1.0, description="lambda of generalised advantage estimation")
    use_kl_in_reward: bool = Field(False, description="take coefficient x KL(old, reference) off the reward")
    kl_penalty: KlPenalty = Field("kl", description="estimator of the KL in the reward")
    kl_placement: KlPlacement = Field("token", description="KL off each token's reward, or all off the last")
    kl_ctrl: KlCtrlSection = Field(description="coefficient of the KL in the reward")


class TrainerSection(Section):
    """How long to train, and what to leave behind."""

    total_steps: Count | None = Field(None, description="training steps; null: total_epochs decides")
    total_epochs: Count = Field(1, description="passes over train_files; used where total_steps is null")
    test_freq: CountOrZero = Field(0, description="validate every so many steps; 0: at the start and the end only")
    val_before_train: bool = Field(True, description="validate before the first step")
    output_dir: str = Field(description="directory of metrics, logs and the final Hugging Face checkpoint")
    tensorboard: bool = Field(False, description="write TensorBoard event files too")
    max_shard_size_mb: Count = Field(5000, description="largest safetensors file of the exported model, MB")

    def steps(self, num_rows: int, batch_size: int) -> int:
        """Training steps on `num_rows` rows; an epoch's incomplete last batch is left out."""
        return self.total_epochs * (num_rows // batch_size) if self.total_steps is None else self.total_steps


class PPOTrainerSection(TrainerSection):
    """How long to train, and what to leave behind."""

    critic_warmup: CountOrZero = Field(0, description="the actor is left alone in the steps before this one")
    val_sampled: bool = Field(False, description="validate samples at rollout.temperature besides greedy answers")


class DistributedSection(Section):
    """The processes."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    timeout_s: Positive = Field(600.0, description="longest wait in one collective, seconds")
