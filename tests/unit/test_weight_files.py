"""Weights by files: what is written, what is left out, what is removed, and what an interrupted writer leaves."""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from molt_hpc.config import WeightsConfig
from molt_hpc.weights import group
from molt_hpc.weights.files import FilesSender, overall
from tests.weight_source import TensorSource


def model(value):
    return {"a": torch.full((5,), value), "b": torch.arange(6).bfloat16().reshape(2, 3), "c": torch.full((3, 3), value + 1),
            "d": torch.tensor(2.0)}


def sender(folder, source, **options):
    return FilesSender(source, WeightsConfig(backend="files", bucket_bytes=40, **options), 0, folder)


def read(plan, folder):
    """The model that a manifest leads to, its checksums checked."""
    tensors = json.loads(Path(plan["updates"][0]["manifest"]).read_text())["tensors"]
    found = {}
    for name, (file, digest) in tensors.items():
        found[name] = load_file(folder / file)[name]
        assert xxhash.xxh3_64_hexdigest(found[name].reshape(-1).view(torch.uint8).numpy().tobytes()) == digest
    return found, tensors


@pytest.mark.parametrize("changed_only", [False, True])
def test_every_manifest_leads_to_the_whole_model_and_old_files_go(tmp_path, changed_only):
    source = TensorSource(model(1.0))
    by_files, written = sender(tmp_path, source, changed_only=changed_only), []
    total = sum(t.nbytes for t in source.tensors.values())
    for number in range(1, 7):
        source.tensors = model(1.0 if number in (1, 2) else float(number))
        by_files.stage()
        report = by_files.send()
        found, entries = read(by_files.plan(), tmp_path)
        assert list(found) == list(source.tensors)
        assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in source.tensors.items())
        assert report.checksum == overall(entries)
        written.append(report.nbytes)
    changing = source.tensors["a"].nbytes + source.tensors["c"].nbytes
    assert written == ([total, 0, *[changing] * 4] if changed_only else [total] * 6)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == (["000001", "000005", "000006"] if changed_only else ["000005", "000006"])
    if changed_only:  # of the first update only the file that still holds something current
        assert {name for path in (tmp_path / "000001").glob("*.safetensors") for name in load_file(path)} >= {"b", "d"}


def test_send_without_stage_writes_and_a_second_stage_supersedes_the_first(tmp_path):
    source = TensorSource(model(1.0))
    by_files = sender(tmp_path, source)
    first = by_files.send()
    by_files.stage()
    source.tensors = model(2.0)
    by_files.stage()
    second = by_files.send()
    assert first.checksum != second.checksum
    assert torch.equal(read(by_files.plan(), tmp_path)[0]["a"], torch.full((5,), 2.0))


def test_a_write_that_fails_is_an_error_and_the_next_update_is_whole(tmp_path):
    source = TensorSource(model(1.0))
    by_files = sender(tmp_path / "weights", source, changed_only=True)
    by_files.send()
    (tmp_path / "weights" / "000002").write_text("in the way")
    with pytest.raises(RuntimeError, match="000002"):
        by_files.stage()
    source.tensors = model(3.0)
    report = by_files.send()
    assert report.checksum == overall(read(by_files.plan(), tmp_path / "weights")[1])


def test_what_killed_attempts_left_goes_at_the_start_and_everything_at_the_end(tmp_path):
    (tmp_path / "weights" / "attempt_1" / "000003").mkdir(parents=True)
    by_files = sender(tmp_path / "weights" / "attempt_2", TensorSource(model(1.0)))
    by_files.send()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["attempt_2"]
    by_files.close()
    assert not list((tmp_path / "weights").iterdir())


def test_a_checksum_is_that_of_the_bytes_for_every_dtype_and_shape():
    for tensor in model(3.0).values():
        assert group.checksum(tensor) == xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
