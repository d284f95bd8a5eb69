"""One schema for every run: validated once, written to run.toml, read back by `fedstrata resume`.

Whoever is about to train validates with `validate_settings`. Whoever looks at stored runs reads them with `read_run`,
or with `validate_values` where a whole configuration is needed: neither imports engines or torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from fedstrata.config.registries import load_table
from fedstrata.config.toml import lower_first, read_toml
from fedstrata.core.spec import Buffers, bind, lookup, settle, split_sum
from fedstrata.core.types import Precision
from fedstrata.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from fedstrata.core.method import Method
    from fedstrata.core.task import Task

RAY_ADDRESS = re.compile(r"auto|local|[^\s:/@]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")


def _is_count(value: Any) -> bool:
    """True for a whole number above 0; True itself is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def parse_clients(value: Any) -> list[int]:
    """Client numbers, in order and each once, from '3,5', one number or several.

    Raises:
        ValueError: for what is none.
    """
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    try:
        found = sorted({int(str(number).strip()) for number in given})
    except ValueError:
        found = []
    if not found or found[0] < 0:
        raise ValueError("give numbers of clients, from 0 on, such as '3,5'")
    return found


class Settings(BaseModel):
    """How a federation trains, whatever its model and data. The fields are `Federation`'s arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: str = Field("fedavg", description="what to run, as papers write it: 'feddyn(alpha=0.1) + fedlc'")
    task: str = Field("classification", description="what is learnt, such as 'binary' or 'regression(loss='l1')'")
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
    precision: Precision = Field(
        "fp32", description="local forward passes: fp32 or bf16, torch's autocast; parameters and updates stay the same"
    )
    augment: str = Field("none", description="augmentation of training images: rrc, cj, flip, both or a sum of them")
    buffers: Buffers | None = Field(None, description="running statistics: average, local or drop")
    seed: int = Field(0, ge=0, description="seed of every random stream")
    faults: str | None = Field(
        None, description="what goes wrong at some clients, on purpose: 'signflip(share=0.3, scale=4) + drop(0.5)'"
    )
    without: str | None = Field(None, description="clients that never take part, by number: '3,5'")
    newcomers: float | None = Field(
        None, gt=0, lt=1, description="share of the clients that take part only after the last round, as in finetune"
    )
    standardise: Literal["client"] | None = Field(
        None, description="client: every client's inputs by its own mean and deviation, test inputs by the median's"
    )
    fleet: str | None = Field(
        None, description="clients' devices, group after group: 'phone*6(up='1MB/s', flops='2G/s'); server*4'"
    )
    deadline: float | None = Field(None, gt=0, description="simulated seconds of a round, by the fleet's devices")
    stragglers: Literal["drop", "wait", "narrow"] = Field(
        "drop", description="who is late: drop it, wait for it, or narrow: who would be trains fewer strata in time"
    )
    engine: str = Field("auto", description="how clients are run, as in 'fedstrata list engines'")
    workers: int | str = Field(1, description="clients trained at the same time, or auto for one per core")
    threads: int = Field(1, ge=1, description="threads of one worker; more may change the last bits")
    ray_address: str = Field("local", description="where Ray is, for the engine ray: local, auto or HOST:PORT")
    ray_cpus: float = Field(1.0, ge=0, description="CPUs that each of Ray's actors takes")
    ray_gpus: float = Field(0.0, ge=0, description="GPUs that each of Ray's actors takes")
    channels_last: bool = Field(True, description="faster layout for convolutions; changes the last bits")
    compile: bool = Field(False, description="compile the training step; takes a while at first, changes the last bits")
    device: str = Field(
        "cpu", description="where training runs: cpu, cuda, cuda:1, mps; for workers also cuda:0,cuda:1"
    )
    eval_every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    eval_clients: bool = Field(False, description="also evaluate the global model on every client's own data")
    holdout: float | None = Field(
        None, gt=0, lt=1, description="share of every client's examples that is held out, to judge the client by"
    )
    target: float | None = Field(None, description="accuracy, or the task's own metric, to reach: rounds-to-target")
    stop_at_target: bool = Field(False, description="end the run when the target is reached")
    checkpoint_seconds: float = Field(20.0, ge=0, description="shortest time between checkpoints")
    probe: str | None = Field(None, description="what to measure layer by layer: 'divergence cka …', or all")
    probe_every: int = Field(1, ge=1, description="rounds between measurements; the last planned round is measured")
    probe_clients: int = Field(10, ge=2, description="clients measured per round, at most")
    probe_examples: int = Field(256, ge=4, description="examples per client, and for comparing clients, at most")

    @field_validator("participation", mode="before")
    @classmethod
    def _check_participation(cls, value: Any) -> Any:
        if not _is_count(value) and not (isinstance(value, float) and 0 < value <= 1):
            raise ValueError("give a fraction above 0.0 and up to 1.0, or a whole number of clients")
        return value

    @field_validator("probe", mode="before")
    @classmethod
    def _join_probes(cls, value: Any) -> Any:
        """A list of names is as good as a text."""
        return " ".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("faults")
    @classmethod
    def _read_faults(cls, value: str | None) -> str | None:
        """As they are written, whatever their spelling."""
        from fedstrata.faults import parse_faults, write_faults

        return None if value is None else write_faults(parse_faults(value))

    @field_validator("fleet")
    @classmethod
    def _read_fleet(cls, value: str | None) -> str | None:
        """As it is written, whatever its spelling; a file's whole path."""
        from fedstrata.fleet.devices import parse_fleet

        return None if value is None else str(parse_fleet(value))

    @field_validator("without", mode="before")
    @classmethod
    def _read_without(cls, value: Any) -> Any:
        """Numbers in order, each once; a list of them is as good as a text."""
        return None if value is None else ",".join(map(str, parse_clients(value)))

    @field_validator("workers", mode="before")
    @classmethod
    def _check_workers(cls, value: Any) -> Any:
        if not _is_count(value) and value != "auto":
            raise ValueError("give a number of processes, 1 or more, or auto")
        return value

    @field_validator("ray_address")
    @classmethod
    def _check_ray_address(cls, value: str) -> str:
        if not RAY_ADDRESS.fullmatch(value):
            raise ValueError("give local, auto or the HOST:PORT of a Ray cluster")
        return value

    @model_validator(mode="after")
    def _check_names(self) -> Settings:
        """All names but the engine's, whose table is not for those who only look."""
        from fedstrata.core.optim import build_optimizer, build_schedule
        from fedstrata.probes.registry import choose_probes

        build_optimizer(self.optimizer)
        build_schedule(self.schedule)
        choose_probes(self.probe)
        if self.stop_at_target and self.target is None:
            raise UsageError("stop_at_target needs a target")
        if self.deadline is not None and self.fleet is None:
            raise UsageError("a deadline needs a fleet: without devices no simulated time passes")
        if self.stragglers != "drop" and self.deadline is None:
            raise UsageError(f"stragglers = '{self.stragglers}' needs a deadline: without one nobody is late")
        return self

    @property
    def left_out(self) -> frozenset[int]:
        """The clients that never take part."""
        return frozenset() if self.without is None else frozenset(parse_clients(self.without))

    @property
    def uses_channels_last(self) -> bool:
        """True if convolutions have their channels last: only in float32 are their kernels known to be safe."""
        return self.channels_last and self.precision == "fp32"


