"""Reports in a real browser: Chromium, driven by Playwright, without a screen."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedstrata import report
from fedstrata.report.watch import PageServer
from fedstrata.runs.reader import SavedRun
from fedstrata.tuning.outcome import Searched, TriedTrial, Tuned, TunedMethod
from fedstrata.tuning.page import write_page

from ..accessibility import violations
from .synthetic import record, visits, write_comparison, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="the browser tests need Chromium"),
]

ROUNDS = 12
SCREEN = {"width": 1240, "height": 900}
TALL = {"width": 1240, "height": 15_000}
"""All of a page is in sight, so all of it is drawn."""
PHONE = {"width": 390, "height": 844}
LISTS = ("quantity", "embedding-colour")
READY = "html[data-ready=true]"
LINES = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) => plot.data
  .filter((trace) => trace.meta?.line === LINE).map((trace) => trace.visible ?? true))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = write_comparison(tmp_path_factory.mktemp("compared") / "runs", rounds=ROUNDS)
    return report.write([SavedRun.read(path) for path in sorted(home.iterdir())], home / "report.html")


class Visit:
    """A page that was opened, and all that went wrong on it."""

    def __init__(self, browser: Any, address: str, screen: Any = SCREEN, **how: Any) -> None:
        self.context = browser.new_context(viewport=screen, reduced_motion="reduce", **how)
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.open(address)

    def open(self, address: str) -> None:
        """Until what is in sight is drawn."""
        self.page.goto(address)
        if address != "about:blank":
            self.page.wait_for_selector(READY)

    def plot(self, name: str) -> str:
        return f"document.querySelector('[data-figure=\"{name}\"] .plot')"

    def ask(self, code: str) -> Any:
        return self.page.evaluate(code)

    def until(self, code: str) -> None:
        """Wait for something to become true; Playwright's own way is forbidden by the page's policy."""
        for _ in range(600):
            if self.ask(code):
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"still not so after a minute: {code}")


@pytest.fixture(scope="module")
def looked_at(browser: Any, comparison: Path) -> Iterator[Visit]:
    """The page for tests that leave it as it was, which also shows that all can be undone; opening it takes seconds."""
    found = Visit(browser, comparison.as_uri(), TALL, color_scheme="light")
    yield found
    found.context.close()


def test_the_comparison_renders_without_an_error_or_a_request(looked_at: Visit) -> None:
    figures = looked_at.ask("document.querySelectorAll('[data-figure]').length")
    assert figures == looked_at.ask(
        "document.querySelectorAll('.js-plotly-plot .main-svg').length && "
        "document.querySelectorAll('.js-plotly-plot').length"
    )
    assert looked_at.wrong == []
    assert [url for url in looked_at.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_header_and_tables_are_painted_at_once(looked_at: Visit) -> None:
    """Alone it takes less than two seconds; a loaded machine gets ten."""
    paints = looked_at.ask("performance.getEntriesByType('paint').map((entry) => [entry.name, entry.startTime])")
    milliseconds = dict(paints)["first-contentful-paint"]
    print(f"first contentful paint after {milliseconds:.0f} ms")
    assert milliseconds < 10_000


def test_curves_have_a_point_for_every_round(looked_at: Visit) -> None:
    for name in ("accuracy", "loss", "accuracy-bytes", "accuracy-flops"):
        points = looked_at.ask(f"{looked_at.plot(name)}.data.filter((t) => !t.meta.band).map((t) => t.x.length)")
        assert points == [ROUNDS] * 3, name
    heat = looked_at.ask(f"(({{z}}) => [z.length, z[0].length])({looked_at.plot('divergence')}.data[0])")
    assert heat == [21, ROUNDS]


def test_a_method_is_hidden_in_all_figures_at_once(looked_at: Visit) -> None:
    box = looked_at.page.locator("input[data-line='1']")
    assert set(looked_at.ask(LINES.replace("LINE", "1"))) == {True}
    box.focus()
    looked_at.page.keyboard.press("Space")
    assert set(looked_at.ask(LINES.replace("LINE", "1"))) == {"legendonly"}
    assert set(looked_at.ask(LINES.replace("LINE", "0"))) == {True}
    box.click()
    assert set(looked_at.ask(LINES.replace("LINE", "1"))) == {True}
    assert looked_at.wrong == []


def test_a_legend_hides_in_all_figures_too(looked_at: Visit) -> None:
    looked_at.page.locator("[data-figure=accuracy] .legendtoggle").first.click()
    looked_at.until("document.querySelectorAll('input[data-line]:not(:checked)').length === 1")
    hidden = looked_at.ask("Number(document.querySelector('input[data-line]:not(:checked)').dataset.line)")
    assert set(looked_at.ask(LINES.replace("LINE", str(hidden)))) == {"legendonly"}
    looked_at.page.locator(f"input[data-line='{hidden}']").check()
    assert set(looked_at.ask(LINES.replace("LINE", str(hidden)))) == {True}


def test_the_slider_is_moved_by_keys(looked_at: Visit) -> None:
    slider = looked_at.page.locator("[data-control=divergence-round] input")
    before = looked_at.ask(f"{looked_at.plot('divergence-profile')}.data[0].x")
    slider.focus()
    looked_at.page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext") == "round 1"
    assert looked_at.page.locator("[data-control=divergence-round] output").inner_text() == "1"
    assert looked_at.ask(f"{looked_at.plot('divergence-profile')}.data[0].x") != before
    assert looked_at.ask(f"{looked_at.plot('divergence')}.layout.shapes[0].x0") == 1
    looked_at.page.keyboard.press("ArrowRight")
    assert looked_at.ask(f"{looked_at.plot('divergence')}.layout.shapes[0].x0") == 2
    looked_at.page.keyboard.press("End")
    assert looked_at.ask(f"{looked_at.plot('divergence-profile')}.data[0].x") == before


def test_lists_choose_what_is_drawn(looked_at: Visit) -> None:
    heat = f"{looked_at.plot('divergence')}.data[0].z[0]"
    names = f"{looked_at.plot('embedding')}.data.map((t) => t.name)"
    before = [looked_at.ask(drawn) for drawn in (heat, names)]
    quantity, colour = (looked_at.page.locator(f"[data-control={name}] select") for name in LISTS)
    chosen = [found.input_value() for found in (quantity, colour)]
    quantity.select_option(label="cosine of updates")
    assert looked_at.ask(heat) != before[0]
    colour.select_option(label="by client")
    assert all(name.startswith("client ") for name in looked_at.ask(names))
    quantity.select_option(chosen[0])
    colour.select_option(chosen[1])
    assert [looked_at.ask(drawn) for drawn in (heat, names)] == before


def test_what_may_be_negative_stays_linear(looked_at: Visit) -> None:
    looked_at.page.locator("#log").check()
    profile = f"{looked_at.plot('divergence-profile')}.layout.xaxis.type"
    heat = f"'customdata' in {looked_at.plot('divergence')}.data[0]"
    assert looked_at.ask(profile) == "log"
    assert looked_at.ask(heat)
    quantity = looked_at.page.locator("[data-control=quantity] select")
    chosen = quantity.input_value()
    quantity.select_option(label="cosine of updates")
    assert looked_at.ask(profile) == "linear"
    assert not looked_at.ask(heat)
    quantity.select_option(chosen)
    looked_at.page.locator("#log").uncheck()
    assert looked_at.wrong == []


def test_axes_become_logarithmic(looked_at: Visit) -> None:
    looked_at.page.locator("#log").check()
    assert looked_at.ask(f"{looked_at.plot('loss')}.layout.yaxis.type") == "log"
    assert looked_at.ask(f"{looked_at.plot('accuracy')}.layout.yaxis.type") != "log"
    assert looked_at.ask(f"{looked_at.plot('drift')}.layout.yaxis.type") != "log"
    looked_at.page.locator("#log").uncheck()
    assert looked_at.ask(f"{looked_at.plot('loss')}.layout.yaxis.type") != "log"
    assert looked_at.wrong == []


def test_a_figure_is_saved_as_a_picture_and_zooming_undone(looked_at: Visit) -> None:
    with looked_at.page.expect_download() as download:
        looked_at.page.locator("[data-figure=loss] button", has_text="PNG").click()
    assert download.value.suggested_filename == "loss.png"
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    looked_at.ask(f"Plotly.relayout({looked_at.plot('loss')}, {{'xaxis.range': [2, 3], 'xaxis.autorange': false}})")
    looked_at.page.locator("[data-figure=loss] button", has_text="Reset").click()
    assert looked_at.ask(f"{looked_at.plot('loss')}._fullLayout.xaxis.range[1]") > 10
    assert looked_at.ask("document.querySelectorAll('.modebar-btn').length") == 0  # one of Plotly's own shares data
    assert looked_at.wrong == []


def test_figures_are_drawn_when_a_reader_comes_near_and_nothing_moves(browser: Any, comparison: Path) -> None:
    """Also after light has become dark, which figures out of sight learn when they come near again."""
    found = Visit(browser, "about:blank", color_scheme="light")
    found.page.add_init_script(
        "window.moved = 0; new PerformanceObserver((list) => list.getEntries().forEach((entry) => "
        "{ window.moved += entry.value; })).observe({ type: 'layout-shift', buffered: true })"
    )
    found.open(comparison.as_uri())
    far = found.plot("partition")
    assert found.ask(f"{found.plot('accuracy')}.querySelectorAll('.main-svg').length")
    assert found.ask(f"{far}.childElementCount") == 0
    ground = "getComputedStyle(document.body).backgroundColor"
    light, ink = found.ask(ground), found.ask(f"{found.plot('accuracy')}._fullLayout.font.color")
    assert found.ask("window.moved") < 0.01
    found.page.evaluate("document.querySelector('#partition').scrollIntoView()")
    found.until(f"{far}.querySelector('.main-svg')")
    found.page.locator("#theme").click()
    assert found.ask(ground) != light
    assert found.ask(f"{far}._fullLayout.font.color") != ink
    assert found.ask(f"{found.plot('accuracy')}._fullLayout.font.color") == ink  # nobody sees it
    found.page.evaluate("scrollTo(0, 0)")
    found.until(f"{found.plot('accuracy')}._fullLayout.font.color !== '{ink}'")
    assert found.page.locator("#theme").inner_text() == "Light"
    assert found.wrong == []
    found.context.close()


def test_a_dark_system_gets_a_dark_page(browser: Any, comparison: Path) -> None:
    """On a phone, where tables say that they go on, and what is too wide can be scrolled by keys."""
    found = Visit(browser, comparison.as_uri(), PHONE, color_scheme="dark")
    assert found.page.locator("#theme").inner_text() == "Light"
    hint = "getComputedStyle(document.querySelector('#results .table'), '::after').visibility"
    assert found.ask(hint) == "visible"
    assert found.ask("document.querySelector('#results .scroll').tabIndex") == 0
    found.ask("document.querySelector('#results .scroll').scrollTo(1000, 0)")
    found.until(f"{hint} === 'hidden'")
    found.ask(
        "document.querySelectorAll('#results details, #diagnosis details').forEach((one) => { one.open = true; })"
    )
    found.until("document.querySelectorAll('#results details.data table').length === 2")
    assert violations(found.page) == []
    found.context.close()


def test_words_in_tables_have_room_and_controls_are_by_their_figures(looked_at: Visit) -> None:
    """A column of words is not squeezed to a word a line by numbers, nor is a figure alone in half a row."""
    narrowest = """Math.min(...[...document.querySelectorAll('#clients td:not(.n)')].map((cell) => cell.clientWidth))"""
    assert looked_at.ask(narrowest) > 120
    after = """() => [...document.querySelectorAll('section')].every((one) => {
      const [box, part] = [one.querySelector('.controls'), one.querySelector('[data-part]')];
      return !box || !part || part.compareDocumentPosition(box) & Node.DOCUMENT_POSITION_FOLLOWING; })"""
    assert looked_at.ask(after)
    alone = """() => [...document.querySelectorAll('.figures.pair')].filter((box) => box.children.length % 2)
      .every((box) => box.lastElementChild.offsetWidth > 0.9 * box.offsetWidth)"""
    assert looked_at.ask(alone)
    assert looked_at.ask(f"{looked_at.plot('divergence-profile')}.layout.xaxis.title.text") == "gradient divergence"


def test_a_table_is_copied_as_markdown(looked_at: Visit) -> None:
    looked_at.ask("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    looked_at.page.locator("#results button.copy").click()
    looked_at.until("window.copied")
    head, rule, *rows = looked_at.ask("window.copied").strip().split("\n")
    assert head == "| method | accuracy | behind | sent | computed | time |"
    assert rule == "| :-- | --: | --: | --: | --: | --: |"
    assert [row.split(" | ")[0] for row in rows] == [
        "| fedavg(buffers='drop') + scaffold",
        "| fedprox(mu=0.01)",
        "| fedavg",
    ]  # the best first
    assert looked_at.page.locator(".status").inner_text() == "Copied as Markdown"


def test_every_figure_has_its_data_as_a_table(looked_at: Visit) -> None:
    open_or_close = "document.querySelectorAll('details.data > summary').forEach((summary) => summary.click())"
    looked_at.ask(open_or_close)
    looked_at.until("[...document.querySelectorAll('details.data')].every((d) => d.querySelector('table'))")
    rows = looked_at.page.locator("[data-figure=accuracy] tbody tr")
    assert rows.count() == ROUNDS
    assert rows.first.locator("td").first.inner_text().endswith(" %")
    assert looked_at.page.locator("[data-figure=divergence] tbody tr").count() == 21
    looked_at.ask(open_or_close)
    assert looked_at.ask("document.querySelectorAll('details.data[open]').length") == 0
    assert looked_at.wrong == []


def test_controls_and_figures_have_names(looked_at: Visit) -> None:
    unnamed = looked_at.ask("""() => [...document.querySelectorAll('main input, main select, .toolbar input')]
      .filter((e) => !e.labels.length || !e.labels[0].textContent.trim()).length""")
    assert unnamed == 0
    assert looked_at.ask(
        "[...document.querySelectorAll('.plot')].every((p) => p.getAttribute('aria-label').length > 20)"
    )
    assert looked_at.ask("['header', 'nav', 'main', 'footer'].every((name) => document.querySelector(name))")


def test_a_narrow_screen_is_not_wider_than_it_is(looked_at: Visit) -> None:
    looked_at.page.set_viewport_size({"width": 400, "height": 2 * TALL["height"]})
    widest = "Math.max(...[...document.querySelectorAll('.plot > *')].map((part) => part.scrollWidth))"
    looked_at.until(f"document.documentElement.scrollWidth <= 400 && {widest} < 400")
    looked_at.page.set_viewport_size(TALL)
    looked_at.until(f"{widest} > 400")


def test_it_prints(looked_at: Visit) -> None:
    assert looked_at.page.pdf(format="A4").startswith(b"%PDF")
    assert looked_at.wrong == []
    assert looked_at.ask("document.documentElement.dataset.theme") is None


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)><a href='javascript:alert(2)'>%{x}</a>"
    run = write_run(tmp_path / "r", rounds=3, method=bad, class_names=[bad] * 10, notes=[bad], dataset=bad)
    path = report.write([SavedRun.read(run)], tmp_path / "report.html")
    found = Visit(browser, path.as_uri())
    assert found.page.locator("main img, main a:not([href^='#figure-']), header img").count() == 0
    assert bad in found.page.locator("h1").inner_text()
    assert found.wrong == []
    found.context.close()


def test_the_page_of_a_search_is_for_everybody(browser: Any, tmp_path: Path) -> None:
    """All of its figures are drawn, and all of its trials can be read, on a phone in the dark, too."""
    spaces = {"lr": Searched("log(0.01, 1)", 0.01, 1.0, True), "model.width": Searched("…", options=["8", "16"])}
    trials = [
        TriedTrial(0, {"lr": "0.1", "model.width": "8"}, "complete", 0.5, {2: 0.3, 6: 0.5}, 6, "a"),
        TriedTrial(1, {"lr": "1.0", "model.width": "16"}, "complete", 0.9, {2: 0.6, 6: 0.9}, 6, "b"),
        TriedTrial(2, {"lr": "0.01", "model.width": "16"}, "ended early", None, {2: 0.1}, 2, "c"),
    ]
    method = TunedMethod("fedavg", "", spaces, trials, 1, {"lr": 0.75, "model.width": 0.25}, "fedavg", {"lr": 1.0})
    page = write_page(Tuned("tuned: …", "accuracy", "higher", 3, [2], [method]), None, tmp_path)
    for screen, ground in ((TALL, "light"), (PHONE, "dark")):
        found = Visit(browser, page.as_uri(), screen, color_scheme=ground)
        found.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert found.page.locator("#method-0 details.more tbody tr").count() == 3
        assert found.ask("document.documentElement.scrollWidth") <= screen["width"]
        assert violations(found.page) == []
        assert found.wrong == []
        if screen is TALL:
            assert found.ask("document.querySelectorAll('.js-plotly-plot').length") == 4
        found.context.close()


@pytest.fixture(scope="module")
def suspicious(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which client 2 sends updates twenty times too long, and the other way."""
    run = tmp_path_factory.mktemp("one") / "run"
    write_run(run, rounds=3, probes=False, partition="iid")
    for at in range(1, 4):
        norms = {client: 1.0 + 0.05 * client / at for client in range(8)}
        found = visits(["stem", "head"], norms | {2: 20.0**at}, {2: -0.8})
        grow(run, "probes.jsonl", {"round": at, "clients": list(norms), "seconds": {"visits": 0.1}, "visits": found})
    return report.write([SavedRun.read(run)], run / "report.html")


