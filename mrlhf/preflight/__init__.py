"""What is found out before a model is built: cross-checks, batch arithmetic, the dry run."""

from mrlhf.preflight.checks import check
from mrlhf.preflight.dry_run import describe, dry_run, preflight
from mrlhf.preflight.model_checks import check_models, check_vocabulary

__all__ = [
    "check",
    "check_models",
    "check_vocabulary",
    "describe",
    "dry_run",
    "preflight",
]
