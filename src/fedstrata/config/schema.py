"""One schema for every run: checked once, written to run.toml, read back by `fedstrata resume`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from fedstrata.config.registries import table
from fedstrata.config.toml import lower_first, read_toml
from fedstrata.core.spec import Buffers, bind, lookup
from fedstrata.errors import UsageError, did_you_mean


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
        from fedstrata.core.optim import build_optimizer, build_schedule
        from fedstrata.probes.registry import choose_probes

        build_optimizer(self.optimizer)
        build_schedule(self.schedule)
        lookup("engine", table("engines"), self.engine)
        choose_probes(self.probe)
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
        from fedstrata.models.submodels import shares
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
        raise UsageError(f"{first['loc'][0]} = {first['input']!r} does not fit: {lower_first(message)}") from None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
            why = lower_first(error.errors()[0]["msg"].removeprefix("Value error, "))
            raise UsageError(f"{path} says {name} = {values[name]!r}, which does not fit: {why}") from None
    return values
