"""Views of a tree, flat and nested, and what a block on one leaves behind."""

import pytest
import torch
from hypothesis import given
from strategies import flat, trees
from torch import nn
from torch._dynamo.testing import CompileCounter

from tdnn import TensorDict
from tdnn.errors import KeyConflictError, LockedError
from tdnn.nn import TensorDictParams


def make():
    return TensorDict({"0": {"weight": 1, "bias": 2}, "head": {"out": {"w": 3}}})


def picture(td):
    """Return all that a failed block must not change: nodes and leaves by identity, in order."""
    found = [(id(td), td.batch_size, td.names, td.is_locked)]
    for key, value in td.items():
        found += [key, id(value)]
        if isinstance(value, TensorDict):
            found += picture(value)
    return found


def through(td, change, method="flatten_keys", inplace=False):
    """Make a change in a block on a view."""
    with getattr(td, method)(".", inplace) as view:
        change(view)


# -- the views themselves --------------------------------------------------------------------------


@given(trees())
def test_a_flat_view_has_each_leaf_under_its_joined_name(td):
    leaves = flat(td)
    names = ["/".join(path) for path in leaves]
    view = td.flatten_keys("/")
    assert list(view.keys()) == names
    assert all(view.get("/".join(path)) is leaf for path, leaf in leaves.items())
    assert view.batch_size == td.batch_size
    again = view.unflatten_keys("/")
    assert flat(again).keys() == leaves.keys()
    assert all(again[path] is leaf for path, leaf in leaves.items())


def test_a_nested_view_splits_keys_at_the_separator_only():
    td = TensorDict({"a__b__c": 1, "a__d": 2, "e.f": 3, "g": {"h__i": 4}})
    view = td.unflatten_keys("__")
    assert list(flat(view)) == [("a", "b", "c"), ("a", "d"), ("e.f",), ("g", "h__i")]


def test_empty_parts_of_a_name_are_keys():
    td = TensorDict({".a": 1, "b.": 2, "c..d": 3})
    view = td.unflatten_keys()
    assert list(flat(view)) == [("", "a"), ("b", ""), ("c", "", "d")]
    assert list(view.flatten_keys().keys()) == [".a", "b.", "c..d"]


def test_split_keys_join_a_branch_that_is_there():
    td = TensorDict({"a.b": 1, "a": {"c": 2}})
    assert td.unflatten_keys().to_dict() == {"a": {"b": 1, "c": 2}}
    assert TensorDict({"a": {}, "a.b": 1}).unflatten_keys().to_dict() == {"a": {"b": 1}}


def test_views_do_not_touch_the_tree():
    td = make()
    before = picture(td)
    td.flatten_keys().pop("0.bias")
    td.unflatten_keys("h").set(("", "ead"), torch.ones(()))
    assert picture(td) == before


def test_inplace_without_a_block_changes_the_tree_for_good():
    td = make()
    assert td.flatten_keys(inplace=True) is td
    assert list(td.keys()) == ["0.weight", "0.bias", "head.out.w"]
    assert td.unflatten_keys(inplace=True) is td
    assert list(flat(td)) == list(flat(make()))


def test_branches_keep_their_further_batch_dims_in_a_nested_view():
    td = TensorDict({"a": TensorDict({"x": torch.zeros(3, 2)}, [3, 2]), "b.c": torch.ones(3)}, [3])
    view = td.unflatten_keys()
    assert view["a"].batch_size == (3, 2)
    assert view["b"].batch_size == (3,)


def test_is_leaf_keeps_branches_whole():
    class Whole(TensorDict):
        __slots__ = ()

    td = TensorDict({"a": {"w": Whole({"x": 1})}})
    view = td.flatten_keys(is_leaf=lambda kind: kind is Whole)
    assert list(view.keys()) == ["a.w"]
    assert view["a.w"] is td["a", "w"]
    with td.flatten_keys(is_leaf=lambda kind: kind is Whole) as view:
        view.rename_key_("a.w", "b.v")
    assert isinstance(td["b", "v"], Whole)


# -- refusals on entry -----------------------------------------------------------------------------


