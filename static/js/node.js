// A node's page: charts over time, past and live, and periodic refreshes of the rest. One socket.
import { lamp } from "./app.js";
import { Chart } from "./charts.js";
import { isFormInUse, isInUse } from "./in_use.js";
import { Range } from "./ranges.js";
import { connect, rereader } from "./socket.js";
import { paintBand, paintMarks, timeAxis, withGaps } from "./times.js";
import { nowClock } from "./words.js";

const EVERY_MS = 5_000; // each refresh reads the database
const SOON_MS = 300; // delay after an event
const LONG_S = 2 * 86_400; // longer ranges take no live samples: they are fetched again periodically
const AGAIN_MS = 120_000;
const MOST_NAMES = 32;

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const page = read("node-charts");
const x = timeAxis(page.zone);
const opened = performance.now();
const now = () => page.now + (performance.now() - opened) / 1000;

let marks = read("marks");
const seconds = () => marks.span.seconds ?? 0; // 0: a fixed range in the past
const span = () => (seconds() ? [now() - seconds(), now()] : [marks.span.from, marks.span.to]);

const charts = page.figures.map((spec) => {
  const figure = document.querySelector(`[data-chart="${spec.id}"]`);
  const chart = new Chart(
    figure,
    { ...spec, x, span, under },
    { zoom, log() {}, reread: () => loadCurves().catch(() => null) },
  );
  chart.factors = new Map(spec.series.map((s) => [s.name, s.factor]));
  return chart;
});

function forEachChart(act) {
  for (const chart of charts) act(chart);
}

function under(u, { spec }) {
  if (spec.gpu) paintBand(u, marks.bands[spec.gpu] ?? [], now());
  paintMarks(
    u,
    marks.marks.filter(([, , gpu]) => !gpu || gpu === spec.gpu),
    now(),
  );
}

// The address holds the user's choice: a range that ends now, or a fixed range in the past.

function zoom(range) {
  const query = new URLSearchParams(location.search);
  for (const name of ["from", "to"]) query.delete(name);
  if (range) {
    query.delete("range");
    query.set("from", Math.floor(range[0]));
    query.set("to", Math.ceil(Math.max(range[1], range[0] + 1)));
  }
  go(`?${query}`);
}

function go(query) {
  history.pushState(null, "", query === "?" ? location.pathname : query);
  chosen();
}

async function chosen() {
  forEachChart((chart) => {
    chart.range = new Range();
    chart.unpin();
  });
  await refresh(true);
  loadCurves().catch(() => null);
}

addEventListener("popstate", chosen);
document.addEventListener("click", (event) => {
  const link = event.target.closest("#ranges a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(new URL(link.href).search);
});

// Refresh the page's text and tables. Do not refresh what somebody is using, unless the user requested it.
let isRefreshRequested = false;

function refresh(isRequested = false) {
  isRefreshRequested = isRequested;
  if (!isRequested && (isInUse() || document.visibilityState !== "visible")) return null;
  // If the node's GPUs have changed, the server answers with a full page reload.
  const headers = { "X-Page-GPUs": page.gpus };
  return htmx.ajax("GET", location.href, { target: "#live", swap: "innerHTML", headers });
}

// Somebody may begin to type while the response is on its way.
document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  if (!isRefreshRequested && isFormInUse()) detail.shouldSwap = false;
});

document.addEventListener("htmx:afterSettle", ({ detail }) => {
  if (detail.target.id !== "live") return;
  const received = document.getElementById("marks").textContent;
  if (received === shown) return;
  shown = received;
  marks = JSON.parse(received);
  const [from, to] = span();
  const csv = document.getElementById("csv");
  csv.href = csv.href.replace(/from=.*/, `from=${Math.floor(from)}&to=${Math.ceil(to)}`);
  forEachChart((chart) => chart.schedule(0));
});
let shown = document.getElementById("marks").textContent;

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", () => refresh());

// Curves: one request for all GPUs and one for the node itself; samples received meanwhile are added afterwards.

let latestRequest = 0;
let meanwhile = null;

async function loadCurves() {
  latestRequest += 1;
  const request = latestRequest;
  meanwhile ??= [];
  const groups = [charts.filter(({ spec }) => spec.gpu), charts.filter(({ spec }) => !spec.gpu)];
  const loading = groups
    .filter((group) => group.length)
    .map(async (group) => show(group, await fetchItems(group), request));
  await Promise.all(loading);
  if (request !== latestRequest) return; // superseded by a newer choice
  const late = meanwhile;
  meanwhile = null;
  for (const message of late) append(message);
}

function show(group, items, request) {
  if (request !== latestRequest) return;
  for (const chart of group) {
    const matching = items.filter(
      ({ name, uuid }) => chart.factors.has(name) && (uuid ?? "") === (chart.spec.gpu ?? ""),
    );
    const curves = matching.map((item) => withGaps(item, chart.factors.get(item.name)));
    chart.load(curves, null);
  }
}

