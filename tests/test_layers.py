"""The structure holds: who may import whom, how long a file is, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tdnn

PACKAGE = Path(tdnn.__file__).parent

# From the bottom up. A file imports only from lines above its own; files on one line do not
# import each other. A new file gets its place here.
LAYERS = [
    "errors _keys _marks _registrations _transforms",
    "_node",
    "_lock _writes",
    "_declared",
    "_core",
    "_dims _plan",
    "_columns _claims _held",
    "_pytree _turn",
    "_exchange",
    "_overwrite",
    "_combine",
    "_operators",
    "_views _update _mapping _apply _copies _indexing _masks _pieces _shape _pointwise _reduce"
    " _lens _state _swap _repr",
    "_functions io.metadata",
    "io.safetensors",
    "io",
    "tensordict",
    "lazystack nn._faults nn._flow",
    "nn.dispatch nn.params",
    "nn.base",
    "nn.module",
    "nn.sequential nn.ensemble",
    "nn",
    "",
]
RANK = {
    f"tdnn.{name}".rstrip("."): rank
    for rank, line in enumerate(LAYERS)
    for name in (line.split() or [""])
}
LONGEST = 600  # lines; a file is about one subject

# What `import tdnn` may load that `import torch` has not loaded.
ALLOWED = {"html", "html.entities"}  # for escape(), 1.5 ms


def module_name(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def parsed(name):
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def imported(node):
    """Return the modules of tdnn that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        # `from tdnn import _pytree` names a file of the package, not the package.
        names = [
            full if (full := f"{base}.{alias.name}") in FILES else base for alias in node.names
        ]
    else:
        names = []
    return [name for name in names if name.split(".")[0] == "tdnn"]


def test_every_file_has_a_place_in_the_layers():
    lost = sorted(FILES.keys() - RANK.keys())
    assert not lost, f"add {lost} to LAYERS in tests/test_layers.py, below what imports them"


@pytest.mark.parametrize("name", sorted(FILES.keys() & RANK.keys()))
def test_a_file_imports_only_from_layers_below_it(name):
    wrong = sorted(
        {
            target
            for node in ast.walk(parsed(name))
            for target in imported(node)
            if RANK.get(target, len(LAYERS)) >= RANK[name]
        }
    )
    assert not wrong, f"{name} imports from its own layer or above: {wrong}"


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_stand_at_the_top_of_a_file_with_full_names(name):
    tree = parsed(name)
    imports = (ast.Import, ast.ImportFrom)
    top = {id(node) for node in tree.body if isinstance(node, imports)}
    late = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if (isinstance(node, imports) and (id(node) not in top or getattr(node, "level", 0)))
        or (isinstance(node, ast.Name) and node.id in {"__import__", "importlib"})
    ]
    assert not late, f"{name} has late or relative imports: {late}"


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_stays_short(name):
    count = len(FILES[name].read_text(encoding="utf-8").splitlines())
    assert count <= LONGEST, f"{name} has {count} lines: split it by subject"


def test_a_tree_is_made_of_plain_slotted_classes():
    assert type(tdnn.TensorDict) is type
    for kind in tdnn.TensorDict.__mro__[:-1]:
        assert "__slots__" in vars(kind), f"{kind.__name__} has no __slots__"
        assert "__getattr__" not in vars(kind)
        assert "__getattribute__" not in vars(kind)
    assert not hasattr(tdnn.TensorDict(), "__dict__")


def test_importing_tdnn_loads_nothing_else_that_is_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import tdnn; "
        "print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    more = {name for name in found if name.split(".")[0] != "tdnn"} - ALLOWED
    assert "tdnn.tensordict" in found
    assert not more, f"`import tdnn` also loads {sorted(more)}"
