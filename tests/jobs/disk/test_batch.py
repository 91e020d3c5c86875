"""Test batch.sh, run by bash with a fake srun: it passes on exactly its inputs, and runs nothing else."""

from __future__ import annotations

import itertools
import os
import pwd
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.disk.batch import Batch
from tests.examples import examples
from tests.waiting import until

# Each fake program records its arguments: words ended by NUL, calls by an empty word.
STUB = """#!/bin/bash
printf '%s\\0' "$@" '' >> "$CALLS/${0##*/}"
"""
PIECES = (
    "$(touch canary)", "`touch canary`", "'; touch canary; '", '"; touch canary; "', "\ntouch canary\n",
    "|touch canary",
    "\n#SBATCH --account=root\n", "#SBATCH --x", "$HOME", "${run}", "$'\\n'", "\\", "'", '"', "*", "?", "~", "!!", "&",
    ";", "--", "-c", "%s", "{python}", "}}", " ", "\t", "é", "日本", "\u2028", "=", "a", "Z9",
)  # fmt: skip
texts = st.characters(exclude_characters="\0", exclude_categories=("Cs",))
wild = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), st.text(texts, min_size=1, max_size=20)
)
names = wild.map(lambda text: "n" + text.replace("/", "_").encode()[:90].decode(errors="ignore"))  # of a file
numbers = itertools.count()


class Played:
    """A run of a batch script in a separate folder."""

    def __init__(self, place: Path) -> None:
        self.place = place / str(next(numbers))
        self.calls_folder = self.place / "calls"
        self.calls_folder.mkdir(parents=True)
        (self.place / "bin").mkdir()
        for word in ("srun", "scontrol", "module", "conda"):
            self.play(word, STUB)

    def play(self, word: str, text: str) -> Path:
        path = self.place / "bin" / word
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, batch: Batch) -> subprocess.Popen[bytes]:
        script = self.place / "batch.sh"
        script.write_text(batch.text())
        environment = {
            "PATH": f"{self.place / 'bin'}:/usr/bin:/bin", "CALLS": str(self.calls_folder), "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "2",
        }  # fmt: skip
        return subprocess.Popen(
            ["/bin/bash", script], env=environment, cwd=self.place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, batch: Batch) -> int:
        process = self.start(batch)
        output, _ = process.communicate(timeout=30)
        self.output = output.decode(errors="replace")
        return process.returncode

    def calls(self, word: str) -> list[list[str]]:
        """Return its calls."""
        path = self.calls_folder / word
        words = path.read_bytes().decode().split("\0")[:-1] if path.exists() else []
        return [list(call) for last, call in itertools.groupby(words, key=lambda w: w == "") if not last]

    def a_run(self, name: str = "run") -> Path:
        run = self.place / name
        (run / "portal").mkdir(parents=True)
        return run

    def a_python(self, name: str = "python") -> str:
        path = self.place / name
        path.write_text("")
        path.chmod(0o755)
        return str(path)

    def a_batch(self, **fields: object) -> Batch:
        given = {"run": self.a_run(), "start": Path("/vigil/training/start.py"), "lead": 30, "python": self.a_python()}
        return Batch(**given | fields)  # type: ignore[arg-type]


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path)


def options_of(call: list[str]) -> tuple[list[str], list[str]]:
    at = next(index for index, word in enumerate(call) if not word.startswith("-"))
    return call[:at], call[at:]


quick = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(run=names, python=names, start=wild, modules=st.lists(wild, max_size=3), conda=wild)
@pytest.mark.lengthy
def test_whatever_the_texts_are_they_arrive_as_they_are(
    tmp_path: Path, run: str, python: str, start: str, modules: list[str], conda: str
) -> None:
    played = Played(tmp_path)
    path = played.a_run(run)
    batch = Batch(run=path, start=Path(start), lead=30, python=played.a_python(f"p{python}"), modules=tuple(modules))
    assert played.run(batch) == 0, played.output
    assert played.calls("module") == [["load", module] for module in modules]
    _, command = options_of(played.calls("srun")[0])
    assert command == [batch.python, str(batch.start), str(path)]
    played.play("python", STUB)
    assert played.run(replace(batch, conda=conda, modules=())) == 0, played.output
    assert played.calls("conda") == [["shell.bash", "hook"], ["activate", conda]]
    assert not list(played.place.rglob("canary"))


