// The list of jobs: updates rows in place and adds keyboard navigation.
import "./filters.js";
import { followRows } from "./rows.js";
import { count, loss, put } from "./words.js";

const rowOf = (id) => document.getElementById(`job-${id}`);

function applyLine(line) {
  const row = rowOf(line.job);
  if (!row) {
    if (line.state === "pending" && line.number === 1) arrived.add(line.job);
    announce();
    return;
  }
  if (row.dataset.state !== line.state) {
    row.dataset.state = line.state;
    htmx.ajax("GET", row.dataset.url, { target: row, swap: "outerHTML" });
    return;
  }
  if (line.step === null) return;
  if (line.steps) row.querySelector('[data-live="bar"]').value = Math.min(1, line.step / line.steps);
  put(
    row,
    "counted",
    line.steps ? `${count(line.step)} / ${count(line.steps)}` : `${row.dataset.counts} ${count(line.step)}`,
  );
  const value = line.latest?.loss;
  if (value !== undefined) put(row, "latest", `loss ${typeof value === "string" ? value : loss(value)}`);
}

// New jobs never shift rows under the pointer: a link announces them instead.
const arrived = new Set();
function announce() {
  const link = document.getElementById("new-jobs");
  if (!link || !arrived.size || new URLSearchParams(location.search).has("after")) return;
  link.textContent = `${arrived.size} new ${arrived.size === 1 ? "job" : "jobs"} ↻`;
  link.hidden = false;
}

followRows(applyLine, () => htmx.ajax("GET", location.href, { target: "#results", swap: "innerHTML" }));

// Keys: j and k move, Enter opens, x selects.
const rows = () => [...document.querySelectorAll("#jobs tbody tr")];
let at = null;

function move(by) {
  const all = rows();
  if (!all.length) return;
  const now = all.findIndex((row) => row.id === at);
  const next = all[Math.max(0, Math.min(all.length - 1, now + by))];
  for (const row of all) row.toggleAttribute("data-at", row === next);
  at = next.id;
  next.querySelector(".name").focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

const chosen = new Set();
function choose(row) {
  if (!row) return;
  const id = row.dataset.job;
  if (!chosen.delete(id)) chosen.add(id);
  showChosen();
}

function showChosen() {
  for (const row of rows()) {
    if (chosen.has(row.dataset.job)) row.setAttribute("aria-selected", "true");
    else row.removeAttribute("aria-selected");
  }
  const form = document.getElementById("chosen");
  if (!form) return;
  form.hidden = !chosen.size;
  document.getElementById("chosen-text").textContent = `${chosen.size} selected`;
  form
    .querySelector(".picked")
    .replaceChildren(
      ...[...chosen].map((id) =>
        Object.assign(document.createElement("input"), { type: "hidden", name: "job", value: id }),
      ),
    );
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "x") choose(document.getElementById(at) || document.activeElement.closest("tr[data-job]"));
  else if (event.key === "Escape" && chosen.size) {
    chosen.clear();
    showChosen();
  } else return;
  event.preventDefault();
});

document.addEventListener("click", (event) => {
  if (event.target.closest('[data-do="unchoose"]')) {
    chosen.clear();
    showChosen();
  }
});

document.addEventListener("htmx:afterSwap", (event) => {
  if (event.target.id === "results") {
    arrived.clear();
    chosen.clear();
    at = null;
  } else showChosen();
});
