"""Handing a run to transformers: the newest checkpoint, its shape and its tokenizer."""

import pytest
import torch

from course_lib import checkpoint
from course_lib.config import load
from course_lib.data import load_tokenizer
from course_lib.mesh import Mesh
from course_lib.model import Transformer, build
from course_lib.parameters import materialise
from course_lib.trainer.export import main
from course_lib.trainer.loop import Trainer
from course_lib.trainer.settings import SECTIONS, load_config

MODELS = {
    "gpt2": 'preset = "tiny"\ndropout = 0.1',
    "llama": 'preset = "tiny-llama"\nkv_heads = 1\nmlp_width = 96',
}


@pytest.fixture(params=MODELS)
def run(request, tmp_path):
    """A finished run of three steps on a small text."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Enter {number} Ghosts, singing. " * 9)
    (tmp_path / "run.toml").write_text(f"""
        [model]
        {MODELS[request.param]}
        vocab = 300
        [data]
        corpus = "{tmp_path / "text"}"
        cache = "{tmp_path / "cache"}"
        sequence_length = 32
        [training]
        steps = 3
        warmup = 1
        lr = 0.02
        global_batch_tokens = 128
        micro_batch = 2
        [run]
        directory = "{tmp_path / "run"}"
        checkpoint_every = 1
    """)
    config, layout = load_config(tmp_path / "run.toml", [], 1)
    assert Trainer(config, layout, Mesh.single()).run() == 0
    return tmp_path / "run"


def trained(run):
    """The run's model, from its newest checkpoint."""
    config = load(run / "config.toml", [], SECTIONS)["model"]
    with torch.device("meta"):
        model = Transformer(config)
    records = materialise(model, Mesh.single(), seed=7)
    checkpoint.load(checkpoint.latest(run / "checkpoints"), records, None, Mesh.single())
    return model.eval()


def test_transformers_loads_a_run_and_gives_the_same_logits(run, tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="needs assets/requirements-peers.txt")
    assert main([str(run), str(tmp_path / "out")]) == 0
    assert "step_3 is written to" in capsys.readouterr().out
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values()), report
    model = trained(run)
    tokens = torch.arange(96).view(3, -1) * 7 % 300
    with torch.no_grad():
        ours, other = model(tokens), theirs.eval()(tokens).logits
    assert ours.std() > 0.1
    assert (ours - other).abs().max() <= 1e-5
    with torch.no_grad():
        assert (build(model.config, seed=0).eval()(tokens) - other).abs().max() > 1e-2

    text = "Enter 3 Ghosts, singing.\n"
    own = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(text)["input_ids"] == list(own.encode(text))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_what_cannot_be_exported_is_told_in_words(run, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main([str(tmp_path / "no run"), out]) == 1
    assert "no checkpoint; name a run's directory" in capsys.readouterr().err
    (tmp_path / "text" / "0.txt").write_text("Another text.")
    assert main([str(run), out]) == 1
    assert "is not what" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([str(run)]) == 2
    assert "usage" in capsys.readouterr().err
