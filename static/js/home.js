// Home: update running jobs in place; reload the page's content when a job starts or ends.
import { followRows } from "./rows.js";
import { loss, measure, NBSP, put, share } from "./words.js";

const CHANGED_MS = 2_000;
let timer = 0;

// Coalesce several changes into one refresh; while the page is hidden, wait until it is visible again.
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

// A dismissed notice disappears together with its button: move the focus to the next notice's button.
document.addEventListener("htmx:afterSettle", ({ detail }) => {
  if (detail.requestConfig.verb !== "post") return;
  (document.querySelector(".notices button") ?? document.querySelector("#main")).focus();
});

followRows(applyLine, changed);
// Sparklines and estimates become outdated without any event.
setInterval(changed, 60_000);
