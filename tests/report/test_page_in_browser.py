"""The page in a real browser (Debian: chromium and chromium-driver); skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pooch
from pooch.autopilot import AutoSummary
from pooch.ground.units import format_bytes
from pooch.ir import Profile
from pooch.report.curves import profile_title
from pooch.report.page.run import write_live_report, write_run_report
from pooch.report.page.writing import write_report
from tests.toys import SLOW_LINK, blocks

webdriver = pytest.importorskip("selenium.webdriver", reason="the extra 'dev' is not installed")
waiting = pytest.importorskip("selenium.webdriver.support.wait", reason="the extra 'dev' is not installed")
exceptions = pytest.importorskip("selenium.common.exceptions", reason="the extra 'dev' is not installed")

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="no browser: apt-get install chromium chromium-driver"
)

HOSTILE = "</script><script>document.title='broken out'</script><img src=x onerror=\"document.title='broken out'\">"
MARKUP = "<a href=\"javascript:document.title='broken out'\">%{x}</a>"


class Page:
    """The page as a reader has it before them."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def script(self, text: str, *arguments: object) -> Any:
        return self.driver.execute_script(text, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.find(selector).text)

    def choose(self, place: int) -> None:
        """Move the slider."""
        self.script(
            "const slider = document.getElementById('budget'); slider.value = arguments[0];"
            "slider.dispatchEvent(new Event('input'))",
            place,
        )

    def column(self, name: str) -> list[str]:
        """The cells of a column of the table."""
        return list(
            self.script(
                "const titles = [...document.querySelectorAll('#table-head th')].map((cell) => cell.textContent);"
                "const place = titles.indexOf(arguments[0]);"
                "return [...document.querySelectorAll('#table-body tr:not(.reason)')]"
                ".map((row) => row.cells[place].textContent)",
                name,
            )
        )

    def cells(self, body: str, place: int) -> list[str]:
        """A column of one of the tables that stand for a chart."""
        rows = "return [...document.querySelectorAll(`${arguments[0]} tr`)]"
        return list(self.script(rows + ".map((row) => row.cells[arguments[1]].textContent)", body, place))

    def reasons(self) -> list[str]:
        """The line below each row of the table."""
        return list(self.script("return [...document.querySelectorAll('.reason p')].map((cell) => cell.textContent)"))

    def traces(self, chart: str) -> list[dict[str, Any]]:
        """What is drawn: name, kind, points and hover texts of each trace."""
        return list(
            self.script(
                "return document.getElementById(arguments[0]).data.map((trace) => "
                "({name: trace.name, type: trace.type, x: trace.x, y: trace.y, hovertext: trace.hovertext}))",
                chart,
            )
        )

    def log(self, kind: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(kind))


@pytest.fixture(scope="module")
def profile() -> Profile:
    toy = blocks(6, size_bytes=200_000, link=SLOW_LINK)
    first, second = (value.id for value in toy.activations[:2])
    labels = {first: HOSTILE, second: MARKUP}
    values = tuple(replace(value, label=labels.get(value.id, value.label)) for value in toy.values)
    ops = tuple(replace(op, module=f"net.block{op.index // 4}.part{op.index % 4}") for op in toy.ops)
    return replace(toy, values=values, ops=ops, workload=f"toy {HOSTILE}", notes=(HOSTILE,))


@pytest.fixture(scope="module")
def path(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_report(profile, pooch.plan(profile, "75%"), path, budgets=3)
    return path


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    folder = tmp_path_factory.mktemp("browser")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={folder}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: Any, path: Path) -> Page:
    """A freshly loaded page. The driver may answer before the scripts of a page that is loaded again have run."""
    driver.get("about:blank")
    driver.get(path.as_uri())
    wait_for_charts(driver)
    return Page(driver)


def wait_for_charts(driver: Any) -> None:
    """The plotting library is unpacked after the tables are there."""
    is_ready = "return document.querySelectorAll('#step-chart .scatterlayer .trace').length > 0"
    waiting.WebDriverWait(driver, timeout=60).until(lambda driver: driver.execute_script(is_ready))


