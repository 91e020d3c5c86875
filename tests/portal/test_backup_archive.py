"""Test reading a backup's archive that is damaged, truncated or made by a stranger."""

import gzip
import json
import tarfile
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from portal.backup import archive
from portal.run.preflight import StartRefused
from tests.archives import packed, unpacked


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with a key and a database that neither compresses well nor badly."""
    folder = tmp_path_factory.mktemp("members")
    (folder / "secret_key").write_text("a key")
    (folder / "database.sqlite3").write_bytes(b"".join(bytes(200) + str(n**5).encode() for n in range(3000)))
    members = [archive.describe(folder / name, quiet) for name in ("secret_key", "database.sqlite3")]
    manifest = archive.BackupManifest(
        format=1, vigil="0.1.0", made_at=datetime(2026, 1, 31, 12, tzinfo=UTC), database="sqlite",
        database_version="3.40.1", dump_version=0, migrations={"jobs": ["0001_initial"]}, runs="/runs", members=members,
    )  # fmt: skip
    with (folder / "vigil.tar.gz").open("wb") as file:
        archive.write(file, manifest, folder, quiet)
    return folder / "vigil.tar.gz"


def quiet(done: int, total: int) -> None:
    pass


def unpack(path: Path, folder: Path) -> archive.BackupManifest:
    folder.mkdir()
    with archive.open_archive(path) as reader:
        reader.unpack(folder, quiet)
        return reader.manifest


def test_archive_that_is_cut_short_anywhere_is_refused(made: Path, tmp_path: Path) -> None:
    whole = made.read_bytes()
    unpack(made, tmp_path / "whole")
    for number, end in enumerate([0, 1, 10, 100, 400, *range(1000, len(whole), 1500), len(whole) - 9, len(whole) - 1]):
        cut = tmp_path / "cut"
        cut.write_bytes(whole[:end])
        with pytest.raises(StartRefused, match=r"damaged or truncated|not a Vigil backup"):
            unpack(cut, tmp_path / str(number))


def test_flipped_bit_is_noticed_or_makes_no_difference(made: Path, tmp_path: Path) -> None:
    whole, noticed = made.read_bytes(), 0
    members = {name: data for name, data in unpacked(made).items() if name != "manifest.json"}
    for at in range(12, len(whole), 350):
        flipped, folder = tmp_path / "flipped", tmp_path / str(at)
        flipped.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        try:
            unpack(flipped, folder)
        except StartRefused:
            noticed += 1
        else:  # in a run of zeros, for example, which can be compressed in several ways
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == members
    assert noticed > 10


def hostile_member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "member",
    [
        hostile_member("../../secret_key"),
        hostile_member("/etc/passwd"),
        hostile_member("secret_key", tarfile.SYMTYPE, "/etc/passwd"),
        hostile_member("secret_key", tarfile.LNKTYPE, "manifest.json"),
        hostile_member("secret_key", tarfile.FIFOTYPE),
        hostile_member("secret_key", tarfile.CHRTYPE),
        hostile_member("secret_key", tarfile.DIRTYPE),
        hostile_member("secret_key", tarfile.XHDTYPE, size=1 << 40),
        hostile_member("secret_key", tarfile.GNUTYPE_SPARSE),
        hostile_member("secret_key", size=1 << 40),
        b"\xff" * 512,
        bytes(512),
    ],
)
def test_hostile_member_is_refused(made: Path, tmp_path: Path, member: bytes) -> None:
    text = unpacked(made)["manifest.json"]
    begin = hostile_member("manifest.json", size=len(text)) + text + bytes(-len(text) % 512)
    for number, data in enumerate((member + bytes(4096), begin + member + bytes(4096))):
        path = tmp_path / f"{number}.tar.gz"
        path.write_bytes(gzip.compress(data))
        with pytest.raises(StartRefused, match="not a Vigil backup") as refused:
            unpack(path, tmp_path / str(number))
        assert len(str(refused.value).splitlines()) == 1
        assert not list((tmp_path / str(number)).iterdir())


@pytest.mark.parametrize(
    "members",
    [
        [],
        [{"name": "../x", "bytes": 1, "sha256": ""}],
        [{"name": "secret_key", "bytes": 1, "sha256": ""}] * 2,
        [{"name": "secret_key", "bytes": -1, "sha256": ""}, {"name": "database.sqlite3", "bytes": 1, "sha256": ""}],
        "all",
    ],
)
def test_manifest_that_lists_other_members_is_refused(made: Path, tmp_path: Path, members: object) -> None:
    found = unpacked(made)
    found["manifest.json"] = json.dumps({**json.loads(found["manifest.json"]), "members": members}).encode()
    with pytest.raises(StartRefused, match="not a Vigil backup"):
        unpack(packed(tmp_path / "a", found), tmp_path / "into")


@pytest.mark.parametrize(
    "wrong",
    [
        {"vigil": "1" * 5000},
        {"vigil": "0.1\x1b[2J"},
        {"vigil": ""},
        {"made_at": "yesterday"},
        {"made_at": "2026-01-31T12:00:00"},
        {"made_at": 0},
    ],
)
def test_manifest_with_invalid_fields_is_refused(made: Path, tmp_path: Path, wrong: dict[str, object]) -> None:
    found = unpacked(made)
    found["manifest.json"] = json.dumps({**json.loads(found["manifest.json"]), **wrong}).encode()
    with pytest.raises(StartRefused, match="its manifest is invalid"):
        unpack(packed(tmp_path / "a", found), tmp_path / "into")


@pytest.mark.parametrize("key", [b"", b" \n", b"\xff\xfe", bytes(2 << 20)])
def test_key_that_no_portal_starts_with_is_refused(made: Path, tmp_path: Path, key: bytes) -> None:
    found = unpacked(made)
    manifest = json.loads(found["manifest.json"])
    manifest["members"][0] |= {"bytes": len(key), "sha256": sha256(key).hexdigest()}
    found |= {"manifest.json": json.dumps(manifest).encode(), "secret_key": key}
    with pytest.raises(StartRefused, match="its key is invalid"):
        unpack(packed(tmp_path / "a", found), tmp_path / "into")


def test_more_than_the_manifest_lists_is_refused(made: Path, tmp_path: Path) -> None:
    path = packed(tmp_path / "a", {**unpacked(made), "more": b"x"})
    with pytest.raises(StartRefused, match="contains more than"):
        unpack(path, tmp_path / "into")


def test_more_than_the_disk_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="free some space there"):
        archive.require_space(1 << 60, tmp_path)


def test_what_was_put_in_comes_out_and_tar_reads_it_too(made: Path, tmp_path: Path) -> None:
    manifest = unpack(made, tmp_path / "into")
    members = unpacked(made)
    assert list(members) == ["manifest.json", "secret_key", "database.sqlite3"]
    for member in manifest.members:
        assert (tmp_path / "into" / member.name).read_bytes() == members[member.name]
        assert (tmp_path / "into" / member.name).stat().st_mode & 0o777 == 0o600
