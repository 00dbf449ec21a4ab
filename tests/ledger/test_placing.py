"""The choice of machines, for all small fleets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.ledger.placing import Candidate, place

IDS = [f"m{number}" for number in range(6)]
candidates = st.lists(
    st.builds(
        Candidate,
        machine_id=st.sampled_from(IDS),
        slots=st.integers(1, 3),
        live=st.booleans(),
        blocked=st.booleans(),
        holder=st.sampled_from([None, "mine", "other"]),
    ),
    unique_by=lambda candidate: candidate.machine_id,
)
some_ids = st.lists(st.sampled_from([*IDS, "gone"]), max_size=5)


@given(
    candidates, st.integers(1, 5), st.integers(1, 3), some_ids, st.frozensets(st.sampled_from(IDS))
)
def test_every_place_gets_a_machine_that_may_be_taken(
    fleet: list[Candidate], needed: int, slots: int, keep: list[str], avoid: frozenset[str]
) -> None:
    def run(machines: list[Candidate]) -> list[str | None]:
        return place(
            machines,
            job_id="mine",
            machines_needed=needed,
            slots_needed=slots,
            keep=keep,
            avoid=avoid,
        )

    places = run(fleet)

    by_id = {candidate.machine_id: candidate for candidate in fleet}
    chosen = [name for name in places if name is not None]
    assert len(places) == needed
    assert len(chosen) == len(set(chosen)), "no machine twice"
    for name in chosen:
        machine = by_id[name]
        assert not machine.blocked
        assert machine.slots >= slots
        assert machine.holder != "other"
        assert name not in avoid
        assert machine.live or (machine.holder == "mine" and name in keep)

    may_be_taken = {
        c.machine_id
        for c in fleet
        if not c.blocked
        and c.slots >= slots
        and c.holder != "other"
        and c.machine_id not in avoid
        and (c.live or (c.holder == "mine" and c.machine_id in keep))
    }
    for rank, name in enumerate(keep[:needed]):
        if name in may_be_taken and name not in keep[:rank]:
            assert places[rank] == name, "a kept machine stays in its place"
    assert len(chosen) == min(needed, len(may_be_taken)), "none is left while a place is empty"
    assert run(list(reversed(fleet))) == places, "the order of rows does not matter"
