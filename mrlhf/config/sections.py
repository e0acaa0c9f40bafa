"""The sections for models, field by field, with the unit of each number.

A section checks its own fields. It does not know other sections, models, ranks or files: `roots`
fills in the values that one section takes from another, and `preflight` compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from mrlhf.config.fields import (
    Count,
    CountOrZero,
    Decay,
    Fraction,
    FunctionReference,
    NotNegative,
    Number,
    PathText,
    Positive,
    Ranks,
    Rows,
    Section,
    Texts,
    Tokens,
    UpToOne,
    known_or_own,
    on_or_off,
    one_or_many,
)
from mrlhf.config.reads import LOSS_MODE, KeyPlace, NotRead, ReadIf, by_loss, read_if
from mrlhf.rl.names import (
    KlKind,
    LossAggMode,
    LossMode,
    RouterReplay,
    policy_loss_traits,
)

Dtype = Literal["auto", "float32", "bfloat16"]
Recompute = Literal["none", "full", "core_attn", "mlp"]
Offload = Annotated[Sequence[Literal["params", "grads", "optimizer"]], BeforeValidator(one_or_many)]
OffloadFrozen = Annotated[Sequence[Literal["params"]], BeforeValidator(one_or_many)]
LrDecayStyle = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "muon"]
NORMALISED = "seq-mean-token-sum-norm"

_IF_IT_DECAYS = read_if(
    "lr_decay_style", lambda style: style != "constant", "is constant", "use linear or cosine"
)
_BY_CLIPPING_LOSS = by_loss(
    "vanilla", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl"
)


def _beside_bounds(place: KeyPlace) -> NotRead | None:
    """The clip distance for both sides, although each side has its own."""
    deciders = ("actor.clip_ratio_low", "actor.clip_ratio_high")
    low, high = map(place.value, deciders)
    if low is None or high is None:
        return None
    why = f" beside {deciders[0]} {low} and {deciders[1]} {high}"
    return NotRead(why, "set one of these to null", deciders)


def _not_normalised(place: KeyPlace) -> NotRead | None:
    """The divisor of a loss under an aggregation that does not read it."""
    mode = place.value("agg_mode")
    if mode == NORMALISED:
        return None
    decider = place.name("loss_agg_mode")
    deciders = (decider, LOSS_MODE) if place.value(decider) is None else (decider,)
    return NotRead(f" with {decider} {mode}", f"use {NORMALISED}", deciders)


def _without_adapter(place: KeyPlace) -> NotRead | None:
    """A setting of adapters where there are none."""
    if place.value("path") is not None or place.value("rank"):
        return None
    decider = place.name("rank")
    return NotRead(f", since {decider} is 0", "set a rank", (decider,))


def _one_response(place: KeyPlace) -> NotRead | None:
    """The sharing of prompts where each has one response, of one context."""
    config = place.config
    if not hasattr(config, "rollout") or config.rollout.n > 1 or config.rollout.has_turns:
        return None
    return NotRead(", since rollout.n is 1", "raise that", ("rollout.n",))


_IF_ADAMW = read_if("name", lambda name: name == "adamw", "is muon", "use adamw")
_IF_MUON = read_if("name", lambda name: name == "muon", "is adamw", "use muon")
_UNLESS_BOTH_BOUNDS = ReadIf(_beside_bounds)
IF_NORMALISED = ReadIf(_not_normalised)
Divisor = Annotated[float, Field(ge=1e-6, le=2**24)]


class OptimSection(Section):
    """The optimizer and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """muon: Muon for the matrices of hidden layers, each orthogonalised whole, and AdamW for
    embeddings, output layers, routers and vectors, with the same lr and weight_decay, vectors
    without decay; it does not split its states over the ranks that hold the same weights"""
    lr: UpToOne = 1e-5
    """peak learning rate; 0: nothing is learned"""
    min_lr_ratio: Annotated[Fraction, _IF_IT_DECAYS] = 0.0
    """learning rate after the decay, as a fraction of lr"""
    lr_warmup_steps: CountOrZero = 0
    """training steps over which the learning rate rises linearly from 0"""
    lr_decay_style: LrDecayStyle = "constant"
    """how the learning rate changes after the warm-up"""
    lr_decay_steps: Annotated[Count | None, _IF_IT_DECAYS] = None
    """training steps after which min_lr_ratio is reached; null: the whole run"""
    weight_decay: UpToOne = 0.01
    """decoupled weight decay"""
    adam_beta1: Decay = 0.9
    """decay of the mean of the gradients"""
    adam_beta2: Decay = 0.999
    """decay of the mean of the squared gradients"""
    adam_eps: Annotated[float, Field(ge=1e-15, le=1)] = 1e-8
    """added to the denominator of Adam's update"""
    muon_momentum: Annotated[Decay, _IF_MUON] = 0.95
    """muon: decay of the mean of a matrix's gradients"""
    clip_grad: NotNegative = 1.0
    """the global gradient norm is clipped to this; 0: no clipping"""
    skip_grad_norm: Positive | None = None
    """an optimizer step with a larger gradient norm is skipped; null: only a step whose norm is not
    finite"""
    max_skipped_steps: Count = 10
    """after so many skipped optimizer steps in a row the run ends"""
    use_distributed_optimizer: bool = True
    """split the optimizer states of adamw over the ranks that hold the same weights"""
    overlap_grad_reduce: bool | None = None
    """sum gradients over the ranks that hold the same weights while the backward pass goes on, not
    after it; null: on a GPU alone"""
    overlap_param_gather: Annotated[
        bool | None, read_if("use_distributed_optimizer"), _IF_ADAMW
    ] = None
    """gather the updated weights while the next micro-batch is computed, each layer when it needs
    its own, not right after the step; null: on a GPU alone"""
    stream: Annotated[Literal["host", "disk"] | None, _IF_ADAMW] = None
    """where moments and float32 weights are between optimizer steps, in which they pass through the
    device in parts; disk: in files without names in TMPDIR; null: on the device, see offload"""

    @property
    def splits_states(self) -> bool:
        """Whether ranks that hold the same weights share out the states, if there are such."""
        return self.use_distributed_optimizer and self.name == "adamw"

    @model_validator(mode="after")
    def _warmup_ends_before_decay(self) -> OptimSection:
        if self.lr_decay_style == "constant" or self.lr_decay_steps is None:
            return self
        if self.lr_warmup_steps >= self.lr_decay_steps:
            raise ValueError(
                f"lr_warmup_steps {self.lr_warmup_steps} is not below lr_decay_steps "
                f"{self.lr_decay_steps}; lower the first or raise the second"
            )
        return self


