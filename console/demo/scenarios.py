"""Define the demo lab's past as data: each job and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DemoAttempt:
    """One attempt: the steps of each incarnation, and how it ended. Hours count back from now."""

    hours_ago: float  # its start
    steps: tuple[tuple[int, int], ...]  # (first, last) of each incarnation
    state: str = "completed"
    cause: str = "completed"
    nodes: tuple[str, ...] = ("dgx-02",)
    queued_minutes: float = 2.0
    exit_code: int | None = 0
    signal: int | None = None
    reason: str = ""
    failure: dict[str, Any] = field(default_factory=dict)
    decision: str = ""
    log: str = ""  # last lines of the failing rank
    echo: str = ""  # of the other ranks

    @property
    def last_step(self) -> int:
        return self.steps[-1][1]


@dataclass(frozen=True, kw_only=True)
class PostmortemNotes:
    """Notes that people wrote about a job's failure. Actions: text, owner, days until due, whether done."""

    narrative: str
    factors: tuple[str, ...] = ()
    actions: tuple[tuple[str, str, int, bool], ...] = ()


@dataclass(frozen=True, kw_only=True)
class DemoBottleneck:
    """The trainer's verdict: shares of a step by phase, and what follows from them."""

    bound: str
    because: str
    remedy: str
    shares: dict[str, float]
    busy: float
    matmul: float


COMPUTE = DemoBottleneck(
    bound="compute",
    because="71 % of what is computed are products of matrices and attention; the largest loss, to communication, is"
    " 6 % of a step.",
    remedy='This is as it should be. To go faster, try dtype = "fp8" where the model is wide, or more GPUs.',
    shares={
        "forward": 0.29,
        "backward": 0.585,
        "optimizer": 0.032,
        "communication": 0.055,
        "data": 0.001,
        "other": 0.037,
    },
    busy=0.92,
    matmul=0.71,
)
COMMUNICATION = DemoBottleneck(
    bound="communication",
    because="During 21 % of a step data is sent and nothing is computed.",
    remedy="Try a larger global_batch with the same micro_batch: gradients are then exchanged less often.",
    shares={
        "forward": 0.245,
        "backward": 0.47,
        "optimizer": 0.03,
        "communication": 0.213,
        "data": 0.001,
        "other": 0.041,
    },
    busy=0.76,
    matmul=0.7,
)
INPUT = DemoBottleneck(
    bound="input",
    because="32 % of a step is spent waiting for data.",
    remedy="Put the data on a disk of the node, and make it ready beforehand (python -m training prepare).",
    shares={"forward": 0.18, "backward": 0.36, "optimizer": 0.04, "communication": 0.05, "data": 0.32, "other": 0.05},
    busy=0.61,
    matmul=0.58,
)


@dataclass(frozen=True, kw_only=True)
class DemoClient:
    """A client of a federation: its data, how much, and in which share of its rounds something happened."""

    name: str
    samples: int
    late: float = 0.0
    dropped: float = 0.0
    rejected_from: int | None = None
    slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DemoJob:
    """A job of the past. `floor` and `start` bound its loss, `step_s` is seconds a step."""

    name: str
    owner: str  # "" is the first sysadmin, whose home page then has jobs
    project: str
    recipe: str
    steps: int
    step_s: float
    attempts: tuple[DemoAttempt, ...]
    gpus: int = 8
    nodes: int = 1
    global_batch: int = 1024
    parameters: int = 760_000_000
    bound: DemoBottleneck = field(default_factory=lambda: COMPUTE)
    checkpoint_every: int = 200
    start: float = 5.6
    floor: float = 1.9
    spike: tuple[int, float] | None = None  # from this step on the loss is multiplied by this factor at each step
    straggler: int | None = None  # a rank that is slower than the others
    tags: tuple[str, ...] = ()
    notes: str = ""
    time_limit: str = "12:00:00"
    postmortem_notes: PostmortemNotes | None = None
    owners: tuple[DemoClient, ...] = ()
    """The clients of a federation, whose steps are rounds."""

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    def node_of(self, rank: int, demo_attempt: DemoAttempt) -> str:
        return demo_attempt.nodes[rank * len(demo_attempt.nodes) // self.world]


PEOPLE = {
    "ada.lindqvist": ("Ada", "Lindqvist", {"language": "lead"}),
    "kofi.mensah": ("Kofi", "Mensah", {"language": "researcher", "vision": "researcher"}),
    "mei.tanaka": ("Mei", "Tanaka", {"vision": "lead"}),
    "jonas.weber": ("Jonas", "Weber", {"language": "researcher"}),
}
PROJECTS = {"language": "Language models", "vision": "Vision"}

_OUT_OF_MEMORY = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.11 GiB"
    " of which 1.62 GiB is free."
)

