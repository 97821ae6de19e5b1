"""`make update` in real git repositories: news arrive, and nothing that a student wrote is ever lost."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from grader.authoring import commands
from grader.authoring.stub_update import Outcome
from grader.authoring.stubs import is_untouched, mark_of, write_stubs
from grader.authoring.update import BACKUPS, UpdateRefused, apply_update, plan_update
from labkit.manifest import load_manifest
from tests.small_workbook import BOXES, NUMBERS, write_lab

NUMBERS_FILE, BOXES_FILE = "labs/98_halves/numbers.py", "labs/98_halves/boxes.py"
WRITTEN = "    return number // 2  # mine\n"
NEW_NUMBERS = NUMBERS.replace("Twice a number, which is given.", "Two times a number, which is given.")


def git(folder: Path, *arguments: str, given: str | None = None) -> str:
    """Runs git as somebody whose settings do not matter."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{
            f"GIT_{who}_{what}": value
            for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", "t"), ("EMAIL", "t@t"))
        },
    }
    run = subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, input=given, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def publish(course: Path, numbers: str = NUMBERS, boxes: str = BOXES) -> None:
    """A new version of the course: reference, stubs, and whatever else lies there."""
    write_lab(course, numbers, boxes)
    commit_all(course)


def commit_all(course: Path) -> None:
    """Writes the stubs anew and commits everything."""
    load_manifest.cache_clear()
    write_stubs(load_manifest("98", course), force=True)
    git(course, "add", "-A")
    git(course, "commit", "-q", "-m", "news")


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """The course's own repository, with a first version."""
    folder = tmp_path / "course"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / ".gitignore").write_text(f"{BACKUPS}/\n")
    (folder / "README.md").write_text("one\n")
    (folder / "old.txt").write_text("old\n")
    (folder / "course.toml").write_text("seed = 1\n")
    publish(folder)
    return folder


@pytest.fixture
def student(course: Path, tmp_path: Path) -> Path:
    """A student's clone of it."""
    git(tmp_path, "clone", "-q", str(course), "student")
    return tmp_path / "student"


def write_numbers(student: Path) -> str:
    """The student does task 1; the text of their file."""
    path = student / NUMBERS_FILE
    lines = path.read_text().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if "raise NotImplementedError" in line)
    last = next(n for n in range(first, len(lines)) if lines[n] == "    )\n")
    lines[first : last + 1] = [WRITTEN]
    path.write_text("".join(lines))
    return path.read_text()


def update(student: Path) -> dict[str, Outcome]:
    """Updates a student's workbook; what became of each file."""
    plan = plan_update(student)
    apply_update(student, plan)
    return {change.path: change.outcome for change in plan.stubs}


def copies(student: Path) -> list[Path]:
    """Files that were copied before they were replaced."""
    return [path for path in (student / BACKUPS).rglob("*") if path.is_file()]


def test_an_untouched_stub_becomes_the_new_one(course: Path, student: Path) -> None:
    publish(course, NEW_NUMBERS)
    assert update(student) == {NUMBERS_FILE: Outcome.RENEWED, BOXES_FILE: Outcome.CURRENT}
    assert (student / NUMBERS_FILE).read_text() == (course / NUMBERS_FILE).read_text()
    assert copies(student) == []


@pytest.mark.parametrize("committed", [False, True])
def test_an_edited_stub_is_merged_and_copied_first(course: Path, student: Path, committed: bool) -> None:
    mine = write_numbers(student)
    if committed:
        git(student, "commit", "-q", "-a", "-m", "my work")
    publish(course, NEW_NUMBERS)
    assert update(student)[NUMBERS_FILE] is Outcome.MERGED
    merged = (student / NUMBERS_FILE).read_text()
    assert WRITTEN in merged and "Two times a number" in merged and "NotImplementedError:" not in merged
    assert mark_of(merged) == mark_of((course / NUMBERS_FILE).read_text()) and not is_untouched(merged)
    (copy,) = copies(student)
    assert copy.read_text() == mine and copy.parts[-3:] == tuple(NUMBERS_FILE.split("/"))


