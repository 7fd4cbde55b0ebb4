"""Random edits through random nestings of views do what they do to a dict of paths."""

import contextlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdnn import TensorDict, TensorDictBase
from tdnn.errors import KeyConflictError, MissingKeyError

EMPTY = "an empty branch"
KEYS = st.sampled_from(["a", "b", "c", "a.b", "b.c", "a_b", "c.", "_", ""])
SEPARATORS = st.sampled_from([".", "_", "a", ".b"])
REFUSED = (KeyConflictError, MissingKeyError)


class Boom(Exception):
    """Leaves as many blocks as it says."""


# -- the model: a dict from paths to tensors (or EMPTY) --------------------------------------------


def under(path, other):
    return other[: len(path)] == path


def at_or_below(model, path):
    return [other for other in model if under(path, other)]


def stands(paths):
    """Say whether entries can stand at all of these paths at once."""
    return not any(
        under(one, other) for i, one in enumerate(paths) for j, other in enumerate(paths) if i != j
    )


def join(path, sep):
    return (sep.join(path),)


def split(path, sep):
    return (*path[0].split(sep), *path[1:])


def flat_view(model, sep):
    """Return where each path that is shown is shown."""
    return {path: join(path, sep) for path, value in model.items() if value is not EMPTY}


def nested_view(model, sep):
    found = {path: split(path, sep) for path in model}
    shown = {}
    for path, at in found.items():
        others = [other for place, other in found.items() if place != path]
        covered = any(under(at, other) and at != other for other in others)
        again = any(shown.get(other) == at and model[other] is EMPTY for other in shown)
        if not (model[path] is EMPTY and (covered or again)):
            shown[path] = at
    return shown


def written_back(model, view, shown, is_flat, sep):
    """Return what the tree holds after the block, or None if that cannot stand together."""
    home = {at: path for path, at in shown.items()}
    back = split if is_flat else join
    result = [(home.get(at) or back(at, sep), value) for at, value in view.items()]
    if not stands([path for path, _ in result]):
        return None
    result = dict(result)
    for path in model:
        still_there = is_flat or at_or_below(view, split(path, sep))
        free = not any(under(path, other) or under(other, path) for other in result)
        if path not in shown and still_there and free:
            result[path] = EMPTY
    return result


# -- the same edit to the tree and to the model ----------------------------------------------------


def entries(node, above=()):
    """Return the leaves and empty branches of a tree by path."""
    found = {}
    for key in list(node.keys()):
        value = node.get(key)
        path = (*above, key)
        if not isinstance(value, TensorDictBase):
            found[path] = value
        else:
            found.update(entries(value, path) or {path: EMPTY})
    return found


def branches(node, above=()):
    """Return the branches of a tree by path."""
    found = {}
    for key in list(node.keys()):
        value = node.get(key)
        if isinstance(value, TensorDictBase):
            found[*above, key] = value
            found.update(branches(value, (*above, key)))
    return found


def same(td, model):
    found = entries(td)
    return found.keys() == model.keys() and all(found[path] is model[path] for path in model)


def take(model, path):
    """Remove what stands at and below a path; a branch that lost all stays, empty."""
    taken = {other: model.pop(other) for other in at_or_below(model, path)}
    above = path[:-1]
    if taken and above and not at_or_below(model, above):
        model[above] = EMPTY
    return taken


def put(model, path, values):
    """Put entries (paths below ``path``) there, unless a leaf is in the way."""
    leaves = [other for other, value in model.items() if value is not EMPTY]
    if any(under(other, path) and other != path for other in leaves):
        return False
    for other in list(model):
        if under(path, other) or (under(other, path) and model[other] is EMPTY):
            del model[other]
    model.update({(*path, *below): value for below, value in values.items()})
    return True


def new_leaf():
    return torch.zeros(())


