"""Prompts: an order that is a function of the seed, and errors with file and line."""

import json

import pytest

from molt_hpc.config import RunConfig
from molt_hpc.data.prompts import PromptOrder, read_files


def config(path, **data):
    result = RunConfig()
    result.data.prompt_dataset = str(path)
    for key, value in data.items():
        setattr(result.data, key, value)
    return result


@pytest.fixture
def ten(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "label": i, "id": f"id{i}"}) + "\n" for i in range(10)))
    return path


def test_each_epoch_holds_every_prompt_once_in_its_own_order(ten):
    settings = config(ten)
    settings.train.num_episodes = 3
    order = PromptOrder(settings)
    assert order.total == 30
    epochs = [[order.prompt(10 * e + i).id for i in range(10)] for e in range(3)]
    assert all(sorted(e) == [f"id{i}" for i in range(10)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_ordinal_names_the_same_prompt_in_every_attempt(ten):
    first, second = PromptOrder(config(ten)), PromptOrder(config(ten))
    assert [first.prompt(i) for i in range(10)] == [second.prompt(i) for i in reversed(range(10))][::-1]


def test_without_shuffle_the_order_is_the_files(ten):
    order = PromptOrder(config(ten, shuffle=False))
    assert [order.prompt(i).label for i in range(10)] == list(range(10))


@pytest.mark.parametrize("line, reason", [
    ('{"prompt": ', ":2: not JSON"),
    ('{"question": "x"}', ":2: expected an object with the column 'prompt'"),
    ('{"prompt": 7}', ":2: 'prompt' is neither text nor a list"),
    ('{"prompt": [{"content": "no role"}]}', ":2: 'prompt' is neither text nor a list"),
])
def test_a_broken_line_is_named_with_file_and_line(tmp_path, line, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{path}{reason}"):
        read_files(config(path).data)


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_files(config(tmp_path / "none.jsonl").data)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        read_files(config(tmp_path / "empty.jsonl").data)