def test_it_draws_both_curves_the_budget_and_the_streams(page: Page, profile: Profile) -> None:
    traces = page.traces("step-chart")
    names = [trace["name"] for trace in traces]
    assert names[0] == f"in-core: peak {format_bytes(profile.peak_bytes)}"
    assert names[1].startswith("plan: peak")
    assert names[2].startswith("budget")
    assert {trace["y"][0] for trace in traces if trace["type"] == "bar"} >= {"compute"}
    assert page.script("return document.querySelectorAll('#step-chart .scatterlayer .trace').length") == 3
    drawn = page.script("return document.querySelectorAll('#step-chart .barlayer .point').length")
    assert drawn == sum(len(trace["x"]) for trace in traces if trace["type"] == "bar")
    assert page.script("return document.querySelectorAll('#budget-chart .scatterlayer .trace').length") == 4


def test_the_slider_changes_curve_numbers_and_table(page: Page, path: Path) -> None:
    data = json.loads(page.script("return document.getElementById('data').textContent"))
    seen = []
    for place, plan in enumerate(data["plans"]):
        page.choose(place)
        assert page.text("#summary") == plan["summary"]
        assert format_bytes(plan["peak_bytes"]) in page.text("#tiles")
        assert page.column("Choice") == [row[0] for row in plan["rows"]]
        curve = page.traces("step-chart")[1]
        assert max(curve["y"]) * 2**20 == pytest.approx(plan["peak_bytes"])
        (chosen,) = (trace for trace in page.traces("budget-chart") if trace["name"] == "chosen")
        seen.append((tuple(curve["y"]), page.text("#tiles"), tuple(page.reasons()), tuple(chosen["x"])))
    for each in zip(*seen, strict=True):
        assert len(set(each)) == len(data["plans"]), "every budget looks different"
    page.find("#given").click()
    assert "the plan given" in page.text("#budget-value")


def test_a_click_on_a_point_chooses_its_plan(page: Page) -> None:
    page.script(
        "document.getElementById('budget-chart').emit('plotly_click', {points: [{curveNumber: 1, pointNumber: 0}]})"
    )
    assert page.script("return document.getElementById('budget').value") == "0"


def test_columns_sort_both_ways(page: Page) -> None:
    page.script("document.querySelector('#sort-bytes button').click()")
    size_of = page.script("return Object.fromEntries(rowsOfPlan().map((row) => [formatBytes(row.bytes), row.bytes]))")
    falling = [size_of[cell] for cell in page.column("Size")]
    assert falling == sorted(falling, reverse=True)
    assert page.find("#sort-bytes").get_attribute("aria-sort") == "descending"
    page.script("document.querySelector('#sort-bytes button').click()")
    rising = [size_of[cell] for cell in page.column("Size")]
    assert rising == sorted(rising)
    assert page.find("#sort-label").get_attribute("aria-sort") == "none"


def test_rows_begin_in_the_order_of_the_program_and_the_arrow_says_so(page: Page) -> None:
    numbers = page.column("#")
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    sorted_by = page.driver.find_elements("css selector", "#table-head th[aria-sort=ascending]")
    assert [each.get_attribute("id") for each in sorted_by] == ["sort-order"]
    page.script("document.querySelector('#sort-label button').click()")
    labels = page.column("Activation")
    by_label = "return arguments[0].toSorted((one, other) => one.localeCompare(other, 'en', {numeric: true}))"
    assert labels == page.script(by_label, labels)


def test_filters_leave_what_was_asked_for(page: Page) -> None:
    everything = page.column("Choice")
    assert len(set(everything)) > 1
    page.find("#show-keep").click()
    assert page.column("Choice") == [choice for choice in everything if choice != "keep"]
    page.find("#search").send_keys("BLOCK1")
    layers = page.column("Layer")
    assert layers
    assert all("block1" in layer for layer in layers)
    assert page.text("#table-state").startswith(f"{len(layers)} of {len(everything)} activations")


def test_layers_gather_and_open(page: Page, profile: Profile) -> None:
    page.script(
        "const menu = document.getElementById('grouping'); menu.value = '2'; menu.dispatchEvent(new Event('change'))"
    )
    groups = page.script("return [...document.querySelectorAll('.group button')].map((each) => each.textContent)")
    of_values = [profile.ops[value.producer].module for value in profile.activations]
    assert groups == list(dict.fromkeys(".".join(module.split(".")[:2]) for module in of_values))
    count = len(page.driver.find_elements("css selector", "#table-body tr"))
    assert count == len(groups)
    page.find(".group button").click()
    members = [module for module in of_values if module.startswith(groups[0] + ".")]
    assert len(page.driver.find_elements("css selector", "#table-body tr:not(.reason)")) == count + len(members)


