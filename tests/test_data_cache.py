"""The cache: where it lies, that files are whole or absent, and that damage and full disks lose nothing but time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from locant.data import cache
from locant.data.cache import cache_dir, load_cached, store_cached


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_noticed", set())


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", "/some/where")
    assert cache_dir() == Path("/some/where")
    monkeypatch.delenv("LOCANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/locant")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == Path("/home/somebody/.cache/locant")


def test_what_was_stored_comes_back_and_nothing_else_lies_there():
    payload = bytes(range(256)) + b"\n\n"
    assert load_cached("a.bin") is None
    assert store_cached("a.bin", payload) is True
    assert load_cached("a.bin") == payload
    assert os.listdir(cache_dir()) == ["a.bin"]


@pytest.mark.parametrize(
    "damage",
    [lambda d: d[:-1], lambda d: d[:90] + b"x" + d[91:], lambda d: b"", lambda d: d + b"x", lambda d: b"x" + d],
)
def test_a_damaged_file_counts_as_absent(damage):
    store_cached("a.bin", b"payload " * 20)
    path = cache_dir() / "a.bin"
    path.write_bytes(damage(path.read_bytes()))
    assert load_cached("a.bin") is None


def test_a_folder_that_cannot_be_made_gives_one_notice(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"file/cache cannot be written \(Not a directory\).*set LOCANT_CACHE"):
        assert store_cached("a.bin", b"x") is False
    assert store_cached("a.bin", b"x") is False  # a second warning would be an error here
    assert load_cached("a.bin") is None


def test_a_full_disk_leaves_the_old_file_and_no_rest(monkeypatch):
    store_cached("a.bin", b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert store_cached("a.bin", b"new") is False
    assert load_cached("a.bin") == b"old"
    assert os.listdir(cache_dir()) == ["a.bin"]
