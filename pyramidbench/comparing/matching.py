"""Which cells may be compared: pairs of one problem, one input and one device, and why there are none.

Two runs are paired cell by cell, by identity first and by what the columns say where identities differ (a capture that lies
elsewhere). Two methods of one run are paired on each problem and input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pyramidbench.errors import UserError, unknown
from pyramidbench.record import Record

ALLOWED = ("device", "shape", "input", "clock")
"""What two cells must share to be compared, unless the caller lets it differ."""
SHAPE = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "direction", "seq_len", "seq_len_kv")
PARTS: dict[str, tuple[str, ...]] = {
    "method": ("method",),
    "parameters": ("parameters", "block_size", "top_k", "levels", "query_tile"),
    "device": ("device",),
    "shape": SHAPE,
    "input": ("input", "layer", "seed"),
}
BUDGET = ("block_size", "top_k", "query_tile")
Key = tuple[object, ...]


@dataclass(frozen=True)
class Pair:
    """Two records of which `b` is judged against `a`; `notes` say in what they differ."""

    a: Record
    b: Record
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matched:
    """The pairs, and the records of either side that have no partner."""

    pairs: tuple[Pair, ...]
    only_a: tuple[Record, ...] = field(default=())
    only_b: tuple[Record, ...] = field(default=())


def match_runs(a: Sequence[Record], b: Sequence[Record], allow: Iterable[str] = ()) -> Matched:
    """The cells of run `b` beside those of run `a`.

    Raises:
        UserError: nothing can be compared; the message says in what the runs differ, and how to compare all the same.
    """
    allowed = _checked(allow)
    strict = [part for part in PARTS if part not in allowed]
    partner: dict[int, int] = {}
    _join(a, b, partner, lambda record: (record.cell, *_key(record, set(strict) & set(ALLOWED))))
    _join(a, b, partner, lambda record: _key(record, strict))
    if not partner:
        raise UserError(_why_none(a, b, strict))
    pairs = tuple(Pair(a[i], b[j], _notes(a[i], b[j])) for i, j in sorted(partner.items()))
    _check_clocks(pairs, allowed)
    taken = set(partner.values())
    return Matched(
        pairs,
        tuple(record for i, record in enumerate(a) if i not in partner),
        tuple(record for j, record in enumerate(b) if j not in taken),
    )


def match_methods(records: Sequence[Record], a: str, b: str, allow: Iterable[str] = ()) -> Matched:
    """The cells of method `b` beside those of method `a` in one run: on one problem and input, and at one budget where both
    have one. A side with a single cell there stands beside each of the other's.

    Raises:
        UserError: a method that the run does not have, or several cells on both sides that nothing tells apart.
    """
    allowed = _checked(allow)
    shared = [part for part in ("device", "shape", "input") if part not in allowed]
    names = sorted({record.method for record in records})
    for name in (a, b):
        if name not in names:
            raise unknown("method of this run", name, names)
    left = _grouped((record for record in records if record.method == a), lambda record: _key(record, shared))
    right = _grouped((record for record in records if record.method == b), lambda record: _key(record, shared))
    pairs = [pair for key in left if key in right for pair in _at_one_problem(left[key], right[key])]
    if not pairs:
        raise UserError(_why_none([*_flat(left)], [*_flat(right)], shared))
    _check_clocks(pairs, allowed)
    paired = {id(record) for pair in pairs for record in (pair.a, pair.b)}
    return Matched(
        tuple(pairs),
        tuple(record for record in _flat(left) if id(record) not in paired),
        tuple(record for record in _flat(right) if id(record) not in paired),
    )


def _checked(allow: Iterable[str]) -> set[str]:
    for name in (given := list(allow)):
        if name not in ALLOWED:
            raise unknown("difference to allow", name, ALLOWED)
    return set(given)


def _join(a: Sequence[Record], b: Sequence[Record], partner: dict[int, int], key: Callable[[Record], Key]) -> None:
    """Add the pairs whose key is found once on each side, among the records that have no partner yet."""
    taken = set(partner.values())
    left, right = defaultdict(list), defaultdict(list)
    for i, record in enumerate(a):
        if i not in partner:
            left[key(record)].append(i)
    for j, record in enumerate(b):
        if j not in taken:
            right[key(record)].append(j)
    for value, places in left.items():
        if len(places) == len(right[value]) == 1:
            partner[places[0]] = right[value][0]


def _at_one_problem(left: list[Record], right: list[Record]) -> list[Pair]:
    if len(left) > 1 and len(right) > 1:
        by_budget = _grouped(right, lambda record: _values(record, BUDGET))
        pairs = []
        for budget, some in _grouped(left, lambda record: _values(record, BUDGET)).items():
            pairs += _at_one_budget(some, by_budget.get(budget, []))
        return pairs
    return _at_one_budget(left, right)


def _at_one_budget(left: list[Record], right: list[Record]) -> list[Pair]:
    if len(left) > 1 and len(right) > 1:
        raise UserError(
            f"{left[0].method} and {right[0].method} have {len(left)} and {len(right)} cells at {left[0].seq_len_kv} "
            "tokens and one budget, and nothing says which belong together; compare runs that hold one of them each."
        )
    return [Pair(one, other) for one in left for other in right]


def _why_none(a: Sequence[Record], b: Sequence[Record], strict: Sequence[str]) -> str:
    """In what the two sides differ, so that no cell of one has a partner in the other."""
    if not a or not b:
        return f"{'the first' if not a else 'the second'} run holds no cell to compare; finish its sweep first."
    apart = [part for part in strict if not {_key(r, [part]) for r in a} & {_key(r, [part]) for r in b}]
    named = apart or list(strict)
    told = "; ".join(text for part in named for text in _told(a, b, part))
    may = [part for part in named if part in ALLOWED]
    hint = f"; to compare all the same: --allow {','.join(may)}" if may and may == named else ""
    return f"no cell of the one has a partner in the other: they differ in {told or ' and '.join(named)}{hint}."


def _told(a: Sequence[Record], b: Sequence[Record], part: str) -> list[str]:
    """The columns of a part in which the sides differ, with the first few values of each."""
    sides = [(name, _seen(a, name), _seen(b, name)) for name in PARTS[part] if name != "parameters"]
    return [
        f"{name.replace('direction', 'pass')} ({one} against {other})" for name, one, other in sides if one != other
    ]


def _seen(records: Sequence[Record], name: str) -> str:
    values = sorted({str(getattr(record, name)) for record in records}, key=lambda text: (len(text), text))
    return ", ".join(values[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")


def _check_clocks(pairs: Iterable[Pair], allowed: Iterable[str]) -> None:
    """Raise UserError where times were taken in different ways: a cold cache against a warm one is no change of speed."""
    for pair in pairs:
        if "clock" not in allowed and None not in (pair.a.clock, pair.b.clock) and pair.a.clock != pair.b.clock:
            raise UserError(
                f"{pair.b.method} at {pair.b.seq_len_kv} tokens was timed with '{pair.a.clock}' in the one and with "
                f"'{pair.b.clock}' in the other; to compare all the same: --allow clock."
            )


def _notes(a: Record, b: Record) -> tuple[str, ...]:
    return tuple(f"{part} differs" for part in PARTS if _key(a, [part]) != _key(b, [part]))


def _key(record: Record, parts: Iterable[str]) -> Key:
    """What a record says of some parts."""
    return _values(record, [name for part in sorted(parts) for name in PARTS.get(part, ())])


def _values(record: Record, names: Iterable[str]) -> Key:
    return tuple(getattr(record, name) for name in names)


def _grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return dict(groups)


def _flat(groups: dict[Key, list[Record]]) -> Iterable[Record]:
    return (record for group in groups.values() for record in group)
