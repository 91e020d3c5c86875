"""Test the submit page: form and text, problems next to their fields, clones."""

import re
import time
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from jobs.models import Job
from nodes.models import Association, License, Node, Partition, Qos, Reservation
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.jobs.submissions import ENTRIES, its_code, packed, text_of
from tests.lab import a_job, a_project, person, signed_in, sysadmin
from tests.stack import REPOSITORY

pytestmark = pytest.mark.django_db

SPEC = """\
name = "from-a-test"  # and a comment
kind = "distributed"
project = "default"

[resources]
ranks_per_node = 2

[run]
recipe = "language"
steps = 20
warmup_steps = 2
"""


def test_the_first_form_can_be_submitted_as_it_is(client: Client) -> None:
    html = text(client.get("/submit"))
    assert "Ready to submit." in html
    assert "my-first-run" in html
    assert "Specification." in html


def test_submitting_makes_a_job_once(client: Client, mira: User) -> None:
    options = {"toml": SPEC, "side": "toml", "do": "submit", "key": "k1"}
    response = client.post("/submit", options)
    job = Job.objects.get()
    assert response.url == f"/jobs/{job.pk}"  # type: ignore[attr-defined]
    assert (job.owner, job.name, job.spec_toml) == (mira, "from-a-test", SPEC)
    client.post("/submit", options)
    assert Job.objects.count() == 1, "a second click is the same job"


def test_the_form_works_without_script(client: Client) -> None:
    """Fields win over the text; its comments stay."""
    client.post("/submit", {"toml": SPEC, "do": "submit", "run.steps": "30", "name": "plain-post"})
    job = Job.objects.get()
    assert job.name == "plain-post"
    assert job.spec["run"]["steps"] == 30
    assert "# and a comment" in job.spec_toml


def test_an_uploaded_file_is_the_text(client: Client) -> None:
    file = SimpleUploadedFile("spec.toml", SPEC.encode())
    client.post("/submit", {"toml": "name =", "file": file, "do": "submit", "side": "toml"})
    assert Job.objects.get().name == "from-a-test"


def test_a_name_and_its_problem_are_one_sentence(client: Client) -> None:
    options = {"toml": 'name = "many"\nkind = "federated"\n[run]\nclients = 2000\n', "side": "toml"}
    assert 'Clients</a> <span class="muted">are 2,000, but there are' in text(client.post("/submit/sync", options))


@pytest.mark.parametrize(
    "table",
    ['kind = "script"\n[script]\ndirectory = "."\n', 'kind = "federated"\n[client]\ndirectory = "."\n'],
    ids=["script", "client"],
)
def test_code_has_still_to_be_chosen(project: Project, table: str) -> None:
    client = signed_in(sysadmin())
    options = {"toml": f'name = "mine"\n{table}', "side": "toml"}
    html = text(client.post("/submit/sync", options))
    assert 'Choose the code to upload: <a href="#f-code">Code</a>' in html
    assert "Ready to submit." not in html
    assert "Ready to submit." in text(client.post("/submit/sync", options | {"packed": "1"}))


def test_checking_changes_nothing(client: Client) -> None:
    html = text(client.post("/submit", {"toml": SPEC, "side": "toml", "do": "check"}))
    assert "Ready to submit." in html
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (("ranks_per_node = 2", "ranks_per_node = 3"), "f-run-global_batch-e", "32 does not divide over 3 ranks"),
        (("steps = 20", "steps = 0"), "f-run-steps-e", "0 is too small"),
        (('"from-a-test"', '"has spaces"'), "f-name-e", "is not a valid name"),
        (("steps = 20", "stepz = 20"), "findings", "Did you mean &quot;steps&quot;?"),
        (('project = "default"', 'project = "nobodys"'), "f-project-e", "is not a project of yours"),
        (("[run]", "[run"), "say", "Line 8: a table&#x27;s name is written in brackets"),
    ],
)
def test_problems_stand_at_their_field_and_line(
    client: Client, change: tuple[str, str], field: str, message: str
) -> None:
    response = client.post("/submit", {"toml": SPEC.replace(*change), "side": "toml", "do": "submit"})
    assert response.status_code == 422
    html = text(response)
    assert message in html.split(f'id="{field}"')[1]
    assert not Job.objects.exists()


def test_invalid_toml_is_reported_once(client: Client) -> None:
    html = text(client.post("/submit", {"toml": "steps = ten", "side": "toml", "do": "check"}))
    for_the_editor = html.split('data-marks="')[1].split('"')[0]
    assert "Line 1: a text needs quotes." in for_the_editor
    assert html.count("Line 1") - for_the_editor.count("Line 1") == 1


def test_the_example_script_can_be_opened_in_a_browser(client: Client, settings: Any) -> None:
    settings.VIGIL_LOCAL_TRUST = "everyone"
    example = (REPOSITORY / "examples" / "script" / "job.toml").read_text()
    html = text(client.post("/submit", {"toml": example, "side": "toml", "do": "submit"}))
    report = html.split('id="f-script-directory-e"')[1].split("</div>")[0]
    assert "upload a tar.gz of it, in the form under Code" in report
    assert "`" not in html.split("</textarea>")[-1] + report
    assert 'id="f-code"' in html


