// What lists of jobs share: one socket for all rows, and the lamp.
import { lamp } from "./app.js";
import { followJobs } from "./live.js";

// apply(line) for each job that changed; missed() when something may have been: the first answer is what the page shows.
export function followRows(apply, missed) {
  let first = true;
  followJobs({
    jobs: (lines) => {
      lamp(true);
      lines.forEach(apply);
    },
    stale: (isStale) => lamp(!isStale),
    reread: () => {
      lamp(true);
      if (first) first = false;
      else missed();
    },
  });
}
