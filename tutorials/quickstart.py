"""All five journeys on real data: train an ensemble of small networks on handwritten digits.

Wrap a network, train eight copies of it in one vmapped step, see where they disagree, rename a
stage of the parameters, and carry them over a file into a network that has the new names.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import fill

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import trange

from tdnn import TensorDict
from tdnn.nn import EnsembleModule, TensorDictModule, TensorDictSequential

PIXELS = 8
CLASSES = 10
TEST_SIZE = 360  # of 1,797
SHOWN = 20  # digits in the picture
RIGHT, WRONG = "tab:blue", "tab:red"


def main() -> None:
    """Run the tutorial from the command line."""
    options = parse_options()
    start = time.perf_counter()
    plt.switch_backend("Agg")  # the picture goes to a file, so no screen is needed
    torch.set_num_threads(1)  # for networks as small as these, more of them only wait
    torch.manual_seed(options.seed)
    train, test = load_data()
    ensemble = EnsembleModule(make_net("encoder"), options.members)
    curves = fit(ensemble, train, test, options.epochs, options.batch_size)
    result = judge(predict(ensemble, test), test)
    weights, picture = options.out / "ensemble.safetensors", options.out / "quickstart.png"
    rename_and_reload(ensemble, test, weights)
    draw(picture, curves, test, result)
    alone = ", ".join([f"{accuracy:.1%}" for accuracy in result["alone"]])
    print(fill(f"Test accuracy of each member: {alone}", 100), end="\n\n")
    print(
        f"Trained {options.members} networks in one on {len(train):,} images of digits "
        f"({time.perf_counter() - start:.0f} s after the imports).\n"
        f"{in_words(result)}\n"
        "Renamed the stage encoder to backbone: a net with that name predicts the very same.\n"
        f"Its weights: {weights}\n"
        f"The training curves and the most uncertain digits: {picture}"
    )


# -- the command line --------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Read the command line, or stop with a message that says what is wrong."""
    parser = argparse.ArgumentParser(
        description="Train an ensemble on scikit-learn's digits, in seconds, on a laptop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    number = {"metavar": "N"}
    parser.add_argument(
        "--members", type=_at_least(2), default=8, help="networks, 2 or more", **number
    )
    parser.add_argument("--epochs", type=_at_least(1), default=15, help="training passes", **number)
    parser.add_argument(
        "--batch-size", type=_at_least(1), default=64, help="images in a step", **number
    )
    parser.add_argument(
        "--seed", type=_at_least(0), default=0, help="of all that is drawn", **number
    )
    parser.add_argument(
        "--out", type=Path, default=Path("quickstart"), help="folder for the files", metavar="DIR"
    )
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as err:
        parser.error(f"argument --out: cannot write to the folder {options.out}: {err.strerror}")
    return options


def _at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``least`` on, for argparse."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to 2147483647"
            )
        return int(text)

    return read


# -- a network on trees, and many of them at once ----------------------------------------------


def load_data() -> tuple[TensorDict, TensorDict]:
    """Return the digits as two trees of images ``(N, 1, 8, 8)`` and labels ``(N,)``."""
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.as_tensor(digits.target, dtype=torch.long)
    data = TensorDict({"image": images, "label": labels}, [len(images)])
    data = data[torch.randperm(len(data))]
    return data[TEST_SIZE:], data[:TEST_SIZE]


def make_net(first: str) -> TensorDictSequential:
    """Return a small convolutional network in two stages, one called ``first``, one "head"."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
    )
    head = nn.Linear(16 * (PIXELS // 2) ** 2, CLASSES)
    return TensorDictSequential(
        {
            first: TensorDictModule(encoder, in_keys=["image"], out_keys=["hidden"]),
            "head": TensorDictModule(head, in_keys=["hidden"], out_keys=["logits"]),
        }
    )


def fit(
    ensemble: EnsembleModule, train: TensorDict, test: TensorDict, epochs: int, batch_size: int
) -> TensorDict:
    """Train all members at once.

    Returns:
        Batch ``(epochs,)``: ``loss`` and ``alone`` (test accuracy), ``(epochs, members)`` each,
        and ``together`` (test accuracy), ``(epochs,)``.
    """
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=3e-3)
    rows = []
    for _ in (bar := trange(epochs, desc="training", unit="epoch")):
        ensemble.train()
        losses = []
        for batch in train[torch.randperm(len(train))].split(batch_size):
            logits = ensemble(batch)["logits"]  # (members, batch, classes)
            each = torch.stack([cross_entropy(member, batch["label"]) for member in logits])
            optimizer.zero_grad()
            each.sum().backward()  # the members share nothing, so their gradients do not mix
            optimizer.step()
            losses.append(each.detach())
        row = judge(predict(ensemble, test), test).select("alone", "together")
        rows.append(row.set("loss", torch.stack(losses).mean(0)))
        bar.set_postfix(loss=f"{row['loss'].mean():.3f}", test=f"{row['together']:.1%}")
    return torch.stack(rows)


def predict(ensemble: EnsembleModule, data: TensorDict) -> Tensor:
    """Return each member's probabilities, ``(members, N, classes)``."""
    ensemble.eval()
    with torch.no_grad():
        return ensemble(data.select("image"))["logits"].softmax(-1)


