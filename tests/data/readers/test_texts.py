"""Texts: files in upstream's form and of one's own, tokens by the model's tokenizer, padding that changes nothing."""

from __future__ import annotations

import csv
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_transformers import LONGEST, minilm, write_bert, write_gpt2, write_texts, write_tokenizer  # isort: skip

import fedstrata as fs
from fedstrata.core.parts import Parts
from fedstrata.data.examples import TensorExamples
from fedstrata.errors import UsageError
from fedstrata.models.inputs import fit_model

SENTENCES = [("w1 w2", 0), ("w3", 1), ("w4 w5 w6 w7", 1), ("w8", 0)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(folder)
    return str(folder)


def ids(examples: TensorExamples) -> list[list[int]]:
    """Each text's tokens without padding."""
    x: Any = examples.x
    mask = x.tensors["attention_mask"].bool()
    return [row[real].tolist() for row, real in zip(x.tensors["input_ids"], mask, strict=True)]


def write_sst2(folder: Path, *parts: str, labelled: bool = True) -> Path:
    folder.mkdir()
    for part in parts:
        lines = [f"{text}\t{label}" for text, label in SENTENCES]
        (folder / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    if not labelled:
        (folder / "test.tsv").write_text("index\tsentence\n0\tw1 w2\n")
    return folder


def test_sst2(tmp_path: Path, tokenizer: str) -> None:
    write_sst2(tmp_path / "SST-2", "train", "dev", "test")
    found = fs.load_dataset("sst-2", tmp_path, tokenizer=tokenizer)
    assert (found.classes, found.class_names, found.task) == (2, ("negative", "positive"), "classification")
    assert ids(found.train) == [[2, 5, 6, 3], [2, 7, 3], [2, 8, 9, 10, 11, 3], [2, 12, 3]]
    assert found.labels.tolist() == [0, 1, 1, 0]
    assert found.note == "tested on test.tsv; texts of up to 32 tokens"


def test_glues_own_sst2_has_no_labels_to_test_on(tmp_path: Path, tokenizer: str) -> None:
    write_sst2(tmp_path / "SST-2", "train", "dev", labelled=False)
    found = fs.load_dataset("sst-2", tmp_path, tokenizer=tokenizer)
    assert found.note.startswith("tested on dev.tsv")
    assert len(found.test) == 4


def test_a_part_of_sst2(tmp_path: Path, tokenizer: str) -> None:
    write_sst2(tmp_path / "sst-2", "train", "test")
    both = [fs.load_dataset("sst-2(examples=3, test_examples=2)", tmp_path, tokenizer=tokenizer) for _ in range(2)]
    assert (len(both[0].train), len(both[0].test)) == (3, 2)
    assert ids(both[0].train) == ids(both[1].train)
    assert "3 of 4 training examples; 2 of 4 test examples" in both[0].note
    with pytest.raises(UsageError, match="sst-2 has 4 training examples: ask for 1 or more, not 5"):
        fs.load_dataset("sst-2(examples=5)", tmp_path, tokenizer=tokenizer)


def test_ag_news_as_upstream_has_it(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "ag_news_csv"
    folder.mkdir()
    for part in ("train", "test"):
        into = io.StringIO()
        rows = [(1, "w1", 'w2 "w3", w4'), (2, "w5", "w6"), (3, "w7", "w8\\w9"), (4, "w10", "w11")]
        csv.writer(into, quoting=csv.QUOTE_ALL).writerows(rows)
        (folder / f"{part}.csv").write_text(into.getvalue())
    found = fs.load_dataset("ag-news", tmp_path, tokenizer=tokenizer)
    assert found.class_names == ("World", "Sports", "Business", "Sci/Tech")
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert ids(found.train)[2] == [2, 11, 12, 13, 3]
    assert found.note.startswith("trained on train.csv; a subset, 4 of 120,000 training examples")


def test_ag_news_in_lines(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "ag-news"
    folder.mkdir()
    (folder / "dev.tsv").write_text("w1 w2\tSci/Tech\nw3\tWorld\n")
    (folder / "test.tsv").write_text("w4\tSports\n")
    found = fs.load_dataset("ag-news", tmp_path, tokenizer=tokenizer)
    assert found.labels.tolist() == [3, 0]
    assert found.note.startswith("trained on dev.tsv; a subset, 2 of")
    (folder / "dev.tsv").write_text("w1 w2\tSci/Tech\nw3\tWeather\n")
    with pytest.raises(UsageError, match="line 2 does not end in one of World, Sports, Business, Sci/Tech"):
        fs.load_dataset("ag-news", tmp_path, tokenizer=tokenizer)


def test_next_tokens(tmp_path: Path, tokenizer: str) -> None:
    """Each position's target is the token after it; where there is none, nothing counts."""
    write_sst2(tmp_path / "sst-2", "train", "test")
    found = fs.load_dataset("sst-2(task='next_token')", tmp_path, tokenizer=tokenizer)
    assert (found.task, found.classes) == ("next_token", 64)
    assert ids(found.train)[0] == [2, 5, 6]
    assert found.train.y[0].tolist() == [5, 6, 3, -100, -100]
    x, y = found.train.batch(torch.tensor([1, 3]))
    assert isinstance(x, Parts)
    assert x.tensors["input_ids"].shape == y.shape


@pytest.mark.parametrize("form", [".tsv", ".csv", ".jsonl"])
def test_texts_of_ones_own(tmp_path: Path, tokenizer: str, form: str) -> None:
    rows = [(f"w{at}, w{at + 1}" if form == ".csv" else f"w{at} w{at + 1}", "ab"[at % 2]) for at in range(20)]
    path = tmp_path / f"mine{form}"
    if form == ".jsonl":
        path.write_text("\n".join(json.dumps({"sentence": text, "topic": label}) for text, label in rows))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="," if form == ".csv" else "\t").writerows([("sentence", "topic"), *rows])
    found = fs.load_dataset(f"text(path='{path}')", tokenizer=tokenizer)
    assert (found.task, found.class_names, len(found.train), len(found.test)) == ("binary", ("a", "b"), 16, 4)
    named = f"text(path='{path}', text='sentence', label='topic', task='classification', test=0.5)"
    again = fs.load_dataset(named, tokenizer=tokenizer)
    assert (again.task, again.classes, len(again.test)) == ("classification", 2, 10)


def test_clients_and_a_test_file_of_ones_own(tmp_path: Path, tokenizer: str) -> None:
    for name, start in (("train.tsv", 0), ("test.tsv", 30)):
        rows = [f"w{start + at}\t{at % 3}\t{'xy'[at % 2]}" for at in range(12)]
        (tmp_path / name).write_text("\n".join(["text\tlabel\tsite", *rows]))
    named = f"text(path='{tmp_path}/train.tsv', test_path='{tmp_path}/test.tsv', client='site')"
    found = fs.load_dataset(named, tokenizer=tokenizer)
    assert (len(found.train), len(found.test), found.group_names) == (12, 12, ("x", "y"))
    assert sorted(token for row in ids(found.test) for token in row[1:-1]) == list(range(34, 46))
    assert [len(group) for group in found.groups] == [6, 6]
    whose = [row[1] % 2 for row in ids(found.train)]
    assert {whose[place] for place in found.groups[0].tolist()} == {0}


def test_lines_without_labels(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(f"w{at} w{at + 1}" for at in range(20)))
    found = fs.load_dataset(f"text(path='{path}')", tokenizer=tokenizer)
    assert (found.task, found.classes, len(found.train) + len(found.test)) == ("next_token", 64, 20)


def test_long_texts_are_cut(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(" ".join(["w1"] * 50) for _ in range(10)))
    assert (
        fs.load_dataset(f"text(path='{path}')", tokenizer=tokenizer).train.x.shape
        == Parts({"input_ids": torch.zeros(8, LONGEST), "attention_mask": torch.zeros(8, LONGEST)}).shape
    )
    short = fs.load_dataset(f"text(path='{path}', length=8)", tokenizer=tokenizer)
    assert short.train.y.shape == (8, 8)


@pytest.mark.parametrize(
    ("content", "arguments", "refusal"),
    [
        ("text\tlabel\nw1\ta\nw2\tb\n", "text='body'", "has no column 'body'"),
        ("body\tlabel\nw1\ta\nw2\tb\n", "", r"no column is called text or sentence: say text='…' \(there are body"),
        ("text\tlabel\nw1\ta\n \tb\n", "", "row 2 has no text"),
        ("text\tlabel\nw1\ta\nw2\t\n", "", "row 2 has no label"),
        ("text\tlabel\nw1\ta\nw2\ta\n", "task='classification'", "is 'a' in every row"),
        ("text\nw1\nw2\n", "task='binary'", "no column is called label or class"),
        ("text\tlabel\nw1\ta\nw2\tb\n", "test=1.0", "above 0 and below 1"),
        ("text\tlabel\nw1\ta\nw2\tb\n", "test=0.5, length=2", "the length of a text is from 3 to 32 tokens, not 2"),
        ("text\tlabel\nw1\ta\nw2\tb\n", "test=0.5, length=33", "the length of a text is from 3 to 32 tokens, not 33"),
        ("text\tlabel\nw1\ta\nw2\tb\n", "client='site'", "has no column 'site'"),
        ("", "", "is empty"),
    ],
)
def test_one_sentence(tmp_path: Path, tokenizer: str, content: str, arguments: str, refusal: str) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text(content)
    with pytest.raises(UsageError, match=refusal) as told:
        fs.load_dataset(f"text(path='{path}', {arguments})", tokenizer=tokenizer)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ('{"text": "w1"}\nno json\n', "row 2 is no JSON"),
        ('{"text": "w1"}\n[1]\n', "row 2 is no JSON object of texts and numbers"),
        ('{"text": "w1"}\n{"text": {"a": 1}}\n', "row 2 is no JSON object of texts and numbers"),
        ('{"text": "w1"}\n{"label": "a"}\n', "row 2 has other names than the first one"),
        ("", "is empty"),
    ],
)
def test_one_sentence_of_json(tmp_path: Path, tokenizer: str, content: str, refusal: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=refusal):
        fs.load_dataset(f"text(path='{path}')", tokenizer=tokenizer)


def test_other_files(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "mine.doc").write_text("w1")
    (tmp_path / "mine.tsv").write_bytes(b"text\tlabel\n\xff\ta\n")
    for name, refusal in (("mine.doc", "is no .csv"), ("mine.tsv", "no text in UTF-8"), ("none.tsv", "cannot read")):
        with pytest.raises(UsageError, match=refusal):
            fs.load_dataset(f"text(path='{tmp_path / name}')", tokenizer=tokenizer)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "mine.tsv")
    with pytest.raises(
        UsageError, match=r"text needs a tokenizer, and the model has none: take one that has, such as hf"
    ):
        fs.load_dataset(f"text(path='{path}')")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"the tokenizer of text: there is no tokenizer\* in"):
        fs.load_dataset(f"text(path='{path}')", tokenizer=str(tmp_path / "empty"))


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path, tokenizer: str) -> None:
    path, folder = write_texts(tmp_path / "mine.tsv"), Path(tokenizer)
    own = {"AutoTokenizer": ["own.Own", None]}
    change_json(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="Own")
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    with suppress(UsageError):  # refused, or read as what it says it is made of
        fs.load_dataset(f"text(path='{path}')", tokenizer=tokenizer)
    assert not (tmp_path / "run").exists()


