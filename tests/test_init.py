"""What the package says of itself."""

import inspect
import tomllib
from pathlib import Path

import tdnn
import tdnn.nn

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_version_is_that_of_the_project():
    assert tdnn.__version__ == tomllib.loads(PROJECT.read_text())["project"]["version"]


def test_every_name_that_is_exported_is_there():
    assert len(set(tdnn.__all__)) == len(tdnn.__all__)
    assert all(hasattr(tdnn, name) for name in tdnn.__all__)


PUBLIC = {
    f"{owner.__name__}.{name}": getattr(owner, name)
    for module in (tdnn, tdnn.nn)
    for owner in (module, *[x for x in vars(module).values() if isinstance(x, type)])
    for name in dir(owner)
    if not name.startswith("_") and inspect.isroutine(getattr(owner, name))
}


def shown(method):
    try:
        return str(inspect.signature(method))
    except ValueError:  # a method written in C has none
        return ""


def test_no_signature_shows_an_address():
    assert [name for name, method in PUBLIC.items() if " at 0x" in shown(method)] == []


def test_a_default_that_stands_for_no_value_says_so():
    assert "default: Any = <no default>" in shown(tdnn.TensorDict.pop)
    assert "device: Any = <as it is>" in shown(tdnn.TensorDict.apply)
