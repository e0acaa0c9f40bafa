"""The metrics of a PPO step that come from its whole batch. It measures, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from mrlhf.batch import Experience, Rollout
from mrlhf.metrics import data_metrics, throughput_metrics
from mrlhf.models.flops import training_flops
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.rollout.collector import Collected
from mrlhf.run.startup import Run
from mrlhf.training.engine import ModelEngine


def batch_metrics(
    collected: Collected,
    experience: Experience,
    seconds: Mapping[str, float],
    max_prompt_length: int,
    run: Run,
) -> dict[str, float]:
    """Metrics of scores, advantages, lengths, speed and memory.

    Args:
        collected: the responses with their scores.
        experience: what was made of them.
        seconds: seconds of each phase, `step` among them.
        max_prompt_length: the configured limit, tokens.
        run: this process's part in the job.
    """
    rollout = collected.rollout
    metrics = collected.scores.metrics()
    metrics |= data_metrics(experience, max_prompt_length)
    metrics |= throughput_metrics(
        seconds,
        prompt_tokens=sum(rollout.prompt_lengths),
        response_tokens=sum(rollout.response_lengths),
        generated_tokens=collected.generated_tokens,
        world_size=run.world_size,
    )
    metrics["perf/max_memory_allocated_gb"] = run.device.max_memory_allocated() / 1e9
    return metrics


def sequence_lengths(rollout: Rollout) -> list[tuple[int, int]]:
    """Tokens of each row, prompt and response together, and those of its response alone."""
    rows = zip(rollout.prompt_lengths, rollout.response_lengths, strict=True)
    return [(prompt + response, response) for prompt, response in rows]


def trained_mini_batches(role: str, metrics: Mapping[str, float]) -> float:
    """How many mini-batches the update of `role` ran forward and backward, by its metrics.

    These are the optimizer steps, taken or skipped, and the mini-batch at which an update stopped.
    """
    counts = (f"{role}/optimizer_steps", f"{role}/skipped_steps", f"{role}/kl_stopped")
    return sum(metrics[count] for count in counts if count in metrics)


def utilisation(
    name: str,
    engine: ModelEngine,
    rollout: Rollout,
    *,
    mini_batches: int,
    update_metrics: Mapping[str, float],
    seconds: Mapping[str, float],
    run: Run,
    peak_tflops: float | None,
) -> dict[str, float]:
    """`perf/mfu/<name>`: the share of the devices' peak that the update of a model reached.

    Args:
        name: the role.
        engine: its model.
        rollout: the batch that it was trained on.
        mini_batches: of one pass over the batch.
        update_metrics: the metrics of the update.
        seconds: seconds of each phase.
        run: this process's part in the job.
        peak_tflops: the configured peak of one device; None: that of the device, if it is known.

    Returns:
        Nothing if the model was not updated in this process's part of the step, or if no peak is
        known.
    """
    peak_tflops = peak_tflops or run.device.peak_tflops(engine.dtype)
    if peak_tflops is None or f"update_{name}" not in seconds:
        return {}
    passes = trained_mini_batches(name, update_metrics) / mini_batches
    flops = training_flops(engine.spec, sequence_lengths(rollout)) * passes
    possible = seconds[f"update_{name}"] * run.world_size * peak_tflops * 1e12
    return {f"perf/mfu/{name}": flops / possible}


def balance_metrics(name: str, engine: ModelEngine, cut: BatchCut) -> dict[str, float]:
    """How evenly the work of a model is shared out over ranks, and what its pipeline should lose.

    Args:
        name: the role.
        engine: its model.
        cut: of the batch that it is trained on.

    Returns:
        `train/imbalance/<name>`: the work of the most loaded data-parallel rank over the mean, in
        operations. With several pipeline stages also `train/bubble/<name>`: the time in which a
        stage stands idle over the time in which it computes, if all micro-batches and all virtual
        stages cost the same; `perf/bubble/<name>` is measured.
    """
    metrics = {f"train/imbalance/{name}": cut.balance.imbalance}
    layout = engine.groups.layout
    if layout.pp > 1:
        metrics[f"train/bubble/{name}"] = cut.balance.bubble(layout.pp, layout.vpp)
    return metrics
