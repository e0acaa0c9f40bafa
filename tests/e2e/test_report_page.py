"""The report in a real browser: Debian's Chromium without a window, driven by playwright."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrlhf.report.write import write_report
from tools.report_run import RunSize, write_run

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium; apt-get install chromium brings it"
)

SIZE = RunSize(steps=30, samples=8, tokens=40, ranks=4)
BREAKS_OUT = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of reports: of one run, of two runs that differ in a key, of a run with episodes of
    several turns, and of a run without beside it.
    """
    root = tmp_path_factory.mktemp("reports")
    slow = root / "slow"
    fast = root / "fast"
    write_run(slow, SIZE, first_response=BREAKS_OUT)
    write_run(fast, SIZE, learning_rate=5e-5, seed=2)
    write_run(root / "turns", replace(SIZE, steps=3, has_episodes=True))
    write_report([root / "turns"], root / "turns.html", most_samples=1000)
    write_report([slow, root / "turns"], root / "mixed.html", most_samples=1000)
    _write_validations(slow, {0: 11, 10: 12, 30: 13, 99: 14})  # the run has 30 steps
    write_report([slow], root / "one.html", most_samples=1000)
    write_report([slow, fast], root / "two.html", most_samples=1000)
    names = ("one", "two", "turns", "mixed")
    return {name: (root / f"{name}.html").as_uri() for name in names}


def _write_validations(run: Path, answers: dict[int, int]) -> None:
    """Held-out answers to three chats, of the steps in `answers`."""
    (run / "validation").mkdir()
    for step, answer in answers.items():
        rows = []
        for question in ("What is\n1 < 2?", "What is 3?", BREAKS_OUT):
            prompt = f"<|system|>\nBe short.<|end|>\n<|user|>\n{question}<|end|>\n<|assistant|>\n"
            row = {"prompt": prompt, "response": f"{answer}", "stopped": answer > 11, "score": 0.25}
            rows.append(json.dumps(row) + "\n")
        (run / "validation" / f"step_{step:06d}.jsonl").write_text("".join(rows))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of 1,280 pixels, on which no script may fail and nothing may be loaded."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    yield from _watched(opened)


def _watched(page: Any) -> Iterator[Any]:
    problems: list[str] = []
    page.set_default_timeout(600_000)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("console", lambda line: line.type == "error" and problems.append(line.text))
    page.on("request", lambda r: r.url.startswith("file:") or problems.append(f"loads {r.url}"))
    yield page
    page.close()
    assert not problems


def _open(page: Any, address: str, tab: str) -> None:
    page.goto(address)
    page.get_by_role("tab", name=tab).click()


def _count(page: Any) -> str:
    return str(page.locator("#count").inner_text())


def _wait_for_texts(page: Any) -> None:
    page.wait_for_function("() => !document.querySelector('#count').textContent.includes('unpack')")


def test_the_first_view_says_whether_the_run_learned(page: Any, reports: dict[str, str]) -> None:
    page.goto(reports["one"])
    assert page.title().endswith("slow")
    # 400 held-out prompts: the standard error of 0.7681 is 0.0211.
    assert page.locator(".verdict").inner_text() == (
        "Held-out accuracy (validation, sampled) 0.16 → 0.7681 ± 0.021 after 30 steps. "
        "Next: clip_fraction at step 3: change actor.optim.lr."
    )
    chips = page.locator(".chip").all_inner_texts()
    assert "clipping: look (step 3)" in chips and "KL: ok" in chips and len(chips) == 9
    assert "held out: ok" in chips
    assert "0.62 of the tokens" in page.locator(".chip.look").get_attribute("title")

    shown = page.locator(".card:visible figcaption")
    assert shown.all_inner_texts() == [
        *("Reward", "Held-out accuracy (validation, greedy)"),
        "Held-out accuracy (validation, sampled)",
        *("KL to the reference", "KL of the update", "Entropy"),
    ]
    page.wait_for_selector(".card canvas")
    page.get_by_text("more curves").click()
    page.locator("details .card canvas").first.wait_for()  # drawn a moment after the click
    titles = shown.all_inner_texts()
    for title in ("Response length", "Clip fraction", "Engine against trainer"):
        assert title in titles
    text = page.locator("main").inner_text()
    assert "a processor" in text and "actor.optim.lr" in text
    assert "updating the policy" in text and "update_actor" not in text
    assert "clip_fraction" in text and "0.62 of the tokens are clipped" in text
    assert not re.search(r"^step\t\d", text, re.MULTILINE)  # the sum of the phases
    assert re.search(r"^generating\t[\d.]+\t\d+ %", text, re.MULTILINE)


