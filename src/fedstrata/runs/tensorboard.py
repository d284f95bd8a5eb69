"""TensorBoard events of a run (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedstrata.core.extras import missing
from fedstrata.runs.records import Record


def event_writer(out: Path | None, rounds: int) -> Callable[[Record], None] | None:
    """A listener that writes each record's numbers to `out`/tensorboard, in whose run so many rounds are done.

    With None it only checks, before anything is made, that the extra is there.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing("tensorboard", "TensorBoard events need") from None
    if out is None:
        return None
    # After a resume, events of rounds that are done again must not show twice.
    writer = SummaryWriter(str(out / "tensorboard"), purge_step=rounds + 1)

    def write(record: Record) -> None:
        fairness = record.fairness
        values = {
            **{f"{name}/test": value for name, value in record.all_metrics.items()},
            "loss/test": record.loss,
            "loss/train": record.train_loss,
            "cost/bytes_up": record.bytes_up,
            "cost/bytes_down": record.bytes_down,
            "cost/flops": record.flops,
            "cost/seconds": record.seconds,
            "round/lr": record.lr,
            "round/refused": len(record.refused),
            **({} if fairness is None else {f"{record.primary}/worst client": fairness.worst}),
            **{f"{record.primary}/{arch}": score for arch, score in record.arch_accuracy.items()},
        }
        for name, value in values.items():
            if value is not None:
                writer.add_scalar(name, value, record.round)
        writer.flush()

    return write
