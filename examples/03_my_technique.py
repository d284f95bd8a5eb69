# %% [markdown]
# # Add your own technique and prove it
#
# A technique is one idea of a federated method: a term in the loss, a change of the mean, a plan of which layers train. You
# write it once. It combines with the other techniques, and runs on every engine.
#
# We write one, check it against its equation, and compare it with FedAvg in a way that a reviewer would accept.

# %% tags=["parameters"]
ROUNDS = 12
SEEDS = [0, 1, 2, 3, 4]
EPOCHS = 2

# %% [markdown]
# ## The idea
#
# With skewed labels, the last layer drifts most: every client pulls it towards its own classes. So we pull layers back to the
# global model, and pull harder the nearer they are to the output. Client k minimises
#
# ```text
# F_k(w) + μ/2 · Σ_l (l/L)^p · ‖w_l − w_l(global)‖²
# ```
#
# where l = 1 … L counts the strata from the input to the output. With p = 0 all layers are pulled equally: FedProx. With
# μ = 0 it is FedAvg.
#
# ## Write it
#
# We know the gradient of the term, so we use the hook `correct`, which adds to the gradient of each step and costs no
# backward pass. A technique is a frozen dataclass: it holds settings, and nothing else.

# %%
from dataclasses import dataclass
from typing import ClassVar

import fedstrata as fs


def pulls(strata, mu, power):
    """The factor of every parameter: μ (l/L)^p, l counted from 1."""
    depth = len(strata)
    return {name: mu * ((at + 1) / depth) ** power for at, stratum in enumerate(strata) for name in stratum.params}


@dataclass(frozen=True, kw_only=True)
class DeepPull(fs.Technique):
    """A pull towards the global model that grows with depth."""

    name: ClassVar[str] = "deeppull"
    mu: float = 0.1
    power: float = 2.0

    def local(self, view):
        if not self.mu:
            return fs.Hooks()
        received, factors = view.assignment.params, pulls(view.strata, self.mu, self.power)

        def correct(grads, batch):
            return {name: factors[name] * (batch.params[name] - received[name]) for name in grads}

        return fs.Hooks(correct=correct)


# %% [markdown]
# `grads` holds only what trains, so the technique also works while one layer trains. To use it by name, in text and together
# with others, put it into the table:

# %%
from fedstrata.techniques import TECHNIQUES

TECHNIQUES["deeppull"] = DeepPull
print(fs.method("deeppull(mu=0.5) + fedpart"))

# %% [markdown]
# ## Prove it
#
# Three checks, before any result. First, with its **neutral setting** it is FedAvg, bit for bit:

# %%
import torch

data = fs.load_dataset("digits")
model = fs.build_model("cnn2(width=4)", data.input_shape, data.classes, seed=0)
parts = fs.partition(data.train.labels(), "shards(classes=2)", clients=10, seed=0)
clients = data.train.split(parts)


def trained(method, **settings):
    return fs.Federation(model, clients, method=method, rounds=2, **settings).fit(progress=False).model


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


plain = trained("fedavg")
assert same(trained("deeppull(mu=0.0)"), plain)
assert not same(trained("deeppull(mu=1.0)"), plain)

# %% [markdown]
# Second, **known special cases**: a constant pull is FedProx.

# %%
prox, ours = trained("fedprox(mu=0.5)"), trained("deeppull(mu=0.5, power=0.0)")
gap = max((x - y).abs().max().item() for x, y in zip(prox.parameters(), ours.parameters(), strict=True))
print(f"largest difference from FedProx: {gap:.1e}")
assert gap < 1e-5

# %% [markdown]
# Third, **the equation itself**, worked out in NumPy, in double precision and without fedstrata: two linear layers, one
# client, squared error, a few steps of plain gradient descent.

# %%
import numpy as np

torch.manual_seed(1)
linear = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
x, y = torch.randn(8, 3), torch.randn(8)
mu, power, lr, steps = 0.8, 2.0, 0.1, 5

