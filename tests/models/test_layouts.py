"""Convolutions have their channels last only where that is proven safe, whoever calls them, however inputs arrive."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fedstrata as fs
from fedstrata.client.context import ClientContext
from fedstrata.models.layouts import allows_channels_last, contiguous, guard_convolutions, lay_out
from tests.fenced import fenced, needs_fence

FAMILIES = ("cnn2", "cnn4", "cnn8", "vgg9", "resnet8", "resnet10", "resnet18", "resnet26", "resnet50")
FENCED = ("cnn2", "cnn8", "vgg9", "resnet10", "resnet50")
"""Families that together have every convolution of all; the others repeat them."""
aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """The gradients of all convolutions inside: (whether the form allows another layout, whether theirs is the usual).

    Gradients alone: what is at fault computes those of weights, and a model is first tried forward as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.convolution_backward.default:
            _, x, weight, _, stride, _, _, transposed = args[:8]
            allowed = allows_channels_last(weight.shape[2:], stride, weight.shape[1], transposed)
            real = [t for t in (x, weight) if any(t.stride())]  # others stand for what vmap does not need
            plain = all(t.stride() == torch.empty(t.shape).stride() for t in real)
            self.seen.append((allowed, plain))
            if not (allowed or plain):  # to have seen it is enough: with AVX2's kernels it would damage our own heap
                args = (*(t.contiguous() for t in args[:3]), *args[3:])
        return function(*args, **(kwargs or {}))

    def check(self) -> None:
        """Nothing ran with another layout that may not have one."""
        assert self.seen
        assert all(plain for allowed, plain in self.seen if not allowed)


def lay_out_model(model: nn.Module) -> nn.Module:
    """The model as a client context lays it out."""
    names = lay_out(model, channels_last=True)
    for name, p in model.named_parameters():
        if name in names:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return model


def step(model: nn.Module, x: Tensor) -> None:
    last = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    torch.autograd.grad(model(last).square().mean(), list(model.parameters()))


@pytest.mark.parametrize("channels", range(1, 18))
def test_the_rule(channels: int) -> None:
    """Strided 1 × 1 convolutions need whole registers of channels; nothing else does; transposed ones never turn."""
    whole = channels % 8 == 0
    assert allows_channels_last((1, 1), (2, 2), channels) is whole
    assert allows_channels_last((1, 1), (1, 2), channels) is whole
    assert allows_channels_last((1,), (3,), channels) is whole
    assert allows_channels_last((1, 1), (1, 1), channels)
    assert allows_channels_last((3, 3), (2, 2), channels)
    assert allows_channels_last((1, 3), (2, 2), channels)
    assert not allows_channels_last((3, 3), (1, 1), channels, transposed=True)


def test_contiguous_means_the_strides_too() -> None:
    """An input of one channel is contiguous in every layout, but convolutions look at its strides."""
    x = torch.randn(4, 8, 8, 1).permute(0, 3, 1, 2)
    assert x.is_contiguous()
    assert x.stride()[1] == 1
    assert contiguous(x).stride() == (64, 64, 8, 1)
    y = torch.randn(2, 3, 4, 5)
    assert contiguous(y) is y


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_models_of_the_zoo(family: str) -> None:
    """Widths 1 to 8, either stem: in one training step no convolution has a layout that it may not have."""
    for width, colours in itertools.product(range(1, 9), (1, 3)):
        for stem in ("7x7", "3x3") if family.startswith("resnet") else ("",):
            more = f", stem='{stem}', maxpool=False" if stem else ""
            model = fs.build_model(f"{family}(width={width}{more})", (colours, 16, 16), 10, seed=0).train()
            with Calls() as calls:
                step(lay_out_model(model), torch.randn(2, colours, 16, 16))
            calls.check()


def test_wide_models_keep_their_channels_last() -> None:
    model = fs.build_model("resnet8(width=16)", (3, 16, 16), 10, seed=0)
    names = lay_out(model, channels_last=True)
    assert names == {n for n, p in model.named_parameters() if p.dim() == 4}
    assert not any(m._forward_pre_hooks for m in model.modules() if isinstance(m, nn.Conv2d))
    assert lay_out(model, channels_last=False) == frozenset()
    assert lay_out(copy.deepcopy(model).double(), channels_last=True) == frozenset()


def test_layer_by_layer() -> None:
    """Of a narrow network only the strided shortcuts stay contiguous."""
    model = fs.build_model("resnet8(width=4)", (3, 16, 16), 10, seed=0)
    four = {n for n, p in model.named_parameters() if p.dim() == 4}
    assert four - lay_out(model, channels_last=True) == {"layer2.0.shortcut.conv.weight"}