class ActorOptimSection(OptimSection):
    """The actor's optimizer."""

    lr: UpToOne = 1e-6
    """peak learning rate; 0: nothing is learned"""


class RoleSection(Section):
    """A model and its layout over the ranks; data parallelism takes what tp x cp x pp leaves."""

    path: PathText
    """Hugging Face directory, or org/name of the Hub: config.json and safetensors; with init:
    random, config.json alone"""
    tp: Ranks = 1
    """tensor-parallel size, ranks; divides the model's attention heads, and divides its KV heads or
    is a multiple of them"""
    cp: Ranks = 1
    """context-parallel size, ranks that share each sequence; for sequences too long for one rank's
    memory"""
    pp: Ranks = 1
    """pipeline-parallel size, ranks"""
    ep: Ranks = 1
    """expert-parallel size, ranks that share out the experts of a layer; divides their number. They
    may be ranks of tp, cp and data parallelism"""
    etp: Ranks | None = None
    """tensor-parallel size of an expert, ranks; divides tp; null: tp if ep is 1, else 1"""
    vpp: Count = 1
    """virtual stages of each pipeline rank, whose schedule is then interleaved; above 1 it needs pp
    > 1"""
    pp_layers: Annotated[list[CountOrZero], Field(min_length=1)] | None = None
    """layers of each virtual stage in the order of the model, pp x vpp numbers; null: equal
    numbers, or one less in the first and the last stage if only that divides"""
    sequence_parallel: bool = False
    """split norms and residuals along the sequence; needs tp > 1"""
    dtype: Dtype = "auto"
    """number format of parameters and activations; auto: bfloat16 on cuda, float32 on cpu"""
    recompute: Recompute = "none"
    """activations that are computed again in the backward pass instead of kept"""
    micro_batch_tokens: Count = 16384
    """most tokens in one packed micro-batch; of its tokens each of cp context-parallel ranks holds
    an equal part"""
    share_prompts: Annotated[bool, ReadIf(_one_response)] = False
    """compute a prompt once for all of its responses in a micro-batch, in every pass"""
    transformer_engine: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = "auto"
    """on: TransformerEngine's layers and Adam, of which one layer is first compared with ours;
    auto: off in this version, since no GPU has run them yet"""
    offload: Offload = Field(default_factory=list)
    """what waits on the host while no phase needs it (optimizer: moments and float32 weights)"""

    def directories(self) -> dict[str, str]:
        """The directories from which the model is read, by their keys: its own, an adapter's."""
        adapter = self.lora.path if isinstance(self, AdaptedSection) else None
        return {"path": self.path} | ({} if adapter is None else {"lora.path": adapter})


