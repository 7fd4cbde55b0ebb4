"""Running one function over columns of leaves: into a new tree, or in place."""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from tdnn._columns import PLAIN, Column, Tree, broadcast, columns_of, operand
from tdnn._core import Names, TensorDictBase
from tdnn._keys import as_key
from tdnn._transforms import in_transform
from tdnn._writes import as_before, first_rows, is_writable, refuse_meta

__all__ = ["combine", "combine_", "operate", "operate_"]

# One call for all leaves: half the time of a loop on CPU (test_add_td), one kernel on CUDA.
_FOREACH: dict[Any, Callable[..., Any]] = {
    torch.abs: torch._foreach_abs,
    torch.add: torch._foreach_add,
    torch.addcdiv: torch._foreach_addcdiv,
    torch.addcmul: torch._foreach_addcmul,
    torch.clamp_max: torch._foreach_clamp_max,
    torch.clamp_min: torch._foreach_clamp_min,
    torch.div: torch._foreach_div,
    torch.exp: torch._foreach_exp,
    torch.lerp: torch._foreach_lerp,
    torch.log: torch._foreach_log,
    torch.maximum: torch._foreach_maximum,
    torch.minimum: torch._foreach_minimum,
    torch.mul: torch._foreach_mul,
    torch.neg: torch._foreach_neg,
    torch.pow: torch._foreach_pow,
    torch.reciprocal: torch._foreach_reciprocal,
    torch.sqrt: torch._foreach_sqrt,
    torch.sub: torch._foreach_sub,
    Tensor.abs_: torch._foreach_abs_,
    Tensor.add_: torch._foreach_add_,
    Tensor.addcdiv_: torch._foreach_addcdiv_,
    Tensor.addcmul_: torch._foreach_addcmul_,
    Tensor.clamp_max_: torch._foreach_clamp_max_,
    Tensor.clamp_min_: torch._foreach_clamp_min_,
    Tensor.div_: torch._foreach_div_,
    Tensor.exp_: torch._foreach_exp_,
    Tensor.lerp_: torch._foreach_lerp_,
    Tensor.log_: torch._foreach_log_,
    Tensor.mul_: torch._foreach_mul_,
    Tensor.neg_: torch._foreach_neg_,
    Tensor.pow_: torch._foreach_pow_,
    Tensor.reciprocal_: torch._foreach_reciprocal_,
    Tensor.sqrt_: torch._foreach_sqrt_,
    Tensor.sub_: torch._foreach_sub_,
}


def combine(tree: Tree, fn: Callable[..., Tensor], *others: Any, **kwargs: Any) -> Tree:
    """Return a new tree of ``fn(leaf, *operands, **kwargs)``.

    Leaves that are one tensor, and meet the same operands, give one tensor.
    """
    columns, sizes = columns_of(tree, others, Tensor.dim)
    back = None
    if len(set(columns[0])) < len(columns[0]):
        columns, back = _untied(columns)
    done = _results(tree, fn, columns, kwargs)
    if back is not None:
        done = [done[at] for at in back]
    if sizes is None:
        return _filled(tree, iter(done))
    grown = len(sizes[0]) - len(tree._batch_size)
    return _refitted(tree, iter(done), iter(sizes), (None,) * grown)


def combine_(tree: Tree, fn: Callable[..., Any], *others: Any, **kwargs: Any) -> Tree:
    """Call the in-place ``fn(leaf, *operands, **kwargs)`` once for each tensor; return ``tree``.

    Everything is checked before the first leaf is written.
    """
    tree._refuse_lost_writes()
    columns, sizes = columns_of(tree, others, Tensor.size)
    leaves = columns[0]
    if sizes is not None:
        leaves = columns[0] = tree._values()
        _check_shapes(tree, columns)
    grads = torch.is_grad_enabled()
    for x in leaves:
        if (grads and x.requires_grad) or not x.is_contiguous() or not is_writable(x):
            tree._writable()
            break
    if len(set(leaves)) < len(leaves):
        paths = tree._leaves()
        lists = [column for column in columns[1:] if isinstance(column, list)]
        columns = _picked(columns, first_rows(leaves, lists, lambda at: as_key(paths[at][0])))
    _check_dtypes(tree, fn, columns, kwargs)
    for column in columns[1:]:
        if isinstance(column, list) and any([value.is_meta for value in column]):
            keys = [as_key(path) for path, _ in tree._leaves()]
            refuse_meta(zip(columns[0], column, keys, strict=False))
    columns[1:] = [as_before(columns[0], c) if isinstance(c, list) else c for c in columns[1:]]
    _write(tree, fn, columns, kwargs)
    return tree


