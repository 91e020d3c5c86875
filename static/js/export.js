// A chart's "…" menu, loaded when it is first opened: data as a table, as CSV, as a picture.
import { token } from "./paint.js";

const MOST_ROWS = 1_000;

const OFFERS = { "Data as a table": table, "CSV as drawn": csv, "Picture (PNG)": picture };

// Fill the menu when it is first opened.
export function fill(menu, chart) {
  for (const [text, act] of Object.entries(OFFERS)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => {
      menu.open = false;
      if (chart.data) act(chart);
    });
    menu.lastElementChild.append(button);
  }
  for (const series of chart.spec.series) {
    const link = document.createElement("a");
    link.href = `/api/v1/jobs/${chart.spec.job}/series.csv?name=${encodeURIComponent(series.name)}&rank=${chart.spec.rank ?? 0}`;
    link.textContent = `Every point of ${series.label || series.name} (CSV)`;
    menu.lastElementChild.append(link);
  }
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.firstElementChild.focus();
    event.stopPropagation();
  });
}

const file = (chart) => `job-${chart.spec.job}-${chart.spec.id}`;

function columns(chart) {
  const lines = chart.lines;
  const [x, ...ys] = chart.data;
  const used = lines.map((_, k) => k).filter((k) => ys[k].some((v) => v !== null && v !== undefined));
  return { x, names: used.map((k) => lines[k].key), ys: used.map((k) => ys[k]) };
}

const unit = (chart) => chart.spec.xunit ?? "step";

function csv(chart) {
  const { x, names, ys } = columns(chart);
  const rows = [...x].map((step, i) => [step, ...ys.map((y) => y[i] ?? "")].join(","));
  save([[unit(chart), ...names].join(","), ...rows, ""].join("\n"), `${file(chart)}.csv`, "text/csv");
}

function save(content, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function table(chart) {
  const { x, names, ys } = columns(chart);
  const dialog = document.createElement("dialog");
  dialog.className = "data";
  dialog.setAttribute("aria-label", `${chart.spec.title}, as drawn`);
  const element = document.createElement("table");
  const head = element.createTHead().insertRow();
  for (const name of [unit(chart), ...names]) {
    const th = document.createElement("th");
    th.scope = "col";
    th.className = "num";
    th.textContent = name;
    head.append(th);
  }
  const body = element.createTBody();
  const from = Math.max(0, x.length - MOST_ROWS);
  for (let i = x.length - 1; i >= from; i -= 1) {
    const row = body.insertRow();
    for (const value of [x[i], ...ys.map((y) => y[i])]) {
      const cell = row.insertCell();
      cell.className = "num";
      cell.textContent = value === null || value === undefined ? "–" : Number(value.toPrecision(7));
    }
  }
  const scroll = document.createElement("div");
  scroll.className = "data-scroll";
  scroll.tabIndex = 0;
  scroll.append(element);
  const form = document.createElement("form");
  form.method = "dialog";
  form.className = "actions";
  const close = document.createElement("button");
  close.className = "button";
  close.textContent = "Close";
  form.append(close);
  dialog.append(scroll, form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

// Save the plot with its title on the page's background colour.
function picture(chart) {
  const source = chart.u.ctx.canvas;
  const ratio = devicePixelRatio;
  const canvas = document.createElement("canvas");
  canvas.width = source.width + 24 * ratio;
  canvas.height = source.height + 40 * ratio;
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = token("--bg");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = token("--ink");
  ctx.font = `600 ${13 * ratio}px Inter`;
  ctx.fillText(
    `${chart.spec.title}${chart.spec.unit ? `, ${chart.spec.unit}` : ""} · #${chart.spec.job}`,
    12 * ratio,
    22 * ratio,
  );
  ctx.drawImage(source, 12 * ratio, 32 * ratio);
  canvas.toBlob((blob) => save(blob, `${file(chart)}.png`));
}
