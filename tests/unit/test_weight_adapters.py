"""Adapters at the receiving end: the whole checkpoint once, then what is asked for, each with its product added."""

import json

import pytest
import torch
from safetensors.torch import save_file

from molt_hpc.weights.adapters import BASE, DOWN, UP, Adapters, checkpoint_tensors, digest
from molt_hpc.weights.group import checksum


@pytest.fixture
def folder(tmp_path):
    tensors = {f"{name}.weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(i)).bfloat16() for i, name in enumerate("abc")}
    save_file({name: tensors[name] for name in list(tensors)[:2]}, tmp_path / "1.safetensors")
    save_file({name: tensors[name] for name in list(tensors)[2:]}, tmp_path / "2.safetensors")
    save_file({"tok": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    files = dict(zip(tensors, ("1.safetensors", "1.safetensors", "2.safetensors")))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tmp_path


def taken(folder, seed):
    generator = torch.Generator().manual_seed(seed)
    base = digest({name: checksum(tensor) for name, tensor in checkpoint_tensors(folder)})
    factors = {f"b.weight{DOWN}": torch.randn(2, 4, generator=generator), f"b.weight{UP}": torch.randn(3, 2, generator=generator), BASE: base}
    return factors, [*factors.items(), ("norm", torch.ones(1))]


def test_sums_are_made_in_the_factors_dtype_and_the_rest_goes_its_own_way(folder):
    adapters, plain = Adapters(), dict(checkpoint_tensors(folder))
    for seed, wanted in enumerate((["a.weight", "b.weight", "c.weight"], ["b.weight"], ["b.weight"])):
        factors, tensors = taken(folder, seed)
        assert [name for name, _ in adapters.take(tensors)] == ["norm"] and adapters.names == ["b.weight"]
        for tensor in factors.values():
            tensor.zero_()  # the buffer that it came in is used again
        factors, _ = taken(folder, seed)
        found = dict(adapters.weights(folder, {"b.weight"}))
        assert list(found) == wanted
        product = factors[f"b.weight{UP}"].double() @ factors[f"b.weight{DOWN}"].double()
        torch.testing.assert_close(found["b.weight"].double(), plain["b.weight"].double() + product, atol=1e-6, rtol=1e-6)
        assert all(torch.equal(found[name], plain[name]) for name in wanted if name != "b.weight")


def test_another_checkpoint_is_refused_until_it_is_the_trainers(folder):
    adapters, (_, tensors) = Adapters(), taken(folder, 0)
    raw = (folder / "2.safetensors").read_bytes()
    (folder / "2.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    adapters.take(tensors)
    with pytest.raises(RuntimeError, match="does not hold the checkpoint that the trainer has loaded"):
        list(adapters.weights(folder, ()))
    (folder / "2.safetensors").write_bytes(raw)
    assert len(list(adapters.weights(folder, ()))) == 3 and adapters.proved
