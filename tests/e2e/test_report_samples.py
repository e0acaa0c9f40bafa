"""The report's list of samples, and samples token by token, in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.report_browser import (
    BREAKS_OUT,
    needs_chromium,
    open_sample,
    open_tab,
    wait_for_texts,
    watched,
)

pytestmark = needs_chromium


def _count(page: Any) -> str:
    return str(page.locator("#count").inner_text())


def _column(page: Any, number: int) -> set[str]:
    """The different cells of a column of the list."""
    cells = page.locator(f".rows tbody tr td:nth-child({number})").all()
    return {cell.inner_text() for cell in cells}


@pytest.mark.parametrize("run", ["one", "turns"])
def test_a_phone_shows_responses_beside_their_prompts(
    browser: Any, reports: dict[str, str], run: str
) -> None:
    for page in watched(browser.new_page(viewport={"width": 390, "height": 800})):
        open_tab(page, reports[run], "Rollouts")
        wait_for_texts(page)
        box = page.locator(".rows").bounding_box()
        response = page.locator(".rows tbody tr td").last.bounding_box()
        assert response["width"] > 60
        assert response["x"] + response["width"] <= box["x"] + box["width"]
        assert page.locator(".rows tbody tr td:nth-child(2)").first.bounding_box()["width"] < 160


def test_samples_are_filtered_by_each_filter(page: Any, reports: dict[str, str]) -> None:
    open_tab(page, reports["one"], "Rollouts")
    wait_for_texts(page)
    assert _count(page).startswith("240 of 240 samples; the first 100 are listed")

    page.locator("#step-filter").select_option("7")
    assert _count(page).startswith("8 of 240 samples.")
    page.get_by_label("Next step").click()
    assert {row.inner_text() for row in page.locator(".rows button").all()} == {"8"}
    asked = page.locator(".rows tbody tr td:nth-child(2)").first.inner_text()
    assert asked.startswith("Question 32: what is 32 + 12?")
    page.locator("#step-filter").select_option("")

    page.locator("#minScore").fill("0.5")
    assert _column(page, 4) == {"1"}
    page.locator("#minScore").fill("")
    page.locator("#minLength").fill("40")
    assert _column(page, 5) == {"40"}
    page.locator("#minLength").fill("")

    page.get_by_label("Text of prompt or response").fill("ONERROR=alert")
    page.wait_for_function("() => document.querySelector('#count').textContent.startsWith('30 of')")


def test_tokens_show_their_numbers_by_mouse_and_keyboard(
    page: Any, reports: dict[str, str]
) -> None:
    open_tab(page, reports["one"], "Rollouts")
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
    open_sample(page, reports["turns"], order="step")

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
    open_tab(page, reports["turns"], "Rollouts")
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
    open_sample(page, reports["mixed"])
    titles = page.locator(".rows thead")
    assert "turns" not in titles.inner_text()
    assert page.locator(".part-title").count() == page.locator(".episode").count() == 0

    page.get_by_label("Run").first.select_option("1")
    assert "turns" in titles.inner_text()
    page.get_by_label("Order").select_option("turns")
    page.get_by_label("Run").first.select_option("0")
    assert page.get_by_label("Order").input_value() == "newest"


def test_the_same_prompt_stands_side_by_side_across_steps(
    page: Any, reports: dict[str, str]
) -> None:
    open_sample(page, reports["one"])
    page.get_by_role("button", name="Beside another step").click()
    page.wait_for_function("() => document.querySelectorAll('.sample').length === 2")
    one, two = page.evaluate(
        "views.map((v) => [v.run.samples.uid[v.index], v.run.samples.step[v.index]])"
    )
    assert one[0] == two[0] and one[1] != two[1]
    boxes = [article.bounding_box() for article in page.locator(".sample").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_the_models_text_never_runs(page: Any, reports: dict[str, str]) -> None:
    open_sample(page, reports["one"], order="step")
    assert page.locator(".sample .token").first.inner_text() == BREAKS_OUT
    assert BREAKS_OUT in page.locator(".sample .prompt").inner_text()
    assert page.locator("img").count() == 0
    assert page.title() != "broken"
