"""Hugging Face's models and tokenizers on this machine: found in a folder or in the user's cache, never fetched.

A name is the path of a folder with a `config.json`, or a model's name on the Hub that the user has downloaded before
(`hf download NAME`). Weights are read from safetensors, and no code that comes with a model is ever run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from fedstrata.core.extras import missing
from fedstrata.errors import UsageError, one_line


def settle_name(text: str) -> str:
    """The whole path of a folder that is there; any other name stays as it is."""
    folder = Path(text).expanduser()
    return str(folder.resolve()) if text and folder.is_dir() else text


ModelName = Annotated[str, AfterValidator(settle_name)]
"""An argument that names a folder with a model, or a model of the Hub."""


def load_library(what: str) -> Any:
    """The package `transformers`, imported only when something needs it.

    Raises:
        UsageError: if it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise missing("transformers", f"{what} needs") from None
    return transformers


def find_folder(what: str, name: str, *needed: str) -> Path:
    """The folder that holds a model's files: its own, or that of the cache.

    Raises:
        UsageError: if there is none here, or if it lacks all files of one of the `needed` patterns.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _find_cached(what, name)
    for pattern in needed:
        if not any(folder.glob(pattern)):
            weights = (
                " (weights in other formats are not read: they could run code)" if "safetensors" in pattern else ""
            )
            raise UsageError(f"{what}: there is no {pattern} in {folder}{weights}")
    return folder


def _find_cached(what: str, name: str) -> Path:
    """Where the user's cache has a model of the Hub."""
    load_library(what)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no name of a model at all
        fetched = "" if name[:1] in (".", "/", "~") or name.count("/") > 1 else f"; `hf download {name}` does"
        raise UsageError(
            f"{what}: '{name}' is neither a folder nor in the cache of Hugging Face, and nothing is fetched here"
            f"{fetched}"
        ) from None


@contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Read from a folder without a word on the screen and without the network; what goes wrong is one sentence."""
    from transformers.utils import logging as theirs

    logging: Any = theirs
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # whatever the library, or a file of the user's, brings up
        raise UsageError(
            f"{what}: {folder} cannot be read: {one_line(str(error).strip() or repr(error), 200)}"
        ) from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_tokenizer(what: str, name: str) -> tuple[Any, int]:
    """(the tokenizer in a folder, or of a name in the cache; the token that fills short texts up)."""
    library = load_library(what)
    folder = find_folder(what, name, "tokenizer*")
    with reading(what, folder):
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config = None
    with suppress(UsageError), reading(what, folder):  # there need not be a model beside it
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return tokenizer, _choose_padding(config, tokenizer)


def is_token(number: Any, config: Any) -> bool:
    """Whether a number stands for one of a model's tokens; old files say -1 for none."""
    return isinstance(number, int) and 0 <= number < getattr(config, "vocab_size", 1 << 62)


def _choose_padding(config: Any, tokenizer: Any) -> int:
    """The token that the model takes for padding, else the tokenizer's, else the one that ends a text.

    A mask says what is padding, but decoders that classify a text look for its last token by this number.
    """
    known: list[Any] = [getattr(config, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id]
    return next((number for number in known if is_token(number, config)), 0)


TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model")


def copy_tokenizer(name: str, into: Path) -> None:
    """Lay a tokenizer's files, if there are any, beside a model that was trained with it."""
    folder = find_folder("the tokenizer", name)
    for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, into / path.name)
