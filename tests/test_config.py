"""Configuration: everything wrong is said at once, with the nearest that is right."""

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

import pytest

from course_lib.config import ConfigError, build, list_keys, load, to_toml
from course_lib.model import ModelConfig
from course_lib.trainer.settings import (
    SECTIONS,
    Config,
    Layout,
    ParallelConfig,
    RunConfig,
    layout_faults,
    load_config,
    make_layout,
)


@dataclass(frozen=True)
class Toy:
    """A section with a field of every kind."""

    count: Annotated[int, "a number of things"] = 3
    rate: Annotated[float, "things a second"] = 0.5
    name: Annotated[str, "of the thing"] = "toy"
    active: Annotated[bool, "whether it moves"] = False
    kind: Annotated[Literal["large", "small"], "its size"] = "small"
    limit: Annotated[int | None, "most things; none: no limit"] = None
    place: Annotated[str | None, "where it is"] = None
    shares: Annotated[dict[str, float], "of what it is made"] = field(default_factory=dict)

    def faults(self) -> list[str]:
        return [] if self.count > 0 else [f"count {self.count} must be positive"]

    @classmethod
    def presets(cls) -> dict[str, "Toy"]:
        return {"many": cls(count=100, name="crowd"), "few": cls(count=2)}


@dataclass(frozen=True)
class Plain:
    """A section without presets or faults of its own."""

    value: Annotated[float, "any"] = 1.0


TOYS = {"toy": Toy, "plain": Plain}


def read(tmp_path, text: str = "", overrides=(), sections=TOYS):
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, list(overrides), sections)


def faults(tmp_path, text: str = "", overrides=()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, overrides)
    for fault in caught.value.faults:
        assert fault in str(caught.value)
    return caught.value.faults


def only_fault(tmp_path, text: str = "", overrides=()) -> str:
    (fault,) = faults(tmp_path, text, overrides)
    return fault


# ------------------------------------------------------------------------------- what is accepted


def test_sections_and_keys_that_are_not_named_have_their_defaults(tmp_path):
    assert read(tmp_path) == {"toy": Toy(), "plain": Plain()}
    assert read(tmp_path, "[toy]\ncount = 4\n")["toy"] == Toy(count=4)


def test_a_whole_number_is_a_number(tmp_path):
    value = read(tmp_path, "[toy]\nrate = 2\n")["toy"].rate
    assert (value, type(value)) == (2.0, float)


def test_a_table_is_written_on_one_line_or_on_its_own(tmp_path):
    wanted = Toy(shares={"red": 1.0, "dark blue": 0.25})
    for text in ('[toy]\nshares = {red = 1, "dark blue" = 0.25}\n',
                 '[toy.shares]\nred = 1\n"dark blue" = 0.25\n'):  # fmt: skip
        assert read(tmp_path, text)["toy"] == wanted


def test_none_is_written_as_a_word(tmp_path):
    given = Toy(limit=5, place="here")
    text = to_toml({"toy": given})
    assert read(tmp_path, text)["toy"] == given
    assert read(tmp_path, text, ["--toy.limit=none", '--toy.place="none"'])["toy"] == Toy()


def test_a_preset_comes_first_and_keys_change_it(tmp_path):
    assert read(tmp_path, '[toy]\npreset = "many"\n')["toy"] == Toy(count=100, name="crowd")
    text = '[toy]\nname = "group"\npreset = "many"\n'
    assert read(tmp_path, text)["toy"] == Toy(count=100, name="group")
    assert read(tmp_path, text, ["--toy.preset=few"])["toy"] == Toy(count=2, name="group")