def test_a_second_update_changes_nothing(course: Path, student: Path) -> None:
    write_numbers(student)
    publish(course, NEW_NUMBERS)
    update(student)
    before = snapshot(student)
    assert set(update(student).values()) == {Outcome.CURRENT}
    assert snapshot(student) == before
    publish(course, NEW_NUMBERS.replace("Halves.", "All about halves."))
    assert update(student)[NUMBERS_FILE] is Outcome.MERGED, "the second version is merged on top of the first"
    text = (student / NUMBERS_FILE).read_text()
    assert WRITTEN in text and "Two times" in text and "All about halves." in text


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file of a work tree."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def test_new_words_in_a_placeholder_do_not_clash_with_code(course: Path, student: Path) -> None:
    write_numbers(student)
    manifest = course / "labs" / "98_halves" / "lab.toml"
    write_lab(course, NEW_NUMBERS)
    manifest.write_text(manifest.read_text().replace("Halve what is given.", "Halve it, and round down."))
    commit_all(course)
    assert update(student)[NUMBERS_FILE] is Outcome.MERGED
    text = (student / NUMBERS_FILE).read_text()
    assert WRITTEN in text and "Halve it" not in text and "Two times" in text


def test_where_both_sides_changed_a_line_both_are_shown(course: Path, student: Path) -> None:
    write_numbers(student)
    path = student / NUMBERS_FILE
    mine = path.read_text().replace("Twice a number, which is given.", "Twice, says Ada.")
    path.write_text(mine)
    publish(course, NEW_NUMBERS)
    assert update(student)[NUMBERS_FILE] is Outcome.CONFLICT
    text = path.read_text()
    for shown in ("<<<<<<< your file", "Twice, says Ada.", "Two times a number", ">>>>>>> the new stub", WRITTEN):
        assert shown in text
    (copy,) = copies(student)
    assert copy.read_text() == mine

    publish(course, NEW_NUMBERS.replace("Halves.", "All about halves."))
    assert update(student)[NUMBERS_FILE] is Outcome.KEPT, "a conflict is not merged on top of another"
    assert path.read_text() == text
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(("<<<<<<<", "=======", ">>>>>>>"))]
    path.write_text("".join(line for line in kept if "Two times" not in line))
    assert update(student)[NUMBERS_FILE] is Outcome.MERGED


def test_a_deleted_file_comes_back_and_a_new_module_arrives(course: Path, student: Path) -> None:
    (student / NUMBERS_FILE).unlink()
    folder = course / "labs" / "98_halves"
    write_lab(course)
    (course / "solutions" / "halves" / "quarters.py").write_text(NUMBERS.replace("half", "quarter"))
    manifest = (folder / "lab.toml").read_text()
    manifest = manifest.replace('["numbers", "boxes"]', '["numbers", "boxes", "quarters"]')
    (folder / "lab.toml").write_text(manifest.replace('modules = ["boxes"]', 'modules = ["boxes", "quarters"]'))
    commit_all(course)
    outcomes = update(student)
    assert outcomes == {
        NUMBERS_FILE: Outcome.NEW,
        BOXES_FILE: Outcome.CURRENT,
        "labs/98_halves/quarters.py": Outcome.NEW,
    }
    for path in outcomes:
        assert (student / path).read_text() == (course / path).read_text()
    assert (student / "labs/98_halves/lab.toml").read_text() == (folder / "lab.toml").read_text()


