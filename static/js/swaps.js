// Keeps what a person is using when htmx replaces a part of the page after a GET: the keyboard focus, open <details> and
// scroll positions. Old and new elements are matched by what they do, since few of them have an id. htmx itself gives the
// focus back only to elements that have one.
const SCROLLED = ".scroll, .tabs, pre";

// Describe what an element does: its place, its address or its form's, its name. The text of a link may change in between.
function identify(element) {
  const { localName } = element;
  const address = element.getAttribute("href") ?? element.getAttribute("formaction");
  const named = localName === "details" ? element.querySelector(":scope > summary") : element;
  const hasText = address === null && ["button", "summary", "details"].includes(localName);
  return JSON.stringify([
    element.id || element.parentElement?.closest("[id]")?.id,
    address ?? element.closest("form")?.getAttribute("action"),
    element.getAttribute("name"),
    element.getAttribute("aria-label") ?? (hasText ? named?.textContent : null),
  ]);
}

function matching(localName, identity) {
  return [...document.querySelectorAll(localName)].filter((element) => identify(element) === identity);
}

// Return a function that finds the element, or the one that has taken its place.
function follow(element) {
  const { localName } = element;
  const identity = identify(element);
  const position = matching(localName, identity).indexOf(element);
  return () => (element.isConnected ? element : matching(localName, identity)[position]);
}

function takeSnapshot() {
  const { activeElement } = document;
  const scrolled = [...document.querySelectorAll(SCROLLED)].filter((e) => e.scrollLeft || e.scrollTop);
  return {
    focused: activeElement === document.body ? null : follow(activeElement),
    opened: [...document.querySelectorAll("details[open]")].map(follow),
    scrolled: scrolled.map((e) => ({ find: follow(e), left: e.scrollLeft, top: e.scrollTop })),
  };
}

function restore({ focused, opened, scrolled }) {
  for (const find of opened) find()?.setAttribute("open", "");
  for (const { find, left, top } of scrolled) find()?.scrollTo({ left, top, behavior: "instant" });
  if (document.activeElement === document.body) focused?.()?.focus({ preventScroll: true });
}

let snapshot = null;
document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  snapshot = detail.requestConfig.verb === "get" ? takeSnapshot() : null;
});
document.addEventListener("htmx:afterSwap", () => {
  if (snapshot) restore(snapshot);
  snapshot = null;
});