class OwnPromptSection(Section):
    """What a model reads before the policy's response."""

    template: Annotated[str, Field(min_length=1)] | None = None
    """jinja2 template of what this model reads in the place of the prompt's last message, or of a
    prompt that is no message: {{ prompt }} in it, and {{ ground_truth }}, {{ data_source }},
    {{ extra_info }}; null: the policy's prompt"""
    max_prompt_length: Annotated[
        Tokens | None, read_if("template", bool, "is null", "set that")
    ] = None
    """most tokens of its own prompt; null: data.max_prompt_length"""

    refused: ClassVar[Rows] = {
        "{template} writes prompts of a single turn, and episodes have several; leave it out, or "
        "rollout.environment and rollout.tools": lambda self, rollout: (
            self.template is not None and rollout.has_turns
        ),
    }


ALL_LINEAR = "all-linear"
_IF_NEW = read_if("path", lambda path: path is None, "is set", "leave that out")
_IF_THERE_IS_ONE = ReadIf(_without_adapter)


class LoraSection(Section):
    """Low-rank adapters: two small matrices beside each linear layer are trained, not the layer."""

    rank: Annotated[CountOrZero, _IF_NEW] = 0
    """rank of the adapters; 0: none, all weights are trained"""
    path: PathText | None = None
    """directory of an adapter that peft has written, or org/name, to start from; null: new
    adapters"""
    alpha: Annotated[Positive, _IF_NEW, _IF_THERE_IS_ONE] = 32.0
    """an adapter adds alpha / rank times the product of its matrices"""
    use_rslora: Annotated[bool, _IF_NEW, _IF_THERE_IS_ONE] = False
    """divide alpha by the root of the rank instead, so that the learning rate need not depend on
    it"""
    target_modules: Annotated[Texts, Field(min_length=1), _IF_NEW, _IF_THERE_IS_ONE] = Field(
        default_factory=lambda: [ALL_LINEAR]
    )
    """names of linear layers, as peft has them, such as q_proj; all-linear: those of attention and
    MLPs, of every expert too"""
    exclude_modules: Annotated[Texts, _IF_NEW, _IF_THERE_IS_ONE] = Field(default_factory=list)
    """of these, the layers without adapters"""

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0 or self.path is not None


class StoredAdapterSection(Section):
    """The keys of peft's `adapter_config.json` that plain LoRA depends on, checked as ours are."""

    base_model_name_or_path: str = ""
    r: Count
    lora_alpha: Positive
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, Count] = Field(default_factory=dict)
    alpha_pattern: dict[str, Positive] = Field(default_factory=dict)
    target_modules: str | list[str] = ""
    exclude_modules: str | list[str] = ""
    modules_to_save: list[str] = Field(default_factory=list)


MUON_OF_ADAPTERS = {
    "{section}.optim.name muon is for whole matrices, and {section}.lora trains adapters; set "
    "{section}.optim.name to adamw, or leave out {section}.lora": lambda self: (
        self.lora.is_on and self.optim.name == "muon"
    )
}


class AdaptedSection(Section):
    """How much of a model is trained."""

    lora: LoraSection
    """low-rank adapters"""
    freeze: Texts = Field(default_factory=list)
    """tensors that do not train, as patterns of a shell over whole names as Hugging Face has them,
    such as "*.self_attn.*" (in YAML with quotes) or model.embed_tokens.weight; a layer with a
    frozen matrix has no adapter
    """