def operate(tree: Tree, fn: Callable[..., Tensor], other: Any) -> Tree:
    """Return what an operator returns: ``combine``'s tree, or ``NotImplemented``."""
    given = operand(tree, other)
    return given if given is NotImplemented else combine(tree, fn, given)


def operate_(tree: Tree, fn: Callable[..., Any], other: Any) -> Tree:
    """Return what an in-place operator returns: ``tree``, or ``NotImplemented``."""
    given = operand(tree, other)
    return given if given is NotImplemented else combine_(tree, fn, given)


# -- new trees -------------------------------------------------------------------------------


def _filled(node: Tree, results: Iterator[Any]) -> Tree:
    """Return a tree like ``node`` that holds the results in the order of its leaves."""
    data: dict[str, Any] = {}
    for key, value in node._data.items():
        if type(value) in PLAIN or not isinstance(value, TensorDictBase):
            data[key] = next(results)
        else:
            data[key] = _filled(value, results)
    return node._like(data, node._batch_size, node._names)


def _refitted(
    node: Tree, results: Iterator[Any], sizes: Iterator[torch.Size], new: tuple[None, ...]
) -> Tree:
    """Return a tree of the results with other batch sizes; ``new`` are names for new dims."""
    size = next(sizes)
    data: dict[str, Any] = {}
    for key, value in node._data.items():
        if isinstance(value, TensorDictBase):
            data[key] = _refitted(value, results, sizes, new)
        else:
            data[key] = next(results)
    names: Names = None if node._names is None else (*new, *node._names)[: len(size)]
    return node._like(data, size, names)


def _untied(columns: list[Column]) -> tuple[list[Column], list[int]]:
    """Return the columns without repeated rows, and for each leaf the row it has now."""
    many = [column for column in columns if isinstance(column, list)]
    first: dict[tuple[Any, ...], int] = {}
    back = [first.setdefault(row, at) for at, row in enumerate(zip(*many, strict=True))]
    place = {at: row for row, at in enumerate(first.values())}
    return _picked(columns, list(place)), [place[at] for at in back]


def _picked(columns: list[Column], rows: list[int]) -> list[Column]:
    return [[c[row] for row in rows] if isinstance(c, list) else c for c in columns]


# -- running ---------------------------------------------------------------------------------


