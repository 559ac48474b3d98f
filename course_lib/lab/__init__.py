"""The rehearsal of the multi-GPU lab: real text, real processes, a proof at every station.

`python -m course_lib.lab` (what `make lab` runs) finds the devices, launches the trainer under
several numbers of processes, compares what must be equal, prints a sample, and writes report.html
(to look at) and report.json (to compare with). Without GPUs it runs on two CPU processes.
"""