ADDED_LATER = frozenset(
    {"deadline", "faults", "fleet", "holdout", "newcomers", "precision", "standardise", "stragglers", "task", "without"}
)
"""Fields that older runs do not have, whose defaults are what these did: they resume."""


class SettingsKeywords(TypedDict, total=False):
    """The fields of `Settings` but for `engine`, which a federation takes itself; for type checkers and editors."""

    method: str | Method
    task: str | Task
    rounds: int
    participation: int | float
    epochs: int
    steps: int | None
    batch_size: int
    lr: float
    optimizer: str
    schedule: str
    clip: float | None
    augment: str
    buffers: Buffers | None
    seed: int
    faults: str | None
    without: str | None
    newcomers: float | None
    standardise: Literal["client"] | None
    fleet: str | None
    deadline: float | None
    stragglers: Literal["drop", "wait", "narrow"]
    workers: int | str
    threads: int
    ray_address: str
    ray_cpus: float
    ray_gpus: float
    channels_last: bool
    compile: bool
    precision: Precision
    device: str
    eval_every: int
    eval_clients: bool
    holdout: float | None
    target: float | None
    stop_at_target: bool
    checkpoint_seconds: float
    probe: str | None
    probe_every: int
    probe_clients: int
    probe_examples: int


class RunConfig(Settings):
    """A whole run: Settings, and where its model and data come from."""

    workers: int | str = Field("auto", description="clients trained at the same time; auto is one per core")
    task: str | None = Field(  # type: ignore[assignment]
        None, description="what is learnt, such as 'binary' or 'regression'; default: the dataset's own"
    )
    dataset: str = Field("digits", description="name of the data, as in 'fedstrata list datasets'")
    data_dir: str | None = Field(None, description="where the data files are; default: FEDSTRATA_DATA")
    model: str = Field("cnn2", description="name of the model, such as 'resnet8(width=16)'")
    adapter: str | None = Field(
        None, description="small trainable parts in the frozen model, such as 'lora(r=8, targets='query,value')'"
    )
    archs: str | None = Field(
        None, description="clients' own models, parts of the server's: 'resnet10; resnet18*2', or 'vit + lora(r=2); …'"
    )
    partition: str = Field("dirichlet(alpha=0.1)", description="how examples are divided among clients")
    clients: int = Field(10, ge=0, description="number of clients; 0 for all natural ones")
    validation: float | None = Field(
        None, gt=0, lt=1, description="share of the training examples to judge by instead of the test set"
    )
    public: str | None = Field(None, description="the server's unlabelled inputs: a dataset, or a file X.npy")

    trusted: str | None = Field(None, description="labelled examples that the server trusts, for 'fltrust': a dataset")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_model(cls, values: Any) -> Any:
        """Where clients have models of their own and nothing is said of the server's, it is the deepest of these."""
        if isinstance(values, dict) and values.get("archs") is not None and "model" not in values:
            return {**values, "model": ""}
        return values

    @field_validator("public")
    @classmethod
    def _resolve_public_path(cls, value: str | None) -> str | None:
        """A file's whole path, so that a run means the same from another working directory."""
        if value is not None and value.endswith(".npy"):
            return str(Path(value).expanduser().resolve())
        return value if value is None else settle("dataset", load_table("datasets"), value)

    @field_validator("dataset", "trusted")
    @classmethod
    def _resolve_dataset_path(cls, value: str | None) -> str | None:
        """As for `public`."""
        return value if value is None else settle("dataset", load_table("datasets"), value)

    @field_validator("archs")
    @classmethod
    def _resolve_arch_paths(cls, value: str | None) -> str | None:
        """As for `public`, model by model; what counts them comes after the last bracket."""
        if value is None:
            return None
        ends = [(part, part.rfind(")") + 1) for part in value.split(";")]
        return ";".join(_settle_arch(part[:end]) + part[end:] for part, end in ends)

    @field_validator("model")
    @classmethod
    def _resolve_model_path(cls, value: str) -> str:
        """As for `public`."""
        return settle("model", load_table("models"), value)

    @model_validator(mode="after")
    def _check_sources(self) -> RunConfig:
        from fedstrata.config.keywords import check_target
        from fedstrata.models.submodels import shares
        from fedstrata.tasks.registry import build_task
        from fedstrata.techniques import method

        if self.task is not None:
            check_target(build_task(self.task), self.target)
        said = method(self.method).base.buffers
        if said is not None and self.buffers not in (None, said):
            raise UsageError(f"the method says buffers={said!r}, but buffers = {self.buffers!r}: leave one of them out")
        for named in (self.dataset, self.trusted):
            if named is not None:
                bind("dataset", load_table("datasets"), named)
        if self.archs is not None:
            shares(self.archs)
        if self.model or self.archs is None:
            bind("model", load_table("models"), self.model)
        if self.adapter is not None:
            bind("adapter", load_table("adapters"), self.adapter)
        bind("partition", load_table("partitions"), self.partition)
        if self.public is not None and not self.public.endswith(".npy"):
            bind("dataset", load_table("datasets"), self.public)
        return self


