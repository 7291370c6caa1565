"""The page in a real browser (Debian: chromium and chromium-driver); skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pooch
from pooch.ir import Profile
from pooch.report.curves import profile_title
from pooch.report.page.writing import write_report
from pooch.units import format_bytes
from tests.toys import SLOW_LINK, blocks

pytest.importorskip("plotly", reason="the extra 'report' is not installed")
webdriver = pytest.importorskip("selenium.webdriver", reason="the extra 'dev' is not installed")
waiting = pytest.importorskip("selenium.webdriver.support.wait", reason="the extra 'dev' is not installed")

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
                "const titles = [...document.querySelectorAll('thead th')].map((cell) => cell.textContent);"
                "const place = titles.indexOf(arguments[0]);"
                "return [...document.querySelectorAll('tbody tr')].map((row) => row.cells[place].textContent)",
                name,
            )
        )

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
    is_ready = "return document.readyState === 'complete' && document.querySelectorAll('#grouping option').length > 0"
    waiting.WebDriverWait(driver, timeout=60).until(lambda driver: driver.execute_script(is_ready))
    return Page(driver)


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
        seen.append((tuple(curve["y"]), page.text("#tiles"), tuple(page.column("Reason")), tuple(chosen["x"])))
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
    count = len(page.driver.find_elements("css selector", "tbody tr"))
    assert count == len(groups)
    page.find(".group button").click()
    members = [module for module in of_values if module.startswith(groups[0] + ".")]
    assert len(page.driver.find_elements("css selector", "tbody tr")) == count + len(members)


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


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_never_wider_than_the_window(page: Page, width: int) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    page.driver.refresh()
    assert page.script("return document.documentElement.scrollWidth") <= width
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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
