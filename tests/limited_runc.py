"""A stand-alone script that calls runc with each container's resource limits lowered to those of this process.

A machine that is itself a container may not raise them, and a container engine asks for higher ones by default.
"""

import json
import os
import resource
import sys
from pathlib import Path

arguments = sys.argv[1:]
if "create" in arguments:
    path = Path(arguments[arguments.index("--bundle") + 1], "config.json")
    config = json.loads(path.read_text())
    for limit in config["process"].get("rlimits", ()):
        hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"], limit["soft"] = min(limit["hard"], hard), min(limit["soft"], hard)
    path.write_text(json.dumps(config))
os.execvp("runc", ["runc", *arguments])
