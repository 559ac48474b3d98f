"""The trainer: every part of the course assembled into one program.

Read `step` first (what is done to the model, and one training step), then `loop` (a whole run),
`settings` (its configuration), `directory` (where it writes), `resume` (going on with an earlier
one) and `metrics` (what it reports). `export` hands a finished run to transformers.
"""
