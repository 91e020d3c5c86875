// Shared by all pages: theme, relative times, dialogs, toasts, keyboard shortcuts and the live indicator.
// Every page also works without it, less comfortably.
import "./swaps.js";
import { updateTimesRegularly } from "./words.js";

const root = document.documentElement;

// Theme: the server reads the cookie, so the next page renders in the chosen theme without a flash.
function toggleTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : system;
  root.dataset.theme = dark ? "light" : "dark";
  const secure = location.protocol === "https:" ? "; secure" : "";
  document.cookie = `theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=lax${secure}`;
  document.dispatchEvent(new Event("vigil:theme"));
}

// On a phone a row of tabs scrolls sideways: show the current one.
for (const tab of document.querySelectorAll(".tabs [aria-current]")) {
  tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.offsetLeft - 16;
}

// Show a toast at the lower right. Errors and warnings stay until dismissed; others disappear by themselves.
function toast(text, state = "completed") {
  const box = document.createElement("div");
  box.className = "toast";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "glyph");
  svg.dataset.state = state;
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#s-${state}`);
  svg.append(use);
  const words = document.createElement("div");
  words.textContent = text;
  const close = document.createElement("button");
  close.className = "button plain small quiet";
  close.type = "button";
  close.dataset.do = "dismiss";
  close.setAttribute("aria-label", "Dismiss");
  close.textContent = "×";
  box.append(svg, words, close);
  document.getElementById("toasts").append(box);
  if (state === "completed") fade(box);
  return box;
}

function fade(box) {
  setTimeout(() => (box.matches(":hover, :focus-within") ? fade(box) : box.remove()), 8000);
}

// The live indicator ("lamp"): lit while this page receives changes as they happen.
export function lamp(live, text) {
  const element = document.getElementById("lamp");
  if (!element) return;
  element.hidden = false;
  element.toggleAttribute("data-live", live);
  const words = text || (live ? "Live" : "Not live");
  if (element.textContent !== words) element.textContent = words;
}

const actions = {
  dismiss: (button) => button.closest(".toast").remove(),
  open: (button) => document.getElementById(button.dataset.target)?.showModal(),
  copy: async (button) => {
    const source = document.getElementById(button.dataset.target);
    try {
      await navigator.clipboard.writeText(source.textContent.trim());
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
    }
  },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]");
  if (button && actions[button.dataset.do]) actions[button.dataset.do](button, event);
});

// Close open menus on a click outside them.
document.addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]"))
    if (!menu.contains(event.target)) menu.open = false;
});

document.addEventListener("submit", (event) => {
  if (event.target.dataset.do === "theme") {
    event.preventDefault();
    toggleTheme();
  }
});

// Keyboard shortcuts: / focuses the search, g then h, j, s, c, n, q or p navigates; pages add their own.
// No shortcut is destructive.
let goPressedAt = Number.NEGATIVE_INFINITY;
document.addEventListener("keydown", (event) => {
  if (
    event.target.closest("input, textarea, select, dialog, [contenteditable]") ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey
  )
    return;
  if (event.key === "/") {
    const box = document.querySelector("[type=search]");
    if (box) {
      box.focus();
      box.select();
      event.preventDefault();
    }
  } else if (event.key === "?") {
    document.getElementById("keys")?.showModal();
  } else if (event.key === "g") {
    goPressedAt = event.timeStamp;
  } else if (event.timeStamp - goPressedAt < 1200) {
    const place = { h: "/", j: "/jobs", s: "/submit", c: "/cluster", n: "/nodes", q: "/queue", p: "/postmortems" }[
      event.key
    ];
    goPressedAt = Number.NEGATIVE_INFINITY;
    if (place) {
      event.stopImmediatePropagation();
      location.assign(place);
    }
  }
});

// htmx: report every failed request.
document.addEventListener("htmx:responseError", (event) => {
  const status = event.detail.xhr.status;
  if (status === 401 || status === 403)
    toast("You are signed out or no longer have access. Reload the page.", "failed");
  else toast(`The portal answered ${status}. Training continues; reload in a moment.`, "failed");
});
document.addEventListener("htmx:sendError", () => {
  if (!document.querySelector("#toasts [data-offline]")) {
    toast(
      "The portal does not respond. Training continues; this page will update when it is back.",
      "pending",
    ).dataset.offline = "";
  }
});
document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful) document.querySelector("#toasts [data-offline]")?.remove();
});

for (const box of document.querySelectorAll("#toasts .toast")) {
  if (!box.querySelector('[data-state="failed"], [data-state="warn"]')) fade(box);
}
updateTimesRegularly();
