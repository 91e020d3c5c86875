// A job's spec: the text drawn as the editor draws it.
import { drawn } from "./toml.js";

for (const text of document.querySelectorAll("[data-toml]")) {
  text.replaceChildren(...[...text.children].map((line) => drawn(line.textContent)));
}
