"""The schema: what is written is read back, and what does not fit gets one sentence that says what would."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedstrata.config.overrides import assign
from fedstrata.config.schema import RunConfig, Settings, validate_settings, validate_values
from fedstrata.config.toml import flatten, read_toml, to_toml
from fedstrata.errors import UsageError

finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
keys = st.from_regex(r"[a-z][a-z_]*", fullmatch=True)


@given(
    st.dictionaries(keys, st.booleans() | st.integers() | finite | texts),
    st.lists(texts | st.just("a note\nrounds = 5\r\x00\x7f"), max_size=2),
)
@example({"lr": 1e-05, "x": 1e16, "y": 5e-324, "z": -0.0, "w": 10**40}, [])
@example(
    {"a": "quote \" ' ''' \"\"\" \\ \\u0041", "b": "\x00\x1f\x7f\x80\x85\u2028\r\n\t", "c": "né 🙂 \ufeff"}, ["\x85"]
)
def test_what_is_written_is_read_back(values: dict[str, Any], header: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.toml")
        path.write_bytes(to_toml(values, header).encode())
        read = read_toml(path)
    assert read == values
    assert repr(read) == repr(values)  # -0.0 is not 0.0, True is not 1


def test_none_is_left_out() -> None:
    assert to_toml({"a": None, "b": 1}, ["note"]) == "# note\nb = 1\n"


def test_a_whole_configuration_is_read_back(tmp_path: Path) -> None:
    config = validate_settings(
        RunConfig, {"lr": 1e-05, "participation": 3, "clip": 0.5, "model": "mlp(hidden=(4, 5))", "data_dir": 'a"\\\n✓'}
    )
    (tmp_path / "run.toml").write_text(to_toml(config.model_dump()), encoding="utf-8")
    assert validate_settings(RunConfig, read_toml(tmp_path / "run.toml")) == config


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rounds": 0}, "rounds = 0 does not fit: input should be greater than or equal to 1"),
        ({"rounds": 2.5}, "rounds = 2.5 does not fit: input should be a valid integer"),
        ({"rounds": "3"}, "rounds = '3' does not fit: input should be a valid integer"),
        ({"rounds": True}, "rounds = True does not fit"),
        ({"lr": -1}, "lr = -1 does not fit: input should be greater than 0"),
        ({"lr": 0}, "lr = 0 does not fit"),
        ({"lr": float("nan")}, "lr = nan does not fit: input should be a finite number"),
        ({"lr": float("inf")}, "lr = inf does not fit: input should be a finite number"),
        ({"lr": "0.1"}, "lr = '0.1' does not fit"),
        ({"clip": float("inf")}, "clip = inf does not fit"),
        *(
            ({"participation": value}, f"participation = {value!r} does not fit: give a fraction above 0.0 and up to")
            for value in (0, 0.0, -1, -0.5, 1.5, float("nan"), float("inf"), "abc", "1", True, None, [1])
        ),
        ({"epochs": 0}, "epochs = 0 does not fit"),
        ({"steps": 0}, "steps = 0 does not fit"),
        ({"batch_size": 0}, "batch_size = 0 does not fit"),
        ({"seed": -1}, "seed = -1 does not fit"),
        ({"clients": -1}, "clients = -1 does not fit"),
        ({"workers": 0}, "workers = 0 does not fit"),
        ({"target": 1.5, "task": "classification"}, "target = 1.5 does not fit"),
        ({"stop_at_target": True}, "stop_at_target needs a target"),
        ({"buffers": "avg"}, "buffers = 'avg' does not fit: input should be 'average', 'local' or 'drop'"),
        ({"buffers": "drop", "method": "fedavg(buffers='local')"}, "says buffers='local', but buffers = 'drop'"),
        ({"method": 3}, "method = 3 does not fit: input should be a valid string"),
        ({"method": "fedavgg"}, "there is no method 'fedavgg' (did you mean 'fedavg'?)"),
        ({"model": "cnn22"}, "there is no model 'cnn22' (did you mean 'cnn2'?)"),
        ({"dataset": "mnits"}, "there is no dataset 'mnits' (did you mean 'mnist'?)"),
        ({"partition": "dirichlett"}, "there is no partition 'dirichlett' (did you mean 'dirichlet'?)"),
        ({"optimizer": "sdg"}, "there is no optimizer 'sdg' (did you mean 'sgd'?)"),
        ({"optimizer": "sgd(momentum=-1)"}, "sgd's momentum must be 0 or more, not -1"),
        ({"schedule": "cosin"}, "there is no schedule 'cosin' (did you mean 'cosine'?)"),
        ({"engine": "seriall"}, "there is no engine 'seriall' (did you mean 'serial'?)"),
        ({"roundss": 3}, "there is no setting 'roundss' (did you mean 'rounds'?)"),
        ({"data_dir": "\udcff"}, "data_dir = '\\udcff' does not fit: it is not valid Unicode"),
    ],
    ids=str,
)
def test_what_does_not_fit(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        validate_settings(RunConfig, values)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_fits() -> None:
    for values in ({"participation": 1}, {"participation": 1.0}, {"participation": 1e-9}, {"lr": 1}, {"clip": None}):
        validate_settings(RunConfig, values)
    assert isinstance(validate_settings(Settings, {"participation": 1}).participation, int)
    assert isinstance(validate_settings(Settings, {"participation": 1.0}).participation, float)
    validate_settings(RunConfig, {"method": "fedavg(buffers='local')", "buffers": "local"})


# --- TOML ------------------------------------------------------------------------------------------------------------


def test_tables(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'rounds = 3\nmethod = "fedavg"\n[model]\nname = "mlp"\nhidden = [4, 5]\n[partition]\nname = "iid"\n'
    )
    assert read_toml(tmp_path / "a.toml") == {
        "rounds": 3,
        "method": "fedavg",
        "model": "mlp(hidden=(4, 5))",
        "partition": "iid",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds = ", "is not valid TOML: invalid value (at end of document)"),
        ("rounds = 1\nrounds = 2", "is not valid TOML: cannot overwrite a value"),
        ("rounds 3", "is not valid TOML"),
        ("x = " + "[" * 5000 + "]" * 5000, "is not valid TOML: its lists or tables are nested too deeply"),
        ("x" + ".x" * 5000 + " = 1", "is not valid TOML: its lists or tables are nested too deeply"),
        ("rounds = 0x" + "f" * 5000, "is not valid TOML: a number in it has too many digits"),
        (
            "model = {name = 'mlp', hidden = [0x" + "f" * 5000 + "]}",
            "is not valid TOML: a number in it has too many digits",
        ),
        ("x = " + "9" * 5000, "is not valid TOML: a number in it has too many digits"),
        ("[model]\nwidth = 3", 'the table [model] needs a name = "…"'),
        ("[model]\nname = 3", 'the table [model] needs a name = "…"'),
        (b"\xff\xfe", "is not a text file"),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_invalid_toml(tmp_path: Path, text: str | bytes, said: str) -> None:
    (tmp_path / "a.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as refused:
        read_toml(tmp_path / "a.toml")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["[method]\nname = 'fedavg'", "[model]\nname = 'cnn2'\n[model.width]\na = 1", "[run]\nrounds = 3"],
)
def test_tables_where_none_belong(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UsageError):
        validate_settings(RunConfig, read_toml(tmp_path / "a.toml"))


# --- --set -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignments", "after"),
    [
        (["rounds=3"], {"rounds": 3}),
        (["rounds = 3 ", "rounds=4"], {"rounds": 4}),
        (["lr=1e-5"], {"lr": 1e-5}),
        (["eval_clients=true"], {"eval_clients": True}),
        (["method=fedavg"], {"method": "fedavg"}),
        (['method="fedavg"'], {"method": "fedavg"}),
        (["data_dir=a=b"], {"data_dir": "a=b"}),
        (["dataset=synthetic(shape=(1, 2))"], {"dataset": "synthetic(shape=(1, 2))"}),
        (["model.width=16"], {"model": "cnn2(width=16)"}),
        (["model=mlp", "model.hidden=[3, 4]"], {"model": "mlp(hidden=(3, 4))"}),
        (["model.width=16", "model.hidden=9"], {"model": "cnn2(width=16, hidden=9)"}),
        (["partition.alpha=1"], {"partition": "dirichlet(alpha=1)"}),
        (["optimizer.momentum=0.9"], {"optimizer": "sgd(momentum=0.9)"}),
        (["schedule=step", "schedule.every=2"], {"schedule": "step(every=2)"}),
        (["method.fedavg.server_lr=0.5"], {"method": "fedavg(server_lr=0.5)"}),
        (
            ["method=fedavg(server_lr=1e+2)", "method.fedavg.weight=uniform"],
            {"method": "fedavg(weight='uniform', server_lr=100.0)"},
        ),
        (["rounds=1\nlr=3"], {"rounds": "1\nlr=3"}),
        (["lr=" + "[" * 5000], {"lr": "[" * 5000}),
        (["lr=" + "9" * 5000], {"lr": "9" * 5000}),
        (["lr="], {"lr": ""}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_assign(assignments: list[str], after: dict[str, Any]) -> None:
    values: dict[str, Any] = {}
    assert assign(values, assignments) == after
    assert values == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds", "--set rounds: write it like name=value"),
        ("=3", "--set =3: write it like"),
        ("model.=3", "write it like"),
        (".width=3", "write it like"),
        ("model.widht=3", "model 'cnn2' has no argument 'widht' (did you mean 'width'?)"),
        ("model.width=x", "argument 'width': 'x' does not fit"),
        ("model.width.x=3", "'model.width.x' has no such part"),
        ("rounds.x=3", "'rounds.x' has no such part"),
        ("nothing.x=3", "'nothing.x' has no such part"),
        ("method.mu=3", "'method.mu' has no such part"),
        ("method.fedprocks.mu=3", "the method 'fedavg' has no technique 'fedprocks'"),
        ("method.fedavg.wait=3", "has no argument 'wait' (did you mean 'weight'?)"),
    ],
)
def test_assignments_that_do_not_fit(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        validate_settings(RunConfig, assign({}, [text]))
    assert said in str(refused.value)


def test_flatten_leaves_the_rest_alone() -> None:
    values = {"model": "cnn2", "other": {"name": "x"}}
    assert flatten(values) == values


def test_an_engine_of_another_version_can_be_read_but_not_run() -> None:
    """Whoever looks at a stored run need not know its engine."""
    assert validate_values(RunConfig, {"engine": "quantum"}).engine == "quantum"
    with pytest.raises(UsageError, match="there is no engine 'quantum'"):
        validate_settings(RunConfig, {"engine": "quantum"})


@pytest.mark.parametrize("address", ["local", "auto", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_addresses_of_a_cluster(address: str) -> None:
    assert validate_settings(Settings, {"ray_address": address}).ray_address == address


@pytest.mark.parametrize("address", ["", "head", "head:", ":6379", "ray://head:1", "a b:1", "head:123456", "::1:6379"])
def test_what_is_no_address_of_a_cluster(address: str) -> None:
    with pytest.raises(UsageError, match="does not fit: give local, auto or the HOST:PORT of a Ray cluster"):
        validate_settings(Settings, {"ray_address": address})