class RouterSection(Section):
    """The terms of the loss that act on the routers of a mixture of experts."""

    router_balance_coef: NotNegative = 0.0
    """mixture of experts: weight of the load-balancing loss of each layer, a mean over sequences
    that is 1 where all experts get equally much; 0: none"""
    router_z_coef: NotNegative = 0.0
    """mixture of experts: weight of the mean square of the log-sum-exp of each layer's router
    logits; 0: none"""


class PolicyLossSection(Section):
    """The loss that trains the policy; a key that it does not read is refused."""

    loss_mode: Annotated[LossMode | FunctionReference, known_or_own(get_args(LossMode))] = "vanilla"
    """name of the policy loss; vanilla: PPO's clipped ratio with dual clip;
    path/to/file.py:function: your own"""
    clip_cov_ratio: Annotated[Fraction, by_loss("clip_cov", own=False)] = 0.0002
    """clip_cov: fraction of the tokens that get no gradient"""
    clip_cov_lb: Annotated[Number, by_loss("clip_cov", own=False)] = 1.0
    """clip_cov: lower bound of the covariance of these tokens"""
    clip_cov_ub: Annotated[Number, by_loss("clip_cov", own=False)] = 5.0
    """clip_cov: upper bound of the covariance of these tokens"""
    kl_cov_ratio: Annotated[Fraction, by_loss("kl_cov", own=False)] = 0.0002
    """kl_cov: fraction of the tokens that get a KL penalty"""
    ppo_kl_coef: Annotated[NotNegative, by_loss("kl_cov")] = 0.1
    """kl_cov: weight of that KL penalty"""

    @model_validator(mode="after")
    def _covariance_bounds_are_in_order(self) -> PolicyLossSection:
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb {self.clip_cov_lb} is not below clip_cov_ub {self.clip_cov_ub}; "
                "lower the first or raise the second"
            )
        return self


