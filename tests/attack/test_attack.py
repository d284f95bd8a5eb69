"""Feature inversion: its measures against numbers worked out otherwise, what it rebuilds, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedstrata as fs
from fedstrata.attack import Inversion, invert
from fedstrata.attack.contact_sheet import contact_sheet
from fedstrata.attack.search import descend, feature_error, grey_images, psnr, ssim, summarise_features, total_variation
from fedstrata.attack.victim import Pixels, open_victim
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.errors import UsageError
from fedstrata.run import open_run
from fedstrata.techniques.feature_gaussians import moments, rows
from tests.small_runs import edit, fedstrata, full_disk, one_sentence, strays

Capture = pytest.CaptureFixture[str]
QUICK: dict[str, Any] = {"images": 4, "noise": (0.0, 0.5, 5.0), "steps": 60}


def train(out: Path, **changes: Any) -> Path:
    """A small run, finished."""
    settings = {
        "dataset": "digits",
        "model": "cnn2(width=16, hidden=32)",
        "partition": "dirichlet(alpha=1.0)",
        "clients": 5,
        "rounds": 2,
        "workers": 1,
    }
    open_run(validate_settings(RunConfig, settings | changes), out).fit()
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("attack") / "run")


@pytest.fixture(scope="module")
def improved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedImpro, which says where the model is cut and that channels are shared."""
    out = tmp_path_factory.mktemp("attack") / "improved"
    return train(out, method="fedimpro(split='layer1', per='channel')", rounds=1, participation=2)


@pytest.fixture(scope="module")
def found(run: Path) -> Inversion:
    return invert(run, split="layer1", **QUICK | {"steps": 200})


def copied(run: Path, to: Path, **texts: str) -> Path:
    """A finished run's files that an attack reads, with some of run.toml's lines replaced."""
    to.mkdir()
    lines = (run / "run.toml").read_text().splitlines()
    kept = [line for line in lines if line.partition(" = ")[0] not in texts]
    (to / "run.toml").write_text("\n".join([*kept, *(f"{n} = {t}" for n, t in texts.items() if t)]))
    (to / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    return to


# --- measures --------------------------------------------------------------------------------------------------------


def test_total_variation() -> None:
    """[[0, 1], [0.5, 0.5]]: down 0.5 + 0.5, right 1 + 0, over 4 values; and 0 for an even image."""
    image = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]]], [[[0.3, 0.3], [0.3, 0.3]]]])
    assert total_variation(image).tolist() == [0.5, 0.0]
    two = image[:1].expand(1, 2, 2, 2)
    assert total_variation(two).tolist() == [0.5]


def test_psnr() -> None:
    """An error of 0.1 everywhere is 20 dB; of 1, 0 dB; none is 100 dB."""
    black = torch.zeros(3, 3, 4, 4)
    other = torch.tensor([0.1, 1.0, 0.0]).view(3, 1, 1, 1).expand_as(black)
    torch.testing.assert_close(psnr(other, black), torch.tensor([20.0, 0.0, 100.0]).double())


