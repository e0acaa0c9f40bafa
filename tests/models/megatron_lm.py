"""A program that does with checkpoints what pretrain_gpt.py does: megatron-core's own GPTModel, its
own layers, its own dist_checkpointing. It knows nothing of our converter or weight map.

python tests/models/megatron_lm.py JOBS.json

Each job is a dictionary. It saves a model with random weights, or loads a checkpoint, which it may
save again, and writes the logits of a few tokens. Imports stand in functions, because
megatron-core's writer starts a process that imports this file again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOKENS = [[1, 5, 9, 2, 30, 17, 4, 11], [3, 3, 8, 21, 36, 0, 7, 12]]


def run_jobs(directory: Path, jobs: list[dict[str, Any]], ranks: int = 1) -> None:
    """Run jobs in `ranks` new processes; they write their files and must succeed."""
    file = directory / "jobs.json"
    file.write_text(json.dumps(jobs))
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "STORE": str(directory / "store"),
        }
        command = [sys.executable, str(ROOT / "tests" / "models" / "megatron_lm.py"), str(file)]
        log = (directory / f"rank_{rank}.log").open("w")
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    codes = [process.wait() for process in processes]
    logs = [(directory / f"rank_{rank}.log").read_text()[-4000:] for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(logs)


def arguments(job: dict[str, Any]) -> argparse.Namespace:
    """Megatron-LM's arguments for the job's model, with some of those that it keeps beside them."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    model = job["model"]
    scaling = model.get("rope_scaling_factor")
    stated = dict(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=model.get("ffn_hidden_size", 24),
        num_attention_heads=8,
        group_query_attention="latent" not in model,
        num_query_groups=8 if "latent" in model else model.get("groups", 4),
        kv_channels=model.get("head_dim", 4),
        max_position_embeddings=model.get("max_positions", 64),
        position_embedding_type="rope",
        rotary_base=model.get("rotary_base", 10000),
        rotary_percent=model.get("rotary_percent", 1.0),
        rotary_interleaved=False,
        use_rope_scaling=scaling is not None,
        rope_scaling_factor=scaling or 8.0,
        rotary_seq_len_interpolation_factor=None,
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        add_bias_linear=False,
        add_qkv_bias=model.get("qkv_bias", False),
        qk_layernorm=model.get("qk_norm", False),
        window_size=None,
        untie_embeddings_and_output_weights=not model.get("tied", False),
        make_vocab_size_divisible_by=8,
        padded_vocab_size=40,
        **{"num_experts": None, **model.get("mixtures", {})},
        multi_latent_attention="latent" in model,
        **model.get("latent", {}),
        **model.get("indexer", {}),
        **model.get("delta", {}),
        tensor_model_parallel_size=int(os.environ.get("WORLD_SIZE", "1")),
        pipeline_model_parallel_size=1,
        data_parallel_size=1,
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto,
        exit_signal=signal.SIGTERM,
        iteration=10,
    )
    others = dict(model.get("gpt_oss", {}))
    if others:
        others["window_size"] = tuple(others["window_size"])
    return argparse.Namespace(**stated | others)


