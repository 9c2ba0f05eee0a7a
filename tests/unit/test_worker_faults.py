"""Which workers are given leases after faults."""

import itertools

import pytest

from molt_hpc.broker.fleet import PROBE_PATIENCE, Fleet, Peer

SLOTS, MAX_FAULTS = 64, 8


@pytest.fixture
def asking():
    """(fleet, a ready worker that has asked for all its slots)"""
    fleet = Fleet(MAX_FAULTS)
    peer = Peer(b"1", "rollout", "rollout_n0", "n0", 0.0, ready=True)
    fleet.add(peer)
    fleet.engine_ready(peer, "rollout_n0_e0", 1)
    fleet.engines["rollout_n0_e0"].served = 3
    fleet.ask(peer, SLOTS)
    return fleet, peer


def grant_all(fleet, peer, now):
    """How many leases the worker is given now."""
    for given in itertools.count():
        if peer not in fleet.hungry(3, now):
            return given
        fleet.granted(peer, now)


def fail(fleet, peer, granted, now, count=1):
    """Whether this took the worker's leases away."""
    fleet.ask(peer, count)
    return any([fleet.infrastructure_fault(peer, granted, now, "no answer") for _ in range(count)])


def test_faults_of_leases_that_ran_at_the_same_time_count_once(asking):
    fleet, peer = asking
    assert grant_all(fleet, peer, 10.0) == SLOTS
    assert not fail(fleet, peer, 10.0, 11.0, SLOTS)
    assert peer.faults == SLOTS and peer.faults_in_a_row == 1


def test_a_worker_that_fails_everything_at_once_is_given_one_lease_at_a_time_until_it_is_barred(asking):
    fleet, peer = asking
    granted, leases, now = 10.0, grant_all(fleet, peer, 10.0), 11.0
    total = leases
    while not fail(fleet, peer, granted, now, leases):
        granted = now + 0.01
        leases = grant_all(fleet, peer, granted)
        total, now = total + leases, now + 0.02
    assert total == SLOTS + MAX_FAULTS - 1
    assert f"{MAX_FAULTS} infrastructure faults in a row, the last one: no answer" in peer.barred
    assert grant_all(fleet, peer, now + 100) == 0


@pytest.mark.parametrize("finishes", [True, False])
def test_the_worker_gets_all_its_leases_again_once_one_has_finished_or_has_run_for_a_while(asking, finishes):
    fleet, peer = asking
    grant_all(fleet, peer, 10.0)
    fail(fleet, peer, 10.0, 11.0, SLOTS)
    assert grant_all(fleet, peer, 12.0) == 1 and grant_all(fleet, peer, 12.1) == 0
    if finishes:
        fleet.rollout_finished(peer)
    later = 12.2 if finishes else 12.0 + PROBE_PATIENCE
    assert grant_all(fleet, peer, later) == SLOTS - 1
