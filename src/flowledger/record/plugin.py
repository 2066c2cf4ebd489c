"""What a framework imports that looks for plugins by entry point (verl's group `verl.plugins`), in each of its processes.

Where the variables of a run were set too late for the interpreter's start (Ray's runtime_env, on a cluster that runs
already), this is where the process begins to be watched.
"""

import os

from flowledger.record.variables import RUN

if os.environ.get(RUN):
    from flowledger.record.outside import begin

    begin()
