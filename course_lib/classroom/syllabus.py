"""The syllabus: what chapters there are, in which order, and where the course lives.

`syllabus.toml` is the only place that knows the order. Everything that shows it (file numbers,
headers, links, the README's table, the progress figure) reads it through `load`.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

TIERS = ("CPU", "1 GPU", "N GPUs")
_REQUIRED = ("topic", "title", "module", "tier", "study_minutes", "run_seconds", "outcome")


@dataclass(frozen=True)
class Chapter:
    """One chapter as the syllabus describes it."""

    number: int
    topic: str
    title: str
    module: str
    tier: str
    study_minutes: int
    run_seconds: int
    outcome: str
    lint: dict = field(default_factory=dict)

    @property
    def filename(self) -> str:
        """The notebook's name: the number orders the folder, the topic never changes."""
        return f"{self.number:02d}_{self.topic.replace('-', '_')}.ipynb"


@dataclass(frozen=True)
class Syllabus:
    """The course: its title, its address and its chapters in order."""

    title: str
    repository: str
    branch: str
    chapters: tuple[Chapter, ...]

    def chapter(self, topic: str) -> Chapter:
        """Return the chapter on `topic`; raise KeyError if there is none."""
        for chapter in self.chapters:
            if chapter.topic == topic:
                return chapter
        raise KeyError(f"no chapter on {topic!r}; topics: {[c.topic for c in self.chapters]}")

    def neighbours(self, chapter: Chapter) -> tuple[Chapter | None, Chapter | None]:
        """Return the chapters before and after, or None at either end."""
        at = self.chapters.index(chapter)
        before = self.chapters[at - 1] if at > 0 else None
        after = self.chapters[at + 1] if at + 1 < len(self.chapters) else None
        return before, after


def repository_root() -> Path:
    """Return the folder that holds course_lib/, chapters/ and README.md."""
    return Path(__file__).resolve().parents[2]


def load(path: Path | None = None) -> Syllabus:
    """Read a syllabus file (default: the one beside this module).

    Raises ValueError that names every entry with a missing, unknown or impossible value.
    """
    path = path or Path(__file__).with_name("syllabus.toml")
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    course, entries = content.get("course", {}), content.get("chapters", [])
    faults = [
        f"[course] {key} is missing"
        for key in ("title", "repository", "branch")
        if not course.get(key)
    ]
    faults += [fault for at, entry in enumerate(entries, 1) for fault in _faults(at, entry)]
    topics = [entry.get("topic") for entry in entries]
    faults += [
        f"topic {topic!r} is used twice"
        for topic in sorted({str(t) for t in topics if topics.count(t) > 1})
    ]
    if faults:
        raise ValueError(f"{path.name}: " + "; ".join(faults))
    chapters = tuple(Chapter(number=at, **entry) for at, entry in enumerate(entries, 1))
    return Syllabus(course["title"], course["repository"].rstrip("/"), course["branch"], chapters)


def _faults(at: int, entry: dict) -> list[str]:
    name = entry.get("topic", f"number {at}")
    faults = [f"chapter {name}: {key} is missing" for key in _REQUIRED if key not in entry]
    faults += [
        f"chapter {name}: unknown key {key!r}; known: {', '.join((*_REQUIRED, 'lint'))}"
        for key in entry
        if key not in (*_REQUIRED, "lint")
    ]
    if entry.get("tier", TIERS[0]) not in TIERS:
        faults.append(f"chapter {name}: tier {entry['tier']!r}; use one of {', '.join(TIERS)}")
    return faults
