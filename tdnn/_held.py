"""What a module held before a swap, as a tree."""

from typing import Any, TypeAlias, cast

from torch import nn

from tdnn._core import TensorDictBase
from tdnn._keys import Path
from tdnn._plan import Plan, Slots

__all__ = ["held_tree", "nested"]

Pair: TypeAlias = tuple[int, int]  # the ids of a dict of the tree and of one of the module


def held_tree(
    plan: Plan, values: list[Any], tree: TensorDictBase, root: nn.Module
) -> TensorDictBase:
    """Return ``values``, one for each slot of a plan, under their names; None gets no entry."""
    # Hot (test_exec_td): one pass, if tree and module still belong together as they did.
    by_pair: dict[Pair, Slots] = {}
    for home, slots, key, value in zip(plan.homes, plan.targets, plan.keys, values, strict=True):
        if value is not None:
            by_pair.setdefault((id(home), id(slots)), {})[key] = value
    met: set[Pair] = set()
    mirror = _mirrored(tree, root, by_pair, met, tree._plain_kind())
    if len(met) == len(by_pair):
        return mirror
    pairs = zip(plan.paths(tree, root), values, strict=True)
    return nested(tree, [(path, value) for path, value in pairs if value is not None])


def _mirrored(
    node: TensorDictBase,
    module: nn.Module,
    values: dict[Pair, Slots],
    met: set[Pair],
    empty: TensorDictBase,
) -> TensorDictBase:
    """Return a tree with the branches of another one, and the values that belong there.

    ``met`` gets those that were found.
    """
    data: Slots = {}
    for home in node._dicts():
        for slots in (module._parameters, module._buffers):
            pair = (id(home), id(slots))
            if pair in values:
                met.add(pair)
                data.update(values[pair])
    for key, value in node._data.items():
        child = module._modules.get(key)
        if child is not None and isinstance(value, TensorDictBase):
            below = _mirrored(value, child, values, met, empty)
            if below._data:
                data[key] = below
    return empty._like(data, empty._batch_size)


def nested(like: TensorDictBase, entries: list[tuple[Path, Any]]) -> TensorDictBase:
    """Return a plain tree of entries given by path."""
    return cast(TensorDictBase, like._plain_kind(dict(entries)))