method = fs.chain(DeepPull(mu=mu, power=power))
one = fs.Federation(linear, [(x, y)], task="regression", method=method, rounds=1, steps=steps, lr=lr, batch_size=8)
result = one.fit(progress=False).model

first, second = (p.detach().numpy().astype(float) for p in linear.parameters())
a, b, inputs, targets = first.copy(), second.copy(), x.numpy().astype(float), y.numpy().astype(float)
for _ in range(steps):
    error = inputs @ a.T @ b.T - targets[:, None]
    into_b = 2 / 8 * error.T @ (inputs @ a.T)
    into_a = 2 / 8 * (error @ b).T @ inputs
    a = a - lr * (into_a + mu * (1 / 2) ** power * (a - first))
    b = b - lr * (into_b + mu * (2 / 2) ** power * (b - second))

for found, expected in zip(result.parameters(), (a, b), strict=True):
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
print("five steps agree with NumPy")

# %% [markdown]
# It also has to **combine**: with a plan that trains one layer at a time, and with clients that sit out. And it has to survive
# the trip through encoded messages (the engine `wire`) with the same bits.

# %%
some = {"method": "deeppull(mu=0.5) + fedpart(full_rounds=1, rounds_per_stratum=1)", "participation": 0.5}
assert same(trained(engine="serial", **some), trained(engine="wire", **some))

# %% [markdown]
# ## Is it any good?
#
# The same seeds for every method, and differences seed by seed. Five seeds are few; the interval says how few.

# %%
from fedstrata.compare import compare

study = {
    "dataset": "digits",
    "model": "cnn2(width=4)",
    "partition": "shards(classes=2)",
    "clients": 10,
    "rounds": ROUNDS,
    "epochs": EPOCHS,
    "seed": SEEDS,
    "method": ["fedavg", "fedprox(mu=0.5)", "deeppull(mu=0.5)", "fedimpro(split='layer1')"],
}
table = compare(study, out="runs/study")
for row in table.rows:
    print(f"{row.method:25} {row.of('score').mean:.3f} ± {row.of('score').std:.3f}")

# %%
from scipy import stats

usual = table.rows[0].by_seed()
for row in table.rows[1:]:
    gains = np.array([row.by_seed()[seed] - usual[seed] for seed in SEEDS])
    half = stats.t.ppf(0.95, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5
    low, high = 100 * (gains.mean() - half), 100 * (gains.mean() + half)
    verdict = "better" if low > 0 else "worse" if high < 0 else "not decided"
    print(
        f"{row.method:25} {100 * gains.mean():+5.1f} points over FedAvg, 90 % interval [{low:+.1f}, {high:+.1f}]: {verdict}"
    )

# %% [markdown]
# Report what the table says, also where it says that the idea does not help. Tune all methods with the same budget before
# you publish: the pull was not tuned here, and neither were the others.
#
# ## Where does it act?
#
# The probe `weightdiv` measures, layer by layer, how far clients' weights are from their mean. A pull that grows with depth
# should hold the last layers together most.

# %%
spread = {}
for name in ("fedavg", "deeppull(mu=0.5)"):
    run = fs.Federation(
        model, clients, method=name, rounds=ROUNDS, epochs=EPOCHS, probe="weightdiv", probe_every=ROUNDS
    )
    run.fit(progress=False)
    spread[name] = run.saved_run().latest("weightdiv")
for layer, before in spread["fedavg"].items():
    print(f"{layer:14} {before:.3f} → {spread['deeppull(mu=0.5)'][layer]:.3f}")

# %% [markdown]
# **What was learnt.** A technique is one class. It is proven by its neutral setting, its special cases and its equation,
# and judged by paired seeds.
#
# [Which method to override](../docs/howto/own-technique.md#which-method-to-override) says what else a technique can do. To
# add yours to fedstrata, follow [ten minutes in Contributing](../CONTRIBUTING.md#add-a-technique-in-ten-minutes): one row
# in a test matrix then checks it with every other technique.