STORIES = (
    DemoJob(
        name="gpt-760m-baseline", owner="ada.lindqvist", project="language", recipe="language", steps=4000, step_s=4.2,
        tags=("baseline", "gpt"), notes="The run that the sweep below is compared with.",
        attempts=(DemoAttempt(hours_ago=62, steps=((0, 4000),), nodes=("dgx-01",)),),
    ),
    DemoJob(
        name="gpt-760m-context-4k", owner="", project="language", recipe="language", steps=6000, step_s=5.1,
        tags=("gpt", "context"), straggler=5, checkpoint_every=250, floor=1.72, time_limit="16:00:00",
        bound=COMMUNICATION,
        notes="As the baseline, with a context of 4,096.",
        postmortem_notes=PostmortemNotes(
            narrative="Same slot as the riser that was reseated in October. We should swap the tray this time.",
            factors=("The node took jobs again without a burn-in.", "Nobody was notified of the first replay errors."),
            actions=(
                ("Replace the GPU tray of dgx-03, ticket with the vendor", "ada.lindqvist", 3, False),
                ("Burn in for 12 h before dgx-03 returns", "jonas.weber", 5, False),
                ("Save every 250 steps instead of every 1,000", "ada.lindqvist", -1, True),
            ),
        ),
        attempts=(
            DemoAttempt(
                hours_ago=15.2144, steps=((0, 3180),), state="node_fail", cause="node_fail", exit_code=None,
                nodes=("dgx-03",), queued_minutes=41, reason="Node dgx-03 stopped responding",
                failure={
                    "rank": 5, "incarnation": 0, "exit_code": 1, "kind": "exception",
                    "error": "torch.AcceleratorError: CUDA error: unknown error",
                },
                log="  File \"training/trainer.py\", line 214, in _step\n    loss.backward()\n"
                "torch.AcceleratorError: CUDA error: unknown error",
                echo="torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process"
                " exited or there was a network error, NCCL version 2.27.3",
                decision="GPU fell off the bus on dgx-03 (84 % confidence). Restarted from step 3,000 without"
                " dgx-03 as attempt 2. Restart 1 of 3.",
            ),
            DemoAttempt(hours_ago=10.0, steps=((3000, 6000),), nodes=("dgx-05",), queued_minutes=2.5),
        ),
    ),
    DemoJob(
        name="gpt-760m-batch-4096", owner="kofi.mensah", project="language", recipe="language", steps=4000, step_s=6.8,
        tags=("gpt", "sweep"), global_batch=4096, time_limit="04:00:00",
        attempts=(
            DemoAttempt(
                hours_ago=9.1, steps=((0, 14),), state="failed", cause="exception", exit_code=1, nodes=("dgx-02",),
                failure={"rank": 0, "incarnation": 0, "exit_code": 1, "kind": "exception", "error": _OUT_OF_MEMORY},
                decision="Out of GPU memory (96 % confidence). Not restarted: it saved no checkpoint since its"
                " start, so the same would happen again.",
                log=f"  File \"training/trainer.py\", in _accumulate\n    loss.backward()\n{_OUT_OF_MEMORY}",
            ),
        ),
    ),
    DemoJob(
        name="gpt-760m-lr-6e-4", owner="", project="language", recipe="language", steps=4000, step_s=4.2,
        tags=("gpt", "sweep"), spike=(1430, 1.012), checkpoint_every=250,
        notes="Twice the learning rate. Does it still train?",
        attempts=(
            DemoAttempt(
                hours_ago=6.3, steps=((0, 1522),), state="failed", cause="exception", exit_code=1, nodes=("dgx-04",),
                failure={
                    "rank": 3, "incarnation": 0, "exit_code": 1, "kind": "exception",
                    "error": "FloatingPointError: the loss is not finite at step 1522",
                },
                decision="Loss diverged (70 % confidence). Not restarted: the same would happen again.",
                log="FloatingPointError: the loss is not finite at step 1522",
            ),
        ),
    ),
    DemoJob(
        name="digits-label-noise-20", owner="mei.tanaka", project="vision", recipe="vision", steps=3000, step_s=0.9,
        gpus=4, start=2.3, floor=0.31, tags=("noise",), parameters=44_000, global_batch=256, bound=INPUT,
        notes="A rank was killed from outside; its launcher restarted the ranks in place.",
        attempts=(DemoAttempt(hours_ago=30, steps=((0, 1710), (1600, 3000)), nodes=("dgx-06",)),),
    ),
    DemoJob(
        name="gpt-by-package", owner="ada.lindqvist", project="language", recipe="language", steps=90, step_s=38.0,
        gpus=4, start=4.9, floor=2.2, tags=("federated",), parameters=43_000, checkpoint_every=10, global_batch=1920,
        time_limit="02:00:00",
        notes="Each package stays with one client. multiprocessing is left out since its texts"
        " were changed; tkinter sits behind a slow line.",
        owners=(
            DemoClient(name="asyncio", samples=2_310), DemoClient(name="ctypes", samples=640),
            DemoClient(name="email", samples=1_480),
            DemoClient(name="encodings", samples=3_120, slow=1.5), DemoClient(name="http", samples=980),
            DemoClient(name="idlelib", samples=2_150), DemoClient(name="importlib", samples=1_220),
            DemoClient(name="multiprocessing", samples=1_190, rejected_from=52),
            DemoClient(name="tkinter", samples=1_870, late=0.4, slow=2.3), DemoClient(name="unittest", samples=3_540),
            DemoClient(name="wsgiref", samples=210, dropped=0.12),
            DemoClient(name="xml", samples=1_640, late=0.05),
        ),
        attempts=(DemoAttempt(hours_ago=19, steps=((0, 44), (40, 90)), nodes=("dgx-06",)),),
    ),
    DemoJob(
        name="digits-mixup", owner="kofi.mensah", project="vision", recipe="vision", steps=2000, step_s=0.9,
        gpus=4, start=2.3, floor=0.12, tags=("augmentation",), parameters=44_000, global_batch=256, bound=INPUT,
        attempts=(
            DemoAttempt(
                hours_ago=27, steps=((0, 860),), state="cancelled", cause="cancelled", exit_code=75, nodes=("dgx-06",),
                decision="Not restarted: it was cancelled. Resume continues from its newest checkpoint.",
            ),
        ),
    ),
    DemoJob(
        name="gpt-1b3-two-nodes", owner="jonas.weber", project="language", recipe="language", steps=2400, step_s=11.0,
        nodes=2, tags=("gpt", "1b3"), checkpoint_every=300, floor=1.81, time_limit="05:00:00",
        parameters=1_300_000_000, global_batch=2560, bound=COMMUNICATION,
        attempts=(
            DemoAttempt(
                hours_ago=22, steps=((0, 1620),), state="failed", cause="stopped", exit_code=75,
                nodes=("dgx-07", "dgx-08"), queued_minutes=95, reason="Stopped at its time limit, with a checkpoint",
                decision="Stopped on request after saving a checkpoint. Restarted from step 1,620 as attempt 2.",
            ),
            DemoAttempt(hours_ago=16.5, steps=((1620, 2400),), nodes=("dgx-07", "dgx-08"), queued_minutes=22),
        ),
    ),
)  # fmt: skip

