"""Which process is what to a run, from plain descriptions of processes."""

from __future__ import annotations

from everstep.decide.stack_report import ProcessRole
from everstep.machine.proc import Process
from everstep.machine.stacks.members import Looks, classify

RANK, LAUNCHER, OTHER = ProcessRole.RANK, ProcessRole.LAUNCHER, ProcessRole.OTHER


class Tree:
    """Processes of a run, each with what it looks like."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self.looks: dict[int, Looks] = {}

    def add(
        self,
        pid: int,
        parent: int = 1,
        *,
        line: str = "python train.py",
        session: int = 0,
        rank: int | None = None,
    ) -> None:
        self.processes[pid] = Process(pid, 100 + pid, "S", parent, session or pid, 0)
        words = line.split()
        line_bytes = tuple(word.encode() for word in words)
        self.looks[pid] = Looks(words[0], line_bytes, "python" in line, rank)

    def roles(
        self, leaders: dict[int, int], training: tuple[int, ...] = ()
    ) -> dict[int, tuple[ProcessRole, int | None]]:
        members = classify(self.processes, leaders, training, self.looks.__getitem__)
        return {m.process.pid: (m.role, m.rank) for m in members}


def test_a_rank_its_children_and_its_childrens_children() -> None:
    tree = Tree()
    tree.add(10)
    tree.add(11, 10, session=10)
    tree.add(12, 11, session=10, line="cat")
    tree.add(20)
    assert tree.roles({10: 0, 20: 1}) == {
        10: (RANK, 0),
        11: (OTHER, 0),
        12: (OTHER, 0),
        20: (RANK, 1),
    }


def test_a_shell_above_the_script_is_no_rank() -> None:
    tree = Tree()
    tree.add(10, line="bash -c train")
    tree.add(11, 10, session=10)
    tree.add(12, 11, session=10)
    assert tree.roles({10: 3}) == {10: (LAUNCHER, 3), 11: (RANK, 3), 12: (OTHER, 3)}


def test_the_trainer_librarys_word_counts_most() -> None:
    tree = Tree()
    tree.add(10, line="python launcher.py")
    tree.add(11, 10, session=10)
    assert tree.roles({10: 3}, (11,)) == {10: (LAUNCHER, 3), 11: (RANK, 3)}


def test_a_torchrun_within_the_run_gives_out_ranks_of_its_own() -> None:
    tree = Tree()
    tree.add(10, line="python -m torch.distributed.run train.py")
    for rank in range(2):
        tree.add(11 + rank, 10, session=10, rank=rank)
    tree.add(20, 12, session=10, rank=1)
    assert tree.roles({10: 0}) == {
        10: (LAUNCHER, 0),
        11: (RANK, 0),
        12: (RANK, 1),
        20: (OTHER, 1),
    }


def test_orphans_belong_to_the_rank_of_their_session_or_environment() -> None:
    tree = Tree()
    tree.add(10)
    tree.add(30, 1, session=10)
    tree.add(31, 1, rank=0)
    tree.add(32, 1)
    assert tree.roles({10: 0}) == {10: (RANK, 0), 30: (OTHER, 0), 31: (OTHER, 0), 32: (OTHER, None)}


def test_a_rank_without_python_is_what_was_started() -> None:
    tree = Tree()
    tree.add(10, line="sh -c train")
    tree.add(11, 10, session=10, line="train-in-rust")
    assert tree.roles({10: 0}) == {10: (RANK, 0), 11: (OTHER, 0)}


def test_parents_that_go_in_circles_end() -> None:
    """Pids that are reused while we read can look like this."""
    tree = Tree()
    tree.add(10, 11)
    tree.add(11, 10)
    assert set(tree.roles({10: 0})) == {10, 11}
