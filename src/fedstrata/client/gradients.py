"""Gradients beside the training: at what a model holds now, by torch's tape, and on a few of a client's examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedstrata.core.rng import generator
from fedstrata.core.tensors import Tensors
from fedstrata.data.labels import UnknownClass
from fedstrata.models.norms import evaluation_mode
from fedstrata.system.devices import to_device

if TYPE_CHECKING:
    from fedstrata.client.context import ModelReplica
    from fedstrata.core.technique import Buffers
    from fedstrata.core.types import Examples


def compute_gradient(loss: Callable[[], Tensor], leaves: Tensors) -> Tensors:
    """The gradient by torch's tape; what the loss does not use has a gradient of zero."""
    frozen = [p for p in leaves.values() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_()
    try:
        with torch.enable_grad():
            value = loss()
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    finally:
        for p in frozen:
            p.requires_grad_(False)
    return dict(zip(leaves, grads, strict=True))


def sample_gradients(
    replica: ModelReplica, data: Examples, policy: Buffers, seed: int, batch_size: int, parts: int
) -> Iterator[Tensors]:
    """The gradient of the task's mean loss, of all parameters but a frozen base, on a few parts of some examples.

    As many examples as that many batches have, or all if there are fewer, drawn by the seed and dealt out as evenly as
    they can be; the model is as the run would evaluate it. Fewer examples than parts make fewer parts.
    """
    chosen = torch.randperm(len(data), generator=generator(seed, "gradients"))[: parts * batch_size]
    leaves = {n: p for n, p in replica.params.items() if p.is_floating_point() and n not in replica.base}
    device = next(iter(replica.params.values())).device
    for index in torch.tensor_split(chosen, min(parts, len(chosen))):
        x, y = data.batch(index)
        x, y = replica.inputs(to_device(x, device)), to_device(y, device)
        with evaluation_mode(replica.model, policy, len(index)):
            try:
                yield compute_gradient(partial(_loss, replica, x, y), leaves)
            except UnknownClass as error:
                raise error.at(getattr(data, "whose", ""), y, index) from None


def _loss(replica: ModelReplica, x: Tensor, y: Tensor) -> Tensor:
    return replica.task.mean_loss(replica.model(x), y)