def test_outlier_scores_are_slid_through_and_told_by_keys(browser: Any, suspicious: Path) -> None:
    found = Visit(browser, suspicious.as_uri(), TALL)
    heat, small = found.plot("outliers"), "document.querySelector('.finding .beside .plot')"
    slider = found.page.locator("[data-control=outliers-round] input")
    assert found.ask(f"{heat}.data[0].y[0]") == "▶ client 2"
    assert slider.get_attribute("aria-valuetext") == "round 3"  # where it is furthest out
    last = found.ask(f"{heat}.data[0].z[0][0]")
    slider.focus()
    found.page.keyboard.press("Home")
    assert found.ask(f"{heat}.data[0].z[0][0]") < last
    assert found.ask(f"{small}.layout.shapes[0].x0") == 1  # the figure beside the finding follows
    found.page.keyboard.press("End")
    assert found.ask(f"{heat}.data[0].z[0][0]") == last
    found.page.locator("[data-figure=outliers] .plot").focus()
    for key in ("ArrowRight", "ArrowRight"):
        found.page.keyboard.press(key)
    told = found.page.locator("[data-figure=outliers] .spoken").text_content()
    assert told == f"▶ client 2, head: {last:g}"
    found.until(f"{heat}.querySelector('.hovertext')?.textContent.startsWith('▶ client 2, head: ')")
    light = found.ask(f"{heat}.data[0].colorscale[0][1]")
    found.page.locator("#theme").click()
    assert found.ask(f"{heat}.data[0].colorscale[0][1]") != light
    gaps = """() => [...document.querySelectorAll('.finding')].map((one) => one.getBoundingClientRect())
      .every((box, at, every) => !at || box.top - every[at - 1].bottom >= 8)"""
    assert found.ask(gaps)
    assert violations(found.page) == []
    assert found.wrong == []
    found.context.close()


