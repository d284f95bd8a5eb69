"""How far are clients apart? Pure functions that change nothing they are given.

The formulas are those of FedImpro (Tang et al., ICLR 2024), for similarity those that InCo Aggregation (Chan et al.,
ICLR 2024) measures by, and for divergence those of "Unlocking the Potential of Federated Learning for Deeper Models";
symbols: client m with n_m examples, N = Σ n_m, p_m = n_m/N, gradient g_m. Whatever takes a model works on a copy of it,
in evaluation mode unless it says otherwise, and gives the random generators back as they were.
"""

from __future__ import annotations

from fedstrata.probes.measures.aggregation import aggregation_error
from fedstrata.probes.measures.crossing import CROSSING_FIGURES, Crossing, crossing
from fedstrata.probes.measures.depth import dead_units, relative_gradients
from fedstrata.probes.measures.divergence import divergence, relative_divergence, unscaled_divergence, update_cosine
from fedstrata.probes.measures.exchange import Exchange, exchange
from fedstrata.probes.measures.feature_map import Embedding, embedding
from fedstrata.probes.measures.features import (
    LIMIT,
    Distance,
    conditional_wasserstein,
    feature_distance,
    features_at,
    mean_wasserstein,
)
from fedstrata.probes.measures.forgetting import Calibration, forgetting
from fedstrata.probes.measures.gradient_norms import GradientTrace, gradient_trace
from fedstrata.probes.measures.gradient_spread import DRAWS, GradientSpread, input_noise, within_class
from fedstrata.probes.measures.gradients import (
    Distribution,
    Variance,
    client_gradients,
    gradient_distribution,
    gradient_variance,
    gradient_variance_by_stratum,
    shared_gradient,
    with_shared,
)
from fedstrata.probes.measures.margins import MarginTerms, margin_terms, margins, mean_margin
from fedstrata.probes.measures.neurons import Drift, neuron_drift
from fedstrata.probes.measures.rates import RateSearch, search_rates
from fedstrata.probes.measures.reading import BATCH, Labelled
from fedstrata.probes.measures.running_statistics import reestimate_statistics, statistics_spread
from fedstrata.probes.measures.similarity import LayerSimilarity, cka, layer_similarity, minibatch_cka
from fedstrata.probes.measures.visits import VisitTable, compare_visits, statistics_distances
from fedstrata.probes.measures.weights import (
    Generalisation,
    generalisation,
    weight_divergence,
    weight_divergence_by_stratum,
)

__all__ = [
    "BATCH",
    "CROSSING_FIGURES",
    "DRAWS",
    "LIMIT",
    "Calibration",
    "Crossing",
    "Distance",
    "Distribution",
    "Drift",
    "Embedding",
    "Exchange",
    "Generalisation",
    "GradientSpread",
    "GradientTrace",
    "Labelled",
    "LayerSimilarity",
    "MarginTerms",
    "RateSearch",
    "Variance",
    "VisitTable",
    "aggregation_error",
    "cka",
    "client_gradients",
    "compare_visits",
    "conditional_wasserstein",
    "crossing",
    "dead_units",
    "divergence",
    "embedding",
    "exchange",
    "feature_distance",
    "features_at",
    "forgetting",
    "generalisation",
    "gradient_distribution",
    "gradient_trace",
    "gradient_variance",
    "gradient_variance_by_stratum",
    "input_noise",
    "layer_similarity",
    "margin_terms",
    "margins",
    "mean_margin",
    "mean_wasserstein",
    "minibatch_cka",
    "neuron_drift",
    "reestimate_statistics",
    "relative_divergence",
    "relative_gradients",
    "search_rates",
    "shared_gradient",
    "statistics_distances",
    "statistics_spread",
    "unscaled_divergence",
    "update_cosine",
    "weight_divergence",
    "weight_divergence_by_stratum",
    "with_shared",
    "within_class",
]
