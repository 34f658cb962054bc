from __future__ import annotations

import os
import shutil

import pytest

from tests.servers.install import MissingServer, find_or_install


def test_a_program_that_is_there_is_not_installed():
    assert find_or_install(lambda: "/bin/server", package="server", variable="X") == "/bin/server"


def test_without_the_right_to_install_the_command_to_type_is_given(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingServer, match=r"sudo apt-get install -y .* redis-server.*REDIS_URL"):
        find_or_install(lambda: None, package="redis-server", variable="REDIS_URL")


def test_without_apt_the_command_to_type_is_given(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(MissingServer, match="redis-server is not installed"):
        find_or_install(lambda: None, package="redis-server", variable="REDIS_URL")