def ssim_by_hand(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], size: int) -> float:
    """One grey pair, window after window, straight from the paper's definition."""
    axis = np.exp(-((np.arange(size) - size // 2) ** 2) / (2 * 1.5**2))
    w = np.outer(axis, axis) / np.outer(axis, axis).sum()
    values = []
    for i in range(x.shape[0] - size + 1):
        for j in range(x.shape[1] - size + 1):
            a, b = x[i : i + size, j : j + size], y[i : i + size, j : j + size]
            ma, mb = (w * a).sum(), (w * b).sum()
            va, vb, ab = (w * (a - ma) ** 2).sum(), (w * (b - mb) ** 2).sum(), (w * (a - ma) * (b - mb)).sum()
            up = (2 * ma * mb + 0.0001) * (2 * ab + 0.0009)
            values.append(up / ((ma**2 + mb**2 + 0.0001) * (va + vb + 0.0009)))
    return float(np.mean(values))


@pytest.mark.parametrize(("side", "size"), [(28, 11), (11, 11), (10, 9), (8, 7), (1, 1)])
def test_ssim_is_what_the_definition_gives(side: int, size: int) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, side, side, generator=random).double()
    y = (x + 0.2 * torch.randn(x.shape, generator=random)).clamp(0, 1)
    by_hand = [
        np.mean([ssim_by_hand(a.numpy(), b.numpy(), size) for a, b in zip(*pair, strict=True)])
        for pair in zip(x, y, strict=True)
    ]
    torch.testing.assert_close(ssim(x, y), torch.tensor(by_hand), rtol=1e-9, atol=1e-9)


def test_ssim_of_even_and_of_equal_images() -> None:
    """Without any structure only the luminance counts: (2·0.3 + C1) / (0.25 + 0.36 + C1), here for 0.5 and 0.6."""
    a, b = torch.full((1, 1, 16, 12), 0.5), torch.full((1, 1, 16, 12), 0.6)
    assert ssim(a, b).item() == pytest.approx((0.6 + 0.0001) / (0.61 + 0.0001), rel=1e-5)
    image = torch.rand(1, 3, 16, 12)
    assert ssim(image, image).item() == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(6, 4, 3, 5), (6, 7, 4), (6, 9)])
@pytest.mark.parametrize("per", ["element", "channel"])
def test_the_shared_mean_is_fedimpros(shape: tuple[int, ...], per: Any) -> None:
    features = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 2, 2, 0, 2, 2])
    theirs = moments(*rows(features, labels, per), classes=3)[1]
    mine = summarise_features(features, per)
    for label in (0, 2):
        torch.testing.assert_close(mine[labels == label].mean(0), theirs[label])


# --- the search ------------------------------------------------------------------------------------------------------


def last(*arguments: Any, **settings: Any) -> Tensor:
    *_, found = descend(*arguments, **settings)
    return found


def test_an_invertible_linear_low_part_is_inverted() -> None:
    random = torch.Generator().manual_seed(0)
    originals = torch.rand(3, 1, 6, 6, generator=random)
    basis = torch.linalg.qr(torch.randn(36, 36, generator=random))[0] * torch.linspace(1, 3, 36)
    look = lambda x: x.flatten(1) @ basis  # noqa: E731
    rebuilt = last(look, look(originals), grey_images((3, 1, 6, 6), random), steps=300, lr=0.1, tv=0.0)
    assert psnr(rebuilt, originals).min() > 45
    assert ssim(rebuilt, originals).min() > 0.999
    assert feature_error(look(rebuilt), look(originals)).max() < 1e-4


def test_every_image_is_searched_on_its_own() -> None:
    random = torch.Generator().manual_seed(0)
    originals, start = (torch.rand(4, 1, 5, 5, generator=random) for _ in range(2))
    look = lambda x: x.flatten(1).cumsum(1)  # noqa: E731
    together = last(look, look(originals), start, steps=20, lr=0.1, tv=0.1)
    alone = last(look, look(originals[:1]), start[:1], steps=20, lr=0.1, tv=0.1)
    torch.testing.assert_close(together[:1], alone)
    assert together.min() >= 0
    assert together.max() <= 1


def test_the_scale_of_features_does_not_count() -> None:
    random = torch.Generator().manual_seed(0)
    originals, start = (torch.rand(2, 1, 5, 5, generator=random) for _ in range(2))
    ends = [last(lambda x, s=s: s * x.flatten(1), s * originals.flatten(1), start, steps=9, lr=0.1, tv=0.1)
            for s in (1.0, 1e-6, 1e25)]  # fmt: skip
    torch.testing.assert_close(ends[1], ends[0])
    torch.testing.assert_close(ends[2], ends[0])


def test_no_slope_is_no_step() -> None:
    """A dead low part, and one that overflows, leave the images where the prior puts them: finite."""
    start = grey_images((1, 1, 4, 4), torch.Generator().manual_seed(0))
    for look in (lambda x: 0 * x.flatten(1), lambda x: x.flatten(1) / 0):
        assert last(look, torch.zeros(1, 16), start, steps=5, lr=0.1, tv=0.0).isfinite().all()


