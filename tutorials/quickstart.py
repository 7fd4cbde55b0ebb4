"""All five journeys on real data: train an ensemble of small networks on handwritten digits.

Wrap a network, train eight copies of it in one vmapped step, see where they disagree, rename a
stage of the parameters, and carry them over a file into a network that has the new names.
"""

import argparse
import time
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import trange

from tdnn import TensorDict
from tdnn.nn import EnsembleModule, TensorDictModule, TensorDictSequential

PIXELS = 8
CLASSES = 10
TEST_SIZE = 360  # of 1,797


def main() -> None:
    """Run the tutorial from the command line."""
    options = parse_options()
    start = time.perf_counter()
    plt.switch_backend("Agg")  # the picture goes to a file, so no screen is needed
    torch.manual_seed(options.seed)
    train, test = load_data()
    ensemble = EnsembleModule(make_net("encoder"), options.members)
    losses, accuracies = fit(ensemble, train, test, options.epochs, options.batch_size)
    result = judge(ensemble, test)
    weights = options.out / "ensemble.safetensors"
    rename_and_reload(ensemble, test, weights)
    picture = options.out / "quickstart.png"
    draw(picture, losses, accuracies, test, result)
    print(
        f"\nTrained {options.members} networks on {len(train)} digits, all of them in each step.\n"
        f"Test accuracy: ensemble {result['correct'].float().mean():.1%}, "
        f"members {result['members'].min():.1%} to {result['members'].max():.1%}.\n"
        f"Uncertainty: {result['wrong']:.2f} nats on wrong answers, {result['right']:.2f} on right "
        "ones.\n"
        f"Weights under their new names: {weights}; picture: {picture}\n"
        f"Took {time.perf_counter() - start:.0f} s."
    )


def parse_options() -> argparse.Namespace:
    """Read the command line, or stop with a message that says what is wrong."""
    parser = argparse.ArgumentParser(
        description="Train an ensemble on scikit-learn's digits, in under a minute on a laptop."
    )
    parser.add_argument("--members", type=_at_least(2), default=8, help="networks (default: 8)")
    parser.add_argument("--epochs", type=_at_least(1), default=15, help="passes (default: 15)")
    parser.add_argument("--batch-size", type=_at_least(1), default=64, help="default: 64")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--out", type=Path, default=Path("quickstart"), help="folder (default: quickstart)"
    )
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        parser.error(f"argument --out: cannot make the folder {options.out}: {err.strerror}")
    return options


def _at_least(least: int):
    """Return a reader of whole numbers from ``least`` on, for argparse."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return value

    return read


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
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2)
    )
    head = nn.Linear(8 * (PIXELS // 2) ** 2, CLASSES)
    return TensorDictSequential(
        {
            first: TensorDictModule(encoder, in_keys=["image"], out_keys=["hidden"]),
            "head": TensorDictModule(head, in_keys=["hidden"], out_keys=["logits"]),
        }
    )


def fit(
    ensemble: EnsembleModule, train: TensorDict, test: TensorDict, epochs: int, batch_size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Train all members at once; return their losses and test accuracies, an epoch a row."""
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=3e-3)
    losses, accuracies = [], []
    for _ in (bar := trange(epochs, desc="training", unit="epoch")):
        ensemble.train()
        epoch = []
        for rows in torch.randperm(len(train)).split(batch_size):
            batch = train[rows]
            logits = ensemble(batch)["logits"]  # (members, batch, classes)
            each = torch.stack([cross_entropy(member, batch["label"]) for member in logits])
            optimizer.zero_grad()
            each.sum().backward()  # the members share nothing, so their gradients do not mix
            optimizer.step()
            epoch.append(each.detach())
        losses.append(torch.stack(epoch).mean(0))
        accuracies.append(member_accuracy(predict(ensemble, test), test))
        bar.set_postfix(loss=f"{losses[-1].mean():.3f}", test=f"{accuracies[-1].mean():.1%}")
    return losses, accuracies


def predict(ensemble: EnsembleModule, data: TensorDict) -> Tensor:
    """Return each member's probabilities, ``(members, N, classes)``."""
    ensemble.eval()
    with torch.no_grad():
        return ensemble(data.select("image"))["logits"].softmax(-1)


def member_accuracy(probabilities: Tensor, data: TensorDict) -> Tensor:
    """Return the share of right answers of each member, ``(members,)``."""
    return (probabilities.argmax(-1) == data["label"]).float().mean(-1)


def judge(ensemble: EnsembleModule, test: TensorDict) -> TensorDict:
    """Print the accuracies, and compare the uncertainty on wrong and on right answers.

    The uncertainty is the entropy of the mean prediction, in nats.
    """
    probabilities = predict(ensemble, test)
    members = member_accuracy(probabilities, test)
    mean = probabilities.mean(0)
    entropy = -(mean * mean.clamp_min(1e-12).log()).sum(-1)
    correct = mean.argmax(-1) == test["label"]
    for number, accuracy in enumerate(members):
        print(f"member {number}: {accuracy:.1%} of {len(test)} test digits")
    print(f"ensemble: {correct.float().mean():.1%}")
    wrong = entropy[~correct].mean()  # nan if there is no wrong answer
    right = entropy[correct].mean()
    comparison = "higher" if wrong > right else "NOT higher"
    print(f"uncertainty on wrong answers is {comparison}: {wrong:.2f} against {right:.2f} nats")
    return TensorDict(
        {
            "members": members,
            "guess": mean.argmax(-1),
            "entropy": entropy,
            "correct": correct,
            "wrong": wrong,
            "right": right,
        }
    )


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
    print("renamed encoder to backbone, saved, loaded: the predictions are identical")


def draw(
    path: Path,
    losses: list[Tensor],
    accuracies: list[Tensor],
    test: TensorDict,
    result: TensorDict,
) -> None:
    """Write a picture of the training curves and of the digits the ensemble is least sure of."""
    figure = plt.figure(figsize=(10, 6), layout="constrained")
    curves, digits = figure.subfigures(2, 1, height_ratios=[3, 2])
    epochs = range(1, len(losses) + 1)
    for axis, rows, title in zip(
        curves.subplots(1, 2),
        (losses, accuracies),
        ("training loss", "test accuracy"),
        strict=True,
    ):
        values = torch.stack(rows)
        axis.plot(epochs, values, color="tab:blue", alpha=0.35, linewidth=1)
        axis.plot(epochs, values.mean(1), color="tab:blue", linewidth=2.5, label="mean of members")
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
        axis.legend()
    digits.suptitle("the most uncertain test digits")
    axes = digits.subplots(2, 10).flat
    for axis, row in zip(axes, result["entropy"].topk(20).indices, strict=True):
        axis.imshow(test["image"][row, 0].numpy(), cmap="gray_r")
        guess, label = int(result["guess"][row]), int(test["label"][row])
        color = "black" if guess == label else "tab:red"
        title = f"{guess}" if guess == label else f"{guess}, is {label}"
        axis.set_title(title, color=color, fontsize=9)
        axis.set_axis_off()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
