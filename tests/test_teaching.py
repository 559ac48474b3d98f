"""show, predict, expect_failure, the progress file and the figures."""

import json
import linecache
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass

import pytest

import course_lib.classroom as classroom
from course_lib import training
from course_lib.classroom import expect_failure, figures, journal, predict, progress, show, syllabus
from course_lib.classroom.learner import learners_line
from course_lib.classroom.teaching import tidy


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    path = tmp_path / "own" / "progress.json"
    monkeypatch.setenv(journal.VARIABLE, str(path))
    return path


# The package


def test_importing_the_classroom_is_cheap():
    code = (
        "import sys, course_lib.classroom as c; from course_lib.classroom import check, predict\n"
        "print([m for m in ('torch', 'matplotlib', 'IPython', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_public_names_exist_and_others_do_not():
    for name in classroom.__all__:
        assert callable(getattr(classroom, name)), name
        assert name in dir(classroom)
    with pytest.raises(AttributeError, match="chek"):
        classroom.chek  # noqa: B018


# show


def test_show_prints_the_source_and_its_file(capsys):
    show(syllabus.load)
    said = capsys.readouterr().out
    assert said.startswith("# course_lib/classroom/syllabus.py\ndef load(")
    assert '"""Read a syllabus file' in said


def test_show_names_the_file_of_a_function_not_of_its_decorator(capsys):
    show(training.adamw_update)
    assert capsys.readouterr().out.startswith("# course_lib/training.py\n@torch.no_grad()\ndef ")


def test_show_leaves_out_docstring_and_cuts_what_is_long(capsys):
    show(syllabus.Chapter.filename.fget, docstring=False)
    assert '"""' not in capsys.readouterr().out
    show(syllabus, lines=5)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 7
    assert said[-1].endswith("more lines in course_lib/classroom/syllabus.py")


def test_show_refuses_what_has_no_source():
    with pytest.raises(TypeError, match="give a function, a class or a module") as error:
        show(3)
    assert error.value.__suppress_context__
    with pytest.raises(TypeError) as error:
        show(list(range(10_000)))
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["/tmp/ipykernel_31/2307561919.py", "<ipython-input-4-ab12cd>"])
def test_show_names_no_file_of_a_cell(name, capsys):
    source = "def mine():\n    return 1\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space = {}
    exec(compile(source, name, "exec"), space)
    show(space["mine"], lines=1)
    assert capsys.readouterr().out == (
        "# your notebook\ndef mine():\n# … 1 more lines in your notebook\n"
    )


# predict


def test_no_prediction_goes_on_and_hides_nothing_it_should_not(capsys, file):
    for guess in (None, ..., [..., 3], []):
        prediction = predict("topic/x", guess)
        assert not prediction
        assert prediction.compare(31.6) is None
    said = capsys.readouterr().out
    assert said.count("No prediction yet") == 4
    assert said.index("No prediction yet") < said.index("31.6")
    assert not file.exists()


@pytest.mark.parametrize(
    "guess, measured, right, says",
    [
        (31, 31.6, True, "Right. You predicted 31 %; measured: 31.6 %."),
        (63.2, 31.6, False, "Yours is 2 × the measured value."),
        (10, 30, False, "The measured value is 3 × yours."),
        ([100, 150, 175], [100.0, 150.0, 175.0], True, "Right."),
        ([100, 100, 175], [100.0, 150.0, 175.0], False, "2 of 3 right."),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False, "1 of 2 right."),
        ("Unchanged ", "unchanged", True, "Right."),
        (True, True, True, "Right."),
        (3, [3, 4], False, "not of the same form"),
        ("many", 3, False, "Not quite."),
        (0, 0, True, "Right."),
        (1234567, 1234567, True, "1,234,567"),
        (float("inf"), 3, False, "Not quite."),
        ([10], 10, True, "Right."),
        ((10,), 10, True, "Right."),
        (10, [10.0], True, "Right."),
        ([[10], 20], [10, 20], True, "Right."),
        ({"a": [1]}, {"a": 1}, True, "Right."),
        ([1, 2], 3, False, "You predicted [1 %, 2 %]. Measured: 3 %."),
        ({"a": 1}, 3, False, "You predicted {a: 1 %}. Measured: 3 %."),
        (0.316, 31.6, False, "31.6 %. Yours is 1/100 of the measured value: percent"),
        ([0.1, 0.2], [10, 20], False, "Your wrong ones are 1/100 of the measured value"),
        ({"a": 500, "b": 7}, {"a": 5, "b": 7}, False, "Yours is 100 × the measured value"),
    ],
)
def test_guess_is_judged_in_words(guess, measured, right, says, capsys):
    assert predict("topic/x", guess, unit="%").compare(measured) is right
    assert says in capsys.readouterr().out