def test_the_prior_smooths() -> None:
    start = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rough, smooth = (last(lambda x: x.flatten(1).mean(1, True), torch.full((1, 1), 0.5), start, steps=100, lr=0.1, tv=t)
                     for t in (0.0, 10.0))  # fmt: skip
    assert total_variation(smooth) < 0.1 * total_variation(rough)


def test_pixels_of_bytes_and_of_numbers() -> None:
    stored = torch.tensor([[0, 255, 51]], dtype=torch.uint8).view(1, 1, 1, 3)
    for examples in (
        fs.TensorExamples(stored, torch.zeros(1).long(), (0.3,), (0.2,)),
        fs.TensorExamples(stored, torch.zeros(1).long()),
        fs.TensorExamples(stored.float() - 100, torch.zeros(1).long()),
    ):
        pixels, (inputs, _) = Pixels.of(examples), examples.batch(torch.tensor([0]))
        torch.testing.assert_close(pixels.pixels(inputs).flatten(), torch.tensor([0.0, 1.0, 0.2]))
        torch.testing.assert_close(pixels.input(pixels.pixels(inputs)), inputs)


# --- a run -----------------------------------------------------------------------------------------------------------


def test_features_tell_more_than_statistics_and_noise_tells_less(found: Inversion) -> None:
    assert [row.noise for row in found.rows] == [None, 0.0, 0.5, 5.0]
    raw, exact, some, much = found.rows
    assert raw.psnr > 25
    assert raw.psnr > exact.psnr + 8
    assert raw.ssim > 0.9
    assert raw.ssim > exact.ssim + 0.1
    assert exact.psnr > some.psnr > much.psnr
    assert exact.ssim > much.ssim
    for row in found.rows:
        assert row.images.shape == found.originals.shape == (4, 1, 8, 8)
        assert row.psnrs == tuple(psnr(row.images, found.originals).tolist())
        assert row.psnr == pytest.approx(sum(row.psnrs) / 4)


def test_images_are_of_several_classes_of_the_client_with_most(run: Path, found: Inversion) -> None:
    assert len(set(found.classes)) == 4
    victim = open_victim(run, "layer1", None, None)
    kinds = [len(set(open_victim(run, "layer1", k, None).data.labels().tolist())) for k in range(5)]
    assert kinds[victim.client] == max(kinds)
    counts = dict(zip(victim.classes, victim.counts(), strict=True))
    assert found.examples == tuple(counts[name] for name in found.classes)
    everything, labels = victim.choose(10_000, seed=0)
    assert len(everything) == len(victim.data)
    assert labels[: max(kinds)] == sorted(set(labels))


def test_the_mean_of_one_example_is_its_features(run: Path) -> None:
    victim = open_victim(run, "layer1", 0, None)
    everything, labels = victim.choose(10_000, seed=0)
    own = victim.shared_statistics(everything)
    for label, mean in victim.means().items():
        torch.testing.assert_close(mean, own[[at == label for at in labels]].mean(0), rtol=1e-4, atol=1e-5)


def test_same_seed_same_bits(run: Path) -> None:
    first, again, other = (invert(run, split="layer1", **QUICK | {"steps": 5}, seed=s) for s in (3, 3, 4))
    assert json.dumps(first.as_dict()) == json.dumps(again.as_dict())
    assert all(torch.equal(a.images, b.images) for a, b in zip(first.rows, again.rows, strict=True))
    assert not torch.equal(first.originals, other.originals)


def test_progress_counts_the_steps_of_all_rows(run: Path) -> None:
    heard: list[tuple[int, int]] = []
    invert(run, split="layer1", images=1, noise=(0.1, 0.1), steps=3, progress=lambda *news: heard.append(news))
    assert heard == [(done, 6) for done in range(1, 7)]


