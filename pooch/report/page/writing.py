"""The page as a file: template, style, script, plotting library and data put together."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from ...api.options import in_flight
from ...api.simulation import simulate
from ...ground.colours import CHOICES, DARK, LIGHT
from ...ground.errors import UsageError
from ...ground.progress import PlanningProgress
from ...ground.version import VERSION
from ...ground.visible import visible
from ...ir import Plan, Profile
from ...ir.files import replace_file
from ..summaries import Record
from .budgets import BudgetPlans, plan_budgets
from .contents import page_contents

DEFAULT_BUDGETS = 9
_THEME_BUTTON = '<button type="button" id="theme" hidden></button>'
NOTHING_LOADED = "default-src 'none'; form-action 'none'; base-uri 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    profile: Profile,
    plan: Plan,
    path: str | Path,
    *,
    budgets: int | Sequence[int | str] = DEFAULT_BUDGETS,
    host_budget: int | str | None = None,
    time_limit_s: float = 30.0,
    progress: PlanningProgress | None = None,
    command: str = "",
) -> BudgetPlans:
    """Write a page to look at a plan: one file that needs no network.

    Args:
        profile: what the plan was made for.
        plan: what the page is about.
        path: the HTML file to write.
        budgets: other budgets that the page's slider offers, each planned as the plan was: how many, evenly spaced
            from the smallest feasible one to the in-core peak; or which, as `pooch.plan` takes them.
        host_budget: most bytes in the swap tier for these plans.
        time_limit_s: most seconds to plan for, for each of them.
        progress: called with what is being done and the share that is done.
        command: what the page is written by, for its last line.

    Returns:
        The plans on the page.

    Raises:
        UsageError: plotly is not installed, or one of the planning arguments cannot be understood.
        PlanMismatch: the plan was made for another profile.
        FileFormatError: the file cannot be written.
    """
    library = plotly_source()
    profile = replace(profile.variant(plan.splits), split=None)  # all plans of a page are of one kind
    profile = in_flight(profile, plan.microbatches_in_flight)
    simulate(profile, plan)  # before other budgets are planned at length: do the two belong together?
    plans = plan_budgets(profile, plan, budgets, host_budget=host_budget, time_limit_s=time_limit_s, progress=progress)
    replace_file(path, page_text(page_contents(profile, plans), library, command).encode())
    return plans


def plotly_source() -> str:
    """The plotting library that goes into the page.

    Raises:
        UsageError: it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise UsageError(
            "the page is drawn by the package 'plotly', which is not installed: pip install plotly"
        ) from None
    source: str = get_plotlyjs()
    return source


def page_text(contents: Record, library: str, command: str = "") -> str:
    """The page of a plan."""
    plans, given = contents["plans"], contents["given"]
    assert isinstance(plans, list)
    assert isinstance(given, int)
    return charted_page(str(contents["title"]), str(plans[given]["summary"]), contents, library, command=command)


def charted_page(title: str, summary: str, data: Record, library: str, run: str = "", *, command: str = "") -> str:
    """A page with charts.

    Its policy lets a browser run the two scripts that it knows by their digests, and load nothing: whatever a label
    holds is not executed.

    Args:
        title: The headline.
        summary: What the charts show, for those who cannot see them.
        data: What the script reads: the contents of one page, or of several as "pages".
        library: The plotting library.
        run: HTML that stands before the charts.
        command: what the page is written by.
    """
    script = resource("page.js")
    scripts = (
        f'<script type="application/json" id="data">{json_for_html(data)}</script>',
        f'<script type="text/plain" id="library">{_packed(library)}</script>',
        f"<script>{script}</script>",
    )
    return framed_page(
        title,
        run + Template(resource("charts.html")).substitute(summary=html.escape(summary)),
        policy=f"{NOTHING_LOADED}; script-src {digests(library, script)}",
        facts='  <dl id="facts" class="facts"></dl>\n',
        scripts="".join(f"{each}\n" for each in scripts),
        controls=_THEME_BUTTON,
        command=command,
    )


def framed_page(
    title: str,
    main: str,
    *,
    policy: str = NOTHING_LOADED,
    facts: str = "",
    scripts: str = "",
    controls: str = "",
    command: str = "",
    head: str = "",
) -> str:
    """A page around some HTML.

    Args:
        title: The headline.
        main: What stands below it.
        policy: What a browser may load and run.
        facts: HTML in the page's header.
        scripts: HTML at the end.
        controls: HTML beside the headline.
        command: what the page is written by.
        head: further elements of the head, a line each.
    """
    return Template(resource("frame.html")).substitute(
        policy=policy,
        title=html.escape(title),
        style=style(),
        facts=facts,
        main=main,
        scripts=scripts,
        controls=controls,
        footer=_footer(command),
        head=head,
    )


def style() -> str:
    """The style sheet, after the colours of both schemes: the system's choice, unless the reader has made one."""
    light, dark = (
        "".join(f"--{name}:{colour};" for name, colour in (scheme | CHOICES).items()) for scheme in (LIGHT, DARK)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f'@media (prefers-color-scheme:dark){{:root:not([data-theme="light"]){{{dark}}}}}\n'
        f':root[data-theme="light"]{{color-scheme:light}}\n:root[data-theme="dark"]{{color-scheme:dark;{dark}}}\n'
        + resource("page.css")
    )


def _footer(command: str) -> str:
    """Which version wrote the page, when, and by what."""
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    by = f": <code>{html.escape(visible(command))}</code>" if command else ""
    return f"Written by pooch-planner {VERSION} on {written}{by}"


@cache
def _packed(library: str) -> str:
    """A script as text that the page unpacks: compressed, it is a third as large."""
    return base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()


def json_for_html(contents: Record) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(contents, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def digests(*scripts: str) -> str:
    """What a page's policy says to have these scripts run, and no other one."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def resource(name: str) -> str:
    """A file that lies beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
