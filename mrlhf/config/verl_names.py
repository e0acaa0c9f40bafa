"""What verl's configuration keys are called here, for the message about an unknown key.

It knows names only. A key that verl and we name alike does not stand here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TypeVar

ValueT = TypeVar("ValueT")

# verl's sections around ours
_SECTIONS = (
    ("actor_rollout_ref.actor", "actor"),
    ("actor_rollout_ref.rollout", "rollout"),
    ("actor_rollout_ref.ref", "reference"),
    ("actor_rollout_ref.model", "actor.model"),
    ("reward.reward_model", "reward_model"),
)
_ROLES = ("actor", "critic", "reference", "reward_model", "model")

# below a role
_BELOW_A_ROLE: Mapping[str, str] = MappingProxyType(
    {
        "model.path": "path",
        "model_path": "path",
        "partial_pretrain": "path",
        "model": "path",
        "ppo_micro_batch_size": "micro_batch_tokens",
        "ppo_micro_batch_size_per_gpu": "micro_batch_tokens",
        "ppo_max_token_len_per_gpu": "micro_batch_tokens",
        "log_prob_micro_batch_size": "micro_batch_tokens",
        "log_prob_micro_batch_size_per_gpu": "micro_batch_tokens",
        "log_prob_max_token_len_per_gpu": "micro_batch_tokens",
        "forward_micro_batch_size": "micro_batch_tokens",
        "forward_micro_batch_size_per_gpu": "micro_batch_tokens",
        "forward_max_token_len_per_gpu": "micro_batch_tokens",
        "tensor_model_parallel_size": "tp",
        "megatron.tensor_model_parallel_size": "tp",
        "ulysses_sequence_parallel_size": "cp",
        "megatron.context_parallel_size": "cp",
        "megatron.pipeline_model_parallel_size": "pp",
        "megatron.expert_model_parallel_size": "ep",
        "megatron.expert_tensor_parallel_size": "etp",
        "megatron.override_transformer_config.moe_aux_loss_coeff": "router_balance_coef",
        "megatron.override_transformer_config.moe_z_loss_coeff": "router_z_coef",
        "router_replay.mode": "router_replay",
        "megatron.virtual_pipeline_model_parallel_size": "vpp",
        "megatron.sequence_parallel": "sequence_parallel",
        "megatron.dtype": "dtype",
        "megatron.use_distributed_optimizer": "optim.use_distributed_optimizer",
        "megatron.override_ddp_config.overlap_grad_reduce": "optim.overlap_grad_reduce",
        "megatron.override_ddp_config.overlap_param_gather": "optim.overlap_param_gather",
        "megatron.override_transformer_config.recompute_granularity": "recompute",
        "megatron.override_transformer_config.recompute_modules": "recompute",
        "model.enable_gradient_checkpointing": "recompute",
        "enable_gradient_checkpointing": "recompute",
        "grad_clip": "optim.clip_grad",
        "optim.betas": "optim.adam_beta1",
        "optim.lr_scheduler_type": "optim.lr_decay_style",
        "optim.warmup_style": "optim.lr_decay_style",
        "optim.lr_warmup_steps_ratio": "optim.lr_warmup_steps",
        "optim.total_training_steps": "optim.lr_decay_steps",
        "optim.min_lr": "optim.min_lr_ratio",
    }
)
# whole keys, or sections; the first of ours that exists is meant
_ELSEWHERE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "actor.model.tokenizer_path": ("data.tokenizer",),
        "actor.model.custom_chat_template": ("data.chat_template",),
        "rollout.name": ("rollout.engine",),
        "rollout.tensor_model_parallel_size": ("rollout.tp",),
        "rollout.expert_parallel_size": ("rollout.ep",),
        "rollout.enable_rollout_routing_replay": ("actor.router_replay",),
        "rollout.max_num_batched_tokens": ("rollout.max_prefill_tokens",),
        "rollout.prompt_length": ("data.max_prompt_length",),
        "rollout.response_length": ("data.max_response_length",),
        "rollout.dtype": ("actor.dtype",),
        "rollout.seed": ("seed",),
        "rollout.log_prob_micro_batch_size": ("actor.micro_batch_tokens",),
        "rollout.log_prob_micro_batch_size_per_gpu": ("actor.micro_batch_tokens",),
        "rollout.log_prob_max_token_len_per_gpu": ("actor.micro_batch_tokens",),
        "rollout.val_kwargs.n": ("trainer.val_n",),
        "rollout.val_kwargs.do_sample": ("trainer.val_sampled",),
        "critic.kl_ctrl": ("algorithm.kl_ctrl",),
        "data.seed": ("seed",),
        "data.filter_overlong_prompts": ("data.overlong_prompts",),
        "data.truncation": ("data.overlong_prompts", "data.overlong"),
        "data.train_batch_size": ("data.batch_size",),
        "data.micro_batch_size": ("model.micro_batch_tokens",),
        "data.micro_batch_size_per_gpu": ("model.micro_batch_tokens",),
        "data.max_token_len_per_gpu": ("model.micro_batch_tokens",),
        "optim.betas": ("optim.adam_beta1",),
        "optim.lr_scheduler": ("optim.lr_decay_style",),
        "optim.lr_scheduler_type": ("optim.lr_decay_style",),
        "optim.lr_warmup_steps_ratio": ("optim.lr_warmup_steps",),
        "optim.warmup_steps_ratio": ("optim.lr_warmup_steps",),
        "custom_reward_function": ("reward.terms",),
        "reward.custom_reward_function": ("reward.terms",),
        "reward.reward_manager": ("reward.terms",),
        "reward_model.reward_manager": ("reward.terms",),
        "trainer.default_local_dir": ("trainer.output_dir",),
        "trainer.device": ("distributed.device",),
        "trainer.esi_redundant_time": ("trainer.save_by_minutes",),
        "trainer.max_actor_ckpt_to_keep": ("trainer.max_to_keep",),
        "trainer.max_critic_ckpt_to_keep": ("trainer.max_to_keep",),
        "trainer.max_ckpt_to_keep": ("trainer.max_to_keep",),
        "trainer.resume_mode": ("trainer.resume",),
        "trainer.resume_from_path": ("trainer.resume",),
        "trainer.rollout_data_dir": ("rollout.dump_freq",),
        "trainer.seed": ("seed",),
        "trainer.total_training_steps": ("trainer.total_steps",),
        "trainer.log_val_generations": ("trainer.log_samples",),
        "trainer.logger": ("trainer.trackers",),
    }
)

# what else changes with the name
_CHANGES: Mapping[str, str] = MappingProxyType(
    {
        "ppo_micro_batch_size": "it counts tokens, not samples",
        "ppo_micro_batch_size_per_gpu": "it counts tokens, not samples",
        "log_prob_micro_batch_size": "it counts tokens, not samples",
        "log_prob_micro_batch_size_per_gpu": "it counts tokens, not samples",
        "forward_micro_batch_size": "it counts tokens, not samples",
        "forward_micro_batch_size_per_gpu": "it counts tokens, not samples",
        "micro_batch_size": "it counts tokens, not samples",
        "micro_batch_size_per_gpu": "it counts tokens, not samples",
        "ppo_max_token_len_per_gpu": "its tokens are shared by all cp ranks: multiply by cp",
        "lr_warmup_steps_ratio": "it counts steps, not a share of the run",
        "warmup_steps_ratio": "it counts steps, not a share of the run",
        "min_lr": "it is a share of lr",
        "recompute_granularity": "none, full, core_attn or mlp",
        "recompute_modules": "none, full, core_attn or mlp",
        "filter_overlong_prompts": "true there is drop here, false is error",
        "truncation": "nothing is truncated; what is too long is an error or dropped",
        "logger": "the console is always on; list the others, such as [wandb]",
        "val_kwargs.do_sample": "validation is greedy too in any case",
    }
)

_RANKS = "the launcher says how many processes run: torchrun --nnodes=... --nproc-per-node=..."
_COLUMNS = "columns have fixed names, which docs/data_and_rewards.md lists"
_MEGATRON = "models run on megatron-core, with tp, cp, pp, vpp, ep and etp alone"
_NO_OFFLOAD = (
    "there is no offload: weights, gradients and moments stay on the device; raise tp or pp if "
    "they do not fit"
)
_WEIGHTS = "Hugging Face weights are read and written without a bridge"
_PACKED = "sequences are always packed into micro-batches of micro_batch_tokens"
_NO_CODE = "code that stands beside a model or a tokenizer is never run"
_NO_LORA = "there is no LoRA"
_NO_TURNS = "a prompt has one response, and there are no tools"
_NO_RAY = "there is no Ray"
_NO_MODALITIES = "models read text alone"
_MISSING: Mapping[str, str] = MappingProxyType(
    {
        "trainer.nnodes": _RANKS,
        "trainer.n_gpus_per_node": _RANKS,
        "trainer.ray_wait_register_center_timeout": _NO_RAY,
        "trainer.balance_batch": "batches are always balanced over the ranks",
        "trainer.default_hdfs_dir": "files are local",
        "ray_init": _NO_RAY,
        "ray_kwargs": _NO_RAY,
        "data.prompt_key": _COLUMNS,
        "data.response_key": _COLUMNS,
        "data.messages_key": _COLUMNS,
        "data.reward_fn_key": _COLUMNS,
        "data.trust_remote_code": _NO_CODE,
        "data.image_key": _NO_MODALITIES,
        "data.video_key": _NO_MODALITIES,
        "data.audio_key": _NO_MODALITIES,
        "data.tool_config_path": _NO_TURNS,
        "rollout.multi_turn": _NO_TURNS,
        "rollout.agent": _NO_TURNS,
        "rollout.mode": "ranks generate and train in turns",
        "rollout.val_kwargs": (
            "validation is greedy, and with trainer.val_sampled also with the settings of rollout"
        ),
        "rollout.free_cache_engine": "the cache is always given back while models train",
        "rollout.calculate_log_probs": "they are always computed",
        "algorithm.filter_groups.max_inflight_gen_batches": (
            "all ranks generate one batch after another and stop as soon as enough prompts are "
            "left, as with 1 there"
        ),
        "algorithm.use_pf_ppo": "",
        "algorithm.pf_ppo": "",
        "actor.calculate_sum_pi_squared": "it is computed where algorithm.adv_estimator needs it",
        "reward_model.enable": "a reward model is in use if reward_model.path is set",
        "trainer.val_only": "",
        "trainer.validation_data_dir": "",
        "data.train_max_samples": "all rows of data.train_files are used",
        "data.val_max_samples": "all rows of data.val_files are used",
        "data.val_batch_size": "all rows of data.val_files are one batch",
        "data.apply_chat_template_kwargs": (
            "write what they choose into a jinja file of your own, and name it in "
            "data.chat_template"
        ),
        "model_engine": _MEGATRON,
        "rollout.do_sample": "training always samples; validation is greedy",
        "rollout.ignore_eos": "a response always ends at an end token",
        "rollout.max_model_len": ("it is data.max_prompt_length + data.max_response_length"),
        "rollout.enable_chunked_prefill": (
            "prompts are always computed in parts of rollout.max_prefill_tokens"
        ),
        "rollout.load_format": "the engine always gets its weights from the actor",
        "rollout.log_prob_use_dynamic_bsz": _PACKED,
        "rollout.nnodes": _RANKS,
        "rollout.n_gpus_per_node": _RANKS,
        "reward.num_workers": "each rank scores its share of the responses",
        "reward_model.num_workers": "each rank scores its share of the responses",
        "reward_model.launch_reward_fn_async": "each rank scores its share of the responses",
        "critic.enable": "algorithm.adv_estimator decides whether there is a critic",
        "actor_rollout_ref.nccl_timeout": "distributed.timeout_s limits every wait",
    }
)
_MISSING_BELOW_A_ROLE: Mapping[str, str] = MappingProxyType(
    {
        "strategy": _MEGATRON,
        "fsdp_config": _MEGATRON,
        "fsdp": _MEGATRON,
        "megatron": _MEGATRON,
        "megatron.param_offload": _NO_OFFLOAD,
        "megatron.grad_offload": _NO_OFFLOAD,
        "megatron.optimizer_offload": _NO_OFFLOAD,
        "fsdp_config.param_offload": _NO_OFFLOAD,
        "fsdp_config.optimizer_offload": _NO_OFFLOAD,
        "fsdp_config.offload_policy": _NO_OFFLOAD,
        "param_offload": _NO_OFFLOAD,
        "grad_offload": _NO_OFFLOAD,
        "optimizer_offload": _NO_OFFLOAD,
        "model.enable_activation_offload": _NO_OFFLOAD,
        "megatron.use_mbridge": _WEIGHTS,
        "megatron.vanilla_mbridge": _WEIGHTS,
        "megatron.use_dist_checkpointing": _WEIGHTS,
        "megatron.override_transformer_config.attention_backend": (
            "the device decides which kernel computes attention"
        ),
        "use_dynamic_bsz": _PACKED,
        "log_prob_use_dynamic_bsz": _PACKED,
        "use_remove_padding": _PACKED,
        "model.use_remove_padding": _PACKED,
        "model.trust_remote_code": _NO_CODE,
        "model.lora": _NO_LORA,
        "model.lora_rank": _NO_LORA,
        "model.lora_alpha": _NO_LORA,
        "lora_rank": _NO_LORA,
        "lora_alpha": _NO_LORA,
        "rollout": "the reward model scores in the run's own processes",
        "nccl_timeout": "distributed.timeout_s limits every wait",
        "rollout_n": "it is always rollout.n",
        "data_loader_seed": "one seed is for everything",
        "shuffle": "mini-batches are drawn in the order of the batch",
        "checkpoint": "a checkpoint holds all that a run needs; see trainer.save_freq",
        "optim.optimizer": "the optimizer is AdamW",
        "optim.optimizer_impl": "the optimizer is AdamW",
    }
)
_WITHOUT_REASON = (
    *("distillation", "transfer_queue", "global_profiler", "skip"),
    "actor_rollout_ref.hybrid_engine",
    *("sandbox_fusion", "reward.sandbox_fusion", "trainer.v1"),
    *("trainer.use_v1", "trainer.checkpoint_callback_class", "trainer.del_local_ckpt_after_load"),
    *("data.use_shm", "data.function_tool_path", "data.return_raw_input_ids"),
    *("data.return_raw_chat", "data.return_full_prompt", "data.dataloader_num_workers"),
    *("data.image_patch_size", "data.validation_shuffle", "data.filter_overlong_prompts_workers"),
    *("data.custom_cls", "data.return_multi_modal_inputs", "data.mm_processor_kwargs"),
    *("data.sampler", "data.datagen", "rollout.mtp"),
    *("reward_model.enable_resource_pool", "reward_model.n_gpus_per_node", "reward_model.nnodes"),
    *("reward_model.reward_loop_source", "reward_model.reward_loop_module_path"),
    *("reward_model.reward_loop_class_name", "rollout.full_determinism"),
    *("rollout.cudagraph_capture_sizes", "rollout.data_parallel_size"),
    "rollout.pipeline_model_parallel_size",
    *("rollout.enable_prefix_caching", "rollout.logprobs_mode", "rollout.scheduling_policy"),
    *("rollout.layered_summon", "rollout.disable_log_stats", "rollout.over_sample_rate"),
    *("rollout.multi_stage_wake_up", "rollout.engine_kwargs", "rollout.router_config_path"),
    *("rollout.checkpoint_engine", "rollout.trace", "rollout.skip_tokenizer_init"),
    "rollout.moe_load_balance_metrics_interval",
    *("rollout.prometheus", "rollout.quantization", "rollout.quantization_config_file"),
    *("rollout.qat", "rollout.disaggregation", "rollout.limit_images", "rollout.profiler"),
    *("actor.policy_loss.dro_beta",),
)
_WITHOUT_REASON_BELOW_A_ROLE = (
    *("model", "profiler", "qat", "use_torch_compile", "freeze_vision_tower"),
    *("calculate_entropy", "use_prefix_grouper", "use_fused_kernels"),
    *("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size"),
    *("entropy_checkpointing", "pad_to_length", "load_weight", "veomni", "torchtitan"),
    *("optim.num_cycles", "optim.zero_indexed_step", "optim.override_optimizer_config"),
    *("optim.lr_warmup_init", "optim.weight_decay_incr_style", "optim.lr_wsd_decay_style"),
    *("optim.lr_wsd_decay_steps", "optim.use_checkpoint_opt_param_scheduler"),
    *("optim.use_precision_aware_optimizer", "optim.main_grads_dtype", "optim.exp_avg_dtype"),
    *("optim.exp_avg_sq_dtype", "optim.use_layer_wise_distributed_optimizer"),
)


def verl_hint(name: str, known: Collection[str]) -> str | None:
    """What `name`, a key of verl's, is called here, or that it has no counterpart.

    Args:
        name: an unknown key; Hydra's + or ~ may stand before it.
        known: our keys.

    Returns:
        The hint; None if we do not know it for a key of verl's.
    """
    here = _without_verls_section(name.lstrip("+~"))
    for theirs in (here, *_with_sections(here)):
        ours = _counterpart(theirs, known)
        if ours is not None:
            return f"verl's '{name}' is '{ours}' here{_change(theirs)}"
        reason = _reason(theirs)
        if reason is not None:
            return f"verl's '{name}' has no counterpart here{': ' if reason else ''}{reason}"
    return None


def _change(name: str) -> str:
    """What else changes with the name, as the end of a sentence."""
    while name:
        if name in _CHANGES:
            return f"; {_CHANGES[name]}"
        name = name.partition(".")[2]
    return ""


def _without_verls_section(name: str) -> str:
    for theirs, ours in _SECTIONS:
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return name


def _with_sections(word: str) -> list[str]:
    """The keys of the tables that end with `word`, which stands without its section."""
    if "." in word:
        return []
    keys = (*_ELSEWHERE, *_MISSING)
    return [key for key in keys if key.partition(".")[2] == word]


def _counterpart(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return name
    role, _, rest = name.partition(".")
    candidates = list(_longest(_ELSEWHERE, name) or ())
    if role in _ROLES and rest in _BELOW_A_ROLE:
        candidates.append(f"{role}.{_BELOW_A_ROLE[rest]}")
    return next((key for key in candidates if key in known), None)


def _reason(name: str) -> str | None:
    """Why `name` has no counterpart; "" if there is nothing to say; None if it is not known."""
    reason = _longest(_MISSING, name)
    role, _, rest = name.partition(".")
    if reason is None and role in _ROLES:
        reason = _longest(_MISSING_BELOW_A_ROLE, rest)
        if reason is None and rest.startswith("optim.muon_"):
            reason = "the optimizer is AdamW"
        if reason is None:
            reason = _longest(dict.fromkeys(_WITHOUT_REASON_BELOW_A_ROLE, ""), rest)
    if reason is None:
        reason = _longest(dict.fromkeys(_WITHOUT_REASON, ""), name)
    return reason


def _longest(table: Mapping[str, ValueT], name: str) -> ValueT | None:
    """The entry of `name`, or of the nearest section around it that the table holds."""
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None
