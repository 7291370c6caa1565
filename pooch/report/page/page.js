"use strict";

// The page draws what the planner predicted. Everything it shows is in the element #data; text from there only ever
// becomes text (textContent), or is escaped where Plotly would read it as markup.

// One plan, or those of a run. The fragment of the address holds what a reader has chosen, so that it can be sent on.
const given = JSON.parse(document.getElementById("data").textContent);
const pages = given.pages ?? [given];
const asked = new URLSearchParams(location.hash.slice(1));
const askedNumber = (name, least, most) => {
  const number = Number(asked.get(name) ?? NaN);
  return number >= least && number <= most ? number : undefined;
};
const chosen = askedNumber("page", 0, pages.length - 1) ?? 0;
const data = pages[chosen];
const CHOICES = ["keep", "swap", "recompute"];
const STREAMS = { copy_in: "copy in", copy_out: "copy out", compute: "compute" };
const KINDS = { op: "op", replay: "replay", stall: "waiting for a copy", copy: "copy", move: "copy of what outlives the step" };
const PATTERNS = { replay: ".", stall: "x", move: "\\" }; // so that bars of one stream differ without colour too
const PARTS_OF_CURVE = 24; // rows of the table that stands for the curve
const ROWS_AT_FIRST = 100;
const GIB = 2 ** 30;
const MIB = 2 ** 20;

// One row of the table under the chosen plan; `key` is what sorting compares.
const ALL_COLUMNS = [
  { name: "order", title: "#", number: true, key: (row) => row.value },
  { name: "choice", title: "Choice", key: (row) => CHOICES.indexOf(row.choice) },
  { name: "layer", title: "Layer", key: (row) => row.layer },
  { name: "label", title: "Activation", key: (row) => row.label },
  { name: "bytes", title: "Size", number: true, key: (row) => row.bytes },
  { name: "copy", title: "Copy", number: true, key: (row) => row.copy },
  { name: "replay", title: "Replay", number: true, key: (row) => row.replay },
  { name: "kept", title: "If kept", number: true, key: (row) => row.kept },
  { name: "swapped", title: "If swapped", number: true, key: (row) => row.swapped },
  { name: "recomputed", title: "If recomputed", number: true, key: (row) => row.recomputed },
];
// Columns of which no plan knows anything are left out; `PLACES` says where a row of a plan has them.
const PLACES = { copy: 1, replay: 2, kept: 3, swapped: 4, recomputed: 5 };
const COLUMNS = ALL_COLUMNS.filter(({ name }) =>
  !(name in PLACES) || data.plans.some(({ rows }) => rows.some((row) => row[PLACES[name]] !== null)));
const ALTERNATIVES = COLUMNS.some(({ name }) => name === "kept" || name === "swapped" || name === "recomputed");

const START = { sort: "order", search: "", hidden: "", group: 0, theme: "" };
const state = {
  plan: askedNumber("budget", 0, data.plans.length - 1) ?? data.given,
  sort: askedSort(),
  search: asked.get("search") ?? START.search,
  shown: new Set(CHOICES.filter((choice) => !(asked.get("hidden") ?? START.hidden).split(",").includes(choice))),
  depth: asked.get("group") === "layer" ? Infinity : askedNumber("group", 0, 99) ?? START.group, // names of a module path; 0: no groups
  theme: ["light", "dark"].includes(asked.get("theme")) ? asked.get("theme") : START.theme, // "": as the system has it
  open: new Set(),
  allRows: false,
};

function askedSort() {
  const text = asked.get("sort") ?? START.sort;
  const column = text.replace(/^-/, "");
  return COLUMNS.some(({ name }) => name === column) ? { column, descending: text.startsWith("-") }
    : { column: START.sort, descending: false };
}

// Only what differs from the start goes into the address.
function remember() {
  const now = {
    page: chosen || "",
    budget: state.plan === data.given ? "" : state.plan,
    sort: `${state.sort.descending ? "-" : ""}${state.sort.column}`.replace(/^order$/, ""),
    search: state.search,
    hidden: CHOICES.filter((choice) => !state.shown.has(choice)).join(","),
    group: state.depth === Infinity ? "layer" : state.depth || "",
    theme: state.theme,
  };
  const kept = new URLSearchParams(Object.entries(now).filter(([, value]) => value !== ""));
  history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname + location.search);
}

