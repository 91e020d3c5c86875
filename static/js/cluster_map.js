// The map of the cluster: the socket updates cells; data that only the database has is refreshed periodically.
import { lamp } from "./app.js";
import { followMachines } from "./live.js";
import { CanvasMap } from "./map_canvas.js";
import { CellMap } from "./map_cells.js";

const EVERY_MS = 15_000;
const GAP_PX = 6;
const FRAME_MS = 3; // time per frame for updating cells; painting comes on top
const PER_FRAME = 160; // machines
const BATCH = 32;
const MOST_PENDING = 5_000; // a hidden page gets no animation frames

const live = document.getElementById("live");
const card = document.getElementById("gpu-card");
const chosen = () => document.querySelector('input[name="by"]:checked')?.value ?? "state";
let map = null;

function begin(place = null) {
  map?.close();
  const on = { open: openCard, showReadout };
  const canvas = document.getElementById("map");
  const racks = document.getElementById("racks");
  if (canvas) map = new CanvasMap(canvas, JSON.parse(document.getElementById("map-data").textContent), chosen(), on);
  else map = racks ? new CellMap(racks, on) : null;
  if (place) map?.focus(place);
}

// The line above the map describes the cell under the pointer or cursor; it is announced only for keyboard users.
function showReadout(parts, byKey) {
  const line = document.getElementById("readout");
  if (!line) return;
  if (byKey) line.setAttribute("aria-live", "polite");
  else line.removeAttribute("aria-live");
  const [name, ...rest] = parts;
  const lead = document.createElement("b");
  lead.textContent = name ?? "";
  const words = document.createElement("span");
  words.textContent = rest.filter(Boolean).join(" · ");
  line.replaceChildren(lead, words);
}

async function openCard(node, index, box) {
  const url = card.dataset.url.replace("NODE", () => encodeURIComponent(node)).replace(/0$/, index);
  await htmx.ajax("GET", url, { target: card, swap: "innerHTML" });
  if (!card.textContent.trim()) return;
  card.showPopover();
  const root = document.documentElement;
  const left = Math.min(box.left, root.clientWidth - card.offsetWidth - 12);
  const below = box.bottom + GAP_PX + card.offsetHeight < root.clientHeight;
  const top = below ? box.bottom + GAP_PX : Math.max(GAP_PX, box.top - GAP_PX - card.offsetHeight);
  card.style.left = `${Math.max(12, left) + scrollX}px`;
  card.style.top = `${top + scrollY}px`;
  card.tabIndex = -1;
  card.focus({ preventScroll: true });
}

// Keep the chosen view in the address.
document.addEventListener("change", (event) => {
  if (event.target.name !== "by") return;
  const here = new URL(location.href);
  here.searchParams.set("by", event.target.value);
  history.replaceState(null, "", here);
  map?.colour?.(chosen());
});

// Do not refresh under an open card or a text selection.
function refresh() {
  if (document.visibilityState !== "visible" || card.matches(":popover-open")) return;
  if (!getSelection().isCollapsed) return;
  htmx.ajax("GET", location.href, { target: "#live", swap: "innerHTML" });
}

let place = null;
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target === live) place = map?.place() ?? null;
});
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target === live) begin(place);
});

// When a thousand machines report in the same second, spread the updates over a few frames so that no frame is long.
let pending = [];
let isApplying = false;
function applyPending() {
  const until = performance.now() + FRAME_MS;
  for (let n = 0; n < PER_FRAME && pending.length && performance.now() < until; n += BATCH)
    map?.apply(pending.splice(0, BATCH));
  isApplying = pending.length > 0;
  if (isApplying) requestAnimationFrame(applyPending);
}

followMachines({
  machines: (lines) => {
    lamp(true);
    pending = pending.concat(lines).slice(-MOST_PENDING);
    if (!isApplying) requestAnimationFrame(applyPending);
    isApplying = true;
  },
  stale: (isStale) => lamp(!isStale),
  reread: () => {
    lamp(true);
    if (document.readyState === "complete" && performance.now() > EVERY_MS) refresh();
  },
});

begin();
setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