def test_answers_before_and_after_stand_first(page: Any, reports: dict[str, str]) -> None:
    page.goto(reports["one"])
    table = page.locator("h2", has_text="before and after").locator("+ div")
    rows = [row.locator("th, td").all_inner_texts() for row in table.locator("tr").all()]
    assert rows == [
        ["prompt", "step 0", "step 30"],
        ["What is 1 < 2?", "11 (cut off) 0.25", "13 0.25"],
        ["What is 3?", "11 (cut off) 0.25", "13 0.25"],
        [BREAKS_OUT, "11 (cut off) 0.25", "13 0.25"],
    ]
    box = table.bounding_box()
    assert box is not None and box["y"] + box["height"] < page.viewport_size["height"]
    assert table.locator("td span.faint").count() == 6

    page.goto(reports["two"])  # of the other run no validations are written down
    assert page.locator("h2", has_text="before and after").count() == 1


def test_what_to_do_next_follows_the_curve(page: Any, reports: dict[str, str]) -> None:
    page.goto(reports["one"])
    name = "val_sampled/task/acc@1"
    for curve, words in (
        ("(i) => i", "still getting better"),
        ("(i) => Math.min(i, 8)", "levelled off"),
        ("(i) => 10 - Math.abs(10 - i)", "got worse towards the end"),
    ):
        told = page.evaluate(
            f"""() => {{
              const metrics = {{ "{name}": Array.from({{ length: 21 }}, (_, i) => ({curve})(i)) }};
              return advice({{ alarms: [], metrics }}, {{ name: "{name}" }});
            }}"""
        )
        assert words in told


def _held_out(name: str, values: dict[int, float], **summary: Any) -> str:
    """A run of 40 steps in JavaScript: a reward that rises, and a held-out metric at its steps."""
    held_out = [values.get(step) for step in range(41)]
    rewards = [None, *(float(step) for step in range(1, 41))]
    run = {
        "alarms": [],
        "steps": list(range(41)),
        "metrics": {"critic/score/mean": rewards, name: held_out},
        "summary": summary,
        "checkpoints": ["step_000010", "step_000030"],
    }
    return json.dumps(run)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("val/t/acc@1", {0: 0.04, 10: 0.86, 40: 0.14}, "got worse towards the end, after step 10"),
        ("val/t/acc@1", {0: 0.9, 40: 0.1}, "got worse towards the end, after step 0"),
        ("val/t/acc@1", {0: 0.1, 20: 0.5, 40: 0.9}, "still getting better"),
        ("val/t/acc@1", {0: 0.5, 20: 0.52, 40: 0.49}, "levelled off"),
        ("val/loss", {20: 1.0, 40: 1.4}, "got worse towards the end, after step 20"),
        ("val/t/acc@1", {40: 0.4}, "trainer.test_freq"),
        ("other", {40: 0.4}, "nothing held out was measured"),
    ],
)
def test_advice_is_that_of_the_validation_however_few_its_points(
    page: Any, reports: dict[str, str], name: str, values: dict[int, float], words: str
) -> None:
    page.goto(reports["one"])
    run = _held_out(name, values, held_out_prompts=100, steps=40)
    assert words in page.evaluate(
        f"(() => {{ const r = {run}; return advice(r, headline(r)); }})()"
    )


