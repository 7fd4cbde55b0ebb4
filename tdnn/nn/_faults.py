"""What goes wrong when a module runs on a tree, in words: which module, which step, which keys.

A text that begins with a module's title is a :class:`Told`. Each chain that the exception passes
through on its way up puts the step in front of that text, so that one line gives the whole path:
``step 0 ('body') of TensorDictSequential: step 2 of Chain: TensorDictModule(Linear) read ...``.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, Path, as_key, as_path, hint, listing
from tdnn.errors import MissingKeyError

__all__ = [
    "Told",
    "arguments_in_words",
    "in_words",
    "inputs_in_words",
    "lacking_outputs",
    "lost_outputs",
    "missing_inputs",
    "name_of",
    "nested_output",
    "outputs_in_words",
    "place",
    "tell",
    "title",
    "wrong_count",
]


class Told(str):
    """A text about a module, in a message or in a note, that still grows on the way up."""

    __slots__ = ()


def name_of(module: object) -> str:
    """Return what a user calls ``module``: the class of a net, the name of a function.

    Example:
        >>> name_of(nn.Linear(2, 2)), name_of(torch.relu)
        ('Linear', 'relu')
    """
    if isinstance(module, torch.jit.ScriptModule):
        return f"scripted {module.original_name}"
    if isinstance(module, torch.jit.ScriptFunction):
        return f"scripted {module.name}"
    if isinstance(module, nn.Module):
        return type(module).__name__
    inner = getattr(module, "func", None)  # of a functools.partial
    if inner is not None and not hasattr(module, "__name__"):
        return f"partial({name_of(inner)})"
    return str(getattr(module, "__name__", type(module).__name__))


def title(module: object) -> str:
    """Return the name of a step or of a decorated function, with what it wraps.

    Example:
        >>> title(TensorDictModule(nn.Linear(2, 2), "x", "y"))
        'TensorDictModule(Linear)'
    """
    own = getattr(type(module), "_title", None)
    return name_of(module) if own is None else str(own(module))


def tell(err: Exception, text: str) -> None:
    """Add a note about a module to an exception that passes through it."""
    err.add_note(Told(text))


def place(err: Exception, where: str, text: str) -> None:
    """Say ``where`` in front of what is told of ``err``; add ``text`` if nothing is told yet."""
    notes = getattr(err, "__notes__", [])
    if notes and isinstance(notes[-1], Told):
        notes[-1] = Told(f"{where}: {notes[-1]}")
    elif not notes and err.args and isinstance(err.args[0], Told):
        err.args = (Told(f"{where}: {err.args[0]}"), *err.args[1:])
    else:
        tell(err, f"{where}: {text}")


def in_words(value: object) -> str:
    """Return the dtype and shape of a leaf, or the kind and batch size of a tree.

    Example:
        >>> in_words(torch.ones(2, 3)), in_words(TensorDict({}, [4])), in_words(None)
        ('float32 (2, 3)', 'TensorDict (4,)', 'None')
    """
    if isinstance(value, TensorDictBase):
        return f"{type(value).__name__} {tuple(value.batch_size)}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__


def inputs_in_words(keys: Iterable[NestedKey], values: Iterable[Any]) -> str:
    """Return ``"read 'a' float32 (2,), 'b' int64 (3,)"`` for the inputs of a call.

    Example:
        >>> inputs_in_words(["a"], [torch.ones(2)])
        "read 'a' float32 (2,)"
    """
    read = [f"{key!r} {in_words(value)}" for key, value in zip(keys, values, strict=True)]
    return f"read {', '.join(read)}" if read else "reads nothing"


def arguments_in_words(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what a call was given, as it would be written.

    Example:
        >>> arguments_in_words([torch.ones(2)], {"scale": 3})
        'float32 (2,), scale=int'
    """
    by_name = [f"{name}={in_words(value)}" for name, value in kwargs.items()]
    return ", ".join([*map(in_words, args), *by_name]) or "nothing"


def outputs_in_words(keys: Iterable[NestedKey], values: Iterable[Any], tree: TensorDictBase) -> str:
    """Return ``"wrote 'a' float32 (2,) to TensorDict (2,)"`` for the outputs of a call.

    Example:
        >>> outputs_in_words(["a", "_"], [torch.ones(2), None], TensorDict({}, [2]))
        "wrote 'a' float32 (2,) to TensorDict (2,)"
    """
    pairs = [(key, value) for key, value in zip(keys, values, strict=True) if key != "_"]
    wrote = ", ".join([f"{key!r} {in_words(value)}" for key, value in pairs])
    advice = "; the key '_' drops an output" if any([value is None for _, value in pairs]) else ""
    if tree._batch_size and any([isinstance(v, Tensor) and not v.ndim for _, v in pairs]):
        advice += "; for one value of the whole batch, give a tree without batch dims"
    return f"wrote {wrote} to {in_words(tree)}{advice}"