def test_other_files_are_renewed_unless_the_student_changed_them(course: Path, student: Path) -> None:
    (student / "course.toml").write_text("seed = 2\n")
    (student / "README.md").write_text("mine\n")
    (student / "added.txt").write_text("in the way\n")
    (student / "own.txt").write_text("mine\n")
    (student / "folder").write_text("a file where the course has a folder\n")
    (course / "README.md").write_text("two\n")
    (course / "added.txt").write_text("added\n")
    (course / "fresh.sh").write_text("fresh\n")
    (course / "fresh.sh").chmod(0o755)
    (course / "folder").mkdir()
    (course / "folder" / "file").write_text("deep\n")
    (course / "old.txt").unlink()
    publish(course, NEW_NUMBERS)
    plan = plan_update(student)
    apply_update(student, plan)
    assert sorted(plan.kept) == ["README.md", "added.txt", "folder/file"], "course.toml has not changed in the course"
    texts = {
        name: (student / name).read_text() for name in ("README.md", "added.txt", "own.txt", "fresh.sh", "course.toml")
    }
    assert texts == {
        "README.md": "mine\n", "added.txt": "in the way\n", "own.txt": "mine\n", "fresh.sh": "fresh\n",
        "course.toml": "seed = 2\n",
    }  # fmt: skip
    assert os.access(student / "fresh.sh", os.X_OK)
    assert not (student / "old.txt").exists()
    assert (student / "solutions/halves/numbers.py").read_text() == NEW_NUMBERS
    (course / "README.md").write_text("three\n")
    (course / "fresh.sh").write_text("fresher\n")
    publish(course, NEW_NUMBERS)
    update(student)
    assert (student / "fresh.sh").read_text() == "fresher\n", "what an update wrote counts as the course's"


def test_a_changed_file_that_the_course_deletes_stays(course: Path, student: Path) -> None:
    (student / "old.txt").write_text("mine now\n")
    (course / "old.txt").unlink()
    publish(course, NEW_NUMBERS)
    update(student)
    assert (student / "old.txt").read_text() == "mine now\n"


def test_no_path_leads_out_of_the_workbook_or_into_git(course: Path, student: Path, tmp_path: Path) -> None:
    blob = git(course, "rev-parse", "HEAD:old.txt")
    inner = git(course, "mktree", given=f"100644 blob {blob}\tplanted\n")
    names = ("..", ".git", ".GIT")
    listed = git(course, "ls-tree", "HEAD") + "".join(f"\n040000 tree {inner}\t{name}" for name in names)
    tree = git(course, "mktree", given=f"{listed}\n100644 blob {blob}\tnew.txt\n")
    commit = git(course, "commit-tree", "-p", "HEAD", "-m", "planted", tree)
    git(course, "update-ref", "refs/heads/main", commit)
    plan = plan_update(student)
    apply_update(student, plan)
    assert set(plan.written) == {"new.txt"} and (student / "new.txt").is_file()
    assert not list(tmp_path.rglob("planted"))


def test_branch_and_index_stay_as_they_are(course: Path, student: Path) -> None:
    write_numbers(student)
    git(student, "add", NUMBERS_FILE)
    before = git(student, "rev-parse", "HEAD"), git(student, "diff", "--cached")
    publish(course, NEW_NUMBERS)
    update(student)
    assert (git(student, "rev-parse", "HEAD"), git(student, "diff", "--cached")) == before


def test_without_a_remote_the_reference_here_is_the_source(course: Path, student: Path) -> None:
    git(student, "remote", "remove", "origin")
    mine = write_numbers(student)
    assert update(student) == {NUMBERS_FILE: Outcome.CURRENT, BOXES_FILE: Outcome.CURRENT}
    assert (student / NUMBERS_FILE).read_text() == mine
    write_lab(student, NEW_NUMBERS, BOXES.replace("A box.", "The box."))
    plan = plan_update(student)
    assert "no remote" in plan.source and plan.revision is None
    apply_update(student, plan)
    assert [change.outcome for change in plan.stubs] == [Outcome.MERGED, Outcome.RENEWED]
    text = (student / NUMBERS_FILE).read_text()
    assert WRITTEN in text and "Two times" in text


def test_without_remote_and_reference_nothing_happens_and_that_is_said(student: Path) -> None:
    git(student, "remote", "remove", "origin")
    shutil.rmtree(student / "solutions")
    before = snapshot(student)
    plan = plan_update(student)
    apply_update(student, plan)
    assert "holds no reference" in plan.source and NUMBERS_FILE in plan.source
    assert snapshot(student) == before