def test_the_best_step_is_told_with_the_place_of_its_model(
    page: Any, reports: dict[str, str]
) -> None:
    page.goto(reports["one"])
    for values, summary, words, place in (
        ({0: 0.1, 10: 0.9, 40: 0.2}, {}, "best 0.9 ± 0.032 at step 10", "checkpoints/step_000010"),
        ({0: 0.1, 20: 0.9, 40: 0.2}, {}, "best 0.9 ± 0.032 at step 20", "not kept"),
        (
            {0: 0.1, 20: 0.9, 40: 0.2},
            {"best_step": 20, "best_checkpoint": "o/actor_best"},
            "best 0.9 ± 0.032 at step 20",
            "o/actor_best",
        ),
        ({0: 0.9, 40: 0.2}, {}, "best 0.9 ± 0.032 at step 0", "the run began with"),
        ({0: 0.1, 40: 0.9}, {}, "", ""),
    ):
        run = _held_out("val/t/acc@1", values, held_out_prompts=100, **summary)
        told, where, fell = page.evaluate(
            f"""(() => {{
              const found = judgedCourses({run})[0];
              return [bestInWords({run}, found), placeOf({run}, found.best.step), hasFallen(found)];
            }})()"""
        )
        assert told == words and (place in where) and fell == bool(words)


def test_the_page_says_which_run_it_is(page: Any, reports: dict[str, str]) -> None:
    page.goto(reports["one"])
    assert page.locator(".origin").inner_text() == (
        "PPO program, estimator grpo, loss vanilla · model models/policy · "
        "last start 2023-11-14 22:13 UTC, ran 3 min · 4 ranks on node-1 · mrlhf 0.8.0 (0123abc) · "
        "launch/train_ppo.py --config my.yaml"
    )


def test_equal_curves_share_a_chart_and_few_charts_the_width(
    page: Any, reports: dict[str, str]
) -> None:
    _open(page, reports["turns"], "Curves")
    page.wait_for_selector("figure canvas")
    titles = page.locator("figcaption").all_inner_texts()
    assert "perf/memory/actor/grads" in titles or len(set(titles)) == len(titles)
    grid = page.locator(".grid.curves").first
    wide = grid.bounding_box()["width"]
    figures = [figure.bounding_box()["width"] for figure in grid.locator("figure").all()]
    assert sum(figures) > 0.9 * wide
    copies = page.evaluate(
        "(() => { report.runs[0].metrics.copy = report.runs[0].metrics['actor/entropy'];"
        "return withoutCopies(['actor/entropy', 'copy', 'actor/ppo_kl']); })()"
    )
    assert copies == [["actor/entropy", "copy"], ["actor/ppo_kl"]]


@pytest.mark.parametrize("run", ["one", "turns"])
def test_a_phone_shows_responses_beside_their_prompts(
    browser: Any, reports: dict[str, str], run: str
) -> None:
    for page in _watched(browser.new_page(viewport={"width": 390, "height": 800})):
        _open(page, reports[run], "Rollouts")
        _wait_for_texts(page)
        box = page.locator(".rows").bounding_box()
        response = page.locator(".rows tbody tr td").last.bounding_box()
        assert response["width"] > 60
        assert response["x"] + response["width"] <= box["x"] + box["width"]
        assert page.locator(".rows tbody tr td:nth-child(2)").first.bounding_box()["width"] < 160


def test_dark_or_light_and_keys(browser: Any, reports: dict[str, str]) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    for page in _watched(context.new_page()):
        page.goto(reports["one"])
        back = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(back) == "rgb(255, 255, 255)"
        page.keyboard.press("d")
        assert page.evaluate(back) == "rgb(18, 21, 26)"
        page.reload()
        assert page.evaluate(back) == "rgb(18, 21, 26)"  # remembered
        page.get_by_label("Dark or light").click()
        assert page.evaluate(back) == "rgb(255, 255, 255)"

        page.keyboard.press("?")
        assert page.get_by_role("dialog").is_visible()
        page.keyboard.press("Escape")
        assert not page.get_by_role("dialog").is_visible()
        page.keyboard.press("3")
        assert page.get_by_role("tab", selected=True).inner_text() == "Rollouts"
        page.locator("#text-filter").fill("1")
        page.locator("#text-filter").press("2")
        assert page.get_by_role("tab", selected=True).inner_text() == "Rollouts"


def test_paper_has_every_chart(page: Any, reports: dict[str, str]) -> None:
    _open(page, reports["one"], "Curves")
    page.wait_for_selector("figure canvas")
    assert page.evaluate("[...charts].some((chart) => !chart.plot)")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...charts].every((chart) => chart.plot)")


