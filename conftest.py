"""What every test and every doctest finds: a fixed seed, and the names that examples use."""

from typing import Any

import pytest
import torch

import tdnn
import tdnn.nn


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Begin each test, and each module's examples, with the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _examples(
    request: pytest.FixtureRequest,
    doctest_namespace: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Give examples the public names, and a directory of their own to write files in."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    doctest_namespace.update(torch=torch, nn=torch.nn)
    for package in (tdnn, tdnn.nn):
        names = getattr(package, "__all__", ())
        doctest_namespace.update({name: getattr(package, name) for name in names})
    monkeypatch.chdir(request.getfixturevalue("tmp_path"))
