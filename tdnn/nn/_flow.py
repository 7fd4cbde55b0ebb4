"""Which keys the steps of a chain read and write, together."""

from collections.abc import Collection, Container, Iterable

from tdnn._keys import NestedKey, as_key, as_path

__all__ = [
    "keys_read",
    "keys_written",
    "reads",
    "reads_at_most",
    "reads_each",
    "stands_within",
    "touches",
    "writes",
]


def reads(step: object) -> list[NestedKey]:
    """Return the keys that a step says it reads."""
    return _plain(step, "in_keys")


def writes(step: object) -> list[NestedKey]:
    """Return the keys that a step says it writes."""
    return _plain(step, "out_keys")


def _plain(step: object, what: str) -> list[NestedKey]:
    """Return the keys of a module of any class, which may be written in any way."""
    keys = getattr(step, what, ())
    try:
        return [as_key(as_path(key)) for key in ([keys] if isinstance(keys, str) else keys)]
    except TypeError as err:
        raise TypeError(f"{type(step).__name__}: {what} {keys!r}: {err}") from None


def keys_read(steps: Iterable[object]) -> list[NestedKey]:
    """Return what the steps read and no earlier one writes, without the parts of what is read.

    A branch of which an earlier step writes a part counts as written.
    """
    found = _unwritten(steps)
    return [key for key in found if not stands_within(key, found)]


def _unwritten(steps: Iterable[object]) -> dict[NestedKey, None]:
    """Return what :func:`keys_read` does, with the parts of what is read."""
    found: dict[NestedKey, None] = {}
    written: set[NestedKey] = set()
    begun: set[NestedKey] = set()  # the branches that the written keys stand in
    for step in steps:
        for key in reads_each(step):
            if key not in begun and key not in written and not stands_within(key, written):
                found[key] = None
        for key in writes(step):
            written.add(key)
            begun.update(_branches(key))
    return found


def reads_each(step: object) -> list[NestedKey]:
    """Return what a step reads; of a chain, a branch and the parts of it that it reads as well.

    What is written before the chain may be the branch, and not the part.
    """
    inner = _steps_of(step)
    return reads(step) if inner is None else list(_unwritten(inner))


def reads_at_most(step: object) -> list[NestedKey]:
    """Return all that a step may read of what stood there before.

    Of a chain that is also a branch of which it writes a part itself.
    """
    inner = _steps_of(step)
    if inner is None:
        return reads(step)
    found: list[NestedKey] = []
    written: set[NestedKey] = set()
    for each in inner:
        keys = reads_at_most(each)
        found += [key for key in keys if key not in written and not stands_within(key, written)]
        written.update(writes(each))
    return found


def _steps_of(step: object) -> Collection[object] | None:
    """Return the steps of a chain; None for any other module."""
    steps = getattr(step, "_steps", None)
    return None if steps is None else steps.values()


def keys_written(steps: Iterable[object]) -> list[NestedKey]:
    """Return what the steps write, each key once, at the place of its last writing."""
    found: dict[NestedKey, None] = {}
    for step in steps:
        for key in writes(step):
            found.pop(key, None)
            found[key] = None
    found.pop("_", None)
    return list(found)


def _branches(key: NestedKey) -> list[NestedKey]:
    """Return the keys of the branches that an entry stands in."""
    return [] if type(key) is str else [as_key(as_path(key[:end])) for end in range(1, len(key))]


def stands_within(key: NestedKey, keys: Container[NestedKey]) -> bool:
    """Return whether an entry stands in a branch that is one of ``keys``."""
    return type(key) is not str and any([branch in keys for branch in _branches(key)])


def touches(key: NestedKey, keys: Collection[NestedKey]) -> bool:
    """Return whether ``key`` is one of ``keys``, or above or below one."""
    if key in keys or stands_within(key, keys):
        return True
    return any([key in _branches(other) for other in keys])