def test_curves_read_zoom_and_smooth_by_mouse_and_keyboard(
    page: Any, reports: dict[str, str]
) -> None:
    _open(page, reports["one"], "Curves")
    page.get_by_label("Metrics").fill("critic/score")
    page.wait_for_function("() => document.querySelectorAll('figure').length === 1")
    chart = page.locator("figure").first
    page.wait_for_selector("figure canvas")

    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    assert chart.locator("output").inner_text().startswith("step 1")

    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 50, steps=4)
    page.mouse.up()
    low, high = page.evaluate("drawing.zoom")
    assert 12 < low < 18 < high < 27
    page.get_by_role("button", name="Show all steps").click()
    assert page.evaluate("drawing.zoom") is None

    chart.focus()
    page.keyboard.press("End")
    assert chart.locator("output").inner_text().startswith("step 30: 0.")
    page.keyboard.press("ArrowLeft")
    assert chart.locator("output").inner_text().startswith("step 29: 0.")
    page.keyboard.press("+")
    assert page.evaluate("drawing.zoom")[1] == 30
    page.keyboard.press("0")
    assert page.evaluate("drawing.zoom") is None

    page.get_by_label("Smoothing").fill("0.9")
    page.evaluate("new Promise(requestAnimationFrame)")  # the charts are drawn in the next frame
    chart.focus()
    page.keyboard.press("End")
    assert "(smoothed 0." in chart.locator("output").inner_text()


def test_samples_are_filtered_by_each_filter(page: Any, reports: dict[str, str]) -> None:
    _open(page, reports["one"], "Rollouts")
    _wait_for_texts(page)
    assert _count(page).startswith("240 of 240 samples; the first 100 are listed")

    page.locator("#step-filter").select_option("7")
    assert _count(page).startswith("8 of 240 samples.")
    page.get_by_label("Next step").click()
    assert {row.inner_text() for row in page.locator(".rows button").all()} == {"8"}
    asked = page.locator(".rows tbody tr td:nth-child(2)").first.inner_text()
    assert asked.startswith("Question 32: what is 32 + 12?")
    page.locator("#step-filter").select_option("")

    page.locator("#minScore").fill("0.5")
    rewards = {row.inner_text() for row in page.locator(".rows tbody tr td:nth-child(4)").all()}
    assert rewards == {"1"}
    page.locator("#minScore").fill("")
    page.locator("#minLength").fill("40")
    lengths = {row.inner_text() for row in page.locator(".rows tbody tr td:nth-child(5)").all()}
    assert lengths == {"40"}
    page.locator("#minLength").fill("")

    page.get_by_label("Text of prompt or response").fill("ONERROR=alert")
    page.wait_for_function("() => document.querySelector('#count').textContent.startsWith('30 of')")


def test_tokens_show_their_numbers_by_mouse_and_keyboard(
    page: Any, reports: dict[str, str]
) -> None:
    _open(page, reports["one"], "Rollouts")
    page.locator(".rows tbody tr button").nth(1).click()
    page.wait_for_selector(".sample .token")
    facts = page.locator(".sample .facts")

    page.locator(".sample .token").nth(3).hover()
    shown = facts.inner_text()
    assert "token 4 of" in shown
    number = page.evaluate("views[0].sample.numbers['entropy'][3]")
    told = facts.locator("[data-name='entropy']").inner_text()
    assert float(told.removeprefix("entropy ")) == pytest.approx(number, rel=1e-3)
    for name in ("advantage", "KL to reference", "ratio after update", "trainer - engine", "value"):
        assert name in shown

    page.locator(".sample .tokens").focus()
    page.keyboard.press("ArrowRight")
    assert "token 5 of" in facts.inner_text()
    page.keyboard.press("End")
    last = page.evaluate("views[0].sample.tokens.length")
    assert f"token {last} of {last}" in facts.inner_text()

    colors = page.evaluate("views[0].spans.map((s) => s.style.backgroundColor).join()")
    page.get_by_label("Colour tokens by").select_option("entropy")
    assert page.evaluate("views[0].spans.map((s) => s.style.backgroundColor).join()") != colors
    assert "entropy" in page.locator(".sample .scale").inner_text()