class ActorSection(AdaptedSection, RouterSection, RoleSection):
    """The policy that is trained."""

    optim: ActorOptimSection
    """optimizer"""
    ppo_mini_batch_size: Count = 256
    """prompts in one optimizer step (x rollout.n = samples)"""
    ppo_epochs: Count = 1
    """passes over the batch in each training step"""
    clip_ratio: Annotated[Positive, _BY_CLIPPING_LOSS, _UNLESS_BOTH_BOUNDS] = 0.2
    """clip distance: the probability ratio is clipped to 1 -/+ this; geo_mean: the log-ratio to -/+
    this; dppo_tv, dppo_kl: a token gets no gradient once its probability has moved by more"""
    clip_ratio_low: Annotated[Positive | None, _BY_CLIPPING_LOSS] = None
    """lower clip distance; null: as clip_ratio"""
    clip_ratio_high: Annotated[Positive | None, _BY_CLIPPING_LOSS] = None
    """upper clip distance; null: as clip_ratio"""
    clip_ratio_c: Annotated[
        float, Field(gt=1, le=1e9), by_loss("vanilla", "dppo_tv", "dppo_kl")
    ] = 3.0
    """vanilla: dual clip, the largest ratio that counts where the advantage is negative; dppo_tv,
    dppo_kl: the largest ratio that counts anywhere"""
    policy_loss: PolicyLossSection
    """the loss that trains the policy"""
    tau_pos: Annotated[Positive, by_loss("sapo")] = 1.0
    """sapo: temperature of the gate where the advantage is positive"""
    tau_neg: Annotated[Positive, by_loss("sapo")] = 1.05
    """sapo: temperature of the gate where the advantage is not positive"""
    positive_lm_coef: NotNegative = 0.0
    """VAPO: weight of the negative log-likelihood of the right responses"""
    target_kl_stop: Positive | None = None
    """the update ends before an optimizer step whose mini-batch has a larger actor/ppo_kl; null: it
    never ends early"""
    entropy_coeff: Number = 0.0
    """weight of the entropy bonus"""
    use_kl_loss: bool = False
    """add kl_loss_coef x KL(current, reference) to the loss"""
    kl_loss_coef: Annotated[NotNegative, read_if("use_kl_loss")] = 0.001
    """weight of the KL in the loss"""
    kl_loss_type: Annotated[KlKind, read_if("use_kl_loss")] = "low_var_kl"
    """estimator of the KL in the loss"""
    loss_agg_mode: LossAggMode | None = None
    """how the losses of the tokens become one number; null: seq-mean-token-mean for gspo, sapo and
    geo_mean, else token-mean"""
    loss_scale_factor: Annotated[Divisor | None, IF_NORMALISED] = None
    """divisor of seq-mean-token-sum-norm, tokens; null: data.max_response_length"""
    router_replay: RouterReplay = "none"
    """mixture of experts: the experts to which the passes over the policy send tokens; none: those
    that its routers choose; rollout: those of the inference engine; old: in the update, those of
    the pass that gave the old log-probabilities"""

    refused: ClassVar[Rows] = {
        **MUON_OF_ADAPTERS,
        "actor.router_replay rollout needs the experts that the engine chose, which "
        "{rollout.engine} does not record; set rollout.engine to native, or "
        "actor.router_replay to old or none": lambda self, rollout: (
            self.router_replay == "rollout" and not rollout.records
        ),
        "actor.router_replay old needs the forward pass that "
        "algorithm.rollout_correction.bypass_mode saves; turn bypass_mode off or set "
        "actor.router_replay to rollout": lambda self, algorithm: (
            self.router_replay == "old" and algorithm.rollout_correction.bypass_mode
        ),
    }

    @property
    def agg_mode(self) -> LossAggMode:
        """How the losses of the tokens become one number; if not set, as the loss defines it."""
        if self.loss_agg_mode is not None:
            return self.loss_agg_mode
        if policy_loss_traits(self.policy_loss.loss_mode).sequence_level:
            return "seq-mean-token-mean"
        return "token-mean"

    @property
    def clip_low(self) -> float:
        """Distance of the lower clip bound from 1."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Distance of the upper clip bound from 1."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class TrainedModelSection(AdaptedSection, RouterSection, RoleSection):
    """The model that is trained."""

    init: Literal["checkpoint", "random"] = "checkpoint"
    """checkpoint: read the safetensors of path; random: draw new weights"""

    refused: ClassVar[Rows] = {
        "model.lora trains adapters of the model in model.path, and model.init is random; set "
        "model.init to checkpoint, or model.lora.rank to 0": lambda self: (
            self.lora.is_on and self.init == "random"
        ),
        "model.freeze keeps weights of model.path, and model.init is random; set model.init to "
        "checkpoint, or leave out model.freeze": lambda self: (
            bool(self.freeze) and self.init == "random"
        ),
        "optim.name muon is for whole matrices, and model.lora trains adapters; set optim.name to "
        "adamw, or leave out model.lora": lambda self, optim: (
            self.lora.is_on and optim.name == "muon"
        ),
    }


def _without_start(place: KeyPlace) -> NotRead | None:
    """The choice between adapters of the reference where the policy starts from none."""
    policy = "actor" if hasattr(place.config, "actor") else "model"
    decider = f"{policy}.lora.path"
    if place.value(decider) is not None:
        return None
    return NotRead(f", since {decider} is null", "set that", (decider,))


def _as_policy(place: KeyPlace) -> NotRead | None:
    """Why `offload` of a reference that is the policy itself, or of DPO, has no effect."""
    if not hasattr(place.config, "actor"):
        why = ", since the reference has left before the model is built"
        return NotRead(why, "set model.offload", ())
    if not place.config.reference_is_policy:
        return None
    why = ", since the reference is the actor without its adapters"
    return NotRead(why, "set actor.offload", ("actor.lora.rank",))


class ReferenceSection(RoleSection):
    """The frozen policy that the KL is measured from; built only if a KL is in use.

    If the policy is trained by adapters and no key of this section differs from the policy's, it is
    the policy without its adapters, and no model is built.
    """

    adapter: Annotated[Literal["base", "start"], ReadIf(_without_start)] = "base"
    """of a policy that starts from lora.path; base: the reference has no adapter; start: it has
    that one"""
    offload: Annotated[OffloadFrozen, ReadIf(_as_policy)] = Field(default_factory=list)
    """what waits on the host while no phase needs it"""

    refused: ClassVar[Rows] = {
        "{adapter} is for a reference that is the policy, and a key of reference "
        "differs from the policy's; leave its other keys out": lambda self, reference_is_policy: (
            self.adapter == "start" and not reference_is_policy
        ),
    }