def _at_once(
    fn: Callable[..., Any], columns: list[Column], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """Return the one call that stands for ``fn`` on every row, if there is one that is safe."""
    if torch.compiler.is_compiling() or len(columns[0]) < 2:
        return None
    many = _FOREACH.get(fn)
    # torch 2.14 has no batching rules for these functions, so vmap needs the loop.
    if many is None or in_transform():
        return None
    for column in columns:
        if isinstance(column, list):
            if not PLAIN.issuperset(map(type, column)):
                return None  # a subclass may not know the function
        elif kwargs:
            return None  # no alpha beside a number
    return many


def _rows(columns: list[Column]) -> Iterator[tuple[Any, ...]]:
    return zip(*[c if isinstance(c, list) else repeat(c) for c in columns], strict=False)


def _results(
    tree: TensorDictBase, fn: Callable[..., Any], columns: list[Column], kwargs: dict[str, Any]
) -> list[Any]:
    many = _at_once(fn, columns, kwargs)
    if many is not None:
        try:
            return list(many(*columns, **kwargs))
        except (RuntimeError, TypeError, NotImplementedError):
            pass  # the loop fails at the leaf that is to blame, and names it
    done: list[Any] = []
    for row in _rows(columns):
        try:
            done.append(fn(*row, **kwargs))
        except Exception as err:
            err.add_note(f"at the leaf {_in_words(tree, row[0])}")
            raise
    return done


def _write(
    tree: TensorDictBase, fn: Callable[..., Any], columns: list[Column], kwargs: dict[str, Any]
) -> None:
    many = _at_once(fn, columns, kwargs)
    if many is not None:
        try:
            many(*columns, **kwargs)
        except Exception as err:
            err.add_note("some leaves may have been written")
            raise
        return
    for row in _rows(columns):
        try:
            fn(*row, **kwargs)
        except Exception as err:
            err.add_note(
                f"at the leaf {_in_words(tree, row[0])}; leaves before it may have been written"
            )
            raise


def _in_words(tree: TensorDictBase, leaf: Any) -> str:
    """Return the key of a leaf, with its dtype and what to do if others have another."""
    leaves = tree._leaves()
    name = next((repr(as_key(path)) for path, value in leaves if value is leaf), "")
    if len({value.dtype for _, value in leaves}) == 1:
        return name
    kind = str(leaf.dtype).removeprefix("torch.")
    return f"{name}, which has dtype {kind} (td.apply() can treat leaves apart)"


# -- checks before an in-place operation -----------------------------------------------------


def _check_shapes(tree: TensorDictBase, columns: list[Column]) -> None:
    faults = []
    lists = [column for column in columns if isinstance(column, list)]
    for (path, _), row in zip(tree._leaves(), zip(*lists, strict=True), strict=True):
        mine, *theirs = [x.shape for x in row]
        try:
            fits = broadcast(mine, *theirs) == mine
        except RuntimeError:
            fits = False
        if not fits:
            given = ", ".join(str(tuple(shape)) for shape in theirs)
            faults.append(f"{as_key(path)!r} of shape {tuple(mine)} with {given}")
    if faults:
        raise ValueError(f"cannot write in place, the shape would change: {'; '.join(faults)}")


def _check_dtypes(
    tree: TensorDictBase, fn: Callable[..., Any], columns: list[Column], kwargs: dict[str, Any]
) -> None:
    """Try the operation on empty tensors wherever the dtypes or devices could make it fail."""
    lists = [column for column in columns if isinstance(column, list)]
    dtypes = {x.dtype for column in lists for x in column}
    if len(dtypes) == 1 and dtypes.pop().is_floating_point:
        complexes = [c for c in (*columns, *kwargs.values()) if isinstance(c, complex)]
        places = {x.device for column in lists for x in column} if len(lists) > 1 else ()
        if not complexes and len(places) < 2:
            return
    _check_divisors(tree, fn, columns)
    tried = set()
    for row in _rows(columns):
        kind = tuple([(x.dtype, x.device, x.ndim > 0) for x in row if isinstance(x, Tensor)])
        if kind in tried:
            continue
        tried.add(kind)
        try:
            fn(*[_small(x) if isinstance(x, Tensor) else x for x in row], **kwargs)
        except Exception as err:
            err.add_note(f"at the leaf {_in_words(tree, row[0])}; nothing has been written")
            raise


def _check_divisors(tree: TensorDictBase, fn: Callable[..., Any], columns: list[Column]) -> None:
    """Look for a division of integers by zero, of which torch tells only when it gets there."""
    if fn not in (Tensor.floor_divide_, Tensor.remainder_):
        return
    if torch.compiler.is_compiling() or in_transform():  # where Python sees no values
        return
    for leaf, divisor in _rows(columns):
        if leaf.dtype.is_floating_point or leaf.is_complex() or leaf.is_meta:
            continue
        if not (divisor.all() if isinstance(divisor, Tensor) else divisor):
            raise ZeroDivisionError(
                f"division by zero at the leaf {_in_words(tree, leaf)}; nothing has been written"
            )


def _small(x: Tensor) -> Tensor:
    """Return a tensor of the same kind with nothing in it, or a one if it has no dims."""
    return x.new_empty(0) if x.ndim else x.new_ones(())
