# %% [markdown]
# # Clients of different depth and budget
#
# Phones, gateways and PCs do not have the same memory, link or speed. Leaving the weak ones out loses their data. This
# tutorial shows two ways to keep them in: to let each device train the layers that it has room for, and to give weak devices a
# smaller model.

# %% tags=["parameters"]
ROUNDS = 20
EPOCHS = 1
WIDTH = 8

# %% [markdown]
# ## Ten devices, skewed data
#
# Six phones hold digits that the four PCs hardly see.

# %%
import fedstrata as fs

data = fs.load_dataset("digits")
parts = fs.partition(data.train.labels(), "shards(classes=3)", clients=10, seed=0)
clients = data.train.split(parts)
model = fs.build_model(f"cnn2(width={WIDTH})", data.input_shape, data.classes, seed=0)
common = {"rounds": ROUNDS, "epochs": EPOCHS, "lr": 0.1}

everybody = fs.Federation(model, clients, data.test, **common)
full = everybody.fit()
step = full.costs.training_memory
print(f"a training step of the whole model holds {step / 1000:.0f} kB")

# %% [markdown]
# ## A memory budget
#
# The phones have less than that. Without layer-wise training they are out:

# %%
pcs_only = fs.Federation(model, clients, data.test, without="0,1,2,3,4,5", **common).fit()

# %% [markdown]
# A *fleet* describes the devices. A device that cannot hold the whole step trains a group of neighbouring strata, and phones
# take turns, so that over the rounds every group is trained. What fits is predicted before anybody trains.

# %%
budget = int(0.9 * step)
fleet = f"phone*6(memory='{budget}B', up='100kB/s', down='400kB/s', flops='100M/s'); pc*4(up='10MB/s', flops='10G/s')"
narrow = fs.Federation(model, clients, data.test, fleet=fleet, **common)
for note in narrow.notes:
    print("-", note)
budgeted = narrow.fit()

# %%
for name, history in (("everybody, all layers", full), ("PCs only", pcs_only), ("phones in turns", budgeted)):
    print(f"{name:22} {100 * history.accuracy:5.1f} %   {history.costs.bytes_up / 1e6:5.1f} MB up")

# %% [markdown]
# ## Time, too
#
# A fleet has a clock: bytes by the links' rates, operations by the devices' speed. A round lasts as long as its slowest
# client, unless there is a deadline. `drop` leaves late devices out, `narrow` gives them fewer layers, so that they are in time.

# %%
slowest = max(record.simulated_seconds for record in budgeted.records) / ROUNDS
deadline = round(0.6 * slowest, 2)
for stragglers in ("wait", "drop", "narrow"):
    run = fs.Federation(model, clients, data.test, fleet=fleet, deadline=deadline, stragglers=stragglers, **common)
    history = run.fit()
    took, late = history.records[-1].simulated_seconds, sum(len(record.late) for record in history.records)
    print(f"{stragglers:7} {100 * history.accuracy:5.1f} %   {took:6.1f} simulated seconds   {late} visits late")

# %% [markdown]
# ## A smaller model for weak devices
#
# The other way: phones hold a ResNet-10, PCs a ResNet-18, whose layers include those of the smaller one. Each layer is averaged
# over the clients that hold it.

# %%
shape, narrower = data.input_shape, f"width={WIDTH // 2}, stem='3x3', maxpool=False"
deep = fs.build_model(f"resnet18({narrower})", shape, data.classes, seed=0)
shallow = fs.build_model(f"resnet10({narrower})", shape, data.classes, seed=0)


def arch_of(client):
    """The name of a client's model; "" is the whole one."""
    return "small" if client < 6 else ""


def of_two_depths(method):
    settings = {"archs": {"small": shallow}, "arch_of": arch_of, "method": method, "optimizer": "adam", "lr": 0.002}
    return fs.Federation(deep, clients, data.test, rounds=ROUNDS // 2, epochs=EPOCHS, **settings).fit()


for method in ("heteroavg", "heteroavg + inco"):
    history = of_two_depths(method)
    by_model = {name or "whole": f"{100 * score:.1f} %" for name, score in history.records[-1].arch_accuracy.items()}
    print(f"{method:17} {100 * history.accuracy:5.1f} %   by model {by_model}")

# %% [markdown]
# This is one seed of a short run: it shows how, not which is better. For that, compare with seeds, as in the
# [tutorial on comparisons](02_compare_and_publish.ipynb).
#
# **What was learnt.** A budget is a plan over layers like any other: it combines with every method, and costs and time are
# counted. [A fleet of devices](../docs/fleet.md) has the grammar and the model of time, and
# [clients of different depth](../docs/methods.md#clients-of-different-depth) the methods.
