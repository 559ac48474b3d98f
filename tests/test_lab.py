"""The lab: every station on real processes, its report, and what it does when something breaks."""

import json
import re
import sys

import pytest

from course_lib.data import CorpusUnavailable
from course_lib.lab import __main__ as command
from course_lib.lab import stations
from course_lib.lab.report import write_report
from course_lib.lab.stations import Lab, LaunchError, Station


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole lab with a short training station."""
    directory = tmp_path_factory.mktemp("lab") / "lab"
    code = command.main(["--directory", str(directory), "--steps", "6"])
    return code, directory, json.loads((directory / "report.json").read_text())


def test_every_station_passes_and_proves_what_it_says(finished):
    code, _, report = finished
    assert code == 0
    found = {station["name"]: station for station in report["stations"]}
    assert list(found) == ["machine", "agreement", "resume", "training"]
    assert {station["verdict"] for station in found.values()} == {"pass"}
    assert found["agreement"]["figures"]["largest_difference"] <= 1e-10
    assert found["resume"]["figures"]["equal_steps"] == 10
    assert "seconds" not in found["machine"]["figures"]
    assert found["agreement"]["figures"]["seconds"] > 0
    assert found["training"]["figures"]["logged_lines"] == {"1 process": 3, "2 processes": 6}
    assert found["training"]["figures"]["last_loss"] < found["training"]["figures"]["first_loss"]
    assert found["training"]["figures"]["sample"].strip()


def test_the_report_is_one_page_with_described_pictures(finished):
    _, directory, report = finished
    page = (directory / "report.html").read_text()
    assert "4 of 4 stations passed" in page
    pictures = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,[^"]+">', page)
    assert len(pictures) == 2
    assert "<td>tokens per second, median of logged lines</td>" in page
    assert all("Curves" in alt and "training loss" in alt for alt in pictures)
    for station in report["stations"]:
        assert station["finding"].split(":")[0] in page


def test_a_launch_that_fails_fails_its_station_and_the_lab_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stations, "EXACT", {"training_steps": -1})
    lab = Lab(tmp_path, [1, 2], "cpu", "python-docs", 6)
    station = command._attempt(stations.agreement, lab)
    assert station.verdict == "fail"
    assert "steps -1 must be at least 1" in station.finding
    assert "see" in station.finding


def test_losses_that_differ_fail_the_station(tmp_path, monkeypatch):
    def train(self, config, name, ranks, *arguments, **settings):
        directory = tmp_path / name
        directory.mkdir()
        loss = 2.0 if ranks == 1 else 2.0001
        line = json.dumps({"step": 1, "loss": loss}) + "\n"
        (directory / "metrics.jsonl").write_text(line * stations.AGREEMENT_STEPS)
        return directory

    monkeypatch.setattr(Lab, "train", train)
    station = stations.agreement(Lab(tmp_path, [1, 2], "cpu", "python-docs", 6))
    assert station.verdict == "fail"
    assert "within 5.0e-05 of their value (allowed 1e-10)" in station.finding


def test_equal_losses_are_called_equal():
    assert stations.difference(0.0, 1e-10) == "equal to the last bit"


def test_a_stop_that_the_lab_asked_for_calls_for_nobody(tmp_path, capsys):
    code = "print('step 1/2  loss 3'); print('stopped after 1 steps; saved, run it again')"
    stations.run_trainer([sys.executable, "-c", code], {}, 0, tmp_path / "x.log")
    said = capsys.readouterr().out
    assert "stopped after 1 steps; the lab goes on by itself" in said
    assert "run it again" not in said
    assert "run it again" in (tmp_path / "x.log").read_text()


def test_a_failed_station_is_shown_as_failed(tmp_path):
    failed = Station("agreement", "fail", {"largest_difference": 0.5, "free_disk_bytes": 2e6},
                     "losses <differ>")  # fmt: skip
    write_report(tmp_path / "r.html", [failed], {"corpus": "x", "seconds": 1.0})
    page = (tmp_path / "r.html").read_text()
    assert "0 of 1 stations passed" in page
    assert 'class="fail"' in page
    assert "losses &lt;differ&gt;" in page
    assert "2 MB" in page


def test_without_network_the_lab_goes_on_with_other_text_and_says_so(monkeypatch, capsys):
    def refuse(*arguments):
        raise CorpusUnavailable("no network")

    monkeypatch.setattr(command, "load_corpus", refuse)
    assert command.choose_corpus() == "python-docs"
    assert "no network" in capsys.readouterr().out


def test_processes_are_compared_as_far_as_there_are_gpus(monkeypatch):
    for gpus, *chosen in (
        (0, [1, 2], "cpu"), (1, [1, 2], "cpu"), (2, [1, 2], "cuda"), (6, [1, 2, 4], "cuda"),
        (8, [1, 2, 4, 8], "cuda"),
    ):  # fmt: skip
        monkeypatch.setattr(command.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert list(command.choose_processes()) == chosen


def test_an_unexpected_exit_code_shows_the_last_words(tmp_path):
    code = "import sys; print('last words'); sys.exit(3)"
    with pytest.raises(LaunchError, match=r"exit code 3.*(?s:.*)last words"):
        stations.run_trainer([sys.executable, "-c", code], {}, 0, tmp_path / "x.log")


def test_only_a_directory_of_an_earlier_lab_is_emptied(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert command.main(["--directory", str(tmp_path)]) == 2
    assert "not of an earlier lab" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    assert command.main(["--directory", str(tmp_path / "thesis.txt")]) == 2
    command.make_room(tmp_path / "lab")
    (tmp_path / "lab" / "old").write_text("")
    command.make_room(tmp_path / "lab")
    assert [path.name for path in (tmp_path / "lab").iterdir()] == [command.MARKER]