async function fetchItems(group) {
  const [from, to] = span();
  const names = [...new Set(group.flatMap(({ factors }) => [...factors.keys()]))].slice(0, MOST_NAMES);
  const gpus = [...new Set(group.map(({ spec }) => spec.gpu).filter(Boolean))];
  const points = 100 * Math.ceil(Math.max(...group.map(({ plot }) => plot.clientWidth)) / 50);
  const query = new URLSearchParams({ from: Math.floor(from), to: Math.ceil(to), points, digits: 4 });
  for (const name of names) query.append("name", name);
  for (const gpu of gpus) query.append("gpu", gpu);
  const response = await fetch(`/api/v1/nodes/${encodeURIComponent(page.node)}/series?${query}`);
  if (!response.ok) throw new Error(`series: ${response.status}`);
  return (await response.json()).items;
}

// Append a live batch of samples.
function append(message) {
  if (!seconds() || seconds() > LONG_S) return;
  if (meanwhile) {
    meanwhile.push(message);
    return;
  }
  const before = span()[0];
  for (const chart of charts) {
    const entries = [...chart.factors].map(([name, factor]) => entryOf(chart, message, name, factor)).filter(Boolean);
    if (!entries.length) continue;
    for (const curve of chart.curves.values()) curve.drop(before);
    chart.append(entries);
  }
}

function entryOf({ spec, curves }, { at, period, gpus, columns, host }, name, factor) {
  const row = spec.gpu ? columns[name]?.[gpus.indexOf(spec.gpu)] : name in host ? [host[name]] : null;
  if (!row) return null;
  const values = row.map((v) => (v === null ? Number.NaN : v * factor));
  const curve = curves.get(name);
  const isExact = !curve || "value" in curve.columns;
  const entry = isExact
    ? { step: values.map((_, i) => at + i * period), columns: { value: values } }
    : summarised(values, at);
  return {
    name,
    ...(hasGapBefore(curve, at, spec.gpu && isExact ? period : 10 * period) ? withGap(entry, curve.last) : entry),
  };
}

// Return whether samples are missing before `at`: the distance exceeds three usual intervals and the last three.
function hasGapBefore(curve, at, usual) {
  if (!curve?.n) return false;
  const { steps, n } = curve;
  return at - curve.last > Math.max(3 * usual, n > 3 ? steps[n - 1] - steps[n - 4] : 0);
}

function summarised(values, at) {
  const finite = values.filter(Number.isFinite);
  const mean = finite.reduce((sum, v) => sum + v, 0) / finite.length;
  const [min, max] = finite.length ? [Math.min(...finite), Math.max(...finite)] : [Number.NaN, Number.NaN];
  return { step: [at], columns: { min: [min], max: [max], mean: [mean] } };
}

const withGap = ({ step, columns }, last) => ({
  step: [last + 1, ...step],
  columns: Object.fromEntries(Object.entries(columns).map(([key, column]) => [key, [Number.NaN, ...column]])),
});

const again = rereader(loadCurves);
let refreshTimer = 0;
const handlers = {
  hello: again,
  missed: again,
  samples: append,
  happened: () => {
    clearTimeout(refreshTimer);
    refreshTimer = setTimeout(refresh, SOON_MS);
  },
};

function stale(isStale) {
  lamp(!isStale);
  const text = isStale && seconds() ? `as of ${nowClock()}` : "";
  forEachChart((chart) => chart.spec.bare || chart.stale(text));
}

connect(`/ws/cluster?node=${encodeURIComponent(page.node)}`, stale, (data) => {
  const message = JSON.parse(data);
  lamp(true);
  handlers[message.kind]?.(message);
});
setInterval(
  () => seconds() > LONG_S && document.visibilityState === "visible" && loadCurves().catch(() => null),
  AGAIN_MS,
);

// Show the time under the pointer for all charts of the page.
const moment = document.getElementById("moment");
document.addEventListener("mousemove", ({ target }) => {
  const chart = target.closest?.(".plot") && charts.find(({ plot }) => plot.contains(target));
  const at = chart?.u?.cursor.idx ?? null;
  const text = at === null ? "" : reading(chart, chart.data[0][at]);
  if (moment.textContent !== text) moment.textContent = text;
});

function reading({ spec }, second) {
  const width = (span()[1] - span()[0]) / 200;
  const allocations = (marks.bands[spec.gpu] ?? []).filter(
    ([since, until]) => since <= second && (until ?? now()) > second,
  );
  const near = marks.marks.filter(
    ([at, until, gpu, , , lasts]) =>
      (!gpu || gpu === spec.gpu) && at - width <= second && (lasts ? (until ?? now()) : at) + width >= second,
  );
  return [x.form(second), ...allocations.map(([, , , owner]) => owner), ...near.map(([, , , , title]) => title)].join(
    " · ",
  );
}

new ResizeObserver(() => forEachChart((chart) => chart.resize())).observe(document.getElementById("main"));
const rebuild = () => forEachChart((chart) => chart.rebuild());
document.addEventListener("vigil:theme", rebuild);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
setTimeout(() => forEachChart((chart) => chart.loaded || chart.plot.classList.add("skeleton")), 200);