def test_without_git_edited_files_stay_and_untouched_ones_are_renewed(course: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    shutil.copytree(course, folder, ignore=shutil.ignore_patterns(".git"))
    mine = write_numbers(folder)
    write_lab(folder, NEW_NUMBERS, BOXES.replace("A box.", "The box."))
    plan = plan_update(folder)
    apply_update(folder, plan)
    assert [change.outcome for change in plan.stubs] == [Outcome.KEPT, Outcome.RENEWED]
    assert "no history" in plan.stubs[0].note and (folder / NUMBERS_FILE).read_text() == mine


def test_a_remote_out_of_reach_is_said_and_what_was_fetched_is_used(
    course: Path, student: Path, tmp_path: Path
) -> None:
    write_numbers(student)
    publish(course, NEW_NUMBERS)
    git(student, "fetch", "-q")
    course.rename(tmp_path / "moved")
    plan = plan_update(student)
    assert "could not be fetched" in plan.source and "origin/main" in plan.source
    apply_update(student, plan)
    assert {change.path: change.outcome for change in plan.stubs}[NUMBERS_FILE] is Outcome.MERGED
    assert WRITTEN in (student / NUMBERS_FILE).read_text()


def test_a_fork_takes_its_news_from_upstream(course: Path, student: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(course), "fork.git")
    git(student, "remote", "set-url", "origin", str(tmp_path / "fork.git"))
    write_numbers(student)
    git(student, "commit", "-q", "-a", "-m", "my work")
    git(student, "push", "-q")
    publish(course, NEW_NUMBERS)
    assert set(update(student).values()) == {Outcome.CURRENT}, "the fork has nothing new"
    git(student, "remote", "add", "upstream", str(course))
    assert update(student)[NUMBERS_FILE] is Outcome.MERGED


def test_somebodys_work_is_never_taken_for_a_stub(course: Path, student: Path) -> None:
    write_numbers(course)
    git(course, "commit", "-q", "-a", "-m", "a solved task by mistake")
    before = (student / NUMBERS_FILE).read_text()
    plan = plan_update(student)
    apply_update(student, plan)
    changes = {change.path: change for change in plan.stubs}
    assert changes[NUMBERS_FILE].outcome is Outcome.KEPT and "no stub" in changes[NUMBERS_FILE].note
    assert (student / NUMBERS_FILE).read_text() == before


def without_header(text: str) -> str:
    """A file whose author took the first lines out."""
    return text[text.index('"""') :]


def of_another_stub(text: str) -> str:
    """A file that says it began as a stub which never was."""
    digest = mark_of(text)
    assert digest is not None
    return text.replace(digest, "0" * 16)


@pytest.mark.parametrize(("spoil", "note"), [(without_header, "header is gone"), (of_another_stub, "no commit has it")])
def test_a_file_of_unknown_origin_stays(course: Path, student: Path, spoil: Callable[[str], str], note: str) -> None:
    mine = spoil(write_numbers(student))
    (student / NUMBERS_FILE).write_text(mine)
    publish(course, NEW_NUMBERS)
    plan = plan_update(student)
    apply_update(student, plan)
    change = next(change for change in plan.stubs if change.path == NUMBERS_FILE)
    assert change.outcome is Outcome.KEPT and note in change.note
    assert (student / NUMBERS_FILE).read_text() == mine


def test_what_is_no_text_stays(course: Path, student: Path) -> None:
    write_numbers(student)
    for content in (b"# \xff\n", None):
        if content is None:
            (student / NUMBERS_FILE).unlink()
            (student / NUMBERS_FILE).symlink_to(student / BOXES_FILE)
        else:
            (student / NUMBERS_FILE).write_bytes(content)
        publish(course, NEW_NUMBERS.replace("Halves.", f"Halves {content!r}."))
        assert update(student)[NUMBERS_FILE] is Outcome.KEPT
    assert (student / NUMBERS_FILE).is_symlink()


def test_line_ends_stay_as_the_editor_writes_them(course: Path, student: Path) -> None:
    path = student / NUMBERS_FILE
    path.write_bytes(write_numbers(student).replace("\n", "\r\n").encode())
    publish(course, NEW_NUMBERS)
    assert update(student)[NUMBERS_FILE] is Outcome.MERGED
    content = path.read_bytes()
    assert content.count(b"\r\n") == content.count(b"\n") > 10 and b"Two times" in content


def test_an_unfinished_merge_is_refused(course: Path, student: Path) -> None:
    write_numbers(student)
    publish(course, NEW_NUMBERS)
    plan_update(student)
    (student / ".git" / "MERGE_HEAD").write_text(git(student, "rev-parse", "HEAD"))
    before = snapshot(student)
    with pytest.raises(UpdateRefused, match="MERGE_HEAD"):
        plan_update(student)
    assert snapshot(student) == before


def test_a_shallow_checkout_is_told_how_to_get_the_rest(course: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", course.as_uri(), "student")
    student = tmp_path / "student"
    write_numbers(student)
    git(student, "checkout", "-q", "--orphan", "own")
    git(student, "branch", "-D", "main")
    for title in ("Halves.", "All halves."):
        publish(course, NEW_NUMBERS.replace("Halves.", title))
    git(student, "fetch", "-q", "--depth=1")
    plan = plan_update(student, fetch=False)
    change = next(change for change in plan.stubs if change.path == NUMBERS_FILE)
    assert change.outcome is Outcome.KEPT and "--unshallow" in change.note


def test_a_workbook_in_a_folder_of_a_larger_repository(tmp_path: Path) -> None:
    big = tmp_path / "big"
    (big / "course").mkdir(parents=True)
    git(big, "init", "-q", "-b", "main")
    (big / "other.txt").write_text("not the workbook's\n")
    (big / "course" / "README.md").write_text("one\n")
    publish(big / "course")
    git(tmp_path, "clone", "-q", str(big), "mine")
    mine = tmp_path / "mine" / "course"
    write_numbers(mine)
    (big / "other.txt").write_text("changed\n")
    (big / "course" / "README.md").write_text("two\n")
    git(big, "add", "-A")
    publish(big / "course", NEW_NUMBERS)
    assert update(mine)[NUMBERS_FILE] is Outcome.MERGED
    assert (mine / "README.md").read_text() == "two\n"
    assert (tmp_path / "mine" / "other.txt").read_text() == "not the workbook's\n"


def test_copies_never_replace_each_other(course: Path, student: Path) -> None:
    now = datetime(2027, 1, 2, 3, 4, 5)
    write_numbers(student)
    texts = []
    for title in ("First.", "Second.", "Third."):
        publish(course, NEW_NUMBERS.replace("Halves.", title))
        texts.append((student / NUMBERS_FILE).read_text())
        folder = apply_update(student, plan_update(student), now)
        assert folder is not None and folder.name.startswith("2027-01-02-030405")
    assert sorted(copy.read_text() for copy in copies(student)) == sorted(texts)


def test_the_command_says_what_it_does(course: Path, student: Path) -> None:
    app = typer.Typer()
    commands.register(app)

    def run(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["update", "--root", str(student), *options])
        return result.exit_code, result.output

    write_numbers(student)
    path = student / NUMBERS_FILE
    path.write_text(path.read_text().replace("Twice a number", "Twice a [b]number[/b]"))
    publish(course, NEW_NUMBERS)
    before = snapshot(student)
    code, said = run("--check")
    assert code == 1 and "merged with conflicts: 1 place" in said and "look ahead" in said
    assert snapshot(student) == before
    code, said = run()
    assert code == 1 and "origin/main" in said and "<<<<<<<" in said and BACKUPS in said
    code, said = run()
    assert code == 0 and "2 of 2 files of yours were up to date" in said
    (student / ".git" / "MERGE_HEAD").write_text("x")
    code, said = run()
    assert code == 2 and "not updated" in said and "Traceback" not in said