def _settle_arch(name: str) -> str:
    """A model's name with whole paths, and after it the adapters in it, as they were given."""
    if "+" not in name:
        return settle("model", load_table("models"), name)
    model, *adapters = split_sum(name)
    return " + ".join([settle("model", load_table("models"), model), *adapters])


Model = TypeVar("Model", bound=BaseModel)
AnySettings = TypeVar("AnySettings", bound=Settings)


def validate_settings(schema: type[AnySettings], values: Mapping[str, Any]) -> AnySettings:
    """Values as the settings of a run that is about to be made; there must be an engine of that name, too.

    Raises:
        UsageError: one sentence that names the field, what is wrong and what would be right.
    """
    settings = validate_values(schema, values)
    lookup("engine", load_table("engines"), settings.engine)
    return settings


def validate_values(schema: type[Model], values: Mapping[str, Any]) -> Model:
    """Values as an object of a schema; of settings, all but the engine's name is checked.

    Raises:
        UsageError: one sentence that names the field, what is wrong and what would be right.
    """
    import numpy as np

    values = {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}
    for name, value in values.items():
        if name not in schema.model_fields:
            raise UsageError(f"there is no setting '{name}'{did_you_mean(name, schema.model_fields)}")
        if isinstance(value, str) and not _is_encodable(value):
            raise UsageError(f"{name} = {value!r} does not fit: it is not valid Unicode")
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise UsageError(_message(error)) from None
        raise UsageError(
            f"{first['loc'][0]} = {first['input']!r} does not fit: {lower_first(_message(error))}"
        ) from None


def read_run(path: Path) -> dict[str, Any]:
    """The values of a run.toml, for those who look at a run: of the right kind, whatever they name.

    Fields and names of another version are passed over, for a run's results stay what they are.

    Raises:
        UsageError: if a field is of another kind.
    """
    values = read_toml(path)
    for name in values.keys() & RunConfig.model_fields.keys():
        try:
            _field_adapter(name).validate_python(values[name])
        except ValidationError as error:
            why = lower_first(_message(error))
            raise UsageError(f"{path} says {name} = {values[name]!r}, which does not fit: {why}") from None
    return values


@cache
def _field_adapter(name: str) -> TypeAdapter[Any]:
    """What checks the kind of one field by itself."""
    field = RunConfig.model_fields[name]
    kind: Any = Annotated[field.annotation, field]
    return TypeAdapter(kind, config=RunConfig.model_config)


def _message(error: ValidationError) -> str:
    """What is wrong first."""
    return error.errors()[0]["msg"].removeprefix("Value error, ")


def _is_encodable(text: str) -> bool:
    """True unless the text holds halves of characters, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
