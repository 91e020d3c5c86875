// Formats numbers and times in the browser, by the same rules as vigil_core/formatting.py.
export const NBSP = "\u00a0";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fixed3 = new Intl.NumberFormat("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });

const signed = (text) => text.replace("-", "−");

function nonNumberText(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  return Number.isFinite(value) ? "" : value > 0 ? "∞" : "−∞";
}

export const count = (value) => nonNumberText(value) || signed(grouped.format(value));

// Three decimals; below 0.01 three significant digits: 1.278, 0.00412, 4.1e-5.
export const loss = (value) =>
  nonNumberText(value) || (Math.abs(value) < 0.01 ? measure(value) : signed(fixed3.format(value)));

function threeDigits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return grouped.format(value);
  return size >= 9.995 ? value.toFixed(1) : String(Number(value.toPrecision(3)));
}

// Three significant digits: 0.43, 2.55, 41.1, 305, 9,412, 290 k, 1.24 M.
export function measure(value) {
  const none = nonNumberText(value);
  if (none) return none;
  const size = Math.abs(value);
  if (size && size < 1e-3)
    return signed(
      value
        .toExponential(2)
        .replace(/\.?0+e/, "e")
        .replace("e+", "e"),
    );
  for (const [from, factor, letter] of [
    [1e12, 1e12, "T"],
    [1e9, 1e9, "G"],
    [1e6, 1e6, "M"],
    [1e4, 1e3, "k"],
  ]) {
    if (size >= from * 0.9995) return signed(threeDigits(value / factor) + NBSP + letter);
  }
  return signed(threeDigits(value));
}

// Progress in whole per cent; 100 only when complete.
export const share = (fraction) => `${fraction < 1 ? Math.min(99, Math.round(fraction * 100)) : 100}${NBSP}%`;

const twoUnits = (big, bigUnit, small, unit) =>
  `${big}${NBSP}${bigUnit}${small ? ` ${String(small).padStart(2, "0")}${NBSP}${unit}` : ""}`;

// Two units: 6.18 ms, 0.43 s, 38 s, 4 min 22 s, 18 h 04 min, 2 d 3 h.
export function duration(seconds) {
  const none = nonNumberText(seconds);
  if (none) return none;
  const s = Math.max(0, seconds);
  if (s > 0 && s < 0.01) return `${measure(s * 1000)}${NBSP}ms`;
  if (s < 9.995) return `${threeDigits(s)}${NBSP}s`;
  const total = Math.round(s);
  if (total < 60) return `${total}${NBSP}s`;
  if (total < 3600) return twoUnits(Math.floor(total / 60), "min", total % 60, "s");
  const minutes = Math.round(s / 60);
  if (minutes < 1440) return twoUnits(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(s / 3600);
  return `${Math.floor(hours / 24)}${NBSP}d${hours % 24 ? ` ${hours % 24}${NBSP}h` : ""}`;
}

// A rough duration in one unit.
function rough(seconds) {
  for (const [size, unit] of [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ]) {
    if (seconds >= size) return `${Math.floor(seconds / size)}${NBSP}${unit}`;
  }
  return `${Math.floor(seconds)}${NBSP}s`;
}

// The current time as "09:14:23" in the lab's time zone, like every other time of a page.
export const nowClock = () =>
  new Date().toLocaleTimeString("en-GB", { timeZone: document.documentElement.dataset.zone });

// Update all <time data-time="ago|until|elapsed"> by one timer. Texts older than a day stay as the server wrote them: they
// need the lab's time zone.
function updateTimes() {
  const now = Date.now();
  for (const element of document.querySelectorAll("time[data-time]")) {
    const passed = (now - Date.parse(element.dateTime)) / 1000;
    const kind = element.dataset.time;
    let text = null;
    if (kind === "ago" && passed < 86400) text = passed < 1 ? "now" : `${rough(passed)} ago`;
    if (kind === "until") text = passed > -1 ? "now" : `in ${rough(-passed)}`;
    if (kind === "elapsed") text = duration(passed);
    if (text !== null && element.textContent !== text) element.textContent = text;
  }
}

export function updateTimesRegularly() {
  setInterval(() => document.visibilityState === "visible" && updateTimes(), 10_000);
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && updateTimes());
}

// Update a text in place.
export function put(root, name, text) {
  const element = root.querySelector(`[data-live="${name}"]`);
  if (element && element.textContent !== text) element.textContent = text;
}
