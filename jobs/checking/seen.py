"""What a trial job wrote down on its node, judged. It comes from a job: nothing in it is believed to be well formed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.checking.finding import Finding, bad, ok, warn
from jobs.checking.site import Site, conf_of
from jobs.disk import rundir
from nodes.schedulers.base import JobStatus

LOG_BYTES = 1 << 20
NEEDS = "torch, numpy, psutil and pydantic"


def plain(value: object, most: int = 200) -> str:
    """One printable line."""
    return "".join(letter for letter in str(value) if letter.isprintable())[:most]


def read(site: Site, root: Path, partition: str, status: JobStatus, *, gpus: int, user: str) -> Iterator[Finding]:
    """What came of a job that has ended."""
    title = f"Partition {partition}"
    told = rundir.read_json_under(root, "job/check.json")
    if told is None:
        yield _nothing(root, status, title)
        return
    seconds = f", {status.ended_at - status.started_at:.0f} s" if status.ended_at and status.started_at else ""
    yield ok(
        title,
        f"a job of {plain(told.get('user'))} ran on {plain(told.get('node'))}{seconds}, and we read what it wrote",
    )
    if plain(told.get("user")) != user:
        yield bad(
            title, f"it ran as {plain(told.get('user'))}, not as {user}", "Do portal and nodes have the same users?"
        )
    yield _token(told, title)
    yield _torch(told, title)
    if gpus:
        yield _gpu(told, _map(told, "torch"), title)
    if site.reports == "post":
        yield _report(site, _map(told, "report"), title)
    yield _scontrol(site, _map(told, "scontrol"), title)


def _nothing(root: Path, status: JobStatus, title: str) -> Finding:
    """Why it wrote nothing: what the batch script said, else the end of its log."""
    said = ""
    for name in rundir.names_under(root, "job/told"):
        said = said or _text(root, f"job/told/{plain(name)}/failed")
    said = said or _text(root, "job/batch.1.log")
    ended = f"{status.state}{f', exit code {status.exit_code}' if status.exit_code is not None else ''}"
    if not said:
        remedy = "Does the node have VIGIL_RUNS at the same path, and this user? See its slurmd log."
        return bad(title, f"the job ended ({ended}) without a word", remedy)
    remedy = "VIGIL_JOB_PYTHON and Vigil's own folder must be there on the nodes, at the same path."
    return bad(title, f"the job ended ({ended}): {said}", remedy)


def _text(root: Path, relative: str) -> str:
    try:
        lines = rundir.read_under(root, relative, limit=LOG_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return plain(lines[-1], 300) if lines else ""


def _token(told: dict[str, Any], title: str) -> Finding:
    found = told.get("token")
    if isinstance(found, list) and "token" in found:
        return ok(f"{title}: run directory", "it read its token, and wrote to job/")
    return bad(
        f"{title}: run directory",
        f"it cannot read portal/token: {plain(found)}",
        "Does the node's mount keep access control lists?",
    )


def _torch(told: dict[str, Any], title: str) -> Finding:
    title, torch, python = f"{title}: torch", _map(told, "torch"), plain(told.get("python"))
    if "version" not in torch:
        remedy = f"Point VIGIL_JOB_PYTHON at a Python that has {NEEDS}, or give projects an environment."
        return bad(title, f"Python {python} cannot import it: {plain(torch.get('error'))}", remedy)
    if told.get("old") or told.get("lacks"):
        lacks = f"lacks {plain(told['lacks'])}" if told.get("lacks") else "is too old"
        return bad(title, f"Python {python} {lacks}", f"Jobs need Python 3.11 with {NEEDS}: VIGIL_JOB_PYTHON.")
    return ok(title, f"{plain(torch['version'])} with Python {python}, imported in {plain(torch.get('seconds'))} s")


def _gpu(told: dict[str, Any], torch: dict[str, Any], title: str) -> Finding:
    title, given = f"{title}: GPU", plain(told.get("gpus"))
    if not given:
        return bad(title, "1 was asked for, and CUDA_VISIBLE_DEVICES is empty", "See gres.conf and GresTypes=gpu.")
    if torch.get("seen") and torch.get("computes"):
        names = torch.get("names")
        return ok(title, plain(names[0] if isinstance(names, list) and names else torch["seen"]))
    built = f"is built for CUDA {plain(torch['cuda'])}" if torch.get("cuda") else "is built without CUDA"
    remedy = "Install torch's build for your driver's CUDA (TORCH_PIP_ARGS), or name another Python by project."
    return warn(title, f"Slurm gave it (CUDA_VISIBLE_DEVICES={given}), and torch, which {built}, cannot use it", remedy)


def _report(site: Site, found: dict[str, Any], title: str) -> Finding:
    title, url = f"{title}: reports", site.report_url
    if found.get("status") == 401 and "problem+json" in plain(found.get("kind")):
        return ok(title, f"the node reaches {url}")
    if "status" in found:
        detail = f"{url} answers {plain(found['status'])}: that is not Vigil"
        return bad(title, detail, "Is a proxy in between? Set VIGIL_REPORT_URL to an address that leads to the portal.")
    detail = f"the node cannot reach {url}: {plain(found.get('error'))}"
    remedy = (
        "Start Vigil, set VIGIL_REPORT_URL to an address that nodes reach, or VIGIL_REPORTS=tail where there is none."
    )
    return bad(title, detail, remedy)


def _scontrol(site: Site, found: dict[str, Any], title: str) -> Finding:
    title = f"{title}: scontrol"
    if isinstance(found.get("config"), str) and found.get("code") == 0:
        site.told_by_node.update(conf_of(found["config"]))
        return ok(title, f"{plain(found.get('path'))}: what stops with a checkpoint can be requeued")
    remedy = (
        "Put Slurm's commands into /usr/local/bin, /usr/bin or /bin of the nodes: jobs call srun and scontrol there."
    )
    return warn(title, "the job finds none that answers; Vigil submits anew instead of a requeue", remedy)


def _map(told: dict[str, Any], name: str) -> dict[str, Any]:
    found = told.get(name)
    return found if isinstance(found, dict) else {}
