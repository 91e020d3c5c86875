// The log viewer: follows the end, fetches older lines on scroll, and keeps at most 2,000 lines in the page.
const MOST = 2_000;
const log = document.getElementById("log");
const form = document.getElementById("log-form");
const followButton = document.getElementById("follow");
const newer = document.getElementById("newer");

form.addEventListener("change", (event) => {
  if (event.target.matches("[name=attempt], [name=rank]")) {
    for (const other of form.querySelectorAll("[name=incarnation]")) other.disabled = true; // incarnations belong to one log
  }
  tidy();
  form.requestSubmit();
});
form.addEventListener("submit", tidy);

// Keep default values out of the address.
function tidy() {
  for (const box of form.elements) {
    const isUsual =
      box.value === "" ||
      (box.name === "rank" && box.value === "0") ||
      (box.name === "attempt" && box.selectedIndex === 0);
    if (box.name && isUsual) box.disabled = true;
  }
}

if (log && !("search" in log.dataset)) view();

function view() {
  let start = Number(log.dataset.start);
  let end = Number(log.dataset.end);
  let following = Boolean(followButton);
  let unseen = 0;
  let busy = false;
  let wait = 1_000;
  document.getElementById("older")?.parentElement.remove(); // scrolling loads older lines

  const fetchPart = async (cursor) => {
    const query = new URLSearchParams(location.search);
    query.delete("before");
    for (const [name, value] of Object.entries(cursor)) query.set(name, value);
    const response = await fetch(`${log.dataset.lines}?${query}`);
    if (response.status !== 200) return null;
    const html = await response.text();
    return {
      html,
      start: Number(response.headers.get("X-Log-Start")),
      end: Number(response.headers.get("X-Log-End")),
      more: response.headers.get("X-Log-More") === "1",
    };
  };

  const atBottom = () => log.scrollHeight - log.scrollTop - log.clientHeight < 24;

  function setFollowing(on) {
    following = on;
    followButton?.setAttribute("aria-pressed", String(on));
    followButton?.toggleAttribute("data-on", on);
    if (on) {
      unseen = 0;
      newer.hidden = true;
      log.scrollTop = log.scrollHeight;
    }
  }

  async function forwards() {
    const part = await fetchPart({ after: end });
    if (!part || part.end === end) return false;
    const before = log.childElementCount;
    log.insertAdjacentHTML("beforeend", part.html);
    end = part.end;
    const added = log.childElementCount - before;
    if (following) {
      while (log.childElementCount > MOST) log.firstElementChild.remove();
      start = Number(log.firstElementChild?.id.slice(1) ?? start);
      log.scrollTop = log.scrollHeight;
    } else if (added) {
      unseen += added;
      newer.textContent = `${unseen} new ${unseen === 1 ? "line" : "lines"} ↓`;
      newer.hidden = false;
    }
    return added > 0;
  }

  async function backwards() {
    if (busy || start <= 0) return;
    busy = true;
    try {
      const part = await fetchPart({ before: start });
      if (!part || part.start >= start) return;
      const height = log.scrollHeight;
      log.insertAdjacentHTML("afterbegin", part.html);
      start = part.start;
      log.scrollTop += log.scrollHeight - height;
      while (log.childElementCount > MOST) {
        end = Number(log.lastElementChild.id.slice(1));
        log.lastElementChild.remove();
      }
    } finally {
      busy = false;
    }
  }

  log.addEventListener("scroll", () => {
    if (log.scrollTop < 200) backwards();
    if (following && !atBottom()) setFollowing(false);
    else if (!following && followButton && atBottom() && unseen) setFollowing(true);
    else if (!following && atBottom()) forwards();
  });
  followButton?.addEventListener("click", () => setFollowing(!following));
  newer.addEventListener("click", () => setFollowing(true));

  async function poll() {
    if (document.visibilityState === "visible" && (following || log.childElementCount < MOST)) {
      const grew = await forwards().catch(() => false);
      wait = grew ? 1_000 : Math.min(5_000, wait * 1.3);
    }
    setTimeout(poll, wait);
  }

  const linked = location.hash.match(/^#L(\d+)$/);
  if (linked && !document.getElementById(`L${linked[1]}`)) {
    // The linked line is further up: load the lines around it and do not follow.
    setFollowing(false);
    Promise.all([fetchPart({ before: linked[1], limit: 100 }), fetchPart({ after: linked[1], limit: 300 })]).then(
      ([above, below]) => {
        if (!below) return;
        log.replaceChildren();
        log.insertAdjacentHTML("beforeend", (above?.html ?? "") + below.html);
        start = above?.start ?? below.start;
        end = below.end;
        document.getElementById(`L${linked[1]}`)?.scrollIntoView({ block: "center" });
      },
    );
  } else if (linked) setFollowing(false);
  else log.scrollTop = log.scrollHeight;
  if (log.dataset.alive === "1") poll();
}
