"""The report in a real browser: its first view, curves, timeline and keys."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.report_browser import BREAKS_OUT, needs_chromium, open_tab, show_scores, watched

pytestmark = needs_chromium


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
        ("val_sampled/t/acc@1", {i: i / 40 for i in range(41)}, "still getting better"),
        ("val_sampled/t/acc@1", {i: min(i, 16) / 40 for i in range(41)}, "levelled off"),
        ("val_sampled/t/acc@1", {i: 0.5 - abs(i / 40 - 0.5) for i in range(41)}, "got worse"),
        ("val/t/acc@1", {0: 0.5, 20: 0.52, 40: 0.49}, "levelled off"),
        ("val/loss", {20: 1.0, 40: 1.4}, "got worse towards the end, after step 20"),
        ("val/t/acc@1", {40: 0.4}, "trainer.test_freq"),
        ("other", {40: 0.4}, "nothing held out was measured"),
    ],
)
def test_advice_is_that_of_the_validation_however_many_its_points(
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
    open_tab(page, reports["turns"], "Curves")
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


def test_dark_or_light_and_keys(browser: Any, reports: dict[str, str]) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    for page in watched(context.new_page()):
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
    open_tab(page, reports["one"], "Curves")
    page.wait_for_selector("figure canvas")
    assert page.evaluate("[...charts].some((chart) => !chart.plot)")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...charts].every((chart) => chart.plot)")


def test_curves_read_zoom_and_smooth_by_mouse_and_keyboard(
    page: Any, reports: dict[str, str]
) -> None:
    open_tab(page, reports["one"], "Curves")
    show_scores(page)
    chart = page.locator("figure").first

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


def test_the_timeline_has_a_lane_for_each_rank(page: Any, reports: dict[str, str]) -> None:
    open_tab(page, reports["one"], "Timeline")
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
    show_scores(page)
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
    for page in watched(opened):
        for tab in ("Overview", "Curves", "Rollouts", "Timeline"):
            open_tab(page, reports["two"], tab)
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