def test_turns_stand_apart_from_what_tools_wrote(page: Any, reports: dict[str, str]) -> None:
    _open(page, reports["turns"], "Rollouts")
    page.get_by_label("Order").select_option("step")
    page.locator(".rows tbody tr button").first.click()
    page.wait_for_selector(".sample .token")

    length = page.evaluate("views[0].sample.tokens.length")
    first, second = length // 3, length // 2
    assert page.locator(".part-title").all_inner_texts() == [
        f"Turn 1 · {first} tokens · policy version 0 · turn reward 0.25",
        f"Tool or environment · {second - first} tokens",
        f"Turn 2 · {length - second} tokens · policy version 1",
    ]
    assert page.locator(".episode").inner_text() == (
        "2 turns · calls: search × 2, unreadable × 1 · 0 errors · "
        "waited 0.5 s for tools and environment · turn rewards add up to 0.25"
    )
    assert "policy versions 0, 1" in page.locator(".sample > .faint").first.inner_text()

    told = page.locator(".told .token")
    assert told.count() == second - first
    turn, between = (page.locator(f".part{name}").first for name in ("", ".told"))
    back = "(node) => getComputedStyle(node).backgroundColor"
    assert turn.evaluate(back) != between.evaluate(back)
    styles = "(all) => all.map((node) => [node.className, node.style.backgroundColor].join())"
    assert set(told.evaluate_all(styles)) == {"token,"}  # neither coloured nor struck through

    facts = page.locator(".sample .facts")
    told.first.hover()
    assert "from a tool or the environment; does not train" in facts.inner_text()
    assert "advantage" not in facts.inner_text() and "trainer - engine –" in facts.inner_text()
    page.locator(".part").last.locator(".token").last.hover()
    assert f"token {length} of {length}" in facts.inner_text()
    assert "turn 2; policy version 1; " in facts.inner_text()
    assert "advantage" in facts.inner_text()


def test_failed_episodes_are_found_and_say_why(page: Any, reports: dict[str, str]) -> None:
    _open(page, reports["turns"], "Rollouts")
    page.get_by_label("Order").select_option("errors")
    cells = page.locator(".rows tbody tr").first.locator("td").all_inner_texts()
    assert cells[5:8] == ["1", "2", "failure"]
    page.get_by_label("End").select_option("failure")
    assert _count(page).startswith("3 of 24 samples")

    page.locator(".rows tbody tr button").first.click()
    page.wait_for_selector(".sample .token")
    assert page.locator(".failure").inner_text() == (
        "Failed, so nothing of it trains: search ended its process"
    )
    titles = page.locator(".part-title").all_inner_texts()
    names = [title.split(" · ")[0] for title in titles]
    assert names == ["Turn 1 (asks)", "Reads anew: context 2 (checks)", "Turn 2 (checks)"]
    drawn = page.locator(".part:not(.told) .token")
    assert drawn.count() == page.locator(".part:not(.told) .token.masked").count() > 0
    assert page.locator(".told .token.masked").count() == 0


def test_a_run_without_episodes_beside_one_with_them(page: Any, reports: dict[str, str]) -> None:
    _open(page, reports["mixed"], "Rollouts")
    titles = page.locator(".rows thead")
    assert "turns" not in titles.inner_text()
    page.locator(".rows tbody tr button").first.click()
    page.wait_for_selector(".sample .token")
    assert page.locator(".part-title").count() == page.locator(".episode").count() == 0

    page.get_by_label("Run").first.select_option("1")
    assert "turns" in titles.inner_text()
    page.get_by_label("Order").select_option("turns")
    page.get_by_label("Run").first.select_option("0")
    assert page.get_by_label("Order").input_value() == "newest"


