import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_executor.weights import WeightStore, WeightStoreError


def writer(text):
    def write(folder):
        (folder / "a.safetensors").write_text(text)
        (folder / "nested").mkdir()
        (folder / "nested" / "b.json").write_text(text * 2)

    return write


def content(snapshot):
    return (Path(snapshot.uri) / "a.safetensors").read_text()


def test_a_published_version_is_the_newest_and_whole(tmp_path):
    store = WeightStore(tmp_path)
    snapshot = store.publish(4, writer("four"), "c4")
    assert store.newest() == snapshot
    assert (snapshot.version, snapshot.checksum, snapshot.bytes) == (4, "c4", 12)
    assert content(snapshot) == "four"
    assert store.newest_version == 4


def test_files_and_folders_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.safetensors").write_text("of a folder")
    store = WeightStore(tmp_path / "store")
    assert content(store.publish(1, source)) == "of a folder"
    assert content(store.publish(2, source / "a.safetensors")) == "of a folder"
    assert (source / "a.safetensors").exists()
    with pytest.raises(WeightStoreError, match="no weights at"):
        store.publish(3, tmp_path / "nowhere")
    assert store.newest_version == 2


def test_before_the_first_version_there_is_none(tmp_path):
    store = WeightStore(tmp_path)
    assert store.newest_version is None
    assert store.versions() == ()
    with pytest.raises(WeightStoreError, match="no weights were published"):
        store.newest()


def test_versions_go_on_after_a_restart_and_never_back(tmp_path):
    """radixark/miles#2835: the weight version restarted at 1 after a resume, and the oldest samples were admitted."""
    WeightStore(tmp_path).publish(55, writer("55"), "c55")
    store = WeightStore(tmp_path)
    assert store.newest().version == 55
    with pytest.raises(WeightStoreError, match="version 1 is older than the published 55; versions never go back"):
        store.publish(1, writer("1"))
    store.publish(57, writer("57"), "c57")
    assert WeightStore(tmp_path).versions() == (55, 57)


def test_a_publication_may_be_repeated_but_not_changed(tmp_path):
    store = WeightStore(tmp_path)
    first = store.publish(7, writer("7"), "same")
    assert store.publish(7, writer("never written"), "same") == first
    assert content(store.newest()) == "7"
    with pytest.raises(WeightStoreError, match="published already, with another checksum"):
        store.publish(7, writer("x"), "other")
    store.publish(8, writer("8"))
    with pytest.raises(WeightStoreError, match="version 8 is published already"):
        store.publish(8, writer("8"))


def test_negative_versions_and_empty_snapshots_are_refused(tmp_path):
    store = WeightStore(tmp_path)
    with pytest.raises(WeightStoreError, match="-1 is negative"):
        store.publish(-1, writer("x"))
    with pytest.raises(WeightStoreError, match="would be empty"):
        store.publish(1, lambda folder: None)
    with pytest.raises(WeightStoreError, match="keeps at least the newest"):
        WeightStore(tmp_path, keep=0)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    store = WeightStore(tmp_path)
    store.publish(1, writer("1"))
    before = sorted(p.name for p in tmp_path.iterdir())

    def broken(folder):
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.publish(2, broken)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert store.newest_version == 1
    store.publish(2, writer("2"))


def test_a_version_that_is_not_on_record_is_given_to_nobody(tmp_path, monkeypatch):
    """A full disk: whoever restarts finds the version before it, so nobody may have loaded this one."""
    store = WeightStore(tmp_path, keep=1)
    store.publish(1, writer("1"))
    real = Path.replace

    def full(self, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.publish(2, writer("2"))
    assert store.newest().version == 1
    monkeypatch.setattr(Path, "replace", real)
    assert content(store.publish(2, writer("2 again"))) == "2 again"
    assert store.versions() == WeightStore(tmp_path).versions() == (2,)


def test_the_newest_versions_are_kept_and_a_store_that_keeps_fewer_removes_the_rest_with_its_next_one(tmp_path):
    store = WeightStore(tmp_path, keep=3)
    for version in (1, 2, 3, 4):
        store.publish(version, writer(str(version)))
    assert store.versions() == (2, 3, 4)
    narrow = WeightStore(tmp_path, keep=2)
    narrow.publish(5, writer("5"))
    assert narrow.versions() == WeightStore(tmp_path).versions() == (4, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "v00000004", "v00000005"]


@pytest.mark.parametrize("stray", [".partial-00000002", "v00000002"])
def test_what_a_crash_left_is_not_a_version(tmp_path, stray):
    WeightStore(tmp_path).publish(1, writer("1"))
    (tmp_path / stray).mkdir()
    (tmp_path / stray / "half").write_text("half")
    (tmp_path / ".partial-manifest.json").write_text("{")
    (tmp_path / "notes.txt").write_text("of a person")
    store = WeightStore(tmp_path)
    assert store.versions() == (1,)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "notes.txt", "v00000001"]
    store.publish(2, writer("2"))


def test_a_store_that_was_moved_still_opens(tmp_path):
    WeightStore(tmp_path / "a").publish(3, writer("three"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert content(WeightStore(tmp_path / "b").newest()) == "three"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"snapshots": []}', '{"newest": 1, "snapshots": []}', '{"newest": 1, "snapshots": [{}]}']
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(WeightStoreError, match=r"manifest\.json"):
        WeightStore(tmp_path)


def test_a_snapshot_that_lost_bytes_is_named(tmp_path):
    WeightStore(tmp_path).publish(1, writer("1234"))
    (tmp_path / "v00000001" / "a.safetensors").write_text("12")
    with pytest.raises(WeightStoreError, match=r"version 1 in .* has 10 bytes on disk, 12 expected"):
        WeightStore(tmp_path)


@settings(max_examples=15, deadline=None)
@given(
    versions=st.lists(st.integers(0, 12), max_size=12),
    restarts=st.sets(st.integers(0, 12)),
    keep=st.integers(1, 3),
)
def test_any_sequence_of_publications_is_monotonic_and_keeps_the_newest(tmp_path_factory, versions, restarts, keep):
    folder = tmp_path_factory.mktemp("store")
    store, published = WeightStore(folder, keep), []
    for number, version in enumerate(versions):
        if number in restarts:
            store = WeightStore(folder, keep)
        if published and version <= published[-1]:
            with pytest.raises(WeightStoreError):
                store.publish(version, writer(str(version)))
        else:
            store.publish(version, writer(str(version)))
            published.append(version)
        assert store.versions() == tuple(published[-keep:])
        on_disk = {int(p.name[1:]) for p in folder.iterdir() if p.name.startswith("v")}
        assert on_disk == set(store.versions())
        if published:
            assert content(store.newest()) == str(published[-1])
            assert json.loads((folder / "manifest.json").read_text())["newest"] == published[-1]
    shutil.rmtree(folder)
