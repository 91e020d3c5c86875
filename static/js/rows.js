// What lists of jobs share: words kept true where they stand, and one socket for all rows.
import { lamp } from "./app.js";
import { followJobs } from "./live.js";

export function set(row, name, text) {
  const element = row.querySelector(`[data-live="${name}"]`);
  if (element && element.textContent !== text) element.textContent = text;
}

// told(line) for each job that changed; missed() when something may have been: the first answer is what the page shows.
export function followRows(told, missed) {
  let first = true;
  followJobs({
    jobs: (lines) => {
      lamp(true);
      lines.forEach(told);
    },
    stale: (isStale) => lamp(!isStale),
    reread: () => {
      lamp(true);
      if (first) first = false;
      else missed();
    },
  });
}
