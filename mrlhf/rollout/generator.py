"""Generates a rollout with all replicas of the inference engine: hand over the weights, share out
samples, gather.

Every rank ends up with the whole rollout; what crosses the network for that is a few numbers a
token, in one exchange. It does not know rewards or losses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Prompts, Rollout, versions_of_one_policy
from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineStats, InferenceEngine, Sample, SamplingParams
from mrlhf.parallel.collectives import all_gather_ragged
from mrlhf.parallel.groups import EngineGroups
from mrlhf.reshard.execute import Resharder, ReshardStats
from mrlhf.rollout.assignment import ResponseLengths, Share, assign

_SEED_BITS = 63
_HEADER = 3  # row, tokens, stopped
_STATS = len(fields(EngineStats))
_IDLE = EngineStats(*[0] * _STATS)
_NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
)


@dataclass
class Generator:
    """The inference engine as the trainer sees it: one thing that spans all ranks.

    Attributes:
        engine: the replica that this rank is part of.
        groups: of all replicas.
        resharder: brings the policy's weights into the engine.
        seed: of the run.
        lengths: of the responses so far, by stream; where a prompt's are known, they balance the
            replicas.
        metrics: of the last rollout, the same on every rank.
    """

    engine: InferenceEngine
    groups: EngineGroups
    resharder: Resharder
    seed: int
    lengths: dict[str, ResponseLengths] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def take_weights(self, version: int) -> ReshardStats:
        """Bring the policy's weights into the engine as `version`, and wake it.

        Returns:
            Bytes summed over all ranks; memory and seconds of the rank that has most of them.

        Raises:
            EngineError: there is not enough memory.
        """
        with _named_memory_error("waking the engine and handing over the weights"):
            self.engine.wake()
            stats = self.resharder.run(meanwhile=self.engine.take_cache)
            self.engine.commit(version)
        mine = torch.tensor(astuple(stats), dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        moved, had_to_move, peak, seconds = torch.stack(every).unbind(dim=1)
        return ReshardStats(
            int(moved.sum()), int(had_to_move.sum()), int(peak.max()), float(seconds.max())
        )

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        stream: str,
        step: int | None = None,
        refill: int = 0,
    ) -> Rollout:
        """Sample responses to `prompts`, the same on every rank.

        Args:
            prompts: the prompts of the global batch.
            sampling: how to sample; its seed is replaced.
            stream: names the use ("train", "validation"); under the same name, step, weights and
                run seed a prompt gets the same responses again, under another one it gets other
                random numbers.
            step: training step, where the stream has a batch in each.
            refill: number of the batch within the step, where it has several.

        Raises:
            EngineError: the engine cannot serve the prompts, gave a log-probability that is no
                number, or there is not enough memory.
        """
        name = stream if step is None else f"{stream} {step}"
        if refill:
            name += f" refill {refill}"
        sampling = replace(sampling, seed=mix_seed(self.seed, name))
        lengths = self.lengths.setdefault(stream, ResponseLengths())
        expected = [lengths.expected(uid, sampling.max_tokens) for uid in prompts.uid]
        prompt_lengths = [len(tokens) for tokens in prompts.token_ids]
        shares = assign(prompt_lengths, expected, sampling.n, len(self.groups.layout.replicas))
        samples, stats = self._draw(prompts, sampling, shares[self.groups.replica])
        rollout = self._gather(prompts, sampling.n, shares, samples, stats)
        lengths.update(rollout.prompts.uid, rollout.response_lengths)
        return rollout

    def rest(self) -> None:
        """Free the engine's memory while the models train."""
        self.engine.sleep()

    def state_dict(self) -> dict[str, Any]:
        """What the sharing out of the next batches depends on."""
        return {stream: lengths.state_dict() for stream, lengths in self.lengths.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.lengths = {stream: ResponseLengths() for stream in state}
        for stream, lengths in self.lengths.items():
            lengths.load_state_dict(state[stream])

    def _draw(
        self, prompts: Prompts, sampling: SamplingParams, mine: Sequence[Share]
    ) -> tuple[list[Sample], EngineStats]:
        """This replica's samples; their prompt_index counts the prompts of the batch."""
        if not mine:
            return [], _IDLE
        share = prompts.select([part.prompt for part in mine])
        with _named_memory_error("generating"):
            samples = self.engine.generate(
                share.token_ids, share.uid, sampling, [part.samples for part in mine]
            )
        return [
            replace(s, prompt_index=mine[s.prompt_index].prompt) for s in samples
        ], self.engine.stats()

    def _gather(
        self,
        prompts: Prompts,
        n: int,
        shares: list[list[Share]],
        samples: list[Sample],
        stats: EngineStats,
    ) -> Rollout:
        """Merge the replicas' samples into one rollout in the order of the prompts, and take their
        statistics.
        """
        gathered = all_gather_ragged(_pack(samples, stats, n), self.groups.replicas)
        counts = [sum(len(part.samples) for part in share) for share in shares]
        parts = [_unpack(part, count) for part, count in zip(gathered, counts, strict=True)]
        all_stats, *columns = zip(*parts, strict=True)
        self.metrics = engine_metrics(all_stats)
        header, tokens, logprobs = map(torch.cat, columns)
        rows, lengths, stopped = header.unbind(dim=1)
        total = len(prompts) * n
        assert torch.equal(rows.sort().values, torch.arange(total)), (
            "the replicas drew other samples than they had to"
        )
        row_of = rows.repeat_interleave(lengths)
        position = torch.arange(len(tokens)) - (lengths.cumsum(0) - lengths).repeat_interleave(
            lengths
        )
        shape = (total, max(1, int(lengths.max())))
        response_ids = torch.zeros(shape, dtype=torch.int64)
        mask, rollout_logprobs = (
            torch.zeros(shape, dtype=torch.bool),
            torch.zeros(shape, dtype=torch.float32),
        )
        response_ids[row_of, position] = tokens.long()
        mask[row_of, position] = True
        rollout_logprobs[row_of, position] = logprobs
        if not torch.isfinite(rollout_logprobs).all():
            row = int((~torch.isfinite(rollout_logprobs)).any(dim=1).nonzero()[0])
            raise EngineError(
                f"the engine gave a token of prompt uid {prompts.uid[row // n]} the log-probability inf or nan; the "
                "policy's weights are probably not finite: look at actor/grad_norm of the steps before, lower "
                "actor.optim.lr or set actor.optim.skip_grad_norm"
            )
        return Rollout(
            prompts=prompts.repeat(n),
            sample_index=[row % n for row in range(total)],
            response_ids=response_ids,
            response_mask=mask,
            loss_mask=mask,
            rollout_logprobs=rollout_logprobs,
            versions=versions_of_one_policy(mask, self.engine.version),
            stopped=torch.zeros(total, dtype=torch.bool).index_put((rows,), stopped.bool()),
        )


def engine_metrics(stats: Sequence[EngineStats]) -> dict[str, float]:
    """What the replicas did, taken together.

    Args:
        stats: of each replica, those that had nothing to do included.

    Returns:
        `rollout/kv_cache_bytes` and `rollout/peak_kv_cache_bytes` of the rank that has most;
        `rollout/preemptions`; `rollout/prefix_hit_rate`, the share of prompt tokens that were not
        computed; `rollout/tokens_per_engine_step`, response tokens of one pass through the model;
        `rollout/imbalance`, the passes of the replica that has most over their mean.
    """
    steps, asked = sum(s.steps for s in stats), sum(s.prompt_tokens for s in stats)
    return {
        "rollout/kv_cache_bytes": max(s.cache_bytes for s in stats),
        "rollout/peak_kv_cache_bytes": max(s.peak_cache_bytes for s in stats),
        "rollout/preemptions": sum(s.preemptions for s in stats),
        "rollout/prefix_hit_rate": 1 - sum(s.computed_prompt_tokens for s in stats) / max(1, asked),
        "rollout/tokens_per_engine_step": sum(s.generated_tokens for s in stats) / max(1, steps),
        "rollout/imbalance": max(s.steps for s in stats) * len(stats) / max(1, steps),
    }


def mix_seed(seed: int, stream: str) -> int:
    """A seed that depends on the run's seed and the name of a stream of random numbers."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


@contextmanager
def _named_memory_error(phase: str) -> Iterator[None]:
    """Say which keys make the engine smaller where there is not enough memory for it."""
    try:
        yield
    except EngineError:
        raise
    except (MemoryError, RuntimeError) as error:
        numbers = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and not any(
            words in numbers.lower() for words in _NO_MEMORY
        ):
            raise
        raise EngineError(
            f"not enough memory while {phase}: {numbers}; lower rollout.kv_cache_mb (on a GPU "
            "rollout.gpu_memory_utilization), rollout.max_num_seqs or rollout.max_prefill_tokens"
        ) from error


def _pack(samples: Sequence[Sample], stats: EngineStats, n: int) -> Tensor:
    """Statistics and samples of a replica as bytes, uint8 [any]."""
    header = [
        (s.prompt_index * n + s.sample_index, len(s.token_ids), int(s.stopped)) for s in samples
    ]
    parts = (
        torch.tensor(astuple(stats), dtype=torch.int64),
        torch.tensor(header, dtype=torch.int64).view(-1),
        torch.tensor([token for s in samples for token in s.token_ids], dtype=torch.int32),
        torch.tensor([x for s in samples for x in s.logprobs], dtype=torch.float32),
    )
    return torch.cat([part.view(torch.uint8) for part in parts])


def _unpack(packed: Tensor, rows: int) -> tuple[EngineStats, Tensor, Tensor, Tensor]:
    """The inverse of `_pack`: statistics, header [rows, 3], tokens [tokens] and their log-probs
    [tokens].
    """
    longs, rest = (
        packed[: 8 * (_STATS + _HEADER * rows)].view(torch.int64),
        packed[8 * (_STATS + _HEADER * rows) :],
    )
    half = len(rest) // 2
    stats = EngineStats(*longs[:_STATS].tolist())
    return (
        stats,
        longs[_STATS:].view(rows, _HEADER),
        rest[:half].view(torch.int32),
        rest[half:].view(torch.float32),
    )
