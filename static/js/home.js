// Home: what runs is kept true in place; what begins or ends makes the page anew.
import { followRows } from "./rows.js";
import { loss, measure, NBSP, put, share } from "./words.js";

const CHANGED_MS = 2_000;
let timer = 0;

// A dialog or a selection is left alone; several changes at once are one.
function changed() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (document.visibilityState === "visible") htmx.trigger("#home", "vigil:changed");
    else document.addEventListener("visibilitychange", changed, { once: true });
  }, CHANGED_MS);
}

const number = (value) => (typeof value === "string" ? Number(value) : value);

function applyLine(line) {
  const row = document.querySelector(`#home [data-job="${line.job}"]`);
  if (!row || row.dataset.state !== line.state) {
    changed();
    return;
  }
  if (line.step === null || !row.matches("tr")) return;
  if (line.steps) {
    row.querySelector('[data-live="bar"]').value = Math.min(1, line.step / line.steps);
    put(row, "percent", share(Math.min(1, line.step / line.steps)));
  }
  const { loss: value, tokens_per_second: tokens, samples_per_second: samples } = line.latest || {};
  if (value !== undefined) put(row, "loss", loss(number(value)));
  if (tokens !== undefined) put(row, "speed", `${measure(number(tokens))}${NBSP}tok/s`);
  else if (samples !== undefined) put(row, "speed", `${measure(number(samples))}${NBSP}samples/s`);
}

// A notice that was read is gone, and the button with it: the next one's has the focus then.
document.addEventListener("htmx:afterSettle", ({ detail }) => {
  if (detail.requestConfig.verb !== "post") return;
  (document.querySelector(".notices button") ?? document.querySelector("#main")).focus();
});

followRows(applyLine, changed);
// Sparks and estimates grow old by themselves.
setInterval(changed, 60_000);