def test_labels_are_text_whatever_they_hold(page: Page, profile: Profile) -> None:
    assert page.driver.title == f"Plan of {profile_title(profile)}"
    assert HOSTILE in page.column("Activation")
    assert MARKUP in page.column("Activation")
    assert page.text("h1").startswith(f"Plan of toy {HOSTILE}")
    page.choose(0)  # under the smallest budget both are copied or replayed
    copies = [
        {"curveNumber": number, "pointNumber": place}
        for number, trace in enumerate(page.traces("step-chart"))
        for place, told in enumerate(trace["hovertext"] or ())
        if "broken out" in told
    ]
    assert copies
    for point in copies:
        page.script("Plotly.Fx.hover('step-chart', [arguments[0]])", point)
        assert "broken out" in page.text("#step-chart .hoverlayer")
        assert page.driver.find_elements("css selector", "img, a") == []
    assert page.driver.title != "broken out"


def test_nothing_is_loaded_or_sent_and_the_console_is_silent(page: Page) -> None:
    page.log("performance")
    page.log("browser")
    page.driver.refresh()
    wait_for_charts(page.driver)
    page.choose(0)
    page.script("Plotly.Fx.hover('step-chart', [{curveNumber: 3, pointNumber: 0}])")
    sent = [json.loads(entry["message"])["message"] for entry in page.log("performance")]
    addresses = [each["params"]["request"]["url"] for each in sent if each["method"] == "Network.requestWillBeSent"]
    assert addresses
    assert {address.partition(":")[0] for address in addresses} <= {"file", "data", "blob"}
    assert page.log("browser") == []
    buttons = page.script("return [...document.querySelectorAll('.modebar-btn')].map((each) => each.dataset.title)")
    assert buttons
    assert not [title for title in buttons if "hare" in title or "loud" in title], "a button would send the chart"


def test_a_script_that_is_not_the_pages_own_is_not_run(page: Page) -> None:
    page.script(
        "const intruder = document.createElement('script'); intruder.textContent = \"document.title = 'broken out'\";"
        "document.body.append(intruder)"
    )
    assert page.driver.title != "broken out"


