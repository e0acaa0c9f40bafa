"""The configurations of published models, and a directory in which plans find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config.json of each published model, under its name."""
    from tests.models.published import write_published  # with transformers, which few tests need

    root = tmp_path_factory.mktemp("published")
    write_published(root)
    return root


@pytest.fixture
def among_published(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the test's directory, in which the models and the shipped configurations are."""
    (tmp_path / "models").symlink_to(published)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
