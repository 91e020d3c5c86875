// Shared by lists of jobs: one socket for all rows, and the live indicator.
import { lamp } from "./app.js";
import { followJobs } from "./live.js";

// Call apply(line) for each changed job, and missed() when changes may have been lost. The first reread is skipped: the
// page already shows that state.
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