def test_a_run_of_fedimpro_says_where_and_what(improved: Path) -> None:
    found = invert(improved, **QUICK)
    assert (found.split, found.per) == ("layer1", "channel")
    assert found.rows[0].psnr > found.rows[1].psnr
    victim = open_victim(improved, None, None, None)
    assert all(mean.shape == (16,) for mean in victim.means().values())
    assert open_victim(improved, "layer2.conv1", None, None).place == "layer2.conv1"
    assert open_victim(improved, 2, None, None).place == "flatten"


def test_colours_and_real_numbers(tmp_path: Path) -> None:
    data = "synthetic(shape=(3, 8, 8), classes=3, examples=60, test_examples=10)"
    out = train(tmp_path / "run", dataset=data, model="resnet8(width=4, stem='3x3', maxpool=False)", rounds=1)
    found = invert(out, split="stem", images=3, noise=(), steps=100)
    assert len(found.rows) == 1
    assert found.rows[0].psnr > 20
    found.save(tmp_path / "made" / "here")
    assert (tmp_path / "made" / "here" / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_a_task_without_classes(tmp_path: Path, capsys: Capture) -> None:
    data = "digits-segmentation(examples=40, test_examples=10)"
    out = train(tmp_path / "run", dataset=data, model="unet(width=4, depth=1)", partition="iid", rounds=1)
    for given in ([], ["--client", "0"]):
        assert fedstrata("attack", "invert", out, "--split", "stem", *given) == 2
        told = "the attack needs a class for every example, and the task 'segmentation' has none"
        assert one_sentence(capsys) == told
    assert not (out / "attack").exists()


def test_images_that_are_yes_or_no(tmp_path: Path) -> None:
    """One output, two classes, whose names are those of the file."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "scans.npz", x=rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), y=np.arange(60) % 2)
    data = f"npz(path='{tmp_path}/scans.npz')"
    out = train(tmp_path / "run", dataset=data, model="cnn2(width=4, hidden=8)", partition="iid", rounds=1)
    found = invert(out, split="layer1", images=2, noise=(0.0,), steps=5)
    assert sorted(found.classes) == ["0", "1"]
    assert len(open_victim(out, "layer1", None, None).means()) == 2


def test_a_sheet_of_any_channels_and_names() -> None:
    for channels in (1, 2, 3):
        assert contact_sheet([torch.rand(1, channels, 4, 4)] * 2, ["$a", "b"], ["a very long $name$ indeed\n1"], "$")


# --- the command -----------------------------------------------------------------------------------------------------

FAST = ("--split", "layer1", "--images", "2", "--steps", "2")


def test_the_command(run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert fedstrata("attack", "invert", run, *FAST, "--noise", "0,0.1", "--noise", "0.5", "--out", out) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in ("from features", "from statistics, noise 0.5", "PSNR", "SSIM", str(out)):
        assert text in printed.out
    kept = json.loads((out / "invert.json").read_text())
    assert [row["noise"] for row in kept["rows"]] == [None, 0, 0.1, 0.5]
    assert kept["settings"] == {"images": 2, "noise": [0, 0.1, 0.5], "steps": 2, "lr": 0.1, "tv": 0.1, "seed": 0}
    assert kept["rows"][0]["images"][1].keys() == {"class", "examples", "psnr", "ssim", "error"}
    assert sorted(path.name for path in out.iterdir()) == ["invert.json", "sheet.png"]


def test_the_command_in_few_words_and_as_json(run: Path, tmp_path: Path, capsys: Capture) -> None:
    copy = copied(run, tmp_path / "run")
    assert fedstrata("attack", "invert", copy, *FAST, "--quiet") == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert fedstrata("attack", "invert", copy, *FAST, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("out") == str(copy / "attack")
    assert printed == json.loads((copy / "attack" / "invert.json").read_text())
    assert len(printed["rows"]) == 5
    assert all(math.isfinite(row["psnr"]) for row in printed["rows"])


def test_one_example_of_a_class_is_told(run: Path, tmp_path: Path, capsys: Capture) -> None:
    copy = copied(run, tmp_path / "run", partition='"dirichlet(alpha=0.3, min_size=1)"', clients="50")
    assert fedstrata("attack", "invert", copy, *FAST, "--images", "9") == 0
    assert "the client has one example" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--steps", "0"], "steps must be a whole number from 1 to 1,000,000, not 0"),
        (["--images", "0"], "images must be a whole number from 1 to 64, not 0"),
        (["--images", "65"], "not 65"),
        (["--noise", "-1"], "noise must be 0 or more, not -1.0"),
        (["--noise", "nan"], "noise must be 0 or more, not nan"),
        (["--noise", "0,x"], "--noise 0,x: write numbers"),
        (["--noise", "1e39"], "not all numbers after 'layer1' are finite"),
        (["--lr", "0"], "lr must be above 0"),
        (["--tv", "-1"], "tv must be 0 or more"),
        (["--seed", "-1"], "seed must be a whole number, 0 or more"),
        (["--client", "5"], "no client 5: its clients are 0 to 4"),
        (["--client", "-1"], "no client -1"),
        (["--split", "layer9"], "the split: the model has no stage 'layer9' (did you mean 'layer"),
        (["--split", "9"], "cannot be cut after stratum 9"),
    ],
)
def test_refusals(run: Path, tmp_path: Path, capsys: Capture, given: list[str], sentence: str) -> None:
    out = tmp_path / "out"
    assert fedstrata("attack", "invert", run, *FAST, *given, "--out", out) == 2
    assert sentence in one_sentence(capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dataset": ""}, "was run from Python"),
        ({"dataset": '"synthetic(shape=(7,))"', "model": '"mlp"'}, "only images can be rebuilt"),
        ({"model": '"cnn4"'}, "does not hold the model that run.toml describes"),
        ({"dataset": '"cifar-10"', "data_dir": '"nowhere"'}, "nowhere does not exist"),
    ],
)
def test_refused_runs(run: Path, tmp_path: Path, capsys: Capture, changes: dict[str, str], sentence: str) -> None:
    copy = copied(run, tmp_path / "run", **changes)
    assert fedstrata("attack", "invert", copy, *FAST) == 2
    assert sentence in one_sentence(capsys)
    assert not (copy / "attack").exists()


def test_a_run_that_was_edited(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """With another seed, other images would be taken for the client's."""
    edited = shutil.copytree(run, tmp_path / "run")
    edit(edited, "seed", 7)
    assert fedstrata("attack", "invert", edited, "--split", "conv1") == 2
    assert "run.toml was edited after the run began: seed was 0, is 7" in one_sentence(capsys)


def test_where_no_finished_run_is(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert fedstrata("attack", "invert", tmp_path / "none") == 2
    assert "has no run.toml: there is no run to attack" in one_sentence(capsys)
    copy = copied(run, tmp_path / "run")
    assert fedstrata("attack", "invert", copy) == 2
    assert "does not cut the model: say where" in one_sentence(capsys)
    (copy / "model.safetensors").write_bytes(b"nothing")
    assert fedstrata("attack", "invert", copy, *FAST) == 2
    assert "model.safetensors is damaged" in one_sentence(capsys)
    (copy / "model.safetensors").unlink()
    assert fedstrata("attack", "invert", copy, *FAST) == 2
    assert "finish the run first" in one_sentence(capsys)


def test_a_model_that_diverged(run: Path, tmp_path: Path) -> None:
    copy = copied(run, tmp_path / "run")
    weights = {name: tensor * math.nan for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(UsageError, match="finite"):
        invert(copy, split="layer1")


def test_nothing_is_left_half_written(run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    with full_disk(3000):
        assert fedstrata("attack", "invert", run, *FAST, "--out", out) == 2
    assert "cannot write" in one_sentence(capsys)
    assert not (out / "sheet.png").exists()
    assert not strays(out)
    (tmp_path / "file").write_text("")
    assert fedstrata("attack", "invert", run, *FAST, "--out", tmp_path / "file") == 2
    assert "not a directory" in one_sentence(capsys)


def test_pictures_need_matplotlib(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert fedstrata("attack", "invert", run, *FAST) == 2
    assert "pip install 'fedstrata[report]'" in one_sentence(capsys)
