"""The rules by name: the mean, folded as updates arrive, and robust reducers that look at all updates of a round.

To add a rule, write it in a file of its own and give it a row in `REDUCERS`.

A reducer takes one delta, one dict of buffers and one weight per client, in client order, and returns (delta, buffers).
Clients may hold different names. Coordinate-wise reducers (`median`, `trimmed_mean`) go name by name over the clients
that hold the name, buffers included. The others measure whole deltas, their lengths or how far they are from each
other. `krum`, `multi_krum` and `geometric_median` turn that into one weight per client, 0 for none, and take the
weighted mean of deltas and buffers, name by name; a name that only clients of weight 0 hold is left out. Where no delta
holds anything, nothing can be measured, and the clients' own weights stay. With `per='stratum'` they look at each
stratum's part of a delta by itself (`strata.reduce_updates`). One that `trusts` is given the server's own update before
the clients'.

Half-precision tensors are computed in single precision; integers in double, and rounded, so they stay integers.
"""

from __future__ import annotations

from fedstrata.aggregation.bulyan import Bulyan
from fedstrata.aggregation.coordinate_wise import Median, TrimmedMean
from fedstrata.aggregation.fltrust import FLTrust
from fedstrata.aggregation.geometric_median import GeometricMedian
from fedstrata.aggregation.krum import Krum, MultiKrum
from fedstrata.aggregation.mean import WeightedMean
from fedstrata.aggregation.norm_clip import NormClip
from fedstrata.core.spec import Registry, bind
from fedstrata.core.types import Reducer

REDUCERS: Registry = {
    "mean": WeightedMean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "geometric_median": GeometricMedian,
    "bulyan": Bulyan,
    "norm_clip": NormClip,
    "fltrust": FLTrust,
}


def build_reducer(text: str) -> Reducer | None:
    """Read a reducer such as `trimmed_mean(share=0.2)`; None for `mean`, which is folded as updates arrive."""
    target, kwargs = bind("reducer", REDUCERS, text)
    if target is WeightedMean:
        return None
    reducer: Reducer = target(**kwargs)
    return reducer
