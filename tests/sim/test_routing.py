"""What the policies come to on workloads of chats: seeded, so each figure is the same on every run."""

import pytest

from tests.sim.routing import WORKLOADS, Figures, Fleet


def played(name: str, policy: str) -> Figures:
    fleet = Fleet(policy, WORKLOADS[name], seed=5)  # type: ignore[arg-type]  # of POLICIES
    figures = fleet.run()
    asked = sum(len(chat.turns) for chat in WORKLOADS[name].chats_of(5))
    assert figures.requests == asked == sum(figures.reasons.values())
    return figures


@pytest.mark.parametrize("name", ["many tenants", "many tenants, little memory"])
def test_prefixes_that_do_not_fit_everywhere_are_found_far_more_often(name: str) -> None:
    turns, prefix = played(name, "round-robin"), played(name, "prefix")
    assert prefix.hit_share > 1.5 * turns.hit_share
    assert prefix.queue_p99 < turns.queue_p99
    assert prefix.first_token_p99 < turns.first_token_p99
    assert prefix.most_rows < 1.3


@pytest.mark.parametrize("name", ["one busy tenant", "six busy tenants"])
def test_a_prefix_that_everybody_uses_spreads_over_all_replicas(name: str) -> None:
    turns, prefix = played(name, "round-robin"), played(name, "prefix")
    assert prefix.hit_share > turns.hit_share
    assert prefix.queue_p99 < turns.queue_p99
    assert prefix.most_rows < 1.3


def test_without_anything_in_common_nothing_is_lost() -> None:
    turns, prefix = played("nothing in common", "round-robin"), played("nothing in common", "prefix")
    assert prefix.first_token_p99 < 1.2 * turns.first_token_p99
    assert prefix.most_rows < 1.2