def test_the_same_prompt_stands_side_by_side_across_steps(
    page: Any, reports: dict[str, str]
) -> None:
    _open(page, reports["one"], "Rollouts")
    page.locator(".rows tbody tr button").first.click()
    page.get_by_role("button", name="Beside another step").click()
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 2")
    one, two = page.evaluate(
        "views.map((v) => [v.run.samples.uid[v.index], v.run.samples.step[v.index]])"
    )
    assert one[0] == two[0] and one[1] != two[1]
    boxes = [article.bounding_box() for article in page.locator(".sample").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_the_models_text_never_runs(page: Any, reports: dict[str, str]) -> None:
    _open(page, reports["one"], "Rollouts")
    _wait_for_texts(page)
    page.get_by_label("Order").select_option("step")
    page.locator(".rows tbody tr button").first.click()
    page.wait_for_selector(".sample .token")
    assert page.locator(".sample .token").first.inner_text() == BREAKS_OUT
    assert BREAKS_OUT in page.locator(".sample .prompt").inner_text()
    assert page.locator("img").count() == 0
    assert page.title() != "broken"


def test_the_timeline_has_a_lane_for_each_rank(page: Any, reports: dict[str, str]) -> None:
    _open(page, reports["one"], "Timeline")
    page.wait_for_selector(".lane .span")
    assert page.locator(".lane .track").count() == 4
    page.locator("#lane-step").fill("0")
    assert "Step 1" in page.locator("section[aria-label=Lanes] .controls").inner_text()

    page.get_by_label("Phases of rank 3").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    reading = page.locator("section[aria-label=Lanes] p output").inner_text()
    assert reading == "rank 3, generating: from 0.2 s for 3 s, 2.85 s of processor time"
    assert "rank 3: 2.85" in page.locator("section[aria-label=Lanes] table").inner_text()

    phases, owners = page.locator("main > .scroll table").all_inner_texts()[-2:]
    assert phases.split("\n")[1:] == ["updating the policy\t44", "generating\t21.5"]
    assert owners.split("\n")[1:] == ["actor/grads\t16", "actor/params\t8"]


def test_two_runs_are_told_apart_by_the_key_in_which_they_differ(
    page: Any, reports: dict[str, str]
) -> None:
    page.goto(reports["two"])
    names = " ".join(page.locator(".verdict").all_inner_texts())
    assert "actor.optim.lr=0.00001" in names and "actor.optim.lr=0.00005" in names
    rows = page.locator("main table").first.locator("tr").all_inner_texts()
    assert rows[1:] == [
        "Held-out accuracy (validation, sampled)\t0.16 → 0.7681 ± 0.021\t0.16 → 0.8 ± 0.02",
        "best validation\t0.7681 at step 30 (not kept; see trainer.export_best)"
        "\t0.8 at step 30 (not kept; see trainer.export_best)",
        "steps\t30\t30",
        "alarms\t1\t1",
        "actor.optim.lr\t0.00001\t0.00005",
        "seed\t1\t2",
    ]

    page.get_by_role("tab", name="Curves").click()
    page.get_by_label("Tell runs apart by").select_option("seed")
    page.get_by_label("Metrics").fill("critic/score")
    page.wait_for_function("() => document.querySelectorAll('figure').length === 1")
    page.wait_for_selector("figure canvas")
    page.locator("figure").focus()
    page.keyboard.press("End")
    words = page.locator("figure output").inner_text()
    assert words.startswith("step 30: seed=1: 0.9") and "; seed=2: " in words

    page.get_by_label("seed=2").uncheck()
    page.locator("figure").focus()
    page.keyboard.press("Home")
    assert "seed=2" not in page.locator("figure output").inner_text()


def test_tabs_turn_by_keyboard(page: Any, reports: dict[str, str]) -> None:
    page.goto(reports["one"])
    page.keyboard.press("Tab")
    for name in ("Curves", "Rollouts", "Timeline", "Overview"):
        page.keyboard.press("ArrowRight")
        focused = page.evaluate("document.activeElement.textContent")
        assert focused == name
        assert page.get_by_role("tab", selected=True).inner_text() == name


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_view_fits_and_can_be_read(
    browser: Any, reports: dict[str, str], width: int, scheme: str
) -> None:
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for page in _watched(opened):
        for tab in ("Overview", "Curves", "Rollouts", "Timeline"):
            _open(page, reports["two"], tab)
            page.wait_for_selector("canvas")
            if tab == "Rollouts":
                page.locator(".rows tbody tr button").first.click()
                page.wait_for_selector(".sample .token")
            overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(overflow) <= 0, f"{tab} is wider than the window"

        text, faint, back = page.evaluate(_COLORS)
        assert (_luminance(back) < 0.2) == (scheme == "dark")
        assert _contrast(text, back) > 7 and _contrast(faint, back) > 4.5


_COLORS = """() => {
  const style = (node) => getComputedStyle(node);
  const faint = document.querySelector('.faint');
  const colors = [style(document.body).color, style(faint).color];
  colors.push(style(document.body).backgroundColor);
  return colors.map((color) => color.match(/[0-9.]+/g).slice(0, 3).map(Number));
}"""


def _luminance(color: list[float]) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [value / 255 for value in color]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)
