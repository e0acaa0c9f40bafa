"""A directory in which plans find models and configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the configurations of published models, and those that are shipped."""
    from tests.models.published import write_published  # with transformers, which few tests need

    root = tmp_path_factory.mktemp("published")
    write_published(root / "models")
    (root / "configs").symlink_to(ROOT / "configs")
    return root


@pytest.fixture
def among_published(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in that directory."""
    monkeypatch.chdir(published)
