"""What does a paper change in federated averaging? One paper, one file, one row in the table."""

from __future__ import annotations

from fedstrata.core.method import Method
from fedstrata.core.spec import Registry
from fedstrata.techniques.apfl import APFL
from fedstrata.techniques.ccvr import CCVR
from fedstrata.techniques.ditto import Ditto
from fedstrata.techniques.fedasync import FedAsync
from fedstrata.techniques.fedavg import FedAvg, parse
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

TECHNIQUES: Registry = {
    "fedavg": FedAvg,
    "fedpart": FedPart,
    "select": Select,
    "fedldf": FedLDF,
    "progressive": Progressive,
    "fednlr": FedNLR,
    "fedimpro": FedImpro,
    "inco": InCo,
    "heteroavg": HeteroAvg,
    "groupavg": GroupAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "moon": Moon,
    "fedrs": FedRS,
    "fedlc": FedLC,
    "ccvr": CCVR,
    "fedspeed": FedSpeed,
    "feddf": FedDF,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedbuff": FedBuff,
    "fedasync": FedAsync,
    "keep": Keep,
    "fedper": FedPer,
    "lgfedavg": LGFedAvg,
    "fedbn": FedBN,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "ditto": Ditto,
    "apfl": APFL,
    "finetune": FineTune,
    "perturb": Perturb,
    "topk": TopK,
    "quantise": Quantise,
    "ffalora": FFALoRA,
    "fedsalora": FedSALoRA,
    "rolora": RoLoRA,
    "fedexlora": FedExLoRA,
    "hetlora": HetLoRA,
    "hlora": HLoRA,
    "flora": FLoRA,
    "flasc": FLASC,
    "centralised": Centralised,
    "local": Local,
}


def method(text: str | Method) -> Method:
    """Read a method string such as `"fedavg(buffers='local')"` or `"feddyn(alpha=0.1) + fedlc"`.

    Raises:
        UsageError: for an unknown name (with the nearest known one), a wrong argument or a pair that has no meaning.
    """
    return text if isinstance(text, Method) else parse(text, TECHNIQUES)
