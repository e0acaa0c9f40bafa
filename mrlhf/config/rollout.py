"""The section `rollout`: how responses are generated. It knows no engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mrlhf.config.fields import Count, CountOrZero, Positive, Section, Texts

UTILIZATION = 0.9  # default of rollout.gpu_memory_utilization


class RolloutSection(Section):
    """Generation."""

    engine: Literal["native", "vllm"] = Field(
        "native", description="inference engine; vllm needs the package"
    )
    tp: Count = Field(
        1, description="ranks that share one engine replica; divides actor.tp x actor.pp"
    )
    n: Count = Field(1, description="samples a prompt")
    temperature: Positive = Field(
        1.0, description="logits are divided by this, in the engine and in training"
    )
    top_k: int = Field(-1, description="sample from the k likeliest tokens; -1: off")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="sample from this much probability; 1: off"
    )
    max_num_seqs: Count = Field(256, description="sequences decoded at once in one replica")
    max_prefill_tokens: Count = Field(
        8192,
        description="prompt tokens computed in one step of one replica; longer prompts are computed in chunks",
    )
    stop: Texts = Field(
        default_factory=list, description="a response ends where its text contains one of these"
    )
    block_size: Count | None = Field(
        None,
        description="tokens of a block of the KV cache; null: 16 on a CPU, what the kernels need on a GPU",
    )
    kv_cache_mb: Count | None = Field(
        None,
        description="KV cache of one rank, MiB; null: up to half of the free memory, on cuda the next key's",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        UTILIZATION,
        description="share of a GPU's memory that is in use, everything counted, with the KV cache",
    )
    enforce_eager: bool = Field(False, description="capture no CUDA graphs")
    verify_reshard: bool = Field(False, description="compare checksums of every moved weight slice")
    reshard_bucket_mb: Count = Field(
        64, description="all transfer buffers of one rank while weights move, MiB"
    )
    dump_freq: CountOrZero = Field(
        0, description="write the rollouts as jsonl every so many steps; 0: never"
    )

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