const plan = () => data.plans[state.plan];
const byId = (id) => document.getElementById(id);

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Bytes, times and names for people, as the command line writes them.

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; Math.abs(bytes) >= 1024 && unit < 3; unit += 1) bytes /= 1024;
  return `${bytes.toFixed(unit ? 2 : 0)} ${units[unit]}`;
}

function formatMs(ms) {
  if (Math.abs(ms) >= 1000) return `${(ms / 1000).toFixed(3)} s`;
  return Math.abs(ms) >= 1 || ms === 0 ? `${ms.toFixed(1)} ms` : `${(ms * 1000).toFixed(1)} us`;
}

function formatChange(change) {
  if (change === null) return "-";
  if (change === Infinity) return "too big";
  return Math.abs(change) < 1e-6 ? "0" : `${change < 0 ? "-" : "+"}${formatMs(Math.abs(change))}`;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const signed = (share) => `${share < 0 ? "" : "+"}${percent(share)}`;
const lost = (stepMs) => (data.in_core.step_ms ? stepMs / data.in_core.step_ms - 1 : 0);
const escapeMarkup = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function opName(slot) {
  const [name, module] = data.ops[slot];
  return module ? `${name} in ${module}` : name;
}

function valueName(value) {
  return value in data.values ? data.values[value][0] : `value ${value}`;
}

function budgetName(each) {
  if (!each.budget_bytes) return "none";
  return `${formatBytes(each.budget_bytes)} (${percent(each.budget_bytes / data.in_core.peak_bytes)} of in-core)`;
}

// Headline: the slider and the tiles.

function drawHeadline() {
  const isGiven = state.plan === data.given;
  byId("budget").value = state.plan;
  byId("budget").setAttribute("aria-valuetext", budgetName(plan()) + (isGiven ? ", the plan given" : ""));
  byId("budget-value").textContent = budgetName(plan()) + (isGiven ? " \u2013 the plan given" : "");
  byId("given").disabled = isGiven;
  byId("summary").textContent = plan().summary;
  byId("tiles").replaceChildren(memoryTile(), timeTile(), qualityTile(), tierTile(), choicesTile());
  byId("notes").replaceChildren(...[...plan().notes, ...data.notes].map((note) => element("li", { textContent: note })));
}

function tile(title, headline, ...lines) {
  const paragraphs = lines.map((line) => (typeof line === "string" ? element("p", { textContent: line }) : line));
  return element("div", { className: "tile" }, element("h2", { textContent: title }),
    element("strong", { textContent: headline }), ...paragraphs);
}

function memoryTile() {
  const { peak_bytes: peak, budget_bytes: budget } = plan();
  const over = peak > budget;
  const fits = !budget ? "no budget was given" : element("p", {
    className: over ? "over" : "",
    textContent: over ? `${formatBytes(peak - budget)} over the budget` : `fits into ${formatBytes(budget)}`,
  });
  return tile("Predicted peak", formatBytes(peak), fits, `in-core: ${formatBytes(data.in_core.peak_bytes)}`);
}

function timeTile() {
  return tile("Predicted step time", formatMs(plan().step_ms), `${signed(lost(plan().step_ms))} on in-core`,
    `in-core: ${formatMs(data.in_core.step_ms)}`);
}

function qualityTile() {
  const { status, gap, lower_bound_ms: bound } = plan();
  if (gap === null || bound === null) return tile("How good the plan is", status, "no bound is known");
  return tile("How good the plan is", status, `gap to the bound: ${percent(gap)}`, `no plan is faster than ${formatMs(bound)}`);
}

function tierTile() {
  const { host_bytes: host, stall_ms: stall, replay_ms: replay } = plan();
  return tile("In the swap tier", formatBytes(host), `waiting for copies: ${formatMs(stall)}`, `replays: ${formatMs(replay)}`);
}

function choicesTile() {
  const items = CHOICES.map((choice) => {
    const [count, bytes] = plan().choices[choice];
    return element("span", {}, swatch(choice), `${choice} ${count.toLocaleString("en")} \u00b7 ${formatBytes(bytes)}`);
  });
  const sums = Object.fromEntries(CHOICES.map((choice) => [choice, plan().choices[choice][1]]));
  return element("div", { className: "tile wide" }, element("h2", { textContent: "Activations by choice" }),
    split(sums, ""), element("div", { className: "choices" }, ...items));
}

function swatch(choice) {
  return element("span", { className: `swatch choice-${choice}` });
}

function split(bytesByChoice, className) {
  const parts = CHOICES.map((choice) => {
    const part = element("span", { className: `choice-${choice}`, title: `${choice}: ${formatBytes(bytesByChoice[choice])}` });
    part.style.flex = String(bytesByChoice[choice]);
    return part;
  });
  return element("div", { className: `split ${className}` }, ...parts.filter((part) => part.style.flexGrow !== "0"));
}

// Charts.

// The buttons are named one by one, because the default ones include sending the chart to a service.
const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: matchMedia("(min-width: 601px)").matches,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  plotlyServerURL: "",
};

