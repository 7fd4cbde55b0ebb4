"""One safetensors file: what comes back, how it is mapped and written, what is refused."""

import json
import os
import pickle
import stat
import sys
import threading
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import DTYPES, noise, picture, raw, round_trip
from strategies import DTYPES as SHARED
from strategies import trees
from torch import nn
from torch._subclasses import FakeTensorMode

from tdnn import TensorDict


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.safetensors"


# -- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_and_shape_comes_back_bit_by_bit(path, dtype, shape):
    tree = TensorDict({"a": noise(shape, dtype)})
    assert picture(round_trip(tree, path)) == picture(tree)


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d in safetensors.torch._TYPES.values()], ids=str
)
def test_any_reader_finds_the_tensors_under_dotted_names(path, dtype):
    tree = TensorDict({"a": {"b": noise((3, 2), dtype), "c": {"d": noise((0,), dtype)}}})
    tree.save(path)
    read = safetensors.torch.load_file(path)
    assert read.keys() == {"a.b", "a.c.d"}
    assert raw(read["a.b"]) == raw(tree["a", "b"])
    assert read["a.b"].dtype == dtype
    assert read["a.c.d"].shape == (0,)


def test_other_readers_find_complex128_as_pairs_of_floats(path):
    z = torch.randn(3, dtype=torch.complex128)
    TensorDict({"z": z}).save(path)
    assert torch.equal(safetensors.torch.load_file(path)["z"], torch.view_as_real(z))


@pytest.mark.parametrize(
    "source",
    [
        {"a.b": 1, "a": {"b": 2}},
        {"a": {"b": 1}, "a.b": 2, "a.b#2": 3},
        {"a.b#2": 1, "a": {"b": 2}, "a.b": 3, "a.b#3": 4},
        {"a": {"b": {"c": 1}, "b.c": 2}, "a.b": {"c": 3}, "a.b.c": 4},
        {"": 1, "x": {"": {"": 2}}, ".": 3, "..": 4},
        {"a/b": 1, "a": {"/": 2}, "ключ": {"鍵": 3}, "🔑": 4, "\n\0\x7f": 5, '"\\': 6},
        {"__metadata__": 1, "tdnn": 2, "tdnn.sha256": 3, "__metadata__#2": 4},
        {"\ud800": 1, "\\ud800": 2, "x": {"\udfff": 3}},
        {"z": 1, "a": 2, "m": {"z": 3, "a": 4}},
        {"empty": {}, "full": {"empty": {}, "x": 1}},
        {},
    ],
    ids=repr,
)
def test_any_str_keys_come_back_in_their_order(path, source):
    tree = TensorDict(source)
    assert picture(round_trip(tree, path)) == picture(tree)
    safetensors.torch.load_file(path)  # other readers open it as well


def test_batch_sizes_come_back_for_every_node(path):
    tree = TensorDict({"a": {"b": torch.zeros(3, 4, 5), "e": {}}, "c": torch.zeros(3)}, [3])
    tree["a"].batch_size = [3, 4]
    back = round_trip(tree, path)
    assert back.batch_size == (3,)
    assert back["a"].batch_size == (3, 4)
    assert back["a", "e"].batch_size == tree["a", "e"].batch_size


def test_names_of_dims_come_back(path):
    tree = TensorDict({"a": {"b": torch.zeros(3, 4)}}, [3, 4], names=["time", None])
    back = round_trip(tree, path)
    assert back.names == ["time", None]
    assert back["a"].names == ["time", None]


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::2],
        torch.arange(3.0).expand(4, 3),
        torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4)[1:, 2:],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "channels last", "part", "conjugate", "negative"],
)
def test_leaves_that_are_not_plain_memory_come_back_with_their_values(path, leaf):
    back = round_trip(TensorDict({"a": leaf}), path)["a"]
    assert torch.equal(back, leaf)
    assert back.is_contiguous()


def test_a_tie_is_stored_once_and_comes_back_as_one_tensor(path):
    w = torch.randn(1000)
    tree = TensorDict({"b": w, "a": {"w": w, "view": w.view(1000)}, "c": w.clone()})
    back = round_trip(tree, path)
    assert back["b"] is back["a", "w"] is back["a", "view"]
    assert back["c"] is not back["b"]
    assert safetensors.torch.load_file(path).keys() == {"b", "c"}
    assert path.stat().st_size < 3 * w.nbytes


def test_leaves_with_a_part_of_their_memory_in_common_come_back_apart(path):
    w = torch.arange(12.0).view(3, 4)
    tree = TensorDict({"w": w, "t": w.t(), "row": w[0], "bits": w.view(torch.int32)})
    back = round_trip(tree, path)
    for key, leaf in tree.items():
        assert torch.equal(back[key], leaf)
    assert len({leaf.data_ptr() for leaf in back.values()}) == 4


