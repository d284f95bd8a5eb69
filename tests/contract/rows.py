"""The rows of the contract matrix: adding a technique to the library means adding one row here."""

from __future__ import annotations

from dataclasses import dataclass

from fedstrata.core.technique import Technique
from fedstrata.techniques.apfl import APFL
from fedstrata.techniques.ccvr import CCVR
from fedstrata.techniques.ditto import Ditto
from fedstrata.techniques.fedasync import FedAsync
from fedstrata.techniques.fedavgm import FedAvgM
from fedstrata.techniques.fedbabu import FedBABU
from fedstrata.techniques.fedbn import FedBN
from fedstrata.techniques.fedbuff import FedBuff
from fedstrata.techniques.feddf import FedDF
from fedstrata.techniques.feddyn import FedDyn
from fedstrata.techniques.fedexlora import FedExLoRA
from fedstrata.techniques.fedimpro import FedImpro
from fedstrata.techniques.fedlc import FedLC
from fedstrata.techniques.fedldf import FedLDF
from fedstrata.techniques.fednlr import FedNLR
from fedstrata.techniques.fednova import FedNova
from fedstrata.techniques.fedopt import FedAdagrad, FedAdam, FedYogi
from fedstrata.techniques.fedpart import FedPart
from fedstrata.techniques.fedper import FedPer
from fedstrata.techniques.fedprox import FedProx
from fedstrata.techniques.fedrep import FedRep
from fedstrata.techniques.fedrs import FedRS
from fedstrata.techniques.fedsalora import FedSALoRA
from fedstrata.techniques.fedspeed import FedSpeed
from fedstrata.techniques.ffalora import FFALoRA
from fedstrata.techniques.finetune import FineTune
from fedstrata.techniques.flasc import FLASC
from fedstrata.techniques.flora import FLoRA
from fedstrata.techniques.hetlora import HetLoRA
from fedstrata.techniques.hlora import HLoRA
from fedstrata.techniques.inco import GroupAvg, HeteroAvg, InCo
from fedstrata.techniques.keep import Keep
from fedstrata.techniques.lgfedavg import LGFedAvg
from fedstrata.techniques.moon import Moon
from fedstrata.techniques.perturb import Perturb
from fedstrata.techniques.progressive import Progressive
from fedstrata.techniques.quantise import Quantise
from fedstrata.techniques.references import Centralised, Local
from fedstrata.techniques.rolora import RoLoRA
from fedstrata.techniques.scaffold import Scaffold
from fedstrata.techniques.select import Select
from fedstrata.techniques.topk import TopK
from tests.contract import standins


@dataclass(frozen=True)
class Row:
    """A technique to test.

    Args:
        technique: with settings under which it does something.
        neutral: with settings under which it must equal FedAvg bit for bit; None where there are none.
        order_free: True if the design promises that its place in the method does not matter.
        refits: parameters that it changes on the server although no client trained them.
        idle: True if it changes nothing where all clients have the same model.
        serial: why many clients cannot be trained with it at once; empty if they can.
        like: the technique that it is with other settings, which pairs are asked of in its place.
    """

    technique: Technique
    neutral: Technique | None
    order_free: bool = True
    refits: frozenset[str] = frozenset()
    idle: bool = False
    serial: str = ""
    like: str = ""


def devices_for(clients: int, *techniques: Technique) -> dict[str, str]:
    """The setting `fleet`, where a technique needs one: devices so unlike that what techniques cost orders nothing."""
    if all(technique.arrivals is None for technique in techniques):
        return {}
    return {"fleet": "; ".join(f"d{client}(down={10.0 ** (client % 3)})" for client in range(clients))}


ROWS = [
    Row(standins.Pull(mu=0.5), standins.Pull(mu=0.0)),
    Row(standins.Pace(), standins.Pace(factor=1.0)),
    Row(standins.Limit(limit=0.01), standins.Limit(limit=1e9), order_free=False),
    Row(FedProx(mu=0.5), FedProx(mu=0.0)),
    Row(Scaffold(), None),
    Row(FedNova(), None),
    Row(FedDyn(alpha=0.5), None, order_free=False),
    Row(FedDyn(alpha=0.5, mean_examples=20), None, order_free=False),
    Row(Moon(), Moon(mu=0.0)),
    Row(FedRS(), FedRS(alpha=1.0), order_free=False),
    Row(FedLC(), FedLC(tau=0.0), order_free=False),
    Row(CCVR(samples=20, epochs=2), CCVR(samples=0), order_free=False, refits=frozenset({"head.weight", "head.bias"})),
    Row(FedSpeed(), None),
    Row(FedPart(full_rounds=1, rounds_per_stratum=1), FedPart(cycles=0)),
    Row(Select(full_rounds=1, rounds_per_stratum=1), Select(share=1.0)),
    Row(FedLDF(share=0.4), FedLDF(share=1.0), like="select"),
    Row(Progressive(window=2, threshold=0.99), None, order_free=False, like="fedpart"),
    Row(FedNLR(), FedNLR(mu=1.0)),
    Row(FedImpro(split="norm"), FedImpro(split="norm", weight=0.0)),
    Row(InCo(), None, order_free=False),
    Row(InCo(control="shuffled"), None, order_free=False, like="inco"),
    Row(InCo(control="length"), None, order_free=False, like="inco"),
    Row(HeteroAvg(), None),
    Row(GroupAvg(), GroupAvg(), idle=True),
    Row(FedDF(noise=True, steps=3, batch_size=8), FedDF(noise=True, steps=0), order_free=False),
    Row(FedAvgM(beta=0.5), FedAvgM(beta=0.0), order_free=False),
    Row(FedAdagrad(), None, order_free=False),
    Row(FedAdam(), None, order_free=False),
    Row(FedYogi(), None, order_free=False),
    Row(FedBuff(buffer=2), None),
    Row(FedAsync(), None, like="fedbuff"),
    Row(Perturb(), Perturb(noise=0.0)),
    Row(TopK(share=0.3), TopK(share=1.0)),
    Row(Quantise(bits=4, feedback=True), Quantise(bits=32), like="topk"),
    Row(Keep(), Keep(strata=())),
    Row(FedPer(), None, like="keep"),
    Row(FedBN(), None, like="keep"),
    Row(LGFedAvg(), None, like="keep"),
    Row(FedRep(head_epochs=2), None),
    Row(FedBABU(epochs=1), None, like="finetune"),
    Row(FineTune(epochs=1), FineTune(epochs=0), idle=True),
    Row(Ditto(lambda_=0.5), Ditto(lambda_=0.0), idle=True),
    Row(APFL(), APFL(alpha=0.0), idle=True, like="ditto"),
    Row(Centralised(), None),
    Row(Local(), None),
]

ADAPTER_ROWS = [
    Row(FFALoRA(), None),
    Row(FedSALoRA(), None),
    Row(RoLoRA(), None),
    Row(FedExLoRA(), None, order_free=False),
    Row(HetLoRA(), HetLoRA(by="weight"), order_free=False),
    Row(HLoRA(), None, order_free=False),
    Row(FLoRA(), None, order_free=False),
    Row(FLASC(up=0.4, down=0.6), FLASC(up=1.0, down=1.0)),
]
"""Techniques for models with low-rank adapters, which `test_adapters.py` asks what the matrix asks of all others."""
