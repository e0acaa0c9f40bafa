"""What is written down of a rollout: which samples, in which columns, as pyarrow reads them."""

import json
from dataclasses import replace

import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mrlhf.batch import Episode, Experience, Prompts
from mrlhf.config.rollout import RolloutSection
from mrlhf.data.rollouts import ScoredResponse, encode_rollouts
from mrlhf.data.rows import read_rows, write_rows
from mrlhf.data.sample_table import read_samples
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError
from mrlhf.records import ExpertRecord
from mrlhf.rollout.scoring import Scores
from mrlhf.trainers.ppo.dump import Dump, chosen_rows, save_batch, write_dump, write_validation
from tests.rollouts import make_rollout, with_holes


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer of a few tokens, in which é takes two."""
    vocabulary = {letter: i for i, letter in enumerate(["</s>", "a", "b", "Ġc", "Ã", "©"])}
    backend = Backend(models.BPE(vocabulary, [], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    return Tokenizer(fast)


def test_pieces_are_the_texts_of_tokens_and_keep_torn_characters_whole(tokenizer):
    assert tokenizer.pieces([[1, 3, 0], [4, 5, 2], [], [4]]) == [
        ["a", " c", "</s>"],
        ["é", "", "b"],
        [],
        ["\ufffd"],
    ]
    # Each character stands at its own first token, behind torn ones and broken bytes too.
    assert tokenizer.pieces([[4, 5, 4, 5, 1], [4, 5, 4], [5, 4, 5, 1, 5, 5]]) == [
        ["é", "", "é", "", "a"],
        ["é", "", "\ufffd"],
        ["\ufffdé", "", "", "a", "\ufffd\ufffd", ""],
    ]


def rollout_of(uids, samples=2):
    """`samples` responses of one to three tokens to each prompt."""
    rows = len(uids) * samples
    prompts = Prompts(
        token_ids=[[1, uid % 6] for uid in uids],
        uid=list(uids),
        text=[f"prompt {uid}" for uid in uids],
        data_source=["x"] * len(uids),
        ground_truth=["1"] * len(uids),
        extra_info=[{}] * len(uids),
    ).repeat(samples)
    lengths = torch.arange(rows) % 3 + 1
    mask = torch.arange(3)[None] < lengths[:, None]

    return make_rollout(
        prompts=prompts,
        sample_index=list(range(samples)) * len(uids),
        response_ids=torch.tensor([[1, 3, 0]] * rows, dtype=torch.int32) * mask,
        response_mask=mask,
        rollout_logprobs=-torch.rand(rows, 3) * mask,
        stopped=lengths == 3,
    )


def dump_of(rollout):
    shape = rollout.response_ids.shape
    rows = len(rollout)
    experience = Experience(
        rollout=rollout,
        scores=torch.arange(rows).float(),
        loss_mask=rollout.loss_mask,
        old_logprobs=torch.full(shape, -1.5),
        ref_logprobs=None,
        token_rewards=torch.zeros(shape),
        values=None,
        advantages=torch.arange(rows)[:, None].float().expand(shape),
        returns=torch.zeros(shape),
    )
    terms = {"exact": [0.5] * (rows - 1) + [float("nan")]}

    return Dump(4, experience, Scores(experience.scores, terms), entropy=torch.full(shape, 0.25))


def test_a_parquet_file_has_a_row_for_each_sample_and_lists_of_its_tokens(tmp_path, tokenizer):
    rollout = with_holes(rollout_of([7, 9]), torch.tensor([[False, True, False]] * 4))
    write_dump(tmp_path, dump_of(rollout), RolloutSection(dump_freq=1), tokenizer)

    file = tmp_path / "rollouts" / "step_000004.parquet"
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert rows[1] == {
        "step": 4,
        "uid": 7,
        "sample": 1,
        "data_source": "x",
        "prompt": "prompt 7",
        "response": "a c",
        "ground_truth": "1",
        "finish_reason": "length",
        "length": 2,
        "score": 1.0,
        "terms": [("exact", 0.5)],
        "prompt_ids": [1, 1],
        "response_tokens": ["a", " c"],
        "response_ids": [1, 3],
        "loss_mask": [True, False],
        "advantage": [1.0, 1.0],
        "return": [0.0, 0.0],
        "reward": [0.0, 0.0],
        "old_logprob": [-1.5, -1.5],
        "rollout_logprob": [rollout.rollout_logprobs[1, 0].item(), 0.0],
        "entropy": [0.25, 0.25],
    }
    assert [row["length"] for row in rows] == [1, 2, 3, 1]
    assert [row["finish_reason"] for row in rows] == ["length", "length", "stop", "length"]
    assert rows[3]["terms"] == []

    table = read_samples(file)
    assert table.begins == [0, 1, 3, 6, 7]
    assert table.tokens["advantage"].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0]


def test_a_dump_is_what_a_critic_learns_from(tmp_path, tokenizer):
    rollout = with_holes(rollout_of([7, 9]), torch.tensor([[False, True, False]] * 4))
    dump = dump_of(rollout)
    rewards = torch.arange(12.0).view(4, 3) / 8
    dump = replace(dump, experience=replace(dump.experience, token_rewards=rewards))
    write_dump(tmp_path, dump, RolloutSection(dump_freq=1), tokenizer)
    rows = read_rows([tmp_path / "rollouts" / "step_000004.parquet"])
    read = encode_rollouts(rows, tokenizer, max_length=5)
    # What a token earns that does not count goes to the last one before it that does.
    assert read[2] == ScoredResponse([1, 3, 1, 3, 0], [True, False, True], [1.625, 0.0, 1.0])
    assert [len(response.drew) for response in read] == [1, 2, 3, 1]

    # From texts: the score belongs to the last token, which is eos unless the response was cut.
    dump = dump_of(rollout_of([7, 9]))
    write_dump(tmp_path, dump, RolloutSection(dump_freq=1, dump_format="jsonl"), tokenizer)
    lines = [*(tmp_path / "rollouts" / "step_000004.jsonl").read_text().splitlines()]
    texts = [json.loads(line) | {"prompt": "ab", "response": "ab"} for line in lines[1:3]]
    texts.append({"prompt": "ab", "response": "", "token_ids": [3, 0], "reward": 2})
    path = tmp_path / "texts.jsonl"
    write_rows(path, texts)
    assert encode_rollouts(read_rows([path]), tokenizer, max_length=5) == [
        ScoredResponse([1, 2, 1, 2], [True] * 2, [0.0, 1.0]),
        ScoredResponse([1, 2, 1, 2, 0], [True] * 3, [0.0, 0.0, 2.0]),
        ScoredResponse([1, 2, 3, 0], [True] * 2, [0.0, 2.0]),
    ]
    assert len(encode_rollouts(read_rows([path]), tokenizer, max_length=4, overlong="drop")) == 2

    write_rows(
        path, [{"prompt_ids": [1], "response_ids": [2], "reward": [0], "loss_mask": [False]}]
    )
    with pytest.raises(DataError, match=r"no row of .*texts.jsonl fits .* and has a token that a"):
        encode_rollouts(read_rows([path]), tokenizer, max_length=4)
    for changed, words in (
        ({}, "5 tokens, more than data.max_length 4"),
        ({"score": None}, "'score' is null"),
        ({"score": "1"}, "no finite number: '1'"),
        ({"score": float("nan")}, "no finite number: nan"),
        ({"token_ids": [6]}, "token 6 is not in the tokenizer, whose ids go up to 5"),
        ({"token_ids": []}, "no token, or not a reward for each"),
        ({"token_ids": ["6"]}, r"token_ids is no list of whole numbers: \['6'\]"),
        ({"loss_mask": 1}, "loss_mask is no list of whole numbers: 1"),
        ({"turns": [1, 3]}, "several turns or contexts"),
    ):
        write_rows(path, [texts[1] | changed])
        with pytest.raises(DataError, match=f"texts.jsonl:1: .*{words}"):
            encode_rollouts(read_rows([path]), tokenizer, max_length=4)


def with_episodes(rollout):
    """The same rollout as episodes: a token between two turns was told, and row 3 has failed."""
    told = torch.tensor([[False, True, False]] * len(rollout))
    told[3] = True
    plain = Episode(
        turn_begins=[0, 2],
        turns=[1, 3],
        tools={"search": 2, "error": 1},
        errors=1,
        score=1.0,
        further={"guesses": 2.0},
        turn_rewards=[0.5],
        waited_s=0.25,
        context_begins=[1],
        context_prompts=[1],
        context_roles=["asks", "answers"],
    )
    failed = replace(plain, turns=[1], turn_begins=[0], tools={}, failure="reset raised: no")
    drawn = with_holes(rollout, told)
    versions = torch.where(drawn.loss_mask, torch.tensor([4, 0, 5]), drawn.versions)

    return replace(drawn, versions=versions.int(), episodes=[plain, plain, plain, failed])


def test_episodes_are_written_down_with_their_turns_tools_and_versions(tmp_path, tokenizer):
    dump = dump_of(with_episodes(rollout_of([7, 9])))
    write_dump(tmp_path, dump, RolloutSection(dump_freq=1), tokenizer)

    file = tmp_path / "rollouts" / "step_000004.parquet"
    rows = pyarrow.parquet.read_table(file).to_pylist()
    names = ["turn_begins", "turns", "turn_rewards", "tools", "errors", "failure", "waited_s"]
    names += ["context_begins", "context_prompts", "context_roles"]
    assert {name: rows[2][name] for name in ("finish_reason", "version", "loss_mask", *names)} == {
        "finish_reason": "stop",
        "version": [4, -1, 5],
        "loss_mask": [True, False, True],
        "turn_begins": [0, 2],
        "turns": [1, 3],
        "turn_rewards": [0.5],
        "tools": [("search", 2), ("error", 1)],
        "errors": 1,
        "failure": "",
        "waited_s": 0.25,
        "context_begins": [1],
        "context_prompts": [1],
        "context_roles": ["asks", "answers"],
    }
    assert rows[3]["finish_reason"] == "failure" and rows[3]["failure"] == "reset raised: no"
    assert rows[3]["tools"] == [] and rows[3]["version"] == [-1]

    table = read_samples(file)
    assert table.has_episodes and table.texts["turns"] == [[1, 3]] * 3 + [[1]]

    section = RolloutSection(dump_freq=1, dump_format="jsonl")
    write_dump(tmp_path, dump, section, tokenizer)
    line = (tmp_path / "rollouts" / "step_000004.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["tools"] == {"search": 2, "error": 1}


def test_versions_are_written_down_where_they_differ(tmp_path, tokenizer):
    rollout = rollout_of([7, 9])
    versions = rollout.versions + (torch.arange(4)[:, None] == 2) * rollout.response_mask
    dump = dump_of(replace(rollout, versions=versions.int()))
    write_dump(tmp_path, dump, RolloutSection(dump_freq=1), tokenizer)
    table = read_samples(tmp_path / "rollouts" / "step_000004.parquet")
    assert table.tokens["version"].tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert not table.has_episodes


def test_jsonl_has_texts_and_scores(tmp_path, tokenizer):
    section = RolloutSection(dump_freq=1, dump_format="jsonl", dump_samples=2)
    write_dump(tmp_path, dump_of(rollout_of([7, 9])), section, tokenizer)
    lines = (tmp_path / "rollouts" / "step_000004.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["response"] == "a"


def test_the_first_answers_of_a_validation_are_written_down(tmp_path, tokenizer):
    """With the rewards of turns in their scores, as validation counts them."""
    rollout = rollout_of([7, 9])
    scores = dump_of(rollout).scores
    write_validation(tmp_path, 20, rollout, scores, 3, tokenizer)
    (file,) = (tmp_path / "validation").iterdir()
    assert file.name == "step_000020.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["prompt 7", "prompt 7", "prompt 9"]
    turns = rollout.with_turn_rewards(scores.total).tolist()
    assert [row["score"] for row in rows] == turns[:3]
    assert rows[0]["response"] == "a" and rows[0]["terms"] == {"exact": 0.5}

    write_validation(tmp_path, 0, rollout, scores, 99, tokenizer)
    assert len((tmp_path / "validation/step_000000.jsonl").read_text().splitlines()) == 4


def test_the_same_prompts_are_chosen_whenever_they_come():
    one = rollout_of(range(40), samples=4)
    other = rollout_of(range(39, -1, -2), samples=4)

    def uids(rollout, most):
        rows = chosen_rows(rollout, most)
        assert rows == sorted(rows) and len(rows) % 4 == 0
        return {rollout.prompts.uid[row] for row in rows}

    chosen = uids(one, 83)
    assert len(chosen) == 20
    odd = {uid for uid in chosen if uid % 2}
    assert odd and odd <= uids(other, 83 - 12)


def test_all_rows_or_a_part_of_one_prompt():
    rollout = rollout_of([1, 2], samples=4)
    assert chosen_rows(rollout, None) == chosen_rows(rollout, 8) == list(range(8))
    assert len(chosen_rows(rollout, 3)) == 3


def test_other_files_are_refused_in_one_line(tmp_path):
    file = tmp_path / "step_000001.parquet"
    file.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="not a readable parquet file") as caught:
        read_samples(file)
    assert "\n" not in str(caught.value)

    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), file)
    with pytest.raises(DataError, match="it has no column 'data_source'"):
        read_samples(file)


def test_a_saved_batch_is_read_without_our_classes_and_has_both_records_of_experts(tmp_path):
    experience = dump_of(rollout_of([3, 4])).experience
    counts = torch.ones(4, dtype=torch.int64)
    engine, own = (
        ExpertRecord(torch.full((4, 1, 2), expert, dtype=torch.uint8), torch.arange(4), counts)
        for expert in (5, 6)
    )
    rollout = replace(experience.rollout, experts=engine)
    save_batch(tmp_path / "batch.pt", replace(experience, rollout=rollout, experts=own))

    batch = torch.load(tmp_path / "batch.pt", weights_only=True)
    assert batch["engine_experts"]["chosen"].unique().tolist() == [5]
    assert batch["experts"]["chosen"].unique().tolist() == [6]

    save_batch(tmp_path / "dense.pt", experience)
    batch = torch.load(tmp_path / "dense.pt", weights_only=True)
    assert batch["engine_experts"] is None and batch["experts"] is None

    save_batch(tmp_path / "turns.pt", dump_of(with_episodes(rollout_of([3, 4]))).experience)
    batch = torch.load(tmp_path / "turns.pt", weights_only=True)
    assert batch["episodes"][3]["failure"] == "reset raised: no"
