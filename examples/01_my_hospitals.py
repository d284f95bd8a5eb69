# %% [markdown]
# # My data, my model: why is it bad, and what helps?
#
# Four hospitals want one model that tells who has heart disease. No patient leaves a hospital. The first federated model
# disappoints. This tutorial finds out why, measures what helps, and mends the cause.
#
# The patients are made up, so that you can follow along without data. We planted one mistake of a kind that real exports have.
# Put your own files and your own model in the first cells.

# %% tags=["parameters"]
ROUNDS = 20
PATIENTS = 240  # per hospital
SEEDS = 3  # for every remedy that is tried

# %% [markdown]
# ## My data
#
# Each hospital exports a CSV file. In yours, this cell is not needed. One laboratory reports cholesterol in mmol/l, all
# others in mg/dl. Nobody has noticed.

# %%
import csv
import random

SHARE_SICK = {"Basel": 0.25, "Bern": 0.45, "Geneva": 0.5, "Zurich": 0.7}
MEASURES = {  # name: (mean if healthy, mean if sick, spread)
    "age": (51, 58, 9),
    "pressure": (128, 138, 17),
    "cholesterol": (232, 252, 45),
    "heart_rate": (156, 138, 22),
    "st_depression": (0.6, 1.5, 0.9),
}


def export(hospital, patients):
    draw = random.Random(hospital)
    with open(f"{hospital}.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*MEASURES, "sick"])
        for _ in range(patients):
            sick = draw.random() < SHARE_SICK[hospital]
            row = {name: draw.gauss(means[sick], spread) for name, (*means, spread) in MEASURES.items()}
            if hospital == "Geneva":
                row["cholesterol"] /= 38.67
            table.writerow([*(f"{value:.1f}" for value in row.values()), int(sick)])


for hospital in SHARE_SICK:
    export(hospital, PATIENTS)

# %% [markdown]
# One pair of tensors per client is all that fedstrata needs. A hospital that keeps some patients for testing gives two
# pairs: the model is then tested on its patients separately.

# %%
import torch

import fedstrata as fs


def read(hospital, test=0.3):
    with open(f"{hospital}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    x = torch.tensor([[float(row[name]) for name in MEASURES] for row in rows])
    y = torch.tensor([int(row["sick"]) for row in rows])
    held = int(test * len(y))
    return (x[held:], y[held:]), (x[:held], y[:held])


hospitals = [read(name) for name in SHARE_SICK]

# %% [markdown]
# ## My model
#
# Any `nn.Module`. fedstrata finds its *strata*: the layers that train, travel and are measured one by one.


# %%
class HeartNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.measures = torch.nn.Linear(len(MEASURES), 16)
        self.norm = torch.nn.LayerNorm(16)
        self.hidden = torch.nn.Linear(16, 16)
        self.sick = torch.nn.Linear(16, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.measures(x)))
        return self.sick(torch.relu(self.hidden(x)))


torch.manual_seed(0)
model = HeartNet()
fs.strata(model)

# %% [markdown]
# ## The first federation

# %%
common = {"task": "binary", "rounds": ROUNDS, "lr": 0.05, "client_names": list(SHARE_SICK), "eval_clients": True}
federation = fs.Federation(model, hospitals, out="runs/first", **common)
first = federation.fit()
first

# %% [markdown]
# How does each hospital fare?

# %%
for name, found in zip(SHARE_SICK, first.client_metrics, strict=True):
    print(f"{name:8} AUROC {found['auroc']:.3f}")

# %% [markdown]
# ## Why is it bad?
#
# `diagnose` trains a few more rounds with probes on, which changes nothing, and looks at every layer and every client.

# %%
diagnosis = federation.diagnose()
diagnosis

# %% [markdown]
# It names one hospital and one column, and says by how much. The planted mistake is found:

# %%
cause = diagnosis.findings[0]
print(cause.name, [list(SHARE_SICK)[client] for client in cause.clients])
assert cause.name == "broken-inputs"
assert cause.clients == (2,)

# %% [markdown]
# ## What helps?
#
# Do not believe advice: try it. Each remedy is trained beside the unchanged federation, the control group, with the same
# seeds. `centralised` pools all data and shows what could be reached at all.

# %%
from fedstrata.trials import Budget, tried_text, try_federation

tried = try_federation(federation, diagnosis, Budget(count=3, seeds=SEEDS))
print(tried_text(tried))

# %% [markdown]
# Leaving a hospital out, or using a method that tolerates it, is a stopgap. Now that we know where to look, we ask Geneva,
# and convert the unit.

# %%
for x, _ in hospitals[2]:
    x[:, list(MEASURES).index("cholesterol")] *= 38.67

mended = fs.Federation(model, hospitals, out="runs/mended", **common)
after = mended.fit()
again = mended.diagnose()
assert cause.name not in [finding.name for finding in again.findings]
again

# %% [markdown]
# The finding is gone. Measures of such different size still hinder a network that sees them raw. `standardise="client"`
# brings each hospital's columns to mean 0 and standard deviation 1, at the hospital itself: no mean leaves it.

# %%
standardised = fs.Federation(model, hospitals, out="runs/standardised", standardise="client", **common)
last = standardised.fit()

for name, history in (("first", first), ("unit mended", after), ("and standardised", last)):
    fair = history.fairness
    print(
        f"{name:18} AUROC {history.score:.3f}   worst hospital {list(SHARE_SICK)[fair.worst_client]} {fair.worst:.3f}"
    )

# %%
axes = first.plot()
after.plot(axes=axes)
last.plot(axes=axes)
_ = axes.legend(["first", "unit mended", "and standardised"])

# %% [markdown]
# ## Take it away
#
# One page with everything, to send to the hospitals. It holds no patient's data, and loads nothing from the network.

# %%
page = standardised.report()
print(page)

# %% [markdown]
# **What was learnt.** The diagnosis named the hospital and the column, and nobody looked at a patient. The trials showed what
# each remedy is worth before anybody chose one. The cause was mended at its source.
#
# Go on with [your own data](../docs/howto/own-data.md) in other forms, the
# [real four hospitals](../docs/results/hospitals.md) of the heart-disease data, or a
# [deployment](../docs/howto/deploy-with-flower.md), where the data stay at the hospitals.
