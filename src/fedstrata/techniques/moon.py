"""MOON: features near the global model's and far from the client's last ones.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedstrata.core.citation import Paper
from fedstrata.core.lazy import functional as F
from fedstrata.core.lazy import torch
from fedstrata.core.technique import Batch, ClientView, Hooks, Setting, Technique, memory_mismatch
from fedstrata.core.tensors import Tensors, add, match_layout
from fedstrata.core.types import Into
from fedstrata.errors import UsageError, did_you_mean, not_negative, positive
from fedstrata.models.passes import calls
from fedstrata.models.strata import classifier

if TYPE_CHECKING:
    from torch import Tensor


PAPERS = (
    Paper(
        "Qinbin Li and Bingsheng He and Dawn Song",
        "Model-Contrastive Federated Learning",
        "CVPR",
        2021,
    ),
)


def contrast(now: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """Row by row −log(e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ})), sim the cosine.

    Written as log(1 + e^{(sim(z, z_prev) − sim(z, z_glob))/τ}), which cannot overflow.
    """
    with torch.no_grad():
        away = F.normalize(far) - F.normalize(near)
    return F.softplus((F.normalize(now) * away).sum(1) / tau)


@dataclass(frozen=True, kw_only=True)
class Moon(Technique):
    """Features z near the global model's and far from the client's last: the local loss plus μ·contrast(z).

    contrast = −log(e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ})). z_glob comes from the
    received model, z_prev from the client's model at the end of its last visit, which it keeps. In a first visit there
    is none: with z_prev = z_glob the term would be constant, so it is left out.

    z is computed in training mode, z_glob and z_prev in evaluation mode, as in the authors' released code; the paper
    does not say. So z_glob and z_prev know no dropout. In norm layers z_glob uses the running statistics that the visit
    starts with (the received ones, or the client's own under `buffers="local"`), z_prev those at the end of the last
    visit, which the client keeps beside that model; a client that kept none (in a run from before they were kept) uses
    z_glob's. Under `buffers="drop"`, both use the batch's own.

    Args:
        mu: μ, the strength; 0 is FedAvg. The paper tunes it in {0.1, 1, 5, 10}.
        tau: τ, the temperature.
        stage: the module whose output z is; by default z is what goes into the classifier.

    Deviation: the paper adds a projection head before the classifier; give the model one, and name it in `stage`.
    """

    name: ClassVar[str] = "moon"
    papers: ClassVar[tuple[Paper, ...]] = PAPERS
    vectorises: ClassVar[bool] = True
    mu: float = 1.0
    tau: float = 0.5
    stage: str | None = None

    def __post_init__(self) -> None:
        not_negative("moon", mu=self.mu)
        positive("moon", tau=self.tau)

    def check(self, setting: Setting) -> None:
        """Refuse a model without a place to compare features at."""
        known = [name for name, _ in setting.model.named_modules() if name]
        if self.stage is not None and self.stage not in known:
            raise UsageError(f"moon's stage: the model has no module '{self.stage}'{did_you_mean(self.stage, known)}")
        last = classifier(setting.strata)
        if self.stage is None and last is None:
            raise UsageError(
                "moon compares what goes into the last layer, and no single last layer was found in this model: name "
                "the module whose output to compare, moon(stage=…)"
            )
        place = self.stage or ("" if last is None else last.name)
        module = setting.model.get_submodule(place)
        for training, when in ((True, "training"), (False, "evaluation")):
            if self.mu and module not in calls(setting.model, setting.sample, training):
                raise UsageError(f"moon's stage: the model's module '{place}' does not run in {when}")

    def local(self, view: ClientView) -> Hooks:
        """The loss plus μ·contrast(z); the client keeps its model."""
        if not self.mu or not view.assignment.trains:
            return Hooks()
        last = classifier(view.strata)
        place = self.stage or Into("" if last is None else last.name)
        anchor = dict(view.assignment.params)

        def finish(delta: Tensors, tally: Tensors) -> tuple[Tensors, Tensors | None]:
            return {}, {**add(anchor, delta), **view.statistics()}

        unmoved = not self.stage and last is not None and set(view.assignment.trains) <= set(last.params)
        if not view.memory or unmoved:  # nothing to be far from, or nothing trains that z depends on
            return Hooks(finish=finish)
        received = {**anchor, **view.statistics()}
        last_model = {**view.memory, **view.kept}  # what it keeps was not in the delta, and is as it left it
        before = [received, {**received, **match_layout(last_model, received)}]
        now: list[Tensor] = []

        def tap(batch: Batch, features: Tensor) -> Tensor:
            now[:] = [features[: len(batch.y)]]
            return features

        def loss(batch: Batch) -> Tensor:
            with torch.no_grad():
                near, far = (batch.forward(model, place).flatten(1) for model in before)
            return self.mu * batch.mean(contrast(now[0].flatten(1), near, far, self.tau))

        return Hooks(features={place: tap}, loss=loss, finish=finish)

    def validate_memory(self, memory: Tensors, params: Tensors, buffers: Tensors) -> str | None:
        """Refuse a memory that is not a whole model."""
        own = buffers if any(n in memory for n in buffers) else {}  # all or, in runs from before they were kept, none
        return memory_mismatch(memory, (*params, *own), (*params, *own))
