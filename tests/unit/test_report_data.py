"""What the page of the report gets: runs as their directories tell them, samples in blocks,
and text that is safe.
"""

import base64
import json
import math
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from mrlhf.data.sample_table import SampleTable, read_samples, write_samples
from mrlhf.errors import DataError
from mrlhf.report.run_files import differing_keys, read_run
from mrlhf.report.samples import pack_samples
from mrlhf.report.write import write_report
from tests.e2e.programs import run_commands, run_program
from tests.pages import ROOT, commands_of
from tools.report_run import RunSize, write_run

SIZE = RunSize(steps=6, samples=4, tokens=20, ranks=2)
BREAKS_OUT = "</script><script>document.title = 'broken'</script><!--"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report") / "run"
    write_run(directory, SIZE, first_response=BREAKS_OUT)
    return directory


def unpacked(block):
    return zlib.decompress(base64.b64decode(block))


def opened(packed, index):
    """A sample of the pack: what its JSON says, and the numbers of its tokens."""
    block = packed.token_blocks[packed.columns["block"][index]]
    content = unpacked(block[packed.columns["begin"][index] : packed.columns["end"][index]])
    head, _, planes = content.partition(b"\n")
    sample = json.loads(head)

    count = len(sample["tokens"])
    bytes_ = np.frombuffer(planes, np.uint8).reshape(len(sample["units"]), 2, count)
    numbers = {}
    for i, (name, unit) in enumerate(sample["units"].items()):
        halves = np.stack([bytes_[i, 1], bytes_[i, 0]], axis=1).copy().view("<f2")[:, 0]
        numbers[name] = halves.astype(np.float64) * unit
    return sample, numbers


def test_a_packed_sample_has_its_tokens_and_their_numbers(run):
    files = read_run(run)
    packed = pack_samples(files.dumps, most=1000)
    assert len(packed.columns["step"]) == 24 and packed.left_out == 0
    assert packed.columns["step"][:5] == [1, 1, 1, 1, 2]

    table = read_samples(files.dumps[2])
    where = slice(table.begins[1], table.begins[2])
    sample, numbers = opened(packed, 5)
    assert sample["prompt"] == table.texts["prompt"][1]
    assert sample["tokens"] == table.texts["response_tokens"][1]
    assert sample["ids"] == table.tokens["response_ids"][where].tolist()
    assert sample["terms"] == {"exact_match": table.texts["score"][1]}

    tokens = {name: column[where] for name, column in table.tokens.items()}
    old = tokens["old_logprob"]
    wanted = {
        "advantage": tokens["advantage"],
        "reward": tokens["reward"],
        "KL to reference": old - tokens["ref_logprob"],
        "ratio after update": np.exp(tokens["new_logprob"] - old),
        "trainer - engine": old - tokens["rollout_logprob"],
        "value": tokens["value"],
        "entropy": tokens["entropy"],
        "log-probability": old,
        "loss mask": tokens["loss_mask"].astype(float),
    }
    assert numbers.keys() == wanted.keys()
    for name, column in wanted.items():
        # float16 has eleven bits, and below 2^-14 of the unit it has a fixed step
        largest = float(abs(column).max())
        assert numbers[name] == pytest.approx(column, rel=2**-11, abs=2**-23 * largest), name


def test_numbers_that_were_not_measured_and_numbers_that_are_not_finite(run, tmp_path):
    table = read_samples(read_run(run).dumps[1])
    tokens = dict(table.tokens)
    for name in ("value", "entropy", "new_logprob", "ref_logprob"):
        del tokens[name]
    tokens["advantage"] = tokens["advantage"].copy()
    tokens["advantage"][:2] = [math.nan, math.inf]
    tokens["placed"] = np.zeros_like(tokens["reward"])
    tokens["placed"][1] = -0.5
    file = tmp_path / "step_000001.parquet"
    write_samples(file, SampleTable(table.texts, tokens))

    packed = pack_samples({1: file}, most=10)
    assert packed.quantities == [
        "advantage", "reward", "placed by reward terms", "trainer - engine", "log-probability",
        "loss mask",
    ]  # fmt: skip
    placed = opened(packed, 0)[1]["placed by reward terms"]
    assert placed[:3].tolist() == [0.0, -0.5, 0.0]
    advantage = opened(packed, 0)[1]["advantage"]
    assert math.isnan(advantage[0]) and advantage[1] == math.inf
    assert np.isfinite(advantage[2:]).all()


def test_episodes_are_packed_with_their_turns_and_versions(run, tmp_path):
    write_run(tmp_path / "run", replace(SIZE, has_episodes=True))
    files = read_run(tmp_path / "run")
    packed = pack_samples(files.dumps, most=1000)
    assert packed.columns["turns"] == [2, 2, 2, 1] * 6
    assert packed.columns["errors"] == [0, 0, 0, 2] * 6

    sample, numbers = opened(packed, 5)
    length = len(sample["tokens"])
    first, second = length // 3, length // 2
    assert sample["episode"] == {
        "turn_begins": [0, second],
        "turns": [first, length],
        "turn_rewards": [0.25],
        "tools": {"search": 2, "error": 1},
        "errors": 0,
        "failure": "",
        "waited_s": 0.5,
        "context_begins": [],
        "context_prompts": [],
        "context_roles": [],
    }
    assert sample["versions"] == [1] * first + [-1] * (second - first) + [2] * (length - second)
    is_told = np.array(sample["versions"]) == -1
    assert np.array_equal(np.isnan(numbers["trainer - engine"]), is_told)

    # A dump of before there were episodes lacks all of it.
    dumps = {1: read_run(run).dumps[1], 2: files.dumps[2]}
    mixed = pack_samples(dumps, most=1000)
    assert mixed.columns["turns"] == [None] * 4 + [2, 2, 2, 1]
    assert opened(mixed, 0)[0].keys().isdisjoint({"episode", "versions"})


