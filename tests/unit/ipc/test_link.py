from __future__ import annotations

from sessionkv.ipc.link import PROBE_S, Due, Link, Phase


def ready(now: float = 0.0) -> Link:
    link = Link(reconnect_s=30.0)
    link.greeted(now)
    link.welcomed(now, heartbeat_s=1.0, missed=3)
    return link


def test_a_ping_is_due_every_heartbeat():
    link = ready()
    assert link.due(0.9) is Due.NOTHING
    assert link.wait_s(0.25) == 0.75
    assert link.due(1.0) is Due.PING
    link.pinged(1.0)
    assert link.due(1.5) is Due.NOTHING


def test_twelve_silent_heartbeats_are_a_loss_and_any_message_counts():
    link = ready()
    link.heard(2.0)
    link.pinged(13.5)
    assert link.due(13.9) is Due.NOTHING
    assert link.due(14.0) is Due.LOSE


def test_silence_while_this_process_stood_still_is_not_the_engines():
    link = ready()
    link.heard(2.0)
    link.overslept(60.0)
    assert link.due(73.9) is Due.PING
    assert link.due(74.0) is Due.LOSE


def test_a_greeting_without_welcome_is_a_loss():
    link = Link(reconnect_s=30.0)
    link.greeted(10.0)
    assert link.due(12.9) is Due.NOTHING
    assert link.wait_s(12.0) == 1.0
    assert link.due(13.0) is Due.LOSE


def test_the_welcome_sets_the_heartbeat():
    link = Link(reconnect_s=30.0)
    link.greeted(0.0)
    link.welcomed(0.0, heartbeat_s=0.25, missed=2)
    assert link.due(0.25) is Due.PING
    link.pinged(1.9)
    assert link.due(1.99) is Due.NOTHING
    assert link.due(2.0) is Due.LOSE


def test_a_lost_engine_is_looked_for_at_once_and_then_at_intervals():
    link = ready()
    link.lose(5.0)
    assert link.phase is Phase.LOST
    assert link.due(5.0) is Due.PROBE
    link.probed(5.0)
    assert link.due(5.0 + PROBE_S / 2) is Due.NOTHING
    assert link.due(5.0 + PROBE_S) is Due.PROBE


def test_an_engine_that_refuses_a_greeting_is_not_asked_in_a_tight_loop():
    link = Link(reconnect_s=30.0)
    link.greeted(0.0)
    link.lose(1.0)
    assert link.due(1.0) is Due.NOTHING
    assert link.due(1.0 + PROBE_S) is Due.PROBE


def test_giving_up_is_due_once_for_each_loss():
    link = ready()
    link.lose(5.0)
    link.probed(34.99)
    assert link.due(35.0) is Due.GIVE_UP
    assert not link.has_given_up
    link.gave_up()
    assert link.has_given_up
    assert link.due(35.0) is Due.NOTHING
    link.greeted(36.0)
    link.lose(37.0)
    link.probed(37.0)
    assert link.due(37.1) is Due.NOTHING
    link.greeted(38.0)
    link.welcomed(38.0, heartbeat_s=1.0, missed=3)
    assert not link.has_given_up
    link.lose(39.0)
    link.probed(68.99)
    assert link.due(69.0) is Due.GIVE_UP
