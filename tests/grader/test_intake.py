"""What is taken in from a submission, what is left out, and what is refused at the door."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from grader.intake import MAX_ENTRIES, MAX_MODULE_BYTES, Submission, find_entries, take_in
from labkit.manifest import Manifest

PARTS = {"part1.py": b"f = 1\n", "part2.py": b"g = 2\n"}
Take = Callable[[Path], Submission]


@pytest.fixture
def take(manifest: Manifest, tmp_path: Path) -> Take:
    """Takes an entry in; the copies lie in `tmp_path / "copy"`."""
    (tmp_path / "copy").mkdir()
    return lambda entry: take_in("ada", entry, manifest, tmp_path / "copy")


def copied(tmp_path: Path) -> dict[str, bytes]:
    """What was copied."""
    return {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}


def as_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """A folder of files."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def as_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    """A zip of files, named so that both packers can be used alike."""
    target = path.with_suffix(".zip")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target


def as_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    """A .tar.gz of files."""
    target = path.with_suffix(".tar.gz")
    with tarfile.open(target, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target


PACKERS = [as_folder, as_zip, as_tar]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("prefix", ["", "labs/98_made_up/", "my homework/", "workbook-main/labs/98_made_up/"])
def test_modules_are_found_where_students_put_them(
    take: Take, tmp_path: Path, pack: Callable[..., Path], prefix: str
) -> None:
    submission = take(pack(tmp_path / "entry", {prefix + name: content for name, content in PARTS.items()}))
    assert submission.refusal is None and submission.ignored == ()
    assert copied(tmp_path) == PARTS


@pytest.mark.parametrize("pack", PACKERS)
def test_only_the_files_of_the_manifest_are_copied_and_the_rest_is_named(
    take: Take, tmp_path: Path, pack: Callable[..., Path]
) -> None:
    strays = dict.fromkeys(("conftest.py", "sitecustomize.py", "torch.py", "notes.txt", "x.pth"), b"raise SystemExit")
    submission = take(pack(tmp_path / "entry", PARTS | strays))
    assert copied(tmp_path) == PARTS
    assert submission.ignored == tuple(sorted(strays))


def test_the_same_files_have_the_same_hash_however_they_were_packed(take: Take, tmp_path: Path) -> None:
    hashes = {take(pack(tmp_path / "entry", PARTS)).sha256 for pack in PACKERS}
    assert len(hashes) == 1 and hashes != {""}
    assert take(as_folder(tmp_path / "other", PARTS | {"part2.py": b"g = 3\n"})).sha256 not in hashes


@pytest.mark.parametrize("pack", PACKERS)
def test_a_missing_module_is_no_reason_to_refuse(take: Take, tmp_path: Path, pack: Callable[..., Path]) -> None:
    assert take(pack(tmp_path / "entry", {"part2.py": b"g = 2\n"})).refusal is None
    assert copied(tmp_path) == {"part2.py": b"g = 2\n"}


ESCAPES = ["../part1.py", "/etc/part1.py", "a/../../part1.py", "..\\part1.py", "C:/part1.py"]


@pytest.mark.parametrize("pack", [as_zip, as_tar])
@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_lead_out_of_the_folder_are_refused(
    take: Take, tmp_path: Path, pack: Callable[..., Path], name: str
) -> None:
    submission = take(pack(tmp_path / "entry", PARTS | {name: b"mine"}))
    assert submission.folder is None and "name" in (submission.refusal or "")
    assert copied(tmp_path) == {}


@pytest.mark.parametrize("pack", PACKERS)
def test_names_that_differ_in_case_only_are_refused(take: Take, tmp_path: Path, pack: Callable[..., Path]) -> None:
    assert "case" in (take(pack(tmp_path / "entry", PARTS | {"PART1.py": b"f = 2"})).refusal or "")


@pytest.mark.parametrize("pack", PACKERS)
def test_a_module_that_is_too_large_is_refused(take: Take, tmp_path: Path, pack: Callable[..., Path]) -> None:
    large = {"part1.py": os.urandom(MAX_MODULE_BYTES + 1)}
    assert "larger than" in (take(pack(tmp_path / "entry", large)).refusal or "")
    assert copied(tmp_path) == {}


@pytest.mark.parametrize("pack", [as_zip, as_tar])
@pytest.mark.parametrize("name", ["part1.py", "data.bin"])
def test_bombs_are_refused_while_they_unpack(
    take: Take, tmp_path: Path, pack: Callable[..., Path], name: str
) -> None:
    assert take(pack(tmp_path / "entry", {name: bytes(160 << 20)})).refusal
    assert copied(tmp_path) == {}


@pytest.mark.parametrize("pack", PACKERS)
def test_too_many_entries_are_refused(take: Take, tmp_path: Path, pack: Callable[..., Path]) -> None:
    many = {f"file{number}": b"" for number in range(MAX_ENTRIES)}
    assert "entries" in (take(pack(tmp_path / "entry", PARTS | many)).refusal or "")


def test_a_zip_that_lies_about_a_size_is_not_believed(take: Take, tmp_path: Path) -> None:
    path = as_zip(tmp_path / "entry", {"part1.py": bytes(3 << 20)})
    truth, lie = (3 << 20).to_bytes(4, "little"), (100).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(truth, lie))
    submission = take(path)
    assert submission.refusal or len(copied(tmp_path)["part1.py"]) <= 100


@pytest.mark.parametrize("inside", [None, "part1.py", "labs"])
def test_links_are_refused_wherever_they_stand(take: Take, tmp_path: Path, inside: str | None) -> None:
    secret = as_folder(tmp_path / "secret", PARTS)
    entry = tmp_path / "entry"
    if inside is None:
        entry.symlink_to(secret)
    else:
        entry.mkdir()
        (entry / inside).symlink_to(secret / "part1.py" if inside == "part1.py" else secret)
    assert take(entry).refusal
    assert copied(tmp_path) == {}


def test_links_and_devices_in_archives_are_refused(take: Take, tmp_path: Path) -> None:
    link = zipfile.ZipInfo("part1.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert "link" in (take(tmp_path / "link.zip").refusal or "")
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        with tarfile.open(tmp_path / "odd.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo("part1.py")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        assert "link or a device" in (take(tmp_path / "odd.tar.gz").refusal or "")


def test_a_pipe_does_not_make_the_grader_wait(take: Take, tmp_path: Path) -> None:
    entry = as_folder(tmp_path / "entry", {"part2.py": b""})
    os.mkfifo(entry / "part1.py")
    assert "regular file" in (take(entry).refusal or "")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ada.zip", b"I am no zip"),
        ("ada.zip", b""),
        ("ada.zip", b"PK\x05\x06" + bytes(18) + b"x"),
        ("ada.tar.gz", b"I am no tar"),
        ("ada.tar.gz", b"\x1f\x8b\x08\x00" + bytes(30)),
        ("ada.rar", b"Rar!"),
        ("ada", b"print()"),
    ],
)
def test_what_is_no_archive_is_refused_by_name(take: Take, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    submission = take(tmp_path / name)
    assert submission.refusal or copied(tmp_path) == {}
    assert submission.refusal is None or name in submission.refusal or "archive" in submission.refusal


def test_a_cut_off_archive_is_refused(take: Take, tmp_path: Path) -> None:
    for pack in (as_zip, as_tar):
        path = pack(tmp_path / "entry", {"part1.py": os.urandom(50_000)})
        path.write_bytes(path.read_bytes()[:20_000])
        assert take(path).refusal
        assert copied(tmp_path) == {}


def test_entries_keep_apart_and_have_printable_names(tmp_path: Path) -> None:
    folder = tmp_path / "submissions"
    for name in ("ada", ".hidden", "bad\x1b[31mname"):
        (folder / name).mkdir(parents=True)
    for name in ("ada.zip", "bob.tar.gz"):
        (folder / name).touch()
    names = list(find_entries(folder))
    assert sorted(names) == ["ada", "ada.zip", "bad[31mname", "bob"]


def test_names_that_become_equal_when_cleaned_hide_no_submission(tmp_path: Path) -> None:
    for name in (b"ada", b"ada\xff", b"a\x07da", b"\xff"):
        os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    entries = find_entries(tmp_path)
    assert sorted(entries) == ["ada", "ada (2)", "ada (3)", "unnamed"]
    assert len(set(entries.values())) == 4


def test_a_missing_or_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        find_entries(tmp_path / "nowhere")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match="void"):
        find_entries(tmp_path / "void")
