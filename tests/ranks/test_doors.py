"""Network access to a run on one machine: it listens only on the loopback interface and resists strangers."""

import contextlib
import hmac
import itertools
import os
import socket
import stat
import struct
from pathlib import Path
from unittest import mock

import pytest
from kit.open_ports import descendants, listening
from kit.rank_processes import save_tiny_llama

import vectorlm
from vectorlm.errors import LaunchError, RankMismatch
from vectorlm.ranks.collectives import Collectives

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listen(engine, model="scripted"):
    """Let every part of a run open its ports; return the ports on which the run listens."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))
    with vectorlm.SamplingEngine(model, **engine) as running:
        running.sample([[2, 3]], {"max_tokens": 2})
        here = listening(descendants(os.getppid()))
        dist.barrier()
    return here


def outside_address():
    """Return an address of this machine that is not the loopback address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def knock(address):
    """Connect to every port of this run at an address of another interface; return the answers."""
    topology = vectorlm.Topology.from_environment()
    collectives = Collectives(topology, 20.0)
    collectives.all_gather_object("the start")
    answers = []
    for _, port in listening(descendants(os.getppid())):
        try:
            socket.create_connection((address, port), timeout=2).close()
            answers.append("let in")
        except ConnectionRefusedError:
            answers.append("refused")
    collectives.all_gather_object("the end")
    return answers


def rewrite_the_meeting(key):
    """Try to write a stranger's address for rank 1 to every store; return the stores that took it, and a rank sum."""
    import torch
    import torch.distributed as dist

    text = b"".join(struct.pack("<Q", len(part)) + part for part in (key.encode(), b"a stranger's address"))
    # The protocol of torch's store: an identification, a `set`, and a query for the number of keys.
    message = b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + text + b"\7"
    dist.all_reduce(torch.zeros(1))
    took = []
    is_stranger = vectorlm.Topology.from_environment().is_main
    for address in listening(descendants(os.getppid())) if is_stranger else []:
        with socket.create_connection(("127.0.0.1", address[1]), timeout=1) as stranger:
            stranger.sendall(message)
            with contextlib.suppress(OSError):
                took += [address] if stranger.recv(8) else []
    dist.all_reduce(torch.zeros(1))
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group(backend="gloo"))
    return took, int(total)


@pytest.mark.slow
def test_a_stranger_cannot_write_where_the_ranks_meet():
    """gloo connects to the addresses in the store, and torch unpickles data from there."""
    results = vectorlm.launch(rewrite_the_meeting, "/0//cpu//0/1", world_size=2)
    assert results == [([], 2), ([], 2)]


def modes_of_the_meeting():
    """Return the modes of the folders that this run's ranks exchange notes in."""
    Collectives(vectorlm.Topology.from_environment(), 20.0).all_gather_object("the start")
    scratch = Path(os.environ["VECTORLM_SCRATCH"])
    return [stat.S_IMODE(folder.stat().st_mode) for folder in (scratch, *scratch.glob("vectorlm-*"))]


class Bomb:
    """An object that runs a stranger's code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def be_visited(path):
    """Replace the signature of rank 1's next note, as a writer without the run's key would; return rank 0's error."""
    topology = vectorlm.Topology.from_environment()
    collectives = Collectives(topology, 20.0)
    collectives.all_gather_object("the start")
    honest = hmac.digest
    signatures = itertools.chain([b"0" * 32], iter(lambda: None, 0))
    forge = lambda *args: next(signatures) or honest(*args)  # noqa: E731
    note = Bomb(path) if topology.rank == 1 else None
    with mock.patch.object(hmac, "digest", forge if topology.rank == 1 else honest):
        try:
            collectives.all_gather_object("the next place", note)
        except LaunchError as error:
            return str(error)
    return "taken in"


def meet(address, path):
    """Return folder modes, ports, answers of the ports at `address`, and the result of a forged note."""
    modes = modes_of_the_meeting()
    ports = listen({"inference": "vectorlm.sampling.backends.scripted:Scripted", "answers": "{0}".format})
    return modes, ports, knock(address) if address else None, be_visited(path)


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    """Return the results of `meet` by rank, and the path that the stranger's pickle would have touched."""
    address, path = outside_address(), tmp_path_factory.mktemp("met") / "a stranger was here"
    has_outside = address is not None and not address.startswith("127.")
    return vectorlm.launch(meet, address if has_outside else None, path, world_size=2), path


@pytest.mark.slow
def test_the_ranks_meet_in_a_folder_that_only_their_user_can_open(met):
    assert met[0][0][0] == [0o700, 0o700]


@pytest.mark.slow
def test_a_run_on_one_machine_listens_on_the_loopback_interface_alone(met):
    found = met[0][0][1]
    assert {address for address, _ in found} <= set(LOOPBACK), found
    assert found, "two ranks without a port: nothing was looked at"


@pytest.mark.slow
def test_a_stranger_from_another_machine_is_refused(met):
    answers = met[0][0][2]
    if answers is None:
        pytest.skip("this machine has the loopback interface alone")
    assert answers
    assert set(answers) == {"refused"}


def test_a_pickle_of_a_stranger_is_never_loaded(met):
    results, path = met
    for *_, answer in results:
        assert "was not written by a rank of this run" in answer
    assert not path.exists()


def call_differently(gathering_rank):
    topology = vectorlm.Topology.from_environment()
    collectives = Collectives(topology, 20.0)
    try:
        if gathering_rank == topology.rank:
            collectives.all_gather_object("sample")
        else:
            collectives.broadcast_object("update", "weights", root=1 - topology.rank)
    except RankMismatch as error:
        return str(error)


@pytest.mark.slow
def test_ranks_in_different_calls_are_named():
    for other in (0, 1):
        texts = [text for text in vectorlm.launch(call_differently, other, world_size=2) if text]
        assert texts
        for text in texts:
            assert f"rank {other} is in 'sample'" in text
            assert f"rank {1 - other} is in 'update'" in text


@pytest.mark.slow
def test_an_engine_listens_nowhere_either(tmp_path):
    folder = str(save_tiny_llama(tmp_path / "model", hidden_size=64))
    engine = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 16 << 20}
    found = vectorlm.launch(listen, engine, folder, world_size=2)[0]
    assert {address for address, _ in found} <= set(LOOPBACK), found
