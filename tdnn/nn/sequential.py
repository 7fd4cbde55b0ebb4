"""A chain of modules that run one after the other on the same tree."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, cast

from torch import nn

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, hint, listing
from tdnn.errors import MissingKeyError
from tdnn.nn._faults import (
    Told,
    in_words,
    inputs_in_words,
    lost_outputs,
    name_of,
    outputs_in_words,
    place,
    tell,
    title,
)
from tdnn.nn._flow import keys_read, keys_written, reads, reads_at_most, reads_each, touches, writes
from tdnn.nn.base import TensorDictModuleBase, WrapModule, as_call, normal_keys
from tdnn.nn.dispatch import dispatch
from tdnn.nn.module import TensorDictModule, write
from tdnn.tensordict import TensorDict

__all__ = ["TensorDictSequential"]

Step: TypeAlias = Any  # a module with in_keys and out_keys, of any class
Steps: TypeAlias = dict[str, Step]

_ASIDE = (False, "empty")  # values of inplace that leave the input as it is


class _Keys(NamedTuple):
    """The keys of a chain, and what they were worked out from."""

    forms: list[Any]
    others: list[Any]
    in_keys: tuple[NestedKey, ...]
    out_keys: tuple[NestedKey, ...]


class TensorDictSequential(TensorDictModule):
    """Run modules one after the other on the same tree.

    The ``in_keys`` are what the steps read and no earlier step writes; the ``out_keys`` are what
    the steps write, each once. A step that reads an entry below or above one that was written
    finds it written. Both are worked out anew on each reading, so they follow a step whose keys
    are changed.

    ``chain[1]`` and ``chain["name"]`` are steps, ``chain[1:]`` is a chain of the same steps with
    the same options, without a selection. Steps can be assigned and deleted in the same ways; a
    new name appends.

    Args:
        *modules: the steps, or one list of them, or one dict from names to steps. A callable
            without ``in_keys`` and ``out_keys`` takes and returns a tree (:class:`WrapModule`).
        partial_tolerant: leave out the steps whose inputs are not all there.
        selected_out_keys: the outputs to keep, as with :meth:`select_out_keys`.
        inplace: where the ``out_keys`` are at the end: what the last step returns (None), the
            input tree (True), a new tree without batch dims (False), or ``tensordict.empty()``
            ("empty"). The last two leave the input as it is.

    Raises:
        TypeError: on construction, a step is not callable.
        ValueError: on construction, a selected key is not among the outputs.

    Example:
        >>> chain = TensorDictSequential({
        ...     "body": TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]),
        ...     "head": TensorDictModule(nn.Linear(4, 1), ["h"], ["y"]),
        ... })
        >>> chain.in_keys, chain.out_keys
        (['x'], ['h', 'y'])
        >>> chain(TensorDict({"x": torch.ones(2, 3)}, [2]))["y"].shape
        torch.Size([2, 1])
        >>> h, y = chain(torch.ones(2, 3))
        >>> chain["head"] is chain[1], chain[:1].out_keys
        (True, ['h'])
    """

    _inplace_choices = (None, True, False, "empty")

    _worked_out: _Keys

    def __init__(
        self,
        *modules: Any,
        partial_tolerant: bool = False,
        selected_out_keys: Sequence[NestedKey] | None = None,
        inplace: bool | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        steps, named = _as_steps(modules, type(self).__name__)
        self.module = nn.ModuleDict(steps) if named else nn.ModuleList(steps.values())
        self.partial_tolerant = partial_tolerant
        self._inplace = self._checked_inplace(inplace)
        self._keys_changed()
        if selected_out_keys is not None:
            self.select_out_keys(*selected_out_keys)

    # -- keys ----------------------------------------------------------------------------------

    @property
    def in_keys(self) -> list[NestedKey]:
        """The keys that the steps read and no earlier step writes."""
        return list(self._keys().in_keys)

    @in_keys.setter
    def in_keys(self, keys: object) -> None:
        raise AttributeError(f"{self._title()} works its in_keys out from its steps; change those")

    @property
    def out_keys(self) -> list[NestedKey]:
        """The keys that the steps write, in the order of the last writing, or the selected ones."""
        return list(self._keys().out_keys if self._selected is None else self._selected)

    @out_keys.setter
    def out_keys(self, keys: object) -> None:
        raise AttributeError(
            f"{self._title()} works its out_keys out from its steps; use select_out_keys()"
        )

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that the steps write, before :meth:`select_out_keys`."""
        return list(self._keys().out_keys)

    @property
    def _in_keys(self) -> tuple[NestedKey, ...]:  # type: ignore[override]  # stored in the base
        return self._keys().in_keys

    @property
    def _results(self) -> tuple[NestedKey, ...]:  # type: ignore[override]  # stored in the base
        # Read by dispatch, which has just read _in_keys.
        return self._worked_out.out_keys if self._selected is None else self._selected

    def _keys(self) -> _Keys:
        """Return the keys, worked out anew if a step's were changed since the last time."""
        # Benchmark test_tdseq_dispatch: mostly each step has the very form that it had before.
        known = self._worked_out
        forms, others, _, _ = known
        holder: Any = self._modules["module"]
        at = 0
        try:
            for step in holder._modules.values():
                # Values are compared for torch.compile, which does not see that two are one.
                if step._form is not forms[at] and step._form != forms[at]:
                    return self._work_out()
                at += 1  # enumerate() would take longer than the rest of the loop
        except (AttributeError, IndexError):  # a module of another class, or a new one
            return self._work_out()
        if at != len(forms) or (others and others != self._others()):
            return self._work_out()
        return known

    def _others(self) -> list[Any]:
        """Return the keys of the steps without a form, whose lists may change in place."""
        return [
            (reads_each(step), writes(step))
            for step in self._steps.values()
            if getattr(step, "_form", None) is None
        ]

    def _work_out(self) -> _Keys:
        steps = self._steps.values()
        forms = [getattr(step, "_form", None) for step in steps]
        in_keys, out_keys = tuple(keys_read(steps)), tuple(keys_written(steps))
        self._worked_out = _Keys(forms, self._others(), in_keys, out_keys)
        return self._worked_out

    def _keys_changed(self) -> None:
        self._work_out()

    @property
    def _optional_inputs(self) -> bool:  # type: ignore[override]  # a constant in the base
        return self.partial_tolerant or any(
            getattr(step, "_optional_inputs", False) for step in self._steps.values()
        )

    # -- the call ------------------------------------------------------------------------------

    @dispatch(source="_in_keys", dest="_results", auto_batch_size=False)
    def forward(  # type: ignore[override]  # tensordict's signatures, which differ
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Run the steps in order.

        Args:
            tensordict: a tree that holds ``in_keys``.
            tensordict_out: the tree to write ``out_keys`` to; the input stays as it is.
            **kwargs: none; each step has its own.

        Returns:
            The tree with the outputs (see ``inplace``), or the outputs in a call with tensors.

        Raises:
            TypeError: keyword arguments were given, or a step did not return a tree.
        """
        if kwargs:
            takes = listing(self.in_keys)
            raise TypeError(
                Told(f"{self._title()} takes a tree, or {takes}, and no {listing(kwargs)}")
            )
        inplace = self._inplace
        selects = self._selected is not None
        if tensordict_out is None and not selects and (inplace is None or inplace is True):
            result = self._run(tensordict)
            return result if inplace is None else self._deliver(result, tensordict)
        work = cast(TensorDict, tensordict).copy()
        result = self._run(work)
        if tensordict_out is None:
            if inplace is None and result is not work:
                # The last step made a tree of its own, which has no entries of the input.
                hidden = [key for key in self.out_keys_source if key not in self.out_keys]
                return cast(TensorDict, result).exclude(*hidden)
            tensordict_out = self._fresh(tensordict) if inplace in _ASIDE else tensordict
        return self._deliver(result, tensordict_out)

    def _run(self, tree: TensorDictBase) -> TensorDictBase:
        """Run the steps on the tree itself and return what the last one returns."""
        at = ""
        tolerant = self.partial_tolerant
        try:
            for at, step in self._steps.items():  # noqa: B007  # the handler reads it
                if tolerant and not all([key in tree for key in reads(step)]):
                    continue
                result = step(tree)
                if not isinstance(result, TensorDictBase):
                    raise TypeError(
                        Told(f"{title(step)} must return a tree, not {type(result).__name__}")
                    )
                tree = result
        except Exception as err:
            place(err, self._where(at), _reading(self._steps[at], tree))
            raise
        return tree

    def _where(self, name: str) -> str:
        at = f"{list(self._steps).index(name)} ({name!r})" if self._named else name
        return f"step {at} of {type(self).__name__}"

    def _deliver(self, result: TensorDictBase, out: TensorDictBase) -> TensorDictBase:
        """Write the outputs of the chain into ``out``, all or none.

        A step that passes on a new tree, without what stood in the old one, also takes outputs
        of earlier steps away. Only those that were selected are missed.
        """
        if result is not out:
            keys = [key for key in self.out_keys if key in result]
            if self._selected is not None and not self.partial_tolerant:
                missing = [key for key in self._selected if key not in result]
                if missing:
                    raise lost_outputs(self._title(), missing, result)
            values = [result.get(key) for key in keys]
            try:
                write(out, keys, values)
            except Exception as err:
                tell(err, f"{self._title()} {outputs_in_words(keys, values, out)}")
                raise
        return out

    # -- steps ---------------------------------------------------------------------------------

    @property
    def _steps(self) -> Steps:
        holder: Any = self._modules["module"]
        return holder._modules  # type: ignore[no-any-return]  # a dict, of whatever modules

    @property
    def _named(self) -> bool:
        return isinstance(self._modules["module"], nn.ModuleDict)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps.values())

    def __getitem__(self, index: int | slice | str) -> Any:
        pairs = list(self._steps.items())
        if isinstance(index, slice):
            return self._with(dict(pairs[index]))
        return pairs[self._position(index)][1]

    def __setitem__(self, index: int | slice | str, module: Any) -> None:
        pairs = list(self._steps.items())
        if isinstance(index, slice):
            steps, named = _as_steps((module,), self._title())
            names = list(steps) if named else [name for name, _ in pairs[index]]
            if self._named and len(names) != len(steps):
                raise ValueError(
                    f"{self._title()}: {len(steps)} steps for the names {listing(names)}; "
                    "give a dict of named steps, or set each by its name: chain['name'] = step"
                )
            names = names if self._named else [""] * len(steps)
            pairs[index] = zip(names, steps.values(), strict=True)
        elif isinstance(index, str) and self._named and index not in self._steps:
            pairs.append((index, _as_step(module, index, self._title())))
        else:
            at = self._position(index)
            pairs[at] = (pairs[at][0], _as_step(module, index, self._title()))
        self._refill(pairs)

    def __delitem__(self, index: int | slice | str) -> None:
        pairs = list(self._steps.items())
        del pairs[index if isinstance(index, slice) else self._position(index)]
        self._refill(pairs)

    def append(self, module: Any) -> Self:
        """Add a step at the end of a chain without names.

        Example:
            >>> chain = TensorDictSequential(TensorDictModule(torch.relu, "x", "y"))
            >>> chain.append(TensorDictModule(torch.exp, "y", "z")).out_keys
            ['y', 'z']
        """
        return self.extend([module])

    def extend(self, modules: Iterable[Any]) -> Self:
        """Add steps at the end of a chain without names.

        Example:
            >>> len(TensorDictSequential().extend([TensorDictModule(torch.relu, "x", "y")]))
            1
        """
        self[len(self) :] = list(modules)
        return self

    def insert(self, index: int, module: Any) -> Self:
        """Put a step in front of the one at ``index`` of a chain without names.

        Example:
            >>> chain = TensorDictSequential(TensorDictModule(torch.exp, "y", "z"))
            >>> chain.insert(0, TensorDictModule(torch.relu, "x", "y")).in_keys
            ['x']
        """
        self[index:index] = [module]
        return self

    def _position(self, index: int | str) -> int:
        names = list(self._steps)
        if isinstance(index, str):
            if self._named and index in names:
                return names.index(index)
            known = (
                f"{listing(names)}{hint(index, names)}" if self._named else "steps without names"
            )
            raise MissingKeyError(f"{self._title()} has no step {index!r}; it has {known}")
        at = range(len(names))[index] if -len(names) <= index < len(names) else None
        if at is None:
            raise IndexError(f"{self._title()} has no step {index}; it has {len(names)} steps")
        return at

    def _refill(self, pairs: Sequence[tuple[str, Step]]) -> None:
        """Hold exactly these steps, if the selection allows it."""
        steps = dict(pairs) if self._named else {str(at): s for at, (_, s) in enumerate(pairs)}
        if len(steps) < len(pairs):
            raise ValueError(f"{self._title()}: two steps have one name")
        written = keys_written(steps.values())
        lost = [key for key in self._selected or () if key not in written]
        if lost:
            raise ValueError(
                f"{self._title()}: no step would write {listing(lost)}, which is selected; "
                "call reset_out_keys() or select others first"
            )
        if any([self is part for step in steps.values() for part in step.modules()]):
            raise ValueError(f"{self._title()} cannot be a step of itself")
        checked = dict(_container(steps, self._named)._modules)
        self._steps.clear()
        self._steps.update(checked)
        self._keys_changed()

    def _with(self, steps: Steps) -> Self:
        """Return a chain of other steps that is like this one in all else but the selection."""
        new = self.__new__(type(self))
        nn.Module.__init__(new)
        new.__dict__.update({k: v for k, v in self.__dict__.items() if k not in new.__dict__})
        new.training = self.training
        new._parameters.update(self._parameters)
        new._buffers.update(self._buffers)
        new._modules.update(self._modules)
        new.module = _container(steps, self._named)
        new._selected = None
        new._keys_changed()
        return new

    # -- part of a chain -----------------------------------------------------------------------

    def select_subsequence(
        self,
        in_keys: Iterable[NestedKey] | None = None,
        out_keys: Iterable[NestedKey] | None = None,
    ) -> Self:
        """Return a chain of only those steps that can run from ``in_keys`` and ``out_keys`` need.

        First go the steps that read something that is neither among ``in_keys`` nor written by a
        step that stays before them; then those that write neither one of ``out_keys`` nor an
        input of a step that stays after them. Chains inside the chain are cut in the same way.

        Args:
            in_keys: what the steps can start from; None stands for all that they read.
            out_keys: what to compute; None stands for all that the chain writes, or selects.

        Returns:
            A chain of the same class and options, without a selection. It holds the same steps,
            not copies.

        Raises:
            ValueError: no step is left, some of ``out_keys`` cannot be computed, or a step does
                not say what it reads and writes.

        Example:
            >>> chain = TensorDictSequential(
            ...     TensorDictModule(torch.relu, "a", "b"),
            ...     TensorDictModule(torch.exp, "b", "c"),
            ...     TensorDictModule(torch.exp, "a", "d"),
            ... )
            >>> part = chain.select_subsequence(out_keys=["c"])
            >>> part.in_keys, part.out_keys, part[0] is chain[0]
            (['a'], ['b', 'c'], True)
        """
        steps = self._steps
        _refuse_unsaid(steps, self._title())
        have = self.in_keys if in_keys is None else _listed(in_keys, "in_keys", self._title())
        want = self._selected if out_keys is None else _listed(out_keys, "out_keys", self._title())
        if in_keys is not None:
            steps = _runnable(steps, list(have))
        if want is not None:
            written = keys_written(steps.values())
            lost = [key for key in want if not touches(key, [*written, *have])]
            if lost:
                raise self._unreachable(lost, have)
            steps = _needed(steps, list(want))
        if not steps:
            raise ValueError(
                f"{self._title()}: no step is left that runs from {listing(have)} and leads to "
                f"{listing(self.out_keys if want is None else want)}"
            )
        return self._with(steps)

    def _cut(self, steps: Steps) -> Self:
        """Return this chain with only some of its steps, itself if that is all of them.

        It stands in another chain, so it goes on hiding the outputs that it does not select.
        """
        if steps == self._steps:
            return self
        cut = self._with(steps)
        if self._selected is not None:
            written = keys_written(steps.values())
            cut._selected = tuple([key for key in self._selected if key in written])
        return cut

    def _unreachable(self, lost: list[NestedKey], have: list[NestedKey]) -> ValueError:
        names = [key for key in self.out_keys_source if isinstance(key, str)]
        near = ", ".join([f"{k!r}{hint(k, names) if isinstance(k, str) else ''}" for k in lost])
        return ValueError(
            f"{self._title()}: no step that runs from {listing(have)} writes {near}; "
            f"all out_keys are {listing(self.out_keys_source)}"
        )

    # -- words ---------------------------------------------------------------------------------

    def _title(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        parts = [f"{name}: {step!r}" for name, step in self._steps.items()]
        parts += [f"in_keys={self.in_keys!r}", f"out_keys={self.out_keys!r}"]
        if self.partial_tolerant:
            parts.append("partial_tolerant=True")
        if self._inplace is not None:
            parts.append(f"inplace={self._inplace!r}")
        return as_call(type(self).__name__, parts)


# -- making steps ------------------------------------------------------------------------------


def _as_steps(modules: tuple[Any, ...], who: str) -> tuple[Steps, bool]:
    """Return the steps of a chain by name, and whether the user gave the names."""
    if len(modules) == 1 and isinstance(modules[0], Mapping | nn.ModuleDict):
        named = modules[0].items()
        return {name: _as_step(module, name, who) for name, module in named}, True
    if len(modules) == 1 and isinstance(modules[0], list | tuple | nn.ModuleList):
        modules = tuple(modules[0])
    return {str(at): _as_step(module, at, who) for at, module in enumerate(modules)}, False


def _as_step(module: Any, at: int | str, who: str) -> Step:
    if TensorDictModuleBase.is_tdmodule_compatible(module):
        if isinstance(module, nn.Module):
            return module
        return WrapModule(module, in_keys=module.in_keys, out_keys=module.out_keys)
    if callable(module):
        return WrapModule(module)
    raise TypeError(
        f"{who}: step {at!r} is a module or a function of a tree, not {module!r}; "
        "give the steps one by one, as one list, or as one dict"
    )


def _container(steps: Steps, named: bool) -> nn.Module:
    return nn.ModuleDict(steps) if named else nn.ModuleList(steps.values())


def _reading(step: Step, tree: TensorDictBase) -> str:
    if isinstance(step, WrapModule) and isinstance(step.func, nn.Module) and not step._says_keys:
        return (
            f"{title(step)} took the whole tree, {in_words(tree)}; for tensors use "
            f"TensorDictModule({name_of(step.func)}, in_keys, out_keys)"
        )
    keys = reads(step) or list[NestedKey](tree._data)
    values = [tree.get(key) if key in tree else None for key in keys]
    return f"{title(step)} {inputs_in_words(keys, values)}"


# -- which keys --------------------------------------------------------------------------------


def _listed(keys: Iterable[NestedKey], what: str, who: str) -> list[NestedKey]:
    return normal_keys(keys if isinstance(keys, str | tuple) else list(keys), what, who)


def _refuse_unsaid(steps: Steps, who: str) -> None:
    """Raise if a step does not say what it reads and writes: nobody knows who needs it."""
    for name, step in steps.items():
        if isinstance(step, TensorDictSequential):
            _refuse_unsaid(step._steps, who)
        elif isinstance(step, WrapModule) and not step._says_keys:
            raise ValueError(
                f"{who}: cannot select steps, because step {name!r}, {title(step)}, does not say "
                "what it reads and writes; use WrapModule(func, in_keys=[...], out_keys=[...])"
            )


def _runnable(steps: Steps, have: list[NestedKey]) -> Steps:
    """Return the steps whose inputs are in ``have`` or written by a step before that stays."""
    kept: Steps = {}
    for name, step in steps.items():
        if isinstance(step, TensorDictSequential):
            inner = _runnable(step._steps, list(have))
            if inner:
                kept[name] = step._cut(inner)
        elif all([touches(key, have) for key in reads(step)]):
            kept[name] = step
        if name in kept:
            have += writes(kept[name])
    return kept


def _needed(steps: Steps, want: list[NestedKey]) -> Steps:
    """Return the steps that write one of ``want`` or an input of a step behind that stays."""
    kept: Steps = {}
    for name, step in reversed(steps.items()):
        wanted = [key for key in want if touches(key, writes(step))]
        if wanted:
            if isinstance(step, TensorDictSequential):
                kept[name] = step._cut(_needed(step._steps, wanted))
            else:
                kept[name] = step
            want += reads_at_most(kept[name])
    return dict(reversed(kept.items()))
