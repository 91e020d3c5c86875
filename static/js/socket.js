// A reconnecting socket, and fetching again after a disconnection: the basis of all live updates.

const STALE_MS = 15_000;
const REREAD_MS = 1_000;
const BACKOFF_MS = [300, 1_000, 2_000, 4_000, 8_000, 15_000];
const FINAL = new Set([4401, 4403, 4404]); // signed out, wrong origin, not visible: retrying is pointless

/** Call read() now or, if a call is in progress or has just ended, once more afterwards. */
export function rereader(read) {
  let isReading = false;
  let isWanted = false;
  return async function again() {
    if (isReading) {
      isWanted = true;
      return;
    }
    isReading = true;
    do {
      isWanted = false;
      try {
        await read();
      } catch (error) {
        console.warn("Reloading failed", error);
      }
      await new Promise((resolve) => setTimeout(resolve, REREAD_MS));
    } while (isWanted);
    isReading = false;
  };
}

/** Open a socket that reconnects by itself and reports when nothing has been received for too long. */
export function connect(path, stale, onMessage) {
  let socket = null;
  let failures = 0;
  let retryTimer = 0;
  let staleTimer = 0;
  let isStale = false;
  let isClosed = false;

  function fresh() {
    if (isStale) stale((isStale = false));
    clearTimeout(staleTimer);
    staleTimer = setTimeout(() => stale((isStale = true)), STALE_MS);
  }

  function open() {
    clearTimeout(retryTimer);
    if (isClosed || (socket && socket.readyState <= WebSocket.OPEN)) return;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    const opened = new WebSocket(`${scheme}//${location.host}${path}`);
    socket = opened;
    opened.binaryType = "arraybuffer";
    opened.onmessage = (message) => {
      if (socket !== opened) return;
      failures = 0;
      fresh();
      onMessage(message.data);
    };
    opened.onclose = ({ code, reason }) => {
      if (isClosed || socket !== opened) return;
      if (reason) console.warn(`Live updates: ${reason}`);
      if (FINAL.has(code)) {
        clearTimeout(staleTimer);
        isClosed = true;
        stale((isStale = true));
        return;
      }
      const wait = BACKOFF_MS[Math.min(failures++, BACKOFF_MS.length - 1)];
      retryTimer = setTimeout(open, wait * (0.75 + Math.random() / 2));
    };
  }

  const wake = () => {
    if (!document.hidden && socket?.readyState === WebSocket.CLOSED) open();
  };
  addEventListener("online", wake);
  document.addEventListener("visibilitychange", wake);
  staleTimer = setTimeout(() => stale((isStale = true)), STALE_MS);
  open();
  return {
    close() {
      isClosed = true;
      clearTimeout(retryTimer);
      clearTimeout(staleTimer);
      removeEventListener("online", wake);
      document.removeEventListener("visibilitychange", wake);
      socket?.close();
    },
  };
}
