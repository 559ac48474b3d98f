"""Set-up: requirement files that agree, a Makefile that installs once, floors that hold."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from course_lib.classroom import colab
from course_lib.classroom.path_figure import write
from course_lib.classroom.syllabus import repository_root

ROOT = repository_root()


def _requirements(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def _versions(name):
    return {r.name.lower().replace("_", "-"): str(r.specifier)[2:] for r in _requirements(name)}


# Requirements


@pytest.mark.parametrize(
    "name", ["requirements.txt", "assets/requirements-test.txt", "assets/requirements-peers.txt"]
)
def test_proven_versions_are_within_the_ranges(name):
    proven = _versions("assets/constraints.txt")
    for requirement in _requirements(name):
        version = proven.get(requirement.name.lower())
        assert version, f"{requirement.name} is not in assets/constraints.txt"
        assert requirement.specifier.contains(version)
        assert "==" not in str(requirement.specifier), "ranges here, versions in constraints.txt"


def test_colab_keeps_its_versions():
    colabs = _versions("assets/constraints-colab.txt")
    for requirement in _requirements("requirements.txt"):
        if requirement.name in colabs:
            assert requirement.specifier.contains(colabs[requirement.name]), requirement


def test_conda_environment_repeats_nothing():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert "-r requirements.txt" in text
    for requirement in _requirements("requirements.txt"):
        assert requirement.name not in text


def test_colab_gets_only_what_is_missing_and_never_its_own_parts(monkeypatch):
    monkeypatch.setattr(colab, "find_spec", lambda name: None)
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    missing = {Requirement(line).name for line in colab.missing_requirements(text)}
    assert missing == {"pandas", "matplotlib", "tokenizers", "safetensors", "tqdm", "cloudpickle"}
    monkeypatch.undo()
    assert colab.missing_requirements(text) == []
    held = [Requirement(line) for line in colab.held_versions()]
    assert {"torch", "numpy", "ipykernel"} <= {r.name for r in held}
    assert not any("+" in str(r.specifier) for r in held)


def test_prepare_does_nothing_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(colab, "find_spec", lambda name: None)
    monkeypatch.setattr(colab, "install", lambda _: pytest.fail("installed outside Colab"))
    colab.prepare()
    assert capsys.readouterr().out == ""


def test_prepare_on_colab_installs_under_constraints(monkeypatch, capsys):
    calls = []

    def record(command, check):
        calls.append((command, Path(command[command.index("-c") + 1]).read_text()))

    monkeypatch.setitem(sys.modules, "google.colab", sys)
    monkeypatch.setattr(colab, "find_spec", lambda name: None if name == "tokenizers" else sys)
    monkeypatch.setattr(colab.subprocess, "run", record)
    colab.prepare()
    ((command, held),) = calls
    assert command[-1].startswith("tokenizers")
    assert "torch==" in held
    assert "Installing tokenizers" in capsys.readouterr().out


# The Makefile


@pytest.fixture
def fresh(tmp_path):
    """A copy of the set-up files, with a pip that only writes down what it is asked to install."""
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "assets", tmp_path / "assets")
    python = tmp_path / "fake-python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python\n'
        "     printf '#!/bin/sh\\n' > .venv/bin/ruff && chmod +x .venv/bin/ruff;;\n"
        '  *" pip "*) echo "$*" >> installed.log;;\n'
        '  *"-m "*) echo "$*" >> ran.log;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    return tmp_path


def _make(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_second_make_installs_nothing(fresh):
    log = fresh / "installed.log"
    assert _make(fresh, "lab", "PYTHON=./fake-python").returncode == 0
    first = log.read_text()
    assert first.count("\n") == 1
    assert "-c assets/constraints.txt -r requirements.txt" in first
    assert "requirements-test" not in first, "the lab needs no test packages"
    assert _make(fresh, "lab", "PYTHON=./fake-python").returncode == 0
    assert log.read_text() == first
    assert _make(fresh, "test", "PYTHON=./fake-python").returncode == 0
    second = log.read_text().removeprefix(first)
    assert second.count("\n") == 1
    assert "-c assets/constraints.txt -r assets/requirements-test.txt" in second
    assert "-r assets/requirements-peers.txt" in second
    for target in ("test", "lint", "notebooks", "lab"):
        assert _make(fresh, target, "PYTHON=./fake-python").returncode == 0
    assert log.read_text() == first + second


def test_changed_requirements_are_installed(fresh):
    _make(fresh, "lab", "PYTHON=./fake-python")
    later = (fresh / ".venv" / ".installed-course").stat().st_mtime + 5
    os.utime(fresh / "requirements.txt", (later, later))
    assert "Installing" in _make(fresh, "lab", "PYTHON=./fake-python").stdout


def test_failed_installation_is_tried_again(fresh):
    broken = (fresh / "fake-python").read_text().replace('echo "$*" >> installed.log', "exit 1")
    (fresh / "fake-python").write_text(broken)
    for _ in range(2):
        run = _make(fresh, "lab", "PYTHON=./fake-python")
        assert run.returncode != 0
        assert "Installing" in run.stdout


@pytest.mark.parametrize("choice", ["PYTHON=/nonexistent/python", "PYTHON=", "PYTHON=false"])
def test_missing_or_old_python_is_explained(fresh, choice):
    run = _make(fresh, "lab", choice)
    assert run.returncode != 0
    assert "needs Python 3.11 or newer" in run.stdout


def test_tests_and_notebooks_share_one_closing_line(fresh):
    _make(fresh, "test", "PYTHON=./fake-python")
    commands = (fresh / "ran.log").read_text().splitlines()
    last = commands[-1]
    assert last.startswith("-m pytest")
    assert last.endswith("tests chapters")
    assert "--nbval " in last
    assert sum("pytest" in command for command in commands) == 1


def test_ci_calls_make_test():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "exec make --no-print-directory test" in (ROOT / ".ci" / "run").read_text()
    for name in ("ci.yml", "weekly.yml"):
        text = (ROOT / ".github" / "workflows" / name).read_text()
        assert "make test" in text or ".ci/run" in text


def test_every_folder_of_the_library_is_a_package():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == ["course_lib*"]
    for path in (ROOT / "course_lib").rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path.parent


def test_path_figure_is_the_one_that_the_code_draws(tmp_path):
    write(tmp_path / "path.svg")
    drawn = _numbers_rounded((tmp_path / "path.svg").read_text())
    assert drawn == _numbers_rounded((ROOT / "assets" / "path.svg").read_text()), (
        "run python -m course_lib.classroom.path_figure"
    )


def _numbers_rounded(svg):
    # Glyph outlines and versions differ between releases of matplotlib; the drawing must not.
    return len(re.findall(r'<g id="patch_\d+">', svg)), len(re.findall(r'<g id="text_\d+">', svg))


# Floors: a module imports only from floors below its own (DESIGN, "Floors")

FLOORS = {
    # It imports nothing of the course, so that every section can use its check of types.
    -1: {"config"},
    0: {"model", "data", "training"},
    1: {"boxes", "collectives", "mesh", "memory"},
    # Still the first floor, but a record says over which axes of a mesh a parameter lies, so it
    # stands on the mesh and on the collectives, and they never on it.
    1.5: {"parameters"},
    2: {
        "data_parallel",
        "tensor_parallel",
        "overlap",
        "activation_checkpointing",
        "gradients",
        "zero",
        "pipeline_parallel",
        "context_parallel",
        "expert_parallel",
        "frontier",
    },
    3: {"engines", "profiling", "checkpoint", "planner", "posttraining"},
    4: {"trainer", "lab"},
}
ASIDE = {"classroom", "oracle"}  # may import anything; only floor 4 may import them
NEIGHBOURS = {"gradients", "overlap"}  # may also import from their own floor
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}


def _imports(path: Path, package: str, is_package: bool) -> set[str]:
    """Return the parts of course_lib that a file imports, also inside functions."""
    names = set()
    parts = package.split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    own = {name.split(".")[1] for name in names if name.startswith("course_lib.")}
    return own


@lru_cache
def _modules() -> dict[str, set[str]]:
    """Return for each part of course_lib (module or package) the parts that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "course_lib").rglob("*.py")):
        inside = path.relative_to(ROOT / "course_lib")
        part = inside.parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        package = ".".join(["course_lib", *inside.with_suffix("").parts]).removesuffix(".__init__")
        found.setdefault(part, set()).update(_imports(path, package, path.stem == "__init__"))
    return {part: imported - {part} for part, imported in found.items()}


