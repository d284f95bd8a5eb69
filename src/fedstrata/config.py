"""One schema for every run: checked once, written to run.toml, read back by `fedstrata resume`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from fedstrata.errors import UsageError, did_you_mean, one_line
from fedstrata.spec import Buffers, Table, bind, lookup, parse_call, text_of
from fedstrata.tables import table


class Settings(BaseModel):
    """How a federation trains, whatever its model and data. The fields are `Federation`'s arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: str = Field("fedavg", description="what to run, as papers write it: 'feddyn(alpha=0.1) + fedlc'")
    rounds: int = Field(20, ge=1, description="number of rounds")
    participation: int | float = Field(
        1.0, description="clients per round: a fraction (1.0 is all) or, without a decimal point, a number"
    )
    epochs: int = Field(1, ge=1, description="local passes over a client's data")
    steps: int | None = Field(None, ge=1, description="local steps, instead of epochs")
    batch_size: int = Field(32, ge=1, description="examples per local step")
    lr: float = Field(0.1, gt=0, le=1e38, description="local learning rate")
    optimizer: str = Field("sgd", description="local optimiser, such as 'sgd(momentum=0.9)' or 'adam'")
    schedule: str = Field("constant", description="learning rate over the rounds, such as 'cosine'")
    clip: float | None = Field(None, gt=0, description="largest norm of a local gradient")
    augment: str = Field("none", description="augmentation of training images: rrc, cj, flip, both or a sum of them")
    buffers: Buffers | None = Field(None, description="running statistics: average, local or drop")
    seed: int = Field(0, ge=0, description="seed of every random stream")
    engine: str = Field("auto", description="how clients are run, as in 'fedstrata list engines'")
    workers: int | str = Field(1, description="clients trained at the same time, or auto for one per core")
    threads: int = Field(1, ge=1, description="threads of one worker; more may change the last bits")
    ray_address: str = Field("local", description="where Ray is, for the engine ray: local, auto or HOST:PORT")
    ray_cpus: float = Field(1.0, ge=0, description="CPUs that each of Ray's actors takes")
    ray_gpus: float = Field(0.0, ge=0, description="GPUs that each of Ray's actors takes")
    channels_last: bool = Field(True, description="faster layout for convolutions; changes the last bits")
    compile: bool = Field(False, description="compile the training step; takes a while at first, changes the last bits")
    device: str = Field("cpu", description="where training runs: cpu, cuda, cuda:1, mps")
    eval_every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    eval_clients: bool = Field(False, description="also evaluate the global model on every client's own data")
    target: float | None = Field(None, gt=0, le=1, description="accuracy to reach, for rounds-to-target")
    stop_at_target: bool = Field(False, description="end the run when the target is reached")
    checkpoint_seconds: float = Field(20.0, ge=0, description="shortest time between checkpoints")
    probe: str | None = Field(None, description="what to measure layer by layer: 'divergence cka …', or all")
    probe_every: int = Field(1, ge=1, description="rounds between measurements; the last planned round is measured")
    probe_clients: int = Field(10, ge=2, description="clients measured per round, at most")
    probe_examples: int = Field(256, ge=4, description="examples per client, and for comparing clients, at most")

    @field_validator("participation", mode="before")
    @classmethod
    def _participation(cls, value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not whole and not (isinstance(value, float) and 0 < value <= 1):
            raise ValueError("give a fraction above 0.0 and up to 1.0, or a whole number of clients")
        return value

    @field_validator("probe", mode="before")
    @classmethod
    def _probe(cls, value: Any) -> Any:
        return " ".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("workers", mode="before")
    @classmethod
    def _workers(cls, value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not whole and value != "auto":
            raise ValueError("give a number of processes, 1 or more, or auto")
        return value

    @field_validator("ray_address")
    @classmethod
    def _ray_address(cls, value: str) -> str:
        from fedstrata.engines.cluster import check_address

        return check_address(value)

    @model_validator(mode="after")
    def _names(self) -> Settings:
        from fedstrata.optim import build_optimizer, build_schedule
        from fedstrata.probing import chosen

        build_optimizer(self.optimizer)
        build_schedule(self.schedule)
        lookup("engine", table("engines"), self.engine)
        chosen(self.probe)
        if self.stop_at_target and self.target is None:
            raise UsageError("stop_at_target needs a target")
        return self


class RunConfig(Settings):
    """A whole run: Settings, and where its model and data come from."""

    workers: int | str = Field("auto", description="clients trained at the same time; auto is one per core")
    dataset: str = Field("digits", description="name of the data, as in 'fedstrata list datasets'")
    data_dir: str | None = Field(None, description="where the data files are; default: FEDSTRATA_DATA")
    model: str = Field("cnn2", description="name of the model, such as 'resnet8(width=16)'")
    archs: str | None = Field(
        None, description="clients' own models, parts of the server's, in groups: 'resnet10; resnet14; resnet18*2'"
    )
    partition: str = Field("dirichlet(alpha=0.1)", description="how examples are divided among clients")
    clients: int = Field(10, ge=0, description="number of clients; 0 for all natural ones")
    public: str | None = Field(None, description="the server's unlabelled inputs: a dataset, or a file X.npy")

    @model_validator(mode="before")
    @classmethod
    def _whole_model(cls, values: Any) -> Any:
        """Where clients have models of their own and nothing is said of the server's, it is the deepest of these."""
        if isinstance(values, dict) and values.get("archs") is not None and "model" not in values:
            return {**values, "model": ""}
        return values

    @field_validator("public")
    @classmethod
    def _whole_path(cls, value: str | None) -> str | None:
        """A file's whole path, so that a run means the same from another working directory."""
        return str(Path(value).expanduser().resolve()) if value is not None and value.endswith(".npy") else value

    @model_validator(mode="after")
    def _sources(self) -> RunConfig:
        from fedstrata.archs import shares
        from fedstrata.techniques import method

        said = method(self.method).base.buffers
        if said is not None and self.buffers not in (None, said):
            raise UsageError(f"the method says buffers={said!r}, but buffers = {self.buffers!r}: leave one of them out")
        bind("dataset", table("datasets"), self.dataset)
        if self.archs is not None:
            shares(self.archs)
        if self.model or self.archs is None:
            bind("model", table("models"), self.model)
        bind("partition", table("partitions"), self.partition)
        if self.public is not None and not self.public.endswith(".npy"):
            bind("dataset", table("datasets"), self.public)
        return self


S = TypeVar("S", bound=BaseModel)

SPECS = ("dataset", "model", "partition", "optimizer", "schedule")
"""Fields that are a name with arguments, and may also be given as a table: `[model] name = "resnet8", width = 16`."""


def checked(model: type[S], values: Mapping[str, Any]) -> S:
    """Values as a checked configuration.

    Raises:
        UsageError: one sentence that names the field, what is wrong and what would be right.
    """
    import numpy as np

    values = {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}
    for name, value in values.items():
        if name not in model.model_fields:
            raise UsageError(f"there is no setting '{name}'{did_you_mean(name, model.model_fields)}")
        if isinstance(value, str) and not _encodable(value):
            raise UsageError(f"{name} = {value!r} does not fit: it is not valid Unicode")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise UsageError(message) from None
        raise UsageError(f"{first['loc'][0]} = {first['input']!r} does not fit: {_lower(message)}") from None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of names with arguments as strings: {"model": {"name": "resnet8", "width": 16}} → "resnet8(width=16)"."""
    flat = dict(values)
    for field in SPECS:
        given = flat.get(field)
        if isinstance(given, Mapping):
            arguments = {k: _plain(v) for k, v in given.items() if k != "name"}
            if not isinstance(given.get("name"), str):
                raise UsageError(f'the table [{field}] needs a name = "…"')
            flat[field] = text_of(given["name"], arguments)
    return flat


def _plain(value: Any) -> Any:
    return tuple(_plain(v) for v in value) if isinstance(value, list) else value


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file") from None
    try:
        values = _parsed(text)
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {_lower(str(error))}") from None
    return flatten(values)


_DEEPEST = 100
_LARGEST = 10**1000


def _parsed(text: str) -> dict[str, Any]:
    """What TOML says.

    Raises:
        ValueError: if it is no TOML, or holds what can be neither checked nor shown: Python writes no number of more
            than some thousand digits (hexadecimal ones it reads), and dotted keys nest without a limit.
    """
    deep, long = "its lists or tables are nested too deeply", "a number in it has too many digits"
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(deep) from None
    except ValueError:
        raise ValueError(long) from None
    level: list[Any] = [values]
    for _ in range(_DEEPEST):
        if any(isinstance(value, int) and abs(value) > _LARGEST for value in level):
            raise ValueError(long)
        inner = (
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        )
        level = [value for values_ in inner for value in values_]
    if level:
        raise ValueError(deep)
    return values


@cache
def _kind(name: str) -> TypeAdapter[Any]:
    """What checks one field by itself."""
    field = RunConfig.model_fields[name]
    kind: Any = Annotated[field.annotation, field]
    return TypeAdapter(kind, config=RunConfig.model_config)


def read_run(path: Path) -> dict[str, Any]:
    """The values of a run.toml, for those who look at a run: of the right kind, whatever they name.

    Fields and names of another version are passed over, for a run's results stay what they are.

    Raises:
        UsageError: if a field is of another kind.
    """
    values = read_toml(path)
    for name in values.keys() & RunConfig.model_fields.keys():
        try:
            _kind(name).validate_python(values[name])
        except ValidationError as error:
            why = _lower(error.errors()[0]["msg"].removeprefix("Value error, "))
            raise UsageError(f"{path} says {name} = {values[name]!r}, which does not fit: {why}") from None
    return values


def assign(values: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Apply `a=c`, or `a.b=c` where b is an argument of the thing named in a: `model.width=16`.

    In a method the technique comes in between: `method.fedprox.mu=0.1`.
    """
    out = dict(values)
    for text in assignments:
        key, equals, raw = text.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise UsageError(f"--set {text}: write it like name=value or name.argument=value")
        value = _value(raw.strip())
        if len(path) == 1:
            out[path[0]] = value
            continue
        field = path[0]
        if field == "model" and out.get("archs") is not None and "model" not in out:
            raise UsageError(f"--set {text}: the server's model is the deepest of archs; set it there")
        default = RunConfig.model_fields[field].default if field in RunConfig.model_fields else None
        current = str(out.get(field, default))
        if field == "method" and len(path) == 3:
            out[field] = _with_method_argument(current, path[1], path[2], value)
        elif field in SPECS and len(path) == 2:
            out[field] = _with_argument(current, field, table(f"{field}s"), path[1], value)
        else:
            known = [f"{name}.…" for name in (*SPECS, "method")]
            raise UsageError(f"--set {text}: '{key}' has no such part{did_you_mean(key, known)}")
    return out


def _value(raw: str) -> Any:
    """What TOML makes of the text, or the text itself."""
    try:
        read = _parsed(f"value = {raw}")
    except ValueError:
        return raw
    return _plain(read["value"]) if len(read) == 1 else raw


def _with_argument(current: str, kind: str, known: Table, name: str, value: Any) -> str:
    call = parse_call(current)
    _, kwargs = bind(kind, known, call)
    return text_of(call.name, {**kwargs, name: value})


def _with_method_argument(current: str, technique: str, name: str, value: Any) -> str:
    from fedstrata.techniques import method

    read = method(current)
    parts = {read.base.name: str(read.base)} | {part.name: str(part) for part in read.techniques}
    if technique not in parts:
        raise UsageError(f"the method '{current}' has no technique '{technique}'{did_you_mean(technique, parts)}")
    parts[technique] = _with_argument(parts[technique], "method", table("methods"), name, value)
    return str(method(" + ".join(parts.values())))


def to_toml(values: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """Flat values as TOML; None is left out."""
    lines = [f"# {one_line(line, 10_000)}" for line in header]
    lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character TOML escapes more
    return repr(value)


FREE = frozenset({"engine", "workers", "ray_address", "ray_cpus", "ray_gpus", "checkpoint_seconds", "data_dir"})
"""Fields that do not change a result: runs that differ in nothing else are the same run."""


LOOKING = frozenset({"probe", "probe_every", "probe_clients", "probe_examples"})
"""Fields that say what is measured; they change no result either, but what is known of it."""


def same_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse to resume a run under other settings than its run.toml's: the result would be of neither."""
    if not path.exists():
        raise UsageError(f"{path.parent} has no run.toml: there is no run to resume")
    for name, (before, now) in _unlike(deciding(read_toml(path)), deciding(config)).items():
        raise UsageError(f"{path.parent} was run with {name} = {before}, not {now}")


def deciding(config: Mapping[str, Any]) -> dict[str, str]:
    """What decides about a run's result, of its configuration, as text: one client, 1, is not all of them, 1.0."""
    return {name: repr(v) for name, v in config.items() if name not in FREE | LOOKING and v is not None}


def check_unedited(path: Path, begun: Mapping[str, str]) -> None:
    """Refuse a run.toml that says other than what the run began with: the result would be of neither."""
    changed = _unlike(begun, deciding(read_toml(path)))
    if changed:
        told = ", ".join(f"{name} was {a or 'not set'}, is {b or 'not set'}" for name, (a, b) in changed.items())
        raise UsageError(
            f"{path} was edited after the run began: {one_line(told, 300)}; put it back, or start a new run"
        )


def _unlike(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """What differs: name → (before, now), None for what is not said."""
    names = [*before, *(name for name in now if name not in before)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}