def test_all_errors_are_shown_at_once_and_listed_on_top(client: Client) -> None:
    wrong = SPEC.replace("ranks_per_node = 2", 'ranks_per_node = 3\ntime_limit = "12 hours"').replace("default", "no")
    html = text(client.post("/submit", {"toml": wrong, "side": "toml", "do": "submit"}))
    summary = html.split('id="say"')[1].split("</p>")[0]
    assert "3 things to fix:" in summary
    for field, name in (("project", "Project"), ("resources-time_limit", "Time limit"), ("run-global_batch", "Global")):
        assert f'<a href="#f-{field}">{name}' in summary
    assert "32 does not divide over 3 ranks" in html.split('id="f-run-global_batch-e"')[1]
    item = text(client.post("/submit", {"toml": SPEC.replace("steps = 20", "steps = 0"), "side": "toml"}))
    assert 'One thing to fix: <a href="#f-run-steps">Steps</a>. <span class="muted">0 is too small' in item


def test_what_reads_a_broken_field_is_not_judged(client: Client) -> None:
    wrong = SPEC.replace("ranks_per_node = 2", "ranks_per_node = -3") + "global_batch = 33\n"
    html = text(client.post("/submit", {"toml": wrong, "side": "toml", "do": "check"}))
    assert 'One thing to fix: <a href="#f-resources-ranks_per_node"' in html
    assert "does not divide" not in html


@pytest.mark.parametrize("table", ENTRIES)
def test_refused_code_does_not_hold(client: Client, settings: Any, table: str) -> None:
    settings.VIGIL_LOCAL_TRUST = "everyone"
    options = {"toml": text_of(table), "side": "toml", "do": "submit"}
    html = text(client.post("/submit", options))
    assert f'One thing to fix: <a href="#f-{table}-directory">Directory</a>.' in html
    assert "Holds" not in html
    html = text(client.post("/submit", {**options, "code": SimpleUploadedFile("code.tgz", packed(other_py=""))}))
    assert f"{ENTRIES[table]} is not in the upload" in html.split(f'id="f-{table}-entry-e"')[1]
    sent = {**options, "code": SimpleUploadedFile("code.tgz", its_code(table))}
    assert client.post("/submit", sent).status_code == 302
    assert Job.objects.get().spec[table]["entry"] == ENTRIES[table]


def test_a_text_of_ten_megabytes_is_refused_at_the_door(client: Client) -> None:
    response = client.post("/submit", {"toml": "#" * 10_000_000, "side": "toml", "do": "submit"})
    assert response.status_code in {400, 413}
    response = client.post("/submit", {"toml": "#" * 100_000, "side": "toml", "do": "submit"})
    assert response.status_code == 422
    assert "larger than 64 KB" in text(response)


def test_each_side_answers_with_the_other(client: Client) -> None:
    form = text(client.post("/submit/sync", {"toml": SPEC, "side": "form", "run.steps": "30", "name": "from-a-test"}))
    assert "steps = 30" in form
    assert 'id="editor" hx-swap-oob="true"' in form
    typed = text(client.post("/submit/sync", {"toml": SPEC.replace("20", "40"), "side": "toml", "run.steps": "20"}))
    assert 'id="fields"' in typed
    assert 'name="run.steps" type="text" inputmode="numeric" value="40"' in typed
    assert 'id="editor"' not in typed, "never the box that is being typed into"


def test_another_kind_brings_its_fields(client: Client) -> None:
    html = text(client.post("/submit/sync", {"toml": SPEC, "side": "form", "kind": "script", "run.steps": "20"}))
    assert 'name="script.entry"' in html
    assert 'name="run.steps"' not in html
    assert "[script]" in html


def test_custom_clients_bring_a_file_to_choose(client: Client) -> None:
    spec = SPEC.partition("[run]")[0].replace('kind = "distributed"', 'kind = "federated"')
    options = {"toml": spec, "side": "form", "run.recipe": "client"}
    html = text(client.post("/submit/sync", options))
    assert "<legend>Your clients</legend>" in html
    assert 'type="file" id="f-code" name="code"' in html
    assert 'id="f-client-entry"' in html
    assert 'id="f-client-algorithm"' not in html
    plain = text(client.post("/submit/sync", {**options, "run.recipe": "vision"}))
    assert "f-code" not in plain


