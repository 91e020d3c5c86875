"""Judge the report that a trial job wrote on its node. It comes from a job, so its form is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.disk import rundir
from jobs.slurm_check.checked_site import CheckedSite, conf_of
from jobs.slurm_check.finding import CheckFinding, failed, ok, warn
from nodes.schedulers.base import JobStatus

LOG_BYTES = 1 << 20
NEEDS = "torch, numpy, psutil and pydantic"


def printable(value: object, most: int = 200) -> str:
    """Return a value as one printable line."""
    return "".join(letter for letter in str(value) if letter.isprintable())[:most]


def read(
    site: CheckedSite, root: Path, partition: str, status: JobStatus, *, gpus: int, user: str
) -> Iterator[CheckFinding]:
    """Yield findings on a job that has ended."""
    title = f"Partition {partition}"
    node_report = rundir.read_json_under(root, "job/check.json")
    if node_report is None:
        yield _no_report(root, status, title)
        return
    seconds = f", {status.ended_at - status.started_at:.0f} s" if status.ended_at and status.started_at else ""
    yield ok(
        title,
        f"a job of {printable(node_report.get('user'))} ran on {printable(node_report.get('node'))}{seconds},"
        " and the portal read what it wrote",
    )
    if printable(node_report.get("user")) != user:
        yield failed(
            title,
            f"it ran as {printable(node_report.get('user'))}, not as {user}",
            "Do portal and nodes have the same users?",
        )
    yield _token(node_report, title)
    yield _torch(node_report, title)
    if gpus:
        yield _gpu(node_report, _map(node_report, "torch"), title)
    if site.reports == "post":
        yield _report(site, _map(node_report, "report"), title)
    yield _scontrol(site, _map(node_report, "scontrol"), title)


def _no_report(root: Path, status: JobStatus, title: str) -> CheckFinding:
    """Return why the job wrote no report: the batch script's message, else the end of its log."""
    message = ""
    for name in rundir.names_under(root, "job/told"):
        message = message or _text(root, f"job/told/{printable(name)}/failed")
    message = message or _text(root, "job/batch.1.log")
    ended = f"{status.state}{f', exit code {status.exit_code}' if status.exit_code is not None else ''}"
    if not message:
        remedy = "Does the node have VIGIL_RUNS at the same path, and this user? See its slurmd log."
        return failed(title, f"the job ended ({ended}) without output", remedy)
    remedy = "VIGIL_JOB_PYTHON and Vigil's own folder must be there on the nodes, at the same path."
    return failed(title, f"the job ended ({ended}): {message}", remedy)


def _text(root: Path, relative: str) -> str:
    try:
        lines = rundir.read_under(root, relative, limit=LOG_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return printable(lines[-1], 300) if lines else ""


def _token(node_report: dict[str, Any], title: str) -> CheckFinding:
    found = node_report.get("token")
    if isinstance(found, list) and "token" in found:
        return ok(f"{title}: run directory", "it read its token, and wrote to job/")
    return failed(
        f"{title}: run directory",
        f"it cannot read portal/token: {printable(found)}",
        "Does the node's mount keep access control lists?",
    )


def _torch(node_report: dict[str, Any], title: str) -> CheckFinding:
    title, torch, python = f"{title}: torch", _map(node_report, "torch"), printable(node_report.get("python"))
    if "version" not in torch:
        remedy = f"Point VIGIL_JOB_PYTHON at a Python that has {NEEDS}, or give projects an environment."
        return failed(title, f"Python {python} cannot import it: {printable(torch.get('error'))}", remedy)
    if node_report.get("old") or node_report.get("lacks"):
        lacks = f"lacks {printable(node_report['lacks'])}" if node_report.get("lacks") else "is too old"
        return failed(title, f"Python {python} {lacks}", f"Jobs need Python 3.11 with {NEEDS}: VIGIL_JOB_PYTHON.")
    return ok(
        title, f"{printable(torch['version'])} with Python {python}, imported in {printable(torch.get('seconds'))} s"
    )


def _gpu(node_report: dict[str, Any], torch: dict[str, Any], title: str) -> CheckFinding:
    title, given = f"{title}: GPU", printable(node_report.get("gpus"))
    if not given:
        return failed(title, "1 was requested, but CUDA_VISIBLE_DEVICES is empty", "See gres.conf and GresTypes=gpu.")
    if torch.get("seen") and torch.get("computes"):
        names = torch.get("names")
        return ok(title, printable(names[0] if isinstance(names, list) and names else torch["seen"]))
    built = f"is built for CUDA {printable(torch['cuda'])}" if torch.get("cuda") else "is built without CUDA"
    remedy = "Install torch's build for your driver's CUDA (TORCH_PIP_ARGS), or name another Python by project."
    return warn(title, f"Slurm gave it (CUDA_VISIBLE_DEVICES={given}), and torch, which {built}, cannot use it", remedy)


def _report(site: CheckedSite, found: dict[str, Any], title: str) -> CheckFinding:
    title, url = f"{title}: reports", site.report_url
    if found.get("status") == 401 and "problem+json" in printable(found.get("kind")):
        return ok(title, f"the node reaches {url}")
    if "status" in found:
        detail = f"{url} answers {printable(found['status'])}: that is not Vigil"
        return failed(
            title, detail, "Is a proxy in between? Set VIGIL_REPORT_URL to an address that leads to the portal."
        )
    detail = f"the node cannot reach {url}: {printable(found.get('error'))}"
    remedy = (
        "Start Vigil, set VIGIL_REPORT_URL to an address that nodes reach, or VIGIL_REPORTS=tail where there is none."
    )
    return failed(title, detail, remedy)


def _scontrol(site: CheckedSite, found: dict[str, Any], title: str) -> CheckFinding:
    title = f"{title}: scontrol"
    if isinstance(found.get("config"), str) and found.get("code") == 0:
        site.conf_on_node.update(conf_of(found["config"]))
        return ok(title, f"{printable(found.get('path'))}: a job that stops with a checkpoint can be requeued")
    remedy = (
        "Put Slurm's commands into /usr/local/bin, /usr/bin or /bin of the nodes: jobs call srun and scontrol there."
    )
    return warn(title, "the job finds no working scontrol; Vigil resubmits instead of requeueing", remedy)


def _map(node_report: dict[str, Any], name: str) -> dict[str, Any]:
    found = node_report.get(name)
    return found if isinstance(found, dict) else {}
