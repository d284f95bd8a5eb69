"""Gradient matching, as pure functions of a model: what images' gradients are, and which rebuilt image is whose.

The images of one visit are held as one image with all their channels, [visits, images · channels, height, width], so
that a search treats a visit as it treats an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedstrata.core.tensors import Tensors
from fedstrata.models.copying import copy_model

Loss = Callable[[Tensor, Tensor], Tensor]


def unit_rows(changes: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """−Δ/‖Δ‖ of each visit, all of its parameters in one row: the gradient's direction after one step.

    A row is zero where nothing has changed.
    """
    rows = torch.stack([torch.cat([tensor.flatten() for tensor in change.values()]) for change in changes])
    return unit(-rows)


def unit(rows: Tensor) -> Tensor:
    """Rows divided by their length; what is zero stays zero."""
    scaled: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return scaled


def gradient_directions(
    model: nn.Module, loss: Loss, names: Sequence[str], targets: Tensor, to_inputs: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """A function from images to their gradients' directions g/‖g‖, a row per visit.

    Args:
        model: as it was sent; norm layers use the batch at hand, as in training, and dropout is off.
        loss: (outputs, targets) → the mean loss.
        names: the parameters whose gradient is meant.
        targets: [visits, images].
        to_inputs: pixels → the model's inputs.
    """
    model = copy_model(model).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    params = {name: p.detach() for name, p in model.named_parameters()}
    chosen = {name: params[name] for name in names}
    visits, count = targets.shape[:2]
    held = {name: b.detach().expand(visits, *b.shape) for name, b in model.named_buffers()}

    def loss_of(part: Tensors, buffers: Tensors, pixels: Tensor, target: Tensor) -> Tensor:
        inputs = to_inputs(pixels.reshape(count, -1, *pixels.shape[1:]))
        return loss(functional_call(model, {**params, **part, **buffers}, (inputs,)), target)

    def directions(images: Tensor) -> Tensor:
        buffers = {name: b.clone() for name, b in held.items()}
        found = vmap(grad(loss_of), in_dims=(None, 0, 0, 0))(chosen, buffers, images, targets)
        return unit(torch.cat([tensor.flatten(1) for tensor in found.values()], 1))

    return directions


def in_order(rebuilt: Tensor, originals: Tensor) -> Tensor:
    """Rebuilt images of one batch in the originals' order: a gradient does not tell which image was first."""
    errors = (rebuilt[:, None] - originals[None]).square().flatten(2).mean(2)
    mine, theirs = linear_sum_assignment(errors.numpy())
    return rebuilt[torch.as_tensor(mine)[torch.as_tensor(theirs).argsort()]]