# (name, state, GPUs in use, reason); in a partition of their own, with eight GPUs each.
NODES = (
    ("dgx-01", "allocated", 8, ""),
    ("dgx-02", "mixed", 5, ""),
    ("dgx-03", "drained", 0, "[node] Xid 79 on GPU 5 (vigil: off-bus)"),
    ("dgx-04", "idle", 0, ""),
    ("dgx-05", "allocated", 8, ""),
    ("dgx-06", "draining", 4, "Fan 3 fails, replacement on Friday (vigil: ops)"),
    ("dgx-07", "allocated", 8, ""),
    ("dgx-08", "allocated", 8, ""),
)

# Real jobs of this machine's own scheduler: one runs, the next waits for its resources.
LIVE = (
    """\
name = "gpt-on-the-standard-library"
kind = "distributed"
project = "language"
tags = ["demo", "live"]
[resources]
ranks_per_node = {ranks}
time_limit = "00:30:00"
[run]
recipe = "language"
steps = 6000
global_batch = 8
checkpoint_every = 100
validate_every = 100
""",
    """\
name = "digits-by-client"
kind = "federated"
project = "vision"
tags = ["demo", "live"]
[resources]
ranks_per_node = 1
time_limit = "01:00:00"
[run]
recipe = "tabular"
rounds = 1500
clients = 24
epochs = 4
batch = 16
learning_rate = 0.01
split = "dirichlet"
pace = "deadline"
checkpoint_every = 100
[run.dirichlet]
alpha = 0.4
[run.tabular]
hidden = 256
""",
    """\
name = "digits-on-every-core"
kind = "distributed"
project = "vision"
tags = ["demo", "live"]
[resources]
ranks_per_node = {cpus}
time_limit = "00:10:00"
begin = "+2h"
[run]
recipe = "vision"
steps = 400
global_batch = {batch}
checkpoint_every = 100
""",
)
