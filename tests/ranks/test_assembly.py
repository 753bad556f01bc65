"""Launchers that come together and watch each other, as threads of one process."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from vectorlm.errors import LaunchError
from vectorlm.ranks import neighbours
from vectorlm.ranks.assembly import assemble, send
from vectorlm.ranks.neighbours import Neighbours
from vectorlm.ranks.node import Node


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def nodes(port, num_nodes):
    return [Node(rank, num_nodes, 2, "127.0.0.1", port) for rank in range(num_nodes)]


def outcome(node, timeout_s):
    try:
        return assemble(node, timeout_s)
    except LaunchError as error:
        return str(error)


def all_outcomes(places, timeout_s):
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(lambda node: outcome(node, timeout_s), places))


def knock(port, message):
    """Connect to node 0 as soon as it listens, say something and hang up."""
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(message)
            return
        time.sleep(0.05)


def test_nodes_that_come_in_any_order_agree_on_the_run(port):
    first, *others = nodes(port, 3)
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(assemble, node, 30.0) for node in others]
        time.sleep(0.5)
        zero = assemble(first, 30.0)
        one, two = (each.result() for each in early)
    assert zero.run_id == one.run_id == two.run_id
    assert zero.store_port == one.store_port == two.store_port
    assert sorted(zero.links) == [1, 2]
    assert [*one.links, *two.links] == [0, 0]


def test_a_node_that_stays_away_is_named_to_all(port):
    zero, one, _ = nodes(port, 3)
    text = (
        f"node 2 of 3 did not come to rdzv_endpoint=127.0.0.1:{port} within 1 s. Start the same command there, with "
        "its own node_rank."
    )
    assert all_outcomes([zero, one], 1.0) == [text, f"node 0 turned node 1 away: {text}"]


def test_a_node_alone_says_where_it_looked_for_node_0(port):
    text = outcome(nodes(port, 2)[1], 0.5)
    assert text.startswith(
        f"node 1 of 2 could not reach node 0 at rdzv_endpoint=127.0.0.1:{port} within 0.5 s (last"
    )
    assert "refused" in text


def test_a_host_that_nobody_knows_is_an_error(port):
    text = outcome(Node(1, 2, 1, "no-such-host.invalid", port), 0.5)
    assert text.startswith(f"node 1 of 2 could not reach node 0 at rdzv_endpoint=no-such-host.invalid:{port}")


def test_a_port_that_is_taken_is_an_error(port):
    with socket.create_server(("127.0.0.1", port)):
        text = outcome(nodes(port, 2)[0], 1.0)
    assert text == (
        f"node 0 cannot listen at rdzv_endpoint=127.0.0.1:{port}: Address already in use. Name a free port, the same "
        "on every node."
    )


def test_a_node_of_another_run_is_turned_away_and_the_right_one_may_still_come(port):
    zero, one = nodes(port, 2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(assemble, zero, 30.0)
        assert outcome(replace(one, num_ranks=1), 30.0).endswith(
            "came with world_size=2, and node 0 has world_size=4"
        )
        assert assemble(one, 30.0).run_id == waiting.result().run_id


def test_two_nodes_of_the_same_rank_are_not_mistaken_for_two_nodes(port):
    zero, one, _ = nodes(port, 3)
    outcomes = all_outcomes([zero, one, one], 3.0)
    assert sum("two launchers" in text and text.endswith("came as node 1") for text in outcomes[1:]) == 1
    assert outcomes[0].startswith("node 2 of 3 did not come")
    assert "Turned away: two launchers" in outcomes[0]


def test_a_node_that_was_interrupted_may_come_again_and_strangers_do_no_harm(port):
    zero, one, two = nodes(port, 3)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(assemble, zero, 30.0)
        knock(port, b"GET / HTTP/1.1\r\n\r\n")
        knock(port, b"")
        with socket.create_connection(("127.0.0.1", port)) as early:
            link = Connection(early.detach())
            send(link, "hello", {"node_rank": 1, "nnodes": 3, "world_size": 6, "host": "here"})
            time.sleep(0.3)
            link.close()
        pool.submit(assemble, two, 30.0)
        assert assemble(one, 30.0).run_id == waiting.result().run_id


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 1, 0, None), "world_size=0 cannot run: it must be at least 1."),
        ((2, 0, 0, None), "nnodes=0 cannot run"),
        ((3, 2, 0, "a:1"), "world_size=3 cannot be spread over nnodes=2: .* Use 4 or 2."),
        ((1, 2, 0, "a:1"), "world_size=1 cannot be spread over nnodes=2: .* Use 2."),
        ((2, 2, 2, "a:1"), "node_rank=2 is not a node of nnodes=2: it must be 0 to 1."),
        ((2, 2, 0, None), "nnodes=2 needs rdzv_endpoint: the address of node 0 as host:port"),
        ((2, 2, 0, "a:b"), "rdzv_endpoint='a:b' is not an address: it must be host:port"),
        ((2, 2, 0, ":29400"), "rdzv_endpoint=':29400' is not an address"),
        ((2, 2, 0, "a:70000"), "with a port from 1 to 65535"),
    ],
)
def test_an_impossible_place_is_refused(arguments, expected):
    with pytest.raises(LaunchError, match=expected):
        Node.of(*arguments)


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [("first", "first", 29400), ("first:81", "first", 81), ("[::1]:81", "::1", 81), ("[::1]", "::1", 29400)],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint, host, port):
    node = Node.of(4, 2, 1, endpoint)
    assert (node.rank, node.num_ranks, node.world_size, node.host, node.port) == (1, 2, 4, host, port)


class Watch:
    """The nodes of a run in one process, each with its neighbours; `ended` holds those whose ranks were ended."""

    def __init__(self, port, num_nodes):
        self.places = nodes(port, num_nodes)
        self.assemblies = all_outcomes(self.places, 30.0)
        self.ended = [threading.Event() for _ in self.places]
        self.watches = [
            Neighbours(node, assembly, event.set)
            for node, assembly, event in zip(self.places, self.assemblies, self.ended, strict=True)
        ]


def close(watches):
    with ThreadPoolExecutor(len(watches)) as pool:
        list(pool.map(lambda watch: watch.__exit__(None, None, None), watches))


def test_the_first_fault_becomes_every_nodes_cause(port):
    run = Watch(port, 3)
    assert run.watches[2].first_cause("rank 5 raised") == "rank 5 raised"
    assert all(event.wait(5.0) for event in run.ended)
    assert run.watches[1].first_cause("rank 2 lost rank 5") == "rank 5 raised"
    assert run.watches[0].first_cause("rank 0 lost rank 5") == "rank 5 raised"
    close(run.watches)


@pytest.mark.parametrize("own", [0, 1])
def test_a_node_that_breaks_because_another_is_lost_does_not_blame_itself(port, own):
    run = Watch(port, 3)
    # As the kernel does when the launcher is killed.
    run.watches[2]._closing.set()
    run.watches[2]._thread.join()
    run.watches[2]._links[0].close()
    cause = run.watches[own].first_cause("rank 0 lost its connection to rank 4")
    assert cause.startswith("node 2 of 3 (")
    assert ") is gone, and with it ranks 4, 5: its launcher was killed" in cause
    assert run.ended[1 - own].wait(5.0)
    close(run.watches[:2])


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_node_is_lost_after_a_while(port, silent, monkeypatch):
    monkeypatch.setattr(neighbours, "SILENCE_S", 1.5)
    run = Watch(port, 2)
    run.watches[silent]._closing.set()
    assert run.ended[1 - silent].wait(10.0)
    assert f"node {silent} of 2 (" in run.watches[1 - silent].first_cause("?")
    assert "has shown no life for 1.5 s" in run.watches[1 - silent].first_cause("?")
    run.watches[1 - silent].__exit__(None, None, None)


def test_a_run_that_ends_well_ends_quietly(port):
    run = Watch(port, 3)
    time.sleep(3 * neighbours.BEAT_S)
    close(run.watches)
    assert not any(event.is_set() for event in run.ended)
    assert not any(
        assembly.links[rank].closed is False for assembly in run.assemblies for rank in assembly.links
    )
