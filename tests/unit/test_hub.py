"""Repositories of a hub: what is taken of them, from where, and what is said when that fails."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from huggingface_hub import constants

from mrlhf.config import PPOConfig, load_config
from mrlhf.data.hub import local_directory, local_files, repository_of
from mrlhf.errors import ConfigError, WeightError
from mrlhf.inputs.paths import with_local_inputs
from mrlhf.parallel.job import Launch, one_of_each_machine_first
from mrlhf.weights.stored import survey
from tests.hub_server import Hub, serving

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ 1 }}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "one.safetensors"}}).encode(),
    "one.safetensors": b"weights" * 1000,
    "consolidated.safetensors": b"the same weights",
    "pytorch_model.bin": b"the same weights",
    "model.gguf": b"the same weights",
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"the same weights",
}
SMALL = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with serving() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for module in ("utils._http", "file_download"):  # which wait before they ask again
            stand_in = SimpleNamespace(sleep=lambda _: None, time=time.time)
            monkeypatch.setattr(f"huggingface_hub.{module}.time", stand_in)
        yield served


def names_in(folder: str) -> set[str]:
    return {str(f.relative_to(folder)) for f in Path(folder).rglob("*") if f.is_file()}


def test_a_model_comes_once_and_without_what_no_run_reads(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/model", MODEL)
    small = local_directory("org/model", weights=False)
    assert names_in(small) == SMALL
    place = local_directory("org/model")
    assert place == small and place.endswith(f"/snapshots/{commit}")
    assert names_in(place) == {*SMALL, "one.safetensors"}
    assert repository_of(place) == ("org/model", commit)
    assert set(hub.gets.values()) == {1}

    asked = len(hub.asked)
    assert local_directory("org/model", from_cache=True) == place
    assert local_directory(f"org/model@{commit}") == place
    assert len(hub.asked) == asked
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert local_directory("org/model") == "org/model"
    for name in ("/org/model", "org/model/more", "./org", "model", "../model", "org/model:train"):
        assert local_directory(name) == name
    assert len(hub.asked) == asked


def test_each_of_several_teachers_comes_from_the_hub(hub: Hub) -> None:
    names = ("model", "math", "code")
    commits = {name: hub.add(f"org/{name}", MODEL) for name in names}
    each = [f"{{name: {name}, path: org/{name}, data_source: {name}}}" for name in names[1:]]
    keys = ["actor.path=org/model", "reward.terms=[{name: gsm8k}]", "data.train_files=a.jsonl"]
    keys += ["trainer={output_dir: out, total_steps: 1}", "data.max_prompt_length=4"]
    keys += ["data.max_response_length=4", f"teacher.several=[{', '.join(each)}]"]
    here, _, reasons = with_local_inputs(load_config(PPOConfig, None, keys), {})
    assert not reasons and here.teacher is not None
    for teacher in here.teacher.several:
        assert repository_of(teacher.path) == (f"org/{teacher.name}", commits[teacher.name])


def test_a_revision_is_taken_and_a_run_goes_on_with_its_commit(hub: Hub) -> None:
    old = hub.add("org/model", {"config.json": b"{}", "model.safetensors": b"old"})
    begun = local_directory("org/model")
    new = hub.add("org/model", {"config.json": b"{}", "model.safetensors": b"new"})
    assert local_directory("org/model", begun=begun).endswith(old)
    assert local_directory("org/model@main", begun=begun).endswith(new)
    assert local_directory("org/model").endswith(new)
    assert local_directory("org/model", begun="/elsewhere").endswith(new)
    hub.add("org/other", {"config.json": b"{}"})
    assert not local_directory("org/other", begun=begun).endswith(old)
    with pytest.raises(ConfigError, match="has no revision v7; name a branch, tag or commit"):
        local_directory("org/model@v7")
    with pytest.raises(ConfigError, match=f"has no revision {'0' * 40}; name"):
        local_directory("org/model", begun=begun.replace(old, "0" * 40))


def test_a_repository_without_safetensors_and_a_damaged_index(hub: Hub) -> None:
    index = "model.safetensors.index.json"
    hub.add("org/old", {"config.json": b"{}", "pytorch_model.bin": b"weights"})
    with pytest.raises(WeightError, match=r"models--org--old.* save an older .bin checkpoint anew"):
        survey(Path(local_directory("org/old")))
    for text in (b"[]", b"{", b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}'):
        hub.add("org/damaged", {"config.json": b"{}", index: text})
        with pytest.raises((ConfigError, WeightError), match=re.escape(index)):
            survey(Path(local_directory("org/damaged")))


def test_a_damaged_readme_of_a_dataset_is_as_none(hub: Hub) -> None:
    for text in (
        b"---\n{[\n---\n",
        b"---\n[]\n---\n",
        b"---\nconfigs: [a, {data_files: [b]}]\n---\n",
    ):
        hub.add("org/rows", {"README.md": text, "train.jsonl": b"{}"}, kind="datasets")
        (file,) = local_files("org/rows:train")
        assert file.endswith("/train.jsonl")


def test_the_other_ranks_of_a_machine_wait_for_the_first_however_long() -> None:
    store = dist.HashStore()
    seen: list[tuple[int, bool]] = []
    others_wait = threading.Barrier(3)

    def run(rank: int, local_rank: int) -> None:
        looks = 0

        def action(is_first: bool) -> int:
            if is_first:
                others_wait.wait()
            seen.append((rank, is_first))
            return rank

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks == 5 and local_rank:
                others_wait.wait()

        launch = Launch(rank, 3, local_rank)
        assert one_of_each_machine_first(store, launch, action, look) == rank

    threads = [threading.Thread(target=run, args=place) for place in ((0, 0), (1, 1), (2, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen[:2]) == [(0, True), (2, True)] and seen[2] == (1, False)


def test_every_refusal_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/gated", MODEL)
    hub.gated.add("models/org/gated")

    def refusal(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            local_directory(name)
        text = str(caught.value)
        assert text.startswith(f"{name} does not exist here, and ") and "\n" not in text
        return text

    assert "answer 404" in refusal("org/none") and hub.address in refusal("org/none")
    assert "set HF_TOKEN" in refusal("org/gated") and "licence" in refusal("org/gated")
    monkeypatch.setenv("HF_TOKEN", "good")
    assert names_in(local_directory("org/gated")) == {*SMALL, "one.safetensors"}

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    for words in ("revision/main", "tree/", "resolve/"):
        hub.add(f"org/silent{len(words)}", MODEL)
        hub.silent = {words}
        assert "was not downloaded" in refusal(f"org/silent{len(words)}")
    hub.silent = {"org/gated"}  # is in the cache
    assert names_in(local_directory("org/gated")) == {*SMALL, "one.safetensors"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert names_in(local_directory("org/gated")) == {*SMALL, "one.safetensors"}
    assert "HF_HUB_OFFLINE" in refusal("org/none")


def test_half_a_download_is_not_taken_for_a_whole_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/model", MODEL)
    hub.broken = {"one.safetensors": 99}
    with pytest.raises(ConfigError, match=r"was not downloaded.* start again, which goes on"):
        local_directory("org/model")
    with pytest.raises(ConfigError, match="is not whole in"):
        local_directory("org/model", from_cache=True)
    hub.broken = {"one.safetensors": 1}
    place = local_directory("org/model")
    assert (Path(place) / "one.safetensors").read_bytes() == MODEL["one.safetensors"]


def test_the_files_of_a_split(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = """---
configs:
- config_name: talks
  data_files:
  - {split: train, path: talks/part-*.jsonl}
  - {split: test, path: [talks/rest.jsonl]}
