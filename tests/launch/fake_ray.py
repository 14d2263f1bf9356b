"""Stands in for `megarl.launch.ray_start`: says what Ray says and has processes as Ray has, without its seconds.

FAKE_RAY says how it goes wrong on a rank: `refuse0` to start, be `slow0`, or `die0` a moment after it has started.
"""

import json
import os
import subprocess
import sys
import time

line = sys.stdin.readline()
if not line:
    sys.exit(0)
order = json.loads(line)
mode = os.environ.get("FAKE_RAY", "")
rank = order["arguments"][order["arguments"].index("--labels") + 1].partition("megarl.node-rank=")[2][0]
if mode == f"refuse{rank}":
    sys.stdout.write("no room for the object store\n")
    sys.exit(3)
if mode == f"slow{rank}":
    time.sleep(600)
# one worker that outlives this process if nobody sees to it
subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.2; done"], start_new_session=True)
sys.stdout.write("Ray runtime started.\n")
sys.stdout.flush()
time.sleep(0.5 if mode == f"die{rank}" else 600)
sys.stdout.write("the raylet is dead\n")
sys.exit(1)
