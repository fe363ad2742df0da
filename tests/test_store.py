"""The run folder: what is added stays, whatever happens afterwards, and nobody writes over somebody else's run."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from pyramidbench import store
from pyramidbench.cell import Cell
from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.folder import run_folder, set_aside, write_whole
from pyramidbench.manifest import Manifest
from pyramidbench.record import SCHEMA_VERSION, Record, Status, columns
from pyramidbench.store import RunWriter, load_run

DEVICE = Device(
    kind="cpu", name="Test CPU", memory_bytes=1, threads=1, system="s", python="3", torch="2", triton=None, cuda=None,
    capability=None,
)  # fmt: skip
CELLS = [Cell(method="dense", seq_len=n, seq_len_kv=n) for n in (64, 128, 256)]


def record(cell: Cell, status: Status = "ok", **values: object) -> Record:
    fields = {"seq_len": cell.seq_len, "method": "dense", "kind": "dense", **values}
    return Record.model_validate({"cell": cell.identity, "status": status, **fields})


def manifest(cells: list[Cell] = CELLS, **settings: object) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION, name="mine", created="now", argv=[], suite={}, settings={"timing_s": 2.0, **settings},
        version="0", cells=[cell.identity for cell in cells],
    )  # fmt: skip


def measured(folder: Path, cells: list[Cell]) -> Path:
    """A run in which these of all cells are measured."""
    writer = RunWriter(folder, manifest(), DEVICE)
    for cell in cells:
        writer.add(record(cell, latency_s=0.5))
    writer.close()
    return folder


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_record_is_on_disk_when_add_returns(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", manifest(), DEVICE)
    writer.add(record(CELLS[0], latency_s=0.25))
    assert [found.latency_s for found in load_run(tmp_path / "run").records] == [0.25]
    writer.close()


def test_a_record_is_synchronised_with_the_disk_after_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path / "run", manifest(), DEVICE)
    lines: list[int] = []
    monkeypatch.setattr(
        "pyramidbench.store.os.fsync",
        lambda _: lines.append((tmp_path / "run" / "cells.jsonl").read_text().count("\n")),
    )
    writer.add(record(CELLS[0]))
    writer.add(record(CELLS[1]))
    assert lines == [1, 2]
    writer.close()


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    folder = measured(tmp_path / "run", CELLS[:2])
    run = load_run(folder)
    assert run.path == folder
    assert run.manifest == manifest()
    assert run.device == DEVICE
    assert run.records == tuple(record(cell, latency_s=0.5) for cell in CELLS[:2])
    assert run.missing == 1


@pytest.mark.parametrize(
    "torn",
    [b'{"cell":"abc","sta', b"{", '{"cell":"abc","status":"crashed","reason":"±'.encode()[:-1]],
    ids=["half", "brace", "half a character"],
)
def test_a_last_line_that_a_crash_tore_is_left_out_and_then_replaced(tmp_path: Path, torn: bytes) -> None:
    folder = measured(tmp_path / "run", CELLS[:2])
    with (folder / "cells.jsonl").open("ab") as stream:
        stream.write(torn)
    assert len(load_run(folder).records) == 2
    writer = RunWriter(folder, manifest(), DEVICE)
    writer.add(record(CELLS[2], latency_s=2.0))
    run = writer.close()
    assert [found.cell for found in run.records] == [cell.identity for cell in CELLS]
    assert all(json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines())


@pytest.mark.parametrize("text", ["two\nlines", "line\u2028separator", "next\x85line", "form\x0cfeed", 'quote " {'])
def test_a_reason_may_hold_any_character(tmp_path: Path, text: str) -> None:
    writer = RunWriter(tmp_path / "run", manifest(), DEVICE)
    writer.add(record(CELLS[0], "crashed", reason=text))
    writer.add(record(CELLS[1], latency_s=1.0))
    assert [found.reason for found in writer.close().records] == [text, None]


@pytest.mark.parametrize(
    ("status", "done"),
    [
        ("ok", True), ("low_n", True), ("incorrect", True), ("crashed", False), ("oom", False), ("timeout", False),
        ("unsupported", False), ("skipped", False), ("oom_predicted", False),
    ],
)  # fmt: skip
def test_a_cell_is_done_once_it_was_measured_or_found_wrong(tmp_path: Path, status: Status, done: bool) -> None:
    writer = RunWriter(tmp_path / "run", manifest(), DEVICE)
    assert not writer.is_done(CELLS[0])
    writer.add(record(CELLS[0], status))
    assert writer.is_done(CELLS[0]) is done
    writer.close()
    again = RunWriter(tmp_path / "run", manifest(), DEVICE)
    assert again.is_done(CELLS[0]) is done
    again.close()


def test_the_last_record_of_a_cell_counts(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", manifest(), DEVICE)
    writer.add(record(CELLS[0], "skipped", reason="too long"))
    writer.add(record(CELLS[0], latency_s=3.0))
    (found,) = writer.close().records
    assert (found.status, found.latency_s, found.reason) == ("ok", 3.0, None)


@pytest.mark.parametrize(
    ("other", "device", "message"),
    [
        (manifest(CELLS[:2]), DEVICE, r"holds another sweep \(mine, 2 cells measured\).*--out.*--fresh"),
        (manifest(timing_s=9.0), DEVICE, "holds another sweep"),
        (manifest(), DEVICE.model_copy(update={"name": "Other CPU"}), "measured on Test CPU, and this is Other CPU"),
    ],
    ids=["cells", "settings", "device"],
)
def test_another_sweep_in_the_same_folder_is_refused(
    tmp_path: Path, other: Manifest, device: Device, message: str
) -> None:
    folder = measured(tmp_path / "run", CELLS[:2])
    before = (folder / "cells.jsonl").read_bytes()
    with pytest.raises(UserError, match=message) as error:
        RunWriter(folder, other, device)
    one_line(error)
    assert (folder / "cells.jsonl").read_bytes() == before
    RunWriter(folder, manifest(), DEVICE).close()


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    first = RunWriter(tmp_path / "run", manifest(), DEVICE)
    with pytest.raises(UserError, match=r"another process is writing .*Wait for it, or give another --out") as error:
        RunWriter(tmp_path / "run", manifest(), DEVICE)
    one_line(error)
    with pytest.raises(UserError, match="another process is writing"):
        set_aside(tmp_path / "run")
    first.add(record(CELLS[0], latency_s=1.0))
    first.close()
    RunWriter(tmp_path / "run", manifest(), DEVICE).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=f"cannot write to '{folder}': .*Give another --out") as error:
            RunWriter(folder, manifest(), DEVICE)
        one_line(error)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_loses_nothing_that_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    writer = RunWriter(folder, manifest(), DEVICE)
    writer.add(record(CELLS[0], latency_s=1.0))
    writer.stream.close()
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(writer, "stream", full)
        with pytest.raises(UserError, match=r"No space left on device\. Free some space") as error:
            writer.add(record(CELLS[1], latency_s=2.0))
        one_line(error)
        assert not writer.is_done(CELLS[1])
        assert len(writer.close().records) == 1
    again = RunWriter(folder, manifest(), DEVICE)
    assert again.is_done(CELLS[0])
    again.add(record(CELLS[1], latency_s=2.0))
    assert [found.latency_s for found in again.close().records] == [1.0, 2.0]


def test_tables_that_cannot_be_written_do_not_hold_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer = RunWriter(folder, manifest(), DEVICE)
    writer.add(record(CELLS[0], latency_s=1.0))
    (folder / "results.csv").mkdir()
    with pytest.raises(UserError, match=r"cannot write the tables in .*The measured cells are safe") as error:
        writer.close()
    one_line(error)
    (folder / "results.csv").rmdir()
    assert len(RunWriter(folder, manifest(), DEVICE).close().records) == 1


@pytest.mark.parametrize("table", ["results.csv", "results.parquet"])
def test_a_full_disk_leaves_the_tables_that_were_there(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a table reads like a whole one with fewer cells."""
    folder = measured(tmp_path / "run", CELLS[:1])
    before = {name: (folder / name).read_bytes() for name in ("results.csv", "results.parquet")}
    writer = RunWriter(folder, manifest(), DEVICE)
    writer.add(record(CELLS[1], latency_s=2.0))

    def full(path: Path, content: str | bytes) -> None:
        if path.name == table:
            path.with_name(f"{table}.part").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_whole", full)
        with pytest.raises(UserError, match=r"cannot write the tables in .*No space left on device"):
            writer.close()
    assert (folder / table).read_bytes() == before[table]
    assert len(load_run(folder).records) == 2