def test_a_shared_weight_stays_contiguous() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, stride=2), nn.Conv2d(4, 4, 3))
    model[0].weight = model[1].weight
    assert lay_out(model, channels_last=True) == {"2.weight"}


class Functional(nn.Module):
    """A model's own code: a convolution called as a function, with its arguments by name or by position."""

    def __init__(self, convolve: Callable[..., Tensor], shape: Sequence[int], named: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(*shape))
        self.convolve, self.named = convolve, named

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.convolve in (F.conv1d, F.conv_transpose1d):
            x = x.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)  # the channels of a sequence lie last now
        if self.named:
            return self.convolve(input=x, weight=self.weight, stride=2)
        return self.convolve(x, self.weight, None, [2])


@pytest.mark.parametrize("named", [True, False], ids=["by name", "by position"])
@pytest.mark.parametrize(
    ("convolve", "shape"),
    [
        (F.conv2d, (4, 4, 1, 1)),
        (F.conv1d, (4, 4, 1)),
        (F.conv_transpose2d, (4, 4, 1, 1)),
        (F.conv_transpose1d, (4, 4, 1)),
    ],
    ids=["conv2d", "conv1d", "conv_transpose2d", "conv_transpose1d"],
)
def test_convolutions_that_are_called_as_functions(
    convolve: Callable[..., Tensor], shape: Sequence[int], named: bool
) -> None:
    model = lay_out_model(Functional(convolve, shape, named))
    with Calls() as calls:
        step(model, torch.randn(2, 3, 8, 8))
    calls.check()
    assert sum(not allowed for allowed, _ in calls.seen) == 1
    assert (True, False) in calls.seen  # the first convolution has its channels last


def test_without_the_guard_they_would_not_be_safe() -> None:
    """So that the tests above can fail."""
    with Calls() as calls:
        step(Functional(F.conv2d, (4, 4, 1, 1), named=True), torch.randn(2, 3, 8, 8))
    assert (False, False) in calls.seen


class Raising(Functional):
    """Its code ends in the middle, with an error or an interrupt."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("error", [ValueError("its own"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_the_guard_goes_down_with_the_model(error: BaseException) -> None:
    """However a pass ends, torch's functions are nobody's business afterwards."""
    context = ClientContext(build=lambda arch: Raising(F.conv2d, (4, 4, 1, 1), True), method=fs.method("fedavg"))
    before = torch.overrides._get_current_function_mode_stack()
    model = context.replica("").model
    assert isinstance(model, Raising)
    model(torch.randn(2, 3, 8, 8))
    assert torch.overrides._get_current_function_mode_stack() == before
    model.error = error
    with pytest.raises(type(error)), context.computing(1):
        model(torch.randn(2, 3, 8, 8))
    assert torch.overrides._get_current_function_mode_stack() == before


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(4, 8, 1, stride=2),
        lambda: nn.Conv2d(4, 8, 1, stride=(1, 2), bias=False),
        lambda: nn.Conv2d(4, 8, 1, stride=2, groups=2),
        lambda: nn.ConvTranspose2d(4, 8, 1, stride=2),
    ],
    ids=["strided", "along one axis", "grouped", "transposed"],
)
def test_modules(layer: Callable[[], nn.Module]) -> None:
    """With inputs whose channels lie last because the layer before it, or the model's own code, says so."""
    model = lay_out_model(nn.Sequential(nn.Conv2d(3, 4, 3), layer()))
    with Calls() as calls:
        step(model, torch.randn(2, 3, 8, 8))
    calls.check()
    model = nn.Sequential(Permuting(), layer())
    lay_out(model, channels_last=False)
    with Calls() as calls:
        step(model, torch.randn(2, 8, 8, 4))
    calls.check()


class Permuting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_federation_trains_evaluates_and_probes_safely(channels_last: bool) -> None:
    """Through the public door, in this process: training, evaluation, probes and a technique's own passes."""
    data = fs.load_dataset("digits")
    parts = fs.partition(data.train.labels(), "iid", clients=2, seed=0)
    model = fs.build_model("resnet8(width=4, stem='3x3', maxpool=False)", data.input_shape, data.classes, seed=0)
    settings: dict[str, Any] = {"method": "moon + fednlr", "rounds": 2, "steps": 1, "batch_size": 4, "probe": "all"}
    settings |= {"probe_every": 2}  # once, with what the second round's techniques remember
    clients = data.train.split(parts)
    with Calls() as calls:
        fs.Federation(model, clients, data.test, channels_last=channels_last, engine="serial", **settings).fit()
    calls.check()
    assert any(not plain for _, plain in calls.seen) is channels_last


def permuted_images(rows: int) -> tuple[Tensor, Tensor]:
    """Images as many read them: the channels last in memory, first in the shape."""
    return torch.randn(rows, 8, 8, 3).permute(0, 3, 1, 2), torch.arange(rows) % 10


