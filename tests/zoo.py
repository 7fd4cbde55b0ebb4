"""One of each kind of module that a swap must serve, and what it means to leave one exact."""

import copy
import threading
import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tdnn import TensorDict

DTYPE = torch.float64


class Tied(nn.Module):
    """One parameter in two modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class TwoNames(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x):
        return self.again(torch.tanh(self.first(x)))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.dict = nn.ParameterDict({"one": torch.randn(4), "other": torch.randn(4)})

    def forward(self, x):
        return x * self.list[0] + self.list[1] * self.dict["one"] - self.dict["other"]


class Sparse(nn.Module):
    """Slots that hold None, a buffer outside the state dict, and parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.register_parameter("bias", None)
        self.register_buffer("mask", None)
        self.register_buffer("offset", torch.randn(4), persistent=False)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.child = None
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.inner(x) * self.scale + self.offset + self.frozen
        return y if self.bias is None and self.mask is None else y * 0


class Counter(nn.Module):
    """Does to its buffer what a test says."""

    def __init__(self, act=lambda self: None):
        super().__init__()
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.act = act

    def forward(self, x):
        self.act(self)
        return x


def rebind(net):
    net.calls = net.calls + 1


def stop(net, x):
    net(x)
    raise ZeroDivisionError


class Caching(nn.Module):
    """Keeps what is set in a plain attribute as well, and computes with that."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["cached"] = value

    def forward(self, x):
        return x @ self.cached


class Recording(nn.Module):
    """Counts what is set, by name."""

    def __init__(self):
        super().__init__()
        self.__dict__["seen"] = []
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("shift", torch.randn(4))

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        self.__dict__.setdefault("seen", []).append(name)

    def forward(self, x):
        return x * self.weight + self.shift


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 3)

    def forward(self, x):
        return self.layer(x, x * 2)


class Attention(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True, **kwargs)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class Whole(nn.Module):
    """A whole transformer, whose source and target are one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x, x)


class Parallel(nn.Module):
    """A wrapper of the kind of DistributedDataParallel."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def normed(norm, module):
    return getattr(parametrizations, norm)(module)


def half_precision_free(net):
    """Return the net in float64, so that equal means equal."""
    return net.to(DTYPE)


def resnet():
    torchvision = __import__("torchvision")
    return torchvision.models.resnet18(num_classes=3)


def points(*shape):
    return lambda: torch.randn(*shape, dtype=DTYPE)


# Of each: how to make it, an input for it.
KINDS = {
    "linear": (lambda: nn.Linear(4, 3), points(2, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3), points(2, 2, 5, 5)),
    "transposed conv": (lambda: nn.ConvTranspose1d(2, 3, 3), points(2, 2, 5)),
    "bilinear": (Bilinear, points(2, 4)),
    "batch norm": (lambda: nn.BatchNorm1d(4), points(6, 4)),
    "batch norm without momentum": (lambda: nn.BatchNorm1d(4, momentum=None), points(6, 4)),
    "batch norm without statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        points(6, 4),
    ),
    "instance norm": (
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        points(3, 2, 5),
    ),
    "group norm": (lambda: nn.GroupNorm(2, 4), points(2, 4, 3)),
    "layer norm": (lambda: nn.LayerNorm(4), points(2, 4)),
    "prelu": (lambda: nn.PReLU(4), points(2, 4)),
    "lstm": (lambda: Recurrent(nn.LSTM(4, 3, 2, bidirectional=True)), points(5, 2, 4)),
    "projected lstm": (lambda: Recurrent(nn.LSTM(4, 3, proj_size=2)), points(5, 2, 4)),
    "gru": (lambda: Recurrent(nn.GRU(4, 3, 2, batch_first=True)), points(2, 5, 4)),
    "rnn": (lambda: Recurrent(nn.RNN(4, 3, bias=False)), points(5, 2, 4)),
    "rnn cell": (lambda: nn.RNNCell(4, 3), points(2, 4)),
    "gru cell": (lambda: nn.GRUCell(4, 3), points(2, 4)),
    "attention": (Attention, points(2, 3, 4)),
    "attention with biases": (lambda: Attention(add_bias_kv=True, kdim=4, vdim=4), points(2, 3, 4)),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        points(2, 3, 4),
    ),
    "transformer": (Whole, points(2, 3, 4)),
    "embedding": (lambda: nn.Embedding(5, 4, padding_idx=0), lambda: torch.tensor([0, 3, 4, 3])),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 4), lambda: torch.tensor([[0, 3], [4, 3]])),
    "weight norm": (lambda: normed("weight_norm", nn.Linear(4, 3)), points(2, 4)),
    "spectral norm": (lambda: normed("spectral_norm", nn.Linear(4, 3)), points(2, 4)),
    "orthogonal": (lambda: normed("orthogonal", nn.Linear(4, 4)), points(2, 4)),
    "lists and dicts": (Lists, points(2, 4)),
    "tied": (Tied, points(2, 4)),
    "two names": (TwoNames, points(2, 4)),
    "sparse": (Sparse, points(2, 4)),
    "caching": (Caching, points(2, 4)),
    "recording": (Recording, points(2, 4)),
    "wrapped": (lambda: Parallel(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), points(2, 4)),
    "compiled": (
        lambda: torch.compile(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), backend="eager"),
        points(2, 4),
    ),
    "resnet": (resnet, points(2, 3, 33, 33)),
}

LAZY = {
    "lazy linear": (lambda: nn.LazyLinear(3), points(2, 4)),
    "lazy conv": (lambda: nn.LazyConv2d(3, 3), points(2, 2, 5, 5)),
    "lazy batch norm": (lambda: nn.LazyBatchNorm1d(), points(6, 4)),
    "lazy chain": (
        lambda: nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyLinear(2)),
        points(2, 4),
    ),
}


def make(kind, training=True, seed=0):
    """Return a module of a kind in float64, and an input for it."""
    build, example = {**KINDS, **LAZY}[kind]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules say that they may change
        net = build().to(DTYPE).train(training)
    torch.manual_seed(seed + 1)
    return net, example()


def changed(net, seed=7):
    """Return a deepcopy of a net that holds other weights, ties and all."""
    other = copy.deepcopy(net)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {*other.parameters(), *other.buffers()}:
            assert not nn.parameter.is_lazy(tensor)
        for tensor in dict.fromkeys([*other.parameters(), *other.buffers()]):
            if tensor.is_floating_point():
                extra = torch.rand(tensor.shape, generator=noise, dtype=tensor.dtype)
                tensor.add_(extra * 0.5)
            elif tensor.dtype is torch.int64:
                tensor.add_(3)
    refresh(other)
    return other


def refresh(net):
    """Let modules with a ``__setattr__`` of their own see their values, if they keep them."""
    for module in net.modules():
        if isinstance(module, Caching):
            module.weight = module.weight


def weights_of(net):
    """Return a tree of copies of what a net holds, which need gradients where the net's do."""
    return TensorDict.from_module(net).apply(
        lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad)
    )


