"""A dcgm-exporter for tests: a real HTTP server that answers in its format, correctly or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

UUIDS = ("GPU-34319582-d595-d1c7-d1d2-179bcfa61660", "GPU-927d7444-b45a-7c49-8402-5e686e46a026")
VALUES = {
    "DCGM_FI_DEV_SM_CLOCK": ("SM clock frequency (in MHz).", "1980"),
    "DCGM_FI_DEV_MEM_CLOCK": ("Memory clock frequency (in MHz).", "2619"),
    "DCGM_FI_DEV_MEMORY_TEMP": ("Memory temperature (in C).", "58"),
    "DCGM_FI_DEV_GPU_TEMP": ("GPU temperature (in C).", "61"),
    "DCGM_FI_DEV_POWER_USAGE": ("Power draw (in W).", "402.561000"),
    "DCGM_FI_DEV_GPU_UTIL": ("GPU utilization (in %).", "97"),
    "DCGM_FI_DEV_XID_ERRORS": ("Value of the last XID error encountered.", "0"),
    "DCGM_FI_DEV_FB_FREE": ("Framebuffer memory free (in MiB).", "20000"),
    "DCGM_FI_DEV_FB_USED": ("Framebuffer memory used (in MiB).", "60559"),
    "DCGM_FI_PROF_SM_ACTIVE": ("The ratio of cycles an SM has at least 1 warp assigned.", "0.823412"),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("The rate of data transmitted over the PCIe bus, in bytes per second.", "33011804"),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("The number of bytes of active NvLink rx data, per second.", "1048576000"),
}


def text(*, gpus: int = 2, model: str = "NVIDIA H100 80GB HBM3", **changed: str) -> str:
    """Return an exporter's text: each of a GPU's values, and those of a MIG slice, which are not the GPU's."""
    lines = []
    for name, (report, value) in VALUES.items():
        lines += [f"# HELP {name} {report}", f"# TYPE {name} gauge"]
        for i, uuid in enumerate(UUIDS[:gpus]):
            labels = f'gpu="{i}",UUID="{uuid}",pci_bus_id="00000000:{i + 5:02X}:00.0",device="nvidia{i}"'
            tail = f'modelName="{model}",Hostname="dgx-03",DCGM_FI_DRIVER_VERSION="570.86.15"'
            lines.append(f"{name}{{{labels},{tail}}} {changed.get(name, value)}")
            lines.append(f'{name}{{{labels},GPU_I_PROFILE="1g.10gb",GPU_I_ID="{i}",{tail}}} 1')
    return "\n".join([*lines, ""])


@dataclass
class Exporter:
    """The exporter's current answer, which tests may replace at any time."""

    url: str = ""
    body: bytes = field(default_factory=lambda: text().encode())
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    write: Callable[[BaseHTTPRequestHandler, bytes], None] = lambda handler, body: handler.wfile.write(body) and None
    requests: int = 0

    def drip(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Send a byte at intervals, endlessly."""
        while True:
            handler.wfile.write(body[:1])
            handler.wfile.flush()
            time.sleep(0.05)


@contextmanager
def serving() -> Iterator[Exporter]:
    exporter = Exporter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            exporter.requests += 1
            self.send_response(exporter.status)
            for name, value in exporter.headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                exporter.write(self, exporter.body)
            except OSError:  # the client has had enough
                self.close_connection = True

        def log_message(self, *about: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    exporter.url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
    try:
        yield exporter
    finally:
        server.shutdown()
        server.server_close()