def test_the_datasets_own_tokenizer_goes_before_the_models(tmp_path: Path, tokenizer: str) -> None:
    path = write_texts(tmp_path / "mine.tsv")
    found = fs.load_dataset(f"text(path='{path}', tokenizer='{tokenizer}')", tokenizer="nobody/has-this")
    assert found.task == "classification"


def test_a_batch_is_as_long_as_its_longest_text(tmp_path: Path, tokenizer: str) -> None:
    """Up to the next multiple of eight, and never longer than all."""
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(" ".join(["w1"] * count) for count in (1, 3, 7, 12, 18) for _ in range(2)))
    examples = fs.load_dataset(f"text(path='{path}', test=0.1)", tokenizer=tokenizer).train
    examples = TensorExamples(examples.x, torch.zeros(len(examples)).long(), mask="attention_mask")
    lengths = [len(row) for row in ids(examples)]
    for index in torch.split(torch.arange(len(examples)), 3):
        x: Any = examples.batch(index)[0]
        longest = max(lengths[place] for place in index.tolist())
        width = x.tensors["input_ids"].shape[1]
        assert width == min(-(-longest // 8) * 8, max(lengths))
        whole: Any = examples.padded.batch(index)[0]
        assert whole.tensors["input_ids"].shape[1] == max(lengths)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_examples_loss_does_not_depend_on_what_else_is_in_its_batch(tmp_path: Path, attention: str) -> None:
    """Alone, among shorter ones, among longer ones, and with padding up to the longest of all."""
    folder, path = write_bert(tmp_path / "bert"), write_texts(tmp_path / "mine.tsv")
    examples = fs.load_dataset(f"text(path='{path}')", tokenizer=str(folder)).train
    model = fs.build_model(f"hf('{folder}', attention='{attention}')", examples.x.shape[1:], 3, seed=0).eval()
    fit_model(model, examples.padded.batch(torch.arange(2))[0])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # so that texts differ in their outputs
    place = sorted(range(len(examples)), key=lambda row: len(ids(examples)[row]))[len(examples) // 3]
    with torch.no_grad():
        alone = model(examples.batch(torch.tensor([place]))[0])[0]
        among = model(examples.batch(torch.arange(len(examples)))[0])
        padded = model(examples.padded.batch(torch.tensor([place]))[0])[0]
    assert float((among - alone).abs().amax(1).median()) > 1e-2
    torch.testing.assert_close(among[place], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("known", ["nobody", "the model", "the tokenizer", "an old file"])
def test_a_decoder_finds_where_a_text_ends(tmp_path: Path, known: str) -> None:
    """It looks for the last token that is no padding, so it must know what texts are filled up with."""
    folder, path = write_gpt2(tmp_path / "gpt2"), write_texts(tmp_path / "mine.tsv")
    named = {"the model": 63, "an old file": -1}
    change_json(folder / "config.json", pad_token_id=named.get(known), eos_token_id=3)
    if known in ("nobody", "the model"):
        change_json(folder / "tokenizer_config.json", pad_token=None, eos_token="[SEP]")
    examples = fs.load_dataset(f"text(path='{path}')", tokenizer=str(folder)).train
    x: Any = examples.padded.batch(torch.arange(len(examples)))[0]
    blank = {"nobody": 3, "the model": 63, "the tokenizer": 0, "an old file": 0}[known]
    padding = x.tensors["input_ids"][x.tensors["attention_mask"] == 0]
    assert set(padding.tolist()) == {blank}
    model = fs.build_model(f"hf('{folder}')", examples.x.shape[1:], 3, seed=0).eval()
    lengths = x.tensors["attention_mask"].sum(1).tolist()
    with torch.no_grad():
        found = model(**x.tensors).logits
        alone = [model(input_ids=x.tensors["input_ids"][row, :end][None]).logits[0] for row, end in enumerate(lengths)]
    torch.testing.assert_close(found, torch.stack(alone), atol=1e-5, rtol=1e-4)


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_tokens_that_the_model_has_not(tmp_path: Path) -> None:
    """Its embedding has fewer rows than the tokenizer has tokens: said before anything is trained."""
    path = tmp_path / "mine.tsv"
    rows = [f"w{at % 20}\t{'ab'[at % 2]}" for at in range(20)]
    path.write_text("\n".join(["text\tlabel", *rows, "w59\ta"]))
    bert, tokenizer = write_bert(tmp_path / "bert", vocab_size=40), write_bert(tmp_path / "other")
    found = fs.load_dataset(f"text(path='{path}', test=0.1)", tokenizer=str(tokenizer))
    model = fs.build_model(f"hf('{bert}')", found.input_shape, 1, seed=0)
    halves = torch.arange(len(found.train)).chunk(2)
    with pytest.raises(
        UsageError, match=r"does not take all inputs of (client 0|the test set), whose numbers are from"
    ):
        fs.Federation(model, found.train.split(halves), found.test, task="binary")


def test_real_sentences(tmp_path: Path) -> None:
    folder = write_sst2(tmp_path / "sst-2", "train", "test")
    text = "sentence\tlabel\nthe expressive power of the camera \t1\njason x is this bad on purpose \t0\n"
    (folder / "train.tsv").write_text(text)
    found = fs.load_dataset("sst-2", tmp_path, tokenizer=str(minilm()))
    assert ids(found.train)[0] == [101, 1996, 22570, 2373, 1997, 1996, 4950, 102]
