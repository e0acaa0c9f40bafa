"""Generates a rollout with all replicas of the inference engine: hand over the weights, share out prompts, gather.

Every rank ends up with the whole rollout; what crosses the network for that is a few numbers a token. It does not know
rewards or losses.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mrlhf.batch import Prompts, Rollout, pad_responses
from mrlhf.inference.base import InferenceEngine, Sample, SamplingParams
from mrlhf.parallel.collectives import all_gather_ragged
from mrlhf.parallel.groups import EngineGroups
from mrlhf.parallel.microbatch import split_balanced
from mrlhf.reshard.execute import Resharder, ReshardStats

_SEED_BITS = 63


@dataclass
class Generator:
    """The inference engine as the trainer sees it: one thing that spans all ranks."""

    engine: InferenceEngine
    groups: EngineGroups
    resharder: Resharder
    seed: int

    def take_weights(self, version: int) -> ReshardStats:
        """Bring the policy's weights into the engine as `version`, and wake it.

        Returns:
            Bytes summed over all ranks; memory and seconds of the rank that has most of them.
        """
        self.engine.wake()
        stats = self.resharder.run()
        self.engine.commit(version)
        sums = torch.tensor([stats.bytes_moved, stats.bytes_had_to_move], dtype=torch.float64)
        peaks = torch.tensor([stats.peak_extra_bytes, stats.seconds], dtype=torch.float64)
        dist.all_reduce(sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        return ReshardStats(int(sums[0]), int(sums[1]), int(peaks[0]), float(peaks[1]))

    def generate(self, prompts: Prompts, sampling: SamplingParams, stream: str) -> Rollout:
        """Sample responses to `prompts`, the same on every rank.

        Args:
            prompts: the prompts of the global batch.
            sampling: how to sample; its seed is replaced.
            stream: names the use ("train 7", "validation"); under the same name, weights and run seed a prompt gets the
                same responses again, under another one it gets other random numbers.
        """
        sampling = replace(sampling, seed=mix_seed(self.seed, stream))
        shares = _shares(prompts, len(self.groups.layout.replicas))
        mine = shares[self.groups.replica]
        samples: list[Sample] = []
        if mine:
            share = prompts.select(mine)
            samples = self.engine.generate(share.token_ids, share.uid, sampling)
        return self._gather(prompts, sampling.n, mine, samples)

    def rest(self) -> None:
        """Free the engine's memory while the models train."""
        self.engine.sleep()

    def _gather(self, prompts: Prompts, n: int, mine: list[int], samples: list[Sample]) -> Rollout:
        """Merge the replicas' samples into one rollout in the order of the prompts."""
        rows = [mine[sample.prompt_index] * n + sample.sample_index for sample in samples]
        header = torch.tensor(
            [[row, len(s.token_ids), int(s.stopped)] for row, s in zip(rows, samples, strict=True)], dtype=torch.int64
        ).view(-1, 3)
        tokens = torch.tensor([token for s in samples for token in s.token_ids], dtype=torch.int64)
        logprobs = torch.tensor([x for s in samples for x in s.logprobs], dtype=torch.float32)
        gathered = [torch.cat(all_gather_ragged(part, self.groups.replicas)) for part in (header, tokens, logprobs)]
        lengths = gathered[0][:, 1].tolist()
        by_row = dict(
            zip(
                gathered[0][:, 0].tolist(),
                zip(gathered[1].split(lengths), gathered[2].split(lengths), gathered[0][:, 2].tolist(), strict=True),
                strict=True,
            )
        )
        ordered = [by_row[row] for row in range(len(prompts) * n)]
        response_ids, mask = pad_responses([ids.tolist() for ids, _, _ in ordered], torch.int64)
        rollout_logprobs, _ = pad_responses([values.tolist() for _, values, _ in ordered], torch.float32)
        return Rollout(
            prompts=prompts.repeat(n),
            sample_index=[row % n for row in range(len(ordered))],
            response_ids=response_ids,
            response_mask=mask,
            rollout_logprobs=rollout_logprobs,
            stopped=torch.tensor([stopped for _, _, stopped in ordered], dtype=torch.bool),
            version=self.engine.version,
        )


def mix_seed(seed: int, stream: str) -> int:
    """A seed that depends on the run's seed and the name of a stream of random numbers."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _shares(prompts: Prompts, replicas: int) -> list[list[int]]:
    """Prompt indices of each replica, balanced by prompt tokens; empty ones where prompts are fewer than replicas."""
    parts = min(replicas, len(prompts))
    shares = split_balanced([len(tokens) for tokens in prompts.token_ids], parts)
    return shares + [[] for _ in range(replicas - parts)]