function theme() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

const scaleOfTime = () => (data.in_core.step_ms >= 2000 ? [1000, "s"] : [1, "ms"]);
const scaleOfBytes = () => (data.in_core.peak_bytes >= 2 * GIB ? [GIB, "GiB"] : [MIB, "MiB"]);

function layoutOf(colour, more) {
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("ink") },
    margin: { l: 60, r: 12, t: 8, b: 44 },
    hoverlabel: { align: "left", bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink") } },
    hovermode: "closest",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("ink") },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    uirevision: "stays", // zoom survives another budget
    ...more,
  };
  for (const name of Object.keys(layout).filter((each) => /^[xy]axis/.test(each))) layout[name] = { ...axis, ...layout[name] };
  return layout;
}

function curveTrace(name, curve, peakBytes, colour) {
  const [timeScale] = scaleOfTime();
  const [byteScale] = scaleOfBytes();
  return {
    type: "scatter",
    mode: "lines",
    name: `${name}: peak ${formatBytes(peakBytes)}`,
    x: curve.time_ms.map((ms) => ms / timeScale),
    y: curve.live_bytes.map((bytes) => bytes / byteScale),
    yaxis: "y2",
    line: { shape: "hv", width: 1.5, color: colour },
    fill: "tozeroy",
    fillcolor: `${colour}26`,
    hoverinfo: "text",
    hovertext: curve.time_ms.map((ms, place) => `<b>${formatBytes(curve.live_bytes[place])}</b> ${name}<br>at ${formatMs(ms)}`
      + `, during ${escapeMarkup(opName(curve.slot[place]))}`),
  };
}

function barName(bars, place) {
  const target = bars.target[place];
  const compute = bars.kind === "op" || bars.kind === "replay";
  const name = compute ? opName(target) : bars.kind === "move" ? data.persistent[target][0]
    : target < 0 ? "what outlives the step" : valueName(target);
  const told = escapeMarkup(name) + (bars.count[place] > 1 ? ` and ${bars.count[place] - 1} more` : "");
  const held = bars.kind === "move" ? data.persistent[target] : bars.kind === "copy" ? data.values[target] : undefined;
  const size = held ? `, ${formatBytes(held[1])}` : "";
  const times = `${formatMs(bars.duration_ms[place])} at ${formatMs(bars.start_ms[place])}`;
  const kind = bars.kind === "copy" || bars.kind === "move" ? STREAMS[bars.stream] : KINDS[bars.kind];
  return `<b>${kind}</b>: ${told}<br>${times}${size}`;
}

