// A federation's first tab: draws the matrix, and redraws it whenever the page's head is refreshed (job.js).
import { Matrix } from "./matrix.js";

const matrix = new Matrix(document.querySelector("#matrix canvas"), document.getElementById("cell"));
const read = () => JSON.parse(document.getElementById("matrix-data").textContent);
const show = () => matrix.show(read());

// Keep the data table open across refreshes.
let isOpen = false;
const matrixPart = () => document.getElementById("of-matrix");
document.addEventListener("htmx:oobBeforeSwap", ({ detail }) => {
  if (detail.target === matrixPart()) isOpen = Boolean(document.getElementById("data")?.open);
});
document.addEventListener("htmx:oobAfterSwap", () => {
  const data = document.getElementById("data");
  if (data) data.open = isOpen;
  show();
});
document.addEventListener("vigil:theme", () => document.fonts.ready.then(show));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
document.fonts.ready.then(show);
