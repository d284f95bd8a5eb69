"""Names with arguments: what is written is read back, and nothing is ever evaluated."""

from __future__ import annotations

import os
import warnings
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedstrata.core.spec import Call, bind, parse_call, parse_expression, signature, summary, text_of
from fedstrata.errors import UsageError


def things(
    size: tuple[int, ...],
    *,
    width: int = 3,
    rate: float = 0.1,
    kind: Literal["a", "b"] = "a",
    sizes: tuple[int, ...] = (1, 2),
    flag: bool = False,
    limit: int | None = None,
) -> dict[str, Any]:
    """Things of a kind.

    And more about them.
    """
    return {}


def needs(*, width: int) -> None:
    """Needs a width."""


def plain() -> None:
    """Takes nothing."""


TABLE = {"things": things, "fashion-things": things, "needs": needs, "plain": plain}

finite = st.floats(allow_nan=False, allow_infinity=False)
atoms = st.none() | st.booleans() | st.integers() | finite | st.text()
literals = st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner))
names = st.from_regex(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*", fullmatch=True)
keys = st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True).map(lambda key: key + "_")  # no Python keyword ends in "_"


@given(names, st.dictionaries(keys, literals, max_size=4))
@example("fashion-mnist", {"a_": "quote ' and \" and \\ and \n and \x00 and é and 🙂"})
@example("x", {"a_": 1e-05, "b_": -0.0, "c_": 1e308, "d_": 10**30, "e_": ()})
@example("x", {"a_": "\ud800"})
def test_what_is_written_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    text = text_of(name, arguments)
    read = parse_call(text)
    assert read == Call(name, (), tuple(arguments.items()))
    assert repr(read.kwargs) == repr(tuple(arguments.items()))  # -0.0 is not 0.0, True is not 1
    assert parse_call(f"  {text}\n") == read


@given(
    width=st.integers(),
    rate=finite,
    kind=st.sampled_from("ab"),
    sizes=st.lists(st.integers()).map(tuple),
    flag=st.booleans(),
    limit=st.none() | st.integers(),
)
def test_bind_takes_what_text_of_wrote(**arguments: Any) -> None:
    assert bind("thing", TABLE, text_of("things", arguments)) == (things, arguments)


def test_bind() -> None:
    assert bind("thing", TABLE, "things") == (things, {})
    assert bind("thing", TABLE, "fashion-things(4)") == (things, {"width": 4})
    assert bind("thing", TABLE, "things(rate=1)") == (things, {"rate": 1.0})
    assert bind("thing", TABLE, "things(sizes=[4, 5])") == (things, {"sizes": (4, 5)})
    assert bind("thing", TABLE, Call("things", (7,))) == (things, {"width": 7})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("thing", "there is no thing 'thing' (did you mean 'things'?)"),
        ("zzz", "(known: fashion-things, needs, plain, things)"),
        ("things(widht=3)", "has no argument 'widht' (did you mean 'width'?)"),
        ("plain(a=3)", "has no argument 'a'; it takes none"),
        ("things(width='3')", "argument 'width': '3' does not fit"),
        ("things(width=3.0)", "argument 'width': 3.0 does not fit"),
        ("things(width=True)", "argument 'width': True does not fit"),
        ("things(kind='c')", "argument 'kind': 'c' does not fit (input should be 'a' or 'b')"),
        ("things(sizes=(1, 'x'))", "argument 'sizes'"),
        ("things(flag=1)", "argument 'flag': 1 does not fit"),
        ("things(1, width=2)", "argument 'width' is given twice"),
        ("things(1, 1.0, 'a', (), True, 1, 1)", "takes at most 6 arguments, not 7"),
        ("needs", "needs the argument 'width'"),
        ("things(", "'things(' cannot be read"),
        ("things(width=3))", "cannot be read"),
        ("things(width=1, width=2)", "argument 'width' is given twice"),
        ("things()()", "cannot be read"),
        ("things + things", "cannot be read"),
        ("a.things()", "cannot be read"),
        ("", "'' cannot be read"),
        ("()", "cannot be read"),
        ("things(**{'width': 3})", "'**' is not allowed"),
        ("things(*[3])", "is not a literal value"),
        ("things(width=inf)", "'inf' is not a literal value"),
        ("things(width=__import__('os'))", "\"__import__('os')\" is not a literal value".replace('"', "'")),
        ("things(width=(lambda: 3)())", "is not a literal value"),
        ("things(width=f'{1}')", "is not a literal value"),
        ("things(width=[x for x in 'ab'])", "is not a literal value"),
        ("things(width=2**10)", "is not a literal value"),
        ("x" * 20_000 + "(1)", "there is no thing"),
        ("things(width=" + "1" * 20_000 + ")", "at most 10,000 characters"),
        ("things(width=" + "9" * 5000 + ")", "cannot be read"),
        ("things(width=" + "(" * 2000 + ")" * 2000 + ")", "cannot be read"),
        ("things(width=" + "[" * 90 + "]" * 90 + ")", "does not fit"),
        ("things(width=" + "-" * 900 + "1)", "things"),
        ("things(width=" + "-" * 9000 + "1)", "things"),
        ("things(width=" + "+".join("1" * 900) + ")", "an argument is not a literal value"),
        ("things(kind=a.csv)", "'a.csv' is not a literal value; write text in quotes"),
        ("things(lambda=1)", "cannot be read; the argument is called lambda_"),
        ("things(width='\x00')", "things"),
        ("things(width='\udc80')", "things"),
        ("ünï", "there is no thing 'ünï'"),
        ("things(wïdth=3)", "has no argument 'wïdth' (did you mean 'width'?)"),
    ],
    ids=lambda text: text[:30].encode("ascii", "replace").decode().replace("\0", "0"),
)
def test_refusals(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        bind("thing", TABLE, text)
    assert said in str(refused.value)


@given(st.text(max_size=60) | st.text("things(,)=*+-.[]{}'\"\\1ae \n", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (lambda: bind("thing", TABLE, text), lambda: parse_expression(text)):
        try:
            read()
        except UsageError as refused:
            assert str(refused)  # noqa: PT017 - whether it is raised is up to the text


def test_nothing_is_evaluated(tmp_path: Any) -> None:
    trap = tmp_path / "trap"
    for text in (f"things(width=open({str(trap)!r}, 'w'))", f"open({str(trap)!r}, 'w')"):
        with pytest.raises(UsageError):
            bind("thing", TABLE, text)
    assert os.listdir(tmp_path) == []


def test_a_strange_escape_gives_no_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert parse_call(r"x(a='\d')").kwargs == (("a", "\\d"),)
    assert caught == []


def test_help() -> None:
    assert signature(things) == "width=3, rate=0.1, kind='a'|'b', sizes=(1, 2), flag=False, limit=None"
    assert signature(needs) == "width"
    assert signature(plain) == ""
    assert summary(things) == "Things of a kind."
