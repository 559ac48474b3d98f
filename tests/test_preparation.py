"""Preparation: from corpora to shards, once, over processes, after any interruption."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from course_lib.data import (
    DataConfig,
    DataError,
    DataWorkerDied,
    TokenShards,
    batch,
    evaluation_batches,
    load_corpus,
    load_tokenizer,
    open_datasets,
    pipeline,
    prepare,
    shards,
    train_tokenizer,
)
from course_lib.data import corpora as corpora_module
from course_lib.data import tokenizer as tokenizer_module
from course_lib.data.pipeline import drawn, splits
from tests import checks_data as checks
from tests import checks_text
from tests.bench import preprocess
from tests.checks_text import configure

ROOT = Path(__file__).parents[1]
TEXTS = [
    "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind\n" * 20,
    "Übung macht den Meister — 练习 🎭\n\n\n   spaces\tand tabs \n" * 20,
]


@pytest.fixture
def texts(tmp_path):
    return checks_text.small_corpus(tmp_path)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


def test_held_out_documents_are_whole_and_never_trained_on(tmp_path):
    checks.check_split(tmp_path)


def test_preparing_twice_finds_the_first_result(texts, monkeypatch):
    config = configure(texts)
    first = prepare(config, 300)
    stamp = (first.sources[0].train / "index.json").stat().st_mtime_ns
    monkeypatch.setattr(tokenizer_module, "train_tokenizer", None)
    assert prepare(config, 300) == first
    assert (first.sources[0].train / "index.json").stat().st_mtime_ns == stamp


def test_preparing_anew_gives_identical_files(texts, tmp_path):
    one = prepare(configure(texts), 300)
    two = prepare(configure(texts, cache=str(tmp_path / "other")), 300)
    assert one.fingerprint == two.fingerprint
    for path in one.directory.rglob("*"):
        if path.is_file():
            assert (
                path.read_bytes() == (two.directory / path.relative_to(one.directory)).read_bytes()
            )


def test_the_fingerprint_changes_with_anything_that_changes_samples(texts):
    base = prepare(configure(texts), 300)
    others = [
        prepare(configure(texts, **change), 300)
        for change in ({"sequence_length": 8}, {"packing": "pad"}, {"seed": 1}, {"held_out": 0.4})
    ]
    others.append(prepare(configure(texts), 301))
    (texts / "1.txt").write_text("A changed document.")
    others.append(prepare(configure(texts), 300))
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 7


def test_the_fingerprint_holds_the_seed_of_the_order_and_the_sources_in_theirs(texts, tmp_path):
    one, two = (prepare(configure(texts, held_out=0.0, seed=seed), 300) for seed in (0, 1))
    assert one.fingerprint != two.fingerprint
    (tmp_path / "other.txt").write_text("Some other text. " * 20)
    names = [str(texts), str(tmp_path / "other.txt")]

    def mixed(mixture: dict) -> str:
        config = DataConfig(mixture=mixture, cache=str(tmp_path / "cache"), held_out=0.0)
        return prepare(config, 300).fingerprint

    equal = mixed({names[0]: 1, names[1]: 1})
    assert equal == mixed({names[0]: 0.5, names[1]: 0.5})
    assert equal != mixed({names[1]: 1, names[0]: 1})
    assert mixed({names[0]: 3, names[1]: 1}) == mixed({names[0]: 6, names[1]: 2}) != equal


def test_every_setting_that_changes_the_text_has_a_result_of_its_own(texts):
    (texts / "copy.txt").write_text((texts / "1.txt").read_text())
    changes = ({}, {"deduplicate": "exact"}, {"deduplicate": "near"}, {"clean": True}, {"seed": 1},
               {"held_out": 0.0})  # fmt: skip
    found = [prepare(configure(texts, **change), 300) for change in changes]
    assert len({prepared.directory for prepared in found}) == len(changes)
    assert [prepared.counts["kept"] for prepared in found[:3]] == [11, 10, 10]


def test_bytes_are_those_of_utf8_and_tokens_those_of_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK", 500)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"Übung {i} 練習\n" * 20)
    prepared = prepare(configure(folder), 300)
    size = sum(path.stat().st_size for path in folder.iterdir())
    sides = [TokenShards(prepared.sources[0].train), TokenShards(prepared.sources[0].held_out)]
    assert all(map(len, sides))
    assert sum(side.text_bytes for side in sides) == size
    assert prepared.counts["tokens"] == sum(map(len, sides))
    assert {prepared.counts[f"bytes_{what}"] for what in ("read", "cleaned", "kept")} == {size}


def test_copies_that_only_cleaning_makes_equal_stay_on_one_side(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        text = " ".join(checks_text.words(30, i))
        (folder / f"{i}.txt").write_text(text)
        (folder / f"{i}-html.txt").write_text(f"<p>{text}</p>")
    prepared = prepare(configure(folder, clean=True, held_out=0.5), 300)
    train, held_out = checks_text.all_texts(prepared)
    assert len(train) + len(held_out) == 120
    assert not set(train) & set(held_out)


def test_a_second_process_waits_for_the_first(texts):
    done = prepare(configure(texts), 300)
    shutil.rmtree(done.directory)
    with done.directory.with_name(f"{done.directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=prepare, args=(configure(texts), 300))
        waiting.start()
        waiting.join(0.5)
        assert not list(done.directory.parent.glob(f"{done.directory.name}*/*"))
    waiting.join(60)
    assert done.directory.is_dir()


def test_two_processes_may_prepare_at_once_without_torch(texts):
    code = (
        "import sys; from course_lib.data import DataConfig, prepare;"
        "c = DataConfig(sys.argv[1], sequence_length=16, held_out=0.2, cache=sys.argv[2]);"
        "print(prepare(c, 300).fingerprint); assert 'torch' not in sys.modules"
    )
    cache = texts.parent / "cache"
    command = [sys.executable, "-c", code, str(texts), str(cache)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert printed == {prepare(configure(texts), 300).fingerprint}
    assert len([path for path in (cache / "prepared").iterdir() if path.is_dir()]) == 1


def test_one_document_is_cut_at_the_end_of_a_line(tmp_path):
    path = tmp_path / "play.txt"
    text = "".join(f"Line {i} of the only play.\n" for i in range(100))
    path.write_text(text)
    prepared = prepare(configure(path, held_out=0.1), 300)
    tokenizer = load_tokenizer(prepared.tokenizer)
    train, held_out = open_datasets(prepared, configure(path))
    (head,) = checks.documents(train.shards, tokenizer)
    (tail,) = checks.documents(held_out.shards, tokenizer)
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.08 < len(tail) / len(text) < 0.12
    assert train.text_bytes + held_out.text_bytes == len(text)


def test_no_held_out_text_is_possible(texts):
    config = configure(texts, held_out=0.0)
    prepared = prepare(config, 300)
    assert prepared.sources[0].held_out is None
    train, held_out = open_datasets(prepared, config)
    assert held_out is None
    assert train.shards.documents == 10


def test_short_held_out_text_is_still_evaluated(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("A long text, longer than the windows are. " * 50)
    config = configure(path, held_out=0.005)
    _, held_out = open_datasets(prepare(config, 300), config)
    assert sum(b.valid for b in evaluation_batches(held_out, 0, 1, 2)) == len(held_out.shards) - 1


def test_the_tokenizer_learns_from_training_text_only(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("king and queen and fool\n" * 40 + "zyzzyva " * 20)
    prepared = prepare(configure(path, held_out=0.15), 400)
    assert "fool" in prepared.tokenizer.read_text()
    assert "zyzzyva" not in prepared.tokenizer.read_text()


def test_documents_that_are_held_out_whole_teach_the_tokenizer_nothing(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        word = "q" + "".join("bdfgklmnpr"[int(digit)] for digit in f"{i:02d}") * 3
        (folder / f"{i}.txt").write_text(f"{word} " * 20)
    prepared = prepare(configure(folder, held_out=0.5), 2000)
    _, held_out = checks_text.all_texts(prepared)
    assert len(held_out) > 10
    learned = prepared.tokenizer.read_text()
    assert not [text for text in held_out if text.split()[0] in learned]


def split_of(texts: list[str], share: float, seed: int) -> list[tuple[str, bool]]:
    """The parts of all texts, each with whether it is held out."""
    draws = [drawn(text, seed) for text in texts]
    out = sum(len(text) for text, draw in zip(texts, draws) if draw < share * 2**64)
    (split,) = splits(share, [(sum(map(len, texts)) - out, out)])
    return [part for text, draw in zip(texts, draws) for part in split.parts(text, draw)]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_about_the_wanted_share_is_held_out_of_any_corpus(share):
    """Many equal documents, few of them, copies only, and one that outweighs the others."""
    many, few = [f"{i} " * 50 for i in range(1000)], ["a " * 500, "b " * 500]
    short = [f"{i}\n" for i in range(5000)]
    for texts in (
        many,
        few,
        ["copy " * 100] * 5,
        ["big " * 10_000, *few],
        ["big " * 4_000, *short],
    ):
        for seed in range(5):
            parts = split_of(texts, share, seed)
            out = sum(len(text) for text, out in parts if out)
            total = sum(len(text) for text in texts)
            assert share / 2 <= out / total <= min(2 * share, 0.9)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize(
    "text",
    [
        "Title\n" + "one long line " * 200,
        "one long line " * 200 + "\nThe end",
        "abcdefgh\n" * 12,
        ("a" * 60 + "\n") * 2,
        "x" * 100,
        "\n" * 99 + "x",
        "a line\n" * 1000,
    ],
)
def test_about_the_wanted_share_is_held_out_of_a_single_text(text, share):
    (head, out), (tail, last) = split_of([text], share, 0)
    assert (head + tail, out, last) == (text, False, True)
    assert share / 2 <= len(tail) / len(text) <= 2 * share
    assert (1 - share) / 2 <= len(head) / len(text)


def test_a_text_of_one_character_is_on_one_side_only():
    assert split_of(["x"], 0.2, 0) == [("x", True)]


def test_of_two_short_lines_something_is_trained_on(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text("abcdefgh\n" * 2)
    config = configure(path, packing="pad")
    train, held_out = open_datasets(prepare(config, 300), config)
    assert len(train.shards) > len(held_out.shards) > 2


def test_a_lost_held_out_folder_is_refused(texts):
    prepared = prepare(configure(texts), 300)
    prepared.sources[0].held_out.rename(texts / "elsewhere")
    with pytest.raises(DataError, match=r"held_out/index\.json is missing"):
        prepare(configure(texts), 300)


def test_a_tokenizer_of_another_corpus_in_the_cache_is_refused(texts):
    prepared = prepare(configure(texts), 300)
    train_tokenizer(TEXTS, 300).save(prepared.tokenizer)
    with pytest.raises(DataError, match=r"tokenizer\.json is not what .*train/index\.json was"):
        prepare(configure(texts), 300)


@pytest.mark.parametrize("name", ["a**b", "x[1]", "what?", "é" * 120])
def test_a_corpus_may_have_any_name(texts, name):
    moved = texts.rename(texts.parent / name)
    prepared = prepare(configure(moved), 300)
    assert open_datasets(prepared, configure(moved))[0].shards.documents > 0


@pytest.mark.parametrize("path", ["", "~nosuch/x", "x" * 300, "/" + "x/" * 3000, "a\0b"])
def test_a_path_that_cannot_be_is_one_plain_fault(path):
    for config in (DataConfig(path), DataConfig("python-docs", path)):
        (fault,) = config.faults()
        assert "nearest: " in fault
        assert "\n" not in fault
    with pytest.raises(DataError, match=r"^corpus = .* nearest: 'shakespeare'$"):
        load_corpus(path)
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_tokenizer(path)
    assert len(DataConfig("python-docs", cache="~nosuch/x").faults()) == 1


def test_a_cache_that_is_no_folder_is_refused_by_name(texts, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for cache in (file, file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(DataError, match=f"the cache {cache}: ") as error:
            prepare(configure(texts, cache=str(cache)), 300)
        assert "\n" not in str(error.value)
        with pytest.raises(DataError, match=f"the cache {cache}: "):
            load_corpus("shakespeare", cache, fallback="python-docs")


@pytest.mark.parametrize("below", ["", "prepared"])
def test_a_cache_without_the_right_to_write_is_refused_by_name(texts, tmp_path, below, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    cache = tmp_path / "cache"
    if below:
        (cache / below).mkdir(parents=True)
        monkeypatch.setattr(Path, "open", refuse)
        monkeypatch.setattr(corpora_module, "_sha256", lambda path: "")
    else:
        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError, match=f"the cache {cache}: .*Permission denied: '{cache}"):
        prepare(configure(texts), 300)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_filled_cache_is_read_without_the_right_to_write(texts, tmp_path):
    prepared = prepare(configure(texts), 300)
    (tmp_path / "cache" / "prepared").chmod(0o500)
    assert prepare(configure(texts), 300) == prepared
    with pytest.raises(DataError, match=r"the cache .*Permission denied"):
        prepare(configure(texts), 301)


def test_damaged_preparation_is_refused_when_it_is_opened(texts):
    config = configure(texts)
    prepared = prepare(config, 300)
    path = prepared.sources[0].train / "tokens-00000.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tokens-00000\.bin was altered between byte 0 and"):
        open_datasets(prepared, config)


def test_all_faults_of_a_configuration_are_named_at_once():
    config = DataConfig("shakespear", "wordpiece", 0, held_out=1.5)
    faults = "\n".join(config.faults())
    for part in ("nearest: 'shakespeare'", "nearest: 'bpe'", "at least 1", "below 1"):
        assert part in faults
    assert len(config.faults()) == 4
    with pytest.raises(ValueError, match=r"\[data\] corpus[\s\S]*\[data\] held_out"):
        prepare(config, 300)
    assert DataConfig().faults() == []


def test_nothing_is_warned_about_in_a_plain_run(texts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = configure(texts)
        train, _ = open_datasets(prepare(config, 300), config)
        batch(train, 0, range(4), 4)


# Processes, interruptions


@pytest.fixture
def messy(tmp_path):
    return checks_text.messy_corpus(tmp_path / "texts")


def small_chunks(monkeypatch):
    monkeypatch.setattr(pipeline, "CHUNK", 4_000)


def test_what_becomes_of_messy_documents_is_counted(messy, monkeypatch):
    small_chunks(monkeypatch)
    prepared = prepare(configure(messy, clean=True, deduplicate="near"), 300)
    checks_text.check_counts(prepared, 60)
    kept = [text for side in checks_text.all_texts(prepared) for text in side]
    assert len(kept) == prepared.counts["kept"]
    assert all(text.endswith(" & so on.") and "<" not in text for text in kept)
    assert sum(len(text.encode()) for text in kept) == prepared.counts["bytes_kept"]


def test_any_number_of_processes_writes_the_same_files(messy, tmp_path, monkeypatch):
    small_chunks(monkeypatch)
    config = configure(messy, clean=True, deduplicate="near")
    alone = prepare(config, 300)
    assert len(list(alone.sources[0].train.glob("tokens-*"))) > 3
    shared = prepare(replace(config, processes=3, cache=str(tmp_path / "other")), 300)
    assert checks_text.files(shared) == checks_text.files(alone)
    assert shared.fingerprint == alone.fingerprint


def test_killed_at_any_moment_it_goes_on_to_the_same_files(messy, tmp_path, monkeypatch):
    """Killed before each file that it opens, names or removes, one moment later each time."""
    small_chunks(monkeypatch)
    config = configure(messy, clean=True, deduplicate="near")
    right = checks_text.files(prepare(replace(config, cache=str(tmp_path / "right")), 300))
    command = [sys.executable, "-c", checks_text.KILLER, str(messy), "1", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert int(result.stdout or 0) > 20, result.stderr
    assert checks_text.files(prepare(config, 300)) == right
    assert [p.name for p in (tmp_path / "cache" / "prepared").iterdir() if "work" in p.name] == []


def test_finished_work_is_not_done_again(messy, monkeypatch):
    small_chunks(monkeypatch)
    config = configure(messy, deduplicate="exact")
    encode, done = pipeline._encode, []

    def interrupted(work, task):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(task[0])
        encode(work, task)

    monkeypatch.setattr(pipeline, "_encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, 300)
    again = []
    monkeypatch.setattr(
        pipeline, "_encode", lambda work, task: again.append(task[0]) or encode(work, task)
    )
    for name in ("_tidy", "train_tokenizer"):
        owner = pipeline if name == "_tidy" else pipeline.tokenizer
        monkeypatch.setattr(owner, name, None)
    prepare(config, 300)
    assert again
    assert not set(again) & set(done)


def test_workers_never_import_torch_whatever_the_caller_did(messy, tmp_path):
    """Neither does a caller without it; and a program needs no `if __name__ == "__main__"`."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from course_lib.data import prepare\n"
        "from course_lib.data.loading import fetch_ahead\n"
        "from tests.checks_text import configure, loaded_torch\n"
        "prepare(configure(Path(sys.argv[1]), processes=2), 300)\n"
        "print(*fetch_ahead(loaded_torch, range(2), 2, 'process'))\n"
    )
    command = [sys.executable, str(program), str(messy)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_a_worker_that_dies_is_named_and_what_is_finished_is_kept(messy, monkeypatch):
    small_chunks(monkeypatch)
    config = configure(messy, processes=2)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_encode", checks_text.die)
        with pytest.raises(DataWorkerDied, match=r"ended by signal 9 .*take fewer data\.processes"):
            prepare(config, 300)
    (work,) = (messy.parent / "cache" / "prepared").glob("*.work")
    assert (work / "tokenizer.json").is_file()
    assert prepare(config, 300).counts["kept"] == 54
    assert not work.exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_preparation_leaves_no_process(tmp_path, how):
    """Ctrl-C ends it in its own way; after SIGKILL the workers find their pipes closed."""
    messy = checks_text.messy_corpus(tmp_path / "texts", documents=600, size=1500)
    code = (
        "import sys; from pathlib import Path; from course_lib.data import pipeline, prepare\n"
        "from tests.checks_text import configure\n"
        "pipeline.CHUNK = 50_000\n"
        "prepare(configure(Path(sys.argv[1]), deduplicate='near', processes=2), 300)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(messy)], cwd=ROOT, stderr=-1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    work = tmp_path / "cache" / "prepared"
    wait_until(lambda: list(work.glob("*.work/*.chunk")))
    workers = children.read_text().split()
    assert len(workers) == 2
    process.send_signal(how)
    process.communicate(timeout=30)
    assert process.returncode != 0
    wait_until(lambda: not [pid for pid in workers if running(pid)])


def wait_until(true, timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_document_longer_than_a_chunk_and_a_shard_is_kept_whole(tmp_path, monkeypatch):
    small_chunks(monkeypatch)
    writer = shards.ShardWriter
    monkeypatch.setattr(shards, "ShardWriter", partial(writer, tokens_per_shard=500))
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = [" ".join(checks_text.words(n, n)) for n in (5, 3_000, 7)]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    prepared = prepare(configure(folder, held_out=0.0), 300)
    assert checks_text.all_texts(prepared) == [texts]
    sizes = [path.stat().st_size for path in prepared.sources[0].train.glob("tokens-*")]
    assert len(sizes) > 5
    assert max(sizes) == 1_000


def test_several_sources_share_a_tokenizer_and_their_duplicates(tmp_path):
    for name, seeds in (("a", range(20)), ("b", range(15, 40))):
        (tmp_path / name).mkdir()
        for seed in seeds:
            text = " ".join(checks_text.words(50, seed))
            (tmp_path / name / f"{seed}.txt").write_text(text)
    weights = {str(tmp_path / "a"): 3.0, str(tmp_path / "b"): 1.0}
    config = DataConfig(mixture=weights, cache=str(tmp_path / "cache"), deduplicate="exact")
    config = replace(config, sequence_length=16)
    prepared = prepare(config, 300)
    assert [(s.name, s.weight) for s in prepared.sources] == [("a", 3.0), ("b", 1.0)]
    assert (prepared.counts["kept"], prepared.counts["exact"]) == (40, 5)
    opened = [TokenShards(source.train) for source in prepared.sources]
    assert opened[0].tokenizer_sha256 == opened[1].tokenizer_sha256
    train, _ = open_datasets(prepared, config)
    assert train.sample(0, 0, 1).valid == 16
    other = replace(config, mixture=dict.fromkeys(weights, 1.0))
    assert prepare(other, 300).directory == prepared.directory
    assert prepare(other, 300).fingerprint != prepared.fingerprint


@pytest.mark.parametrize("lessons", [2_000, 5_000])
def test_the_tokenizer_learns_from_a_bounded_sample(tmp_path, monkeypatch, lessons):
    """Also where the sample is a smaller share of the text than what is held out: 0.1 and 0.2."""
    messy = checks_text.messy_corpus(tmp_path / "texts", documents=200)
    learned = []
    train = pipeline.tokenizer.train_tokenizer

    def spy(texts, vocab):
        learned.append(sum(map(len, texts := list(texts))))
        return train(texts, vocab)

    monkeypatch.setattr(pipeline.tokenizer, "train_tokenizer", spy)
    monkeypatch.setattr(pipeline, "LESSONS", lessons)
    prepare(configure(messy), 300)
    assert lessons / 2 < learned[0] < 2 * lessons
    prepare(configure(messy), 300)
    assert len(learned) == 1


def test_no_text_is_held_out_of_one_source_and_trained_on_in_another(tmp_path):
    """One source has many documents, the other a copy of one of them, which must be cut."""
    texts = ["".join(f"{word}\n" for word in checks_text.words(50, seed)) for seed in range(60)]
    for name, own in (("many", texts), ("one", texts[:1])):
        (tmp_path / name).mkdir()
        for i, text in enumerate(own):
            (tmp_path / name / f"{i}.txt").write_text(text)
    weights = {str(tmp_path / name): 1.0 for name in ("many", "one")}
    prepared = prepare(
        DataConfig(mixture=weights, cache=str(tmp_path / "cache"), held_out=0.2), 300
    )
    many, one = (checks_text.sides(prepared, source) for source in prepared.sources)
    assert set(one[0]) <= set(many[0])
    assert set(one[1]) <= set(many[1])
    assert all((*many, *one))


def test_short_documents_stay_whole_beside_a_source_that_must_be_cut(tmp_path):
    """The source of many also has a copy of the long one, which is cut in both alike."""
    texts = ["\n".join(checks_text.words(10, seed)) for seed in range(900)]
    long = "\n".join(checks_text.words(5000, 999))
    for name, own in (("many", [*texts, long]), ("one", [long])):
        (tmp_path / name).mkdir()
        for i, text in enumerate(own):
            (tmp_path / name / f"{i}.txt").write_text(text)
    weights = {str(tmp_path / name): 1.0 for name in ("many", "one")}
    config = DataConfig(mixture=weights, cache=str(tmp_path / "cache"), held_out=0.2)
    prepared = prepare(replace(config, sequence_length=16), 300)
    many, one = (checks_text.sides(prepared, source) for source in prepared.sources)
    (head,), (tail,) = one
    assert head + tail == long
    assert sorted([*many[0], *many[1]]) == sorted([*texts, head, tail])
    assert head in many[0]
    assert tail in many[1]
    for train, out in (many, one):
        assert 0.1 < len("".join(out)) / len("".join([*train, *out])) < 0.4


# What is left of an interrupted run


def leave_work(config, monkeypatch, step="learn") -> Path:
    """The folder for work of a preparation that was interrupted before a step."""
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, step, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(config, 300)
    (work,) = Path(config.cache, "prepared").glob("*.work")
    return work


@pytest.mark.parametrize("how", ["cut off", "zeroed", "empty"])
@pytest.mark.parametrize("pattern", ["*.chunk", "duplicates.sqlite", "chunks.json"])
def test_damaged_work_is_deleted_with_plain_words(messy, monkeypatch, pattern, how):
    config = configure(messy, deduplicate="near")
    work = leave_work(config, monkeypatch)
    (path,) = work.glob(pattern)
    data = path.read_bytes()
    damaged = {"cut off": data[: len(data) // 2], "zeroed": bytes(len(data)), "empty": b""}[how]
    path.write_bytes(damaged)
    if not (path.suffix == ".sqlite" and how == "empty"):  # the same as none
        with pytest.raises(DataError, match=rf"{work}.* was damaged: .* run it again"):
            prepare(config, 300)
        assert not work.exists()
    assert prepare(config, 300).counts["kept"] == 48


@pytest.mark.parametrize("name", ["result", ".part."])
def test_work_is_kept_when_its_result_cannot_be_put_in_place(messy, monkeypatch, name):
    config, rename = configure(messy), Path.rename

    def full(path, target):
        if name in path.name:
            raise OSError(28, "No space left on device", str(path))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(DataError, match="No space left on device"):
            prepare(config, 300)
    monkeypatch.setattr(pipeline, "_tidy", None)  # all of that is there
    assert prepare(config, 300).counts["kept"] == 54


def test_damaged_counts_are_named(texts):
    prepared = prepare(configure(texts), 300)
    (prepared.directory / "counts.json").write_text("{")
    with pytest.raises(
        DataError, match=rf"counts\.json is damaged: .* Delete {prepared.directory}"
    ):
        prepare(configure(texts), 300)


def test_a_process_loads_the_tokenizer_once_for_all_its_chunks(messy, monkeypatch):
    """Each one that is loaded keeps its memory: a gigabyte of text would take one of memory."""
    loads, load = [], pipeline.tokenizer.load_tokenizer

    def counted(path, vocab):
        loads.append(path)
        return load(path, vocab)

    monkeypatch.setattr(pipeline, "CHUNK", 500)
    monkeypatch.setattr(pipeline.tokenizer, "load_tokenizer", counted)
    prepare(configure(messy), 300)
    assert len(loads) == 1


def test_memory_stays_bounded(tmp_path):
    """The benchmark's own measurement, on 50 MB with half of its bound."""
    found = preprocess.measure_memory(tmp_path, megabytes=50, processes=2, vocab=400)
    assert found["peak_uss_mb"] < preprocess.BOUND_MB / 2
    assert found["processes_seen"] == 3
    assert found["torch"] is False
