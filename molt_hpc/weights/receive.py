"""The receiving end inside vLLM: weight-transfer back ends molt_hpc_{gloo,files,nccl,sparse_nccl} and their report.

vLLM loads this through the `vllm.general_plugins` entry point and, for `WeightReport`, through
--worker-extension-cls; vLLM itself is not changed. All back ends load through `Reload` and attest the bytes as they
arrive: on CPU the loaded parameters are repacked, and vLLM's own weight checker then hashes empty tensors.
"""

import json
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine, SparseNCCLWeightTransferUpdateInfo

from molt_hpc.weights import group
from molt_hpc.weights.adapters import Adapters
from molt_hpc.weights.files import overall
from molt_hpc.weights.plan import transfer_rank
from molt_hpc.weights.publish import view
from molt_hpc.weights.reload import Reload
from molt_hpc.weights.threads import ahead, aside

Tensors = list[tuple[str, torch.Tensor]]


@dataclass(kw_only=True)
class GroupInit(WeightTransferInitInfo):
    """How to join the transfer group of one epoch; `rank_offset` is the rank of this server's first worker."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    epoch: int
    timeout: float


@dataclass
class BucketsUpdate(WeightTransferUpdateInfo):
    """All buckets of an update, {nbytes, tensors: [[name, dtype, shape, offset], ...]} each."""

    buckets: list[dict[str, Any]]


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):
    """Path of a manifest (see weights/files.py), and the seconds for which it may be late."""

    manifest: str
    timeout: float


class Reported(WeightTransferEngine):
    """What the back ends share: the reload and the report of the update under way."""

    init_info_cls = GroupInit

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reload, self.adapters = Reload(), Adapters()

    def start_weight_update(self) -> None:
        self.checksum, self.nbytes, self.unchanged_allowed = "", 0, False
        self.names: list[str] = []
        self.seconds = {"receive": 0.0, "load": 0.0, "load_cpu": 0.0}
        self.reload.start(self.model)

    def load(self, tensors: Tensors, model: torch.nn.Module | None = None) -> None:
        """Load tensors in host memory or on the device."""
        started, busy = time.perf_counter(), time.thread_time()
        tensors = self.adapters.take(tensors)
        self.names += [name for name, _ in tensors]
        self.reload.load(model or self.model, [(name, tensor.to(self.device)) for name, tensor in tensors])
        self.seconds["load"] += time.perf_counter() - started
        self.seconds["load_cpu"] += time.thread_time() - busy

    def load_all(self, arriving: Callable[[queue.SimpleQueue], Iterator[tuple[Tensors, Any]]], places: list[Any]) -> None:
        """Load what `arriving(free)` yields on another thread: tensors, and the place that they take up, back in `free` once they are loaded.

        places: buffers, or None for what needs none. An error in loading is raised after everything has arrived: the other
        receivers of the collective get theirs through this one.
        """
        error: Exception | None = None
        free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for place in places:
            free.put(place)
        for tensors, place in ahead(arriving(free)):
            try:
                if error is None:
                    self.load(tensors)
                    self.reload.keep_pending(place)
            except Exception as problem:
                error = problem
            free.put(place)
        if error is not None:
            raise error
        self.load_adapted()

    def load_adapted(self) -> None:
        """After everything has arrived: load the layers whose adapters came instead of their weights."""
        if not (adapted := self.adapters.names):
            return
        self.unchanged_allowed = self.adapters.proved
        layers = {path for name in adapted for path in self.reload.layers_of(name)}
        wanted = {name for name in self.reload.calls if layers & self.reload.layers_of(name)}
        for name, tensor in self.adapters.weights(Path(self.model_config.model), wanted):
            self.load([(name, tensor)])
        self.names = adapted  # of the others in its folder the model takes what it took when it was started

    def finish_weight_update(self) -> None:
        self.reload.finish(self.model, self.model_config, self.device)

    def report(self) -> dict[str, Any]:
        """What this rank received, which tensors fill nothing here, and which parameters the update has not filled."""
        return {"checksum": self.checksum, "nbytes": self.nbytes, "seconds": self.seconds, "skipped": self.reload.skipped(self.names),
                "missing": self.reload.missing(self.model, self.unchanged_allowed)}


class GlooEngine(Reported):
    """Receives buckets by gloo broadcast into two buffers: one bucket arrives while the one before it is loaded."""

    update_info_cls = BucketsUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store = self.group = None
        self.look: Callable[[], None] = lambda: None
        self.buffers: list[torch.Tensor] = []

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        self.shutdown()
        rank = transfer_rank(init_info.rank_offset, self.parallel_config.data_parallel_index, self.parallel_config.world_size,
                             self.parallel_config.rank)
        self.store = group.open_store(init_info.master_address, init_info.master_port, init_info.world_size, False, init_info.timeout)
        self.look = group.watch(init_info.master_address, init_info.master_port, init_info.timeout)
        self.group = aside(partial(group.join, self.store, init_info.epoch, rank, init_info.world_size, init_info.timeout), self.look)

    def receive_weights(self, update_info: BucketsUpdate) -> None:
        if self.group is None:
            raise RuntimeError("the transfer group was never joined: init_weight_transfer_engine comes first")
        largest = max(bucket["nbytes"] for bucket in update_info.buckets)
        if not self.buffers or len(self.buffers[0]) < largest:
            self.buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(min(2, len(update_info.buckets)))]
        try:
            self.load_all(partial(self._arriving, update_info.buckets), self.buffers)
        except RuntimeError:
            self.buffers = []  # a call that was left behind may still write into them
            raise

    def _arriving(self, buckets: list[dict[str, Any]], free: queue.SimpleQueue) -> Iterator[tuple[Tensors, torch.Tensor]]:
        checksum = group.Checksum()
        for bucket in buckets:
            buffer = free.get()
            started = time.perf_counter()
            aside(partial(group.broadcast, self.group, buffer[:bucket["nbytes"]]), self.look)
            checksum.add(buffer[:bucket["nbytes"]])
            self.nbytes += bucket["nbytes"]
            self.seconds["receive"] += time.perf_counter() - started
            yield [(name, view(buffer, dtype, shape, offset)) for name, dtype, shape, offset in bucket["tensors"]], buffer
        self.checksum = checksum.hex()

    def shutdown(self) -> None:
        self.group = self.store = None


class FilesEngine(Reported):
    """Loads an update from the files that its manifest names; only what has changed since the last one."""

    update_info_cls = FilesUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loaded: dict[str, str] = {}

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        """There is no group."""

    def receive_weights(self, update_info: FilesUpdate) -> None:
        manifest = Path(update_info.manifest)
        tensors = _read_manifest(manifest, update_info.timeout)["tensors"]
        wanted, before = self._wanted(tensors), self.loaded
        self.loaded = {}  # until this update is complete, the model is in no state that a manifest describes
        found: dict[str, str] = {}
        self.names, self.unchanged_allowed = list(tensors), len(wanted) < len(tensors)
        self.load_all(partial(self._arriving, manifest.parent.parent, wanted, found), [None, None])  # two files at a time
        self.loaded = {name: found.get(name, before.get(name, "")) for name in tensors}
        self.checksum = overall({name: ["", digest] for name, digest in self.loaded.items()})

    def _wanted(self, tensors: dict[str, list[str]]) -> dict[str, list[str]]:
        """What must be read: changed tensors, and all others that fill a layer in which one has changed."""
        changed = [name for name, (_, digest) in tensors.items() if self.loaded.get(name) != digest]
        layers = {path for name in changed for path in self.reload.layers_of(name)}
        return {name: entry for name, entry in tensors.items() if name in changed or layers & self.reload.layers_of(name)}

    def _arriving(self, folder: Path, wanted: dict[str, list[str]], found: dict[str, str],
                  free: queue.SimpleQueue) -> Iterator[tuple[Tensors, None]]:
        by_file: dict[str, list[str]] = {}
        for name, (file, _) in wanted.items():
            by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            free.get()
            started = time.perf_counter()
            with safe_open(folder / file, "pt") as opened:
                tensors = [(name, opened.get_tensor(name)) for name in names]
            found |= {name: group.checksum(tensor) for name, tensor in tensors}
            self.nbytes += sum(tensor.nbytes for _, tensor in tensors)
            self.seconds["receive"] += time.perf_counter() - started
            yield tensors, None

    def shutdown(self) -> None:
        """Nothing is held."""


def _read_manifest(path: Path, timeout: float) -> dict[str, Any]:
    """Read a manifest; a network file system may show a new file late."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path} has not appeared within {timeout:.0f} s: is the run folder on a file system that this node shares?")
        time.sleep(0.02)
    return json.loads(path.read_text())