def test_room_is_shared_equally_and_the_last_step_stays(run):
    dumps = read_run(run).dumps
    packed = pack_samples(dumps, most=12)
    assert packed.columns["step"] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert packed.left_out == 12

    few = pack_samples(dumps, most=3)
    assert few.columns["step"] == [2, 4, 6]


def test_texts_can_be_searched_in_blocks(run):
    packed = pack_samples(read_run(run).dumps, most=1000)
    (block,) = packed.text_blocks
    texts = json.loads(unpacked(block))
    assert len(texts) == 24
    assert texts[0][0].endswith(BREAKS_OUT) and len(texts[0]) == 2


def test_a_run_is_read_as_its_directory_tells_it(run):
    files = read_run(run)
    assert files.config["actor.optim.lr"] == 1e-5
    assert list(files.dumps) == [1, 2, 3, 4, 5, 6]
    assert files.processes[1]["device"] == "a processor"
    assert [span[0] for span in files.phases[3][1]][:2] == ["step", "reshard"]
    metrics = files.metrics()
    assert metrics["critic/score/mean"][0] is None and metrics["val/task/acc@1"][0] is not None


def test_lanes_of_an_earlier_start_with_more_ranks_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "timeline").mkdir()

    def line(step, begin):
        return json.dumps({"step": step, "begin": begin, "spans": [["gen", 0.0, 1.0, 0.5]]})

    for rank in range(4):
        lines = [json.dumps({"process": {"rank": rank, "ranks": 4}})]
        lines += [line(step, 10.0 * step) for step in (1, 2, 3)]
        if rank < 2:
            lines += [json.dumps({"process": {"rank": rank, "ranks": 2}}), line(2, 100.0 + rank)]
        lines.append('{"step": 4, "beg')  # the process ended as it wrote
        (tmp_path / "timeline" / f"rank_{rank}.jsonl").write_text("\n".join(lines))

    files = read_run(tmp_path)
    assert {step: sorted(lanes) for step, lanes in files.phases.items()} == {
        1: [0, 1, 2, 3],
        2: [0, 1],
    }
    assert files.phases[2] == {0: [["gen", 0.0, 1.0, 0.5]], 1: [["gen", 1.0, 1.0, 0.5]]}
    assert sorted(files.processes) == [0, 1]


def test_the_keys_in_which_runs_differ(run, tmp_path):
    write_run(tmp_path / "other", SIZE, learning_rate=3e-5)
    runs = [read_run(run), read_run(tmp_path / "other")]
    assert differing_keys(runs) == ["actor.optim.lr"]
    assert differing_keys(runs[:1]) == []


class _Scripts(HTMLParser):
    """The script elements of a page, by id and type, and all addresses."""

    def __init__(self):
        super().__init__()
        self.scripts = []
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "script":
            self.scripts.append((attributes.get("type"), attributes.get("id")))
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_no_text_ends_an_element(run, tmp_path):
    file = tmp_path / "report.html"
    size = write_report([run], file, most_samples=100)
    text = file.read_text(encoding="utf-8")
    assert size == file.stat().st_size

    page = _Scripts()
    page.feed(text)
    blocks = [f"tokens-0-{i}" for i in range(6)] + ["texts-0-0"]
    assert page.scripts == [
        ("application/json", "report"),
        (None, None),
        ("application/json", "phases-0"),
        *(("application/octet-stream", name) for name in blocks),
    ]
    assert page.addresses == []
    assert BREAKS_OUT not in text
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_a_metric_with_a_tag_in_its_name_stays_text(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, BREAKS_OUT: 1.0}) + "\n")
    write_report([tmp_path], tmp_path / "report.html", most_samples=1)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert BREAKS_OUT not in text and "\\u003c/script>\\u003cscript>" in text


def test_a_directory_without_a_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl; give the trainer\.output_dir"):
        write_report([tmp_path], tmp_path / "report.html", most_samples=1)


def test_the_tool_says_which_file_to_open_and_what_is_missing(run, tmp_path):
    done = run_program(["tools/report.py", str(run), "--out", str(tmp_path / "a.html")])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        rf"report: {tmp_path}/a\.html \(\d\.\d MB\); open it in a browser\n", done.stdout
    )
    assert (tmp_path / "a.html").is_file()

    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "runs").mkdir()
    for name in ("one", "two"):
        (tmp_path / "runs" / name).symlink_to(run)
    done = run_commands(commands_of("docs/report.md", "compared"), cwd=tmp_path)
    assert done.stdout.startswith("report: compared.html ("), done.stderr

    done = run_program(["tools/report.py", str(tmp_path)])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"error: {tmp_path} holds no metrics.jsonl")