function barTrace(bars, named) {
  const [timeScale] = scaleOfTime();
  const isFirst = !named.has(bars.kind);
  named.add(bars.kind);
  return {
    type: "bar",
    orientation: "h",
    name: KINDS[bars.kind],
    legendgroup: bars.kind,
    showlegend: isFirst,
    base: bars.start_ms.map((ms) => ms / timeScale),
    x: bars.duration_ms.map((ms) => ms / timeScale),
    y: bars.start_ms.map(() => STREAMS[bars.stream]),
    width: 0.8,
    marker: { color: data.colours.kinds[bars.kind], line: { width: 0 },
      pattern: { shape: PATTERNS[bars.kind] ?? "", fgcolor: "#fff", fillmode: "overlay", size: 6, solidity: 0.25 } },
    textposition: "none",
    hoverinfo: "text",
    hovertext: bars.start_ms.map((_, place) => barName(bars, place)),
  };
}

function drawStep() {
  const colour = theme();
  const [timeScale, timeUnit] = scaleOfTime();
  const [byteScale, byteUnit] = scaleOfBytes();
  const end = Math.max(data.in_core.step_ms, plan().step_ms) / timeScale;
  const highest = Math.max(data.in_core.peak_bytes, plan().peak_bytes, plan().budget_bytes) / byteScale;
  const named = new Set();
  const traces = [
    curveTrace("in-core", data.in_core.curve, data.in_core.peak_bytes, colour("in-core")),
    curveTrace("plan", plan().curve, plan().peak_bytes, colour("planned")),
    ...plan().bars.map((bars) => barTrace(bars, named)),
  ];
  if (plan().budget_bytes) {
    const height = plan().budget_bytes / byteScale;
    traces.splice(2, 0, {
      type: "scatter",
      mode: "lines",
      name: `budget ${formatBytes(plan().budget_bytes)}`,
      x: [0, end],
      y: [height, height],
      yaxis: "y2",
      line: { color: colour("budget"), dash: "dash", width: 1.5 },
      hoverinfo: "name",
    });
  }
  const boundary = plan().backward_ms / timeScale;
  const pass = { x: boundary, y: 1, yref: "paper", yanchor: "top", showarrow: false, font: { color: colour("quiet") } };
  const layout = layoutOf(colour, {
    barmode: "overlay",
    xaxis: { title: { text: `time since the step began (${timeUnit})` }, range: [0, end], anchor: "y", showspikes: true,
      spikemode: "across", spikethickness: 1, spikedash: "dot", spikecolor: colour("quiet") },
    yaxis: { domain: [0, 0.27], categoryorder: "array", categoryarray: Object.values(STREAMS), fixedrange: true },
    yaxis2: { domain: [0.33, 1], title: { text: `live memory (${byteUnit})` }, range: [0, highest * 1.12], fixedrange: true },
    shapes: [{ type: "line", x0: boundary, x1: boundary, y0: 0, y1: 1, yref: "paper",
      line: { color: colour("quiet"), width: 1, dash: "dot" } }],
    annotations: [{ ...pass, text: "forward\u00a0", xanchor: "right" }, { ...pass, text: "\u00a0backward", xanchor: "left" }],
  });
  draw("step-chart", traces, layout);
  byId("step-chart").setAttribute("aria-label", `Live memory over time beside the in-core step, and what the three streams do. ${plan().summary}`);
}