def test_a_file_that_finds_no_room_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, f"No space left on device {descriptor}")

    with monkeypatch.context() as patch:
        patch.setattr("pyramidbench.folder.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_from_the_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_whole", full)
        with pytest.raises(UserError, match=r"cannot write to .*No space left on device"):
            RunWriter(tmp_path / "run", manifest(), DEVICE)
    RunWriter(tmp_path / "run", manifest(), DEVICE).close()


def change_manifest(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_manifest(schema_version=SCHEMA_VERSION + 1), f"result schema {SCHEMA_VERSION + 1}; .*Upgrade pyramidbench"),
        (change_manifest(schema_version="one"), "is damaged.*schema_version"),
        (lambda folder: (folder / "manifest.json").write_text('{"schema_ver'), "is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is damaged"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "is damaged"),
        (lambda folder: (folder / "device.json").write_text("{}"), "is damaged.*kind"),
        (lambda folder: (folder / "device.json").unlink(), "is damaged.*No such file"),
        (lambda folder: (folder / "cells.jsonl").write_text("{}\n"), "is damaged.*Record"),
        (lambda folder: (folder / "cells.jsonl").write_bytes(b"\xff\n"), "is damaged"),
    ],
    ids=["newer", "version", "torn", "list", "bytes", "device", "no device", "record", "record bytes"],
)  # fmt: skip
def test_a_run_that_cannot_be_read_is_named_and_left_as_it_is(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    folder = measured(tmp_path / "run", CELLS[:2])
    change(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=message) as error:
        load_run(folder)
    one_line(error)
    with pytest.raises(UserError, match=message):
        RunWriter(folder, manifest(), DEVICE)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_evaluation_is_named_with_the_command_that_reports_it(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema_version": 1, "kind": "evaluation"}')
    with pytest.raises(
        UserError, match=r"is an evaluation of a model, not a sweep; `pyramidbench evaluate --report"
    ) as error:
        load_run(tmp_path)
    one_line(error)


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_what_is_no_run_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"'.*{name}' is no run: it has no manifest.json") as error:
        load_run(tmp_path / name)
    one_line(error)


def test_cells_without_a_manifest_are_not_written_to(tmp_path: Path) -> None:
    folder = measured(tmp_path / "run", CELLS[:2])
    (folder / "manifest.json").unlink()
    before = (folder / "cells.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"holds measured cells and no manifest.json.*--out, or --fresh") as error:
        RunWriter(folder, manifest(), DEVICE)
    one_line(error)
    assert (folder / "cells.jsonl").read_bytes() == before


def test_fresh_sets_aside_and_never_deletes(tmp_path: Path) -> None:
    folder = measured(tmp_path / "run", CELLS[:1])
    first = set_aside(folder)
    assert not folder.exists()
    measured(folder, CELLS[:2])
    second = set_aside(folder)
    assert first is not None
    assert second is not None
    assert first != second
    assert (len(load_run(first).records), len(load_run(second).records)) == (1, 2)
    assert first.name.startswith("run.before-")


def test_what_is_no_run_is_not_set_aside(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    assert set_aside(tmp_path / "home") is None
    assert set_aside(tmp_path / "nothing") is None
    assert (tmp_path / "home" / "thesis.tex").read_text() == "mine"


def test_a_default_folder_is_found_again_by_its_sweep_and_device(tmp_path: Path) -> None:
    cells = [cell.identity for cell in CELLS]
    first = run_folder(tmp_path, "mine", DEVICE, cells)
    assert first.name.endswith("-mine-test-cpu-" + first.name[-8:])
    measured(first, CELLS[:1])
    assert run_folder(tmp_path, "mine", DEVICE, cells) == first
    assert run_folder(tmp_path, "mine", DEVICE, cells[:2]) != first
    assert run_folder(tmp_path, "mine", DEVICE.model_copy(update={"name": "Other"}), cells) != first
    set_aside(first)
    measured(first, CELLS[:1])
    assert run_folder(tmp_path, "mine", DEVICE, cells) == first


def test_parquet_and_csv_have_the_columns_of_a_record_and_null_for_what_is_missing(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", manifest(), DEVICE)
    writer.add(record(CELLS[0], latency_s=0.5, recall_by_head=[0.5, None], causal=True))
    writer.add(record(CELLS[1], "skipped", reason="too long"))
    run = writer.close()
    table = pq.read_table(run.path / "results.parquet")
    csv = pd.read_csv(run.path / "results.csv")
    assert table.column_names == list(csv.columns) == list(run.frame.columns) == columns()
    assert table["latency_s"].to_pylist() == [0.5, None]
    assert table["recall"].null_count == 2
    assert table["samples"].to_pylist() == [None, None]
    assert table["reason"].to_pylist() == [None, "too long"]
    assert table["speedup"].to_pylist() == [1.0, None]
    assert table["dense_method"].to_pylist() == ["dense", None]
    assert table["recall_by_head"].to_pylist() == [[0.5, None], None]
    lines = (run.path / "results.csv").read_text().splitlines()
    assert lines[2].startswith(f"{CELLS[1].identity},skipped,too long,dense,dense,,")
    assert csv["latency_s"].isna().tolist() == [False, True]


def test_a_run_without_a_record_has_a_frame_and_tables(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run", manifest(), DEVICE).close()
    assert run.frame.empty
    assert run.missing == 3
    assert list(pd.read_csv(run.path / "results.csv").columns) == columns()
    assert pq.read_table(run.path / "results.parquet").column_names == columns()


def test_a_copied_run_is_the_same_run(tmp_path: Path) -> None:
    shutil.copytree(measured(tmp_path / "run", CELLS), tmp_path / "copy")
    assert load_run(tmp_path / "copy").records == load_run(tmp_path / "run").records


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "old")
    (tmp_path / "file.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_a_lock_that_a_dead_process_left_does_not_bar_the_folder(tmp_path: Path) -> None:
    folder = measured(tmp_path / "run", CELLS[:1])
    (folder / ".lock").touch()
    RunWriter(folder, manifest(), DEVICE).close()
    with FileLock(folder / ".lock"), pytest.raises(UserError, match="another process"):
        RunWriter(folder, manifest(), DEVICE)