def test_leaves_that_would_share_a_flat_name_are_named_all():
    td = TensorDict({"a.b": 1, "a": {"b": 2}, "c": {"d": 3}, "c.d": 4})
    with pytest.raises(KeyConflictError, match=r"would both be 'a\.b'") as error:
        td.flatten_keys()
    assert "'a.b' and ('a', 'b')" in str(error.value)
    assert "('c', 'd') and 'c.d' would both be 'c.d'" in str(error.value)
    assert list(td.flatten_keys("/").keys()) == ["a.b", "a/b", "c/d", "c.d"]


def test_leaves_that_would_share_a_nested_key_are_both_named():
    td = TensorDict({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(
        KeyConflictError, match=r"'a.b' and \('a', 'b'\) would both be \('a', 'b'\)"
    ):
        td.unflatten_keys()


@pytest.mark.parametrize("source", [{"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}])
def test_a_key_that_would_be_a_leaf_and_a_branch_is_refused(source):
    with pytest.raises(KeyConflictError, match=r"'a\.b' needs a branch where 'a' is an entry"):
        TensorDict(source).unflatten_keys()


@pytest.mark.parametrize("method", ["flatten_keys", "unflatten_keys"])
def test_a_separator_is_a_str(method):
    with pytest.raises(TypeError, match="a separator is a str, not 5"):
        getattr(make(), method)(5)


def test_no_key_is_split_at_nothing():
    assert list(make().flatten_keys("").keys()) == ["0weight", "0bias", "headoutw"]
    with pytest.raises(ValueError, match="at least one character"):
        make().unflatten_keys("")


def test_a_view_is_entered_once():
    view = make().flatten_keys()
    with view:
        pass
    with pytest.raises(RuntimeError, match="each call serves one block"), view:
        pass


@pytest.mark.parametrize("change", ["tree", "view"])
def test_a_view_that_is_out_of_date_cannot_be_entered(change):
    td = make()
    view = td.flatten_keys()
    (td if change == "tree" else view).set("new", torch.ones(()))
    with pytest.raises(RuntimeError, match="changed since the view was made"), view:
        pass


@pytest.mark.parametrize("method", ["flatten_keys", "unflatten_keys"])
def test_a_locked_tree_is_not_changed_in_place(method):
    td = make().lock_()
    before = picture(td)
    with pytest.raises(LockedError, match=r"cannot (un)?flatten the tree: the tree is locked"):
        getattr(td, method)(inplace=True)
    assert picture(td) == before


# -- what a block leaves ---------------------------------------------------------------------------


def test_a_flat_block_writes_back_what_the_view_shows():
    td = make()
    zero, head, weight, new = td["0"], td["head"], td["0", "weight"], torch.ones(())
    with td.flatten_keys(".") as view:
        view.rename_key_("0.weight", "stem.weight")
        view["head.out.b"] = new
        del view["head.out.w"]
    assert list(flat(td)) == [("0", "bias"), ("head", "out", "b"), ("stem", "weight")]
    assert td["stem", "weight"] is weight
    assert td["head", "out", "b"] is new
    assert td["0"] is zero
    assert td["head"] is head


def test_the_separator_by_keyword_counts_like_the_one_by_position():
    one, other = make(), make()
    with one.flatten_keys("/") as view:
        view["x/y"] = torch.ones(())
    with other.flatten_keys(separator="/") as view:
        view["x/y"] = torch.ones(())
    assert list(flat(one)) == list(flat(other))
    assert ("x", "y") in flat(one)


def test_untouched_names_return_to_keys_that_contain_the_separator():
    td = TensorDict({"a.b": {"c.d": 1}, "e": {"f": 2}})
    inner = td["a.b"]
    with td.flatten_keys(".") as view:
        view["a.b.x"] = torch.ones(())
        view["e.f"] = torch.zeros(())
    assert list(flat(td)) == [("a.b", "c.d"), ("e", "f"), ("a", "b", "x")]
    assert td["a.b"] is inner


@pytest.mark.parametrize("inplace", [False, True])
def test_branches_that_a_flat_view_does_not_show_stay(inplace):
    td = TensorDict({"a": {"x": 1, "hidden": {"deep": {}}}, "b": {"y": 2}, "e": {}})
    a, hidden, e = td["a"], td["a", "hidden", "deep"], td["e"]
    with td.flatten_keys(".", inplace) as view:
        del view["a.x"]
        del view["b.y"]
    assert td["a"] is a
    assert td["a", "hidden", "deep"] is hidden
    assert td["e"] is e
    assert list(td.keys(True)) == [("a", "hidden", "deep"), ("a", "hidden"), "a", "e"]


@pytest.mark.parametrize("inplace", [False, True])
def test_empty_branches_come_through_a_nested_view(inplace):
    td = TensorDict({"a.b": 1, "e.f": {}, "g": {}, "g.h": 2})
    kept = td["e.f"], td["g"]
    with td.unflatten_keys(".", inplace) as view:
        assert list(view["e", "f"].keys()) == []
        view["a", "c"] = torch.ones(())
    assert list(td.keys()) == ["a.b", "e.f", "g", "g.h", "a.c"]
    assert td["e.f"] is kept[0]
    assert td["g"] is kept[1]


def test_a_branch_under_two_keys_loses_nothing_when_one_of_them_changes():
    shared = TensorDict({"x": 1, "y": 2})
    td = TensorDict({"a": shared, "b": shared, "c": shared})
    with td.flatten_keys() as view:
        del view["b.x"]
        del view["c.x"]
        del view["c.y"]
    assert td.to_dict() == {"a": {"x": 1, "y": 2}, "b": {"y": 2}}
    assert td["a"] is shared


def test_a_whole_branch_set_in_a_flat_view_keeps_its_batch_size_and_names():
    td = TensorDict({"a": torch.zeros(3)}, [3])
    with td.flatten_keys() as view:
        view["deep.new"] = TensorDict({"x": torch.ones(3, 2)}, [3, 2], names=["t", "u"])
        view["b"] = {"c": {"d": torch.ones(3)}, "e": {}}
    assert td["deep", "new"].batch_size == (3, 2)
    assert td["deep", "new"].names == ["t", "u"]
    assert td["deep"].batch_size == (3,)
    assert td["b", "e"].batch_size == (3,)
    assert td["b", "c"].batch_size == (3,)


def test_views_of_views_write_back_one_after_the_other():
    td = make()
    with td.flatten_keys(".") as dotted, dotted.unflatten_keys(".") as nested:
        nested["head", "out", "b"] = torch.ones(())
        with nested.flatten_keys("_") as scored:
            scored.rename_key_("0_bias", "0_shift")
        assert ("0", "shift") in nested
        assert "0.shift" not in dotted
    assert list(flat(td)) == [
        ("0", "weight"),
        ("0", "shift"),
        ("head", "out", "w"),
        ("head", "out", "b"),
    ]


def test_blocks_in_place_nest():
    td = make()
    head = td["head"]
    with td.flatten_keys(".", inplace=True) as one:
        with one.unflatten_keys("e", inplace=True) as other:
            assert one is other is td
            assert ("h", "ad.out.w") in td
            td["h", "x"] = torch.ones(())
        assert "hex" in td
        td.rename_key_("hex", "head.x")
    assert list(td["head"].keys()) == ["out", "x"]
    assert td["head"] is head


def test_an_edit_in_place_is_followed_by_a_lock_that_holds_every_branch():
    td = make()
    with td.flatten_keys(inplace=True):
        td["0.new"] = torch.ones(())
        td.lock_()
    assert ("0", "new") in td
    assert td.is_locked
    assert td["head", "out"].is_locked
    assert not td.unlock_()["head", "out"].is_locked


# -- all or nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("method", ["flatten_keys", "unflatten_keys"])
def test_an_exception_leaves_everything_as_it_was(method, inplace):
    td = make()
    before = picture(td)

    def fail(view):
        view["new"] = torch.ones(())
        view.pop(next(iter(view.keys())))
        view.set(("q", "r"), torch.ones(()))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        through(td, fail, method, inplace=inplace)
    assert picture(td) == before


@pytest.mark.parametrize("inplace", [False, True])
def test_a_value_that_does_not_fit_its_branch_is_refused_at_the_end(inplace):
    td = TensorDict({"a": TensorDict({"x": torch.zeros(3, 2)}, [3, 2]), "b": torch.ones(3)}, [3])
    before = picture(td)

    def misfit(view):
        del view["b"]
        view["a.y"] = torch.zeros(3, 4)

    with pytest.raises(ValueError, match=r"'y'\): shape \(3, 4\) does not begin .* \(3, 2\)"):
        through(td, misfit, inplace=inplace)
    assert picture(td) == before


@pytest.mark.parametrize("inplace", [False, True])
def test_names_that_cannot_stand_together_are_refused_at_the_end(inplace):
    td = make()
    before = picture(td)

    def both(view):
        del view["0.weight"]
        view["0"] = torch.ones(())

    with pytest.raises(KeyConflictError, match=r"'0\.bias' needs a branch where '0' is an entry"):
        through(td, both, inplace=inplace)
    assert picture(td) == before

    def twice(view):
        view["0", "bias"] = torch.ones(())

    with pytest.raises(KeyConflictError, match=r"'0\.bias' and \('0', 'bias'\) would both be"):
        through(td, twice, inplace=inplace)
    assert picture(td) == before


def test_a_tree_that_changed_under_its_view_is_not_overwritten():
    td, new = make(), torch.zeros(())

    def change_both(view):
        view["x"] = torch.ones(())
        td["y"] = new

    with pytest.raises(RuntimeError, match="was changed while a view of it was open"):
        through(td, change_both)
    assert td["y"] is new
    assert "x" not in td


def test_two_views_at_once_do_not_overwrite_each_other():
    td = make()

    def change_both(view):
        view["x"] = torch.ones(())
        through(td, lambda other: other.set("y", torch.ones(())))

    with pytest.raises(RuntimeError, match="was changed while a view of it was open"):
        through(td, change_both)
    assert "y" in td
    assert "x" not in td


# -- locks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["flatten_keys", "unflatten_keys"])
def test_a_view_of_a_locked_tree_refuses_the_edit_where_it_is_made(method):
    td = make().lock_()
    before = picture(td)
    with getattr(td, method)() as view:
        with pytest.raises(LockedError, match="cannot set 'x'"):
            view["x"] = torch.ones(())
        with pytest.raises(LockedError, match="cannot rename"):
            view.rename_key_(next(iter(view.keys())), "z")
        with pytest.raises(LockedError, match="cannot delete"):
            del view[next(iter(view.keys()))]
        view.zero_()
    assert picture(td) == before
    assert td["0", "weight"] == 0


def test_an_unlocked_view_of_a_locked_tree_cannot_write_back():
    td = make().lock_()
    before = picture(td)
    with pytest.raises(LockedError, match="cannot write the view back"):
        through(td, lambda view: view.unlock_().set("x", torch.ones(())))
    assert picture(td) == before


def test_a_locked_branch_keeps_the_whole_view_from_being_written_back():
    td = make()
    td["head"].lock_()
    before = picture(td)
    with pytest.raises(LockedError, match="cannot write the view back"):
        through(td, lambda view: view.del_("0.weight").set("head.out.b", torch.ones(())))
    assert picture(td) == before
    with td.flatten_keys() as view:
        del view["0.weight"]
    assert list(flat(td)) == [("0", "bias"), ("head", "out", "w")]


def test_unlock_and_a_view_in_one_line():
    td = make().lock_()
    with td.unlock_(), td.flatten_keys() as view:
        view["x.y"] = torch.ones(())
    assert td.is_locked
    assert td["x"].is_locked


# -- the trees of modules --------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_parameters_keep_identity_through_a_view():
    module = net()
    params = TensorDict.from_module(module)
    with params.flatten_keys(".") as view:
        assert set(view.keys()) == set(module.state_dict())
        view.rename_key_("0.weight", "stem.weight")
        view.rename_key_("0.bias", "stem.bias")
    assert params["stem", "weight"] is module[0].weight
    assert "0" not in params
    assert params["1", "running_mean"] is module[1].running_mean


@pytest.mark.parametrize("inplace", [False, True])
def test_a_tree_that_is_a_module_follows_its_view(inplace):
    params = TensorDictParams(TensorDict.from_module(net()))
    branch, weight = params["2"], params["0", "weight"]
    new = torch.ones(2)
    with params.flatten_keys(".", inplace) as view:
        view.rename_key_("0.weight", "stem.weight")
        view["2.extra"] = new
        del view["0.bias"]
    names = dict(params.named_parameters())
    assert names["stem.weight"] is weight
    assert isinstance(names["2.extra"], nn.Parameter)
    assert "0.bias" not in names
    assert params["2"] is branch
    assert isinstance(params["stem"], TensorDictParams)


def test_a_failed_block_leaves_a_tree_that_is_a_module_as_it_was():
    params = TensorDictParams(TensorDict.from_module(net()))
    before = [(name, id(p)) for name, p in params.named_parameters()]

    def fail(view):
        view.del_("0.bias").set("x", torch.ones(1))
        raise ZeroDivisionError

    for inplace in (False, True):
        with pytest.raises(ZeroDivisionError):
            through(params, fail, inplace=inplace)
        assert [(name, id(p)) for name, p in params.named_parameters()] == before


# -- compiled --------------------------------------------------------------------------------------


def renamed(params, x):
    with params.flatten_keys(".") as view:
        view.rename_key_("a.w", "b.w")
        view["c.new"] = view["b.w"] * x
        with view.unflatten_keys(".") as nested:
            del nested["a", "v"]
    return params


def two(scale=1.0):
    return TensorDict({"a": {"w": torch.ones(3) * scale, "v": torch.ones(2)}, "e": {"k": 0.0}})


def test_a_lens_traces_without_a_second_compilation():
    counter = CompileCounter()
    compiled = torch.compile(renamed, fullgraph=True, backend=counter)
    for scale in (1.0, 2.0, 3.0):
        params, x = two(scale), torch.rand(3)
        expected = renamed(params.clone(), x)
        result = compiled(params, x)
        assert list(flat(result)) == list(flat(expected))
        assert torch.equal(result["c", "new"], expected["c", "new"])
        assert result is params
    assert counter.frame_count == 1


def test_a_lens_compiles_with_inductor():
    params, x = two(), torch.rand(3)
    expected = renamed(params.clone(), x)
    result = torch.compile(renamed, fullgraph=True)(params, x)
    assert torch.equal(result["c", "new"], expected["c", "new"])


@pytest.mark.parametrize("inplace", [False, True])
def test_an_entry_fits_the_batch_size_that_the_view_declares(inplace):
    td = TensorDict({"a": {"b": torch.ones(2, 3)}}, [2], names=["time"])
    with td.flatten_keys(".", inplace=inplace) as flat:
        flat.batch_size = []
        flat["z"] = torch.ones(5)
    assert (td.batch_size, td.names, td["a"].batch_size) == ((), [], (2,))
    assert list(td.keys(True, True)) == [("a", "b"), "z"]
    before = td.to_dict()
    with (
        pytest.raises(ValueError, match=r"'a', 'y'\): shape \(5,\) does not begin with the batch"),
        td.flatten_keys(".", inplace=inplace) as flat,
    ):
        flat["a.y"] = torch.ones(5)
    assert td.batch_size == ()
    assert td.to_dict() == before


@pytest.mark.parametrize("inplace", [False, True])
def test_a_batch_size_or_names_that_the_view_declares_are_the_trees(inplace):
    td = TensorDict({"a": {"b": torch.ones(2, 3)}}, [2])
    with td.flatten_keys(".", inplace=inplace) as flat:
        flat.batch_size = [2, 3]
        flat.names = ["time", None]
    assert td.batch_size == td["a"].batch_size == (2, 3)
    assert td.names == ["time", None]
    td = TensorDict({"a.b": torch.ones(2, 3)}, [2])
    with td.unflatten_keys(".", inplace=inplace) as nested:
        nested.names = ["time"]
    assert td.names == ["time"]
