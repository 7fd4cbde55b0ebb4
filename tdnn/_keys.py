"""Nested keys: from what a user writes to a path, to a name, and to a hint when it is not there.

A *key* is a ``str`` or a tuple of keys; a *path* is a flat tuple of ``str``; a *name* is a path
joined by a separator.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeAlias

__all__ = [
    "NestedKey",
    "Path",
    "as_key",
    "as_path",
    "hint",
    "listing",
    "unravel_key",
    "unravel_key_list",
]

NestedKey: TypeAlias = str | tuple["NestedKey", ...]
Path: TypeAlias = tuple[str, ...]

_SHOWN = 20  # names printed in full before an error message says "and 3 more"


def as_path(key: NestedKey) -> Path:
    """Return the flat, non-empty tuple of ``str`` that ``key`` stands for.

    Raises:
        TypeError: ``key`` is not a ``str`` or a non-empty, possibly nested, tuple of them.

    Example:
        >>> as_path(("a", ("b", "c")))
        ('a', 'b', 'c')
    """
    if type(key) is str:
        return (key,)
    if type(key) is tuple and key:
        for part in key:
            if type(part) is not str:
                return tuple(step for part in key for step in as_path(part))
        return key  # type: ignore[return-value]  # every part was just seen to be a str
    if isinstance(key, str):
        return (str.__str__(key),)  # the text itself: str() of a member of an Enum is another
    raise TypeError(f"a key is a str or a non-empty tuple of str, not {key!r}")


def as_key(path: Path) -> NestedKey:
    """Return the shortest key for ``path``: the ``str`` itself when there is only one.

    Example:
        >>> as_key(("a",)), as_key(("a", "b"))
        ('a', ('a', 'b'))
    """
    return path[0] if len(path) == 1 else path


def unravel_key(key: NestedKey) -> NestedKey:
    """Return ``key`` without inner tuples, as a ``str`` when it has one part.

    Example:
        >>> unravel_key(("a", ("b", ("c",)))), unravel_key(("a",))
        (('a', 'b', 'c'), 'a')
    """
    return as_key(as_path(key))


def unravel_key_list(keys: Sequence[NestedKey]) -> list[NestedKey]:
    """Return each of ``keys`` as :func:`unravel_key` does.

    Example:
        >>> unravel_key_list(["a", ("b", ("c",))])
        ['a', ('b', 'c')]
    """
    if isinstance(keys, str):
        raise TypeError(f"a list of keys was expected, not the str {keys!r}; write [{keys!r}]")
    return [unravel_key(key) for key in keys]


def hint(name: str, names: Iterable[str]) -> str:
    """Return ``" (did you mean 'weight'?)"`` for the nearest of ``names``, or nothing.

    Example:
        >>> hint("weigth", ["weight", "bias"])
        " (did you mean 'weight'?)"
        >>> hint("x", ["weight", "bias"])
        ''
    """
    near = get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def listing(keys: Iterable[NestedKey]) -> str:
    """Return ``keys`` as an error message shows them: the first twenty, and how many follow.

    Example:
        >>> listing(["a", ("b", "c")])
        "['a', ('b', 'c')]"
    """
    shown = [repr(key) for key in keys]
    more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"[{', '.join(shown[:_SHOWN])}{more}]"