def test_a_clone_begins_with_its_parents_text_and_remembers_it(client: Client, mira: User, project: Project) -> None:
    parent = a_job(mira, project, name="siskin", spec_toml=SPEC)
    html = text(client.get(f"/submit?from={parent.pk}"))
    assert f'<a href="/jobs/{parent.pk}">siskin #{parent.pk}</a>, 1 change' in html
    assert "siskin-2" in html
    assert "# and a comment" in html
    client.post("/submit", {"toml": SPEC, "side": "toml", "do": "submit", "from": parent.pk})
    assert Job.objects.order_by("-id")[0].parent == parent
    a_job(mira, project, name="siskin-2")
    assert "siskin-3" in text(client.get(f"/submit?from={parent.pk}")), "no name twice"
    for longest in (f"{'s' * 62}-9", "s" * 64):
        clone = text(client.get(f"/submit?from={a_job(mira, project, name=longest, spec_toml=SPEC).pk}"))
        assert f'value="{"s" * 59}-' in clone, "names have at most 64 characters"
    elsewhere = a_project("elsewhere")
    stranger = a_job(person("oskar", elsewhere), elsewhere)
    assert client.get(f"/submit?from={stranger.pk}").status_code == 404
    assert client.get("/submit?from=x").status_code == 404


def folded(html: str) -> str:
    """Return the texts of the form's collapsed sections."""
    form = html.split('id="fields"')[1].split("spec.toml")[0]
    return "".join(re.findall(r"<details.*?</details>", form, re.S))


def test_what_is_set_stands_before_the_fold_and_the_rest_behind_it(client: Client) -> None:
    html = text(client.post("/submit", {"toml": SPEC, "side": "toml", "do": "check"}))
    assert '<details class="wide" open' not in html
    assert 'name="run.warmup_steps"' not in folded(html), "set otherwise than by default"
    assert 'name="run.warmup_steps"' in html
    assert 'name="run.clip"' in folded(html)
    assert 'name="restart.max_restarts"' not in folded(html), "a new job shows what most people set"


def test_a_clone_folds_what_is_as_by_default(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, spec_toml=SPEC)
    html = text(client.get(f"/submit?from={job.pk}"))
    assert "Defaults: maximum restarts 3, restarts in place 3" in html
    assert 'name="restart.max_restarts"' in folded(html)
    assert 'name="run.steps"' not in folded(html)
    changed = a_job(mira, project, spec_toml=f"{SPEC}\n[restart]\nmax_restarts = 5\n")
    assert 'name="restart.max_restarts"' not in folded(text(client.get(f"/submit?from={changed.pk}")))


def test_what_slurm_has_is_offered_to_whom_it_is_for(mira: User, client: Client, settings: Any) -> None:
    settings.VIGIL_SCHEDULER = "slurm"
    assert "<datalist" not in text(client.get("/submit")), "nothing is reported yet"
    User.objects.filter(pk=mira.pk).update(slurm_user="mira1")
    Node.objects.create(name="dgx-01", gpus=8, gpu_type="h100", features=["nvlink"])
    License.objects.create(name="matlab", total=2)
    Node.objects.create(name="made-up", gpus=8, gpu_type="tpu", is_made_up=True)
    Partition.objects.create(name="batch")
    Partition.objects.create(name="theirs", allowed_accounts=["other"])
    Qos.objects.create(name="high")
    Qos.objects.create(name="urgent")
    Reservation.objects.create(name="course", accounts=["lab"])
    Reservation.objects.create(name="repair", users=["root"])
    Association.objects.create(account="lab", user="mira1", qos=["high"])
    Association.objects.create(account="other", user="oskar9", qos=["urgent"])
    assert offered(client) == {
        "partition": ["batch"], "qos": ["high"], "reservation": ["course"], "gpu_type": ["h100"],
        "constraint": ["nvlink"], "licenses": ["matlab"], "require_nodes": ["dgx-01"], "exclude_nodes": ["dgx-01"],
    }  # fmt: skip
    assert "default. Here: batch</p>" in text(client.get("/submit"))
    stranger = offered(signed_in(person("stranger")))
    assert stranger["partition"] == ["batch", "theirs"], "nothing is known of their accounts"
    assert "reservation" not in stranger


def offered(client: Client) -> dict[str, list[str]]:
    """Return the choices that the form offers, by field of [resources]."""
    lists = re.findall(r'<datalist id="f-resources-(\w+)-k">(.*?)</datalist>', text(client.get("/submit")))
    return {name: re.findall(r'value="([^"]*)"', options) for name, options in lists}


@pytest.mark.parametrize(("box", "text"), [("environment.env", "k{}=1\n"), ("script.args", "a{}\n")])
def test_box_of_thousands_of_lines_is_refused_at_once(client: Client, box: str, text: str) -> None:
    """tomlkit's time to write a table or a list grows with the square of its length: 12,000 arguments took 30 s."""
    spec = 'name = "x"\nkind = "script"\n[script]\nentry = "a.py"\n'
    lines = "".join(text.format(number) for number in range(6_000))
    began = time.process_time()
    sent = {"toml": spec, "kind": "script", "name": "x", "project": "vision", "script.entry": "a.py", box: lines}
    answer = client.post("/submit", sent)
    assert answer.status_code == 422
    assert time.process_time() - began < 2.0