def test_empty_figures_say_that_they_are_being_drawn_and_have_their_height(browser: Any, suspicious: Path) -> None:
    heights = "[...document.querySelectorAll('.plot')].map((plot) => plot.getBoundingClientRect().height)"
    context = browser.new_context(viewport=SCREEN)
    page = context.new_page()
    page.add_init_script("window.requestAnimationFrame = () => 0")  # it is never time to draw
    page.goto(suspicious.as_uri())
    says = "[...document.querySelectorAll('.plot')].map((plot) => getComputedStyle(plot, '::before').content)"
    assert set(page.evaluate(says)) == {'"drawing…"'}
    reserved = page.evaluate(heights)
    context.close()
    found = Visit(browser, suspicious.as_uri(), TALL)
    assert set(found.ask(says)) == {"none"}
    assert found.ask(heights) == pytest.approx(reserved, abs=1)
    found.context.close()


def test_a_page_without_scripts_still_shows_its_tables(browser: Any, comparison: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(comparison.as_uri())
    assert page.locator("#results tbody tr").count() == 3
    assert "Figures need JavaScript" in page.locator("noscript").inner_text()
    context.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    run = write_run(tmp_path / "run", rounds=0, planned=10, ended=False)
    with PageServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield run, server.address
        server.shutdown()
        thread.join()


def grow(run: Path, name: str, row: dict[str, Any]) -> None:
    with open(run / name, "a") as file:
        file.write(json.dumps(row) + "\n")


def test_the_live_page_follows_a_run_from_its_beginning(browser: Any, live: tuple[Path, str]) -> None:
    run, address = live
    found = Visit(browser, address)
    points = f"{found.plot('accuracy')}?.data?.[0].x.length"
    assert found.page.locator("[data-figure=accuracy]").count() == 0
    for at in range(1, 4):
        grow(run, "metrics.jsonl", record(at, accuracy=at / 10, loss=1.0))
        grow(run, "probes.jsonl", {"round": at, "clients": [0, 1], "divergence": {"stem": 1.0 * at, "head": 2.0}})
    found.until(f"{points} === 3")
    found.until(f"{found.plot('divergence')}?.data?.[0].x.length === 3")
    slider = found.page.locator("[data-control=divergence-round] input")
    slider.focus()
    found.page.keyboard.press("Home")
    found.page.locator("#log").check()
    found.ask(f"Plotly.relayout({found.plot('accuracy')}, {{'yaxis.range': [0, 0.9], 'yaxis.autorange': false}})")
    grow(run, "metrics.jsonl", record(4, accuracy=0.4, loss=1.0))
    grow(run, "probes.jsonl", {"round": 4, "clients": [0, 1], "divergence": {"stem": 4.0, "head": 2.0}})
    found.until(f"{points} === 4")
    assert found.ask(f"{found.plot('accuracy')}._fullLayout.yaxis.range") == [0, 0.9]
    assert found.ask(f"{found.plot('divergence')}.layout.shapes[0].x0") == 1
    assert slider.get_attribute("max") == "3"
    assert found.ask("document.activeElement.type") in ("range", "checkbox")
    assert found.page.locator("#log").is_checked()
    assert "40.00 %" in found.page.locator("#results .tiles").inner_text()
    assert [message for message in found.wrong if "304" not in message] == []
    assert all(url.startswith((address, "data:", "blob:")) for url in found.requests)
    found.context.close()