def test_tensors_without_elements_are_tied_only_if_they_are_one(path):
    e = torch.zeros(0)
    back = round_trip(TensorDict({"a": e, "b": e, "c": torch.zeros(0)}), path)
    assert back["a"] is back["b"]
    assert back["a"] is not back["c"]


def test_parameters_come_back_as_plain_tensors_without_grad(path):
    net = nn.Linear(2, 3)
    tree = TensorDict({"w": net.weight, "r": torch.ones(1, requires_grad=True)})
    back = round_trip(tree, path)
    assert type(back["w"]) is torch.Tensor
    assert torch.equal(back["w"], net.weight)
    assert not back["w"].requires_grad
    assert not back["r"].requires_grad


def test_a_loaded_tree_is_unlocked_and_the_saved_one_stays_locked(path):
    tree = TensorDict({"a": {"b": 1}}, lock=True)
    back = round_trip(tree, path)
    assert tree.is_locked
    assert not back.is_locked
    back["a", "c"] = 2
    assert list(back["a"].keys()) == ["b", "c"]


def test_load_gives_the_class_that_it_is_called_on(path):
    class Mine(TensorDict):
        __slots__ = ()

    TensorDict({"a": {"b": 1}}).save(path)
    back = Mine.load(path)
    assert type(back) is Mine
    assert type(back["a"]) is Mine


def test_a_tree_without_a_device_has_none_after_loading_and_one_with_has_the_cpu(path):
    assert round_trip(TensorDict({"a": 1}), path).device is None
    back = round_trip(TensorDict({"a": {"b": 1}}, device="cpu"), path)
    assert back.device == torch.device("cpu")
    assert back["a"].device == torch.device("cpu")


def test_device_moves_every_leaf_and_keeps_ties(path):
    w = torch.randn(3)
    back = round_trip(TensorDict({"a": {"w": w}, "v": w}), path, device="meta")
    assert back.device == back["a"].device == back["v"].device == torch.device("meta")
    assert back["a", "w"] is back["v"]


def test_loading_ignores_the_default_device_and_dtype(path):
    TensorDict({"a": torch.ones(2), "e": torch.zeros(0)}).save(path)
    with torch.device("meta"):
        back = TensorDict.load(path)
    assert {leaf.device.type for leaf in back.values()} == {"cpu"}
    assert torch.equal(back["a"], torch.ones(2))


