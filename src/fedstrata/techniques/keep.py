"""Keep: parts of the model stay with their client. FedPer, LG-FedAvg and FedBN are three choices of which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedstrata.core.technique import Setting, Technique
from fedstrata.core.tensors import Tensors
from fedstrata.core.types import Assignment, Stratum
from fedstrata.errors import UsageError
from fedstrata.models.parts import HEAD, Patterns, check_parts, names_of_parts

ONE_MODEL = "parts are named in one model, and there every group of clients has its own"
JUDGED = "accuracy: the mean of the clients' own models on the whole test set; the server's lacks what they keep"


@dataclass(frozen=True, kw_only=True)
class Keep(Technique):
    """Parts of the model stay with their client: w_k = (θ, φ_k), of which all clients share θ alone.

    Both parts train together in every visit, θ_k and φ_k by the gradient of the client's own loss. The server averages
    the θ_k; φ_k stays where it is, and the client goes on with it at its next visit. At first all have the server's φ.

    Args:
        strata: what stays: name patterns of strata, such as `("layer4*", "head")`; `head` is the classifier, whatever
            it is called, and `norm` all norm layers with their running statistics.

    What stays is moved by the client's loss alone: other techniques' corrections are for what travels.
    """

    name: ClassVar[str] = "keep"
    personalised: ClassVar[bool] = True
    incomplete: ClassVar[bool] = True
    caveat: ClassVar[str] = JUDGED
    refuses: ClassVar[dict[str, str]] = {"groupavg": ONE_MODEL}
    strata: Patterns = HEAD

    def kept(self, strata: tuple[Stratum, ...]) -> frozenset[str]:
        """The names of the parameters and running statistics that stay."""
        return names_of_parts(self.strata, strata)

    def check(self, setting: Setting) -> None:
        """Refuse patterns that name nothing, or everything, and statistics that the policy would average."""
        if setting.arch == "":  # sub-models may lack strata
            check_parts(f"{self.name}'s strata", self.strata, setting.strata)
        kept = self.kept(setting.strata)
        if kept.issuperset(setting.movable):
            of = f" of the model '{setting.arch}'" if setting.arch else ""
            raise UsageError(f"{self.name} leaves nothing{of} to travel: every client alone is the method 'local'")
        if setting.arch == "" and self.strata and kept.isdisjoint(setting.movable):
            raise UsageError(f"{self.name} keeps nothing that trains: it would be FedAvg")
        if setting.buffers == "average" and any(not kept.isdisjoint(s.buffers) for s in setting.strata):
            raise UsageError(
                f"{self.name} keeps norm layers with their clients, and fedavg(buffers='average') averages their "
                "running statistics: say fedavg(buffers='local')"
            )

    def plan(self, assignment: Assignment, strata: tuple[Stratum, ...], state: Tensors) -> Assignment:
        """All trains, and what stays does not travel."""
        kept = self.kept(strata)
        return replace(assignment, uploads=tuple(n for n in assignment.uploads if n not in kept))