@quick
@given(image=wild, mounts=st.lists(wild, max_size=3), python=wild, engine=st.sampled_from(["pyxis", "apptainer"]))
def test_so_do_the_texts_of_a_container(
    tmp_path: Path, image: str, mounts: list[str], python: str, engine: str
) -> None:
    played = Played(tmp_path)
    batch = played.a_batch(container=image, mounts=tuple(mounts), python=python, engine=engine, gpus=True)
    assert played.run(batch) == 0, played.output
    call = played.calls("srun")[0]
    inside = [python, str(batch.start), str(batch.run)]
    if engine == "pyxis":
        assert call[-5:] == [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", *inside]
    else:
        binds = [word for mount in mounts for word in ("--bind", mount)]
        assert call[-len([*binds, image, *inside]) - 3 :] == ["apptainer", "exec", "--nv", *binds, image, *inside]
    assert not list(played.place.rglob("canary"))


@given(nodes=st.lists(wild, min_size=1, max_size=3))
def test_a_directive_is_a_single_line_of_plain_characters(nodes: list[str]) -> None:
    batch = Batch(run=Path("/r"), start=Path("/s"), lead=30, python="p", required_nodes=tuple(nodes))
    if any(not ("!" <= letter <= "~") for node in nodes for letter in node):
        with pytest.raises(ValueError, match="cannot stand in a line"):
            batch.text()
    else:
        assert f"#SBATCH --nodelist={','.join(nodes)}" in batch.text().splitlines()


def test_srun_starts_a_single_launcher_on_each_node_with_all_of_it(played: Played) -> None:
    played.play("srun", STUB + "env | grep -E '^SLURM_(NTASKS|CPUS|TRES)' >&2\nexit 0\n")
    batch = played.a_batch(is_elastic=True, required_nodes=("dgx01", "dgx02"), excluded_nodes=("dgx07",))
    assert played.run(batch) == 0
    assert played.output == "", "nothing of the batch task's own share is left for the step to inherit"
    options, _ = options_of(played.calls("srun")[0])
    wanted = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--export=ALL", "--no-kill")
    assert {*options} == {*wanted, "--cpu-bind=none"}
    lines = [line for line in batch.text().splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        "#SBATCH --signal=B:USR1@30", "#SBATCH --open-mode=append", "#SBATCH --no-kill",
        "#SBATCH --nodelist=dgx01,dgx02", "#SBATCH --exclude=dgx07",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("srun", "code_text", "code", "requeued"),
    [
        (75, "", 75, True),
        (137, "75", 75, True),
        (75, "0", 0, False),
        (3, "", 3, False),
        (1, "x; touch canary", 1, False),
    ],
)
def test_the_leading_launchers_word_counts_not_the_highest_code(
    played: Played, srun: int, code_text: str, code: int, requeued: bool
) -> None:
    write_code = f"printf '%s' '{code_text}' > {played.place}/run/job/told/7.0/code\n" if code_text else ""
    played.play("srun", f"{STUB}{write_code}exit {srun}\n")
    assert played.run(played.a_batch()) == code
    assert played.calls("scontrol") == ([["requeue", "7"]] if requeued else [])


def test_a_person_who_wanted_the_end_gets_no_other_turn(played: Played) -> None:
    played.play("srun", f"{STUB}exit 75\n")
    batch = played.a_batch()
    (batch.run / "portal" / "cancelled").touch()
    assert played.run(batch) == 75
    assert played.calls("scontrol") == []


@pytest.mark.parametrize("word", ["TERM", "USR1"])
@pytest.mark.lengthy
def test_srun_gets_only_usr1_and_a_file_names_the_signal(played: Played, word: str) -> None:
    got = f"trap 'echo USR1 > {played.place}/got; exit 75' USR1\ntrap 'exit 9' TERM\n"
    played.play("srun", f"#!/bin/bash\n{got}touch {played.place}/up\nwhile :; do sleep 0.05; done\n")
    batch = played.a_batch()
    process = played.start(batch)
    until((played.place / "up").exists, "srun to start")
    process.send_signal(signal.Signals[f"SIG{word}"])
    path = batch.run / "job" / "told" / "7.0" / "asked"
    until(lambda: path.exists() and path.read_text() == f"{word}\n", "the file that names the signal")
    assert not (played.place / "got").exists(), "an srun of this moment may not have its handlers yet"

    def has_ended() -> bool:
        process.send_signal(signal.Signals[f"SIG{word}"])
        return process.poll() is not None

    until(has_ended, "the batch script to end")
    process.communicate()
    assert process.returncode == 75
    assert (played.place / "got").read_text() == "USR1\n"
    # TERM is scancel's: whom Slurm has cancelled a requeue would bring back.
    assert played.calls("scontrol") == ([["requeue", "7"]] if word == "USR1" else [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"python": "/nowhere/python"}, "/nowhere/python is not an interpreter on this node."),
        ({"modules": ("cuda/99",)}, "environment.modules: cuda/99 cannot be loaded"),
        ({"conda": "mine"}, "environment.conda: mine cannot be activated"),
    ],
)
def test_what_is_missing_is_reported_in_a_sentence(played: Played, fields: dict[str, object], message: str) -> None:
    played.play("module", "#!/bin/bash\nexit 1\n")
    played.play("conda", '#!/bin/bash\n[ "$1" != activate ]\n')
    assert played.run(played.a_batch(**fields)) == 2
    assert message in played.output
    assert message in (played.place / "run" / "job" / "told" / "7.0" / "failed").read_text(), "for the portal to show"
    assert played.calls("srun") == []


