"""How the roles that look at every response token cut a rollout. It knows no role and no loss."""

from __future__ import annotations

from mrlhf.batch import Rollout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.training.engine import ModelEngine


def cut_responses(
    engine: ModelEngine, rollout: Rollout, mini_batch_samples: int | None = None
) -> BatchCut:
    """Cut a rollout for the model of `engine`, selecting all response tokens.

    Args:
        engine: its layout and token budget decide.
        rollout: the global batch.
        mini_batch_samples: rows of one optimizer step; all rows where None.
    """
    return engine.cut(rollout.sequences(), rollout.prompt_lengths, "response", mini_batch_samples)