def missing_inputs(
    who: str,
    wanted: Sequence[NestedKey],
    missing: Sequence[NestedKey],
    tree: TensorDictBase,
    turned: bool = False,
) -> MissingKeyError:
    """Return the error for inputs that are not in the tree, with the nearest that are.

    Args:
        who: the title of the module.
        wanted: all that it reads.
        missing: those that are not there.
        tree: what it was to read them from.
        turned: the names of its arguments are there instead.
    """
    there = [as_key(path) for path, _ in tree._leaves()]
    gone = ", ".join([f"{key!r}{hint_in(key, tree)}" for key in missing])
    advice = (
        "; a dict of in_keys goes from arguments to keys, unless out_to_in_map=False"
        if turned
        else ""
    )
    return MissingKeyError(
        Told(
            f"{who} reads {listing(wanted)}; missing is {gone}; the input has "
            f"{listing(there)}{advice}"
        )
    )


def wrong_count(who: str, keys: Sequence[NestedKey], result: Any) -> ValueError:
    """Return the error for more or fewer outputs than there are keys for them."""
    several = isinstance(result, tuple | list)
    count = len(result) if several else 1
    what = f"{count} output{'s' * (count != 1)}" if several else in_words(result)
    advice = (
        f"return a tuple of {len(keys)}, or drop a key"
        if count < len(keys)
        else "give each a key, '_' if it is to be dropped"
    )
    return ValueError(
        Told(
            f"{who} returned {what} for {len(keys)} out_key{'s' * (len(keys) != 1)} "
            f"{listing(keys)}; {advice}"
        )
    )


def lacking_outputs(
    who: str, keys: Sequence[NestedKey], lacking: Sequence[NestedKey], result: Any
) -> ValueError:
    """Return the error for a mapping that does not hold all outputs."""
    there = list(result.keys())
    names = [key for key in there if isinstance(key, str)]
    near = [f"{key!r}{hint(key, names) if isinstance(key, str) else ''}" for key in lacking]
    return ValueError(
        Told(
            f"{who} returned a {type(result).__name__} of {listing(there)} for {len(keys)} "
            f"out_keys {listing(keys)}; not in it is {', '.join(near)}"
        )
    )


def nested_output(who: str, key: NestedKey, value: Sequence[Any]) -> TypeError:
    """Return the error for an output that is itself a tuple of tensors."""
    return TypeError(
        Told(
            f"{who} returned a {type(value).__name__} of {len(value)} for {key!r}, and a key holds "
            "one tensor; wrap a function that returns all of them in one tuple"
        )
    )


def lost_outputs(who: str, keys: Sequence[NestedKey], tree: TensorDictBase) -> MissingKeyError:
    """Return the error for outputs that a module should have written and did not."""
    there = [as_key(path) for path, _ in tree._leaves()]
    gone = ", ".join([f"{key!r}{hint_in(key, tree)}" for key in keys])
    return MissingKeyError(Told(f"{who} did not write {gone}; it returned {listing(there)}"))


def hint_in(key: NestedKey, tree: TensorDictBase) -> str:
    """Return ``" (did you mean 'obs'?)"`` for the entry nearest to a key that is not there.

    Example:
        >>> hint_in("obs", TensorDict({"agent": {"obs": 1}}))
        " (did you mean ('agent', 'obs')?)"
    """
    path = as_path(key)
    if len(path) > 1 and all(part in tree for part in path):
        return f" (one nested key; for several write {list(path)})"
    paths = _paths(tree)
    names = {".".join(there): as_key(there) for there in paths}
    near: list[NestedKey] = [names[name] for name in get_close_matches(".".join(path), names, 1)]
    near = near or [as_key(there) for there in paths if there[-1] == path[-1]]
    return f" (did you mean {near[0]!r}?)" if near else ""


def _paths(tree: TensorDictBase, above: Path = ()) -> list[Path]:
    """Return the paths of all entries, branches too."""
    found: list[Path] = []
    for key, value in tree._data.items():
        found.append((*above, key))
        if isinstance(value, TensorDictBase):
            found += _paths(value, (*above, key))
    return found
