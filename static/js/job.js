// A job's page: updates the head, the charts and the log tail from one socket.
import { lamp } from "./app.js";
import { follow } from "./live.js";
import { count, duration, loss, measure, nowClock, put as putIn } from "./words.js";

const life = document.getElementById("life");
const grid = document.getElementById("charts");
const job = Number(life.dataset.job);
const ALIVE = new Set(["pending", "running", "suspended", "completing"]);
const LIFE_MS = 5_000; // minimum time between refreshes of the head,
const SOON_MS = 1_000; // and after a change of state or a checkpoint

// The head is swapped by htmx when something in it changed. Another request never postpones a refresh that is due.
let timer = 0;
let due = Number.POSITIVE_INFINITY;
let last = 0;
function refreshHead(isUrgent = false) {
  const at = Math.max(Date.now() + 100, last + (isUrgent ? SOON_MS : LIFE_MS));
  if (at >= due) return;
  clearTimeout(timer);
  due = at;
  timer = setTimeout(() => {
    due = Number.POSITIVE_INFINITY;
    last = Date.now();
    // Do not swap away a dialog or menu that is open.
    if (document.visibilityState === "visible" && !document.querySelector("dialog[open]") && !isMenuOpen())
      htmx.trigger(life, "vigil:life");
    else refreshHead();
  }, at - Date.now());
}
function isMenuOpen() {
  return life.querySelector("details.menu[open]") !== null;
}
// The same for an answer that was in flight when the dialog or menu opened.
life.addEventListener("htmx:beforeSwap", (event) => {
  if (!isMenuOpen()) return;
  event.detail.shouldSwap = false;
  refreshHead();
});
document.addEventListener("htmx:oobBeforeSwap", (event) => {
  if (event.detail.target.querySelector("dialog[open]")) event.detail.shouldSwap = false;
});

const put = (name, text) => putIn(life, name, text);

function onState(header) {
  const first = life.querySelector('[data-live="step"]')?.textContent === "–" && header.step > 0;
  if (header.step !== null && header.step !== undefined) {
    put("step", count(header.step));
    put("now-step", ` · ${life.dataset.counts} ${count(header.step)}`);
    const bar = life.querySelector('[data-live="step-bar"]');
    if (bar && header.steps) bar.value = Math.min(1, header.step / header.steps);
  }
  const changed =
    header.state !== life.dataset.state || String(header.number) !== (life.dataset.number || String(header.number));
  life.dataset.state = header.state;
  life.dataset.number = header.number;
  life.dataset.alive = ALIVE.has(header.state) ? "1" : "0";
  // A hello or heartbeat of a job that has ended contains nothing new.
  if (changed || life.dataset.alive === "1" || !header.kind) refreshHead(changed || first);
  if (!changed) return;
  reread().catch(() => null);
  setTimeout(refreshTail, SOON_MS); // the log's last lines
}

const headFields = {
  loss: (value) => put("loss", loss(value)),
  accuracy: (value) => put("accuracy", loss(value)),
  validation_loss: (value) => put("loss-small", `val ${loss(value)}`),
  tokens_per_second: (value) => put("speed", measure(value)),
  samples_per_second: (value) => put("speed", measure(value)),
  step_seconds: (value) => put("step_seconds", duration(value)),
};

function points(entries) {
  for (const entry of entries) {
    if (entry.kind === "value" && entry.rank === 0 && entry.n) headFields[entry.name]?.(entry.value[entry.n - 1]);
  }
  for (const { rank, name } of entries) if (rank === 0 && !charted.has(name)) onNewSeries(name);
  figures?.points(entries);
}

// Charts

let figures = null;
const charted = new Set(["learning_rate", "memory_gib"]); // series that have a chart or need none

// A series arrived for which this page lacks a chart: reload the page so that the chart is created.
let reloadTimer = 0;
function onNewSeries(name) {
  const awaited = (grid?.dataset.awaits ?? "*").split(" ");
  if (reloadTimer || !(awaited.includes("*") || awaited.includes(name))) return;
  reloadTimer = setTimeout(
    () => (document.querySelector("dialog[open]") ? (reloadTimer = 0) : location.reload()),
    2_000,
  );
}

const read = (id) => JSON.parse(document.getElementById(id)?.textContent || "null");

if (grid) {
  const { Figures } = await import("./figures.js");
  figures = new Figures(grid, job, read("figures"));
  for (const name of figures.names) charted.add(name);
  const mark = () => figures.mark(read("marked"));
  mark();
  life.addEventListener("htmx:afterSwap", mark);
  const first = read("series");
  if (first) figures.paint(first);
}

const reread = async () => figures?.reread();

function stale(isStale) {
  lamp(!isStale);
  const text = isStale && life.dataset.alive === "1" ? `as of ${nowClock()}` : "";
  figures?.forEachChart((chart) => chart.stale(text));
}

follow(job, {
  points,
  state: (header) => {
    lamp(true);
    onState(header);
  },
  event: (event) => event.kind === "checkpoint.committed" && refreshHead(true),
  stale,
  reread,
});

const tail = document.getElementById("log-tail");
const refreshTail = () => tail && document.visibilityState === "visible" && htmx.trigger(tail, "vigil:tail");
setInterval(() => life.dataset.state === "running" && refreshTail(), LIFE_MS);
