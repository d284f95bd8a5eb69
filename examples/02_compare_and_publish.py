# %% [markdown]
# # Compare methods, and publish the table and the figures
#
# From a list of methods to what goes into a paper: a table with significance marks, figures, and the bibliography. You can stop
# at any point and go on later; adding a seed or a method costs only the new runs.

# %% tags=["parameters"]
ROUNDS = 15
EPOCHS = 2
SEEDS = [0, 1, 2, 3, 4]
TUNING = [0.03, 0.1, 0.3]

# %% [markdown]
# ## What is compared
#
# The fields are those of a run. Any may hold a list.

# %%
common = {
    "dataset": "digits",
    "model": "cnn2(width=4)",
    "partition": "dirichlet(alpha=0.1)",
    "clients": 10,
    "rounds": ROUNDS,
    "epochs": EPOCHS,
}
METHODS = ["fedavg", "fedprox(mu=0.1)", "feddyn", "fedpart(full_rounds=3, rounds_per_stratum=1)"]

# %% [markdown]
# ## Tune fairly
#
# Every method gets the same choice of learning rates, on a seed that is not reported.

# %%
from fedstrata.compare import compare

best = {}
for method in METHODS:
    tuned = compare({**common, "method": method, "seed": 100, "lr": TUNING}, out="runs/tuning")
    best[method] = max(tuned.rows, key=lambda row: row.of("score").mean).run.config.lr
best

# %% [markdown]
# ## Run the study
#
# A method may bring settings of its own: here, its learning rate. `centralised` pools all data. It is not a competitor but the
# reference: the column `gap` is the distance to it.

# %%
chosen = [{"method": method, "lr": lr, "label": method.partition("(")[0]} for method, lr in best.items()]
study = {**common, "method": [{"method": "centralised", "lr": 0.1, "label": "centralised"}, *chosen], "seed": SEEDS}
found = compare(study, out="runs/study")

# %% [markdown]
# The directory holds finished runs, so the same call reads them. A terminal does the same with
# `fedstrata compare compare.toml --out runs/study`.

# %%
again = compare(study, out="runs/study", run=False)
assert [row.by_seed() for row in again.rows] == [row.by_seed() for row in found.rows]

for row in found.rows:
    score, up = row.of("score"), row.of("bytes_up")
    gap = "" if row.gap is None else f"gap {100 * row.gap.mean:4.1f} points"
    print(f"{row.method:12} {100 * score.mean:5.1f} ± {100 * score.std:3.1f} %   {up.mean / 1e6:5.1f} MB up   {gap}")

# %% [markdown]
# ## The table, ready for LaTeX
#
# The best mean is bold. A dagger marks methods that are worse than it by more than chance: a paired t-test over the seeds,
# with Holm's correction for the number of methods. The caption says so, and has the settings.

# %%
from fedstrata.compare.latex import latex

print(latex(found))

# %% [markdown]
# ## The figures
#
# `fedstrata plot runs/study --format pdf` writes the report's figures as files. Or draw your own from the results, here
# accuracy against what was sent, which is the comparison that matters where links are slow.

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3.6))
for row in found.rows[1:]:
    sent, score = row.of("bytes_up").mean / 1e6, row.of("score")
    axes.errorbar(sent, 100 * score.mean, yerr=100 * score.std, fmt="o", capsize=3, label=row.method)
axes.set_xlabel("MB sent by all clients")
axes.set_ylabel("accuracy, % (mean ± s.d.)")
_ = axes.legend(frameon=False)

# %%
from pathlib import Path

from fedstrata.report import write
from fedstrata.report.plots import plot
from fedstrata.runs.reader import SavedRun

runs = [SavedRun.read(Path(result.directory)) for row in found.rows for result in row.results]
print([path.name for path in plot(runs, Path("figures"), "pdf")])
print(write(runs, Path("supplement.html")))  # one page that reviewers can open

# %% [markdown]
# ## The bibliography
#
# One entry for each paper behind the methods, and one for this software.

# %%
from fedstrata.compare.cite import bibtex

print(bibtex([run.config for run in found.plan.runs]))

# %% [markdown]
# **What was learnt.** Tuning, seeds and costs are part of the comparison, not an afterthought. What differs by less than chance
# has no mark. Publish the settings with the table: `found.as_dict()` has all of them, and every seed's numbers.
#
# [Comparing methods](../docs/compare.md) explains every option and column.
