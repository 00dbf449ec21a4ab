"""A job without torch that still has everything a training job has: for tests that need hundreds.

N ranks mix a state by hashing. In each step every rank's part goes to all others through a hub in
rank 0, over TCP, so a rank that dies breaks the step of all others with an error like gloo's, and a
rank that stands still makes them wait. The end is one number: the hash of all ranks' states, which
is the same however often the job was interrupted, if and only if nobody lost or repeated a step.

Starts in about a tenth of a second. ``../faults.py`` breaks it from outside.

Not here: anything a user should copy. ``../tiny_gpt`` is the example to learn from.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import everstep_trainer
from faults import Faults  # type: ignore[import-not-found]

PIECE_BYTES = 32
_HELLO = struct.Struct("<32sI")


def main() -> int:
    """Count."""
    options = parse_arguments()
    session = everstep_trainer.attach()
    faults = Faults(session.rank)
    mine = hashlib.sha256(f"{options.seed} {session.rank}".encode()).digest()
    first = 0
    restored = session.load()
    if restored is not None:
        first, mine = restored[0] + 1, restored[1]["mine"]
    print(
        f"rank {session.rank} of {session.world_size}: from step {first}, "
        f"generation {session.generation}, {session.start_reason}",
        flush=True,
    )
    ring = Ring(session.rank, session.world_size, options.timeout_s, options.connect_s)
    with contextlib.closing(ring):
        for step in range(first, options.steps):
            began = time.monotonic()
            make_nan = faults.before_step(step)
            everyone = ring.all_gather(mine)
            mine = hashlib.sha256(
                b"".join(everyone) + struct.pack("<QI", step, session.rank)
            ).digest()
            loss = float("nan") if make_nan else 1.0 / (step + 2) + mine[0] / 256000.0
            session.step(step, loss=loss)
            if options.step_log:
                log_step(options.step_log, session, step, mine)
            print(f"step {step} loss {loss:.4f}", flush=True)
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                session.save(step, {"mine": mine, "step": step})
            time.sleep(max(0.0, began + options.step_ms / 1000 - time.monotonic()))
        digest = hashlib.sha256(b"".join(ring.all_gather(mine))).hexdigest()
    print(f"final sha256 {digest}", flush=True)
    if options.out and session.rank == 0:
        write_out(Path(options.out), digest)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=25.0, help="least duration of a step")
    parser.add_argument("--save-every", type=int, default=1, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for a peer")
    parser.add_argument("--connect-s", type=float, default=30.0, help="longest wait at the start")
    parser.add_argument("--out", help="file for the final SHA-256, written by rank 0")
    parser.add_argument("--step-log", help="directory for one JSON line per step and rank")
    return parser.parse_args()


def write_out(path: Path, text: str) -> None:
    """Write a file that is either whole or not there."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="ascii")
    temporary.replace(path)


def log_step(directory: str, session: everstep_trainer.Session, step: int, state: bytes) -> None:
    """Append what this rank computed: the same step must have the same state in every run."""
    line = {"generation": session.generation, "step": step, "state": state.hex()}
    path = Path(directory) / f"rank-{session.rank}.jsonl"
    with path.open("a", encoding="ascii") as file:
        file.write(json.dumps(line) + "\n")


class Ring:
    """All ranks' pieces to all ranks, through rank 0."""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, connect_s: float = 30.0
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._peers: dict[int, socket.socket] = {}
        if world_size == 1:
            return
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        mark = hashlib.sha256(os.environ.get("TORCHELASTIC_RUN_ID", "").encode()).digest()
        if rank == 0:
            self._welcome(address, mark, timeout_s, connect_s)
        else:
            hello = _HELLO.pack(mark, rank)
            self._peers[0] = _join(address, hello, timeout_s, connect_s)

    def all_gather(self, piece: bytes) -> list[bytes]:
        """Everyone's piece, in order of rank."""
        if self._world_size == 1:
            return [piece]
        if self._rank != 0:
            _send(self._peers[0], piece)
            everything = _receive(self._peers[0], PIECE_BYTES * self._world_size)
        else:
            pieces = {0: piece}
            for rank in sorted(self._peers):
                pieces[rank] = _receive(self._peers[rank], PIECE_BYTES)
            everything = b"".join(pieces[rank] for rank in range(self._world_size))
            for rank in sorted(self._peers):
                _send(self._peers[rank], everything)
        return [everything[i : i + PIECE_BYTES] for i in range(0, len(everything), PIECE_BYTES)]

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()

    def _welcome(
        self, address: tuple[str, int], mark: bytes, timeout_s: float, connect_s: float
    ) -> None:
        listener = socket.create_server(address, backlog=self._world_size)
        listener.settimeout(connect_s)
        with listener:
            while len(self._peers) < self._world_size - 1:
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    raise DistStoreError(
                        f"Timed out after {connect_s:g} seconds waiting for clients. "
                        f"{len(self._peers) + 1}/{self._world_size} clients joined."
                    ) from None
                peer.settimeout(timeout_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    theirs, rank = _HELLO.unpack(_receive(peer, _HELLO.size))
                except RuntimeError:
                    peer.close()
                    continue
                if theirs != mark or not 0 < rank < self._world_size or rank in self._peers:
                    peer.close()  # a rank of another run, or nobody we know
                    continue
                self._peers[rank] = peer


class DistStoreError(RuntimeError):
    """Says what torch.distributed says, so that logs are read like those of a real job."""


class DistNetworkError(RuntimeError):
    """The same."""


def _join(
    address: tuple[str, int], hello: bytes, timeout_s: float, connect_s: float
) -> socket.socket:
    give_up = time.monotonic() + connect_s
    while True:
        try:
            peer = socket.create_connection(address, timeout=min(timeout_s, connect_s))
            if peer.getsockname() != peer.getpeername():
                break
            peer.close()  # TCP has connected the free port with itself: nobody listens there yet
        except OSError as error:
            if time.monotonic() > give_up:
                what = "timed out" if isinstance(error, TimeoutError) else "failed to connect"
                raise DistNetworkError(
                    f"The client socket has {what} after {connect_s * 1000:.0f}ms while trying to "
                    f"connect to {address} ({error})."
                ) from None
            time.sleep(0.02)  # rank 0 is not there yet
    peer.settimeout(timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _send(peer, hello)
    return peer


def _send(peer: socket.socket, data: bytes) -> None:
    try:
        peer.sendall(data)
    except TimeoutError:
        raise _timed_out(peer, "send") from None
    except OSError as error:
        raise RuntimeError(f"Write error {_peer_name(peer)}: {error.strerror}") from None


def _receive(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            chunk = peer.recv(count - len(data))
        except TimeoutError:
            raise _timed_out(peer, "recv") from None
        except OSError as error:
            raise RuntimeError(f"Read error {_peer_name(peer)}: {error.strerror}") from None
        if not chunk:
            raise RuntimeError(f"Connection closed by peer {_peer_name(peer)}")
        data += chunk
    return data


def _timed_out(peer: socket.socket, what: str) -> RuntimeError:
    limit_ms = int((peer.gettimeout() or 0) * 1000)
    return RuntimeError(f"Timed out waiting {limit_ms}ms for {what} operation to complete")


def _peer_name(peer: socket.socket) -> str:
    try:
        return _name(peer.getpeername())
    except OSError:
        return "[unknown]"


def _name(address: tuple[str, int]) -> str:
    return f"[{address[0]}]:{address[1]}"


if __name__ == "__main__":
    sys.exit(main())