@pytest.fixture
def narrow(page: Page, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page in a window of some width."""
    metrics = {"width": request.param, "height": 800, "deviceScaleFactor": 1, "mobile": request.param < 600}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.driver.refresh()
    wait_for_charts(page.driver)
    yield page
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("narrow", [360, 1280], indirect=True)
def test_the_page_is_never_wider_than_the_window(narrow: Page) -> None:
    assert narrow.script("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("narrow", [390], indirect=True)
def test_on_a_telephone_the_budget_has_a_row_of_its_own_and_the_sentence_stays(narrow: Page) -> None:
    line, value = narrow.find(".budget-line").rect, narrow.find("#budget-value").rect
    assert value["width"] == pytest.approx(line["width"], abs=1)
    summary = narrow.find("#summary")
    assert summary.is_displayed()
    assert summary.rect["width"] > 300
    reason = narrow.find(".reason p").rect
    assert reason["x"] + reason["width"] <= 390, "a reason can be read without scrolling"


def test_colours_follow_the_readers_scheme(page: Page) -> None:
    def background_and_curve() -> tuple[str, str]:
        return tuple(
            page.script(
                "return [getComputedStyle(document.body).backgroundColor,"
                " document.getElementById('step-chart').data[1].line.color]"
            )
        )

    light = background_and_curve()
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    page.script("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert all(one != other for one, other in zip(light, background_and_curve(), strict=True))
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_reader_can_choose_the_scheme(page: Page) -> None:
    seen = {}
    for _ in range(3):
        page.find("#theme").click()
        background = page.script("return getComputedStyle(document.body).backgroundColor")
        curve = page.script("return document.getElementById('step-chart').data[1].line.color")
        seen[page.text("#theme")] = (background, curve)
    light, dark = seen["Colours: light"], seen["Colours: dark"]
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert seen["Colours: as the system"] == light


def test_what_a_reader_chose_is_in_the_address(page: Page, path: Path) -> None:
    page.choose(0)
    page.find("#show-swap").click()
    page.find("#search").send_keys("block1")
    page.find("#sort-bytes button").click()
    page.find("#theme").click()
    address = page.script("return location.href")
    shown = (page.column("Activation"), page.text("#budget-value"), page.text("#theme"), page.text("#table-state"))
    page.driver.get("about:blank")
    page.driver.get(address)
    wait_for_charts(page.driver)
    again = (page.column("Activation"), page.text("#budget-value"), page.text("#theme"), page.text("#table-state"))
    assert again == shown
    assert page.find("#sort-bytes").get_attribute("aria-sort") == "descending"
    page.driver.get("about:blank")
    page.driver.get(f"{path.as_uri()}#page=7&budget=99&sort=nothing&group=x&theme=%3Cb%3E&hidden=everything")
    wait_for_charts(page.driver)
    assert "the plan given" in page.text("#budget-value"), "what makes no sense is left out"


def test_charts_have_their_figures_in_tables(page: Page) -> None:
    data = json.loads(page.script("return document.getElementById('data').textContent"))
    assert format_bytes(data["plans"][data["given"]]["peak_bytes"]) in page.cells("#curve-body", 1)
    assert "compute" in page.cells("#streams-body", 0)
    assert page.cells("#budgets-body", 1) == [format_bytes(plan["peak_bytes"]) for plan in data["plans"]]


def test_a_plan_made_fast_has_no_empty_chart_and_no_empty_columns(
    driver: Any, profile: Profile, tmp_path: Path
) -> None:
    plan = pooch.plan(profile, "75%", effort="fast")  # other choices are not simulated
    write_report(profile, plan, tmp_path / "fast.html", budgets=0)
    driver.get((tmp_path / "fast.html").as_uri())
    wait_for_charts(driver)
    page = Page(driver)
    assert not page.find("#budgets").is_displayed()
    assert not page.find("#budget").is_displayed()
    heads = page.script("return [...document.querySelectorAll('#table-head th')].map((cell) => cell.textContent)")
    assert "Size" in heads
    assert not [head for head in heads if head.startswith("If ")]
    assert page.text("#table-state").endswith("`pooch plan --effort full` computes them.")


def test_the_page_of_a_running_script_loads_itself_again_until_the_reader_stops_it(driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    click = "document.getElementById('reload').click()"  # in one piece, as the page may be loaded again at any time

    def wait_for(text: str) -> None:
        wait = waiting.WebDriverWait(driver, timeout=60, ignored_exceptions=[exceptions.WebDriverException])
        wait.until(lambda _: text in driver.execute_script("return document.body.innerText"))

    write_live_report(AutoSummary(steps_in_core=1), path, title="train.py")
    driver.get(path.as_uri())
    write_live_report(AutoSummary(steps_in_core=2), path, title="train.py")
    wait_for("2 steps")
    driver.execute_script(click)
    wait_for("Load again every 3 s")
    assert driver.execute_script("return location.hash") == "#stopped"
    write_run_report(AutoSummary(steps_in_core=3), [], path, title="train.py")
    driver.execute_script(click)
    wait_for("3 steps")
    assert not driver.find_elements("css selector", "#reload"), "the last version stays"


@pytest.mark.skipif(not os.environ.get("POOCH_AXE"), reason="POOCH_AXE names no axe.min.js: npm pack axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("narrow", [390, 1280], indirect=True)
def test_axe_finds_nothing_serious(narrow: Page, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    narrow.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    narrow.driver.refresh()
    wait_for_charts(narrow.driver)
    narrow.script("for (const each of document.querySelectorAll('details')) each.open = true")
    narrow.script(Path(os.environ["POOCH_AXE"]).read_text() + "; window.axe = axe")
    found = narrow.driver.execute_async_script("axe.run(document).then(arguments[arguments.length - 1])")
    narrow.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert found["passes"]
    assert [(each["id"], each["impact"]) for each in found["violations"]] == []
