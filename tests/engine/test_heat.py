"""What a start was asked for first is read first by the next; a bad file costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.engine.heat import Heat
from freetoken.experts.loading import Job, hottest_first

from .served import Served, text_ids
from .test_early import CPU, SlowFiles


def test_the_newest_order_comes_first_and_other_checkpoints_have_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    heat = Heat(folder, ["m"], 10)
    assert heat.read() == []
    heat.write([3, 1, 4])
    heat.write([1, 5])
    assert heat.read() == Heat(folder, ["m"], 10).read() == [1, 5, 3, 4]
    assert Heat(folder, ["other"], 10).read() == [] and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "7", "[1, 2.0]", "[true]", "[10]", "[-1]", '["1"]', "[" * 9999, "\udcff"]
)
def test_a_file_that_is_not_ours_is_nothing_known(text: str, tmp_path: Path) -> None:
    heat = Heat(tmp_path, ["m"], 10)
    heat.write([1])
    (file,) = tmp_path.iterdir()
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert heat.read() == []
    heat.write([2])
    assert heat.read() == [2]


def test_a_folder_that_cannot_be_written_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    heat = Heat(tmp_path / "file" / "below", ["m"], 10)
    heat.write([1])
    assert heat.read() == []


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(counts=st.lists(st.integers(1, 4), max_size=8), data=st.data())
def test_jobs_are_sorted_by_their_hottest_record_and_none_is_lost(
    counts: list[int], data: st.DataObject
) -> None:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    jobs = [Job(first, count, lambda: None) for first, count in zip(starts, counts, strict=True)]
    order = data.draw(st.lists(st.integers(0, max(sum(counts) - 1, 0)), unique=True))
    found = hottest_first(jobs, order)
    assert sorted(job.first for job in found) == starts
    job_of = {record: job for job in jobs for record in range(job.first, job.first + job.count)}
    hot = list(dict.fromkeys(job_of[record] for record in order if record in job_of))
    cold = [job for job in jobs if job not in hot]
    assert found == hot + cold


def test_a_second_start_reads_first_what_the_first_one_was_asked_for(tmp_path: Path) -> None:
    def start(seconds: float) -> Served:
        options = Options(**CPU, moe_backend="cpu")
        return Served(build(options, early=True, files=SlowFiles(seconds), heat=tmp_path))

    served = start(0.02)
    served.submit("a", text_ids(served.built, 1, 5), 4)
    served.run()
    filling = served.built.filling
    filling.wait()
    filling.stop()
    asked = list(filling.bank.arrivals.asked)
    served.built.close()
    assert 8 < len(asked) < filling.bank.num_layers * filling.bank.num_experts
    again = start(0.0).built
    first = [job.first for job in again.filling._loading._jobs[: len(asked)]]
    again.close()
    assert first == asked