@pytest.mark.parametrize(
    "override, changes",
    [
        ("--toy.count=7", {"count": 7}),
        ("--toy.rate=1e-3", {"rate": 1e-3}),
        ("--toy.rate=3", {"rate": 3.0}),
        ("--toy.name=runs/a=b c", {"name": "runs/a=b c"}),
        ('--toy.name="7"', {"name": "7"}),
        ("--toy.active=true", {"active": True}),
        ("--toy.kind=large", {"kind": "large"}),
        ("--toy.limit=9", {"limit": 9}),
        ('--toy.shares={red = 2, "a.b/c" = 0.5}', {"shares": {"red": 2.0, "a.b/c": 0.5}}),
        ("--toy.shares={}", {"shares": {}}),
    ],
)
def test_the_command_line_changes_single_keys(tmp_path, override, changes):
    text = '[toy]\ncount = 5\nname = "file"\n'
    got = read(tmp_path, text, [override])["toy"]
    assert got == replace(Toy(count=5, name="file"), **changes)


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[toy]\ncuont = 3\n", "unknown key toy.cuont; did you mean count?"),
        ("[tyo]\ncount = 3\n", "unknown section [tyo]; did you mean toy?"),
        ("[zzzz]\n", "unknown section [zzzz]; known are plain, toy"),
        ("[plain]\nzzzz = 3\n", "unknown key plain.zzzz; known are value"),
        ('[toy]\npreset = "mnay"\n', "toy.preset 'mnay' is unknown; did you mean many?"),
        ("[toy]\npreset = [1]\n", "toy.preset [1] is unknown; known are few, many"),
        ('[plain]\npreset = "many"\n', "unknown key plain.preset; known are value"),
        ('[toy]\nkind = "lrge"\n',
         'toy.kind = "lrge": must be one of large, small; did you mean large?'),
        ("[toy]\nkind = 1\n", "toy.kind = 1: must be one of large, small"),
        ("toy = 3\n", "[toy] is a section; write its keys below it"),
        ("[toy]\ncount = 0\n", "[toy] count 0 must be positive"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_the_nearest_choice(tmp_path, text, expected):
    assert only_fault(tmp_path, text) == expected


@pytest.mark.parametrize(
    "line, expected",
    [
        ("count = true", "toy.count = true: must be a whole number, not bool"),
        ("count = 2.0", "toy.count = 2.0: must be a whole number, not float"),
        ('count = "2"', 'toy.count = "2": must be a whole number, not str'),
        ("limit = true", "toy.limit = true: must be a whole number or none, not bool"),
        ("limit = [1]", "toy.limit = [1]: must be a whole number or none, not list"),
        ("rate = true", "toy.rate = true: must be a number, not bool"),
        ('rate = "fast"', 'toy.rate = "fast": must be a number, not str'),
        ("active = 1", "toy.active = 1: must be true or false, not int"),
        ('active = "true"', 'toy.active = "true": must be true or false, not str'),
        ("name = 7", "toy.name = 7: must be a text, not int"),
        ("kind = true", "toy.kind = true: must be one of large, small"),
        ("shares = 1", "toy.shares = 1: must be a table such as {name = 0.5}, not int"),
        (
            "shares = {a = 1.5, b = true}",
            'toy.shares = {"a": 1.5, "b": true}: b must be a number, not bool',
        ),
    ],
)
def test_a_wrong_type_is_refused(tmp_path, line, expected):
    assert only_fault(tmp_path, f"[toy]\n{line}\n") == expected


@pytest.mark.parametrize(
    "override, expected",
    [
        ("toy.count=5", "argument 'toy.count=5' is not of the form --section.key=value"),
        ("--toy.count", "argument '--toy.count' is not of the form --section.key=value"),
        ("--count=5", "argument '--count=5' is not of the form --section.key=value"),
        ("--tyo.count=5", "unknown section in '--tyo.count=5'; did you mean toy?"),
        ("--toy.cont=5", "unknown key toy.cont; did you mean count?"),
        ("--toy.count=five", 'toy.count = "five": must be a whole number, not str'),
        ("--toy.shares=red", 'toy.shares = "red": must be a table such as {name = 0.5}, not str'),
        ("--toy.count=", 'toy.count = "": must be a whole number, not str'),
    ],
)
def test_a_wrong_argument_is_refused(tmp_path, override, expected):
    assert only_fault(tmp_path, "", [override]) == expected


def test_all_faults_are_found_at_once(tmp_path):
    text = '[toy]\ncount = "x"\nkind = "x"\nrat = 1\n[plain]\nvalue = "x"\n[other]\n'
    found = faults(tmp_path, text, ["--nothing", "--toy.active=yes"])
    for part in ("toy.count", "toy.kind", "toy.rat;", "plain.value", "[other]", "--nothing",
                 "toy.active"):  # fmt: skip
        assert sum(part in fault for fault in found) == 1, part
    assert len(found) == 7


def test_values_are_judged_beside_others_that_do_not_fit(tmp_path):
    assert len(faults(tmp_path, '[toy]\ncount = 0\nkind = "x"\n')) == 2
    assert "toy.count" in only_fault(tmp_path, '[toy]\ncount = "x"\n')
    assert "preset" in only_fault(tmp_path, '[toy]\npreset = "x"\ncount = 0\n')
    found = build_faults({"packing": "pack", "mixture": {"a": -1}})
    assert [sum(part in fault for fault in found) for part in ("packing", "weight")] == [1, 1]


def build_faults(data: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build({"data": data}, SECTIONS)
    return caught.value.faults


@pytest.mark.parametrize(
    "table, also",
    [
        ({"training": {"lr": "oops", "min_lr": 5}}, "min_lr 5.0 is a fraction of lr"),
        ({"training": {"steps": "oops", "decay": 2}}, "decay 2.0 is a share of the steps"),
        ({"model": {"mlp": "oops", "mlp_width": 0}}, "mlp_width 0 must be from 1"),
        ({"model": {"width": "oops", "kv_heads": 3}}, "3 kv_heads do not divide 4 heads"),
    ],
)
def test_a_wrong_type_hides_no_fault_of_another_key(table, also):
    with pytest.raises(ConfigError) as caught:
        build(table, SECTIONS)
    wrong, other = caught.value.faults
    assert '"oops"' in wrong
    assert also in other


@pytest.mark.parametrize(
    "table",
    [
        {"training": {"steps": "oops", "warmup": 200}},  # 200 exceeds the default
        {"model": {"width": "oops", "heads": 3}},  # 3 do not divide the default
        {"model": {"heads": "oops", "kv_heads": 3}},
        {"model": {"heads": "oops", "width": 30}},
    ],
)
def test_a_default_that_nobody_chose_is_no_fault(table):
    with pytest.raises(ConfigError) as caught:
        build(table, SECTIONS)
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize(
    "section, words",
    [
        (RunConfig(keep=1.5, device="tpu"), ("device 'tpu'", "keep 1.5")),
        (ParallelConfig(backend="deepspeed"), ("backend 'deepspeed'",)),
        (ParallelConfig(dp="2"), ("dp '2' must be a whole number",)),
    ],
)
def test_wrong_types_of_sections_that_are_made_in_python_are_found(section, words):
    for word, fault in zip(words, section.faults(), strict=True):
        assert word in fault


def test_an_argument_that_is_not_utf8_is_refused(tmp_path):
    for argument in ("--toy.name=\udcff", "--toy\udcff.name=x"):
        fault = only_fault(tmp_path, "", [argument])
        assert fault.isascii()
        assert fault.endswith("is not UTF-8")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.toml: 1 fault\(s\)\n- cannot be read"):
        load(tmp_path / "missing.toml", [], TOYS)
    assert only_fault(tmp_path, "[toy\n").startswith("cannot be read")
    bad = tmp_path / "latin.toml"
    bad.write_bytes(b'[toy]\nname = "\xe9"\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        load(bad, [], TOYS)


# ------------------------------------------------------------------------------------- round trip


def other(value, hint_name: str):
    """A valid value of the same kind that is not the default."""
    if isinstance(value, bool):
        return not value
    if hint_name == "mixture":
        return {"python-docs": 0.25, "shakespeare": 3.0}
    return {"lr": 1.7e-5, "timeout_s": 1.5e-3}.get(hint_name, value)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_resolved_configuration_reads_back_as_it_was(tmp_path, name):
    kind = SECTIONS[name]
    default = kind()
    given = [default, *getattr(kind, "presets", dict)().values()]
    given.append(replace(default, **{f.name: other(getattr(default, f.name), f.name) for f in
                                     fields(kind)}))  # fmt: skip
    for section in given:
        text = to_toml({name: section})
        assert read(tmp_path, text, sections={name: kind})[name] == section
        assert set(tomllib.loads(text)[name]) == {f.name for f in fields(kind)}


def test_texts_and_numbers_of_every_kind_survive(tmp_path):
    for name in (
        'a "quoted" \\ path',
        "line\nbreak\ttab",
        "莎士比亚",
        "😀",
        "",
        "\x00\x1f\x7f\x85",
    ):
        given = {"toy": Toy(name=name, place=name, shares={name: 0.1}), "plain": Plain()}
        assert read(tmp_path, to_toml(given)) == given
    for value in (1e-30, 1e22, -0.0, 123456789.123456789, math.inf, 5e-324):
        given = {"toy": Toy(rate=value, limit=2**62), "plain": Plain(-value)}
        assert read(tmp_path, to_toml(given)) == given
    assert math.isnan(read(tmp_path, to_toml({"plain": Plain(math.nan)}))["plain"].value)


def test_every_key_of_the_trainer_is_explained():
    for name, kind in SECTIONS.items():
        for line in to_toml({name: kind()}).splitlines():
            assert line in (f"[{name}]", "") or len(line.partition("  # ")[2]) > 8, line
            assert "None" not in line  # the value is written "none"


def test_every_key_is_listed_with_what_it_takes_its_default_and_its_meaning():
    assert list_keys({"toy": Toy}).splitlines() == [
        "[toy]",
        "--toy.preset=few|many                starting point, whose keys the others change",
        "--toy.count=INTEGER                  a number of things (default: 3)",
        "--toy.rate=NUMBER                    things a second (default: 0.5)",
        "--toy.name=TEXT                      of the thing (default: toy)",
        "--toy.active=true|false              whether it moves (default: false)",
        "--toy.kind=large|small               its size (default: small)",
        "--toy.limit=INTEGER|none             most things; none: no limit (default: none)",
        "--toy.place=TEXT|none                where it is (default: none)",
        "--toy.shares={NAME = NUMBER, …}      of what it is made (default: {})",
    ]
    told = list_keys(SECTIONS)
    for name, kind in SECTIONS.items():
        for key in fields(kind):
            assert told.count(f"--{name}.{key.name}=") == 1


# --------------------------------------------------------- the trainer's whole configuration


def trainer_config(**tables) -> Config:
    return Config(**build(tables, SECTIONS))


SIZES = {
    "model": {"context": 32},
    "data": {"sequence_length": 32},
    "training": {"global_batch_tokens": 32 * 12, "micro_batch": 2},
}


@pytest.mark.parametrize("ranks, accumulation", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_sizes_follow_from_the_number_of_processes(ranks, accumulation):
    config = trainer_config(**SIZES)
    assert layout_faults(config, ranks) == []
    assert make_layout(config, ranks) == Layout(ranks, 12, accumulation)


@pytest.mark.trap("ACC-06")
@pytest.mark.parametrize("ranks, use", [(4, "256 or 512"), (5, "320 or 640"), (7, "448")])
def test_a_global_batch_that_leaves_a_tail_is_refused(ranks, use):
    """So every step has its whole global batch, and no tail is dropped or weighted wrongly."""
    (fault,) = layout_faults(trainer_config(**SIZES), ranks)
    assert fault == (
        "training.global_batch_tokens 384 is not a multiple of micro_batch x sequence_length x dp "
        f"= 2 x 32 x {ranks} = {64 * ranks}; use {use}"
    )
    for tokens in use.split(" or "):
        training = {**SIZES["training"], "global_batch_tokens": int(tokens)}
        assert layout_faults(trainer_config(**{**SIZES, "training": training}), ranks) == []


def test_a_layout_of_another_world_size_is_refused():
    config = trainer_config(**SIZES, parallel={"dp": 2})
    assert layout_faults(config, 2) == []
    (fault,) = layout_faults(config, 3)
    assert fault == (
        "parallel.dp 2 needs 2 processes, but there are 3; leave dp out or start 2 processes"
    )


def test_a_sequence_longer_than_the_context_is_refused():
    (fault,) = layout_faults(trainer_config(**{**SIZES, "model": {"context": 31}}), 1)
    assert fault.startswith("data.sequence_length 32 exceeds model.context 31")


def test_layout_faults_are_found_at_once_and_before_anything_starts(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\ncontext = 31\n[data]\nsequence_length = 32\n[parallel]\ndp = 3\n"
                    "[training]\nglobal_batch_tokens = 100\n")  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_config(path, [], world_size=2)
    assert len(caught.value.faults) == 3


def faults_on_two_processes(tmp_path, *overrides) -> list[str]:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.toml", list(overrides), world_size=2)
    return caught.value.faults


FITS = ("--model.context=256",)  # so that the other defaults fit together


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            ("--parallel.dp=3", "--data.sequence_length=999999", "--data.sede=1"),
            ("unknown key data.sede", "parallel.dp 3", "data.sequence_length 999999 exceeds",
             "training.global_batch_tokens 4096"),
        ),
        (("--training.steps=3.5", "--training.micro_batch=3"), ("steps = 3.5", "= 3 x 256 x 2")),
        (("--data.sequence_length=0", "--parallel.dp=-1"), ("sequence_length", "dp must be")),
        (("--training.micro_batch=0", "--parallel.dp=3"), ("micro_batch 0", "parallel.dp 3")),
        (("--model.context=x",), ("model.context",)),
        (("--parallel.dp=x", "--training.micro_batch=3"), ("parallel.dp",)),
        (("--model.preset=x",), ("model.preset",)),
        (("--model.vocab=100", "--training.lr=x"), ("training.lr", "model.vocab 100 is too small")),
        (("--model.vocab=0",), ("vocab 0 must be from 1",)),
    ],
)  # fmt: skip
def test_layout_faults_stand_beside_faults_of_single_keys(tmp_path, overrides, expected):
    found = faults_on_two_processes(tmp_path, *FITS, *overrides)
    for words in expected:
        assert sum(words in fault for fault in found) == 1, (words, found)
    assert len(found) == len(expected), found


def test_a_section_that_is_no_table_hides_nothing_else(tmp_path):
    (tmp_path / "run.toml").write_text("data = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.toml", ["--parallel.dp=3"], world_size=2)
    assert ["[data]" in fault or "parallel.dp 3" in fault for fault in caught.value.faults] == [
        True,
        True,
    ]


def test_presets_of_models_are_offered(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt2"\ncontext = 256\n')
    config, layout = load_config(path, ["--model.dropout=0.1"], world_size=2)
    assert config.model == replace(ModelConfig.presets()["gpt2"], context=256, dropout=0.1)
    assert layout == Layout(2, 16, 1)
    path.write_text('[model]\npreset = "gtp2"\n')
    with pytest.raises(ConfigError, match=r"model\.preset 'gtp2' is unknown; did you mean gpt2"):
        load_config(path, [], world_size=1)