def test_percent_is_not_suspected_where_only_some_numbers_fit(capsys):
    predict("topic/x", [0.1, 7]).compare([10, 20])
    predict("topic/x", ["up", 7]).compare(["down", 700])
    assert "percent" not in capsys.readouterr().out


def test_text_where_numbers_are_expected_is_told_so(capsys):
    for guess in ("31.6%", ["31.6%", 2], {"a": "31.6"}):
        assert not predict("topic/x", guess, unit="%")
        assert "give a number without a unit" in capsys.readouterr().out
    for guess, measured in (("31.6%", 31.6), (["10%", 2], [10, 2]), ({"a": "3 MB"}, {"a": 3})):
        assert predict("topic/x", guess).compare(measured) is False
        assert "give a number without a unit" in capsys.readouterr().out
    assert predict("topic/x", "2 ranks").compare("2 ranks")


LETTERS = {"A": "moments lost", "B": "small batch", "C": "small batch"}


@pytest.mark.parametrize(
    "guess, options, says",
    [
        (100, {"of": [2, 4, 8]}, "You predicted 100: give a list of 3, in brackets, for 2, 4, 8"),
        ([100, 150], {"of": [2, 4, 8]}, "You predicted 2 items: give a list of 3"),
        ("100, 150, 175", {"of": [2, 4, 8], "unit": "MB"}, "give a list of 3, in brackets"),
        ("100, 150, 175", {"unit": "MB"}, "give a list in brackets"),
        ({"A": "small batch"}, {"of": "ABC"}, "has nothing for B, C: give one item each for A, B"),
        (LETTERS | {"D": 1}, {"of": "ABC"}, "Your prediction has D too: give one item each"),
        ({"A": "x", "D": 1}, {"of": "AB"}, "has nothing for B and D too: give one item each"),
        (LETTERS | {"B": "small"}, {"of": "ABC", "words": ["small batch", "moments lost"]},
         "You predicted 'small': choose among small batch, moments lost"),
        ("latency latency", {"of": ["1 GbE", "NVLink"]}, "give a list of 2, in brackets"),
        ([1, "latency"], {"words": ["latency"]}, "You predicted 1: choose among latency"),
    ],
)  # fmt: skip
def test_guess_of_another_form_is_not_kept(guess, options, says, capsys):
    assert not predict("topic/x", guess, **options).made
    said = capsys.readouterr().out
    assert says in said
    assert said.endswith("run this cell again.\n")


def test_guess_of_the_right_form_is_kept(capsys):
    words = ["Small batch", "moments lost"]
    assert predict("topic/x", LETTERS, of="ABC", words=words).made
    assert predict("topic/x", (1, 2, 3), of=[2, 4, 8], unit="MB").made
    assert not predict("topic/x", dict.fromkeys("ABC", ...), of="ABC", words=words).made
    assert not predict("topic/x", ..., of="ABC").made
    assert capsys.readouterr().out.count("No prediction yet") == 2


def test_measured_tensor_counts_as_its_number(capsys):
    torch = pytest.importorskip("torch")
    assert predict("topic/x", [1, 2]).compare(torch.tensor([1.0, 2.0]))
    assert predict("topic/x", 3).compare(torch.tensor([3.0]))
    assert predict("topic/x", 3).compare(torch.tensor(3.0))
    assert "measured: 3." in capsys.readouterr().out


def test_tolerance_is_relative():
    assert predict("topic/x", 104).compare(100)
    assert not predict("topic/x", 106).compare(100)
    assert predict("topic/x", 106).compare(100, tolerance=0.1)


def test_function_is_asked_at_hidden_sizes(capsys):
    sizes = [(2, 100), (4, 100), (8, 100)]

    def truth(ranks, size):
        return 2 * size * (ranks - 1) / ranks

    assert predict("topic/f", truth, at=sizes).compare(truth)
    assert "agrees at all 3 sizes" in capsys.readouterr().out
    wrong = predict("topic/f", lambda ranks, size: size, at=sizes, unit="MB")
    assert not wrong.compare([100, 150, 175])
    said = capsys.readouterr().out
    assert "Right at 1 of 3 sizes. At (4, 100) your function gives 100 MB; measured: 150 MB" in said


