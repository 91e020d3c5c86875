// A job's page: the head kept true, charts fed, tails refreshed. One socket.
import { lamp } from "./app.js";
import { follow } from "./live.js";
import { count, duration, loss, measure, nowClock } from "./words.js";

const life = document.getElementById("life");
const grid = document.getElementById("charts");
const job = Number(life.dataset.job);
const ALIVE = new Set(["pending", "running", "suspended", "completing"]);
const LIFE_MS = 5_000; // the head is made anew at most this often,
const SOON_MS = 1_000; // and after a change of state or a checkpoint at most this often

// The head: swapped by htmx when something in it changed. Being asked for again never puts it off.
let timer = 0;
let due = Number.POSITIVE_INFINITY;
let last = 0;
function retell(soon = false) {
  const at = Math.max(Date.now() + 100, last + (soon ? SOON_MS : LIFE_MS));
  if (at >= due) return;
  clearTimeout(timer);
  due = at;
  timer = setTimeout(() => {
    due = Number.POSITIVE_INFINITY;
    last = Date.now();
    // A dialog that somebody is filling in is not swapped away under them.
    if (document.visibilityState === "visible" && !document.querySelector("dialog[open]"))
      htmx.trigger(life, "vigil:life");
    else retell();
  }, at - Date.now());
}
// Nor by an answer that was on its way when the dialog opened.
document.addEventListener("htmx:oobBeforeSwap", (event) => {
  if (event.detail.target.querySelector("dialog[open]")) event.detail.shouldSwap = false;
});

const put = (name, text) => {
  const element = life.querySelector(`[data-live="${name}"]`);
  if (element && element.textContent !== text) element.textContent = text;
};

function heard(header) {
  if (header.step !== null && header.step !== undefined) {
    put("step", count(header.step));
    put("now-step", ` · step ${count(header.step)}`);
    const bar = life.querySelector('[data-live="step-bar"]');
    if (bar && header.steps) bar.value = Math.min(1, header.step / header.steps);
  }
  const changed =
    header.state !== life.dataset.state || String(header.number) !== (life.dataset.number || String(header.number));
  life.dataset.state = header.state;
  life.dataset.number = header.number;
  life.dataset.alive = ALIVE.has(header.state) ? "1" : "0";
  // A greeting or a heartbeat of a job that has ended tells nothing new.
  if (changed || life.dataset.alive === "1" || !header.kind) retell(changed);
  if (changed) reread();
}

const facts = {
  loss: (value) => put("loss", loss(value)),
  validation_loss: (value) => put("loss-small", `val ${loss(value)}`),
  tokens_per_second: (value) => put("speed", measure(value)),
  samples_per_second: (value) => put("speed", measure(value)),
  step_seconds: (value) => put("step_seconds", duration(value)),
};

function points(entries) {
  for (const entry of entries) {
    if (entry.kind === "value" && entry.rank === 0 && entry.n) facts[entry.name]?.(entry.value[entry.n - 1]);
  }
  if (entries.some((entry) => entry.rank === 0 && !known.has(entry.name))) novelty();
  for (const [figure, drawn] of charts) {
    const mine = entries.filter((entry) => figure.wants(entry)).map(columns);
    if (mine.length) drawn.append(mine);
  }
}

const columns = (entry) =>
  entry.kind === "band"
    ? {
        name: entry.name,
        step: entry.step,
        columns: { min: entry.min, median: entry.median, max: entry.max, worst: entry.worst },
      }
    : { name: entry.name, step: entry.step, value: entry.value };

// Charts

const charts = new Map();
const known = new Set(["learning_rate", "memory_gib"]); // series that have a chart, or need none

// A script has reported something that this page has no chart for: it is made anew with one.
let making = 0;
function novelty() {
  if (grid?.dataset.kind !== "script" || making) return;
  making = setTimeout(() => (document.querySelector("dialog[open]") ? (making = 0) : location.reload()), 2_000);
}

const read = (id) => JSON.parse(document.getElementById(id)?.textContent || "null");

