"""The rows of the work: optimizer steps, sampling, weights on the way, time and memory."""

from __future__ import annotations

from mrlhf.metrics.metric import SAME, Chapter, Metric

_ROLES = "{actor,critic,sft,rm,values,dpo}"

# fmt: off
# A row a metric: name; how it is reduced, over what; unit; meaning.
OPTIMIZER = Chapter(
    "Optimizer steps",
    "`sft`: fine-tuning; `rm`: reward modelling; `values`: training of a critic.",
    Metric("{actor,critic}/grad_norm", "mean", "optimizer steps", "norm",
           "before clipping, of steps that were taken", verl=SAME),
    Metric("{sft,rm,values,dpo}/grad_norm", "mean", "optimizer steps", "norm",
           "the same", curve=True, verl="train/grad_norm"),
    Metric("{actor,critic}/lr", "whole", "", "learning rate",
           "of the step", above=0.0, verl=SAME),
    Metric("{sft,rm,values,dpo}/lr", "whole", "", "learning rate",
           "the same", above=0.0, curve=True, verl="train/lr"),
    Metric(f"{_ROLES}/head_lr", "whole", "", "learning rate",
           "of the scalar head, if it has its own"),
    Metric(f"{_ROLES}/optimizer_steps", "sum", "mini-batches", "steps",
           "taken by the update"),
    Metric(f"{_ROLES}/skipped_steps", "sum", "mini-batches", "steps",
           "skipped: gradients not finite or too large"),
    Metric(f"{_ROLES}/expert_load_max", "mean", "mini-batches", "ratio",
           "tokens of an expert over the mean of its layer; largest of all layers"),
    Metric(f"{_ROLES}/expert_load_entropy", "mean", "mini-batches", "ratio",
           "entropy of a layer's load over that of an even load; smallest of all layers"),
)

SAMPLING = Chapter(
    "Sampling",
    "",
    Metric("training/global_step", "whole", "", "steps", "number of the step", verl=SAME),
    Metric("training/epoch", "whole", "", "passes",
           "number of the pass over the training data", verl=SAME),
    Metric("training/num_gen_batches", "whole", "", "batches",
           "`algorithm.filter_groups`: generated batches",
           verl="train/num_gen_batches"),
    Metric("training/generated_groups", "whole", "", "prompts", "in them"),
    Metric("training/filtered_groups", "whole", "", "prompts",
           "dropped: all responses score the same"),
    Metric("training/uninformative_groups", "whole", "", "prompts",
           "kept all the same, to fill the batch"),
    Metric("rollout/kv_cache_bytes", "max", "ranks", "bytes", "size of the KV cache"),
    Metric("rollout/peak_kv_cache_bytes", "max", "ranks", "bytes",
           "most of it in use"),
    Metric("rollout/preemptions", "sum", "replicas", "sequences",
           "that lost their blocks"),
    Metric("rollout/prefix_hit_rate", "mean", "prompt tokens", "share",
           "not computed: another sample or prompt began alike"),
    Metric("rollout/tokens_per_engine_step", "mean", "passes of the engine", "tokens",
           "response tokens of a pass: how full batches are"),
    Metric("rollout/imbalance", "mean", "generations", "ratio",
           "most passes of a replica over the mean; 1 is even"),
    Metric("perf/scored_early", "mean", "responses", "share",
           "with `rollout.overlap`: scoring began while the engine still drew"),
    Metric("perf/slowest_replica", "max", "replicas", "ratio",
           "seconds of a pass, over the median of the others", below=1.6),
    Metric("perf/slowest_replica_rank", "whole", "", "rank", "first of the slowest replica"),
    Metric("reshard/bytes_moved", "sum", "ranks", "bytes",
           "weights received from other ranks"),
    Metric("reshard/bytes_had_to_move", "sum", "ranks", "bytes",
           "lower bound: needed and not held"),
    Metric("reshard/peak_extra_bytes", "max", "ranks", "bytes", "size of the buckets"),
    Metric("reshard/seconds", "max", "ranks", "seconds", "hand-over of the weights"),
    Metric("reshard/merge_error", "whole", "", "share",
           "`rollout.lora: merged`: what rounding loses of what adapters add", below=0.5),
)