def judge(probabilities: Tensor, test: TensorDict) -> TensorDict:
    """Return what the members get right, alone and together, and how sure they are.

    Returns:
        ``alone``: accuracy of each member, ``(members,)``; ``together``: accuracy of their mean
        prediction, a scalar; of each digit, ``(N,)``, the ``guess`` of the mean, whether that is
        ``right``, and its ``entropy`` in nats, which is the uncertainty.
    """
    mean = probabilities.mean(0)
    guess = mean.argmax(-1)
    right = guess == test["label"]
    return TensorDict(
        {
            "alone": (probabilities.argmax(-1) == test["label"]).float().mean(-1),
            "together": right.float().mean(),
            "guess": guess,
            "right": right,
            "entropy": torch.special.entr(mean).sum(-1),
        }
    )


def in_words(result: TensorDict) -> str:
    """Return the accuracies and uncertainties in a sentence."""
    right, entropy = result["right"], result["entropy"]
    together = f"{result['together']:.1%} of {len(right)} test digits"
    if right.all():
        return f"Together they name {together} correctly, so no answer is wrong."
    wrong_by, right_by = entropy[~right].mean().item(), entropy[right].mean().item()
    doubt = "More" if wrong_by > right_by else "NOT more"
    return (
        f"Together they name {together} correctly. {doubt} uncertain where wrong: "
        f"{wrong_by:.2f} nats against {right_by:.2f}."
    )


# -- other names, over a file ------------------------------------------------------------------


def rename_and_reload(ensemble: EnsembleModule, test: TensorDict, path: Path) -> None:
    """Move the weights to a network whose first stage is called "backbone", through a file."""
    params = ensemble.params_td.data.clone()
    with params.flatten_keys(".") as flat:
        for name in list(flat.keys()):
            if name.startswith("module.encoder."):
                flat.rename_key_(name, name.replace("encoder", "backbone", 1))
    params.save(path)
    loaded = TensorDict.load(path)
    other = make_net("backbone").eval()

    def run(weights: TensorDict, images: Tensor) -> Tensor:
        with weights.to_module(other):
            return other(images)[-1]

    with torch.no_grad():
        moved = torch.vmap(run, (0, None))(loaded, test["image"]).softmax(-1)
    if not torch.equal(moved, predict(ensemble, test)):
        raise RuntimeError("the predictions changed on the way through the file")


# -- the picture -------------------------------------------------------------------------------


def draw(path: Path, curves: TensorDict, test: TensorDict, result: TensorDict) -> None:
    """Write a picture of the training, of how sure the ensemble is, and where it is least so."""
    figure = plt.figure(figsize=(12, 7.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # inches, around all parts
    top, bottom = figure.subfigures(2, 1, height_ratios=[5, 4], hspace=0.04)
    losses, accuracies, doubts = top.subplots(1, 3)
    draw_curves(losses, curves["loss"], curves["loss"].mean(1), "mean of members")
    top = 1.1 * curves["loss"].max().item()
    losses.set(title="Training loss", ylabel="cross-entropy (nats)", ylim=(0, top))
    draw_curves(accuracies, 100 * curves["alone"], 100 * curves["together"], "ensemble")
    accuracies.set(title="Test accuracy", ylabel="right answers (%)")
    draw_doubts(doubts, result["entropy"], result["right"])
    draw_digits(bottom, test, result)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_curves(axes: Axes, members: Tensor, whole: Tensor, what: str) -> None:
    """Draw a thin line for each member, ``(epochs, members)``, and a thick one, ``(epochs,)``."""
    epochs = range(1, len(whole) + 1)
    marker = "o" if len(whole) == 1 else None  # one point makes no line
    thin = axes.plot(epochs, members, color="tab:gray", alpha=0.5, linewidth=1, marker=marker)
    [thick] = axes.plot(epochs, whole, color=RIGHT, linewidth=2.5, marker=marker)
    axes.legend([thin[0], thick], ["each member", what])
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)


def draw_doubts(axes: Axes, entropy: Tensor, right: Tensor) -> None:
    """Draw how often the ensemble is how unsure, for its right and its wrong answers."""
    bins = torch.linspace(0, math.log(CLASSES), 16).numpy()
    for which, name, color in ((right, "right", RIGHT), (~right, "wrong", WRONG)):
        values = entropy[which].numpy()
        share = [100 / len(values)] * len(values) if len(values) else None
        label = f"{len(values)} {name} answers"
        axes.hist(values, bins, weights=share, color=color, alpha=0.6, label=label)
    axes.set(
        title="Uncertainty of the ensemble",
        xlabel=f"entropy (nats; at most {math.log(CLASSES):.2f})",
        ylabel="share of these answers (%)",
    )
    axes.legend()
    axes.grid(alpha=0.3)


def draw_digits(figure: SubFigure, test: TensorDict, result: TensorDict) -> None:
    """Draw the digits that the ensemble is least sure of, with its answers."""
    figure.suptitle(
        f"The {SHOWN} most uncertain of {len(test)} test digits, with the ensemble's answer (red "
        "if wrong) and its entropy in nats"
    )
    for axes, row in zip(
        figure.subplots(2, SHOWN // 2).flat, result["entropy"].topk(SHOWN).indices, strict=True
    ):
        guess, label = int(result["guess"][row]), int(test["label"][row])
        answer = f"{guess}" if guess == label else f"{guess}, is {label}"
        color = "black" if guess == label else WRONG
        axes.imshow(test["image"][row, 0].numpy(), cmap="gray_r")
        axes.set_title(f"{answer}\n{result['entropy'][row]:.2f}", color=color, fontsize=10)
        axes.set_axis_off()


if __name__ == "__main__":
    main()
