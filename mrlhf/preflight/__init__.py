"""Checks before a model is built: between keys, of inputs and models, and the dry run."""

from mrlhf.preflight.checks import check
from mrlhf.preflight.dry_run import check_policy, dry_run, preflight
from mrlhf.preflight.model_checks import check_models
from mrlhf.preflight.words import describe

__all__ = ["check", "check_models", "check_policy", "describe", "dry_run", "preflight"]
