"""What the package says of itself."""

import tomllib
from pathlib import Path

import tdnn

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_version_is_that_of_the_project():
    assert tdnn.__version__ == tomllib.loads(PROJECT.read_text())["project"]["version"]


def test_every_name_that_is_exported_is_there():
    assert len(set(tdnn.__all__)) == len(tdnn.__all__)
    assert all(hasattr(tdnn, name) for name in tdnn.__all__)