function drawBudgets() {
  const colour = theme();
  const [byteScale, byteUnit] = scaleOfBytes();
  const budgets = data.plans.map((each) => (each.budget_bytes || each.peak_bytes) / byteScale);
  const losses = data.plans.map((each) => 100 * lost(each.step_ms));
  const bounded = data.plans.map((each, place) => place).filter((place) => data.plans[place].lower_bound_ms !== null);
  const told = data.plans.map((each) => `<b>${signed(lost(each.step_ms))}</b> (${formatMs(each.step_ms)}), ${each.status}<br>`
    + `budget ${budgetName(each)}<br>peak ${formatBytes(each.peak_bytes)}`);
  const traces = [
    { type: "scatter", mode: "lines", name: "no plan is faster", x: bounded.map((place) => budgets[place]),
      y: bounded.map((place) => 100 * lost(data.plans[place].lower_bound_ms)),
      line: { color: colour("bound"), dash: "dot", width: 1.5 }, hoverinfo: "skip" },
    { type: "scatter", mode: "lines+markers", name: "plans", x: budgets, y: losses, hovertext: told, hoverinfo: "text", cliponaxis: false,
      line: { color: colour("planned"), width: 1.5 }, marker: { size: 8 } },
    { type: "scatter", mode: "markers", name: "the plan given", x: [budgets[data.given]], y: [losses[data.given]],
      cliponaxis: false,
      marker: { symbol: "diamond", size: 11, color: colour("planned") }, hoverinfo: "skip" },
    { type: "scatter", mode: "markers", name: "chosen", x: [budgets[state.plan]], y: [losses[state.plan]], cliponaxis: false,
      marker: { symbol: "circle-open", size: 20, color: colour("budget"), line: { width: 2.5 } }, hoverinfo: "skip" },
  ];
  const layout = layoutOf(colour, {
    xaxis: { title: { text: `budget (${byteUnit})` } },
    yaxis: { title: { text: "predicted time lost (%)" }, rangemode: "tozero" },
  });
  draw("budget-chart", traces, layout);
  byId("budget-chart").setAttribute("aria-label", `Predicted time over budget, of ${data.plans.length} plans; the table below has the figures.`);
}

// The library takes a moment to unpack; the tables do not wait for it.
function draw(name, traces, layout) {
  if (globalThis.Plotly) Plotly.react(name, traces, layout, CONFIG);
}

// The charts as tables, for those who cannot see them, and to copy from.

function fill(name, heads, rows) {
  const cell = (tag, text, place) => element(tag, { textContent: text, className: place ? "number" : "" });
  byId(`${name}-head`).replaceChildren(element("tr", {}, ...heads.map((head, place) =>
    Object.assign(cell("th", head, place), { scope: "col" }))));
  byId(`${name}-body`).replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((text, place) => cell("td", text, place)))));
}

function drawStepTables() {
  const end = plan().step_ms;
  const curves = [plan().curve, data.in_core.curve];
  const parts = Array.from({ length: PARTS_OF_CURVE }, (_, part) => {
    const [from, to] = [end * part / PARTS_OF_CURVE, end * (part + 1) / PARTS_OF_CURVE];
    return [`${formatMs(from)} to ${formatMs(to)}`, ...curves.map((curve) => highestBetween(curve, from, to))];
  });
  fill("curve", ["Part of the step", "Plan", "In-core"], parts);
  fill("streams", ["Stream", "Kind", "Number", "Time"], plan().bars.map((bars) => [STREAMS[bars.stream], KINDS[bars.kind],
    bars.count.reduce((sum, count) => sum + count, 0).toLocaleString("en"),
    formatMs(bars.duration_ms.reduce((sum, ms) => sum + ms, 0))]));
}

// What lives at the beginning of the part counts too: a point of a curve holds until the next one.
function highestBetween(curve, from, to) {
  if (from > curve.time_ms.at(-1)) return "-";
  const before = curve.time_ms.findLastIndex((ms) => ms <= from);
  const within = curve.live_bytes.filter((_, place) => place === before || (curve.time_ms[place] > from && curve.time_ms[place] < to));
  return formatBytes(within.reduce((most, bytes) => Math.max(most, bytes), 0));
}

function fillBudgets() {
  const bound = (each) => (each.lower_bound_ms === null ? "-" : formatMs(each.lower_bound_ms));
  fill("budgets", ["Budget", "Peak", "Step", "Time lost", "No plan is faster than", "Status"], data.plans.map((each) => [
    budgetName(each), formatBytes(each.peak_bytes), formatMs(each.step_ms), signed(lost(each.step_ms)), bound(each), each.status]));
}

// The table.

function rowsOfPlan() {
  const change = (each) => (each === "inf" ? Infinity : each);
  return plan().rows.map(([choice, copy, replay, kept, swapped, recomputed, reason], place) => {
    const [value, layer] = data.rows[place];
    const [label, bytes] = data.values[value];
    return { value, place, layer, label, bytes, choice, copy, replay, reason,
      kept: change(kept), swapped: change(swapped), recomputed: change(recomputed) };
  });
}