def test_a_path_may_be_a_str_or_a_path_and_relative(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    TensorDict({"a": 1}).save(path.name)
    assert TensorDict.load(path)["a"] == TensorDict.load(path.name)["a"] == 1
    assert TensorDict.load(prefix=path.name)["a"] == 1


def test_a_loaded_tree_traces(path):
    back = round_trip(TensorDict({"a": {"b": torch.randn(3)}}, [3]), path)

    def double(tree):
        return tree["a", "b"] * 2

    traced = torch.compile(double, fullgraph=True, backend="eager")
    assert torch.equal(traced(back), double(back))


# -- random trees --------------------------------------------------------------------------------

KEYS = st.one_of(
    st.sampled_from(["a", "b", "a.b", "a.b#2", "", ".", "a/b", "__metadata__", "tdnn", "\ud800"]),
    st.text(max_size=5),
)
TREES = st.booleans().flatmap(
    lambda names: trees(keys=KEYS, names=names, dtypes=(*SHARED, torch.bfloat16, torch.complex128))
)


@given(TREES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_random_tree_comes_back_whole(tmp_path, tree):
    path = tmp_path / "t"
    assert picture(round_trip(tree, path)) == picture(tree)
    assert picture(round_trip(TensorDict.load(path), path)) == picture(tree)


# -- the map -------------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def mapped(path):
    """The ranges of memory that are a map of ``path``."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    here = [line[0].split("-") for line in lines if line[-1].strip() == str(path)]
    return [range(int(low, 16), int(high, 16)) for low, high in here]


def resident():
    """The memory of this process that is not swapped out, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@on_linux
def test_leaves_lie_in_a_map_of_the_file(path):
    back = round_trip(TensorDict({"a": {"b": torch.ones(5)}, "c": torch.ones(3) > 0}), path)
    for leaf in (back["a", "b"], back["c"]):
        assert any(leaf.data_ptr() in part for part in mapped(path))


@on_linux
def test_loading_reads_only_the_leaves_that_are_used(path):
    size = 50 << 20
    TensorDict({"a": torch.ones(size, dtype=torch.uint8), "b": torch.ones(size // 4)}).save(path)
    before = resident()
    back = TensorDict.load(path)
    assert resident() - before < size / 10
    assert back["a"].max() == 1
    assert size / 2 < resident() - before < 1.5 * size


def test_writing_to_a_loaded_leaf_does_not_reach_the_file(path):
    back = round_trip(TensorDict({"a": torch.ones(3)}), path)
    before = path.read_bytes()
    back["a"].fill_(7)
    assert path.read_bytes() == before
    assert torch.equal(TensorDict.load(path)["a"], torch.ones(3))
    assert torch.equal(back["a"], torch.full((3,), 7.0))


def test_a_tree_can_be_saved_over_the_file_that_it_is_mapped_from(path):
    first = round_trip(TensorDict({"a": torch.arange(1000.0), "b": torch.ones(7)}), path)
    second = round_trip(first, path)
    TensorDict({"a": torch.zeros(3)}).save(path)
    for tree in (first, second):
        assert torch.equal(tree["a"], torch.arange(1000.0))
        assert torch.equal(tree["b"], torch.ones(7))


def test_a_loaded_leaf_is_pickled_without_the_rest_of_the_file(path):
    back = round_trip(TensorDict({"big": torch.ones(100_000), "small": torch.ones(2)}), path)
    assert back["small"].untyped_storage().nbytes() == 8
    assert len(pickle.dumps(back["small"])) < 10_000


def test_leaves_outlive_the_tree_and_the_file(path):
    leaf = round_trip(TensorDict({"a": torch.arange(5000)}), path)["a"]
    path.unlink()
    assert torch.equal(leaf, torch.arange(5000))


# -- writing is atomic ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("os.fsync", OSError("no space left on device")),
        ("os.replace", OSError("busy")),
        ("zlib.crc32", KeyboardInterrupt()),
    ],
)
def test_an_error_leaves_the_old_file_and_nothing_else(path, monkeypatch, broken, error):
    TensorDict({"a": 1}).save(path)
    before = path.read_bytes()

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(type(error)):
            TensorDict({"a": torch.ones(9)}).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_reader_during_a_save_sees_the_old_file(path, monkeypatch):
    TensorDict({"a": 1}).save(path)
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(TensorDict.load(path)), fsync(fd)))
    TensorDict({"a": 2}).save(path)
    assert [tree["a"].item() for tree in seen] == [1]
    assert TensorDict.load(path)["a"] == 2


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")
def test_the_umask_decides_who_may_read_a_new_file_and_an_old_one_keeps_its_mode(path):
    old = os.umask(0o027)
    try:
        TensorDict({"a": 1}).save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        TensorDict({"a": 2}).save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_stays_a_link_to_the_new_file(path):
    link = path.parent / "link"
    link.symlink_to(path)
    TensorDict({"a": 1}).save(link)
    assert link.is_symlink()
    assert TensorDict.load(path)["a"] == 1


def test_a_directory_is_neither_written_nor_read(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"save\(\) writes one file, and this is a dir"):
        TensorDict({"a": 1}).save(tmp_path)
    with pytest.raises(IsADirectoryError, match=r"load\(\) reads one file, and this is a dir"):
        TensorDict.load(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="pipes are POSIX")
def test_a_pipe_is_neither_written_nor_read(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="device or a pipe"):
        TensorDict({"a": 1}).save(path)
    with pytest.raises(OSError, match="device or a pipe"):
        TensorDict.load(path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        TensorDict.load(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"no directory to save into: '.*gone'"):
        TensorDict({"a": 1}).save(tmp_path / "gone" / "t")


@pytest.mark.parametrize("wrong", [3, None, open], ids=repr)
def test_what_is_not_a_path_is_refused(wrong):
    with pytest.raises(TypeError, match=r"expected str, bytes or os.PathLike object"):
        TensorDict({"a": 1}).save(wrong)
    with pytest.raises(TypeError, match=r"expected str, bytes or os.PathLike object"):
        TensorDict.load(wrong)


def test_arguments_for_other_formats_are_refused_and_not_ignored(path):
    with pytest.raises(TypeError, match="archive"):
        TensorDict({"a": 1}).save(path, archive=True)
    with pytest.raises(TypeError, match="allow_pickle"):
        TensorDict.load(path, allow_pickle=True)
    assert not path.exists()


# -- what cannot be stored -----------------------------------------------------------------------


def unstorable():
    with FakeTensorMode():
        fake = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized and nested tensors are old or in the making
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return {
        "fake": (fake, "FakeTensor"),
        "sparse": (torch.eye(3).to_sparse(), "sparse_coo"),
        "quantized": (quantized, "qint8"),
        "nested": (nested, "nested"),
        "jagged": (jagged, "jagged"),
        "meta": (torch.ones(3, device="meta"), "meta device"),
        "lazy": (nn.LazyLinear(3).weight, "uninitialised"),
        "int4": (torch.empty(3, dtype=torch.int4), "int4"),
    }


@pytest.mark.parametrize("kind", unstorable())
def test_a_leaf_that_would_not_come_back_is_refused_by_its_key(path, kind):
    leaf, why = unstorable()[kind]
    with pytest.raises(ValueError, match=rf"would not come back: \('x', 'y'\) is .*{why}"):
        TensorDict({"x": {"y": leaf}}).save(path)
    assert not os.listdir(path.parent)


def test_all_leaves_that_would_not_come_back_are_listed(path):
    leaves = {key: leaf for key, (leaf, _) in unstorable().items()}
    with pytest.raises(ValueError, match="cannot save") as error:
        TensorDict({"fine": 1, **leaves}).save(path)
    for key in leaves:
        assert repr(key) in str(error.value)
    assert "'fine'" not in str(error.value)


def test_a_leaf_that_was_reshaped_behind_the_back_of_its_tree_is_refused(path):
    leaf = torch.ones(3)
    tree = TensorDict({"a": {"b": leaf}}, [3])
    leaf.unsqueeze_(0)
    with pytest.raises(ValueError, match=r"\('a', 'b'\) has shape \(1, 3\) in batch size \(3,\)"):
        tree.save(path)


def test_saving_inside_a_transform_is_refused(path):
    def save(x):
        TensorDict({"x": x}).save(path)
        return x

    with pytest.raises(ValueError, match="'x' has no values now"):
        torch.vmap(save)(torch.ones(2, 3))


def test_a_header_longer_than_the_format_allows_is_refused(path, monkeypatch):
    monkeypatch.setattr("tdnn.io.safetensors._LONGEST_HEADER", 500)
    with pytest.raises(ValueError, match=r"header of 9 tensors has .* format allows 500"):
        TensorDict({str(i): i for i in range(9)}).save(path)
    assert not os.listdir(path.parent)


# -- the format stays readable -------------------------------------------------------------------


def one_of_everything():
    w = torch.arange(6.0).view(2, 3)
    tree = TensorDict(
        {
            "layer": {"weight": w, "empty": {}},
            "layer.weight": w.double() * 1j,
            "tied": w,
            "mask": w > 2,
        },
        [2],
        names=["time"],
    )
    tree["layer"].batch_size = [2, 3]
    return tree


def test_a_file_of_version_1_is_read():
    file = Path(__file__).parent / "files" / "version_1.safetensors"
    assert picture(TensorDict.load(file, verify=True)) == picture(one_of_everything())


def test_a_key_that_json_would_change_is_refused(tmp_path):
    halves = "\ud83d\ude00"
    for tree in (TensorDict({"a": {halves: 1}}), TensorDict({"a": {halves: {}}})):
        with pytest.raises(ValueError, match=r"two halves of a character, which JSON joins"):
            tree.save(tmp_path / "tree.safetensors")
    assert not list(tmp_path.iterdir())
    for key in ("\ud83d", "😀", "\ude00\ud83d"):
        TensorDict({key: 1}).save(tmp_path / "tree.safetensors")
        assert list(TensorDict.load(tmp_path / "tree.safetensors").keys()) == [key]


def test_what_is_saved_while_a_thread_writes_to_it_can_be_loaded(tmp_path):
    tree = TensorDict({"w": torch.zeros(2_000_000)})
    stop = threading.Event()

    def train():
        while not stop.is_set():
            tree["w"].add_(1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            tree.save(tmp_path / "tree.safetensors")
            assert TensorDict.load(tmp_path / "tree.safetensors")["w"].shape == (2_000_000,)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("size", [0, 8])
def test_a_leaf_whose_storage_is_too_short_is_refused(tmp_path, size):
    leaf = torch.ones(6)
    leaf.untyped_storage().resize_(size)
    with pytest.raises(ValueError, match="'a' has a storage that was freed or made shorter than"):
        TensorDict({"a": leaf}).save(tmp_path / "tree.safetensors")
    view = torch.arange(12.0).view(3, 4)[1:, ::2]
    TensorDict({"a": view}).save(tmp_path / "tree.safetensors")
    assert torch.equal(TensorDict.load(tmp_path / "tree.safetensors")["a"], view)


def test_four_bit_floats_of_other_programs_are_read_two_in_a_byte(path):
    data = bytes(range(6))
    entry = {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]}
    header = json.dumps({"w": entry}).encode().ljust(64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    leaf = TensorDict.load(path)["w"]
    assert (leaf.shape, leaf.dtype) == ((3, 2), torch.float4_e2m1fn_x2)
    assert bytes(leaf.view(torch.uint8).flatten().tolist()) == data
