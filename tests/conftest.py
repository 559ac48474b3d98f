"""Shared by all tests: what they record about exercises never reaches a learner's own file.

One compute thread a process: the workers of pytest-xdist and the ranks already fill the cores.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from course_lib.classroom import journal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

# At import, not in a fixture: the kernels that nbval starts inherit the environment too.
if journal.VARIABLE not in os.environ:
    _folder = tempfile.mkdtemp(prefix="course-progress-")
    os.environ[journal.VARIABLE] = str(Path(_folder) / "progress.json")
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