---
# Rows
"""
    shards = {f"data/train-0000{n}-of-00002.parquet": bytes([n]) * 9 for n in range(2)}
    rest = {"data/train_sft-00000-of-00001.parquet": b"a", "data/test.csv": b"", "README.md": b"#"}
    talks = {f"talks/{name}.jsonl": b"{}" for name in ("part-1", "part-2", "rest", "other")}
    two = {"main/train.jsonl": b"1", "socratic/train.jsonl": b"2", "socratic/train/0.parquet": b""}
    for name, files in {
        "org/shards": {**shards, **rest},
        "org/half": dict([*shards.items()][:1]),
        "org/talks": {"README.md": card.encode(), **talks},
        "org/two": two,
    }.items():
        hub.add(name, files, kind="datasets")

    def found(name: str, **more: bool) -> list[str]:
        return [file.partition("/snapshots/")[2][41:] for file in local_files(name, **more)]

    assert found("org/shards:train") == [*shards]
    assert found("org/shards:train", from_cache=True) == [*shards]
    assert found("org/shards:train_sft") == ["data/train_sft-00000-of-00001.parquet"]
    assert set(hub.gets) == {*shards, "data/train_sft-00000-of-00001.parquet", "README.md"}
    assert found("org/talks:train") == ["talks/part-1.jsonl", "talks/part-2.jsonl"]
    assert found("org/talks:talks/test") == ["talks/rest.jsonl"]
    assert found("org/talks:talks/other.jsonl") == ["talks/other.jsonl"]
    assert found("org/two:main/train") == ["main/train.jsonl"]
    for name, words in {
        "org/shards:test": "names 0 files",
        "org/shards:none": r"data/train-00000-of-00002\.parquet",
        "org/half:train": "names 1 files",
        "org/two:train": r"main/\*\.jsonl, socratic/",
        "org/two:socratic/train": "2 files",
        "org/missing:train": "answer 404",
    }.items():
        with pytest.raises(ConfigError, match=words) as caught:
            local_files(name)
        assert str(caught.value).startswith(name) and "\n" not in str(caught.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert found("org/shards:train") == [*shards]
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "two:train").touch()
    assert local_files("org/two:train") == ["org/two:train"]
    assert local_files("train.jsonl") == ["train.jsonl"]
