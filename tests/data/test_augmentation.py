"""Augmentations: fixed by torch's seed, one draw an image, same shape, within [0, 1]; clear refusals."""

from __future__ import annotations

import pickle
import random
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstrata.core.spec import signature, summary
from fedstrata.data.augmentation import AUGMENTS, build_augment
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError

pytest.importorskip("kornia")

RGB, GREY = (3, 16, 16), (1, 8, 8)
SPECS = [
    "rrc",
    "cj",
    "flip",
    "both",
    "rrc + flip",
    "both + flip(p=1.0)",
    "rrc(scale=(0.5, 1.0), ratio=(1, 1))",
    "crop(padding=2)",
    "cutout(size=4, fill=(0.25,))",
    "crop + flip + cutout(size=6)",
]


def images(shape: tuple[int, int, int], number: int = 12) -> Tensor:
    return torch.rand(number, *shape, generator=torch.Generator().manual_seed(5))


def run(spec: str, batch: Tensor, seed: int = 0) -> Tensor:
    augment = build_augment(spec, batch.shape[1:])
    assert augment is not None
    torch.manual_seed(seed)
    return augment(batch)


@pytest.mark.parametrize("shape", [RGB, GREY, (3, 12, 20), (4, 9, 9)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_the_seed_fixes_every_bit(spec: str, shape: tuple[int, int, int]) -> None:
    batch = images(shape)
    original = batch.clone()
    out = run(spec, batch)
    assert torch.equal(out, run(spec, batch)), "two objects, one seed"
    assert not torch.equal(out, run(spec, batch, seed=1))
    assert torch.equal(batch, original), "the input is left alone"
    assert out.shape == batch.shape
    assert out.dtype == batch.dtype
    assert out.is_contiguous()
    assert torch.equal(out, out.clamp(0, 1))


@pytest.mark.parametrize("spec", SPECS)
def test_only_torchs_cpu_generator_is_drawn_from(spec: str) -> None:
    augment = build_augment(spec, RGB)
    assert augment is not None
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].copy()
    torch.manual_seed(3)
    first = augment(images(RGB))
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(3)
    assert torch.equal(augment(images(RGB)), first), "nothing is remembered from one batch to the next"


@pytest.mark.parametrize("spec", ["rrc", "cj", "flip", "crop", "cutout"])
def test_images_of_a_batch_are_drawn_apart(spec: str) -> None:
    batch = images(RGB, 1).expand(32, -1, -1, -1)
    assert len(run(spec, batch).flatten(1).unique(dim=0)) > 1


def test_a_flip_mirrors() -> None:
    batch = images(RGB)
    assert torch.equal(run("flip(p=1.0)", batch), batch.flip(-1))
    assert torch.equal(run("flip(p=0.0)", batch), batch)
    flipped = (run("flip", images(GREY, 400)) != images(GREY, 400)).flatten(1).any(1).double().mean()
    assert 0.4 < float(flipped) < 0.6


def test_a_crop_of_the_whole_image_is_the_image() -> None:
    batch = images(RGB)
    torch.testing.assert_close(run("rrc(scale=(1.0, 1.0), ratio=(1.0, 1.0))", batch), batch)


def test_a_crop_enlarges_a_window() -> None:
    """A horizontal ramp stays a ramp: never steeper, and flatter by the window's share of the width."""
    ramp = torch.linspace(0, 1, 16).expand(64, 1, 16, 16).contiguous()
    out = run("rrc(scale=(0.25, 0.25), ratio=(1.0, 1.0))", ramp)
    span = out[:, 0, :, -1] - out[:, 0, :, 0]
    torch.testing.assert_close(span, torch.full_like(span, 7 / 15), atol=1e-3, rtol=0)
    assert float(out.diff(dim=-1).min()) >= -1e-6


def test_a_shift_is_a_window_of_the_padded_image() -> None:
    """By NumPy: one of the (2·2 + 1)² windows of each image with two black pixels around it; all of them turn up."""
    batch = images((2, 5, 6), 400)
    out, padded = run("crop(padding=2)", batch).numpy(), np.pad(batch.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)))
    places = [(down, right) for down in range(5) for right in range(5)]
    found = []
    for whole, window in zip(padded, out, strict=True):
        fits = [(d, r) for d, r in places if np.array_equal(whole[:, d : d + 5, r : r + 6], window)]
        assert len(fits) == 1
        found += fits
    assert set(found) == set(places)


