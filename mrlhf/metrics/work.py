"""The rows of the work: optimizer steps, sampling, weights on the way, time and memory."""

from __future__ import annotations

from mrlhf.metrics.metric import SAME, Chapter, Metric

_ROLES = "{actor,critic,sft,rm,dpo}"

# fmt: off
# A row a metric: name; how it is reduced, over what; unit; meaning.
OPTIMIZER = Chapter(
    "Optimizer steps",
    "PPO updates `actor` and `critic`, fine-tuning `sft`, reward modelling `rm`, DPO `dpo`.",
    Metric("{actor,critic}/grad_norm", "mean", "optimizer steps", "norm",
           "the norm of the gradient before clipping, of the steps that were taken", verl=SAME),
    Metric("{sft,rm,dpo}/grad_norm", "mean", "optimizer steps", "norm",
           "the same", curve=True, verl="train/grad_norm"),
    Metric("{actor,critic}/lr", "whole", "", "learning rate",
           "the learning rate of the step", above=0.0, verl=SAME),
    Metric("{sft,rm,dpo}/lr", "whole", "", "learning rate",
           "the same", above=0.0, curve=True, verl="train/lr"),
    Metric(f"{_ROLES}/head_lr", "whole", "", "learning rate",
           "that of the scalar head, if it has one of its own"),
    Metric(f"{_ROLES}/optimizer_steps", "sum", "mini-batches", "steps",
           "optimizer steps that the update took"),
    Metric(f"{_ROLES}/skipped_steps", "sum", "mini-batches", "steps",
           "steps that it skipped, because gradients were not finite or too large"),
    Metric(f"{_ROLES}/expert_load_max", "mean", "mini-batches", "ratio",
           "mixtures of experts: the tokens of an expert over the mean of its layer; the largest "
           "of all layers"),
    Metric(f"{_ROLES}/expert_load_entropy", "mean", "mini-batches", "ratio",
           "mixtures of experts: the entropy of a layer's tokens over that of an even "
           "distribution; the smallest of all layers"),
)

SAMPLING = Chapter(
    "Sampling",
    "",
    Metric("training/global_step", "whole", "", "steps", "the step's number", verl=SAME),
    Metric("training/epoch", "whole", "", "passes",
           "the number of the pass over the training data", verl=SAME),
    Metric("training/num_gen_batches", "whole", "", "batches",
           "with `algorithm.filter_groups`: the batches that were generated",
           verl="train/num_gen_batches"),
    Metric("training/generated_groups", "whole", "", "prompts", "the prompts in them"),
    Metric("training/filtered_groups", "whole", "", "prompts",
           "those that were dropped, since their responses all score the same"),
    Metric("training/uninformative_groups", "whole", "", "prompts",
           "those that were kept all the same, to fill the batch"),
    Metric("rollout/kv_cache_bytes", "max", "ranks", "bytes", "the size of the KV cache"),
    Metric("rollout/peak_kv_cache_bytes", "max", "ranks", "bytes",
           "the most of it that was in use"),
    Metric("rollout/preemptions", "sum", "replicas", "sequences",
           "sequences that lost their blocks"),
    Metric("rollout/prefix_hit_rate", "mean", "prompt tokens", "share",
           "those that were not computed, because another sample or prompt began alike"),
    Metric("rollout/tokens_per_engine_step", "mean", "passes of the engine", "tokens",
           "response tokens of a pass through the model: how full the batches are"),
    Metric("rollout/imbalance", "mean", "generations", "ratio",
           "passes of the replica that had most, over the mean of all replicas; 1 is even"),
    Metric("perf/slowest_replica", "max", "replicas", "ratio",
           "with several replicas of the engine: the seconds of the slowest one for a pass, over "
           "the median of the others", below=1.6),
    Metric("perf/slowest_replica_rank", "whole", "", "rank", "its first rank"),
    Metric("reshard/bytes_moved", "sum", "ranks", "bytes",
           "bytes of weights received from other ranks"),
    Metric("reshard/bytes_had_to_move", "sum", "ranks", "bytes",
           "the lower bound: bytes needed and not held"),
    Metric("reshard/peak_extra_bytes", "max", "ranks", "bytes", "bytes of the buckets"),
    Metric("reshard/seconds", "max", "ranks", "seconds", "the hand-over of the weights"),
    Metric("reshard/merge_error", "whole", "", "share",
           "with `rollout.lora: merged`: the share of what the adapters add that is lost as the "
           "sums are rounded, |lost| / |added| over all weights", below=0.5),
)

SPEED = Chapter(
    "Time, balance and memory",
    "`<phase>` is a phase of [step.md](step.md#the-phases), `testing`, `dump` or "
    "`save_checkpoint`.",
    Metric("timing_s/<phase>", "main", "", "seconds",
           "the phase. `step` holds the others, but for validation, writing rollouts (`dump`) and "
           "saving", verl=SAME),
    Metric("timing_per_token_ms/<phase>", "main", "", "milliseconds",
           "the phase for each token of the batch; `gen` for each token that was drawn", verl=SAME),
    Metric("perf/total_num_tokens", "sum", "responses", "tokens",
           "tokens of the batch, prompts and responses together", verl=SAME),
    Metric("perf/time_per_step", "main", "", "seconds", "as `timing_s/step`", verl=SAME),
    Metric("perf/throughput", "main", "", "tokens a second",
           "tokens of the batch a second: of one rank in PPO, of all ranks together in the other "
           "programs", label="throughput", verl=SAME),
    Metric("perf/max_memory_allocated_gb", "main", "", "10⁹ bytes",
           "the peak of memory since the start: of tensors on a GPU, of resident memory on a CPU",
           verl=SAME),
    Metric("perf/mfu/{actor,critic}", "whole", "", "share",
           "the share of the devices' peak (`trainer.peak_tflops`) that the update reached",
           verl=SAME),
    Metric(f"train/imbalance/{_ROLES}", "max", "data-parallel ranks", "ratio",
           "the work of the rank that has the most, over the mean; the others wait for it at the "
           "end of a mini-batch. 1 is best"),
    Metric(f"perf/shared_tokens/{_ROLES}", "whole", "", "share",
           "with `share_prompts`: the tokens of the batch that were not computed, since another "
           "response has the same prompt"),
    Metric(f"train/bubble/{_ROLES}", "whole", "", "ratio",
           "with pipeline stages: the time in which a stage waits for others, over the time in "
           "which it computes, as predicted: (p − 1) / (m v), with p stages of v virtual stages "
           "and m micro-batches of a rank in a mini-batch, all of equal work"),
    Metric(f"perf/bubble/{_ROLES}", "mean", "stages", "ratio",
           "the same as measured in the update"),
    Metric(f"perf/slowest_update/{_ROLES}", "max", "replicas", "ratio",
           "with several replicas of the model: the seconds of the slowest one for an operation of "
           "the update, over the median of the others", below=1.6),
    Metric(f"perf/slowest_update_rank/{_ROLES}", "whole", "", "rank", "its first rank"),
)