def edit(data, td, model):
    """Make one change to the tree and the model; both refuse it, or both do it."""
    path = tuple(data.draw(st.lists(KEYS, min_size=1, max_size=2)))
    there = data.draw(st.sampled_from(sorted(entries(td) | branches(td)))) if model else path
    kind = data.draw(st.sampled_from(["set", "replace", "branch", "delete", "rename", "update"]))
    leaf = new_leaf()
    if kind in ("set", "replace"):
        at = path if kind == "set" else there
        done, change = put(model, at, {(): leaf}), lambda: td.set(at, leaf)
    elif kind == "branch":
        values = data.draw(st.sampled_from([{(): EMPTY}, {("x",): leaf}, {("y", "."): leaf}]))
        branch = TensorDict({below: value for below, value in values.items() if below})
        done, change = put(model, path, values), lambda: td.set(path, branch)
    elif kind == "update":
        done, change = put(model, path, {(): leaf}), lambda: td.update({path: leaf})
    elif kind == "delete":
        done, change = bool(at_or_below(model, there)), lambda: td.pop(there)
        take(model, there)
    else:
        change = lambda: td.rename_key_(there, path)  # noqa: E731  # as the others
        done = rename(model, there, path)
    try:
        change()
    except REFUSED:
        assert not done
    else:
        assert done
    assert same(td, model)


def rename(model, old, new):
    if not at_or_below(model, old):
        return False
    if old == new:
        return True
    inside = under(old, new)
    if at_or_below(model, new) and not inside:
        return False
    before = dict(model)
    values = {path[len(old) :]: value for path, value in take(model, old).items()}
    if put(model, new, values):
        return True
    model.clear()
    model.update(before)
    return False


def play(data, td, model, depth):
    """Edit the tree, also through views of it; the model follows."""
    for _ in range(data.draw(st.integers(0, 3))):
        if depth and data.draw(st.booleans()):
            look_through(data, td, model, depth - 1)
        else:
            edit(data, td, model)
    if data.draw(st.integers(0, 7)) == 0:
        raise Boom(data.draw(st.integers(0, 2)))


def opened(data, td, is_flat, sep, inplace):
    method = td.flatten_keys if is_flat else td.unflatten_keys
    if data.draw(st.booleans()):
        return method(sep, inplace)
    return method(separator=sep, inplace=inplace)


def look_through(data, td, model, depth):
    """Play in a block on a view, and compare what it leaves."""
    is_flat, inplace = data.draw(st.booleans()), data.draw(st.booleans())
    sep = data.draw(SEPARATORS)
    shown = (flat_view if is_flat else nested_view)(model, sep)
    view_model = {at: model[path] for path, at in shown.items()}
    can_open = stands(list(shown.values()))
    identities = branches(td)
    expected, left = dict(model), None
    try:
        with opened(data, td, is_flat, sep, inplace) as view:
            assert can_open
            assert (view is td) == inplace
            assert same(view, view_model)
            try:
                play(data, view, view_model, depth)
            except Boom as boom:
                left = boom.args[0]
                raise
            expected = written_back(model, view_model, shown, is_flat, sep)
    except KeyConflictError:
        assert not can_open or expected is None
        expected = None
    except Boom:
        pass
    else:
        assert expected is not None
    if expected is not None:
        model.clear()
        model.update(expected)
    assert same(td, model)
    after = branches(td)
    assert all(after[path] is identities[path] for path in after.keys() & identities.keys())
    if left is None and expected is None:
        return
    if left:
        raise Boom(left - 1)


@st.composite
def plain_trees(draw, depth=2):
    def branch(depth):
        keys = draw(st.lists(KEYS, unique=True, max_size=3))
        below = [depth > 0 and draw(st.booleans()) for _ in keys]
        made = [branch(depth - 1) if deep else new_leaf() for deep in below]
        return dict(zip(keys, made, strict=True))

    return TensorDict(branch(depth))


@settings(max_examples=400)
@given(plain_trees(), st.data())
def test_edits_through_nested_views_do_what_they_do_to_a_dict_of_paths(td, data):
    model = entries(td)
    with contextlib.suppress(Boom):
        play(data, td, model, depth=3)
    assert same(td, model)
