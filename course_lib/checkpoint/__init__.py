"""Checkpoints that any layout can load: saved by boxes, committed by one rename, never unpickled.

A checkpoint must survive what happens to long runs. Another number of GPUs: every tensor is stored
by its name in the plain model, in rectangles of the whole tensor, and a rank cuts what it holds
from the rectangles that are there. A kill in the middle of a save: it is written under another
name, and one rename makes it a checkpoint once all ranks are done. A damaged disk: the manifest
knows the size and sha256 of every file. A file from a stranger: only JSON and safetensors are
read, which cannot run code.

    path = save("run/checkpoints", step, records, optimizer, mesh, {"data_step": 20}, keep=2)
    state = load(latest("run/checkpoints", mesh), records, optimizer, mesh)

Read `manifest` (what is on disk), `saving`, `loading`, in this order; `files` and `errors` are
their tools. `hugging_face` reads and writes the weights of transformers' GPT-2 and Llama.
"""

from course_lib.checkpoint.errors import CheckpointError
from course_lib.checkpoint.loading import load
from course_lib.checkpoint.manifest import Manifest, complete, latest, read_manifest
from course_lib.checkpoint.saving import save

__all__ = ["CheckpointError", "Manifest", "complete", "latest", "load", "read_manifest", "save"]
