"""The group ``containers`` of the list: reading, writing, copying and cutting trees.

Not here: what the list has for lazy stacks, shared memory and other devices.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.cases import case
from benchmarks.samples import (
    BOTTOM,
    SIZE,
    deep,
    flat,
    joined,
    leaf,
    leaves,
    mapped,
    reached,
    small,
    walk,
)
from benchmarks.timing import Prepared

FIRST, LAST = ("next", "x"), (*BOTTOM, "x")
INDEX = {"int": 1, "slice_int": (slice(0, 2), 1), "range": range(2), "tuple": (1, 2)}


def drained(fn: Any, *args: Any) -> Any:
    """Return a work that goes through all that ``fn(*args)`` yields."""
    return lambda: list(fn(*args))


# -- items, keys, values -------------------------------------------------------------------------


@case(plain=lambda: drained(flat().items))
def test_items(lib):
    return drained(lib.TensorDict(flat(), SIZE).items)


@case(plain=lambda: partial(walk, deep()))
def test_items_nested(lib):
    return drained(lib.TensorDict(deep(), SIZE).items, True)


@case(plain=lambda: partial(walk, deep()))
def test_items_nested_locked(lib):
    return drained(lib.TensorDict(deep(), SIZE).lock_().items, True)


@case(plain=lambda: partial(leaves, deep()))
def test_items_nested_leaf(lib):
    return drained(lib.TensorDict(deep(), SIZE).items, True, True)


@case(plain=lambda: drained(flat().keys))
def test_keys(lib):
    return drained(lib.TensorDict(flat(), SIZE).keys)


def all_keys(tree):
    return [path for path, _ in walk(tree)]


@case(plain=lambda: partial(all_keys, deep()))
def test_keys_nested(lib):
    return drained(lib.TensorDict(deep(), SIZE).keys, True)


@case(plain=lambda: partial(all_keys, deep()))
def test_keys_nested_locked(lib):
    return drained(lib.TensorDict(deep(), SIZE).lock_().keys, True)


def leaf_keys(tree):
    return [path for path, _ in leaves(tree)]


@case(plain=lambda: partial(leaf_keys, deep()))
def test_keys_nested_leaf(lib):
    return drained(lib.TensorDict(deep(), SIZE).keys, True, True)


@case(plain=lambda: drained(flat().values))
def test_values(lib):
    return drained(lib.TensorDict(flat(), SIZE).values)


def all_values(tree):
    return [value for _, value in walk(tree)]


@case(plain=lambda: partial(all_values, deep()))
def test_values_nested(lib):
    return drained(lib.TensorDict(deep(), SIZE).values, True)


@case(plain=lambda: partial(all_values, deep()))
def test_values_nested_locked(lib):
    return drained(lib.TensorDict(deep(), SIZE).lock_().values, True)


def leaf_values(tree):
    return [value for _, value in leaves(tree)]


@case(plain=lambda: partial(leaf_values, deep()))
def test_values_nested_leaf(lib):
    return drained(lib.TensorDict(deep(), SIZE).values, True, True)


# -- membership ----------------------------------------------------------------------------------


def held(tree, path):
    """Return whether a nested dict leads on along ``path``."""
    for key in path:
        if key not in tree:
            return False
        tree = tree[key]
    return True


@case(plain=lambda: partial(flat().__contains__, "a7"))
def test_membership(lib):
    td = lib.TensorDict(flat(), SIZE)
    return lambda: "a7" in td.keys()  # noqa: SIM118  # the view of the keys is what is timed


@case(plain=lambda: partial(held, deep(), FIRST))
def test_membership_nested(lib):
    td = lib.TensorDict(deep(), SIZE)
    return lambda: FIRST in td.keys(True)


@case(plain=lambda: partial(held, deep(), FIRST))
def test_membership_nested_leaf(lib):
    td = lib.TensorDict(deep(), SIZE)
    return lambda: FIRST in td.keys(True, True)


@case(plain=lambda: partial(held, deep(), LAST))
def test_membership_nested_last(lib):
    td = lib.TensorDict(deep(), SIZE)
    return lambda: LAST in td.keys(True)


@case(plain=lambda: partial(held, deep(), LAST))
def test_membership_nested_leaf_last(lib):
    td = lib.TensorDict(deep(), SIZE)
    return lambda: LAST in td.keys(True, True)


# -- reading -------------------------------------------------------------------------------------


@case(plain=lambda: partial(reached, deep(), LAST))
def test_nested_getleaf(lib):
    return partial(lib.TensorDict(deep(), SIZE).get, LAST)


@case(plain=lambda: partial(reached, deep(), BOTTOM))
def test_nested_get(lib):
    return partial(lib.TensorDict(deep(), SIZE).get, BOTTOM)


@case(plain=lambda: partial(reached, deep(), LAST))
def test_nested_getitemleaf(lib):
    td = lib.TensorDict(deep(), SIZE)
    return lambda: td[LAST]


@case(plain=lambda: partial(reached, deep(), BOTTOM))
def test_nested_getitem(lib):
    td = lib.TensorDict(deep(), SIZE)
    return lambda: td[BOTTOM]


# -- lock ----------------------------------------------------------------------------------------


@case()
def test_lock_nested(lib):
    td = lib.TensorDict(deep(), SIZE)
    return Prepared(td.unlock_, td.lock_)


@case()
def test_unlock_nested(lib):
    td = lib.TensorDict(deep(), SIZE)
    return Prepared(td.lock_, td.unlock_)


# -- flatten and unflatten -----------------------------------------------------------------------


def parted(names):
    tree: dict[str, Any] = {}
    for name, value in names.items():
        *way, last = name.split(".")
        node = tree
        for key in way:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


@case(plain=lambda: partial(joined, deep()))
def test_flatten_speed(lib):
    return partial(lib.TensorDict(deep(), SIZE).flatten_keys, ".")


@case(plain=lambda: partial(parted, joined(deep())))
def test_unflatten_speed(lib):
    return partial(lib.TensorDict(joined(deep()), SIZE).unflatten_keys, ".")


# -- making --------------------------------------------------------------------------------------


@case(plain=lambda: partial(dict, flat()))
def test_creation(lib):
    return partial(lib.TensorDict, flat(), SIZE)


@case(plain=lambda: partial(dict, {}))
def test_creation_empty(lib):
    return partial(lib.TensorDict, {}, SIZE)


def nested(levels: int) -> dict[str, Any]:
    return {"x": leaf(), "below": nested(levels - 1)} if levels else {"x": leaf()}


@case(plain=lambda: partial(mapped, lambda value: value, nested(1)))
def test_creation_nested_1(lib):
    return partial(lib.TensorDict, nested(1), SIZE)


@case(plain=lambda: partial(mapped, lambda value: value, nested(2)))
def test_creation_nested_2(lib):
    return partial(lib.TensorDict, nested(2), SIZE)


@case(plain=lambda: partial(mapped, torch.clone, small()))
def test_clone(lib):
    return lib.TensorDict(small(), SIZE).clone


def branches(tree):
    return {key: branches(value) for key, value in tree.items() if type(value) is dict}


def emptied(recurse):
    return partial(branches, deep()) if recurse else dict


@case(plain=emptied, each={"True": True, "False": False})
def test_empty(lib, recurse):
    return partial(lib.TensorDict(deep(), SIZE).empty, recurse=recurse)


def dict_ops():
    """Do by hand on dicts what ``test_common_ops`` does."""
    tree = small()
    tree["c"]["e"] = tree["a"]
    tree["b"].copy_(tree["c"]["d"])
    rows = [mapped(lambda value, row=row: value[row], tree) for row in range(SIZE[0])]
    one, two = (dict(leaves(row)) for row in rows[:2])
    pairs = {path: torch.stack([one[path], two[path]]) for path in one}
    more = {path: value + 1 for path, value in pairs.items()}
    return {path: value.reshape(-1, 2).clone() for path, value in more.items()}


@case(plain=lambda: dict_ops)
def test_common_ops(lib):
    def work():
        td = lib.TensorDict(small(), SIZE)
        td.set(("c", "e"), td.get("a"))
        td.set_("b", td["c", "d"])
        one, two, *_ = td.unbind(0)
        return (torch.stack([one, two]) + 1).reshape(-1).clone()

    return work


# -- indexing ------------------------------------------------------------------------------------


def cut(index: Any) -> Any:
    return partial(mapped, lambda value: value[index], small())


@case(plain=cut, each=INDEX | {"list": [0, 2]})
def test_getitem(lib, index):
    td = lib.TensorDict(small(), SIZE)
    return lambda: td[index]


def write(index: Any) -> Any:
    tree = small()
    pairs = [(value, value[index].clone()) for _, value in leaves(tree)]

    def work():
        for old, new in pairs:
            old[index] = new

    return work


@case(plain=write, each=INDEX)
def test_setitem_dim(lib, index):
    td = lib.TensorDict(small(), SIZE)
    new = td[index].clone()

    def work():
        td[index] = new

    return work


# -- writing -------------------------------------------------------------------------------------


def put(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    value = leaf()

    def work():
        reached(tree, path[:-1])[path[-1]] = value

    return work


def copy_into(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    value = leaf()
    return lambda: reached(tree, path).copy_(value)


@case(plain=lambda: put(deep(), LAST))
def test_plain_set_nested(lib):
    return partial(lib.TensorDict(deep(), SIZE).set, LAST, leaf())


@case(plain=lambda: copy_into(deep(), LAST))
def test_plain_set_nested_inplace(lib):
    return partial(lib.TensorDict(deep(), SIZE).set, LAST, leaf(), inplace=True)


@case(plain=lambda: put(small(), ("a",)))
def test_setitem(lib):
    td, value = lib.TensorDict(small(), SIZE), leaf()

    def work():
        td["a"] = value

    return work


@case(plain=lambda: put(small(), ("a",)))
def test_set(lib):
    return partial(lib.TensorDict(small(), SIZE).set, "a", leaf())


@case(plain=lambda: put(small(), ("c", "d")))
def test_set_nested(lib):
    return partial(lib.TensorDict(small(), SIZE).set, ("c", "d"), leaf())


def put_new():
    tree, value = small(), leaf()

    def work():
        tree.setdefault("e", {})["f"] = value

    return Prepared(lambda: tree.pop("e", None), work)


@case(plain=put_new)
def test_set_nested_new(lib):
    td = lib.TensorDict(small(), SIZE)
    return Prepared(lambda: td.pop("e", None), partial(td.set, ("e", "f"), leaf()))


@case(plain=lambda: partial(flat().update, flat()))
def test_update(lib):
    return partial(lib.TensorDict(flat(), SIZE).update, flat())


def merge(tree, source):
    for key, value in source.items():
        if type(value) is dict:
            merge(tree[key], value)
        else:
            tree[key] = value


@case(plain=lambda: partial(merge, small(), small()))
def test_update_nested(lib):
    return partial(lib.TensorDict(small(), SIZE).update, small())


@case(plain=lambda: partial(merge, small(), small()))
def test_update_tree(lib):
    return partial(lib.TensorDict(small(), SIZE).update, lib.TensorDict(small(), SIZE))


def copy_all(pairs):
    for old, new in pairs:
        old.copy_(new)


@case(plain=lambda: partial(copy_all, [(leaf(), leaf()) for _ in leaves(small())]))
def test_update__nested(lib):
    return partial(lib.TensorDict(small(), SIZE).update_, small())


# -- choosing ------------------------------------------------------------------------------------

CHOSEN = ("a0", "a3", "a6")


def keep(tree, keys):
    return {key: tree[key] for key in keys}


@case(plain=lambda: partial(keep, flat(), CHOSEN))
def test_select(lib):
    return partial(lib.TensorDict(flat(), SIZE).select, *CHOSEN)


def keep_two(tree):
    return {"next": {"x": reached(tree, FIRST)}, "y": tree["y"]}


@case(plain=lambda: partial(keep_two, deep()))
def test_select_nested(lib):
    return partial(lib.TensorDict(deep(), SIZE).select, FIRST, "y")


def leave_out(tree):
    below = {key: value for key, value in tree["next"].items() if key != "x"}
    return {"x": tree["x"], "next": below}


@case(plain=lambda: partial(leave_out, deep()))
def test_exclude_nested(lib):
    return partial(lib.TensorDict(deep(), SIZE).exclude, FIRST, "y")


# -- taking apart --------------------------------------------------------------------------------

LONG = (64, 2)


def pieces(tree, cut):
    """Return the trees of the pieces into which ``cut`` takes each leaf."""
    cuts = {path: cut(value) for path, value in leaves(tree)}
    return [
        {"a": a, "b": b, "c": {"d": d}}
        for a, b, d in zip(cuts["a",], cuts["b",], cuts["c", "d"], strict=True)
    ]


@case(plain=lambda: partial(pieces, small(*LONG), torch.unbind))
def test_unbind_speed(lib):
    return partial(lib.TensorDict(small(*LONG), LONG).unbind, 0)


@case(plain=lambda: partial(pieces, small(*LONG), lambda value: value.split(1)))
def test_split(lib):
    return partial(lib.TensorDict(small(*LONG), LONG).split, 1)


@case(plain=lambda: partial(pieces, small(*LONG), lambda value: value.chunk(64)))
def test_chunk(lib):
    return partial(lib.TensorDict(small(*LONG), LONG).chunk, 64)
