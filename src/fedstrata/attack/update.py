"""The attack on an update: a client's images, or the tokens of its texts, from the change of what it has trained.

What travels is looked at as a whole, and stratum by stratum, as a round of FedPart sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedstrata.attack.asking import MOST, Progress, check_counts, check_search
from fedstrata.attack.images import ImageUpdate, rebuild_images
from fedstrata.attack.sending import Sender
from fedstrata.attack.texts import TextUpdate, find_tokens
from fedstrata.attack.victim import RunClient, draw_in_turns, has_images, open_client
from fedstrata.core.parts import Parts
from fedstrata.core.rng import generator
from fedstrata.core.types import Work
from fedstrata.errors import UsageError
from fedstrata.models.inputs import fit_model
from fedstrata.run import final_model, models_of


def attack_update(
    directory: str | Path,
    *,
    client: int | None = None,
    examples: int = 8,
    batch: int = 1,
    epochs: int = 1,
    strata: Sequence[str] | None = None,
    start: bool = False,
    steps: int = 300,
    lr: float = 0.1,
    tv: float = 0.01,
    seed: int = 0,
    data_dir: str | None = None,
    progress: Progress | None = None,
) -> ImageUpdate | TextUpdate:
    """Rebuild what a client has trained on from its update: images by their gradient, tokens by what layers show.

    The attacker knows the model that was sent and how many examples a visit has, of images also their targets; not
    their pixels or tokens. A visit trains with the run's optimiser, learning rate and clipping, and no technique.

    Args:
        directory: of a finished run of the command line.
        client: whose examples; None for the client with most classes.
        examples: how many, of as many classes as there are.
        batch: examples of a visit, which it trains on at once.
        epochs: steps of a visit; the attacker takes what has changed for one gradient.
        strata: which to look at, beside the whole; None for all.
        start: attack the first round's model in the place of the final one.
        steps: of the search for images.
        lr: its first step; see `search.descend`.
        tv: weight of the total variation.
        seed: of the choice of examples, of dropout and of the start.
        data_dir: where the data files are now.
        progress: called with (steps done, steps of all).

    Raises:
        UsageError: if something does not fit.
    """
    check_counts(MOST, examples=examples, batch=batch)
    check_counts(1000, epochs=epochs)
    check_search(steps, lr, tv, seed)
    found, sender = open_attacked(Path(directory), client, data_dir, batch=batch, epochs=epochs, start=start, seed=seed)
    visits = _draw_visits(found, examples, batch, seed)
    settings = {"examples": examples, "batch": batch, "epochs": epochs, "start": start, "seed": seed}
    if has_images(found.dataset):
        search = {**settings, "steps": steps, "lr": lr, "tv": tv}
        return rebuild_images(Path(directory), found, sender, visits, sender.parts(strata), search, progress)
    return find_tokens(Path(directory), found, sender, visits, sender.parts(strata), settings, progress)


def open_attacked(
    directory: Path, client: int | None, data_dir: str | None, *, batch: int, epochs: int, start: bool, seed: int
) -> tuple[RunClient, Sender]:
    """A client of a finished run, and the same with the model that it was sent."""
    found = open_client(directory, client, data_dir, classes=False)
    x = found.dataset.train.x
    if not has_images(found.dataset) and not isinstance(x, Parts) and x.is_floating_point():
        raise UsageError(
            f"images and texts can be rebuilt, and the examples of {found.config.dataset} are neither of them"
        )
    config = found.config
    model = models_of(config, found.dataset)[0] if start else final_model(directory, config, found.dataset)
    work = Work(epochs=epochs, batch_size=batch, optimizer=config.optimizer, lr=config.lr, clip=config.clip)
    fit_model(model, found.data.batch(torch.arange(min(2, len(found.data))))[0])
    counts = torch.bincount(found.train.labels()) if found.task.needs_counts else None
    sender = Sender(model, found.task.resolve(counts), found.data, work, seed)
    sender.check_batch(batch)
    return found, sender


def _draw_visits(found: RunClient, examples: int, batch: int, seed: int) -> list[torch.Tensor]:
    """The places of each visit's examples."""
    if found.classes:
        places = torch.tensor(draw_in_turns(found.data.labels(), examples, seed))
    else:
        places = torch.randperm(len(found.data), generator=generator(seed, "attack", "images"))[:examples]
    whole = len(places) // batch * batch
    if not whole:
        raise UsageError(f"client {found.number} has {len(places)} examples, fewer than a batch of {batch}")
    return list(torch.split(places[:whole], batch))
