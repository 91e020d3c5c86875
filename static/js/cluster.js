// Pages of the cluster: refresh from the database every few seconds while the page is visible.
import { lamp } from "./app.js";
import { isFormInUse, isInUse } from "./in_use.js";

const EVERY_MS = 5_000;

function refresh() {
  if (document.visibilityState !== "visible") return;
  if (isInUse()) lamp(false, "Paused");
  else htmx.ajax("GET", location.href, { target: "#live", swap: "innerHTML" });
}

setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
// Somebody may begin to type while the response is on its way.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (isFormInUse()) event.detail.shouldSwap = false;
});
document.addEventListener("htmx:afterRequest", (event) => lamp(event.detail.successful));
lamp(true);
