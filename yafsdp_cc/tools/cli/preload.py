"""Module that multiprocessing's fork server imports by its name: it imports all that a rank needs for its first step.

No other process may import this module, as the import makes the process die with its parent. The fork server computes
nothing and uses no GPU, so a fork of it is as good as a new process.
"""

from __future__ import annotations

import os
import signal

import torch._dynamo  # noqa: F401  # the first step of any optimizer imports it

import yafsdp_cc.api
import yafsdp_cc.checkpoint.load
import yafsdp_cc.checkpoint.save
import yafsdp_cc.rescue.rescue
import yafsdp_cc.tools.metrics  # noqa: F401
from yafsdp_cc.tools.cli import runner
from yafsdp_cc.tools.netlab import namespaces

for notice in (*runner.NOTICES, signal.SIGTERM):  # batch systems send these to all processes
    signal.signal(notice, signal.SIG_IGN)
os.setsid()  # leave the terminal's process group: its Ctrl-C is for the launcher and the ranks
namespaces.die_with(os.getppid())