def slots(net, above=()):
    """Every slot by path, read from the dicts of the modules."""
    found = {}
    for name, value in [*net._parameters.items(), *net._buffers.items()]:
        found[*above, name] = value
    for name, child in net._modules.items():
        if child is not None:
            found.update(slots(child, (*above, name)))
    return found


def exact(net):
    """Return everything by which one could tell that a module was touched.

    Objects stand for themselves: compare with ``same``. The ``seen`` list of ``Recording`` is
    there to be written.
    """
    marks = []
    for name, module in net.named_modules(remove_duplicate=False):
        attributes = {k: v for k, v in module.__dict__.items() if k != "seen"}
        marks.append((name, module, type(module), module.training, str(list(attributes))))
        for key, value in attributes.items():
            marks.append((name, key, value))
            if isinstance(value, dict):
                marks += [(name, key, inner, held) for inner, held in value.items()]
            elif isinstance(value, list | tuple | set):
                marks += [(name, key, held) for held in value]
    for each in (net.named_parameters, net.named_buffers):
        for name, tensor in each(remove_duplicate=False):
            marks.append((name, tensor, tensor.requires_grad, tensor.grad))
    marks.append((str(list(net.state_dict())),))
    return marks


def same(marks, others):
    """Return whether two results of ``exact`` name the same objects."""

    def alike(one, two):
        return one == two if isinstance(one, str | int | float) else one is two

    return [len(mark) for mark in marks] == [len(mark) for mark in others] and all(
        all(map(alike, one, two)) for one, two in zip(marks, others, strict=True)
    )


def values(net):
    """Return copies of all values of a module."""
    return [t.detach().clone() for t in [*net.parameters(), *net.buffers()]]


def equal(tensors, others):
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def blank(net):
    """A tree of zeros for a net."""
    return TensorDict.from_module(net).data.clone().zero_()


def chain():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def warmed(swap):
    """Return a swap after several blocks, whose plan is then known."""
    for _ in range(3):
        with swap:
            pass
    return swap


def in_thread(fn):
    """Run ``fn`` in another thread; return what it returned, or raise what it raised."""
    result = []

    def run():
        try:
            result.append((fn(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = result[0]
    if error is not None:
        raise error
    return value
