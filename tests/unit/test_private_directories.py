"""Caches whose files are loaded unchecked are of this user alone."""

import os
from pathlib import Path

import pytest

from swiftkv_platform.private_directories import ensure_private_directory, is_private

STRANGER = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_directory_is_made_for_this_user_alone_and_one_of_its_own_is_closed(tmp_path: Path) -> None:
    assert mode(ensure_private_directory(tmp_path / "a" / "new")) == 0o700
    old = tmp_path / "old"
    old.mkdir()
    old.chmod(0o777)
    (old / "kept").touch()
    assert mode(ensure_private_directory(old)) == 0o700
    assert (old / "kept").exists()
    (tmp_path / "link").symlink_to(old)
    assert ensure_private_directory(tmp_path / "link") == tmp_path / "link", "this user's own link"
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="exists"):
        ensure_private_directory(tmp_path / "file")


@as_root
def test_what_another_user_can_change_is_refused(tmp_path: Path) -> None:
    theirs, own, link = tmp_path / "theirs", tmp_path / "own", tmp_path / "link"
    theirs.mkdir()
    own.mkdir()
    os.chown(theirs, STRANGER, STRANGER)
    link.symlink_to(own)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    for path in (theirs, link):
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            ensure_private_directory(path)
        assert not is_private(path)


def test_a_file_is_private_unless_others_can_change_it(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    assert not is_private(file)
    file.touch(mode=0o600)
    link.symlink_to(file)
    assert is_private(file)
    assert not is_private(link)
    file.chmod(0o660)
    assert not is_private(file)
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, STRANGER, STRANGER)
        assert not is_private(file)
