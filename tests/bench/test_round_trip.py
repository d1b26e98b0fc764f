"""Tests that the picture shows the current behavior of the state machines, in the documented order."""

from __future__ import annotations

from tests.bench import round_trip
from tests.bench.round_trip import NUM_FRAGMENTS, STEP_S, Trip


def test_the_picture_shows_the_current_behavior_of_the_machines() -> None:
    assert round_trip.stored() == round_trip.trace()


def test_a_round_trip_has_the_documented_order() -> None:
    moments = round_trip.trace()
    for p in range(NUM_FRAGMENTS):
        trip = Trip(moments, p)
        opened, merged, offered = (trip.at("syncer", what) for what in ("announcement", "merge", "offer"))
        assert trip.at(trip.opener, "intent") < opened
        assert merged == max(trip.at(name, "uploaded") for name in STEP_S) < offered
        for name in STEP_S:
            copied, landed = trip.at(name, "snapshot"), trip.at(name, "landing")
            assert opened < copied <= trip.at(name, "upload")
            assert offered < trip.at(name, "download") < landed
            assert {copied, landed} <= {t for t, who, what, _ in moments if (who, what) == (name, "step")}