async function draw() {
  const { chart } = await import("./charts.js");
  const specs = read("figures");
  for (const spec of specs) {
    spec.job = job;
    const element = grid.querySelector(`[data-chart="${spec.id}"]`);
    const names = new Set(spec.series.map((s) => s.name));
    const rank = spec.rank ?? 0;
    for (const name of names) known.add(name);
    spec.wants = (entry) =>
      names.has(entry.name) && (spec.band ? entry.kind === "band" : entry.kind === "value" && entry.rank === rank);
    const drawn = chart(element, spec, fetchRange);
    drawn.reread = reread;
    charts.set(spec, drawn);
  }
  const each = (act) => {
    for (const drawn of charts.values()) act(drawn);
  };
  const size = new ResizeObserver(() => each((drawn) => drawn.resize()));
  size.observe(grid);
  const again = () => each((drawn) => drawn.rebuild());
  document.addEventListener("vigil:theme", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  const first = read("series");
  if (first) paint(first);
  setTimeout(() => each((drawn) => drawn.loaded || drawn.plot.classList.add("skeleton")), 200);
}

// What the server has: one question for the curves, one for the bands.
async function ask(specs, range) {
  const answer = { items: [], bands: [], version: null };
  const groups = new Map();
  for (const spec of specs) {
    // Two points a pixel of the chart's width, so charts of a width share a question.
    const points = 100 * Math.ceil(charts.get(spec).plot.clientWidth / 50);
    const key = `${points} ${spec.band ? "band" : (spec.rank ?? 0)}`;
    if (!groups.has(key)) groups.set(key, { band: Boolean(spec.band), rank: spec.rank ?? 0, points, names: new Set() });
    for (const s of spec.series) groups.get(key).names.add(s.name);
  }
  await Promise.all(
    [...groups.values()].map(async ({ band, rank, points, names }) => {
      const query = new URLSearchParams([...names].map((name) => ["name", name]));
      query.set("points", points);
      query.set("digits", 6);
      if (band) query.set("band", "1");
      else query.set("rank", rank);
      if (range) {
        query.set("from", Math.floor(range[0]));
        query.set("to", Math.ceil(range[1]));
      }
      const response = await fetch(`/api/v1/jobs/${job}/series?${query}`, { headers: { Accept: "application/json" } });
      if (!response.ok) throw new Error(`series: ${response.status}`);
      const found = await response.json();
      answer[band ? "bands" : "items"].push(...found.items.map((item) => ({ ...item, asked: rank, points })));
      // Both are right up to the older of the two.
      answer.version = answer.version === null ? found.version : Math.min(answer.version, found.version);
    }),
  );
  return answer;
}

const itemsFor = (spec, answer) => {
  const names = new Set(spec.series.map((s) => s.name));
  const found = spec.band
    ? answer.bands.filter((item) => item.median)
    : answer.items.filter((item) => item.asked === (spec.rank ?? 0));
  return found.filter((item) => names.has(item.name));
};

const fetchRange = async (spec, from, to) => itemsFor(spec, await ask([spec], [from, to]));

function load(answer) {
  for (const [spec, drawn] of charts) drawn.load(itemsFor(spec, answer));
  return answer.version;
}

// The page came with the curves of its lead chart.
function paint(answer) {
  for (const [spec, drawn] of charts) {
    const items = itemsFor(spec, answer);
    if (items.length) drawn.load(items);
  }
}

async function reread() {
  if (!charts.size) return undefined;
  return load(await ask([...charts.keys()]));
}

function stale(isStale) {
  lamp(!isStale);
  for (const drawn of charts.values()) drawn.stale(isStale && life.dataset.alive === "1" ? `as of ${nowClock()}` : "");
}

if (grid) await draw();

follow(job, {
  points,
  state: (header) => {
    lamp(true);
    heard(header);
  },
  event: (event) => event.kind === "checkpoint.committed" && retell(true),
  stale,
  reread,
});

const tail = document.getElementById("log-tail");
if (tail)
  setInterval(
    () =>
      document.visibilityState === "visible" && life.dataset.state === "running" && htmx.trigger(tail, "vigil:tail"),
    5_000,
  );