class PermutedImages:
    """Examples of one's own that give such images, batch by batch."""

    def __init__(self, rows: int) -> None:
        self.x, self.y = torch.randn(rows, 8, 8, 3), torch.arange(rows) % 10

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor, augment: Any = None) -> tuple[Tensor, Tensor]:
        return self.x[index].permute(0, 3, 1, 2), self.y[index]

    def labels(self) -> Tensor:
        return self.y


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [True, False])
def test_inputs_that_are_permuted(channels_last: bool) -> None:
    """Training, evaluation and probes, all of them on inputs whose channels lie last."""
    model = fs.build_model("resnet8(width=4, stem='3x3', maxpool=False)", (3, 8, 8), 10, seed=0)
    with Calls() as calls:
        fs.Federation(
            model,
            [PermutedImages(24), PermutedImages(24)],
            PermutedImages(16),
            rounds=1,
            lr=1e-3,
            channels_last=channels_last,
            probe="all",
            engine="serial",
        ).fit()
    calls.check()
    assert any(not plain for _, plain in calls.seen)


def test_probes_by_themselves() -> None:
    """On a model of the zoo, and on one with code of its own."""
    zoo = fs.build_model("resnet8(width=4, stem='3x3', maxpool=False)", (3, 8, 8), 10, seed=0)
    own = nn.Sequential(Functional(F.conv2d, (2, 4, 1, 1), named=True), nn.Flatten(), nn.Linear(32, 10))
    for model in (zoo, own):
        with Calls() as calls:
            fs.probes.client_gradients(model, [permuted_images(24)])
            fs.probes.gradient_trace(model, model, permuted_images(24), fs.strata(model), steps=2)
            fs.probes.within_class(model, *permuted_images(24), fs.strata(model))
        calls.check()
        assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_traced_model_is_code_of_its_own() -> None:
    traced = torch.fx.symbolic_trace(Functional(F.conv2d, (4, 4, 1, 1), named=True))
    with Calls() as calls:
        step(lay_out_model(traced), torch.randn(2, 3, 8, 8))
    calls.check()


def test_a_scripted_model_is_refused() -> None:
    with pytest.deprecated_call():
        scripted = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    with pytest.raises(fs.UsageError, match="the model is scripted and cannot be looked into: give the module"):
        fs.Federation(scripted, [permuted_images(8)])


def test_torch_says_what_is_wrong_with_a_call() -> None:
    with guard_convolutions(True), pytest.raises(TypeError, match="conv2d"):
        F.conv2d(torch.randn(2, 3, 8, 8))  # type: ignore[call-arg]


def test_other_precisions_stay_contiguous() -> None:
    """They have other kernels, which nobody has swept."""
    model = nn.Sequential(Permuting(), nn.Conv2d(4, 8, 3)).double()
    lay_out(model, channels_last=True)
    with Calls() as calls:
        step(model, torch.randn(2, 8, 8, 4).double())
    assert all(plain for _, plain in calls.seen)


# Under the fence, with AVX2's kernels: whatever touches memory beyond a tensor dies.