function isShown(row) {
  const text = `${row.label} ${row.layer} ${row.reason}`.toLowerCase();
  return state.shown.has(row.choice) && text.includes(state.search);
}

function compare(one, other) { // what is not known comes last, in either direction
  const { key } = COLUMNS.find((column) => column.name === state.sort.column);
  const [left, right] = [key(one), key(other)];
  if (left === null || right === null) return (left === null) - (right === null);
  const order = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : (left > right) - (left < right);
  return (state.sort.descending ? -order : order) || one.value - other.value;
}

function rowElement(row) {
  const cells = {
    order: [(row.place + 1).toLocaleString("en")],
    choice: [swatch(row.choice), row.choice],
    layer: [element("span", { textContent: row.layer, title: row.layer })],
    label: [row.label.startsWith(`${row.layer}.`) ? row.label.slice(row.layer.length + 1) : row.label],
    bytes: [formatBytes(row.bytes)],
    copy: [row.copy === null ? "-" : formatMs(row.copy)],
    replay: [row.replay === null ? "-" : formatMs(row.replay)],
    kept: [formatChange(row.kept)],
    swapped: [formatChange(row.swapped)],
    recomputed: [formatChange(row.recomputed)],
  };
  // The reason has a line of its own below the figures: it is as long as they are together.
  return [
    element("tr", {}, ...COLUMNS.map(({ name, number }) => element("td", { className: number ? "number" : name }, ...cells[name]))),
    element("tr", { className: "reason" },
      element("td", {}), element("td", { colSpan: COLUMNS.length - 1 }, element("p", { textContent: row.reason }))),
  ];
}

function groupName(row) {
  return state.depth === Infinity ? row.layer : row.layer.split(".").slice(0, state.depth).join(".");
}

function groupElements(name, rows) {
  const isOpen = state.open.has(name);
  const sums = Object.fromEntries(CHOICES.map((choice) => [choice, 0]));
  for (const row of rows) sums[row.choice] += row.bytes;
  const button = element("button", { type: "button", textContent: name, onclick: () => {
    if (!state.open.delete(name)) state.open.add(name);
    drawTable();
  } });
  button.setAttribute("aria-expanded", String(isOpen));
  const total = rows.reduce((sum, row) => sum + row.bytes, 0);
  const head = element("tr", { className: "group" },
    element("td", { colSpan: 2 }, split(sums, "small")),
    element("td", { colSpan: 2 }, button, element("span", { className: "count", textContent: ` (${rows.length})` })),
    element("td", { className: "number", textContent: formatBytes(total) }),
    element("td", { colSpan: COLUMNS.length - 5, textContent: CHOICES.filter((choice) => sums[choice])
      .map((choice) => `${choice} ${formatBytes(sums[choice])}`).join(", ") }));
  return [head, ...(isOpen ? rows.flatMap(rowElement) : [])];
}

function drawTable() {
  const all = rowsOfPlan();
  const rows = all.filter(isShown).sort(compare);
  const most = state.allRows ? rows.length : ROWS_AT_FIRST;
  byId("table-body").replaceChildren(...(state.depth
    ? [...Map.groupBy(rows, groupName)].flatMap(([name, members]) => groupElements(name, members))
    : rows.slice(0, most).flatMap(rowElement)));
  const total = rows.reduce((sum, row) => sum + row.bytes, 0);
  byId("table-state").textContent = `${rows.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} activations, `
    + `${formatBytes(total)}. ${ALTERNATIVES ? '"If ..." is the change of the step if this activation alone were treated differently.'
      : "Planned fast: no alternatives were computed; `pooch plan --effort full` computes them."}`;
  byId("more").hidden = Boolean(state.depth) || rows.length <= most;
  byId("more").textContent = `Show all ${rows.length.toLocaleString("en")}`;
  remember();
  for (const column of COLUMNS) {
    const direction = state.sort.descending ? "descending" : "ascending";
    byId(`sort-${column.name}`).setAttribute("aria-sort", column.name === state.sort.column ? direction : "none");
  }
}

