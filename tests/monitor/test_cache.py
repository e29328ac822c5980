"""The cache is where the user's environment says."""

from pathlib import Path

from monitor.cache import cache_folder


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LATENTWATCH_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("LATENTWATCH_CACHE", "~/mine")
    assert cache_folder() == Path.home() / "mine"
    monkeypatch.delenv("LATENTWATCH_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "latentwatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "latentwatch"
