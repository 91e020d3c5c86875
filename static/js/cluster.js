// Nodes and queue: refresh from the database every few seconds while the page is visible.
import { lamp } from "./app.js";

const EVERY_MS = 5_000;

// Do not refresh under an open dialog or a text selection.
function refresh() {
  if (document.visibilityState !== "visible" || document.querySelector("dialog[open]")) return;
  if (!getSelection().isCollapsed) return;
  htmx.ajax("GET", location.href, { target: "#live", swap: "innerHTML" });
}

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
document.addEventListener("htmx:afterRequest", (event) => lamp(event.detail.successful));
lamp(true);
