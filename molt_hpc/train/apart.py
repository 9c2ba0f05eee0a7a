"""Reference and critic on training ranks of their own: the last ranks of the torchrun, each role a world for itself.

The ranks of a role see only each other in torch.distributed, so everything that builds, shards, scores and trains a model is the
same code as on the actor's ranks. The first ranks of two roles exchange messages through torchrun's store: the actor's asks for
scores of a batch, training, saving or loading, and goes on; it fetches the answer where it needs it.
"""

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from molt_hpc.config import RunConfig
from molt_hpc.data.shards import Batch
from molt_hpc.train.checkpoint import Learners, load_state, save_state
from molt_hpc.train.collectives import COLLECTIVE_TIMEOUT, announce, broadcast_bytes, outcome_of, share, value_of
from molt_hpc.train.critic import Critic, Reference
from molt_hpc.train.micro import TokenTable, share_plan
from molt_hpc.train.model import training_device
from molt_hpc.train.planner import Plan

log = logging.getLogger(__name__)

PIECE = 4 << 20
"""Bytes of one value in the store, which takes 8 MiB at most."""
LOOK, PAUSE = 20.0, 0.01
"""Seconds after which a role's first rank tells its others that it still waits, and between two looks for a message."""
ENDED = "ended"
"""The key by which the actor's ranks say that no message will follow."""


def roles(config: RunConfig, world: int) -> list[tuple[str, int]]:
    """(role, number of ranks), in the order of the ranks."""
    own = config.ref.num_procs, config.critic.num_procs
    return [("actor", world - sum(own)), *zip(("reference", "critic"), own, strict=True)]


def put(store: dist.Store, key: str, raw: bytes) -> None:
    pieces = [raw[at:at + PIECE] for at in range(0, len(raw), PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def take(store: dist.Store, key: str) -> bytes:
    """A message that has arrived, out of the store."""
    keys = [f"{key}/{number}" for number in range(int(store.get(key)))]
    raw = b"".join(store.get(each) for each in keys)
    for each in (key, *keys):
        store.delete_key(each)
    return raw


class Apart:
    """The actor's side of a role: to be used like Critic and Reference, by all of the actor's ranks together.

    Raises what the other side raised, ValueError or BadStep, and RuntimeError after COLLECTIVE_TIMEOUT without an answer.
    """

    def __init__(self, role: str, store: dist.Store, device: torch.device, total_steps: int | None):
        self._role, self._device, self._asked = role, device, 0
        self._store = dist.PrefixStore(role, store)
        self._ask("start", lambda: json.dumps(total_steps).encode())()

    def _ask(self, kind: str, payload: Callable[[], bytes]) -> Callable[[], bytes]:
        """Send a request; returns a function that waits for its answer."""
        number, store = self._asked, self._store
        self._asked += 1
        if dist.get_rank() == 0:
            put(store, f"ask{number}", kind.encode() + b"\n" + payload())

        def answer() -> bytes:
            log.debug("waiting up to %s for the %s ranks to answer %s", COLLECTIVE_TIMEOUT, self._role, kind)
            store.wait([f"answer{number}"], COLLECTIVE_TIMEOUT)
            return value_of(take(store, f"answer{number}"))

        return lambda: share(answer, self._device)

    def begin_scores(self, table: TokenTable, plan: Plan) -> Callable[[], np.ndarray]:
        fetch = self._ask("score", table.batch.to_bytes)
        return lambda: load_arrays(fetch())["scores"]

    def begin_training(self, table: TokenTable, plan: Plan, position: int) -> Callable[[], dict[str, float]]:
        fetch = self._ask("train", lambda: save_arrays({"returns": table["returns"], "position": np.array([position])}))
        return lambda: json.loads(fetch())

    def learners(self) -> Learners:
        return []

    def save(self, folder: Path) -> None:
        self._ask("save", lambda: str(folder).encode())()

    def load(self, folder: Path) -> None:
        self._ask("load", lambda: str(folder).encode())()


def serve(role: str, config: RunConfig, store: dist.Store) -> None:
    """All ranks of a role but the actor's: answer until the actor's ranks have ended."""
    held, device, box, number = Held(role, config), training_device(), dist.PrefixStore(role, store), 0
    while (raw := _next(store, box, number, device)) is not None:
        kind, payload = raw.split(b"\n", 1)
        outcome = outcome_of(partial(getattr(held, kind.decode()), payload))
        if dist.get_rank() == 0:
            put(box, f"answer{number}", outcome)
        number += 1


def _next(store: dist.Store, box: dist.Store, number: int, device: torch.device) -> bytes | None:
    """The next request on all ranks, or None. It may be long in coming: torchrun ends this process if the actor dies."""
    while True:
        arrived, ended, looking = False, False, time.monotonic() + LOOK
        while dist.get_rank() == 0 and not (arrived or ended) and time.monotonic() < looking:
            time.sleep(PAUSE)  # torch would log each wait that ends without a message
            arrived, ended = box.check([f"ask{number}"]), store.check([ENDED])
        code = announce(1 if arrived else 2 if ended else 0, device)
        if code == 2:
            return None
        if code == 1:
            return broadcast_bytes(take(box, f"ask{number}") if dist.get_rank() == 0 else None, device)


class Held:
    """What a role's ranks hold, with one method for each request. Payloads and answers are bytes."""

    def __init__(self, role: str, config: RunConfig):
        self._role, self._config = role, config

    def start(self, payload: bytes) -> bytes:
        self._model = Reference(self._config) if self._role == "reference" else Critic(self._config, json.loads(payload))
        return b""

    def score(self, payload: bytes) -> bytes:
        self._table = TokenTable(Batch.from_bytes(payload))
        self._plan = share_plan(self._model.model, self._table, self._config.train)
        self._table.columns["values"] = self._model.begin_scores(self._table, self._plan)()
        return save_arrays({"scores": self._table["values"]})

    def train(self, payload: bytes) -> bytes:
        given = load_arrays(payload)
        self._table.columns["returns"] = given["returns"]
        return json.dumps(self._model.begin_training(self._table, self._plan, int(given["position"][0]))()).encode()

    def save(self, payload: bytes) -> bytes:
        save_state(self._model.learners(), Path(payload.decode()) / self._role)
        return b""

    def load(self, payload: bytes) -> bytes:
        load_state(self._model.learners(), Path(payload.decode()) / self._role, same_ranks=False)
        return b""