def convolutions(family: str) -> set[tuple[object, ...]]:
    """The convolutions of a narrow model, with the size of what they are given."""
    seen: set[tuple[object, ...]] = set()

    def look(m: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(m, nn.Conv2d)
        seen.add((*m.weight.shape, m.stride, m.padding, m.groups, m.bias is None, *args[0].shape))

    stem = ", stem='3x3', maxpool=False" if family.startswith("resnet") else ""
    model = fs.build_model(f"{family}(width=3{stem})", (1, 8, 8), 10, seed=0)
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            m.register_forward_pre_hook(look)
    model(torch.randn(4, 1, 8, 8))
    return seen


def test_the_fenced_families_have_every_convolution() -> None:
    every, fenced_ones = (set().union(*map(convolutions, names)) for names in (FAMILIES, FENCED))
    assert every == fenced_ones


UNSAFE = """
import torch
from torch import nn
m = nn.Conv2d(2, 4, 1, stride=2, bias=False).to(memory_format=torch.channels_last)
x = torch.randn(8, 2, 8, 8).contiguous(memory_format=torch.channels_last)
torch.autograd.grad(m(x).sum(), list(m.parameters()))
"""

NARROW = """
import itertools
import torch
from torch import nn
import fedstrata as fs
from tests.models.test_layouts import FENCED, Functional, F

torch.manual_seed(0)
clients = [(torch.randn(4, 1, 8, 8), torch.randint(10, (4,))) for _ in range(2)]

def train(model, x=None, mine=clients, **how):
    mine = mine if x is None else [(torch.randn(4, *x), y) for _, y in mine]
    settings = {"rounds": 1, "steps": 1, "batch_size": 4, "lr": 1e-4, "engine": "serial"} | how
    fs.Federation(model, mine, mine[0], **settings).fit()

for family, width in itertools.product(FENCED, (1, 2, 3, 5, 6)):  # all widths: test_narrow_models_of_the_zoo
    stem = ", stem='3x3', maxpool=False" if family.startswith("resnet") else ""
    train(fs.build_model(f"{family}(width={width}{stem})", (1, 8, 8), 10, seed=0), mine=clients[:1])
train(fs.build_model("resnet8(width=4, stem='3x3', maxpool=False)", (1, 8, 8), 10, seed=0), probe="all")
last = [(torch.randn(24, 8, 8, 3).permute(0, 3, 1, 2), torch.arange(24) % 10) for _ in range(2)]
model = fs.build_model("resnet8(width=4, stem='3x3', maxpool=False)", (3, 8, 8), 10, seed=0)
fs.Federation(model, last, last[0], rounds=1, lr=1e-4, engine="serial", probe="all").fit()
fs.probes.client_gradients(model, last)
train(fs.build_model("resnet8(width=2, norm='none')", (1, 8, 8), 10, seed=0), engine="vmap")
train(nn.Sequential(Functional(F.conv2d, (2, 4, 1, 1), True), nn.Flatten(), nn.Linear(32, 10)), x=(3, 8, 8))
for axes, conv in ((1, nn.Conv1d), (3, nn.Conv3d)):
    model = nn.Sequential(conv(3, 4, 3, padding=1), conv(4, 8, 1, stride=2), nn.Flatten(), nn.Linear(8 * 4**axes, 10))
    train(model, x=(3, *(8,) * axes))
print("done")
"""

COMPILED = """
import os
del os.environ["LD_PRELOAD"]  # it is loaded here, where tensors are; the compiler's own processes go without
import torch
from torch import nn
import fedstrata as fs
clients = [(torch.randn(4, 1, 8, 8), torch.randint(10, (4,))) for _ in range(2)]

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 16, 3), nn.Linear(32 + 18, 10)
        self.narrow = nn.Conv2d(4, 2, 1, stride=2)
        self.weight = nn.Parameter(torch.randn(8, 16, 1, 1))
    def forward(self, x):
        x = self.one(x)
        wide = nn.functional.conv2d(self.two(x), self.weight, stride=2)
        return self.head(torch.cat([wide.flatten(1), self.narrow(x).flatten(1)], 1))

fs.Federation(Own(), clients, rounds=1, steps=1, batch_size=4, lr=1e-4, engine="serial", compile=True).fit()
print("done")
"""


@needs_fence
def test_the_fence_sees_what_is_wrong_with_torch() -> None:
    """Without our rule the process dies: torch's own bug, which this test tells the end of."""
    assert fenced("-c", UNSAFE).returncode < 0


@needs_fence
@pytest.mark.slow
@pytest.mark.parametrize("program", [NARROW, COMPILED], ids=["narrow", "compiled"])
def test_narrow_models_train_within_their_memory(program: str) -> None:
    done = fenced("-W", "ignore", "-c", program)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


COMMANDS = (
    "reproduce fedpart --scale smoke --only warmup",
    "reproduce fedimpro --scale smoke --only split",
    "reproduce inco --scale smoke --only ablation",
    "run --archs 'resnet10(width=4); resnet18(width=4)' --method 'heteroavg + inco' --rounds 2 --steps 2 --workers 2",
    "run --model \"resnet8(width=2, stem='3x3', maxpool=False)\" --rounds 2 --steps 2 --engine serial "
    "--method 'moon + fedprox + scaffold + fednova'",
)
"""The parts that have few runs, with every cut of FedImpro; what other parts have more is the methods of the last."""

ONE_BY_ONE = """
import shlex
import sys
from pathlib import Path
from tests.small_runs import fedstrata
for place, line in enumerate(sys.argv[1:]):
    code = fedstrata(*shlex.split(line), "--quiet")
    Path(f"code{place}").write_text(str(code))
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All commands in one process: where their exit codes are, as far as it came, and what was said."""
    place = tmp_path_factory.mktemp("commands")
    done = fenced("-c", ONE_BY_ONE, *COMMANDS, cwd=place)
    return place, f"exit code {done.returncode}: {done.stderr[-2000:]}"


@needs_fence
@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(COMMANDS)), ids=COMMANDS)
def test_commands_stay_within_their_memory(place: int, commands: tuple[Path, str]) -> None:
    """What died on processors without AVX-512; worker processes have the fence, too."""
    where, said = commands
    code = where / f"code{place}"
    assert code.exists(), f"the process ended in this command or before it with {said}"
    assert code.read_text() == "0", said