CARRIED = Chapter(
    "Partial rollouts",
    "With `rollout.partial.over` above 1; see [generation.md](generation.md#partial-rollouts). The "
    "age of a token is the number of updates of the policy since it was drawn.",
    Metric("staleness/mean", "mean", "tokens that train", "versions", "age", label="staleness"),
    Metric("staleness/max", "max", "tokens that train", "versions", "age"),
    Metric("staleness/share/<age>", "mean", "tokens that train", "share", "of this age"),
    Metric("staleness/mixed", "mean", "responses", "share", "drawn by several versions"),
    Metric("partial/limit", "max", "samples", "tokens", "drawn in the step, at most"),
    Metric("partial/open_groups", "whole", "", "prompts", "begun and left for later steps"),
    Metric("partial/restarted_groups", "whole", "", "prompts",
           "begun again: too old, or drawn with other settings"),
)

EPISODES = Chapter(
    "Episodes",
    "With `rollout.environment` or `rollout.tools`; see [environments.md](environments.md).",
    Metric("episodes/turns/mean", "mean", "episodes", "turns", "of an episode", label="turns"),
    Metric("episodes/turns/max", "max", "episodes", "turns", "of the longest episode"),
    Metric("episodes/contexts/mean", "mean", "episodes", "contexts",
           "of an episode: what the policy read at once"),
    Metric("episodes/tool_calls/mean", "mean", "episodes", "calls", "of tools in an episode"),
    Metric("episodes/errors", "mean", "calls", "share",
           "that failed or could not be read", below=0.5),
    Metric("episodes/failed", "mean", "episodes", "share",
           "that could not go on, and do not train", below=0.1),
    Metric("perf/tool_wait_s/mean", "mean", "episodes", "seconds",
           "for tools and environment"),
    Metric("perf/tool_wait_s/max", "max", "episodes", "seconds", "the same, at most"),
)

SPEED = Chapter(
    "Time, balance and memory",
    "`<phase>` is a phase of [step.md](step.md#the-phases), `testing`, `dump` or "
    "`save_checkpoint`.",
    Metric("timing_s/<phase>", "main", "", "seconds",
           "the phase; `step` leaves out validation, `dump` and saving", verl=SAME),
    Metric("timing_per_token_ms/<phase>", "main", "", "milliseconds",
           "for each token of the batch, `gen` for each drawn one", verl=SAME),
    Metric("perf/total_num_tokens", "sum", "responses", "tokens",
           "prompts and responses together", verl=SAME),
    Metric("perf/time_per_step", "main", "", "seconds", "as `timing_s/step`", verl=SAME),
    Metric("perf/throughput", "main", "", "tokens/s",
           "of one rank in PPO, of all ranks in other programs", label="throughput", verl=SAME),
    Metric("perf/max_memory_allocated_gb", "main", "", "10⁹ bytes",
           "peak since the start: tensors on a GPU, resident memory on a CPU",
           verl=SAME),
    Metric("perf/memory/<owner>", "main", "", "10⁹ bytes",
           "what a model (`params`, `grads`, `optimizer`) or the engine (`params`, `cache`) "
           "holds on the device in the phase that holds most"),
    Metric("perf/memory_in/<phase>", "main", "", "10⁹ bytes",
           "the most that they hold together in a phase"),
    Metric("perf/mfu/{actor,critic}", "whole", "", "share",
           "of the devices' peak (`trainer.peak_tflops`), in the update",
           verl=SAME),
    Metric(f"train/imbalance/{_ROLES}", "max", "data-parallel ranks", "ratio",
           "work of the rank that has most, over the mean; 1 is best"),
    Metric(f"perf/shared_tokens/{_ROLES}", "whole", "", "share",
           "with `share_prompts`: tokens not computed, since another row has the same prompt"),
    Metric(f"train/bubble/{_ROLES}", "whole", "", "ratio",
           "a stage's waiting over its computing, predicted: (p − 1) / (m v) with p stages of v "
           "virtual stages and m equal micro-batches of a rank"),
    Metric(f"perf/bubble/{_ROLES}", "mean", "stages", "ratio",
           "the same, measured"),
    Metric(f"perf/slowest_update/{_ROLES}", "max", "replicas", "ratio",
           "seconds of an operation of the update, over the median of the others", below=1.6),
    Metric(f"perf/slowest_update_rank/{_ROLES}", "whole", "", "rank",
           "first of the slowest replica"),
)