def _for_vllm(info: GroupInit, **options: Any) -> NCCLWeightTransferInitInfo:
    return NCCLWeightTransferInitInfo(master_address=info.master_address, master_port=info.master_port, rank_offset=info.rank_offset,
                                      world_size=info.world_size, **options)


class NcclEngine(Reported, NCCLWeightTransferEngine):
    """vLLM's own NCCL receiver; its tensors are attested by fingerprints on the device and loaded through `Reload`."""

    update_info_cls = NCCLWeightTransferUpdateInfo

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        self.shutdown()
        NCCLWeightTransferEngine.init_transfer_engine(self, _for_vllm(init_info, packed=True))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        fingerprints, model = group.Fingerprints(), self.model

        def load(tensors: Tensors) -> None:
            for name, tensor in tensors:
                fingerprints.add(name, tensor)
            self.load(list(tensors), model)

        # vLLM's receiver asks its model for nothing but `load_weights`
        self.model = SimpleNamespace(load_weights=load)
        try:
            NCCLWeightTransferEngine.receive_weights(self, update_info)
        finally:
            self.model = model
        self.load_adapted()
        self.checksum, self.nbytes = fingerprints.hex(), fingerprints.nbytes


class SparseEngine(Reported, SparseNCCLWeightTransferEngine):
    """vLLM's own sparse receiver, which writes into the weights in place; patches are attested, what they leave is declared unchanged."""

    update_info_cls = SparseNCCLWeightTransferUpdateInfo

    def init_transfer_engine(self, init_info: GroupInit) -> None:
        self.shutdown()
        SparseNCCLWeightTransferEngine.init_transfer_engine(self, _for_vllm(init_info))

    def start_weight_update(self) -> None:
        self.fingerprints, self.seconds = group.Fingerprints(), {"load": 0.0}

    def receive_weights(self, update_info: SparseNCCLWeightTransferUpdateInfo) -> None:
        started, joined = time.perf_counter(), self.model_update_group
        if joined is None:
            raise RuntimeError("the transfer group was never joined: init_weight_transfer_engine comes first")
        keys = iter(f"{name} {part}" for name in update_info.names for part in ("indices", "values"))

        def broadcast(tensor: torch.Tensor, **options: Any) -> None:
            joined.broadcast(tensor, **options)
            self.fingerprints.add(next(keys), tensor)

        # vLLM's receiver asks its group for nothing but its device and `broadcast`
        self.model_update_group = SimpleNamespace(device=joined.device, broadcast=broadcast)
        try:
            SparseNCCLWeightTransferEngine.receive_weights(self, update_info)
        finally:
            self.model_update_group = joined
        self.seconds["load"] += time.perf_counter() - started

    def finish_weight_update(self) -> None:
        """Everything was written in place."""

    def report(self) -> dict[str, Any]:
        sums = self.fingerprints
        return {"checksum": sums.hex(), "nbytes": sums.nbytes, "seconds": self.seconds, "skipped": [], "missing": []}


class WeightReport:
    """Adds two methods to vLLM's workers, called through /collective_rpc."""

    def molt_hpc_weight_report(self) -> dict[str, Any]:
        """See `Reported.report`; between `update_weights` and `finish_weight_update`."""
        return self.weight_transfer_engine.report()

    def molt_hpc_weight_cancel(self) -> None:
        """Forget an update that was begun and will not be finished; harmless if there is none. The model is not to be served then."""
        self._weight_update_active = False
        self.weight_transfer_engine.reset_weight_update_target()


def register() -> None:
    """Entry point: make the back ends known to vLLM's factory; called once in every vLLM process."""
    for name, engine in {"molt_hpc_gloo": GlooEngine, "molt_hpc_files": FilesEngine, "molt_hpc_nccl": NcclEngine,
                         "molt_hpc_sparse_nccl": SparseEngine}.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)
