"""Weights through the shared file system, for engines that no collective reaches. Sending end.

An update is a folder of safetensors files, one a bucket, and a manifest that comes last. With weights.changed_only a tensor
whose bytes are those of an earlier update is not written again: the manifest names the older file. So any one manifest
leads to the whole model, and an engine that joins late needs no other.

    <folder>/000007/00000.safetensors ...     <folder>/000007/manifest.json
    {"tensors": {name: [file relative to <folder>, xxh3_64 of its bytes]}}       in the order of the model
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from molt_hpc.config import WeightsConfig
from molt_hpc.weights.group import checksum
from molt_hpc.weights.plan import Bucket
from molt_hpc.weights.publish import BucketSender, SendReport, WeightSource, view

KEPT = 2
"""Manifests whose files stay: the newest, and the one that a slow engine may still be reading."""


def overall(tensors: dict[str, list[str]]) -> str:
    """One checksum for a manifest's tensors: {name: [file, checksum]}."""
    return xxhash.xxh3_64_hexdigest("\n".join(f"{name} {entry[1]}" for name, entry in tensors.items()).encode())


class FilesSender(BucketSender):
    """Writes each update before the engines are paused; `send` has nothing left to do."""

    backend = "files"

    def __init__(self, source: WeightSource, config: WeightsConfig, rank: int, folder: Path):
        super().__init__(source, config, rank)
        self._folder, self._number = folder, 0
        self._tensors: dict[str, list[str]] = {}
        self._manifests: list[Path] = []
        self._staged: SendReport | None = None

    def stage(self) -> None:
        if self._rank == 0 and not self._number:
            for old in self._folder.parent.glob("attempt_*"):  # of a run whose earlier attempts were killed
                shutil.rmtree(old, ignore_errors=True)
        self._number += 1
        self._written = 0
        super().stage()
        try:
            report = super().send()
            if self._rank == 0:
                self._commit()
                report.checksum, report.nbytes = overall(self._tensors), self._written
        except (RuntimeError, OSError) as error:
            self._tensors = {}  # some of them may name files that were never written
            raise RuntimeError(f"{self._path()}: {error}") from error
        self._staged = report

    def _path(self) -> Path:
        return self._folder / f"{self._number:06d}"

    def _deliver(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        name = f"{self._number:06d}/{self._buckets.index(bucket):05d}.safetensors"
        fresh: dict[str, torch.Tensor] = {}
        for spec in bucket.tensors:
            tensor = view(buffer, spec.dtype, spec.shape, spec.offset)
            digest = checksum(tensor)
            if not self._config.changed_only or self._tensors.get(spec.name, ["", ""])[1] != digest:
                fresh[spec.name] = tensor
                self._tensors[spec.name] = [name, digest]
        if fresh:
            self._path().mkdir(parents=True, exist_ok=True)
            self._written += sum(tensor.nbytes for tensor in fresh.values())
            save_file(fresh, self._folder / name)

    def _commit(self) -> None:
        """Write the manifest, whole or not at all, and remove what no kept manifest names."""
        path = self._path() / "manifest.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"tensors": self._tensors}))
        os.replace(temporary, path)
        self._manifests = [*self._manifests, path][-KEPT:]
        used = {entry[0] for manifest in self._manifests for entry in json.loads(manifest.read_text())["tensors"].values()}
        keep = {file.split("/")[0] for file in used} | {manifest.parent.name for manifest in self._manifests}
        for old in self._folder.iterdir():
            if old.name not in keep:
                shutil.rmtree(old, ignore_errors=True)
            else:
                for file in old.glob("*.safetensors"):
                    if f"{old.name}/{file.name}" not in used:
                        file.unlink()

    def plan(self) -> dict[str, Any]:
        return {"updates": [{"manifest": str(self._path() / "manifest.json"), "timeout": self._config.timeout}]}

    def open(self, world_size: int) -> tuple[str, int]:
        return self.address()

    def address(self) -> tuple[str, int]:
        return "", 0

    def send(self) -> SendReport:
        if self._staged is None:
            self.stage()
        report, self._staged = self._staged, None
        return report

    def close(self) -> None:
        super().close()
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