function sortBy({ name, number }) {
  const again = state.sort.column === name;
  state.sort = { column: name, descending: again ? !state.sort.descending : Boolean(number) && name !== "order" };
  drawTable();
}

// Once, at the start.

function choose(place) {
  state.plan = place;
  drawHeadline();
  drawCharts();
  drawStepTables();
  drawTable();
}

function drawCharts() {
  drawStep();
  if (data.plans.length > 1) drawBudgets();
}

// The colours of the charts are read from the style sheet when they are drawn.
function applyTheme() {
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  else delete document.documentElement.dataset.theme;
  byId("theme").textContent = `Colours: ${state.theme || "as the system"}`;
}

function buildControls() {
  byId("facts").append(...Object.entries(data.facts).map(([name, text]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: text }))));
  byId("table-head").append(element("tr", {}, ...COLUMNS.map((column) => {
    const button = element("button", { type: "button", textContent: column.title, onclick: () => sortBy(column) });
    return element("th", { id: `sort-${column.name}`, scope: "col", className: column.number ? "number" : "" }, button);
  })));
  byId("choice-filters").append(...CHOICES.map((choice) => {
    const box = element("input", { type: "checkbox", checked: state.shown.has(choice), id: `show-${choice}` });
    box.addEventListener("change", () => {
      if (!state.shown.delete(choice)) state.shown.add(choice);
      drawTable();
    });
    return element("label", {}, box, " ", swatch(choice), choice);
  }));
  const deepest = Math.max(1, ...data.rows.map(([, layer]) => layer.split(".").length));
  const depths = [[0, "nothing"], ...Array.from({ length: deepest - 1 }, (_, place) => [place + 1, depthName(place + 1)])];
  byId("grouping").append(...[...depths, [Infinity, "layer"]].map(([value, text]) =>
    element("option", { value: String(value), textContent: text, selected: value === state.depth })));
  byId("search").value = state.search;
  if (byId("pages")) {
    byId("pages").append(...pages.map((page, place) => element("option", { value: String(place), textContent: page.name })));
    byId("pages").value = String(chosen);
  }
  byId("budget").max = data.plans.length - 1;
  byId("budget").hidden = byId("budgets").hidden = data.plans.length === 1;
  if (data.plans.length > 1) fillBudgets();
  byId("theme").hidden = false;
  applyTheme();
}

const depthName = (depth) => `first ${depth === 1 ? "name" : `${depth} names`} of layer`;

function listen() {
  byId("pages")?.addEventListener("change", (event) => {
    location.hash = new URLSearchParams({ page: event.target.value, ...(state.theme && { theme: state.theme }) });
    location.reload();
  });
  byId("budget").addEventListener("input", (event) => choose(Number(event.target.value)));
  byId("given").addEventListener("click", () => choose(data.given));
  byId("more").addEventListener("click", () => {
    state.allRows = true;
    drawTable();
  });
  byId("search").addEventListener("input", (event) => {
    state.search = event.target.value.trim().toLowerCase();
    drawTable();
  });
  byId("grouping").addEventListener("change", (event) => {
    state.depth = Number(event.target.value);
    drawTable();
  });
  byId("theme").addEventListener("click", () => {
    const themes = ["", "light", "dark"];
    state.theme = themes[(themes.indexOf(state.theme) + 1) % themes.length];
    applyTheme();
    drawCharts();
    remember();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
}

// The plotting library lies in the page compressed, a third of its size. The page's policy knows its digest.
async function unpackLibrary() {
  const bytes = Uint8Array.from(atob(byId("library").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", { textContent: await new Response(unpacked).text() }));
}

async function start() {
  buildControls();
  choose(state.plan);
  listen();
  try {
    await unpackLibrary();
  } catch {
    byId("no-charts").hidden = false;
    return;
  }
  drawCharts();
  if (data.plans.length > 1) {
    byId("budget-chart").on("plotly_click", ({ points }) => {
      const point = points.find((each) => each.curveNumber === 1);
      if (point) choose(point.pointNumber);
    });
  }
}

start();