def test_a_square_is_cut_out() -> None:
    """Rows y − 2 to y + 1 and columns x − 2 to x + 1 of some pixel (y, x) are of the fill; the rest is as it was."""
    colours = (0.1, 0.2, 0.3)
    batch = images((3, 7, 9), 600) * 0.5 + 0.5
    out = run(f"cutout(size=4, fill={colours})", batch).numpy()
    painted = set()
    for before, after in zip(batch.numpy(), out, strict=True):
        rows, columns = (np.flatnonzero((before != after).any((0, axis))) for axis in (2, 1))
        expected = before.copy()
        expected[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = np.float32(colours)[:, None, None]
        assert np.array_equal(after, expected)
        painted.add((rows[0], rows[-1], columns[0], columns[-1]))
    spans = {side: {(max(0, at - 2), min(side - 1, at + 1)) for at in range(side)} for side in (7, 9)}
    assert painted == {(*one, *other) for one in spans[7] for other in spans[9]}


def test_jitter_of_strength_zero_changes_nothing() -> None:
    batch = images(RGB)
    torch.testing.assert_close(run("cj(brightness=0, contrast=0, saturation=0, hue=0)", batch), batch)


def test_brightness_multiplies_within_its_range() -> None:
    batch = torch.full((200, 3, 4, 4), 0.5)
    factors = run("cj(brightness=0.4, contrast=0, saturation=0, hue=0)", batch)[:, 0, 0, 0] / 0.5
    assert 0.6 <= float(factors.min()) < 0.7
    assert 1.3 < float(factors.max()) <= 1.4


def test_grey_images_get_brightness_and_contrast_only() -> None:
    """Any strength of saturation and hue leaves a grey image alone; contrast keeps its mean, about
    (kornia 0.8 took the mean of the whole batch)."""
    batch = images(GREY) * 0.2 + 0.4
    still = run("cj(brightness=0, contrast=0, saturation=0.9, hue=0.5)", batch)
    torch.testing.assert_close(still, batch)
    contrast = run("cj(brightness=0, contrast=0.5)", batch)
    assert not torch.allclose(contrast, batch)
    torch.testing.assert_close(contrast.mean((1, 2, 3)), batch.mean((1, 2, 3)), atol=0.02, rtol=0)


def test_both_is_a_crop_and_then_jitter() -> None:
    batch = images(RGB)
    assert torch.equal(run("both", batch), run("rrc + cj", batch))
    assert not torch.equal(run("both", batch), run("cj + rrc", batch))
    assert torch.equal(run("rrc + (cj + flip)", batch), run("rrc + cj + flip", batch))


@pytest.mark.parametrize("spec", ["none", "none + none"])
def test_none_is_none_for_any_input(spec: str) -> None:
    assert build_augment(spec, RGB) is None
    assert build_augment(spec, (80,)) is None


def test_none_in_a_sum_adds_nothing() -> None:
    assert torch.equal(run("none + flip", images(RGB)), run("flip", images(RGB)))


@pytest.mark.parametrize("number", [0, 1])
def test_small_batches(number: int) -> None:
    assert run("both + flip", images(RGB, number)).shape == (number, *RGB)


def test_it_survives_the_way_to_another_process() -> None:
    augment = build_augment("both + flip", RGB)
    assert augment is not None
    torch.manual_seed(0)
    expected = augment(images(RGB))
    copy = pickle.loads(pickle.dumps(augment))  # noqa: S301
    torch.manual_seed(0)
    assert torch.equal(copy(images(RGB)), expected)


def test_examples_apply_it_before_they_scale() -> None:
    """Flipping and scaling commute, so the augmented batch is the mirrored plain one."""
    pixels = torch.randint(0, 256, (6, *RGB), dtype=torch.uint8)
    data = TensorExamples(pixels, torch.arange(6), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    plain, _ = data.batch(torch.arange(6))
    flipped, _ = data.batch(torch.arange(6), build_augment("flip(p=1.0)", RGB))
    torch.testing.assert_close(flipped, plain.flip(-1), atol=1e-4, rtol=0)


def test_no_gradient_flows() -> None:
    assert not run("both", images(RGB).requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("rcc", "did you mean 'rrc'"),
        ("rrc + blur", "no augmentation 'blur'"),
        ("rrc - flip", "cannot be read"),
        ("", "cannot be read"),
        ("rrc(scale=(0, 1))", "scale must be"),
        ("rrc(scale=(0.9, 0.1))", "scale must be"),
        ("rrc(scale=(0.5, 1.5))", "scale must be"),
        ("rrc(scale=0.5)", "does not fit"),
        ("rrc(ratio=(0, 1))", "ratio must be"),
        ("cj(brightness=-1)", "brightness must be 0 or more"),
        ("cj(hue=0.6)", "hue must be 0 to 0.5"),
        ("flip(p=1.1)", "p must be 0 to 1"),
        ("flip(q=1)", "no argument 'q'"),
        ("crop(padding=0)", "padding must be 1 to 4096"),
        ("cutout(size=5)", "size must be an even number"),
        ("cutout(size=4, fill=(0.1, 0.2))", "one number from 0 to 1, or 3, one for each channel"),
        ("cutout(size=4, fill=(1.5,))", "fill must be"),
        ("both(hue=0.1)", "no argument 'hue'"),
        ("flip + " * 1400 + "flip(p=2)", "p must be 0 to 1"),
    ],
)
def test_refusals(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_augment(spec, RGB)


@pytest.mark.parametrize("shape", [(64,), (28, 28), (2, 3, 4, 5), (3, 0, 4), ()])
def test_inputs_that_are_no_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"needs images \(channels, height, width\)"):
        build_augment("rrc", shape)


def test_without_kornia_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia.augmentation", None)
    monkeypatch.setitem(sys.modules, "kornia", None)
    with pytest.raises(UsageError, match=r"pip install 'fedstrata\[augment\]'"):
        build_augment("flip", RGB)
    assert build_augment("none", RGB) is None


def test_the_table_shows_itself() -> None:
    assert list(AUGMENTS) == ["none", "rrc", "cj", "flip", "both", "crop", "cutout"]
    assert signature(AUGMENTS["cj"]) == "brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1"
    assert all(summary(function).endswith(".") for function in AUGMENTS.values())