def build(job: dict[str, Any]) -> Any:
    """megatron-core's GPTModel with its local layers."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    args = arguments(job)
    mixtures = dict(job["model"].get("mixtures", {}))
    if mixtures:
        mixtures["num_moe_experts"] = mixtures.pop("num_experts")
    delta = job["model"].get("delta", {})
    config = _transformer_config(args, mixtures, job["model"].get("latent", {}), delta)
    for name, value in vars(args).items():
        if name.startswith("yarn_"):
            setattr(config, name, value)
    if delta:
        from tests.models.megatron_te import block_spec

        spec = block_spec(config)
    elif mixtures:
        spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
        if "indexer" in job["model"]:
            from tests.models.megatron_sparse import attend_sparsely

            attend_sparsely(spec)
            for name, value in job["model"]["indexer"].items():
                setattr(config, name, value)
        elif args.multi_latent_attention:
            _let_heads_of_values_differ(spec)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        parallel_output=False,
    )
    # Norms of 1 and biases of 0 would hide an exchange.
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    for correction in corrections(model):
        correction.normal_(std=0.1)
    # megatron-core refuses to train mixtures with tensor but without sequence parallelism.
    return model.eval() if mixtures else model


def _let_heads_of_values_differ(spec: Any) -> None:
    """Give latent attention a core that is told of its heads; only TransformerEngine's asks."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Core(DotProductAttention):
        def __init__(self, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
            super().__init__(**options)
            assert v_channels in (0, self.config.kv_channels), k_channels

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Core


def _transformer_config(
    args: argparse.Namespace,
    mixtures: dict[str, Any],
    latent: dict[str, Any],
    delta: dict[str, Any],
) -> Any:
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    kind = MLATransformerConfig if latent else TransformerConfig
    of_gpt_oss: dict[str, Any] = {}
    if not args.swiglu:
        names = ("glu_linear_offset", "activation_func_clamp_value", "softmax_type")
        names += ("window_size", "window_attn_skip_freq")
        of_gpt_oss = {name: getattr(args, name) for name in names}
    return kind(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu if args.swiglu else quick_gelu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        use_cpu_initialization=True,
        init_method_std=0.5,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
        **mixtures,
        **latent,
        **delta,
        deterministic_mode=bool(delta),  # megatron-core's own form of the rule
        **of_gpt_oss,
        **({"rotary_base": args.rotary_base} if latent else {}),
    )


def corrections(model: Any) -> list[Any]:
    """What routers add to their scores for the choice."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]


def sharded_model(job: dict[str, Any], model: Any) -> dict[str, Any]:
    """What Megatron-LM hands to dist_checkpointing, under the names that the job wants."""
    from megatron.core import parallel_state

    metadata = {
        "singleton_local_shards": job.get("separate", False),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    sharded = model.sharded_state_dict(metadata=metadata)
    if job["model"].get("mixtures") and job.get("names") != "local":
        name_norms_of_mixtures(sharded)
    if job["model"].get("latent") and job.get("names") != "local":
        name_norms_of_latents(sharded, fuses="indexer" not in job["model"])
    if job.get("names") == "own":
        for entry in sharded.values():
            key = entry.key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            entry.key = key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return dict(sharded)


def name_norms_of_mixtures(sharded: dict[str, Any]) -> None:
    """Give norms before mixtures the names that megatron-core's layers with TransformerEngine use.

    Its own layers, which run here, name them like those before a dense MLP.
    """
    keys = {entry.key for entry in sharded.values()}
    for entry in sharded.values():
        layer, found, rest = entry.key.partition("mlp.linear_fc1.layer_norm_")
        if found and f"{layer}mlp.router.weight" in keys:
            entry.key = f"{layer}pre_mlp_layernorm.{rest}"


def name_norms_of_latents(sharded: dict[str, Any], fuses: bool) -> None:
    """Give norms that a dense MLP or, if it fuses, latent attention follows such names, too."""
    keys = {entry.key for entry in sharded.values()}
    for entry in sharded.values():
        for letter in ("q", "kv") if fuses else ():
            entry.key = entry.key.replace(
                f"self_attention.{letter}_layernorm.",
                f"self_attention.linear_{letter}_up_proj.layer_norm_",
            )
        layer, found, rest = entry.key.partition("pre_mlp_layernorm.")
        if found and f"{layer}mlp.router.weight" not in keys:
            entry.key = f"{layer}mlp.linear_fc1.layer_norm_{rest}"


def train_one_step(model: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """Wrap the model, take a step with the distributed optimizer, and return both."""
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    options = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(options, [wrapped], use_gloo_process_groups=False)
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    logits(wrapped).square().mean().backward()
    finalize_model_grads([wrapped], torch.tensor(1))
    assert optimizer.step()[0]
    return wrapped, optimizer


def save(job: dict[str, Any], model: Any) -> None:
    """Save as Megatron-LM's save_checkpoint does."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    args = arguments(job)
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
    optimizer = None
    if job.get("optimizer"):
        _, optimizer = train_one_step(model, args)
    state["model"] = sharded_model(job, model)
    content = {"singleton_local_shards": job.get("separate", False)}
    if optimizer is not None:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            **content,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata)
        state["opt_param_scheduler"] = {"max_lr": 1e-2, "num_steps": 10}
    rank = torch.distributed.get_rank()
    state["rng_state"] = ShardedObject(
        "rng_state", [{"torch_rng_state": torch.get_rng_state()}], (1, 1), (0, 0), replica_id=rank
    )

    folder = Path(job["checkpoint"]) / "iter_0000010"
    if rank == 0:
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder), content_metadata=content)


def load(job: dict[str, Any], model: Any) -> None:
    """Load as Megatron-LM's load_checkpoint does; nothing may be missing or too much."""
    import torch
    from megatron.core import dist_checkpointing

    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    for correction in corrections(model):
        correction.fill_(float("nan"))
    folder = str(Path(job["checkpoint"]) / "release")
    common = dist_checkpointing.load_common_state_dict(folder)
    stated = vars(common["args"])
    wanted = vars(arguments(job))
    for name in job["same_arguments"]:
        assert stated[name] == wanted[name], (name, stated[name], wanted[name])

    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    assert content["singleton_local_shards"] is False
    sharded = {"model": sharded_model(job, model)}
    loaded = dist_checkpointing.load(sharded, folder, strict="raise_all")
    model.load_state_dict(loaded["model"], strict=True)
    torch.distributed.barrier()
    if "again" in job:
        save({**job, "checkpoint": job["again"]}, model)


def logits(model: Any) -> Any:
    """[batch, seq_len, padded vocabulary] of a few tokens."""
    import torch

    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask)


def main() -> None:
    """Run the jobs of the file that the command line names."""
    import_module("mrlhf")  # the stand-ins for CUDA, before megatron-core is imported

    import torch
    from megatron.core import parallel_state
    from megatron.core.safe_globals import register_safe_globals
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from safetensors.torch import save_file

    # megatron-core's router asks for it, but has no such name without TransformerEngine. Its latent
    # attention takes TransformerEngine to be there.
    moe_utils.__dict__.setdefault("te_general_gemm", None)
    multi_latent_attention.__dict__["HAVE_TE"] = False
    register_safe_globals()
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(os.environ["STORE"], world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model_parallel_cuda_manual_seed(5)

    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        torch.manual_seed(100 + number)
        model = build(job)
        (save if job["do"] == "save" else load)(job, model)
        with torch.no_grad():
            result = logits(model)
        if rank == 0:
            save_file({"logits": result.contiguous()}, job["logits"])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
