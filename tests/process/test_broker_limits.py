"""Limits that stop a run with a reason, through a real broker."""

import pytest

from tests.process_run import BrokerThread, small_config
from tests.scripted import RunStopped, ScriptedActor, ScriptedWorker


def started(folder, limit, prompts=200):
    config = small_config(folder, prompts=prompts)
    config.algo.dynamic_filtering_enable, config.broker.max_filtered_groups = True, limit
    return BrokerThread(config)


def test_a_dataset_whose_groups_all_score_the_same_stops_the_run(tmp_path):
    broker = started(tmp_path, limit=12)
    worker, actor = ScriptedWorker(broker, score=lambda lease: 1.0, linger=0.0), ScriptedActor(broker)
    actor.begin()
    expected = r"groups in a row were filtered \(broker.max_filtered_groups\): \d+ x mean score 1.0 is outside"
    with pytest.raises(RunStopped, match=expected) as error:
        actor.next_batch()
    assert int(str(error.value).split()[0]) > 12
    assert broker.join() == 1
    worker.join(10)
    actor.close()
    assert "max_filtered_groups" in worker.reason and not broker.records
    assert broker.broker.ledger.balance() == 0


def test_useful_groups_between_filtered_ones_keep_the_run_going(tmp_path):
    broker = started(tmp_path, limit=12, prompts=60)
    # nine of ten groups agree: never more than twelve in a row, most of the dataset all the same
    worker = ScriptedWorker(broker, score=lambda lease: float(lease["prompt"]["ordinal"] % 10 == 9 and lease["sample"]), linger=0.0)
    actor, trained = ScriptedActor(broker), []
    actor.begin()
    while (found := actor.next_batch()) is not None:
        step, rollouts = found
        trained.append(sorted(r.prompt.ordinal for r in rollouts if r.sample == 0))
        actor.trained(step)
    actor.call("finished")
    assert trained == [[9, 19, 29, 39], [49, 59]]
    assert broker.join() == 0 and [record["groups_filtered"] for record in broker.records] == [36, 18]
    assert [record["leases_filtered"] for record in broker.records] == [72, 36]
    worker.join(10)
    actor.close()