def test_function_that_is_not_written_or_crashes_is_no_prediction(capsys):
    def stub(n):
        raise NotImplementedError

    def crash(n):
        return 1 / 0

    for function in (stub, crash):
        guess = predict("topic/f", function, at=[2, 4])
        assert guess.compare([31.6, 99]) is None
    said = capsys.readouterr().out
    assert "31.6" not in said, "the stored output must not give the hidden sizes away"
    assert "return 1 / 0" in said


def test_function_in_place_of_a_value_is_no_prediction(capsys):
    assert not predict("topic/f", lambda: 3).made
    assert "a value is asked for: call it" in capsys.readouterr().out


def _takes_two(a, b):
    return a + b


def _divides(n):
    return 1 / 0


def _torch_says(n):
    import torch

    return torch.ones(2, device="meta").item()  # its error may be a NotImplementedError


@pytest.mark.parametrize(
    "function, says",
    [
        (_divides, "raised ZeroDivisionError: division by zero\n  in _divides, line"),
        (_torch_says, "\n  in _torch_says, line"),
        (print, "Your function gave back nothing: use `return`"),
        (lambda n: None if n > 2 else n, "use `return`"),
        (_takes_two, "_takes_two(a, b), but it is called with 1 argument: missing"),
        (lambda: 3, "called with 1 argument: too many positional arguments"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_and_no_placeholder_named(function, says, capsys):
    assert not predict("topic/f", function, at=[2, 4])
    said = capsys.readouterr().out
    assert says in said
    assert "No prediction yet" not in said
    assert said.endswith("run this cell again.\n")


def test_functions_that_are_still_a_placeholder_say_which(capsys):
    predict("topic/f", lambda n: ..., at=[2])
    assert "replace the ..." in capsys.readouterr().out
    pairs = predict("topic/f", lambda n: (n, n), at=[2])
    assert not pairs.compare([(3, 2)])
    assert "Right at 0 of 1 sizes. At 2" in capsys.readouterr().out


def test_first_measured_guess_counts():
    predict("topic/x", 1)
    predict("topic/x", 50).compare(100)
    predict("topic/x", 100).compare(100)
    entry = journal.read()["predictions"]["topic/x"]
    assert entry["first"] == {"guess": 50, "right": False, "error": 0.5}
    assert entry["last"]["right"] is True


# expect_failure


def test_expected_failure_is_shown_and_the_notebook_goes_on(capsys):
    with expect_failure(ValueError, match="does not divide") as failure:
        raise ValueError("3 does not divide 8\n" + "\n".join(str(n) for n in range(30)))
    said = capsys.readouterr().out
    assert said.startswith("As expected, ValueError: 3 does not divide 8\n0\n")
    assert said.endswith("… 11 more lines\n")
    assert isinstance(failure.error, ValueError)


def test_failure_that_does_not_come_is_loud():
    with pytest.raises(AssertionError, match="nothing was raised"):  # noqa: SIM117
        with expect_failure((ValueError, RuntimeError)):
            pass
    with pytest.raises(AssertionError, match="has no 'other'"):  # noqa: SIM117
        with expect_failure(ValueError, match="other"):
            raise ValueError("this")
    with pytest.raises(KeyError):  # noqa: SIM117
        with expect_failure(ValueError):
            raise KeyError("x")


@pytest.mark.trap("ENV-07")
def test_messages_read_the_same_on_every_machine():
    text = "\x1b[31m/home/somebody/course/course_lib/model.py:3\x1b[0m at 0x7f0012345678 1/2 a/b"
    assert tidy(text) == "model.py:3 at 0x… 1/2 a/b"
    for name in ("Cell In[4]", "/tmp/ipykernel_31/227625376.py", "<ipython-input-4-ab12cd>"):
        assert tidy(f'File "{name}", line 3') == 'File "your cell", line 3'


# The progress file


@pytest.mark.trap("ENV-09")
def test_progress_survives_the_session(file):
    code = "from course_lib.classroom import journal; journal.note_exercise('a/1', passed=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert journal.read()["exercises"]["a/1"]["passed"]
    journal.note_exercise("a/1", passed=False)
    assert journal.read()["exercises"]["a/1"] == {
        "attempts": 2,
        "passed": True,
        "hints": 0,
        "solution": False,
    }


def test_notebooks_that_write_at_once_lose_nothing(file):
    code = (
        "import sys; from course_lib.classroom import journal\n"
        "for n in range(25): journal.note_exercise(f'{sys.argv[1]}/{n}', passed=True)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(journal.read()["exercises"]) == 75
    with ThreadPoolExecutor(8) as pool:  # threads of one notebook too
        list(pool.map(lambda n: journal.note_exercise(f"t/{n}", passed=True), range(40)))
    assert len(journal.read()["exercises"]) == 115
    assert sorted(path.name for path in file.parent.iterdir()) == ["progress.json", "progress.lock"]


OURS_DAMAGED = [b'{"exer', b'{\n "exercises": {"a/1', b'{"format": 1, "exercises": 3}']
FOREIGN = [b"\xff\xfe", b"[]", b"root:x:0", b'{"a": 1}', b'{"format": 9}', b"[" * 100_000]


@pytest.mark.parametrize("content", OURS_DAMAGED)
def test_damaged_file_is_set_aside(content, file, capsys):
    for number in (1, 2):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        journal.note_exercise("a/1", passed=True)
        aside = file.with_name(f"progress.damaged-{number}.json")
        assert aside.read_bytes() == content
        assert f"kept as {aside.name}" in capsys.readouterr().out
        assert list(json.loads(file.read_text())["exercises"]) == ["a/1"]


@pytest.mark.parametrize("content", FOREIGN)
def test_what_is_not_plainly_ours_is_left_alone_even_at_our_place(content, file, capsys):
    file.parent.mkdir()
    file.write_bytes(content)
    journal.note_exercise("a/1", passed=True)
    newer = content == b'{"format": 9}'
    words = "written by a newer version" if newer else "is not a progress file of this course"
    assert words in capsys.readouterr().out
    assert journal.read()["exercises"] == {}
    assert file.read_bytes() == content
    assert not list(file.parent.glob("*damaged*"))


@pytest.mark.parametrize("content", OURS_DAMAGED + FOREIGN)
def test_a_path_of_the_caller_is_never_moved_nor_written(content, tmp_path, capsys):
    path = tmp_path / "system"
    path.write_bytes(content)
    progress(path)
    assert "it was left as it is" in capsys.readouterr().out
    assert journal.read(path)["exercises"] == {}
    assert not journal.update(lambda record: None, path)
    assert path.read_bytes() == content
    assert sorted(one.name for one in tmp_path.iterdir()) == ["system", "system.lock"]
    progress(tmp_path)
    assert "is not a file" in capsys.readouterr().out


def test_an_empty_file_of_ours_is_simply_filled(file):
    file.parent.mkdir()
    file.write_bytes(b"\0" * 99)
    journal.note_exercise("a/1", passed=True)
    assert journal.read()["exercises"]["a/1"]["passed"]


def test_bad_entries_are_absent_and_good_ones_are_kept(file, capsys):
    good = {"attempts": 2, "passed": True, "hints": 1, "solution": False}
    first = {"guess": 3, "right": True, "error": 0.0}
    bad = [3, None, [], "x", {}, {"passed": True}, {**good, "hints": "1"}, {**good, "passed": None}]
    bad_guesses = [3, {}, {"first": 3, "last": first}, {"first": {"guess": 3}, "last": first}]
    record = {
        "format": 1,
        "exercises": {"b/1": good} | {f"start-here/{n}": entry for n, entry in enumerate(bad)},
        "predictions": {"y": {"first": first, "last": first}} | dict(enumerate(bad_guesses)),
    }
    file.parent.mkdir()
    file.write_text(json.dumps(record))
    assert journal.read()["exercises"] == {"b/1": good}
    progress(draw=False)
    assert "Predictions: 1 of 1 right" in capsys.readouterr().out
    for n in range(len(bad)):
        journal.note_exercise(f"start-here/{n}", passed=False)
    journal.note_prediction("0", 5)
    assert len(journal.read()["exercises"]) == len(bad) + 1
    assert journal.read()["predictions"].keys() == {"0", "y"}
    file.write_text(json.dumps({"format": 1, "exercises": {"b/1": good}, "predictions": 3}))
    assert journal.read()["exercises"] == {"b/1": good}


def test_full_disk_neither_stops_the_lesson_nor_loses_the_file(file, capsys, monkeypatch):
    journal.note_exercise("a/1", passed=True)
    before = file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "replace", full)
    assert not journal.update(lambda record: record["exercises"].clear())
    assert "could not be saved: No space left on device" in capsys.readouterr().out
    assert file.read_bytes() == before
    assert not list(file.parent.glob("*.tmp"))


def test_progress_file_can_be_kept_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_chosen", None)
    journal.keep_progress_in(tmp_path / "drive")
    journal.note_exercise("a/1", passed=True)
    assert journal.location() == tmp_path / "drive" / "progress.json"
    assert journal.read(tmp_path / "drive" / "progress.json")["exercises"]


def test_progress_tells_what_was_done(capsys, file):
    progress()
    said = capsys.readouterr().out
    assert "Start here" in said
    assert "1 untried" in said
    assert "none measured yet" in said
    journal.note_exercise("start-here/1", passed=True, hints=2)
    predict("topic/x", 110).compare(100)
    predict("topic/y", 100).compare(100)
    capsys.readouterr()
    progress()
    said = capsys.readouterr().out
    assert "1 passed · help used in 1" in said
    assert "Predictions: 1 of 2 right at the first guess, median error 5%" in said
    assert "Figure: 1 of" in said
    assert journal.state_of(journal.read()["exercises"]["start-here/1"]) == "passed (2 hints)"


# Figures


def test_figure_without_its_texts_is_refused():
    fig, ax = figures.subplots()
    ax.plot([1, 2])
    with pytest.raises(ValueError, match="not ready") as error:
        figures.show(fig, alt=" ", finding="")
    for missing in ("alt is empty", "finding is empty", "no title", "no x label", "no y label"):
        assert missing in str(error.value)


def test_ready_figure_prints_its_finding_and_is_closed(capsys):
    import matplotlib.pyplot as plt

    fig, axes = figures.subplots(1, 2, sharey=True)
    figures.stacked_shares(
        axes[0], {"small": {"embedding": 30, "mlp": 70}, "large": {"embedding": 4, "mlp": 96}}
    )
    figures.loss_curves(axes[1], {"one": [3.0, 2.0], "two": [3.0, 1.0]})
    axes[0].set(title="Shares", ylabel="model")
    axes[1].set(title="Losses")
    figures.show(fig, alt="Bars and curves.", finding="The share falls from 30 % to 4 %.")
    assert capsys.readouterr().out == "Figure: The share falls from 30 % to 4 %.\n"
    assert not plt.fignum_exists(fig.number)


def test_every_kind_looks_different_without_colour():
    groups = (
        ["compute", "communication", "idle", "recompute"],
        ["parameters", "gradients", "optimizer", "activations", "buffers"],
        ["embedding", "attention", "mlp", "head", "norms"],
    )
    assert sum(map(len, groups)) == len(figures.KINDS)
    for group in groups:
        looks = [figures.KINDS[kind] for kind in group]
        assert len({look.hatch for look in looks}) == len(looks)
        assert len({look.marker for look in looks}) == len(looks)
    assert len({look.colour for look in figures.KINDS.values()}) == len(figures.KINDS)
    assert len({(look.marker, str(look.line)) for look in figures.SERIES}) == len(figures.SERIES)
    with pytest.raises(KeyError, match="known: compute"):
        figures.style("computing")


def test_colours_differ_for_colour_blind_readers():
    """Simulated (Viénot, Brettel, Mollon 1999): neighbours stay apart in CIE L*a*b*."""
    simulations = {
        "protanopia": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
        "deuteranopia": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
    }
    groups = (
        ["compute", "communication", "idle", "recompute"],
        ["parameters", "gradients", "optimizer", "activations", "buffers"],
        ["embedding", "attention", "mlp", "head", "norms"],
    )
    for name, matrix in simulations.items():
        for group in groups:
            labs = {kind: _lab(figures.KINDS[kind].colour, matrix) for kind in group}
            for at, one in enumerate(group):
                for two in group[at + 1 :]:
                    gap = sum((a - b) ** 2 for a, b in zip(labs[one], labs[two])) ** 0.5
                    assert gap > 12, f"{one} and {two} look alike with {name}: {gap:.0f}"


def _lab(colour, matrix):
    rgb = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    r, g, b = (min(1, max(0, sum(m * c for m, c in zip(row, linear)))) for row in matrix)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_exit_in_a_prediction_does_not_leave_the_notebook(capsys):
    def answer(n):
        raise SystemExit(3)

    assert not predict("topic/x", answer, at=[2])
    assert "Your function raised SystemExit" in capsys.readouterr().out


def test_a_frozen_dataclass_shows_the_line_that_changed_it():
    @dataclass(frozen=True)
    class Frozen:
        size: int = 1

    with pytest.raises(FrozenInstanceError) as error:
        Frozen().size = 2
    assert "Frozen().size = 2" in learners_line(error.value)