def test_what_modules_set_is_passed_on_by_name(played: Played) -> None:
    init = played.place / "modules" / "init"
    init.mkdir(parents=True)
    (init / "bash").write_text('module() { export OF_MODULE="$2" NCCL_X=1; }\n')
    (played.place / "bin" / "module").unlink()
    played.play("srun", STUB + 'printf "%s" "$VIGIL_PASS_ON"\n')
    script = played.a_batch(modules=("hpcx",))
    text = script.text().replace("/usr/share/modules", str(played.place / "modules"))
    path = played.place / "with-modules.sh"
    path.write_text(text)
    environment = {
        "PATH": f"{played.place / 'bin'}:/usr/bin:/bin",
        "CALLS": str(played.calls_folder),
        "SLURM_JOB_ID": "7",
    }
    environment |= {"SLURM_NNODES": "1"}
    done = subprocess.run(["/bin/bash", path], env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert {*done.stdout.split()} >= {"OF_MODULE", "NCCL_X"}, done.stderr


def test_a_python_that_may_not_be_run_is_a_permission(played: Played) -> None:
    place = played.place / "env" / "bin" / "python"
    place.parent.mkdir(parents=True)
    place.write_text("")
    place.chmod(0o644)
    (played.place / "link").symlink_to(place)
    batch = played.a_batch()
    for named in (place, played.place / "env", played.place / "link"):
        assert played.run(replace(batch, python=str(named))) == 2
        assert f"may not run {place}: it is -rw-r--r--, of " in played.output
        assert "no interpreter" not in played.output


@pytest.mark.skipif(os.geteuid() != 0, reason="root plays somebody else")
def test_a_folder_that_is_closed_on_the_way_is_named() -> None:
    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as folder:
        played = Played(Path(folder))
        place = played.place / "closed" / "env" / "bin" / "python"
        place.parent.mkdir(parents=True)
        place.write_text("")
        place.chmod(0o755)
        batch = played.a_batch(python=str(place))
        script = played.place / "batch.sh"
        script.write_text(batch.text())
        for path in (Path(folder), *Path(folder).rglob("*")):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        os.chown(played.place / "closed", 0, 0)
        (played.place / "closed").chmod(0o700)
        done = subprocess.run(
            ["/bin/bash", script], user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=[], cwd=played.place,
            env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}, capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    assert done.returncode == 2
    closed = played.place / "closed"
    assert f"nobody may not enter {closed}, so {place} cannot be run: it is drwx------, of root" in done.stderr