def faults_of(modules: dict[str, set[str]]) -> list[str]:
    """Return a sentence for each import that goes up, sideways, or out of the table."""
    faults = []
    for part, imported in modules.items():
        if part in ASIDE:
            continue
        if part not in FLOOR_OF:
            faults.append(f"course_lib/{part} is on no floor; add it to FLOORS")
            continue
        floor = FLOOR_OF[part]
        for other in sorted(imported):
            if other in ASIDE:
                allowed = floor == 4
            else:
                below = FLOOR_OF.get(other, 99) - floor
                allowed = below < 0 or (below == 0 and part in NEIGHBOURS)
            # floor 4 is the roof: the lab starts the trainer
            if not allowed and not (floor == 4 and FLOOR_OF.get(other) == 4):
                faults.append(f"course_lib/{part} (floor {int(floor)}) imports {other}")
    return faults


def test_modules_import_only_from_floors_below():
    assert faults_of(_modules()) == []


@pytest.mark.parametrize(
    "part, other, says",
    [
        ("model", "collectives", "model (floor 0) imports collectives"),
        ("data", "model", "data (floor 0) imports model"),
        ("checkpoint", "trainer", "checkpoint (floor 3) imports trainer"),
        ("parameters", "classroom", "parameters (floor 1) imports classroom"),
        ("gradients", "oracle", "gradients (floor 2) imports oracle"),
        ("tensor_parallel", "zero", "tensor_parallel (floor 2) imports zero"),
        ("novelty", "model", "is on no floor"),
    ],
)
def test_forbidden_import_is_named(part, other, says):
    (fault,) = faults_of({part: {other}})
    assert says in fault


def test_allowed_imports_are_allowed():
    assert not faults_of(
        {"gradients": {"zero", "mesh"}, "lab": {"trainer", "oracle"}, "oracle": {"trainer"}}
    )


def test_imports_are_found_in_every_form(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import course_lib.model\nfrom course_lib import data\nfrom ..mesh import Mesh\n"
        "from .. import config\nfrom . import own\nimport torch\n"
        "def later():\n    from course_lib.trainer import loop\n"
    )
    found = _imports(path, "course_lib.checkpoint.x", False)
    assert found == {"model", "data", "mesh", "config", "trainer", "checkpoint"}


def test_importing_the_course_imports_no_torch():
    code = "import sys, course_lib; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout == "False\n"


def test_no_module_is_longer_than_400_lines():
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in (ROOT / "course_lib").rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long
