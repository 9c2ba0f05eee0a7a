"""How tensors find their way into a model: recorded once, repeated later, counted always."""

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class Model(nn.Module):
    """Three ways to load: as it comes, transposed, and times two; some names are ignored. Counts the walks over it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 3), "down": nn.Linear(3, 4, bias=False)}) for _ in range(6))
        self.doubled = nn.Linear(5, 2, bias=False)
        self.doubled.register_buffer("scale", torch.zeros(2))
        self.walks = 0

    def load_weights(self, weights):
        self.walks += 1
        places = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in weights:
            assert "unknown" not in name
            if name not in places:
                continue
            place = places[name]
            place.weight_loader(param=place, loaded_weight=tensor.t() if "down" in name else 2 * tensor if "doubled.weight" in name else tensor)
        return set()

    def checkpoint(self, seed):
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: p.t().shape if "down" in name else p.shape for name, p in (*self.named_parameters(), *self.named_buffers())}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | {"layers.0.up.rotary": torch.zeros(2)}

    def holds(self, tensors):
        for name, p in (*self.named_parameters(), *self.named_buffers()):
            wanted = tensors[name].t() if "down" in name else 2 * tensors[name] if "doubled.weight" in name else tensors[name]
            torch.testing.assert_close(p.data, wanted, rtol=0, atol=0)
        return True


@pytest.fixture
def updated():
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from molt_hpc.weights.reload import Reload

    model, reload = Model(), Reload()
    record_metadata_for_reloading(model)

    def update(tensors, parts=2, lacks=()):
        reload.start(model)
        rows = [row for row in tensors.items() if row[0] not in lacks]
        walks = model.walks
        for part in range(parts):
            reload.load(model, rows[part::parts])
        missing = reload.missing(model)
        if not missing:
            reload.finish(model, None, torch.device("meta"))
        return model.walks - walks, missing

    return model, reload, update


def test_the_first_of_each_kind_is_learned_alone_and_later_updates_walk_over_the_model_for_the_odd_ones_only(updated):
    model, reload, update = updated
    for seed in range(3):
        tensors = model.checkpoint(seed)
        walks, missing = update(tensors)
        assert not missing and model.holds(tensors)
        assert reload.skipped(tensors) == ["layers.0.up.rotary"]
        # at first alone: one weight and one bias, every transposed one, the doubled one, its buffer, and what is skipped; the like in each part
        assert walks <= 2 + 6 + 3 + 2 if seed == 0 else walks == 2
    assert reload.layers_of("layers.3.down.weight") == {"layers.3.down"} and reload.layers_of("doubled.scale") == {"doubled"}


def test_what_did_not_come_is_named_and_a_given_up_update_leaves_no_trace(updated):
    model, _, update = updated
    first, second = model.checkpoint(1), model.checkpoint(2)
    update(first)
    _, missing = update(second, lacks=["layers.4.up.bias"])
    assert missing == ["layers.4.up.{bias,weight} (12 of 15 elements)"]
    with pytest.raises(AssertionError):
        update({"layers.9.unknown": torch.zeros(1)} | model.checkpoint(3), parts=1)
    _, missing = update(second)
    assert not missing and model.holds(second)


def test_names_that_came_with_one_that_cannot_be_loaded_are_learned_later(updated):
    model, _, update = updated
    tensors = model.checkpoint(1)
    names = list(tensors)
    with pytest.raises(AssertionError):
        update({name: tensors[name] for name in names[:3]} | {"layers.1.up.unknown": torch.zeros(1)} | tensors, parts=1)
    _, missing = update(tensors)
    assert not missing and model.holds(tensors)


def test_wrappers_of_loaders_do_not_pile_up(updated):
    model, reload, update = updated
    depths = []
    for seed in range(4):
        update(model.checkpoint(seed))
        reload.start(model)
        depths.append([0] * 3)
        for i, name in enumerate(("layers.0.up.weight", "layers.0.up.bias", "doubled.scale")):
            loader = (dict(model.named_parameters()) | dict(model.named_buffers()))[name].weight_loader
            while hasattr(loader, "__wrapped__"):
                loader, depths[-1][i] = loader.__wrapped__, depths[-1][i] + 1
    assert depths[1:] == depths[:-1]


def test_layers_are_made_anew_in_the_same_memory_and_what_is_kept_of_it_is_left_alone(updated):
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Packs(QuantizeMethodBase):
        """Keeps, of some layers, the weight that it was given, as a method does that packs nothing."""

        def __init__(self, keeps):
            self.keeps = keeps

        def process_weights_after_loading(self, layer):
            self.place = layer.weight.data_ptr()
            self.kept = layer.weight.detach() if self.keeps else None

        def create_weights(self, layer, *arguments, **options): ...

        def apply(self, layer, *arguments, **options): ...

    model, _, update = updated
    methods = [Packs(number in (2, 3)) for number in range(6)]
    for layers, method in zip(model.layers, methods, strict=True):
        layers["down"].quant_method = method
    for seed in range(2):
        tensors = model.checkpoint(seed)
        _, missing = update(tensors, parts=1)
        assert not missing and model.holds(tensors)
        for number in (2, 3):
            assert torch.equal(methods[number].kept, tensors[f"layers.{number}.down.weight"].t())
        places = [method.place for method in methods]
        assert places[0] == places[1] == places[2] and places[4] == places[5] and len(set(places)) == 3


def test_a_bucket_arrives_while_the_one_before_it_is_loaded():
    import threading

    from molt_hpc.weights.receive import Reported

    arrived, late, used = [threading.Event() for _ in range(6)], [], []

    class ScriptedEngine(Reported):
        """Loads a bucket only once the next one has arrived; its group and its model are scripted."""

        init_transfer_engine = receive_weights = shutdown = load_adapted = keep_pending = lambda *_: None

        def __init__(self):
            self.reload = self

        def load(self, tensors):
            if not arrived[min(tensors + 1, 5)].wait(20):
                late.append(tensors)

    def arriving(free):
        for number, event in enumerate(arrived):
            used.append(free.get(timeout=20))
            event.set()
            yield number, used[-1]

    ScriptedEngine().load_all(arriving, ["first", "second"])
    assert not late and used == ["first", "second"] * 3
