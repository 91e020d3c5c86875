// Submit: the server keeps form and text in sync; the text is highlighted, with errors at their lines.
import { highlighted, piece } from "./toml.js";

const form = document.getElementById("spec");
const side = document.getElementById("side");
const sync = document.getElementById("sync");
const FORM_MS = 350;
const TEXT_MS = 500;

let timer = 0;
let sentSide = "";
function changed(which, wait) {
  side.value = which;
  clearTimeout(timer);
  timer = setTimeout(() => {
    timer = 0;
    sentSide = which;
    htmx.trigger(sync, "vigil:sync");
  }, wait);
}

// An answer does not include what was typed since its request: drop it, because the next request follows immediately.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.requestConfig.elt === sync && timer && sentSide === "form" && side.value === "form")
    event.detail.shouldSwap = false;
});

form.addEventListener("input", (event) => {
  if (event.target.id === "toml") {
    draw();
    changed("toml", TEXT_MS);
  } else if (event.target.matches("#fields input:not([type=file]), #fields textarea")) changed("form", FORM_MS);
});
form.addEventListener("change", (event) => {
  if (event.target.matches("#fields select")) changed("form", 0);
  if (event.target.id === "file") open(event.target.files[0]);
  if (event.target.id === "f-code") reportArchive();
});

// The archive itself is sent only on Submit; until then the server learns only whether there is one.
function reportArchive() {
  const box = document.getElementById("packed");
  const code = document.getElementById("f-code");
  const chosen = code?.files.length ? "1" : "";
  if (!code) box.value = ""; // this job needs no code
  // A second request would abort the first: this runs again once the first answer has settled.
  if (box.value === chosen || sync.classList.contains("htmx-request")) return;
  box.value = chosen;
  // With both sides in sync, send the text, so that the answer does not overwrite what is typed into it meanwhile.
  if (!timer) changed("toml", 0);
}

form.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]");
  if (button?.dataset.do === "check") {
    event.preventDefault();
    changed(side.value, 0);
    document.getElementById("findings").scrollIntoView({ block: "nearest" });
  }
  if (button?.dataset.do === "fill") {
    const box = document.getElementById(button.dataset.field);
    box.value = button.dataset.value;
    box.focus();
    changed("form", 0);
  }
});

// Read a file here and put its content into the text; the file itself is not uploaded.
async function open(file) {
  if (!file) return;
  const text = file.size <= 65_536 ? await file.text() : `# ${file.name} is larger than 64 KB: no specification is.`;
  document.getElementById("file").value = "";
  setText(text);
}

function setText(text) {
  const box = document.getElementById("toml");
  box.value = text;
  draw();
  changed("toml", 0);
}

form.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
form.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length || event.target.closest("[type=file]")) return;
  event.preventDefault();
  open(event.dataTransfer.files[0]);
});

// The editor: a textarea over a highlighted copy of its text.

function draw() {
  const editor = document.getElementById("editor");
  const box = editor.querySelector("textarea");
  const pre = editor.querySelector("pre");
  const lines = box.value.split("\n").map(highlighted);
  for (const { line, why } of JSON.parse(document.getElementById("marks").dataset.marks || "[]")) {
    const at = lines[line - 1];
    if (!at || at.hasAttribute("data-invalid")) continue;
    at.dataset.invalid = "";
    at.append(piece("why", `  ← ${why.split(/(?<=[.!?])\s/)[0].replace(/\.$/, "")}`));
  }
  pre.hidden = false;
  pre.replaceChildren(...lines);
  editor.dataset.highlighted = "";
}

// Mark the fields that have errors; after a failed submission the first of them gets the focus.
function markInvalidFields() {
  for (const field of form.querySelectorAll(".field")) {
    const box = field.querySelector("input:not([type=file]), select, textarea");
    const wrong = Boolean(field.querySelector(".error"));
    field.toggleAttribute("data-invalid", wrong);
    if (wrong) box?.setAttribute("aria-invalid", "true");
    else box?.removeAttribute("aria-invalid");
  }
}

document.addEventListener("htmx:afterSettle", () => {
  markInvalidFields();
  draw();
  reportArchive();
});

reportArchive();
draw();
form.querySelector("[aria-invalid]")?.focus();
